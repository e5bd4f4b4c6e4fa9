//! `policies`: every policy with every kernel, beside the other ways to large pages on a host. Results are speed,
//! memory, time to coverage, and cost.

use super::by_policy::{self, AUTO, Kernel, arms_by_case, bloat_mib, kernel, middle, middle_in_words};
use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Experiment, HostFacts};
use crate::metric::{Better, Metric};
use crate::peers::Peer;
use crate::report::common_sections::{interval, number};
use crate::report::{BarGroup, Bars, Column, Grid, Lines, Plot, Section};
use crate::results::{Measured, Results};
use crate::time_to_coverage::LEGEND;
use wideleaf_measure::statistics::Comparison;

/// The `policies` experiment of the catalogue.
pub struct Policies;

const ROUNDS: u32 = 6;

/// Kernels with runs of half a second to four seconds. 16 policies and peers with six runs each then take less than
/// an hour. BT, LU and SP of class A would take 6 to 16 s. So would the first touch of much memory, if a fault takes
/// a guest 25 us: MG A has 434 MiB.
const KERNELS: [Kernel; 13] = [
    kernel("GUPS", ["gups", "log2_words=24", "GUP/s"], 192, 3.0),
    kernel("GUPS, half sparse", ["gups", "log2_words=24 sparse=128M", "GUP/s"], 320, 2.5),
    kernel("BT W", ["npb.bt", "class=W", "Mop/s"], 64, 1.6),
    kernel("CG A", ["npb.cg", "class=A", "Mop/s"], 128, 1.6),
    kernel("FT A", ["npb.ft", "class=A", "Mop/s"], 448, 2.0),
    kernel("IS B", ["npb.is", "class=B", "Mop/s"], 384, 2.5),
    kernel("LU W", ["npb.lu", "class=W", "Mop/s"], 64, 1.6),
    kernel("MG W", ["npb.mg", "class=W", "Mop/s"], 128, 0.5),
    kernel("SP W", ["npb.sp", "class=W", "Mop/s"], 64, 2.5),
    kernel("STREAM", ["stream", "words=5592405 times=20", "MB/s"], 192, 1.5),
    kernel("Sweep3D 100", ["sweep3d", "n=100", "M/s"], 192, 3.0),
    kernel("AMR", ["amr", "", "M/s"], 192, 2.0),
    kernel("Phases", ["phases", "phase_ms=400", "updates/s"], 320, 3.0),
];

/// The case with a picture of its memory over time.
const SHOWN: &str = "GUPS";

impl Catalogued for Policies {
    fn name(&self) -> &'static str {
        "policies"
    }

    fn summary(&self) -> &'static str {
        "every policy with every kernel, compared with QEMU, host THP and hugetlb: speed, bloat, time to coverage, cost"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let case = |kernel: Kernel| kernel.case(kernel.name.into(), kernel.cells(&Peer::ALL, kernel.seconds, host));
        Experiment {
            name: self.name().into(),
            title: "Every policy, every kernel".into(),
            question: "How much faster does each policy make each kernel, what does it take from the host for that, \
             and does auto do \
                as well as the best policy?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms: arms(),
            cases: KERNELS.map(case).to_vec(),
        }
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        by_policy::lead(results)
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        vec![standing(results), memory(results), coverage(results), cost(results), peers(results)]
    }
}

fn arms() -> Vec<Arm> {
    by_policy::arms().into_iter().chain(Peer::ALL.map(Peer::arm)).collect()
}

fn standing(results: &Results) -> Section {
    let what = "The fastest other policy is the one with the highest median, without auto. If many are equally good, \
     chance \
        picks one, and its luck counts against auto. Auto is within 2 % if the whole 95 % interval \
        of the ratio is (two one-sided tests at 2.5 %), faster or slower if the whole interval is on that \
        side of 1, and not decided if the interval allows more than one of these. \
        Bloat is resident memory less that of the same round under never.";
    Section {
        title: "auto compared with the fastest other policy".into(),
        paragraphs: vec![what.into()],
        tables: vec![by_policy::standings(results)],
        plots: vec![Plot::Bars(bars_of_auto(results))],
    }
}

/// Ratios of `auto` to `never` and to every peer, with one group per case.
fn bars_of_auto(results: &Results) -> Bars {
    let others: Vec<String> =
        std::iter::once("never".to_owned()).chain(Peer::ALL.map(|peer| peer.arm().name)).collect();
    let bar = |case: &str, other: &String| {
        let ratios = results.ratios(case, AUTO, other, Metric::Figure);
        Comparison::of(&ratios, Better::Higher).map(|c| (c.interval.median, c.interval.low, c.interval.high))
    };
    let group = |case: &Case| BarGroup {
        name: case.name.clone(),
        bars: others.iter().map(|other| bar(&case.name, other)).collect(),
    };
    Bars {
        name: "auto".into(),
        caption: "Figure under auto, as a ratio to the figure of other arms; median and 95 % interval".into(),
        axis: "auto : other".into(),
        reference: Some(1.0),
        series: others.clone(),
        groups: results.experiment.cases.iter().map(group).collect(),
    }
}

