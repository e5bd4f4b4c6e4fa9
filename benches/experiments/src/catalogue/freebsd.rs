//! `freebsd`: NPB, RandomAccess and Sweep3D on base pages and on superpages, in the form of FreeBSD's measurements:
//! fastest and slowest run, and three simulated counters.

use crate::catalogue::Catalogued;
use crate::catalogue::in_guests::{self, Published};
use crate::catalogue::programs::{InGuest, Pages, Program, program};
use crate::catalogue::versus_published::{
    self, Pair, PublishedSaving, cell, millions, other_sentences, otherwise, sentence, times, value, values,
};
use crate::definition::{Accesses, Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::Metric;
use crate::published::freebsd;
use crate::report::common_sections::number;
use crate::report::{Column, Grid, Section};
use crate::results::Results;

/// The `freebsd` experiment of the catalogue.
pub struct FreeBsd;

/// A program, whether it is run without `--long`, and the accesses for its simulation.
struct Row {
    name: &'static str,
    is_run: bool,
    counters: Counters,
}

/// Source of the accesses for a simulation.
enum Counters {
    /// One recorded iteration with this order of loops; duration of a simulation in seconds.
    Recorded(&'static str, f64),
    /// Updates of a table of 2^n words.
    Gups(u32),
    /// Generated accesses of Sweep3D.
    Sweep3d,
    /// No simulation, with the reason.
    None(&'static str),
}

const TOO_LONG: &str = "left out for time: recording its accesses takes more than a minute";

const fn row(name: &'static str, is_run: bool, counters: Counters) -> Row {
    Row { name, is_run, counters }
}

/// Published rows in their order, and SP of class A in place of class B, which takes too long.
const ROWS: [Row; 18] = [
    row("BT A", true, Counters::Recorded("order=reference", 28.0)),
    row("BT B", false, Counters::None(TOO_LONG)),
    row("BT C", false, Counters::None(TOO_LONG)),
    row("CG A", true, Counters::Recorded("", 30.0)),
    row("CG B", true, Counters::None(TOO_LONG)),
    row("CG C", false, Counters::None(TOO_LONG)),
    row("IS B", true, Counters::Recorded("", 40.0)),
    row("IS C", false, Counters::None(TOO_LONG)),
    row("LU A", true, Counters::Recorded("order=reference", 15.0)),
    row("LU B", false, Counters::None(TOO_LONG)),
    row("LU C", false, Counters::None(TOO_LONG)),
    row("SP A", true, Counters::Recorded("order=reference", 22.0)),
    row("SP B", false, Counters::None(TOO_LONG)),
    row("GUPS 2^25", true, Counters::Gups(25)),
    row("GUPS 2^26", true, Counters::Gups(26)),
    row("GUPS 2^27", false, Counters::Gups(27)),
    row("GUPS 2^28", false, Counters::Gups(28)),
    row("Sweep3D 150", true, Counters::Sweep3d),
];

const ARMS: [(&str, &str); 4] = [
    ("4KB", "4 KiB pages"),
    ("4KB+2MB", "transparent huge pages of 2 MiB from the start"),
    ("4KB on K8", "simulated, K8: 4 KiB pages"),
    ("4KB+2MB on K8", "simulated, K8: all of the kernel's memory on 2 MiB pages"),
];

impl Catalogued for FreeBsd {
    fn name(&self) -> &'static str {
        "freebsd"
    }

    fn summary(&self) -> &'static str {
        "NPB, GUPS, Sweep3D on base pages and superpages, natively and in guests by reservations: fastest, \
         slowest, three counters (simulated)"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "Base pages and superpages: fastest, slowest, and three counters".into(),
            question: "How do superpages change a process's time, its TLB misses, and the L2 misses of its \
             page-table walks?"
                .into(),
            source: Some(
                "the measurements of FreeBSD's superpages on an Opteron (NPB, HPCC RandomAccess, ASCI Sweep3D)".into(),
            ),
            rounds: 6,
            arms: [Arm::all(&ARMS), in_guests::arms(MECHANISM)].concat(),
            cases: ROWS.iter().map(|row| case(row, host)).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        vec![in_their_form(results), in_guests(results), counters(results)]
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        let of_counters = Judged::of(results).otherwise();
        versus_published::lead(results, otherwise(&pairs(results)).into_iter().chain(of_counters).collect())
    }
}

/// FreeBSD reserves a frame at the first touch, and maps it as a superpage once all of it is used.
const MECHANISM: &[InGuest] = &[InGuest::Reservation];

fn in_guests(results: &Results) -> Section {
    let theirs = freebsd::runs();
    let published = |row: &Row| Published { case: row.name.into(), saved_percent: theirs_percent(row, &theirs) };
    let rows: Vec<Published> = ROWS.iter().map(published).collect();
    in_guests::section(results, MECHANISM, [ARMS[0].0, ARMS[1].0], &rows)
}

fn case(row: &Row, host: &HostFacts) -> Case {
    let program = program(row.name);
    let is_run = row.is_run || host.wants_long_runs;
    let run = |pages| if is_run { program.native(pages, host) } else { program.only_with_long() };
    let cells =
        [Pages::Base, Pages::Thp].map(run).into_iter().chain(["4k", "2m"].map(|page| simulated(row, program, page)));
    program.case(cells.chain(in_guests::cells(program, MECHANISM, 1, host)).collect())
}

fn simulated(row: &Row, program: &Program, page: &str) -> Cell {
    let generated = |stream: String, scale| Accesses::Generated { stream, scale };
    let (accesses, seconds) = match row.counters {
        Counters::None(why) => return Cell::Absent(why.into()),
        Counters::Recorded(order, seconds) => (program.recorded(order, Some(1)), seconds),
        Counters::Gups(log2_words) => {
            let scale = PASSES * UPDATES_PER_WORD * f64::from(1 << (log2_words - UPDATES_LOG2));
            (generated(format!("gups:log2_words={log2_words},updates={}", 1 << UPDATES_LOG2), scale), 6.0)
        }
        Counters::Sweep3d => (generated("sweep3d:border=1048576".into(), SWEEP3D_ITERATIONS), 40.0),
    };
    Cell::of(Job::simulation(accesses, "k8", page, seconds))
}

/// HPCC makes four updates for each word of its table, and verifies in a second pass. The counters of a whole
/// process cover both passes.
const UPDATES_PER_WORD: f64 = 4.0;
const PASSES: f64 = 2.0;
/// Log2 of the simulated updates: 64 for each line of the L2.
const UPDATES_LOG2: u32 = 24;
const SWEEP3D_ITERATIONS: f64 = 12.0;

/// Table in the published form: a row for the fastest and the slowest run on each page setting, with our
/// and the published values.
fn in_their_form(results: &Results) -> Section {
    let numbers = [
        "time, s",
        "published",
        "figure",
        "published",
        "DTLB misses, M, simulated",
        "published",
        "L2 misses of walks, M, simulated",
    ];
    let numbers = numbers.into_iter().chain(["published", "L2 misses of data, M, simulated", "published"]);
    let words = ["program", "pages", "run"].map(Column::text);
    let mut grid = Grid {
        caption: "Fastest and slowest run; counters of a whole run in millions, simulated for K8 and published for \
         the Opteron"
            .into(),
        columns: words.into_iter().chain(numbers.map(Column::number)).collect(),
        rows: vec![],
    };
    let theirs = freebsd::runs();
    for row in &ROWS {
        for is_huge in [false, true] {
            let both = ours_and_theirs(results, row, is_huge, &theirs);
            grid.rows.extend(both);
        }
    }
    Section {
        title: "In the form of the original".into(),
        paragraphs: [other_sentences(&pairs(results)), KNOWN_FAULTS.map(str::to_owned).to_vec()].concat(),
        tables: vec![grid],
        plots: vec![],
    }
}

fn ours_and_theirs(results: &Results, row: &Row, is_huge: bool, theirs: &[freebsd::Run]) -> Vec<Vec<String>> {
    let (arm, simulated) = (ARMS[usize::from(is_huge)].0, ARMS[2 + usize::from(is_huge)].0);
    let seconds = values(results, row.name, arm, Metric::Seconds);
    let figures = values(results, row.name, arm, Metric::Figure);
    let extremes = |values: &[f64]| [values.iter().copied().reduce(f64::min), values.iter().copied().reduce(f64::max)];
    let ([fastest, slowest], [least, most]) = (extremes(&seconds), extremes(&figures));
    let counted = [Metric::DtlbMisses, Metric::WalkL2Misses, Metric::DataL2Misses]
        .map(|metric| value(results, row.name, simulated, metric));
    let is_anything = fastest.is_some() || counted.iter().any(Option::is_some);
    let line = |run: &str, seconds: Option<f64>, figure: Option<f64>, counted: [Option<f64>; 3]| {
        let is_it = |of: &&freebsd::Run| {
            of.case == row.name
                && of.is_huge == is_huge
                && (of.run == run || of.run.contains('/') || (run == "fastest" && of.run.starts_with("only")))
        };
        let of_theirs = theirs.iter().find(is_it);
        let counters = |n: usize| [millions(counted[n]), millions(of_theirs.and_then(|of| of.counters[n]))];
        let head = [row.name.to_owned(), arm.to_owned(), run.to_owned()];
        let timed = [
            cell(seconds),
            cell(of_theirs.map(|of| of.seconds)),
            cell(figure),
            cell(of_theirs.and_then(|of| of.figure)),
        ];
        head.into_iter().chain(timed).chain((0..3).flat_map(counters)).collect()
    };
    if !is_anything {
        return vec![];
    }
    // A simulation has only one run, so no slowest one ([`KNOWN_FAULTS`] says so).
    vec![line("fastest", fastest, most, counted), line("slowest", slowest, least, [None; 3])]
}

/// Published saving by the fastest runs, in percent of the time on base pages.
fn theirs_percent(row: &Row, theirs: &[freebsd::Run]) -> Option<f64> {
    let fastest = |is_huge: bool| {
        let runs = theirs.iter().filter(|run| run.case == stands_for(row.name) && run.is_huge == is_huge);
        runs.map(|run| run.seconds).reduce(f64::min)
    };
    Some((1.0 - fastest(true)? / fastest(false)?) * 100.0)
}

/// Comparisons by the fastest published runs.
fn pairs(results: &Results) -> Vec<Pair> {
    let theirs = freebsd::runs();
    ROWS.iter().filter_map(|row| pair(results, row, &theirs)).collect()
}

fn pair(results: &Results, row: &Row, theirs: &[freebsd::Run]) -> Option<Pair> {
    let saved_there = PublishedSaving::percent(theirs_percent(row, theirs)?);
    let case = match stands_for(row.name) {
        theirs if theirs == row.name => row.name.to_owned(),
        theirs => format!("{} (published: {theirs})", row.name),
    };
    Some(Pair { case, theirs: saved_there, ours: times(results, row.name, ARMS[1].0, ARMS[0].0) })
}

/// Published case that our case is compared with.
fn stands_for(name: &str) -> &str {
    if name == "SP A" { "SP B" } else { name }
}

/// Factor beyond which a simulated count differs too much from the published one, up or down. A model without the
/// stack, the code and the system lacks their misses. Beside the misses of a program's data these are a fraction of a
/// count, not a multiple.
const WRONG_BY: f64 = 10.0;
/// Factor from which a count is listed as different.
const NAMED_BY: f64 = 2.0;

/// Simulated and published misses of a row, on base pages and on superpages.
struct Misses {
    name: &'static str,
    ours: [f64; 2],
    theirs: [f64; 2],
}

impl Misses {
    fn is_alike(&self) -> bool {
        let rises = |[base, huge]: [f64; 2]| huge > base;
        rises(self.ours) == rises(self.theirs) && self.factors().iter().all(|by| *by <= WRONG_BY)
    }

    /// Factors between our counts and the published ones, up or down.
    fn factors(&self) -> [f64; 2] {
        [0, 1].map(|page| factor(self.ours[page], self.theirs[page]))
    }

    fn told(&self) -> String {
        let ratio = |[base, huge]: [f64; 2]| huge / base;
        let [base, huge] = self.factors().map(number);
        let (ours, theirs) = (number(ratio(self.ours)), number(ratio(self.theirs)));
        format!("{} ({ours} simulated, {theirs} published; counts differ by factors of {base} and {huge})", self.name)
    }
}

fn factor(a: f64, b: f64) -> f64 {
    (a / b).max(b / a)
}

/// Simulated count on base pages or on superpages.
fn simulated_of(results: &Results, row: &Row, is_huge: bool, metric: Metric) -> Option<f64> {
    value(results, row.name, ARMS[2 + usize::from(is_huge)].0, metric)
}

fn measured_of(theirs: &[freebsd::Run], row: &Row, is_huge: bool, counter: usize) -> Option<f64> {
    theirs.iter().find(|run| run.case == row.name && run.is_huge == is_huge)?.counters[counter]
}

const COUNTERS: [(&str, Metric); 3] = [
    ("DTLB misses", Metric::DtlbMisses),
    ("L2 misses of walks", Metric::WalkL2Misses),
    ("L2 misses of data", Metric::DataL2Misses),
];

/// Rows with simulated and published misses, and what is published of those that are not simulated.
struct Judged {
    both: Vec<Misses>,
    not_simulated: Vec<String>,
}

impl Judged {
    fn of(results: &Results) -> Judged {
        let theirs = freebsd::runs();
        let mut judged = Judged { both: vec![], not_simulated: vec![] };
        for row in &ROWS {
            let pages = |of: &dyn Fn(bool) -> Option<f64>| of(false).zip(of(true)).map(|(base, huge)| [base, huge]);
            let ours = pages(&|is_huge| simulated_of(results, row, is_huge, Metric::DtlbMisses));
            match (ours, pages(&|is_huge| measured_of(&theirs, row, is_huge, 0))) {
                (Some(ours), Some(theirs)) => judged.both.push(Misses { name: row.name, ours, theirs }),
                (None, Some([base, huge])) => {
                    judged.not_simulated.push(format!("{} ({:.2} published)", row.name, huge / base));
                }
                (_, None) => {}
            }
        }
        judged
    }

    /// The wrong rows in a sentence.
    fn otherwise(&self) -> Option<String> {
        let told: Vec<String> = self.both.iter().filter(|row| !row.is_alike()).map(Misses::told).collect();
        let what = "Otherwise than published, simulated misses change in the opposite direction, or a count differs by \
                    more than a factor of ten";
        sentence(what, &told)
    }

    /// The other rows in a sentence.
    fn alike(&self) -> Option<String> {
        let both: Vec<&Misses> = self.both.iter().collect();
        let alike: Vec<&Misses> = self.both.iter().filter(|row| row.is_alike()).collect();
        let names = if alike.is_empty() { String::new() } else { format!(": {}", all_of(&alike)) };
        (!both.is_empty()).then(|| {
            format!(
                "{} rows have both counts, of {} programs. Misses rise or fall as published, with counts that differ \
                 by at most a factor of ten, in {} of them{names}.",
                both.len(),
                programs(&both),
                alike.len(),
            )
        })
    }
}

/// Direction in which superpages change the misses, simulated and published, and the factors between the counts.
fn counters(results: &Results) -> Section {
    let numbers =
        ["DTLB misses, 2M : 4K, simulated", "published", "L2 misses of walks, 2M : 4K, simulated", "published"];
    let mut grid = Grid {
        caption: "Ratios of the counters, superpages to base pages; below 1 superpages reduce them".into(),
        columns: [Column::text("program")].into_iter().chain(numbers.map(Column::number)).collect(),
        rows: vec![],
    };
    let theirs = freebsd::runs();
    for row in &ROWS {
        let pages = |of: &dyn Fn(bool) -> Option<f64>| of(false).zip(of(true)).map(|(base, huge)| [base, huge]);
        let simulated = |metric| pages(&|is_huge| simulated_of(results, row, is_huge, metric));
        let measured = |n| pages(&|is_huge| measured_of(&theirs, row, is_huge, n));
        let ratio = |of: Option<[f64; 2]>| cell(of.map(|[base, huge]| huge / base));
        let misses = simulated(Metric::DtlbMisses);
        if misses.is_some() {
            let walks = simulated(Metric::WalkL2Misses);
            grid.rows.push(vec![row.name.into(), ratio(misses), ratio(measured(0)), ratio(walks), ratio(measured(1))]);
        }
    }
    let judged = Judged::of(results);
    let paragraphs = [
        judged.alike(),
        sentence(
            "Published rows that are not simulated here, to save time, with the published ratio of misses",
            &judged.not_simulated,
        ),
        sentence(
            "Counts on 4 KiB pages and on superpages that are more than twice or less than half of the published ones",
            &far_off(results, &theirs),
        ),
        Some(SIMULATED.into()),
    ];
    let paragraphs = paragraphs.into_iter().flatten().collect();
    Section { title: "Counters, simulated".into(), paragraphs, tables: vec![grid], plots: vec![] }
}

/// Program of a row, the first word of its name.
fn program_of(name: &str) -> &str {
    name.split(' ').next().unwrap_or(name)
}

/// Number of programs. Rows of one program in several sizes count once.
fn programs(rows: &[&Misses]) -> usize {
    let mut names: Vec<&str> = rows.iter().map(|row| program_of(row.name)).collect();
    names.dedup();
    names.len()
}

/// Names of the programs, with the number of rows if there are several.
fn all_of(rows: &[&Misses]) -> String {
    let programs = rows.chunk_by(|a, b| program_of(a.name) == program_of(b.name));
    let told = programs.map(|of| match of {
        [one] => one.name.to_owned(),
        several => format!("{} in {} sizes", program_of(several[0].name), several.len()),
    });
    told.collect::<Vec<_>>().join(", ")
}

/// Counts that differ much from the published ones, counter by counter.
fn far_off(results: &Results, theirs: &[freebsd::Run]) -> Vec<String> {
    let mut told = vec![];
    for (counter, (what, metric)) in COUNTERS.into_iter().enumerate() {
        let mut rows = vec![];
        for (row, is_huge) in ROWS.iter().flat_map(|row| [(row, false), (row, true)]) {
            let ours = simulated_of(results, row, is_huge, metric);
            let there = measured_of(theirs, row, is_huge, counter);
            if let Some((ours, there)) = ours.zip(there).filter(|(a, b)| factor(*a, *b) > NAMED_BY) {
                let pages = if is_huge { "2M" } else { "4K" };
                rows.push(format!("{} {pages} {} times the published count", row.name, number(ours / there)));
            }
        }
        if !rows.is_empty() {
            told.push(format!("{what}: {}", rows.join("; ")));
        }
    }
    told
}

const SIMULATED: &str = "This host's counters are not used: these are from a model of K8, the same on any machine. Of \
    a recorded program one iteration is simulated and multiplied by the number of iterations of its class, set-up and \
    check once; BT, LU and SP use the reference's loops. No recording includes the stack, the code and the system. \
    RandomAccess: 2^24 of the updates of both passes; Sweep3D: one of 12 iterations, each array aligned to 1 MiB.";

/// Known errors of the published tables (benches/data/published/README.md), and how to read ours.
const KNOWN_FAULTS: [&str; 2] = [
    "Known errors of the original: IS B has the same time with and without superpages although its counters differ. \
     LU A has no slowest run at 4 KiB, LU C none with superpages. GUPS at 2^28 words with superpages is faster than \
     its neighbours by a third with the same misses. The text says that 6 to 7 % of Sweep3D's misses on superpages go \
     past the L2, its counters say 0.63 and 0.92 %.",
    "SP of class A is compared with the published SP of class B. The sentences use the fastest published runs and our \
     pairs: = means that the interval contains 0 %, which shows no difference, but does not prove equality. A \
     simulation has one run, which stands in the row of the fastest.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};

    fn cell_of(experiment: &Experiment, case: &str, arm: usize) -> Cell {
        experiment.cases.iter().find(|one| one.name == case).expect("a row").cells[arm].clone()
    }

    #[test]
    fn its_processes_need_neither_kvm_nor_a_second_cpu_and_it_names_missing_memory() {
        let poor = HostFacts { why_no_kvm: Some("no /dev/kvm".into()), cpus: 1, memory_available_mib: 300, ..host() };
        let experiment = FreeBsd.define(&poor);
        assert!(matches!(cell_of(&experiment, "CG B", 0), Cell::Job(_)));
        assert_eq!(cell_of(&experiment, "CG A", 4), Cell::Absent("no /dev/kvm".into()));
        let long = FreeBsd.define(&HostFacts { wants_long_runs: true, ..host() });
        assert!(long.cases.iter().all(|case| matches!(case.cells[0], Cell::Job(_))), "all published rows");
        assert_eq!(
            cell_of(&experiment, "GUPS 2^25", 1),
            Cell::Absent("needs 320 MiB: this host has 300 MiB available".into())
        );
        assert_eq!(cell_of(&experiment, "BT C", 0), Cell::Absent("only with --long: a run takes about 290 s".into()));
    }

    #[test]
    fn a_simulation_of_random_access_counts_both_passes() {
        let Cell::Job(job) = cell_of(&FreeBsd.define(&host()), "GUPS 2^26", 2) else { panic!("a job") };
        assert!(job.is_exact);
        // 2 passes of 4 * 2^26 updates, of which 2^24 are simulated.
        let accesses = Accesses::Generated { stream: "gups:log2_words=26,updates=16777216".into(), scale: 32.0 };
        assert_eq!(
            job.work,
            crate::definition::Work::Simulation { accesses, machine: "k8".into(), page: "4k".into(), host_page: None }
        );
    }

    #[test]
    fn fastest_slowest_and_counters_stand_beside_the_published_ones() {
        let results = results_of(FreeBsd.define(&host()), |case, arm, round| match (case, arm) {
            ("CG B", "4KB") => Some((Metric::Seconds, 30.0 + f64::from(round))),
            ("CG B", "4KB+2MB") => Some((Metric::Seconds, 40.0)),
            ("CG A", "4KB on K8") => Some((Metric::DtlbMisses, 2e6)),
            ("CG A", "4KB+2MB on K8") => Some((Metric::DtlbMisses, 4e6)),
            _ => None,
        });
        let [form, _, counters] = FreeBsd.sections(&results).try_into().expect("three");
        let rows = &form.tables[0].rows;
        let row = |pages: &str, run: &str| {
            rows.iter().find(|row| row[0] == "CG B" && row[1] == pages && row[2] == run).expect("a row")
        };
        assert_eq!(row("4KB", "fastest")[3..5], ["31.00", "244.1"]);
        assert_eq!(row("4KB", "slowest")[3..5], ["36.00", "286.0"]);
        let lead = FreeBsd.lead(&results);
        assert!(lead[0].contains("cost time in the other: CG B (3.4 % published"), "{lead:?}");
        let a = rows.iter().find(|row| row[0] == "CG A").expect("a simulation alone makes a row");
        assert_eq!(a[3..9], ["-", "4.780", "-", "313.0", "2.000", "3.107"]);
        assert!(lead[1].contains("opposite direction, or a count differs by more than a factor of ten: CG A (2.000"));
        assert_eq!(lead[2..], ["Measured in a process: 1 of 18 rows; in guests: 0."]);
        assert!(counters.paragraphs[0].ends_with("in 0 of them."), "{}", counters.paragraphs[0]);
        assert!(
            counters.paragraphs[1].contains("BT B (") && counters.paragraphs[1].contains("LU B ("),
            "{}",
            counters.paragraphs[1]
        );
    }

    #[test]
    fn a_count_far_from_the_published_one_is_wrong_and_sizes_of_one_program_count_once() {
        let theirs = freebsd::runs();
        let there = |case: &str, is_huge| {
            theirs.iter().find(|run| run.case == case && run.is_huge == is_huge).expect("a row").counters[0]
                .expect("counted")
        };
        let results = results_of(FreeBsd.define(&host()), |case, arm, _| {
            let is_huge = match arm {
                "4KB on K8" => false,
                "4KB+2MB on K8" => true,
                _ => return None,
            };
            let off = match (case, is_huge) {
                ("CG A", true) => 1.0 / 140.0,
                ("CG A" | "GUPS 2^25" | "GUPS 2^26" | "GUPS 2^27" | "GUPS 2^28", _) => 1.0,
                _ => return None,
            };
            Some((Metric::DtlbMisses, there(case, is_huge) * off))
        });
        let lead = FreeBsd.lead(&results);
        let paragraphs = FreeBsd.sections(&results)[2].paragraphs.clone();
        assert!(
            lead[0].contains("CG A (") && lead[0].contains("counts differ by factors of 1.000 and 140.0)"),
            "{lead:?}"
        );
        assert!(paragraphs[0].starts_with("5 rows have both counts, of 2 programs."), "{paragraphs:?}");
        assert!(
            paragraphs[0].ends_with("a factor of ten, in 4 of them: GUPS in 4 sizes."),
            "CG A is not: {paragraphs:?}"
        );
        assert!(
            paragraphs.iter().any(|told| told.contains("DTLB misses: CG A 2M 0.0071 times the published count")),
            "{paragraphs:?}"
        );
    }
}
