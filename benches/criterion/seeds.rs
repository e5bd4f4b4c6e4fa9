//! What others measured with hardware counters, beside what the simulator makes of the same accesses.
//!
//! ```text
//!   gups:log2_words=25…28  ─▶ generated ─┐                       ┌─ 4 KiB ─┐
//!   TRACE …                ─▶ recorded  ─┴─▶ K8, natively, on ───┤         ├──▶ misses, walks that missed the L2 │ measured
//!                                                                └─ 2 MiB ─┘
//! ```
//!
//! GUPS is given by its rates: the counters cover two passes over the table, of which one is simulated, cold at its begin. The
//! other rows need a trace each (`wideleaf trace record npb.cg --class A`). A trace of fewer iterations than the class has is
//! scaled: misses of its phase `compute` times the iterations of the class by those recorded, all other phases once. A trace
//! knows the arena alone: stack, code and the kernel's own misses are in the counters and not in it.
//!
//! A row's direction is whether 2 MiB pages miss more often or less often than 4 KiB ones. K8 has eight entries for them, so that
//! more is no mistake.
//!
//! `cargo bench -p wideleaf-benches --bench seeds [-- UPDATES TRACE …]` (default 16 million updates a table, no trace)

use std::fs::File;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::Cell;
use wideleaf_benches::experiment::{self, Ended, Waiting, bar, number, table};
use wideleaf_policies::walk::streams::gups;
use wideleaf_policies::walk::{AddressSpace, Simulator, machine};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_trace::{TraceError, TraceReader};

const GUPS: &str = include_str!("../data/seeds/freebsd_gups.csv");
const NPB: &str = include_str!("../data/seeds/freebsd_npb.csv");
const SWEEP3D: &str = include_str!("../data/seeds/freebsd_sweep3d.csv");

/// A table's passes that the counters of GUPS cover (HPCC verifies by a second one).
const GUPS_PASSES: f64 = 2.0;

/// The promise.
const GUPS_MISSES_WITHIN: f64 = 0.02;
const RATIO_WITHIN: f64 = 2.0;

/// Misses, and references of their walks that missed the L2.
#[derive(Clone, Copy, Debug, Default)]
struct Misses {
    tlb: f64,
    walk_l2: f64,
}

/// A row of the tables: a program on one page size, the mean of its runs.
struct Measured {
    name: String,
    huge: bool,
    misses: Misses,
}

/// A program, measured and simulated on both page sizes, 4 KiB first.
struct Row {
    name: String,
    scale: String,
    measured: [Option<Misses>; 2],
    simulated: [Misses; 2],
}

fn main() -> ExitCode {
    experiment::run("seeds", |arguments, waiting| {
        let updates = arguments.number(0, 1 << 24)?;
        gups_rows(updates, waiting)?;
        let measured = measured();
        let rows: Vec<Row> = (1..)
            .map_while(|index| arguments.text(index))
            .map(|path| traced_row(path, &measured, waiting))
            .collect::<Result<_, _>>()?;
        if rows.is_empty() {
            println!("\nno trace was named: NPB and Sweep3D are left out");
        } else {
            print_traced(&rows);
        }
        Ok(())
    })
}

fn gups_rows(updates: u64, waiting: &Waiting) -> Result<(), Ended> {
    println!("GUPS, {updates} updates of each table, K8, native; measured: the counters of both passes by two");
    let mut rows = table(&["page", "table", "misses/update", "measured", "error", "walk L2 misses/miss", "measured"]);
    let mut worst: f64 = 0.0;
    for line in GUPS.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let page = page_of(cells[0]);
        let log2_words: u32 = cells[1].parse().expect("a whole number");
        let of_all = parse(cells[3]) * GUPS_PASSES;
        let simulated = simulate_gups(page, log2_words, updates, waiting.flag())?;
        let measured = Misses { tlb: parse(cells[7]) / of_all, walk_l2: parse(cells[8]) / of_all };
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
    let what =
        format!("misses an update within {:.0} % in all rows: {:.2} %", 100.0 * GUPS_MISSES_WITHIN, 100.0 * worst);
    println!("{}", bar(&what, worst <= GUPS_MISSES_WITHIN));
    Ok(())
}

