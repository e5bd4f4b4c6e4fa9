//! `consolidation`: four guests on one host. Two would gain by large pages, one holds memory without using it, and
//! one uses sparse parts of its memory. Compared are one common budget and four separate ones, by promotion of the
//! guests and memory of the host.

use super::by_policy::{bloat_mib, middle};
use crate::catalogue::Catalogued;
use crate::definition::{
    Arm, BudgetOf, Case, Cell, Experiment, GuestAmongOthers, HostFacts, HostState, Job, KhugepagedSettings, Work,
};
use crate::metric::{Better, Metric};
use crate::peers::Guest;
use crate::report::common_sections::{interval, number};
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict};

/// The `consolidation` experiment of the catalogue.
pub struct Consolidation;

const ROUNDS: u32 = 6;
/// Minimum duration of the hot guests' updates in seconds, in whole rounds. The other guests run as long.
const HOT_S: u64 = 5;
const BESIDE_MS: u64 = HOT_S * 1000 + 1000;
/// Guessed duration of a run in seconds: the hot guests share two CPUs with two others, and check their
/// tables at the end.
const SECONDS_GUESS: f64 = 12.0;

/// Tables of the hot guests: name of the case, log2 of the number of words, RAM of each guest in MiB.
const CASES: [(&str, u32, u64); 2] = [("hot 2 x 128 MiB", 24, 192), ("hot 2 x 256 MiB", 25, 320)];

/// Arms: name, description, options of each guest, owner of the budget.
const ARMS: [(&str, &str, &[&str], BudgetOf); 5] = [
    ("never", "base pages only", &["--policy", "never"], BudgetOf::Each),
    ("greedy", "greedy in each guest, each with its own budget", &["--policy", "greedy"], BudgetOf::Each),
    ("auto", "auto in each guest, each with its own budget", &["--policy", "auto"], BudgetOf::Each),
    ("auto, one budget", "auto in each guest, all registered with one wideleafd", &["--policy", "auto"], BudgetOf::All),
    (
        HOST_THP,
        "MADV_HUGEPAGE on all RAM, khugepaged without a pause",
        &["--host-page", "2m", "--policy", "never"],
        BudgetOf::Each,
    ),
];
const HOST_THP: &str = "host THP, tuned";

impl Catalogued for Consolidation {
    fn name(&self) -> &'static str {
        "consolidation"
    }

    fn summary(&self) -> &'static str {
        "four guests at once, two hot, one idle, one sparse: with separate budgets, with a daemon's common budget, \
         and under host THP"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let case = |(name, log2_words, memory_mib): (&str, u32, u64)| {
            let guests = guests(log2_words, memory_mib);
            let working_set_mib = guests.iter().map(|(_, _, guest)| guest.memory_mib).sum();
            let cells = ARMS.map(|(arm, _, more, budget)| cell(arm, more, budget, &guests, host)).to_vec();
            Case { name: name.into(), unit: "GUP/s".into(), working_set_mib, cells }
        };
        Experiment {
            name: self.name().into(),
            title: "Four guests, one host".into(),
            question: "Do the guests that gain by large pages get them soon and in equal parts, and does the host \
             keep the memory that \
                the other guests do not need?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms: ARMS.map(|(name, summary, ..)| Arm { name: name.into(), summary: summary.into() }).to_vec(),
            cases: CASES.map(case).to_vec(),
        }
    }

    fn figure(&self) -> &'static str {
        "the combined speed of both hot guests"
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        let cases = results.experiment.cases.iter();
        let told: Vec<String> = cases.flat_map(|case| slower_beside(results, &case.name)).collect();
        let what = "The figure covers the hot guests alone. Other guests, which it does not cover, are slower than \
            under never";
        if told.is_empty() { vec![] } else { vec![format!("{what}: {}.", told.join("; "))] }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let what = format!(
            "Speed is the sum of both hot guests' updates, compared with never in the same round. Lowest : highest \
             compares these two guests; 1 is fair. Time to coverage is that of the later one. Bloat is the resident \
             memory of all four guests less that under never. One vCPU of the idle guest and one of the sparse guest \
             are always busy with 2 MiB of their own. {}",
            Verdict::LEGEND
        );
        let tables = results.experiment.cases.iter().map(|case| of_case(results, case)).collect();
        vec![
            Section { title: "All four".into(), paragraphs: vec![what], tables, plots: vec![] },
            Section { title: "Each guest".into(), tables: vec![each_guest(results)], ..Section::default() },
        ]
    }
}

