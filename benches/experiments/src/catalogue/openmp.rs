//! `openmp`: programs on 1, 2 and 4 threads on base and large pages, in the form of the published measurements of
//! OpenMP programs on an Opteron and a Xeon: scalability, improvement at the highest number of threads, and misses
//! normalised to 4 KiB pages.

use crate::catalogue::Catalogued;
use crate::catalogue::in_guests::{self, Published};
use crate::catalogue::programs::{InGuest, Pages, program};
use crate::catalogue::versus_published::{cell, mean, millions, saved, times, value, values};
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::Metric;
use crate::published::openmp;
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use wideleaf_measure::statistics::Verdict;

/// The `openmp` experiment of the catalogue.
pub struct OpenMp;

const THREADS: [u32; 3] = [1, 2, 4];

/// A program: the class that is run, and for the simulation the recorded class, the order of loops and the duration
/// in seconds. The published programs are all of class B.
struct Row {
    program: &'static str,
    run: &'static str,
    recorded: Option<(&'static str, &'static str, f64)>,
}

const ROWS: [Row; 5] = [
    Row { program: "CG", run: "CG B", recorded: Some(("CG A", "", 30.0)) },
    Row { program: "MG", run: "MG B", recorded: Some(("MG A", "", 40.0)) },
    Row { program: "SP", run: "SP A", recorded: Some(("SP A", "order=reference", 22.0)) },
    Row { program: "BT", run: "BT A", recorded: Some(("BT A", "order=reference", 28.0)) },
    Row { program: "FT", run: "FT A", recorded: None },
];

const ARMS: [(&str, &str); 4] = [
    ("4K", "4 KiB pages"),
    ("2M", "transparent huge pages of 2 MiB from the start"),
    ("4K on K8", "simulated, K8: one thread, one iteration of the smaller class times all, 4 KiB pages"),
    ("2M on K8", "simulated, K8: the same, 2 MiB pages"),
];

impl Catalogued for OpenMp {
    fn name(&self) -> &'static str {
        "openmp"
    }

    fn summary(&self) -> &'static str {
        "CG MG SP BT FT on 1, 2 and 4 threads, 4K and 2M pages: scalability, improvement, misses"
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
        vec![improvement(results), in_guests(results), scalability(results), misses(results)]
    }
}

/// The published programs were linked with a library that takes their memory from the hugetlb pool.
const MECHANISM: InGuest = InGuest::Hugetlb;

/// Each program on each number of threads. The publication has a figure for the highest number alone.
fn in_guests(results: &Results) -> Section {
    let of_row = |row: &Row, threads: u32| {
        let is_theirs = Some(threads) == most_threads(results, row);
        let claim = openmp::improvement(row.program).filter(|_| is_theirs);
        Published { case: name_of(row, threads), saved_percent: claim.as_ref().and_then(openmp::Claim::number) }
    };
    let rows: Vec<Published> = ROWS.iter().flat_map(|row| THREADS.map(|threads| of_row(row, threads))).collect();
    in_guests::section(results, MECHANISM, [ARMS[0].0, ARMS[1].0], &rows)
}

fn name_of(row: &Row, threads: u32) -> String {
    format!("{}, {threads} thread{}", row.run, if threads == 1 { "" } else { "s" })
}

fn case(row: &Row, threads: u32, host: &HostFacts) -> Case {
    let run = [Pages::Base, Pages::Thp].map(|pages| program(row.run).native_on(pages, threads, host));
    let simulated = ["4k", "2m"].map(|page| match row.recorded {
        _ if threads > 1 => Cell::Absent("the simulator follows one thread".into()),
        Some((name, order, seconds)) => {
            Cell::of(Job::simulation(program(name).recorded(order, Some(1)), "k8", page, seconds))
        }
        None => Cell::Absent("left out for time: recording and simulating it takes about a minute".into()),
    });
    let guests = in_guests::cells(program(row.run), MECHANISM, threads, host);
    let case = program(row.run).case(run.into_iter().chain(simulated).chain(guests).collect());
    Case { name: name_of(row, threads), ..case }
}

