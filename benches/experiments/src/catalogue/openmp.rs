//! `openmp`: programs on 1, 2, 4 and 8 threads on base and large pages, in the form of the published measurements of
//! OpenMP programs on an Opteron and a Xeon: scalability, improvement at the highest number of threads, misses of one
//! of the threads normalised to 4 KiB pages, and footprints.

use crate::catalogue::Catalogued;
use crate::catalogue::in_guests::{self, Published};
use crate::catalogue::programs::{InGuest, Pages, cpus_text, program};
use crate::catalogue::versus_published::{
    self, Pair, PublishedSaving, cell, mean, millions, other_sentences, otherwise, saved, sentence, times, value,
    values,
};
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::Metric;
use crate::published::openmp;
use crate::report::{Column, Grid, Section};
use crate::results::Results;

/// The `openmp` experiment of the catalogue.
pub struct OpenMp;

const THREADS: [u32; 4] = [1, 2, 4, 8];
/// Numbers of threads from this on are run only with `--long`.
const LONG_FROM_THREADS: u32 = 8;

/// A program: the class that is run, and the published class, which is B for all.
struct Row {
    program: &'static str,
    run: &'static str,
    published: &'static str,
    /// For the simulation the recorded class, the order of loops and the duration on one thread in seconds. A row
    /// without it repeats the program of another row with a larger class, and is run only with `--long`.
    recorded: Option<(&'static str, &'static str, f64)>,
}

impl Row {
    fn is_long(&self) -> bool {
        self.recorded.is_none()
    }
}

const ROWS: [Row; 8] = [
    Row { program: "CG", run: "CG B", published: "CG B", recorded: Some(("CG A", "", 30.0)) },
    Row { program: "MG", run: "MG B", published: "MG B", recorded: Some(("MG A", "", 40.0)) },
    Row { program: "SP", run: "SP A", published: "SP B", recorded: Some(("SP A", "order=reference", 22.0)) },
    Row { program: "SP", run: "SP B", published: "SP B", recorded: None },
    Row { program: "BT", run: "BT A", published: "BT B", recorded: Some(("BT A", "order=reference", 28.0)) },
    Row { program: "BT", run: "BT B", published: "BT B", recorded: None },
    Row { program: "FT", run: "FT A", published: "FT B", recorded: Some(("FT A", "", 60.0)) },
    Row { program: "FT", run: "FT B", published: "FT B", recorded: None },
];

const ARMS: [(&str, &str); 6] = [
    ("4K", "4 KiB pages"),
    ("2M", "2 MiB pages of the hugetlb pool from the start"),
    ("4K on Opteron", "simulated, Opteron 270: the first thread, one iteration times all, 4 KiB pages"),
    ("2M on Opteron", "simulated, Opteron 270: the same, 2 MiB pages"),
    ("4K on Xeon", "simulated, half a core of the Xeon: the first thread, one iteration times all, 4 KiB pages"),
    ("2M on Xeon", "simulated, half a core of the Xeon: the same, 2 MiB pages"),
];

/// A simulated machine of the publication.
struct Simulated {
    /// Name in tables.
    title: &'static str,
    /// Name of the model.
    machine: &'static str,
    /// The number of threads that its processors run, of which one is simulated.
    threads: u32,
    /// Its arms, on 4 KiB and on 2 MiB pages.
    arms: [&'static str; 2],
    /// Reason why other numbers of threads are not simulated.
    otherwise: &'static str,
}

/// The Opteron has four cores; the Xeon's four cores run two threads each.
const SIMULATED: [Simulated; 2] = [
    Simulated {
        title: "Opteron 270",
        machine: "openmp-opteron",
        threads: 4,
        arms: [ARMS[2].0, ARMS[3].0],
        otherwise: "the published Opterons run four threads; one thread alone stands beside them",
    },
    Simulated {
        title: "Xeon, half a core",
        machine: "openmp-xeon:smt",
        threads: 8,
        arms: [ARMS[4].0, ARMS[5].0],
        otherwise: "half of a core is what each of eight threads has",
    },
];

/// Longest simulation without `--long`, in seconds. All of one thread take longer: `counters` has them too, and without
/// them the experiment takes half an hour.
const SIMULATION_SECONDS_MAX: f64 = 20.0;

impl Catalogued for OpenMp {
    fn name(&self) -> &'static str {
        "openmp"
    }

