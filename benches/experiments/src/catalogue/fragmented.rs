//! `fragmented`: the policies on a host whose free memory is in pieces, on purpose. What large pages each of them gets, from whom it takes
//! them, and what it spends on those it does not get.

use super::by_policy::{self, Kernel, kernel, middle};
use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts};
use crate::metric::{Better, Metric};
use crate::peers::Peer;
use crate::report::every::number;
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use crate::statistics::{Comparison, Verdict};

/// See the head of this file.
pub struct Fragmented;

const ROUNDS: u32 = 6;
/// Others that take what the kernel finds. A pool is not among them: one that was reserved before does not notice, a later one is not to be had.
const PEERS: [Peer; 3] = [Peer::Thp, Peer::ThpTuned, Peer::QemuThp];
/// What breaking up the free memory adds to a run: a minute for 20 GiB that the hypervisor below has taken back, shared by two cases of a round.
const BREAKING_S: f64 = 2.0;

const KERNELS: [Kernel; 2] = [
    kernel("GUPS", ["gups", "log2_words=24", "GUP/s"], 192, 2.0),
    kernel("Phases", ["phases", "phase_ms=400 sparse=32M cold=16M constant=16M", "updates/s"], 192, 3.0),
];

/// What each kernel's data take. It is the same, so that memory need not be broken up anew between their cases.
const DATA_MIB: u64 = 128;

/// How much is left of the huge pages that the kernel's data would fill.
const DEGREES: [(&str, u64); 2] = [("half left", 50), ("none left", 0)];

impl Catalogued for Fragmented {
    fn name(&self) -> &'static str {
        "fragmented"
    }

    fn summary(&self) -> &'static str {
        "the policies on a host whose memory is in pieces on purpose: half of the huge pages that are needed, and none"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let mut cases = Vec::new();
        for (degree, percent_left) in DEGREES {
            for kernel in KERNELS {
                let left = DATA_MIB / 2 * percent_left / 100;
                let cells = kernel.cells(&PEERS, kernel.seconds + BREAKING_S, host);
                let cells = cells.into_iter().map(|cell| in_pieces(cell, left, host)).collect();
                cases.push(kernel.case(format!("{}, {degree}", kernel.name), cells));
            }
        }
        Experiment {
            name: self.name().into(),
            title: "Memory in pieces".into(),
            question: "What do the policies get of a host that has only half of the huge pages they need, or none, and what do they spend?".into(),
            source: None,
            rounds: ROUNDS,
            arms: by_policy::arms().into_iter().chain(PEERS.map(Peer::arm)).collect(),
            cases,
        }
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        by_policy::lead(results)
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let tables = results.experiment.cases.iter().map(|case| what_each_got(results, case)).collect();
        let what = format!(
            "Each run found all free memory of the host broken up, but for as many blocks of 2 MiB as its case says: of every other block one page \
             was kept where it is, in a pipe, so that compaction could make none. The figure is beside never's in the same round. {}",
            Verdict::LEGEND
        );
        let standing = Section {
            title: "auto beside the fastest".into(),
            tables: vec![by_policy::standings(results)],
            ..Section::default()
        };
        vec![Section { title: "What each got".into(), paragraphs: vec![what], tables, plots: vec![] }, standing]
    }
}

/// The same on a host in pieces.
fn in_pieces(cell: Cell, huge_pages_left: u64, host: &HostFacts) -> Cell {
    match cell {
        Cell::Job(_) if !host.is_root => Cell::Absent("only root may keep so many pages where they are".into()),
        Cell::Job(job) => Cell::of(job.with_huge_pages_left(huge_pages_left)),
        absent => absent,
    }
}

fn what_each_got(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number("coverage, %"),
        Column::number("figure : never's"),
        Column::number("copied, MiB"),
        Column::number("CPU of who promotes, s"),
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
    use super::super::by_policy::AUTO;
    use super::super::by_policy::tests::{host, made_up};
    use super::*;
    use crate::report::Report;

    #[test]
    fn every_run_finds_as_many_huge_pages_as_its_case_says() {
        let experiment = Fragmented.define(&host());
        let left: Vec<(String, Vec<u64>)> = experiment
            .cases
            .iter()
            .enumerate()
            .map(|(index, case)| {
                let jobs = (0..experiment.arms.len()).filter_map(|arm| experiment.job(index, arm));
                let mut left: Vec<u64> = jobs.filter_map(|job| job.host.huge_pages_left).collect();
                assert!(left.len() > 10, "all of them do");
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
    fn who_is_not_root_has_nothing_to_run() {
        let experiment = Fragmented.define(&HostFacts { is_root: false, ..host() });
        assert_eq!(crate::schedule::turns(&experiment), []);
    }

    #[test]
    fn a_policy_that_gets_nothing_is_in_the_table_with_what_it_was_refused() {
        let results = made_up(&Fragmented, |arm| {
            let refused = if arm == AUTO { 64.0 } else { 0.0 };
            vec![(Metric::Figure, 1.0), (Metric::CoveragePercent, 0.0), (Metric::Refusals, refused)]
        });
        let report = Report::of(&results);
        let row = report.sections[0].tables[2].rows.iter().find(|row| row[0] == AUTO).expect("it ran");
        assert_eq!(row[1..], ["0", "1.000 (1.000 - 1.000) =", "-", "-", "64.00"]);
    }
}
