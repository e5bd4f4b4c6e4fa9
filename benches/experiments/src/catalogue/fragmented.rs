//! `fragmented`: the policies on a host with deliberately fragmented free memory. Results are the large pages that
//! each policy gets, their cost, and the cost of refused attempts.

use super::by_policy::{self, AUTO, Kernel, kernel, middle};
use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts};
use crate::metric::{Better, Metric};
use crate::peers::Peer;
use crate::report::common_sections::{bar_in_words, number};
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Comparison, Verdict};
use wideleaf_measure::table;

/// The `fragmented` experiment of the catalogue.
pub struct Fragmented;

const ROUNDS: u32 = 6;
/// Peers that use the kernel's free huge pages. A hugetlb pool is not among them: an existing pool is unaffected, and
/// a new one cannot be allocated.
const PEERS: [Peer; 3] = [Peer::Thp, Peer::ThpTuned, Peer::QemuThp];
/// Time that fragmenting the free memory adds to a run, in seconds: a minute for 20 GiB that the hypervisor below has
/// reclaimed, shared by two cases of a round.
const BREAKING_S: f64 = 2.0;

const KERNELS: [Kernel; 2] = [
    kernel("GUPS", ["gups", "log2_words=24", "GUP/s"], 192, 2.0),
    kernel("Phases", ["phases", "phase_ms=400 sparse=32M cold=16M constant=16M", "updates/s"], 192, 3.0),
];

/// Size of each kernel's data. It is equal, so that memory need not be fragmented again between their cases.
const DATA_MIB: u64 = 128;

/// Remaining huge pages, in percent of the kernel's data, and the target: lowest speed of `auto` as a ratio to
/// `prealloc`, which asks for huge pages before the timed part.
const DEGREES: [(&str, u64, f64); 2] = [("half left", 50, 1.0), ("none left", 0, 0.95)];

const PREALLOC: &str = "prealloc";

impl Catalogued for Fragmented {
    fn name(&self) -> &'static str {
        "fragmented"
    }

    fn summary(&self) -> &'static str {
        "the policies on a host with deliberately fragmented memory: half of the required huge pages, and none"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let mut cases = Vec::new();
        for (degree, percent_left, _) in DEGREES {
            for kernel in KERNELS {
                let left = DATA_MIB / 2 * percent_left / 100;
                let cells = kernel.cells(&PEERS, kernel.seconds + BREAKING_S, host);
                let cells = cells.into_iter().map(|cell| in_pieces(cell, left, host)).collect();
                cases.push(kernel.case(format!("{}, {degree}", kernel.name), cells));
            }
        }
        Experiment {
            name: self.name().into(),
            title: "Fragmented memory".into(),
            question: "What do the policies achieve on a host with only half of the huge pages that they need, or \
             none, and what do they spend?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms: by_policy::arms().into_iter().chain(PEERS.map(Peer::arm)).collect(),
            cases,
        }
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        [by_policy::lead(results), bars(results).iter().map(bar_in_words).collect()].concat()
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let tables = results.experiment.cases.iter().map(|case| what_each_got(results, case)).collect();
        let what = format!(
            "Each run found all free memory of the host fragmented, except for as many 2 MiB blocks as its case says. \
             In every other block one page was kept in place, in a pipe, so that compaction could not create free \
             blocks. The figure is compared with never in the same round. {}",
            Verdict::LEGEND
        );
        let standing = Section {
            title: "auto compared with the fastest other policy".into(),
            tables: vec![by_policy::standings(results)],
            ..Section::default()
        };
        vec![Section { title: "Results of each arm".into(), paragraphs: vec![what], tables, plots: vec![] }, standing]
    }
}

/// The cell on a host with fragmented memory.
fn in_pieces(cell: Cell, huge_pages_left: u64, host: &HostFacts) -> Cell {
    match cell {
        Cell::Job(_) if !host.is_root => Cell::Absent("needs root, to hold that many pages in pipes".into()),
        Cell::Job(job) => Cell::of(job.with_huge_pages_left(huge_pages_left)),
        absent => absent,
    }
}

