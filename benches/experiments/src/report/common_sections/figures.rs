//! All measured metrics in a few narrow tables, one table per topic.

use crate::definition::{Arm, Case, Cell};
use crate::metric::Metric;
use crate::report::common_sections::{interval, number};
use crate::report::{Column, Grid, Section, simulated};
use crate::results::{Evidence, Results, Run};
use crate::time_to_coverage::{LEGEND, NOT_REACHED, in_words, to_coverage};
use wideleaf_measure::event_times::EventTimes;
use wideleaf_measure::statistics::median;

/// Tables and their metrics. Metrics in none of them go to a table of their own.
const TABLES: [(&str, &[Metric]); 4] = [
    ("Speed", &[Metric::Figure, Metric::Seconds, Metric::FirstByteMs, Metric::GapP99Us, Metric::GapMaxUs]),
    (
        "Memory",
        &[
            Metric::ResidentMib,
            Metric::CoveragePercent,
            Metric::TimeToCoverageS,
            Metric::Pages4k,
            Metric::Pages2m,
            Metric::Pages1g,
        ],
    ),
    ("Cost", &[Metric::BloatMib, Metric::CopiedMib, Metric::ManagerCpuS, Metric::StolenMs]),
    (
        "Translation",
        &[
            Metric::DtlbMisses,
            Metric::WalkL2Misses,
            Metric::DataL2Misses,
            Metric::ItlbMisses,
            Metric::WalkCycles,
            Metric::PredictedPercent,
            Metric::SavedPercent,
        ],
    ),
];

/// Cell text for a value that was not measured.
const NONE: &str = "-";

/// Word for a cell with numbers from a model.
const SIMULATED: &str = "simulated";

/// The section; `None` if no metric was measured.
pub(super) fn section(results: &Results) -> Option<Section> {
    let results = &without_rounds_left_out(results);
    let is_there = |metric: &Metric| {
        results.runs.iter().any(|run| run.measured().is_some_and(|measured| measured.metrics.contains_key(metric)))
    };
    let there: Vec<Metric> = Metric::ALL.into_iter().filter(is_there).collect();
    let other: Vec<Metric> =
        there.iter().copied().filter(|metric| TABLES.iter().all(|(_, of)| !of.contains(metric))).collect();
    let mut section = Section { title: "Figures".into(), ..Section::default() };
    for (title, metrics) in TABLES.iter().copied().chain([("Other", &other[..])]) {
        let metrics: Vec<Metric> = metrics.iter().copied().filter(|metric| there.contains(metric)).collect();
        let (varying, same) = varying_and_same(results, metrics);
        if !same.is_empty() {
            section.paragraphs.push(format!("{title}, the same in all measured cells: {}.", same.join(", ")));
        }
        if !varying.is_empty() {
            section.tables.push(table(results, title, &varying));
        }
    }
    let is_partial = |(case, arm, _): (&Case, &Arm, &Cell)| times(results, case, arm).is_partial();
    section
        .paragraphs
        .extend(cells(results).any(is_partial).then(|| format!("In the times to 95 % coverage, {LEGEND}")));
    (!there.is_empty()).then_some(section)
}

/// The results without runs that lack a figure, in cells with figures: such a round is left out, also of its costs.
fn without_rounds_left_out(results: &Results) -> Results {
    let has_figure = |run: &Run| run.measured().is_some_and(|one| one.metrics.contains_key(&Metric::Figure));
    let is_left_out = |run: &Run| !has_figure(run) && results.runs_of(&run.case, &run.arm).any(has_figure);
    let mut kept = results.clone();
    kept.runs.retain(|run| !is_left_out(run));
    kept
}

/// Metrics with varying medians, and those with equal medians in all cells, in words.
fn varying_and_same(results: &Results, metrics: Vec<Metric>) -> (Vec<Metric>, Vec<String>) {
    let (mut varying, mut same) = (vec![], vec![]);
    for metric in metrics {
        let mut medians: Vec<String> =
            cells(results).map(|(case, arm, _)| median_of(results, case, arm, metric)).collect();
        medians.retain(|median| median != NONE);
        let rows = medians.len();
        medians.dedup();
        match &medians[..] {
            [one] if rows > 1 && metric != Metric::Figure => {
                same.push(format!("{} {one} {}", metric.title(), metric.unit()).trim_end().to_owned());
            }
            _ => varying.push(metric),
        }
    }
    (varying, same)
}