    fn summary(&self) -> &'static str {
        "CG MG SP BT FT on 1 to 8 threads, 4K and 2M pages: scalability, improvement, misses, footprints"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "Threads and large pages".into(),
            question: "Do programs on several threads gain more by large pages, and do they have fewer misses?".into(),
            source: Some(
                "the measurements of OpenMP programs on large pages (NPB class B, Opteron 270 and Xeon)".into(),
            ),
            rounds: 6,
            arms: [Arm::all(&ARMS), in_guests::arms(MECHANISM)].concat(),
            cases: ROWS.iter().flat_map(|row| THREADS.map(|threads| case(row, threads, host))).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        vec![improvement(results), in_guests(results), scalability(results), misses(results), footprints(results)]
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        versus_published::lead(results, otherwise(&pairs(results)).into_iter().chain(more_misses(results)).collect())
    }
}

/// The published programs were linked with a library that takes their memory from the hugetlb pool.
const MECHANISM: &[InGuest] = &[InGuest::Hugetlb];

/// Each program on each number of threads. The publication has a figure for the highest number alone.
fn in_guests(results: &Results) -> Section {
    let of_row = |row: &Row, threads: u32| {
        let is_theirs = Some(threads) == most_threads(results, row);
        let claim = openmp::improvement(row.program).filter(|_| is_theirs);
        Published {
            case: case_of(results, row, threads),
            saved_percent: claim.as_ref().and_then(openmp::Claim::number),
        }
    };
    let rows: Vec<Published> = ROWS.iter().flat_map(|row| THREADS.map(|threads| of_row(row, threads))).collect();
    in_guests::section(results, MECHANISM, [ARMS[0].0, ARMS[1].0], &rows)
}

fn name_of(row: &Row, threads: u32) -> String {
    format!("{}, {threads} thread{}", row.run, if threads == 1 { "" } else { "s" })
}

/// Name of a row's case in these results: where threads shared CPUs, it says on how many.
fn case_of(results: &Results, row: &Row, threads: u32) -> String {
    let name = name_of(row, threads);
    let shared = results.experiment.cases.iter().find(|case| is_shared(&case.name) && case.name.starts_with(&name));
    shared.map_or(name, |case| case.name.clone())
}

/// Whether the threads of a case share CPUs, so that its times say nothing of scalability.
fn is_shared(case: &str) -> bool {
    case.contains(SHARED)
}

/// Mark in the name of a case with more threads than CPUs.
const SHARED: &str = " sharing ";

fn case(row: &Row, threads: u32, host: &HostFacts) -> Case {
    let program = program(row.run);
    let run = [Pages::Base, Pages::Hugetlb].map(|pages| match program.native_on(pages, threads, host) {
        Cell::Job(_) if (row.is_long() || threads >= LONG_FROM_THREADS) && !host.wants_long_runs => {
            program.only_with_long()
        }
        cell => cell,
    });
    let simulated = SIMULATED.iter().flat_map(|on| ["4k", "2m"].map(|page| simulation(row, on, threads, page, host)));
    let guests = in_guests::cells(program, MECHANISM, threads, host);
    let is_run = matches!(run[0], Cell::Job(_));
    let case = program.case(run.into_iter().chain(simulated).chain(guests).collect());
    let name = match name_of(row, threads) {
        name if threads > host.cpus && is_run => format!("{name}{SHARED}{}", cpus_text(host)),
        name => name,
    };
    Case { name, ..case }
}

/// The first of several threads on a machine of the publication. The threads need no CPUs of their own to be recorded.
fn simulation(row: &Row, on: &Simulated, threads: u32, page: &str, host: &HostFacts) -> Cell {
    let is_one_beside = threads == 1 && on.machine == SIMULATED[0].machine;
    if threads != on.threads && !is_one_beside {
        return Cell::Absent(on.otherwise.into());
    }
    let Some((name, order, seconds)) = row.recorded else {
        return Cell::Absent("its misses are simulated with class A".into());
    };
    let seconds = seconds / f64::from(threads);
    if seconds > SIMULATION_SECONDS_MAX && !host.wants_long_runs {
        return Cell::Absent(format!("only with --long: recording and simulating it takes about {seconds:.0} s"));
    }
    Cell::of(Job::simulation(program(name).recorded_on(threads, order, Some(1)), on.machine, page, seconds))
}