/// The targets of the cases in which both policies ran.
fn bars(results: &Results) -> Vec<Bar> {
    let bar = |case: &Case| {
        let (.., least) = *DEGREES.iter().find(|(degree, ..)| case.name.ends_with(degree))?;
        let ratios = results.ratios(&case.name, AUTO, PREALLOC, Metric::Figure);
        let ratio = Comparison::of(&ratios, Better::Higher)?.interval.median;
        let what = format!("{}, speed, {AUTO} : {PREALLOC}", case.name);
        Some(Bar::new(what, table::Cell::number(ratio, 3, ""), Limit::AtLeast(least)))
    };
    results.experiment.cases.iter().filter_map(bar).collect()
}

fn what_each_got(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number("coverage, %"),
        Column::number("figure : never's"),
        Column::number("copied, MiB"),
        Column::number("CPU of the promoter, s"),
        Column::number("refused"),
    ];
    let row = |arm: &Arm| {
        let of = |metric| middle(results, &case.name, &arm.name, metric);
        of(Metric::Figure)?;
        let ratio = Comparison::of(&results.ratios(&case.name, &arm.name, "never", Metric::Figure), Better::Higher);
        let text = |metric| of(metric).map_or("-".to_owned(), number);
        Some(vec![
            arm.name.clone(),
            text(Metric::CoveragePercent),
            ratio.map_or("-".into(), |ratio| ratio.to_string()),
            text(Metric::CopiedMib),
            text(Metric::ManagerCpuS),
            text(Metric::Refusals),
        ])
    };
    let rows = results.experiment.arms.iter().filter_map(row).collect();
    Grid { caption: case.name.clone(), columns, rows }
}

#[cfg(test)]
mod tests {
    use super::super::by_policy::tests::{host, made_up};
    use super::*;
    use crate::report::Report;

    #[test]
    fn each_run_has_as_many_huge_pages_as_its_case_says() {
        let experiment = Fragmented.define(&host());
        let left: Vec<(String, Vec<u64>)> = experiment
            .cases
            .iter()
            .enumerate()
            .map(|(index, case)| {
                let jobs = (0..experiment.arms.len()).filter_map(|arm| experiment.job(index, arm));
                let mut left: Vec<u64> = jobs.filter_map(|job| job.host.huge_pages_left).collect();
                assert!(left.len() > 10, "all jobs have it");
                left.dedup();
                (case.name.clone(), left)
            })
            .collect();
        // Half of 128 MiB, in pages of 2 MiB.
        let expected =
            [("GUPS, half left", 32), ("Phases, half left", 32), ("GUPS, none left", 0), ("Phases, none left", 0)];
        assert_eq!(left, expected.map(|(name, left)| (name.to_owned(), vec![left])));
    }

    #[test]
    fn the_lead_has_the_target_of_each_case_against_the_policy_that_asks_early() {
        let results = made_up(&Fragmented, |arm| vec![(Metric::Figure, if arm == AUTO { 0.97 } else { 1.0 })]);
        let lead = Fragmented.lead(&results);
        let expected = [
            "MISSED: GUPS, half left, speed, auto : prealloc 0.970, at least 1.",
            "MISSED: Phases, half left, speed, auto : prealloc 0.970, at least 1.",
            "met: GUPS, none left, speed, auto : prealloc 0.970, at least 0.95.",
            "met: Phases, none left, speed, auto : prealloc 0.970, at least 0.95.",
        ];
        assert_eq!(lead[lead.len() - 4..], expected);
        let alone = made_up(&Fragmented, |arm| if arm == AUTO { vec![(Metric::Figure, 1.0)] } else { vec![] });
        assert!(!Fragmented.lead(&alone).iter().any(|line| line.contains(PREALLOC)), "nothing to compare with");
    }

    #[test]
    fn a_user_without_root_has_nothing_to_run() {
        let experiment = Fragmented.define(&HostFacts { is_root: false, ..host() });
        assert_eq!(crate::schedule::turns(&experiment), []);
    }

    #[test]
    fn a_policy_without_huge_pages_is_in_the_table_with_its_refusals() {
        let results = made_up(&Fragmented, |arm| {
            let refused = if arm == AUTO { 64.0 } else { 0.0 };
            vec![(Metric::Figure, 1.0), (Metric::CoveragePercent, 0.0), (Metric::Refusals, refused)]
        });
        let report = Report::of(&results);
        let row = report.sections[0].tables[2].rows.iter().find(|row| row[0] == AUTO).expect("it ran");
        assert_eq!(row[1..], ["0", "1.000 (1.000 - 1.000) =", "-", "-", "64.00"]);
    }
}
