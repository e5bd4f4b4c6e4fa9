//! Speed of the simulator of TLBs and page walks, in accesses per second of one core's CPU time: a guest of 1 GiB and
//! of 1 TiB on machines with two levels of TLB and nested paging.
//!
//! ```text
//!   sparse        CG's product: values and columns in order, random vector parts   at least 60 million per second
//!   gups          random stores, almost each of which walks                        at least 10 million per second
//!   .. in 1 TiB   the same accesses in the last GiB of 1 TiB                     at most 1.3 times the time of 1 GiB
//!   .. tables     without data lines: TLBs, walks and the lines of tables
//!   .. no lines   translation alone: TLBs, walk caches, and the number of entries that walks read
//! ```
//!
//! Walks of accesses over 1 TiB read more entries than walks over 1 GiB, so the simulator has more work. The
//! cost of the size alone is therefore measured with the same accesses in both. `gups over 1 TiB` covers all of
//! it, has no target, and shows the number of entries that its walks read. Targets are judged on the first
//! machine, with all lines. The divisor is CPU time, not the clock's, so that other load on the machine costs
//! only its share of the caches.
//!
//! `cargo bench -p wideleaf-benches --bench walk [-- MILLIONS ROUNDS MACHINES]` (default 10, 5 and all three)

use std::process::ExitCode;
use std::time::Duration;

use wideleaf_benches::cpu::Threads;
use wideleaf_benches::scenario::{self, Arguments, ScenarioError, Waiting};
use wideleaf_benches::spread_median::SpreadMedian;
use wideleaf_measure::figures::{Bar, Figures, Limit};
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_policies::PageSize;
use wideleaf_policies::units::{Bytes, gib};
use wideleaf_simulator::simulator::{Lines, Options};
use wideleaf_simulator::streams::{Access, Sparse, gups};
use wideleaf_simulator::{AddressSpace, Counts, Paging, Simulator, machine};

const MACHINES: [&str; 3] = ["haswell-ep", "skylake-sp", "zen4"];
const SPARSE_MIN: f64 = 60.0;
const GUPS_MIN: f64 = 10.0;
const GROWTH_MAX: f64 = 1.3;

/// Matrix of CG's class B: 75000 rows.
const MATRIX: Sparse = Sparse { rows: 75_000, row_entries: 180 };
const SMALL: Bytes = gib(1);
const LARGE: Bytes = gib(1024);

/// A list of accesses in RAM of a given size.
struct Case {
    name: &'static str,
    ram: Bytes,
    accesses: Vec<Access>,
    options: Options,
}

/// Results of a case, by round.
struct Measured {
    nanoseconds: Vec<f64>,
    counts: Counts,
}

fn main() -> ExitCode {
    scenario::run("walk", measure)
}

fn measure(arguments: &Arguments, waiting: &Waiting) -> Result<Figures, ScenarioError> {
    let (millions, rounds) = (arguments.number::<usize>(0, 10)?, arguments.count(1, 5)?);
    let machines = arguments.number::<usize>(2, MACHINES.len())?;
    let cases = cases(millions.max(1) * 1_000_000);
    let mut rows = Table::new(["machine", "accesses"], ["speed", "time", "walks", "entries read per walk"]);
    let mut bars = Vec::new();
    for (n, name) in MACHINES.into_iter().take(machines.max(1)).enumerate() {
        let mut nanoseconds = Vec::new();
        for case in &cases {
            let measured = repeat(name, case, rounds, waiting)?;
            let (ns, counts) = (median(measured.nanoseconds.clone()), &measured.counts);
            rows.row([
                name.into(),
                case.name.into(),
                Cell::number(1e3 / ns, 1, "million/s"),
                Cell::number(ns, 1, "ns"),
                Cell::number(100.0 * counts.walks() as f64 / counts.accesses as f64, 1, "%"),
                Cell::number(counts.references() as f64 / counts.walks().max(1) as f64, 2, ""),
            ]);
            nanoseconds.push(measured.nanoseconds);
        }
        if n == 0 {
            bars = judge(name, &nanoseconds);
        }
    }
    let title =
        format!("guests of 4 KiB pages over 4 KiB pages, {millions} million accesses, medians of {rounds} rounds");
    Ok(Figures::of(title).table(rows).bars(bars))
}