/// Highest number of threads with measurements of a program, each on a CPU of its own.
fn most_threads(results: &Results, row: &Row) -> Option<u32> {
    let is_measured = |threads: &u32| times(results, &name_of(row, *threads), "2M", "4K").is_some();
    THREADS.into_iter().filter(is_measured).max()
}

/// Comparisons at the highest number of threads.
fn pairs(results: &Results) -> Vec<Pair> {
    let pair = |row: &Row| {
        let threads = most_threads(results, row)?;
        let claim = openmp::improvement(row.program)?;
        let there = claim.threads.map_or_else(|| row.published.into(), |there| format!("{} on {there}", row.published));
        let case = format!("{} on {threads} (published: {there})", row.run);
        let theirs = claim.number().map_or(PublishedSaving::NONE, PublishedSaving::of_time_or_speed);
        Some(Pair { case, theirs, ours: times(results, &name_of(row, threads), "2M", "4K") })
    };
    ROWS.iter().filter_map(pair).collect()
}

fn improvement(results: &Results) -> Section {
    let columns = [Column::text("program"), Column::number("threads"), Column::number("2M saves, median (95 %)")];
    let theirs = ["published, Opteron 270, %", "published, threads"].map(Column::number);
    let mut grid = Grid {
        caption: "Improvement at the highest number of threads".into(),
        columns: columns.into_iter().chain(theirs).collect(),
        rows: vec![],
    };
    for row in &ROWS {
        let Some(threads) = most_threads(results, row) else { continue };
        let Some(ours) = times(results, &name_of(row, threads), "2M", "4K") else { continue };
        let theirs = openmp::improvement(row.program);
        let of_theirs = |of: &dyn Fn(&openmp::Claim) -> String| theirs.as_ref().map_or_else(|| "-".into(), of);
        let threads_of = |claim: &openmp::Claim| claim.threads.map_or_else(|| "-".into(), |n| n.to_string());
        let printed = of_theirs(&|claim| claim.value.clone());
        grid.rows.push(vec![row.run.into(), threads.to_string(), saved(&ours), printed, of_theirs(&threads_of)]);
    }
    let notes = "The published programs are of class B; a program with class A here uses less memory. `--long` runs \
     class B of all. The published percentages are of time or of speed, the text does not say which: both count as \
     published. On the Xeon theirs saved SP 13 % on eight threads; no sentence compares with it.";
    Section {
        title: "Improvement by 2 MiB pages".into(),
        paragraphs: other_sentences(&pairs(results)).into_iter().chain([notes.into()]).collect(),
        tables: vec![grid],
        plots: vec![],
    }
}

fn scalability(results: &Results) -> Section {
    let columns = ["4K, s", "2M, s", "4K, speedup over one thread", "2M, speedup over one thread", "2M saves"];
    let mut grid = Grid {
        caption: "Times (means) and scalability by threads".into(),
        columns: [Column::text("program, threads")].into_iter().chain(columns.map(Column::number)).collect(),
        rows: vec![],
    };
    for row in &ROWS {
        for threads in THREADS {
            let case = case_of(results, row, threads);
            let seconds = |case: &str, arm: &str| mean(&values(results, case, arm, Metric::Seconds));
            let of_arms = ["4K", "2M"].map(|arm| {
                let here = seconds(&case, arm);
                let one = seconds(&name_of(row, 1), arm).filter(|_| !is_shared(&case));
                (here, one.zip(here).map(|(one, here)| one / here))
            });
            let [base, huge] = of_arms;
            let saves = times(results, &case, "2M", "4K").as_ref().map_or_else(|| "-".into(), saved);
            grid.rows.push(vec![case, cell(base.0), cell(huge.0), cell(base.1), cell(huge.1), saves]);
        }
    }
    let shared = results.experiment.cases.iter().any(|case| is_shared(&case.name)).then(|| {
        "Where threads share CPUs, the row says so and has no speedup: its times compare page sizes only.".to_owned()
    });
    Section { title: "Scalability".into(), paragraphs: shared.into_iter().collect(), tables: vec![grid], plots: vec![] }
}