fn memory(results: &Results) -> Section {
    let grid = arms_by_case(results, "Bloat, MiB: medians", |case, arm| bloat_mib(results, case, arm).map(number));
    Section { title: "Memory".into(), tables: vec![grid], ..Section::default() }
}

fn coverage(results: &Results) -> Section {
    let grid = |caption: &str, metric| by_metric(results, caption, metric);
    let what = format!(
        "A figure covers the whole timed part, which may include a long promotion: see the time to coverage. {LEGEND} \
         Of QEMU's guests, the windows of the data are looked at. Of the others, all of RAM is, less the large pages \
         that are outside of the data at the end: where these come later than those of the data, the time is too long."
    );
    let tables = vec![
        grid(
            "From the start of the timed part to 95 % of the data on large pages, s: medians",
            Metric::TimeToCoverageS,
        ),
        grid("Data on large pages at the end, %: medians", Metric::CoveragePercent),
    ];
    let plots = vec![Plot::Lines(over_time(results))];
    Section { title: "Coverage".into(), paragraphs: vec![what], tables, plots }
}

/// Table of the medians of a metric.
fn by_metric(results: &Results, caption: &str, metric: Metric) -> Grid {
    arms_by_case(results, caption, |case, arm| middle_in_words(results, case, arm, metric))
}

/// Coverage over time of each arm, from its first measured round.
fn over_time(results: &Results) -> Lines {
    let first = |arm: &Arm| results.runs_of(SHOWN, &arm.name).find_map(|run| run.measured());
    let line = |arm: &Arm| Some((arm.name.clone(), percent_over_time(first(arm)?)));
    let lines = results.experiment.arms.iter().filter_map(line).filter(|(_, points)| !points.is_empty());
    Lines {
        name: "coverage".into(),
        caption: format!("{SHOWN}: share of resident guest RAM on large pages; one run of each arm"),
        x_axis: "time since the start of the timed part, s".into(),
        y_axis: "on large pages, %".into(),
        y_max: Some(100.0),
        lines: lines.collect(),
    }
}

fn percent_over_time(measured: &Measured) -> Vec<(f64, f64)> {
    let percent = |sample: &crate::results::Sample| {
        let large = sample.huge_mib + sample.giant_mib;
        let all = large + sample.base_mib;
        (all > 0.0).then(|| (sample.at_s, large * 100.0 / all))
    };
    measured.series.iter().filter_map(percent).collect()
}

fn cost(results: &Results) -> Section {
    let grid = |caption: &str, metric| by_metric(results, caption, metric);
    let what = "The manager's CPU time is that of its loop and its sensors; in the arms with host THP it is \
     khugepaged's. The time that page \
        faults take to clear a huge page is in the guest's time instead.";
    let tables = vec![
        grid("CPU time of the promoter, s: medians", Metric::ManagerCpuS),
        grid("Copied, MiB: medians", Metric::CopiedMib),
    ];
    Section { title: "Cost".into(), paragraphs: vec![what.into()], tables, plots: vec![] }
}

/// Start, speed and memory of the peers.
fn peers(results: &Results) -> Section {
    let columns = vec![
        Column::text("case"),
        Column::text("arm"),
        Column::number("figure : auto's"),
        Column::number("to the first line, ms"),
        Column::number("resident, MiB"),
    ];
    let mut rows = Vec::new();
    for case in &results.experiment.cases {
        for name in std::iter::once(AUTO.to_owned()).chain(Peer::ALL.map(|peer| peer.arm().name)) {
            let all =
                |metric| results.values(&case.name, &name, metric).into_iter().map(|(_, v)| v).collect::<Vec<_>>();
            if all(Metric::Figure).is_empty() {
                continue;
            }
            let ratio = Comparison::of(&results.ratios(&case.name, &name, AUTO, Metric::Figure), Better::Higher);
            let resident = middle(results, &case.name, &name, Metric::ResidentMib);
            rows.push(vec![
                case.name.clone(),
                name.clone(),
                ratio.map_or("-".into(), |ratio| ratio.to_string()),
                interval(&all(Metric::FirstByteMs)),
                resident.map_or("-".into(), number),
            ]);
        }
    }
    let caption = "auto, and peers with the same image, command line and RAM".into();
    let what = "The first line is the guest's first line, timed from the start of the process. QEMU loads the image \
     through its firmware, and \
        its start includes 1 ms for the link to our process.";
    let tables = vec![Grid { caption, columns, rows }];
    Section { title: "Peers".into(), paragraphs: vec![what.into()], tables, plots: vec![] }
}

#[cfg(test)]
mod tests {
    use super::super::by_policy::tests::{host, made_up};
    use super::*;
    use crate::definition::Cell;
    use crate::report::Report;
    use crate::results::RunOutcome;

    fn figures(auto: f64, bloat_of_auto: f64) -> Results {
        made_up(&Policies, |arm| {
            let (figure, resident) = match arm {
                "never" => (1.0, 100.0),
                "thp" => (1.1, 120.0),
                "greedy" => (1.5, 228.0),
                AUTO => (auto, 100.0 + bloat_of_auto),
                _ => (1.2, 228.0),
            };
            vec![(Metric::Figure, figure), (Metric::ResidentMib, resident)]
        })
    }