/// Per update. What comes first finds all caches cold: as many updates again are let pass uncounted, a million at most, which
/// fill the L2 many times.
fn simulate_gups(page: PageSize, log2_words: u32, updates: u64, end: &AtomicBool) -> Result<Misses, Ended> {
    let words = 1 << log2_words;
    let mut simulator = simulator(words * 8, page);
    let mut stream = gups(words, u64::from(log2_words));
    stream.by_ref().take(updates.min(1 << 20) as usize).for_each(|it| simulator.access(it.address, it.is_write));
    simulator.reset_counts();
    for (n, access) in stream.take(updates as usize).enumerate() {
        simulator.access(access.address, access.is_write);
        if n % (1 << 20) == 0 && end.load(Ordering::Relaxed) {
            return Err(Ended::Interrupted);
        }
    }
    let Misses { tlb, walk_l2 } = misses(&simulator);
    Ok(Misses { tlb: tlb / updates as f64, walk_l2: walk_l2 / updates as f64 })
}

fn simulator(bytes: u64, page: PageSize) -> Simulator {
    Simulator::new(machine("k8").expect("the Opteron"), AddressSpace::native(Bytes::new(bytes), page))
}

fn misses(simulator: &Simulator) -> Misses {
    let counts = simulator.counts();
    Misses { tlb: counts.data_misses() as f64, walk_l2: counts.references_missed(2) as f64 }
}

/// Every row of NPB and Sweep3D, by the name a trace of it has.
fn measured() -> Vec<Measured> {
    let runs = |text: &'static str| text.lines().skip(1).map(|line| line.split(',').collect::<Vec<_>>());
    let of_npb = runs(NPB).map(|cells| (npb_name(cells[0], cells[1]), cells[2], cells[8], cells[9]));
    let of_sweep3d = runs(SWEEP3D).map(|cells| ("sweep3d 150".to_owned(), cells[1], cells[7], cells[8]));
    let mut rows: Vec<(Measured, f64)> = Vec::new();
    for (name, page, tlb, walk_l2) in of_npb.chain(of_sweep3d) {
        let huge = page_of(page) == PageSize::Huge2M;
        let run = Misses { tlb: parse(tlb), walk_l2: parse(walk_l2) };
        match rows.iter_mut().find(|(row, _)| row.name == name && row.huge == huge) {
            Some((row, runs)) => {
                row.misses.tlb += run.tlb;
                row.misses.walk_l2 += run.walk_l2;
                *runs += 1.0;
            }
            None => rows.push((Measured { name, huge, misses: run }, 1.0)),
        }
    }
    rows.into_iter().map(|(row, runs)| Measured { misses: row.misses.times(1.0 / runs), ..row }).collect()
}

/// `NAS CG`, `A` as `npb.cg A`.
fn npb_name(benchmark: &str, class: &str) -> String {
    format!("npb.{} {class}", benchmark.trim_start_matches("NAS ").to_lowercase())
}

impl Misses {
    fn times(self, factor: f64) -> Misses {
        Misses { tlb: self.tlb * factor, walk_l2: self.walk_l2 * factor }
    }

    fn plus(self, other: Misses) -> Misses {
        Misses { tlb: self.tlb + other.tlb, walk_l2: self.walk_l2 + other.walk_l2 }
    }
}

fn traced_row(path: &str, measured: &[Measured], waiting: &Waiting) -> Result<Row, Ended> {
    let unusable = |error: TraceError| Ended::Skipped(format!("{path}: {error}"));
    let open = || File::open(path).map_err(|error| Ended::Skipped(format!("{path}: {error}")));
    let header = TraceReader::open(open()?).map_err(unusable)?.header().clone();
    let name = match (header.class.as_str(), header.parameters.strip_prefix("n=")) {
        ("", Some(side)) => format!("{} {side}", header.kernel),
        ("", None) => format!("{} {}", header.kernel, header.parameters),
        (class, _) => format!("{} {class}", header.kernel),
    };
    let factor = match (header.iterations, header.class_iterations) {
        (0, _) | (_, 0) => 1.0,
        (run, of_class) => f64::from(of_class) / f64::from(run),
    };
    let mut simulated = [Misses::default(); 2];
    for (place, page) in simulated.iter_mut().zip([PageSize::Base4K, PageSize::Huge2M]) {
        let reader = TraceReader::open(open()?).map_err(unusable)?;
        *place = simulate_trace(reader, page, factor, waiting.flag())?.map_err(unusable)?;
    }
    let of = |huge| measured.iter().find(|row| row.name == name && row.huge == huge).map(|row| row.misses);
    let scale = format!("{} of {}", header.iterations, header.class_iterations);
    Ok(Row { measured: [of(false), of(true)], name, scale, simulated })
}