fn misses(results: &Results) -> Section {
    let head = [Column::text("program"), Column::text("machine"), Column::number("threads")];
    let columns = ["4K, millions", "2M, millions", "2M normalised (4K = 1)", "times fewer", "published, times fewer"];
    let mut grid = Grid {
        caption: "Misses of all levels of the data TLB by one of the threads, simulated".into(),
        columns: head.into_iter().chain(columns.map(Column::number)).collect(),
        rows: vec![],
    };
    for (row, recorded) in ROWS.iter().filter_map(|row| Some((row, row.recorded?.0))) {
        for (on, threads) in simulated_on() {
            let (base, huge) = misses_of(results, row, on, threads);
            let (both, theirs) = (base.zip(huge), theirs_fewer(row, on, threads));
            let (normalised, fewer) = (both.map(|(base, huge)| huge / base), both.map(|(base, huge)| base / huge));
            let numbers = [millions(base), millions(huge), cell(normalised), cell(fewer)];
            let head = [recorded.into(), on.title.into(), threads.to_string()];
            grid.rows.push(head.into_iter().chain(numbers).chain([theirs.unwrap_or_else(|| "-".into())]).collect());
        }
    }
    let paragraphs = NOTES.map(str::to_owned).to_vec();
    Section { title: "Misses of the TLBs".into(), paragraphs, tables: vec![grid], plots: vec![] }
}