/// Cases in the order that [`judge`] expects.
fn cases(accesses: usize) -> Vec<Case> {
    let sparse: Vec<Access> = (0..).flat_map(|_| MATRIX.multiply(1)).take(accesses).collect();
    let updates: Vec<Access> = gups(SMALL.get() / 8, 1).take(accesses).collect();
    let moved = |list: &[Access]| -> Vec<Access> {
        let by = LARGE.get() - SMALL.get();
        list.iter().map(|access| Access { address: access.address + by, ..*access }).collect()
    };
    let case = |name, ram, accesses| Case { name, ram, accesses, options: Options::default() };
    let with = |lines| Options { lines, ..Options::default() };
    vec![
        case("sparse in 1 TiB", LARGE, moved(&sparse)),
        case("sparse", SMALL, sparse.clone()),
        case("gups in 1 TiB", LARGE, moved(&updates)),
        case("gups", SMALL, updates.clone()),
        case("gups over 1 TiB", LARGE, gups(LARGE.get() / 8, 1).take(accesses).collect()),
        Case { options: with(Lines::OfTables), ..case("sparse, tables", SMALL, sparse.clone()) },
        Case { options: with(Lines::OfTables), ..case("gups, tables", SMALL, updates.clone()) },
        Case { options: with(Lines::None), ..case("sparse, no lines", SMALL, sparse) },
        Case { options: with(Lines::None), ..case("gups, no lines", SMALL, updates) },
    ]
}

fn judge(name: &str, ns: &[Vec<f64>]) -> Vec<Bar> {
    let [sparse_large, sparse, gups_large, gups, ..] = ns else { unreachable!("nine cases") };
    let speed = |what: &str, ns: &[f64], least: f64| {
        let speed = SpreadMedian::of(ns).map(|ns| 1e3 / ns);
        speed.bar(&format!("{name}, {what}"), 1, "million accesses/s", Limit::AtLeast(least))
    };
    let growth = |what: &str, large: &[f64], small: &[f64]| {
        let what = format!("{name}, {what} in 1 TiB : in 1 GiB");
        SpreadMedian::unpaired_ratio(large, small).bar(&what, 2, "", Limit::AtMost(GROWTH_MAX))
    };
    vec![
        speed("sparse", sparse, SPARSE_MIN),
        speed("gups", gups, GUPS_MIN),
        growth("sparse", sparse_large, sparse),
        growth("gups", gups_large, gups),
    ]
}

/// Runs a new simulator in each round. The first quarter of the accesses warms it.
fn repeat(name: &str, case: &Case, rounds: u32, waiting: &Waiting) -> Result<Measured, ScenarioError> {
    let (machine, thread) = (machine(name).expect("a known machine"), Threads::this_one());
    let (warming, counted) = case.accesses.split_at(case.accesses.len() / 4);
    let mut measured = Measured { nanoseconds: Vec::new(), counts: Counts::default() };
    for _ in 0..rounds {
        waiting.pass(Duration::ZERO)?;
        let space = AddressSpace::nested(case.ram, PageSize::Base4K, PageSize::Base4K, Paging::FOUR_LEVELS);
        let mut simulator = Simulator::with_options(machine, space, case.options);
        simulator.run(warming.iter().copied());
        simulator.reset_counts();
        let began = thread.cpu_use()?;
        simulator.run(counted.iter().copied());
        let took = thread.cpu_use()?.since(began).ran;
        measured.nanoseconds.push(took.as_secs_f64() * 1e9 / counted.len() as f64);
        measured.counts = simulator.counts().clone();
    }
    Ok(measured)
}
