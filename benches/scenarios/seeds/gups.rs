//! GUPS by misses per update. The published counters cover two passes over the table. One pass is
//! simulated, after a warm-up.

use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::Cell;
use wideleaf_benches::scenario::{Ended, Waiting, bar, number, table};
use wideleaf_policies::PageSize;
use wideleaf_simulator::machine;
use wideleaf_simulator::streams::gups;

use crate::measured::{Misses, page_of, parse};
use crate::simulated::Arm;

const GUPS: &str = include_str!("../../data/published/freebsd_gups.csv");

/// Number of passes over the table in the counters (HPCC verifies in a second pass).
const PASSES: f64 = 2.0;

/// Target of the comparison.
const MISSES_WITHIN: f64 = 0.02;

/// Simulates `updates` of each table, prints all rows and judges them.
pub fn rows(updates: u64, waiting: &Waiting) -> Result<(), Ended> {
    println!("GUPS, {updates} updates of each table, K8, native; measured: half of the counters of both passes");
    let mut rows = table(&["page", "table", "misses/update", "measured", "error", "walk L2 misses/miss", "measured"]);
    let mut worst: f64 = 0.0;
    for line in GUPS.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let page = page_of(cells[0]);
        let log2_words: u32 = cells[1].parse().expect("a whole number");
        let of_all = parse(cells[3]) * PASSES;
        let simulated = simulate(page, log2_words, updates, waiting.flag())?;
        let measured = Misses { tlb: parse(cells[7]), walk_l2: parse(cells[8]) }.times(1.0 / of_all);
        let error = simulated.tlb / measured.tlb - 1.0;
        worst = worst.max(error.abs());
        rows.add_row([
            Cell::new(page),
            number(format!("2^{log2_words}")),
            number(format!("{:.4}", simulated.tlb)),
            number(format!("{:.4}", measured.tlb)),
            number(format!("{:+.2} %", 100.0 * error)),
            number(format!("{:.4}", simulated.walk_l2 / simulated.tlb)),
            number(format!("{:.4}", measured.walk_l2 / measured.tlb)),
        ]);
    }
    println!("{rows}");
    let what = format!("misses an update within {:.0} % in all rows: {:.2} %", 100.0 * MISSES_WITHIN, 100.0 * worst);
    println!("{}", bar(&what, worst <= MISSES_WITHIN));
    Ok(())
}

/// Misses per update. At first all caches are cold, so as many updates again run uncounted before, at most a million.
/// They fill the L2 many times.
fn simulate(page: PageSize, log2_words: u32, updates: u64, end: &AtomicBool) -> Result<Misses, Ended> {
    let words = 1 << log2_words;
    let mut arm = Arm::new(machine("k8").expect("the Opteron"), words * 8, page);
    let mut stream = gups(words, u64::from(log2_words));
    stream.by_ref().take(updates.min(1 << 20) as usize).for_each(|it| arm.access(it));
    arm.forget();
    for (n, access) in stream.take(updates as usize).enumerate() {
        arm.access(access);
        if n % (1 << 20) == 0 && end.load(Ordering::Relaxed) {
            return Err(Ended::Interrupted);
        }
    }
    arm.sum_up(1.0 / updates as f64);
    Ok(arm.sums().misses())
}