/// Highest number of threads with measurements of a program.
fn most_threads(results: &Results, row: &Row) -> Option<u32> {
    let is_measured = |threads: &u32| times(results, &name_of(row, *threads), "2M", "4K").is_some();
    THREADS.into_iter().filter(is_measured).max()
}

fn improvement(results: &Results) -> Section {
    let columns = [Column::text("program"), Column::number("threads"), Column::number("2M saves, median (95 %)")];
    let theirs = ["published, Opteron 270, %", "published, threads"].map(Column::number);
    let mut grid = Grid {
        caption: "Improvement at the highest number of threads".into(),
        columns: columns.into_iter().chain(theirs).collect(),
        rows: vec![],
    };
    let (mut as_there, mut otherwise) = (vec![], vec![]);
    for row in &ROWS {
        let Some(threads) = most_threads(results, row) else { continue };
        let Some(ours) = times(results, &name_of(row, threads), "2M", "4K") else { continue };
        let theirs = openmp::improvement(row.program);
        let of_theirs = |of: &dyn Fn(&openmp::Claim) -> String| theirs.as_ref().map_or_else(|| "-".into(), of);
        let threads_of = |claim: &openmp::Claim| claim.threads.map_or_else(|| "-".into(), |n| n.to_string());
        let printed = of_theirs(&|claim| claim.value.clone());
        grid.rows.push(vec![
            row.run.into(),
            threads.to_string(),
            saved(&ours),
            printed.clone(),
            of_theirs(&threads_of),
        ]);
        let saved_there = theirs.as_ref().and_then(openmp::Claim::number).is_some();
        let text = format!("{} ({printed} published, {} on {threads} here)", row.run, saved(&ours));
        match (saved_there, ours.verdict) {
            (_, Verdict::Unknown) => {}
            (true, Verdict::Better) | (false, Verdict::Indistinguishable) => as_there.push(text),
            _ => otherwise.push(text),
        }
    }
    let sentence = |what: &str, of: &[String]| (!of.is_empty()).then(|| format!("{what}: {}.", of.join(", ")));
    let paragraphs = [sentence("Different from the published result", &otherwise), sentence("As published", &as_there)];
    let notes = "The published programs are of class B; a program with class A here uses less memory. The published \
     percentages are of time or speed: the text does not say which.";
    let none = grid.rows.is_empty().then(|| "No time was measured yet.".to_owned());
    Section {
        title: "Improvement by 2 MiB pages".into(),
        paragraphs: none.into_iter().chain(paragraphs.into_iter().flatten()).chain([notes.into()]).collect(),
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
            let case = name_of(row, threads);
            let seconds = |case: &str, arm: &str| mean(&values(results, case, arm, Metric::Seconds));
            let of_arms = ["4K", "2M"].map(|arm| {
                let here = seconds(&case, arm);
                (here, seconds(&name_of(row, 1), arm).zip(here).map(|(one, here)| one / here))
            });
            let [base, huge] = of_arms;
            let saves = times(results, &case, "2M", "4K").as_ref().map_or_else(|| "-".into(), saved);
            grid.rows.push(vec![case, cell(base.0), cell(huge.0), cell(base.1), cell(huge.1), saves]);
        }
    }
    let absent = results.experiment.cases.iter().filter_map(|case| match case.cells.first() {
        Some(Cell::Absent(why)) => Some(format!("{} is absent ({why}).", case.name)),
        _ => None,
    });
    Section { title: "Scalability".into(), paragraphs: absent.collect(), tables: vec![grid], plots: vec![] }
}