/// Guests with figures that do not count.
const BESIDE: [&str; 2] = ["idle", "sparse"];

/// Guests: name, whether the figure counts, definition.
fn guests(log2_words: u32, memory_mib: u64) -> [(&'static str, bool, Guest); 4] {
    let hot = || Guest::new("gups", &format!("log2_words={log2_words} seconds={HOT_S}"), memory_mib);
    let beside = |sets: &str, memory_mib| {
        let line = format!("hot=2M range=2M constant=0 {sets} phases=1 phase_ms={BESIDE_MS}");
        Guest::new("phases", &line, memory_mib)
    };
    [
        ("hot a", true, hot()),
        ("hot b", true, hot()),
        (BESIDE[0], false, beside("sparse=0 cold=128M", 192)),
        (BESIDE[1], false, beside("sparse=256M cold=0", 320)),
    ]
}

fn cell(arm: &str, more: &[&str], budget: BudgetOf, guests: &[(&str, bool, Guest)], host: &HostFacts) -> Cell {
    if let Some(why) = &host.why_no_kvm {
        return Cell::Absent(why.clone());
    }
    if budget == BudgetOf::All && !host.has_daemon {
        return Cell::Absent("wideleafd is not in the directory of this program: build or install it".into());
    }
    if arm == HOST_THP && !host.is_root {
        return Cell::Absent("needs root, to change khugepaged's settings".into());
    }
    let among = |(name, is_judged, guest): &(&str, bool, Guest)| GuestAmongOthers {
        name: (*name).into(),
        is_judged: *is_judged,
        arguments: guest.arguments().into_iter().chain(more.iter().map(|word| (*word).to_owned())).collect(),
    };
    let khugepaged = (arm == HOST_THP).then_some(KhugepagedSettings::FASTEST);
    let work = Work::Together { guests: guests.iter().map(among).collect(), budget };
    let host = HostState { khugepaged, ..HostState::default() };
    Cell::of(Job { host, ..Job::of(work, SECONDS_GUESS) })
}

fn of_case(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number("speed, GUP/s"),
        Column::number("speed : never's"),
        Column::number("lowest : highest"),
        Column::number("to coverage, s"),
        Column::number("bloat, MiB"),
        Column::number("CPU of all managers, s"),
    ];
    let row = |arm: &Arm| {
        let speeds: Vec<f64> =
            results.values(&case.name, &arm.name, Metric::Figure).into_iter().map(|(_, value)| value).collect();
        if speeds.is_empty() {
            return None;
        }
        let ratio = Comparison::of(&results.ratios(&case.name, &arm.name, "never", Metric::Figure), Better::Higher);
        let text = |value: Option<f64>| value.map_or("-".to_owned(), number);
        let of = |metric| text(middle(results, &case.name, &arm.name, metric));
        Some(vec![
            arm.name.clone(),
            interval(&speeds),
            ratio.map_or("-".into(), |ratio| ratio.to_string()),
            of(Metric::Fairness),
            of(Metric::TimeToCoverageS),
            text(bloat_mib(results, &case.name, &arm.name)),
            of(Metric::ManagerCpuS),
        ])
    };
    Grid { caption: case.name.clone(), columns, rows: results.experiment.arms.iter().filter_map(row).collect() }
}

/// Guests outside the figure that are certainly slower than under `never`, by more than 2 % in the
/// median, with their arm.
fn slower_beside(results: &Results, case: &str) -> Vec<String> {
    let mut told = vec![];
    for (arm, name) in ARMS.iter().flat_map(|(arm, ..)| BESIDE.map(|name| (arm, name))) {
        let never = figures_of(results, case, "never", name);
        let ratio = |(round, figure): (u32, f64)| {
            let of_never = never.iter().find(|(other, _)| *other == round)?.1;
            (of_never > 0.0).then(|| figure / of_never)
        };
        let ratios: Vec<f64> = figures_of(results, case, arm, name).into_iter().filter_map(ratio).collect();
        let is_slower =
            |to: &Comparison| to.verdict == Verdict::Worse && to.interval.median < 1.0 - Equivalence::MARGIN;
        let slower = Comparison::of(&ratios, Better::Higher).filter(is_slower);
        told.extend(slower.map(|to| format!("{name} under {arm} in {case} ({to})")));
    }
    told
}

