//! GUPS on an Opteron, as FreeBSD's superpages were measured on it: the simulator must say what the machine's counters said.
//!
//! The counters cover two passes over the table (HPCC's RandomAccess verifies itself by a second one), so they are halved
//! here. What is left over is said in words at the end of each test.

use wideleaf_policies::PageSize;
use wideleaf_policies::units::Bytes;
use wideleaf_policies::walk::streams::gups;
use wideleaf_policies::walk::{AddressSpace, Counts, Simulator, machine};

/// A row of the measurements: page size, log2 of the table's words, misses an update of one pass, walks that missed the L2
/// a miss.
struct Row {
    page: PageSize,
    log2_words: u32,
    misses: f64,
    l2_misses: f64,
}

fn rows() -> Vec<Row> {
    let lines = include_str!("data/freebsd_gups_misses.csv").lines().skip(1);
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

/// Runs until everything is warm, then counts.
fn simulate(row: &Row, warm_up: usize, updates: usize) -> Counts {
    let words = 1 << row.log2_words;
    let space = AddressSpace::native(Bytes::new(words * 8), row.page);
    let mut simulator = Simulator::new(machine("k8").expect("the Opteron"), space);
    for (n, access) in gups(words, u64::from(row.log2_words)).take(warm_up + updates).enumerate() {
        if n == warm_up {
            simulator.reset_counts();
        }
        simulator.access(access.address, access.is_write);
    }
    simulator.counts().clone()
}

fn compare(warm_up: usize, updates: usize) {
    for row in rows() {
        let counts = simulate(&row, warm_up, updates);
        let misses = counts.data_misses() as f64 / updates as f64;
        let l2_misses = counts.references_missed(2) as f64 / counts.data_misses() as f64;
        let error = misses / row.misses - 1.0;
        println!(
            "{} 2^{}: {misses:.4} misses an update, measured {:.4}, {:+.2} %; {l2_misses:.4} L2 misses a miss, measured {:.4}",
            row.page,
            row.log2_words,
            row.misses,
            error * 100.0,
            row.l2_misses
        );
    }
}

#[test]
fn try_it() {
    compare(200_000, 400_000);
}
