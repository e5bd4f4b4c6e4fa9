//! GUPS on an Opteron, as in the measurements of FreeBSD's superpages: the simulator must agree with
//! the machine's counters.
//!
//! The counters cover two passes over the table (HPCC's RandomAccess verifies itself by a second one), so misses
//! per update are halved here. The L2's misses are a share of them, so the passes cancel.

use wideleaf_policies::PageSize;
use wideleaf_policies::units::Bytes;
use wideleaf_simulator::streams::{Access, gups};
use wideleaf_simulator::{AddressSpace, Counts, Simulator, machine};

/// A row of the measurements: page size, log2 of the table's words, misses per update of one pass, L2 misses of
/// walks per miss.
struct Row {
    page: PageSize,
    log2_words: u32,
    misses: f64,
    l2_misses: f64,
}

fn rows() -> Vec<Row> {
    let lines = include_str!("../data/freebsd_gups_misses.csv").lines().skip(1);
    let rows: Vec<Row> = lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let number = |n: usize| cells[n].parse::<f64>().expect("a number");
            Row {
                page: if cells[0] == "4KB" { PageSize::Base4K } else { PageSize::Huge2M },
                log2_words: cells[1].parse().expect("a whole number"),
                misses: number(4) / 2.0,
                l2_misses: number(8),
            }
        })
        .collect();
    assert_eq!(rows.len(), 8);
    rows
}

fn simulate(row: &Row, warm_up: usize, updates: usize) -> Counts {
    let words = 1 << row.log2_words;
    let space = AddressSpace::native(Bytes::new(words * 8), row.page);
    let mut simulator = Simulator::new(machine("k8").expect("the Opteron"), space);
    rates(&mut simulator, gups(words, u64::from(row.log2_words)), warm_up, updates)
}

/// Runs until all caches are warm, then counts.
fn rates(
    simulator: &mut Simulator,
    mut stream: impl Iterator<Item = Access>,
    warm_up: usize,
    updates: usize,
) -> Counts {
    stream.by_ref().take(warm_up).for_each(|access| simulator.access(access.address, access.is_write));
    simulator.reset_counts();
    stream.take(updates).for_each(|access| simulator.access(access.address, access.is_write));
    simulator.counts().clone()
}

/// Fails if a rate differs from the measured one by more than the share `within`.
fn assert_near(what: &str, simulated: f64, measured: f64, within: f64) {
    let error = simulated / measured - 1.0;
    println!("{what}: simulated {simulated:.4}, measured {measured:.4}, {:+.2} %", error * 100.0);
    assert!(error.abs() <= within, "{what}: {simulated:.4} is further than {within} from {measured:.4}");
}

/// Compares all eight rows with the measurements.
///
/// The remaining difference in misses is 0.6 to 1.1 % too few in the 4 KiB rows, and +0.4 to -0.9 % in the others.
/// It likely comes from accesses that a stream of updates lacks: initialisation, the program's other pages,
/// interrupts that evict entries, accesses that are replayed after a miss and counted again. The measured 4 KiB
/// rows exceed one miss per update, which no TLB can explain. The remaining difference in L2 misses (4 % too few at
/// 2^25, below 1 % from 2^26 on) likely comes from the true LRU in place of the L2's LRU of pairs, which keeps
/// lines of tables less well when they nearly fit. In the 2 MiB rows 0.3 % are measured and none simulated: the
/// tables are 16 to 128 lines that always stay, so those misses were not the updates'.
fn hold_to_the_measurements(warm_up: usize, updates: usize) {
    for row in rows() {
        let counts = simulate(&row, warm_up, updates);
        let name = format!("{} 2^{}", row.page, row.log2_words);
        let misses = counts.data_misses() as f64 / updates as f64;
        let tests_the_reach = row.page == PageSize::Huge2M && row.log2_words <= 26;
        assert_near(
            &format!("{name}, misses per update"),
            misses,
            row.misses,
            if tests_the_reach { 0.01 } else { 0.02 },
        );

        let l2_misses = counts.references_missed(2) as f64 / counts.data_misses() as f64;
        match row.page {
            PageSize::Base4K => assert_near(&format!("{name}, L2 misses per miss"), l2_misses, row.l2_misses, 0.25),
            _ => assert!(l2_misses < 0.01, "{name}: {l2_misses:.4} L2 misses per miss, measured {:.4}", row.l2_misses),
        }
    }
}

#[test]
fn the_simulated_opteron_misses_as_often_as_the_real_one() {
    hold_to_the_measurements(100_000, 300_000);
}

/// HPCC's number of updates, 4 per word, would be 134 million to 1 billion a row; these are enough for four digits.
#[test]
#[ignore = "20 million updates a row: half a minute when optimised"]
fn the_simulated_opteron_misses_as_often_as_the_real_one_with_many_updates() {
    hold_to_the_measurements(1_000_000, 20_000_000);
}

/// Near the reach the model is tested hardest: tables of half, one, two and four times the memory that
/// the TLB covers.
#[test]
fn a_table_misses_in_the_part_beyond_the_reach() {
    let reach_words = (32 + 512) * 512;
    // With equal numbers of pages and entries, some of the second level's sets have more pages than ways.
    for (quarters, least, most) in [(2, 0.0, 0.0), (4, 0.0, 0.1), (8, 0.48, 0.52), (16, 0.73, 0.77)] {
        let words = reach_words * quarters / 4;
        let space = AddressSpace::native(Bytes::new(words * 8), PageSize::Base4K);
        let mut simulator = Simulator::new(machine("k8").expect("the Opteron"), space);
        let counts = rates(&mut simulator, gups(words, quarters), 50_000, 200_000);
        let misses = counts.data_misses() as f64 / 200_000.0;
        assert!(
            (least..=most).contains(&misses),
            "{quarters} quarters of the reach: {misses:.4}, not {least} to {most}"
        );
    }
}