fn misses(results: &Results) -> Section {
    let columns = ["4K, millions", "2M, millions", "2M normalised (4K = 1)", "times fewer", "published, times fewer"];
    let mut grid = Grid {
        caption: "Misses of both levels of the data TLB, simulated, K8, one thread".into(),
        columns: [Column::text("program")].into_iter().chain(columns.map(Column::number)).collect(),
        rows: vec![],
    };
    let mut more = Vec::new();
    for row in &ROWS {
        let of = |arm| value(results, &name_of(row, 1), arm, Metric::DtlbMisses);
        let (base, huge) = (of("4K on K8"), of("2M on K8"));
        let both = base.zip(huge);
        let theirs = openmp::fall_of_misses(row.program).unwrap_or_else(|| "-".into());
        if let Some((base, huge)) = both.filter(|(base, huge)| huge > base) {
            more.push(format!("{} ({:.1} times as many; published: {theirs} times fewer)", row.program, huge / base));
        }
        let name = row.recorded.map_or(row.run, |(name, _, _)| name);
        let (normalised, fewer) = (both.map(|(base, huge)| huge / base), both.map(|(base, huge)| base / huge));
        grid.rows.push(vec![name.into(), millions(base), millions(huge), cell(normalised), cell(fewer), theirs]);
    }
    let more = (!more.is_empty())
        .then(|| format!("2 MiB pages miss more often, unlike in the published results: {}.", more.join(", ")));
    let paragraphs = more.into_iter().chain(NOTES.map(str::to_owned)).collect();
    Section { title: "Misses of the TLBs".into(), paragraphs, tables: vec![grid], plots: vec![] }
}

const NOTES: [&str; 3] = [
    "Misses are simulated: the Opteron 270 has K8's TLB. One thread represents all threads, so they do not reflect \
     that each thread has a TLB for its own quarter of the arrays.",
    "BT and SP in the reference's order, class A. FreeBSD's measurements on such an Opteron contradict the OpenMP \
     paper: in them BT and SP of class B miss more often on 2 MiB pages.",
    "ITLB misses are absent: recorded accesses have no instruction fetches. The published ones are at most 0.45 per \
     second (MG), about 90 cycles per second.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::made_up::{host, results_of};

    #[test]
    fn four_threads_are_absent_on_two_cpus_and_present_on_four() {
        let cases = |cpus| OpenMp.define(&HostFacts { cpus, ..host() }).cases;
        let cell =
            |cpus: u32, name: &str| cases(cpus).into_iter().find(|case| case.name == name).map(|case| case.cells);
        let of_two = cell(2, "CG B, 4 threads").expect("a row");
        assert_eq!(of_two[0], Cell::Absent("4 threads: this host has 2 CPUs".into()));
        assert!(matches!(&cell(4, "CG B, 4 threads").expect("a row")[0], Cell::Job(_)));
        assert_eq!(
            cell(1, "CG B, 2 threads").expect("a row")[1],
            Cell::Absent("2 threads: this host has 1 CPU".into())
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
        let [improvement, _, scalability, _] = OpenMp.sections(&results).try_into().expect("four");
        assert_eq!(improvement.tables[0].rows, [["CG B", "2", "20.0 % (20.0 - 20.0)", "25", "4"]]);
        let starts = improvement.paragraphs[0].starts_with("As published: CG B (25 published, 20.0 %");
        assert!(starts, "{:?}", improvement.paragraphs);
        let row = scalability.tables[0].rows.iter().find(|row| row[0] == "CG B, 2 threads").expect("a row");
        assert_eq!(row[1..5], ["20.00", "16.00", "1.500", "1.750"]);
    }

    #[test]
    fn increasing_misses_are_named_first() {
        let results = results_of(OpenMp.define(&host()), |case, arm, _| match (case, arm) {
            ("SP A, 1 thread", "4K on K8") => Some((Metric::DtlbMisses, 2e6)),
            ("SP A, 1 thread", "2M on K8") => Some((Metric::DtlbMisses, 8e6)),
            _ => None,
        });
        let misses = &OpenMp.sections(&results)[3];
        assert!(
            misses.paragraphs[0].contains("SP (4.0 times as many; published: 10 or more times fewer)"),
            "{:?}",
            misses.paragraphs
        );
        let row = misses.tables[0].rows.iter().find(|row| row[0] == "SP A").expect("a row");
        assert_eq!(row[1..5], ["2.000", "8.000", "4.000", "0.2500"]);
    }
}