/// The simulated machines with their numbers of threads.
fn simulated_on() -> [(&'static Simulated, u32); 3] {
    let [opteron, xeon] = &SIMULATED;
    [(opteron, 1), (opteron, opteron.threads), (xeon, xeon.threads)]
}

/// Simulated misses on base and on large pages.
fn misses_of(results: &Results, row: &Row, on: &Simulated, threads: u32) -> (Option<f64>, Option<f64>) {
    let of = |arm| value(results, &case_of(results, row, threads), arm, Metric::DtlbMisses);
    let [base, huge] = on.arms.map(of);
    (base, huge)
}

/// Published factor of a row: the factors in the text are of the Opteron at four threads.
fn theirs_fewer(row: &Row, on: &Simulated, threads: u32) -> Option<String> {
    openmp::fall_of_misses(row.program).filter(|_| on.machine == SIMULATED[0].machine && threads > 1)
}

/// Programs that miss more often on large pages, in a sentence.
fn more_misses(results: &Results) -> Option<String> {
    let more = |(row, (on, threads)): (&Row, (&Simulated, u32))| {
        let (base, huge) = misses_of(results, row, on, threads);
        let times = base.zip(huge).map(|(base, huge)| huge / base).filter(|times| *times > 1.0)?;
        let published = theirs_fewer(row, on, threads).map(|fewer| format!("; published: {fewer} times fewer"));
        let published = published.unwrap_or_default();
        Some(format!("{} on {threads}, {} ({times:.1} times as many{published})", row.program, on.title))
    };
    let all = ROWS.iter().flat_map(|row| simulated_on().map(|on| (row, on)));
    let what = "Otherwise than published, 2 MiB pages miss more often in the simulation";
    sentence(what, &all.filter_map(more).collect::<Vec<_>>())
}

const NOTES: [&str; 3] = [
    "Misses are simulated. The first thread is recorded while all of them run, with its own part of the arrays and the \
     preparation that it does alone. The Xeon's core is shared by two threads: one has half of its entries.",
    "BT and SP in the reference's order, class A. FreeBSD's measurements on such an Opteron contradict the OpenMP \
     paper: in them BT and SP of class B miss more often on 2 MiB pages.",
    "ITLB misses are absent: recorded accesses have no instruction fetches. The published ones are at most 0.45 per \
     second (MG), about 90 cycles per second.",
];

/// Memory of the programs, beside the published one.
fn footprints(results: &Results) -> Section {
    let columns = ["resident on 4K, MiB", "class B needs here, MiB", "published, class B, MiB", "here : published"];
    let mut grid = Grid {
        caption: "Memory on one thread: resident at the end of the timed part, with the process itself".into(),
        columns: [Column::text("program")].into_iter().chain(columns.map(Column::number)).collect(),
        rows: vec![],
    };
    let mut less = Vec::new();
    for row in &ROWS {
        let resident = mean(&values(results, &name_of(row, 1), "4K", Metric::ResidentMib));
        let (ours, theirs) = (program(row.published).mib as f64, openmp::data_mib(row.program));
        let ratio = theirs.map(|theirs| ours / theirs);
        if let Some(ratio) = ratio.filter(|_| !row.is_long()) {
            less.push(format!("{} {ratio:.2}", row.published));
        }
        grid.rows.push(vec![row.run.into(), cell(resident), cell(Some(ours)), cell(theirs), cell(ratio)]);
    }
    let told = format!("Our programs need less memory than the published ones of the same class: {}.", less.join(", "));
    let why = "The published programs run on cluster software (Omni/SCASH), and its share of their memory is not \
        published. Our BT and SP leave work arrays out that the reference has.";
    Section { title: "Footprints".into(), paragraphs: vec![told, why.into()], tables: vec![grid], plots: vec![] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};

    #[test]
    fn four_threads_are_absent_on_two_cpus_and_present_on_four() {
        let cases = |cpus| OpenMp.define(&HostFacts { cpus, ..host() }).cases;
        let cell =
            |cpus: u32, name: &str| cases(cpus).into_iter().find(|case| case.name == name).map(|case| case.cells);
        let of_two = cell(2, "CG B, 4 threads").expect("a row");
        assert_eq!(of_two[0], Cell::Absent("only with --long: 4 threads share 2 CPUs".into()));
        assert!(matches!(&cell(4, "CG B, 4 threads").expect("a row")[0], Cell::Job(_)));
        assert_eq!(
            cell(1, "CG B, 2 threads").expect("a row")[1],
            Cell::Absent("only with --long: 2 threads share 1 CPU".into())
        );
    }

    #[test]
    fn scalability_is_against_one_thread_and_improvement_at_the_highest_number() {
        let results = results_of(OpenMp.define(&host()), |case, arm, _| match (case, arm) {
            ("CG B, 1 thread", "4K") => Some((Metric::Seconds, 30.0)),
            ("CG B, 1 thread", "2M") => Some((Metric::Seconds, 28.0)),
            ("CG B, 2 threads", "4K") => Some((Metric::Seconds, 20.0)),
            ("CG B, 2 threads", "2M") => Some((Metric::Seconds, 16.0)),
            _ => None,
        });
        let [improvement, _, scalability, _, _] = OpenMp.sections(&results).try_into().expect("five");
        assert_eq!(improvement.tables[0].rows, [["CG B", "2", "20.0 % (20.0 - 20.0)", "25", "4"]]);
        let begin = "As published, within 2 % of the time: CG B on 2 (published: CG B on 4) (25.0 % published, 20.0 %";
        assert!(improvement.paragraphs[0].starts_with(begin), "25 % of speed: {:?}", improvement.paragraphs);
        assert_eq!(OpenMp.lead(&results), ["Measured in a process: 2 of 32 rows; in guests: 0."]);
        let row = scalability.tables[0].rows.iter().find(|row| row[0] == "CG B, 2 threads").expect("a row");
        assert_eq!(row[1..5], ["20.00", "16.00", "1.500", "1.750"]);
    }

    #[test]
    fn increasing_misses_are_named_first() {
        let results = results_of(OpenMp.define(&host()), |case, arm, _| match (case, arm) {
            ("SP A, 4 threads", "4K on Opteron") => Some((Metric::DtlbMisses, 2e6)),
            ("SP A, 4 threads", "2M on Opteron") => Some((Metric::DtlbMisses, 8e6)),
            _ => None,
        });
        let misses = &OpenMp.sections(&results)[3];
        let lead = OpenMp.lead(&results);
        assert!(
            lead[0].contains("SP on 4, Opteron 270 (4.0 times as many; published: 10 or more times fewer)"),
            "{lead:?}"
        );
        let row = misses.tables[0].rows.iter().find(|row| row[..3] == ["SP A", "Opteron 270", "4"]);
        assert_eq!(row.expect("a row")[3..], ["2.000", "8.000", "4.000", "0.2500", "10 or more"]);
    }

    #[test]
    fn eight_threads_are_run_with_long_only_and_may_share_cpus() {
        let cases = |cpus, wants_long_runs| OpenMp.define(&HostFacts { cpus, wants_long_runs, ..host() }).cases;
        let case = |cpus, long, name: &str| cases(cpus, long).into_iter().find(|case| case.name == name);
        let shared = case(2, true, "CG B, 8 threads sharing 2 CPUs").expect("a row that says so");
        assert!(matches!(shared.cells[0], Cell::Job(_)) && matches!(shared.cells[4], Cell::Job(_)), "{shared:?}");
        assert!(matches!(shared.cells.last(), Some(Cell::Absent(_))), "vCPUs never yield: no guest");
        let long = Cell::Absent("only with --long: a run takes about 32 s".into());
        assert_eq!(case(8, false, "CG B, 8 threads").expect("a row").cells[0], long);
        assert!(matches!(case(8, true, "CG B, 8 threads").expect("a row").cells[0], Cell::Job(_)));
    }

    #[test]
    fn threads_that_share_cpus_have_times_and_no_speedup() {
        let long = HostFacts { wants_long_runs: true, ..host() };
        let results = results_of(OpenMp.define(&long), |case, arm, _| match (case, arm) {
            ("CG B, 1 thread", "4K" | "2M") => Some((Metric::Seconds, 30.0)),
            ("CG B, 8 threads sharing 2 CPUs", "4K" | "2M") => Some((Metric::Seconds, 15.0)),
            _ => None,
        });
        let [improvement, _, scalability, ..] = &OpenMp.sections(&results)[..] else { panic!("five sections") };
        let row = scalability.tables[0].rows.iter().find(|row| row[0] == "CG B, 8 threads sharing 2 CPUs");
        assert_eq!(row.expect("a row")[1..5], ["15.00", "15.00", "-", "-"]);
        assert_eq!(improvement.tables[0].rows[0][1], "1", "the highest number with a CPU for each");
    }

    #[test]
    fn the_first_of_several_threads_is_simulated_on_the_machine_that_runs_as_many() {
        let cases = OpenMp.define(&HostFacts { wants_long_runs: true, ..host() }).cases;
        let jobs = |name: &str| {
            let case = cases.iter().find(|case| case.name.starts_with(name)).expect("a row");
            let of = |cell: &Cell| if let Cell::Job(job) = cell { job.command() } else { String::new() };
            case.cells[2..6].iter().map(of).collect::<Vec<_>>()
        };
        let [one, four, eight] = ["MG B, 1 thread", "MG B, 4 threads", "MG B, 8 threads"].map(jobs);
        assert!(one[0].contains("simulated openmp-opteron") && one[2].is_empty(), "{one:?}");
        assert!(four[1].contains("--threads 4") && four[3].is_empty(), "{four:?}");
        assert!(eight[0].is_empty() && eight[2].contains("--threads 8"), "{eight:?}");
        assert!(eight[3].contains("simulated openmp-xeon:smt with pages of 2m"), "{eight:?}");
    }

    #[test]
    fn footprints_stand_beside_the_published_ones() {
        let results = results_of(OpenMp.define(&host()), |case, arm, _| match (case, arm) {
            ("CG B, 1 thread", "4K") => Some((Metric::ResidentMib, 210.0)),
            _ => None,
        });
        let footprints = &OpenMp.sections(&results)[4];
        assert_eq!(footprints.tables[0].rows[0], ["CG B", "210.0", "206.0", "725.0", "0.2841"]);
        assert!(footprints.paragraphs[0].contains("CG B 0.28, MG B 0.49"), "{:?}", footprints.paragraphs);
    }
}