/// Misses of the whole run, as far as the trace is one.
fn simulate_trace(
    mut reader: TraceReader<File>,
    page: PageSize,
    factor: f64,
    end: &AtomicBool,
) -> Result<Result<Misses, TraceError>, Ended> {
    let mut simulator = simulator(reader.header().arena_bytes, page);
    let (mut sum, mut block) = (Misses::default(), Vec::new());
    loop {
        match reader.next_block(&mut block) {
            Ok(true) => {}
            Ok(false) if reader.totals().is_cut => {
                return Err(Ended::Skipped("a trace that was cut says nothing of a whole run".into()));
            }
            Ok(false) => return Ok(Ok(sum)),
            Err(error) => return Ok(Err(error)),
        }
        simulator.reset_counts();
        block.iter().for_each(|it| simulator.access_repeated(it.address, it.is_write, it.repeats));
        let weight = if reader.phase() == "compute" { factor } else { 1.0 };
        sum = sum.plus(misses(&simulator).times(weight));
        if end.load(Ordering::Relaxed) {
            return Err(Ended::Interrupted);
        }
    }
}

fn print_traced(rows: &[Row]) {
    println!("\nNPB and Sweep3D from traces, K8, native; misses in millions, scaled to the iterations of the class");
    let mut out =
        table(&["program", "iterations", "page", "misses", "measured", "ratio", "walk L2 misses", "measured", "ratio"]);
    for row in rows {
        for (n, page) in ["4k", "2m"].into_iter().enumerate() {
            let (simulated, measured) = (row.simulated[n], row.measured[n]);
            let millions = |misses: f64| number(format!("{:.2}", misses / 1e6));
            let known = |of: fn(&Misses) -> f64| measured.as_ref().map_or_else(|| number("-"), |it| millions(of(it)));
            let ratio = |of: fn(&Misses) -> f64| {
                number(measured.as_ref().map_or("-".to_owned(), |it| format!("{:.2}", of(&simulated) / of(it))))
            };
            let of_tlb = [millions(simulated.tlb), known(|it| it.tlb), ratio(|it| it.tlb)];
            let of_walks = [millions(simulated.walk_l2), known(|it| it.walk_l2), ratio(|it| it.walk_l2)];
            let heading = [Cell::new(&row.name), number(&row.scale), Cell::new(page)];
            out.add_row(heading.into_iter().chain(of_tlb).chain(of_walks));
        }
    }
    println!("{out}");
    judge(rows);
}

fn judge(rows: &[Row]) {
    let both = || rows.iter().filter_map(|row| Some((row, [row.measured[0]?, row.measured[1]?])));
    let direction = |misses: &[Misses; 2]| misses[1].tlb > misses[0].tlb;
    let (all, same) = (both().count(), both().filter(|(row, it)| direction(&row.simulated) == direction(it)).count());
    if all == 0 {
        println!("  none of these programs is in the tables: nothing is judged");
        return;
    }
    println!(
        "{}",
        bar(&format!("direction of misses from 4 KiB to 2 MiB as measured: {same} of {all} programs"), same == all)
    );
    let fewer = both().filter(|(row, _)| row.simulated[1].walk_l2 < row.simulated[0].walk_l2).count();
    println!(
        "{}",
        bar(&format!("fewer walk references miss the L2 with 2 MiB: {fewer} of {all} programs"), fewer == all)
    );
    let ratios = both().flat_map(|(row, measured)| {
        row.simulated.into_iter().zip(measured).flat_map(|(s, m)| [s.tlb / m.tlb, s.walk_l2 / m.walk_l2])
    });
    let is_near = |ratio: &f64| (1.0 / RATIO_WITHIN..=RATIO_WITHIN).contains(ratio);
    let ratios: Vec<f64> = ratios.collect();
    let near = ratios.iter().filter(|ratio| is_near(ratio)).count();
    println!("  ratios within a factor of two: {near} of {}", ratios.len());
}

fn page_of(setting: &str) -> PageSize {
    match setting {
        "4KB" => PageSize::Base4K,
        _ => PageSize::Huge2M,
    }
}

fn parse(cell: &str) -> f64 {
    cell.parse().expect("the tables have numbers there")
}