    #[test]
    fn the_first_paragraph_names_the_cases_in_which_auto_is_worse_with_their_numbers() {
        let first = |results: &Results| Report::of(results).lead.first().cloned().expect("there is a lead");
        let slow = first(&figures(1.2, 0.0));
        assert!(slow.starts_with("auto is slower than the fastest other policy in 13 of 13 cases: GUPS"), "{slow}");
        assert!(slow.contains("GUPS (0.800 (0.800 - 0.800) of greedy's figure);"), "{slow}");
        let fat = first(&figures(1.5, 64.0));
        assert!(fat.contains("MG W: 64.00 MiB, but other policies have less (never 0, thp 20.00 MiB)"), "{fat}");
        assert!(!fat.contains("figure"), "auto is as fast: {fat}");
        let good = first(&figures(1.48, 2.0));
        assert!(
            good.starts_with("auto is shown to be within 2 % of the fastest other policy, or faster, in 13 of 13"),
            "{good}"
        );
        assert!(good.ends_with("Its bloat is the least or the second-least everywhere."), "{good}");
    }

    #[test]
    fn coverage_that_only_some_rounds_reach_has_their_number_and_no_time_of_the_first() {
        let mut results = made_up(&Policies, |_| vec![(Metric::Figure, 1.0), (Metric::CoveragePercent, 50.0)]);
        for run in &mut results.runs {
            let rounds = match run.arm.as_str() {
                AUTO => 1,
                "greedy" => 5,
                "thp" => 6,
                _ => 0,
            };
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            if run.round <= rounds {
                measured.metrics.insert(Metric::TimeToCoverageS, 0.1);
            }
        }
        let section = coverage(&results);
        let cell =
            |arm: &str| section.tables[0].rows.iter().find(|row| row[0] == arm).map_or("no row", |row| row[1].as_str());
        assert_eq!(
            [AUTO, "greedy", "thp", "never", "giant"].map(cell),
            ["not reached (1 of 6)", "0.1000 (5 of 6)", "0.1000", "not reached", "no row"]
        );
        assert!(section.paragraphs[0].contains(LEGEND), "{:?}", section.paragraphs);
    }

    #[test]
    fn a_case_without_auto_is_counted_as_not_compared() {
        let mut results = figures(1.5, 0.0);
        results.runs.retain(|run| run.case != "GUPS" || run.arm != AUTO);
        let lead = Policies.lead(&results);
        assert!(
            lead[0].contains("in 12 of 12 cases") && lead[0].ends_with("Cases in which auto cannot be compared: 1."),
            "{lead:?}"
        );
    }

    #[test]
    fn nothing_is_claimed_if_only_auto_ran() {
        let mut results = figures(1.5, 0.0);
        results.runs.retain(|run| run.arm == AUTO);
        assert_eq!(Policies.lead(&results), [""; 0]);
        results.runs.clear();
        assert_eq!(Policies.lead(&results), [""; 0]);
    }

    #[test]
    fn a_peer_has_the_same_guest_and_every_arm_has_a_cell_in_every_case() {
        let experiment = Policies.define(&host());
        for case in &experiment.cases {
            assert_eq!(case.cells.len(), experiment.arms.len(), "{}", case.name);
        }
        let absent = |cell: &Cell| matches!(cell, Cell::Absent(_));
        let absent: Vec<&str> = experiment
            .arms
            .iter()
            .zip(&experiment.cases[0].cells)
            .filter(|(_, cell)| absent(cell))
            .map(|(arm, _)| arm.name.as_str())
            .collect();
        assert_eq!(absent, ["giant"]);
    }

    #[test]
    fn a_host_without_kvm_has_nothing_to_run_and_gives_the_reason_in_every_cell() {
        let host = HostFacts { why_no_kvm: Some("there is no /dev/kvm".into()), ..host() };
        let experiment = Policies.define(&host);
        assert_eq!(crate::schedule::turns(&experiment), []);
        let says = |cell: &Cell| *cell == Cell::Absent("there is no /dev/kvm".into());
        assert!(experiment.cases.iter().all(|case| case.cells.iter().all(says)));
    }

    #[test]
    fn it_takes_less_than_an_hour() {
        let experiment = Policies.define(&host());
        let turns = crate::schedule::turns(&experiment);
        let minutes = crate::schedule::expected_of_all(&experiment, &[], &turns).as_secs_f64() / 60.0;
        assert!((20.0..60.0).contains(&minutes), "{minutes}");
    }

    #[test]
    fn coverage_over_time_is_a_share_of_resident_memory() {
        let sample =
            |at_s, base_mib, huge_mib| crate::results::Sample { at_s, base_mib, huge_mib, ..Default::default() };
        let series = vec![sample(-1.0, 0.0, 0.0), sample(0.0, 100.0, 0.0), sample(1.0, 25.0, 75.0)];
        let measured = Measured { series, ..Measured::default() };
        assert_eq!(percent_over_time(&measured), [(0.0, 0.0), (1.0, 75.0)]);
    }
}