/// Figures of a guest by round, from the notes of the runs: `sparse: figure 95152084, coverage 0 %, ...`.
fn figures_of(results: &Results, case: &str, arm: &str, guest: &str) -> Vec<(u32, f64)> {
    let begin = format!("{guest}: figure ");
    let figure = |note: &String| note.strip_prefix(&begin)?.split(',').next()?.parse().ok();
    let of_run = |run: &crate::results::Run| Some((run.round, run.measured()?.notes.iter().find_map(figure)?));
    results.runs_of(case, arm).filter_map(of_run).collect()
}

/// Notes of the first round about each guest.
fn each_guest(results: &Results) -> Grid {
    let columns = vec![Column::text("case"), Column::text("arm"), Column::text("guests, in the first round")];
    let row =
        |run: &crate::results::Run| Some(vec![run.case.clone(), run.arm.clone(), run.measured()?.notes.join(" ")]);
    let rows = results.runs.iter().filter(|run| run.round == 1).filter_map(row).collect();
    Grid { caption: "Each guest".into(), columns, rows }
}

#[cfg(test)]
mod tests {
    use super::super::by_policy::tests::{host, made_up};
    use super::*;
    use crate::results::RunOutcome;

    #[test]
    fn the_arm_with_one_budget_is_absent_without_a_daemon_and_the_other_arms_run() {
        let experiment = Consolidation.define(&HostFacts { has_daemon: false, ..host() });
        let absent = |cell: &Cell| matches!(cell, Cell::Absent(why) if why.contains("wideleafd"));
        for case in &experiment.cases {
            assert_eq!(case.cells.iter().map(absent).collect::<Vec<_>>(), [false, false, false, true, false]);
        }
    }

    #[test]
    fn the_guests_are_the_same_in_all_arms_except_for_their_policy() {
        let experiment = Consolidation.define(&host());
        for case in &experiment.cases {
            let mut programs: Vec<Vec<String>> = Vec::new();
            for cell in &case.cells {
                let Cell::Job(job) = cell else { panic!("this host can run all cells") };
                let Work::Together { guests, .. } = &job.work else { panic!("four guests") };
                let until_policy = |guest: &GuestAmongOthers| {
                    let at = guest.arguments.iter().position(|word| word == "--cmdline").expect("all have one");
                    guest.arguments[..at + 2].join(" ")
                };
                programs.push(guests.iter().map(until_policy).collect());
            }
            programs.dedup();
            assert_eq!(programs.len(), 1, "{programs:?}");
            assert_eq!(programs[0].len(), 4);
        }
    }

    #[test]
    fn a_slower_guest_beside_the_hot_ones_is_named_first() {
        let mut results = made_up(&Consolidation, |_| vec![(Metric::Figure, 1.0)]);
        for run in &mut results.runs {
            let figure = if run.arm == "auto" { 86.0 } else { 100.0 };
            if let RunOutcome::Measured(measured) = &mut run.outcome {
                measured.notes = vec![format!("sparse: figure {figure}, coverage 0 %, resident 13.39 MiB.")];
            }
        }
        let lead = Consolidation.lead(&results).concat();
        assert!(lead.starts_with("The figure covers the hot guests alone. "), "{lead}");
        assert!(
            lead.contains(": sparse under auto in hot 2 x 128 MiB (0.860 (0.860 - 0.860)); sparse under auto in"),
            "{lead}"
        );
        assert!(!lead.contains("greedy"), "{lead}");
    }

    #[test]
    fn bloat_is_compared_with_never_in_the_same_round() {
        let results = made_up(&Consolidation, |arm| {
            let resident = if arm == "greedy" { 900.0 } else { 500.0 };
            vec![(Metric::Figure, 1.0), (Metric::ResidentMib, resident), (Metric::Fairness, 0.9)]
        });
        let rows = &Consolidation.sections(&results)[0].tables[0].rows;
        let bloat = |arm: &str| rows.iter().find(|row| row[0] == arm).map(|row| row[5].as_str());
        assert_eq!((bloat("greedy"), bloat("auto")), (Some("400.0"), Some("0")));
    }
}