fn table(results: &Results, title: &str, metrics: &[Metric]) -> Grid {
    let heading = |metric: &Metric| match (metric, metric.unit()) {
        (Metric::Figure, _) => Column::number("figure (95 % interval)"),
        (_, "") => Column::number(metric.title()),
        (_, unit) => Column::number(format!("{}, {unit}", metric.title())),
    };
    let head = [Column::text("case"), Column::text("arm"), Column::number("rounds"), Column::text("evidence")];
    // The reasons for absent cells come once, further below.
    let there = cells(results).filter(|(.., cell)| matches!(cell, Cell::Job(_)));
    let rows = there.map(|(case, arm, cell)| {
        let rounds = results.runs_of(&case.name, &arm.name).filter(|run| run.measured().is_some()).count();
        let evidence = evidence(results, case, arm, cell);
        let head = [case.name.clone(), arm.name.clone(), rounds.to_string(), evidence.into()];
        let text = |metric: &Metric| match median_of(results, case, arm, *metric) {
            number if evidence == SIMULATED && number != NONE => simulated(&number),
            text => text,
        };
        head.into_iter().chain(metrics.iter().map(text)).collect()
    });
    Grid {
        caption: format!("{title}: medians over the rounds"),
        columns: head.into_iter().chain(metrics.iter().map(heading)).collect(),
        rows: rows.collect(),
    }
}

/// Cells in the order of tables.
pub(super) fn cells(results: &Results) -> impl Iterator<Item = (&Case, &Arm, &Cell)> {
    let arms = &results.experiment.arms;
    results.experiment.cases.iter().flat_map(move |case| arms.iter().zip(&case.cells).map(move |(a, c)| (case, a, c)))
}

/// Median of a metric as text. The figure also has its interval.
fn median_of(results: &Results, case: &Case, arm: &Arm, metric: Metric) -> String {
    let values: Vec<f64> = results.values(&case.name, &arm.name, metric).into_iter().map(|(_, value)| value).collect();
    match metric {
        Metric::TimeToCoverageS => in_words(&times(results, case, arm), NOT_REACHED),
        _ if values.is_empty() => NONE.into(),
        Metric::Figure => format!("{} {}", interval(&values), case.unit),
        _ if metric.unit().is_empty() => count(median(values)),
        _ => number(median(values)),
    }
}

fn times(results: &Results, case: &Case, arm: &Arm) -> EventTimes {
    to_coverage(results, &case.name, &arm.name)
}

/// A count as a whole number, except the mean of two middle values.
pub(super) fn count(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { number(value) }
}

fn evidence(results: &Results, case: &Case, arm: &Arm, cell: &Cell) -> &'static str {
    let known = results.runs_of(&case.name, &arm.name).find_map(|run| Some(run.measured()?.evidence));
    match (cell, known) {
        (Cell::Absent(_), _) => "absent",
        (_, Some(Evidence::Measured)) => "measured",
        (_, Some(Evidence::Simulated)) => SIMULATED,
        (_, Some(Evidence::Lab)) => "lab",
        (_, None) => "-",
    }
}

/// The kind of evidence behind the numbers, in a sentence.
pub(super) fn evidence_line(results: &Results) -> String {
    let all: Vec<&str> = cells(results).map(|(case, arm, cell)| evidence(results, case, arm, cell)).collect();
    let of = |word: &str| all.iter().filter(|known| **known == word).count();
    let environment = &results.environment;
    let below = if environment.is_virtual { ", which is itself a virtual machine" } else { "" };
    let meanings = [
        ("measured", format!("measured on this machine{below} (paging of guests: {})", environment.paging)),
        (SIMULATED, "simulated by a model of a machine".into()),
        ("lab", "counted in an emulated machine, which says nothing about speed".into()),
        ("absent", "absent, for the reasons below".into()),
        ("-", "not run, or failed".into()),
    ];
    let parts = meanings.iter().filter(|(word, _)| of(word) > 0);
    let parts: Vec<String> = parts.map(|(word, meaning)| format!("{} {meaning}", of(word))).collect();
    format!("Evidence: of {} cells, {}.", all.len(), parts.join("; "))
}
