//! GUPS in one and two dimensions on a Cascade Lake: the simulator must agree with the processor's counters of walks.
//!
//! ```text
//!                      1-D            2-D
//!   4K     load + store     load + store + EPT      walk_pending of a touch: cycles of busy page-miss handlers
//!   2M     load + store     load + store + EPT
//! ```
//!
//! A touch is a load and a store to one word of a table of 64 GiB, at random. The one-dimensional rows are shadow
//! paging: the processor walks the shadow tables as it would walk native ones.

use wideleaf_policies::PageSize;
use wideleaf_policies::units::{Bytes, gib};
use wideleaf_simulator::machine::high;
use wideleaf_simulator::streams::gups;
use wideleaf_simulator::{AddressSpace, Machine, Paging, Simulator, machine};

const TABLE: Bytes = gib(64);
/// Touches that warm the caches: the last one is full after 300,000.
const WARMING: usize = 400_000;
const COUNTED: usize = 250_000;

/// Cycles of walks of a touch.
#[derive(Clone, Copy)]
struct Walks {
    all: f64,
    host: f64,
}

impl Walks {
    fn share_of_host(self) -> f64 {
        self.host / self.all
    }
}

/// Walks by page size (4K, 2M) and dimensions (1, 2).
type Rows = [[Walks; 2]; 2];

const PAGES: [PageSize; 2] = [PageSize::Base4K, PageSize::Huge2M];

/// The rows with tables on the node of the thread.
fn measured() -> Rows {
    let lines = include_str!("../../../data/published/vmitosis_gups.csv").lines().skip(1);
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 8);
    PAGES.map(|page| {
        ["1", "2"].map(|dimensions| {
            let is_sought = |row: &&Vec<&str>| {
                row[0].eq_ignore_ascii_case(page.name()) && row[2] == dimensions && row[3] == "local"
            };
            let row = rows.iter().find(is_sought).expect("a row of each kind");
            let [load, store, host] = [6, 7, 8].map(|n| row[n].parse::<f64>().expect("a number"));
            Walks { all: load + store + host, host }
        })
    })
}

fn simulated(machine: &Machine) -> Rows {
    PAGES.map(|page| {
        let native = AddressSpace::native(TABLE, page);
        let nested = AddressSpace::nested(TABLE, page, page, Paging::FOUR_LEVELS);
        [native, nested].map(|space| {
            let mut simulator = Simulator::new(machine, space);
            let mut touches = gups(TABLE.get() / 8, 1);
            simulator.run(touches.by_ref().take(WARMING));
            simulator.reset_counts();
            simulator.run(touches.take(COUNTED));
            let counts = simulator.counts();
            let per_touch = |cycles: u64| cycles as f64 / COUNTED as f64;
            Walks { all: per_touch(counts.cycles_of_walks), host: per_touch(counts.cycles_of_host) }
        })
    })
}

/// What is compared: name, value, and the part by which it may differ.
fn figures(rows: &Rows) -> Vec<(&'static str, f64, f64)> {
    let [[native_4k, nested_4k], [native_2m, nested_2m]] = rows.map(|row| row.map(|walks| walks.all));
    vec![
        ("1-D 4K, cycles", native_4k, 0.25),
        ("2-D 4K, cycles", nested_4k, 0.25),
        ("1-D 2M, cycles", native_2m, 0.25),
        ("2-D 2M, cycles", nested_2m, 0.25),
        ("2-D : 1-D, 4K", nested_4k / native_4k, 0.1),
        ("2-D : 1-D, 2M", nested_2m / native_2m, 0.1),
        ("4K : 2M, 1-D", native_4k / native_2m, 0.1),
        ("4K : 2M, 2-D", nested_4k / nested_2m, 0.1),
    ]
}

/// Names of the figures that differ by more than they may. Shares of the host differ by 0.05 at most.
fn misses(simulated: &Rows, measured: &Rows) -> Vec<&'static str> {
    let mut missed = Vec::new();
    for ((name, ours, within), (_, theirs, _)) in figures(simulated).into_iter().zip(figures(measured)) {
        println!("{name}: simulated {ours:.2}, measured {theirs:.2}, {:+.1} %", 100.0 * (ours / theirs - 1.0));
        if (ours / theirs - 1.0).abs() > within {
            missed.push(name);
        }
    }
    for (name, ours, theirs) in
        [("share of EPT, 4K", simulated[0][1], measured[0][1]), ("share of EPT, 2M", simulated[1][1], measured[1][1])]
    {
        let (ours, theirs) = (ours.share_of_host(), theirs.share_of_host());
        println!("{name}: simulated {:.1} %, measured {:.1} %", 100.0 * ours, 100.0 * theirs);
        if (ours - theirs).abs() > 0.05 {
            missed.push(name);
        }
    }
    missed
}

fn skylake() -> Machine {
    *machine("skylake-sp").expect("a known machine")
}

#[test]
fn walks_in_one_and_two_dimensions_cost_what_the_counters_of_a_cascade_lake_say() {
    let missed = misses(&simulated(&skylake()), &measured());
    assert!(missed.is_empty(), "too far from the counters: {missed:?}");
}

/// Each mechanism alone: the comparison notices when one is taken away.
#[test]
fn without_the_start_of_a_walk_2m_walks_are_too_short() {
    let machine = Machine { walk_cycles: high(0, "taken away"), ..skylake() };
    let missed = misses(&simulated(&machine), &measured());
    for name in ["1-D 2M, cycles", "4K : 2M, 1-D", "4K : 2M, 2-D"] {
        assert!(missed.contains(&name), "{name} is among the missed: {missed:?}");
    }
}

#[test]
fn without_pairs_of_lines_2m_entries_stay_in_the_l2_more_than_they_do() {
    let machine = Machine { second_cache_completes_pairs: high(false, "taken away"), ..skylake() };
    let missed = misses(&simulated(&machine), &measured());
    assert!(missed.contains(&"4K : 2M, 2-D"), "the ratio is among the missed: {missed:?}");
}
