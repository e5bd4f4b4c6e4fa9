//! A comparison of two results of one experiment: another day, another machine, another build. Rounds of the two
//! results are not paired, so medians are compared. Beside them stand the ratios that each result has within
//! itself, which should repeat.
//!
//! ```text
//!   A: base 10 11 10 …  auto 15 16 15 …   auto : base 1.50 (1.48 - 1.52) ─┐ do they overlap?
//!   B: base 20 21 20 …  auto 31 32 30 …   auto : base 1.53 (1.51 - 1.55) ─┘
//!      B : A  2.00            2.04        from the medians of all rounds
//! ```

use crate::definition::{Arm, Case, Experiment};
use crate::metric::{Better, Metric};
use crate::report::common_sections::{above_one, machine_rows, number};
use crate::report::{BarGroup, Bars, Column, Grid, Plot, Report, Section};
use crate::results::Results;
use crate::time_to_coverage::to_coverage;
use wideleaf_measure::statistics::{Comparison, Verdict, median};

/// Half-width of an interval that is narrow enough to show small differences.
const HALF_WIDTH_GOOD: f64 = 0.02;
/// Rows that differ between any two results and are not worth showing.
const ALWAYS_DIFFERENT: [&str; 4] =
    ["began, ended", "ran for", "load at the start", "stolen by the hypervisor during all runs, ms"];

/// Reason why two results cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotComparable {
    /// The results are of different experiments.
    #[error("cannot compare A with B: A has results of {a}, B of {b}; choose results of the same experiment")]
    Experiments {
        /// Name of A's experiment.
        a: String,
        /// Name of B's experiment.
        b: String,
    },
    /// No cell has a figure in both results.
    #[error("cannot compare A with B: no case and arm has a figure in both; choose results with common cases and arms")]
    NothingInCommon,
}

/// A ratio to the first arm that both results have.
struct Row<'a> {
    case: &'a Case,
    arm: &'a Arm,
    a: Comparison,
    b: Comparison,
}

impl Row<'_> {
    /// Whether both ratios have an interval.
    fn is_known(&self) -> bool {
        self.a.verdict != Verdict::Unknown && self.b.verdict != Verdict::Unknown
    }

    fn overlaps(&self) -> bool {
        self.a.interval.overlaps(&self.b.interval)
    }
}

/// The comparison of B with A as a report.
///
/// # Errors
/// [`NotComparable`] if the results have no common figures.
pub fn report(a: &Results, b: &Results) -> Result<Report, NotComparable> {
    let (of_a, of_b) = (&a.experiment, &b.experiment);
    if of_a.name != of_b.name {
        return Err(NotComparable::Experiments { a: of_a.name.clone(), b: of_b.name.clone() });
    }
    let medians = medians(a, b);
    if medians.rows.is_empty() {
        return Err(NotComparable::NothingInCommon);
    }
    let rows = rows(a, b);
    let lead = [vec![summary(&rows)], not_the_same(of_a, of_b)].concat();
    let sections = [Some(between(medians, of_a)), within(&rows, &of_a.arms), others(a, b), Some(machines(a, b))];
    Ok(Report {
        title: format!("{}: B against A", of_a.title),
        lead,
        sections: sections.into_iter().flatten().collect(),
    })
}

/// Cases and arms that both results have, by name.
fn common<'a>(a: &'a Results, b: &'a Results) -> impl Iterator<Item = (&'a Case, &'a Arm)> {
    let has_case = |case: &&Case| b.experiment.cases.iter().any(|other| other.name == case.name);
    let arms = a.experiment.arms.iter().filter(|arm| b.experiment.arms.iter().any(|other| other.name == arm.name));
    a.experiment.cases.iter().filter(has_case).flat_map(move |case| arms.clone().map(move |arm| (case, arm)))
}

/// Values of all rounds. A time that some rounds did not reach has none: the other rounds alone are the sooner ones.
fn values(results: &Results, case: &Case, arm: &Arm, metric: Metric) -> Vec<f64> {
    if metric == Metric::TimeToCoverageS && !to_coverage(results, &case.name, &arm.name).is_complete() {
        return vec![];
    }
    results.values(&case.name, &arm.name, metric).into_iter().map(|(_, value)| value).collect()
}

/// Medians of both results, and the ratio of B to A.
fn medians(a: &Results, b: &Results) -> Grid {
    let columns = ["case", "arm"].map(Column::text).into_iter();
    let mut grid = Grid {
        caption: "The figure: medians over the rounds, and B : A with its 95 % interval".into(),
        columns: columns.chain(["A", "B", "B : A"].map(Column::number)).collect(),
        rows: vec![],
    };
    for (case, arm) in common(a, b) {
        let [of_a, of_b] = [a, b].map(|results| values(results, case, arm, Metric::Figure));
        if let Some(ratio) = Comparison::of_unpaired(&of_b, &of_a, case.better()) {
            let figure = |values: Vec<f64>| format!("{} {}", number(median(values)), case.unit);
            let numbers = [figure(of_a), figure(of_b), ratio.to_string()];
            grid.rows.push([case.name.clone(), arm.name.clone()].into_iter().chain(numbers).collect());
        }
    }
    grid
}

/// Ratios to the first arm within each of the two results.
fn rows<'a>(a: &'a Results, b: &'a Results) -> Vec<Row<'a>> {
    let Some(first) = a.experiment.arms.first() else { return vec![] };
    let row = |(case, arm): (&'a Case, &'a Arm)| {
        let ratio = |results: &Results| {
            let ratios = results.ratios(&case.name, &arm.name, &first.name, Metric::Figure);
            Comparison::of(&ratios, case.better())
        };
        Some(Row { case, arm, a: ratio(a)?, b: ratio(b)? })
    };
    common(a, b).filter(|(_, arm)| arm.name != first.name).filter_map(row).collect()
}

/// The first paragraph: whether B repeats A, and how precise each result is.
fn summary(rows: &[Row<'_>]) -> String {
    let known: Vec<&Row<'_>> = rows.iter().filter(|row| row.is_known()).collect();
    let count = |is: &dyn Fn(&Row<'_>) -> bool| known.iter().filter(|row| is(row)).count();
    let narrow = |of: fn(&Row<'_>) -> Comparison| count(&|row| of(row).half_width() <= HALF_WIDTH_GOOD);
    let all = known.len();
    let mut summary = format!(
        "Ratios to the first arm, each within its own results: intervals overlap in {} of {all} rows; half-width at \
         most 2 % in {} of {all} rows \
         of A, {} of B.",
        count(&|row| row.overlaps()),
        narrow(|row| row.a),
        narrow(|row| row.b),
    );
    if all < rows.len() {
        let left_out = rows.len() - all;
        summary += &format!(
            " {left_out} more rows have fewer than six pairs in A or B, too few for an interval, and are not counted."
        );
    }
    summary
}

/// Differences between the two definitions: cases, arms and commands.
fn not_the_same(a: &Experiment, b: &Experiment) -> Vec<String> {
    let mut notes = Vec::new();
    let names = |experiment: &Experiment| -> Vec<String> {
        let cases = experiment.cases.iter().map(|case| format!("case {}", case.name));
        cases.chain(experiment.arms.iter().map(|arm| format!("arm {}", arm.name))).collect()
    };
    let [of_a, of_b] = [a, b].map(names);
    for (name, has, lacks) in [("A", &of_a, &of_b), ("B", &of_b, &of_a)] {
        let only: Vec<&str> = has.iter().filter(|name| !lacks.contains(name)).map(String::as_str).collect();
        if !only.is_empty() {
            notes.push(format!("Only in {name}: {}.", only.join(", ")));
        }
    }
    let changed = changed_commands(a, b);
    if !changed.is_empty() {
        notes
            .push(format!("The commands in A and B differ, so these rows compare two things: {}.", changed.join(", ")));
    }
    notes
}

fn changed_commands(a: &Experiment, b: &Experiment) -> Vec<String> {
    let mut changed = Vec::new();
    for case in &a.cases {
        let Some(other_case) = b.cases.iter().find(|other| other.name == case.name) else { continue };
        for (arm, cell) in a.arms.iter().zip(&case.cells) {
            let place = b.arms.iter().position(|other| other.name == arm.name);
            let other = place.and_then(|place| other_case.cells.get(place));
            if other.is_some_and(|other| !cell.runs_the_same(other)) {
                changed.push(format!("{}, {}", case.name, arm.name));
            }
        }
    }
    changed
}

fn between(medians: Grid, experiment: &Experiment) -> Section {
    let paragraph = format!(
        "{} The ratio includes all other differences, above all the machine's other load. {}",
        above_one("B is faster", &experiment.cases),
        Verdict::LEGEND
    );
    Section { title: "B : A".into(), paragraphs: vec![paragraph], tables: vec![medians], plots: vec![] }
}

fn within(rows: &[Row<'_>], arms: &[Arm]) -> Option<Section> {
    let first = &arms.first()?.name;
    let columns = vec![
        Column::text("case"),
        Column::text("ratio"),
        Column::number("A"),
        Column::number("B"),
        Column::text("intervals"),
    ];
    let verdict = |row: &Row<'_>| match (row.is_known(), row.overlaps()) {
        (false, _) => "too few pairs",
        (true, true) => "overlap",
        (true, false) => "apart",
    };
    let cells = |row: &Row<'_>| {
        let ratio = format!("{} : {first}", row.arm.name);
        vec![row.case.name.clone(), ratio, row.a.to_string(), row.b.to_string(), verdict(row).to_owned()]
    };
    let caption = format!("Ratios of the figure to {first} within a round: median, 95 % interval");
    let grid = Grid { caption, columns, rows: rows.iter().map(cells).collect() };
    let bar = |of: Comparison| Some((of.interval.median, of.interval.low, of.interval.high));
    let group = |row: &Row<'_>| BarGroup {
        name: format!("{}: {}", row.case.name, row.arm.name),
        bars: vec![bar(row.a), bar(row.b)],
    };
    let bars = Bars {
        name: "compared".into(),
        caption: format!("Figure as a ratio to {first}, in A and in B; median and 95 % interval"),
        axis: format!("ratio to {first}"),
        reference: Some(1.0),
        series: vec!["A".into(), "B".into()],
        groups: rows.iter().map(group).collect(),
    };
    let title = "Ratios within each result".into();
    (!rows.is_empty()).then(|| Section { title, paragraphs: vec![], tables: vec![grid], plots: vec![Plot::Bars(bars)] })
}

/// Other metrics that differ by the whole interval.
fn others(a: &Results, b: &Results) -> Option<Section> {
    let columns = ["case", "arm", "metric"].map(Column::text).into_iter();
    let mut grid = Grid {
        caption: "Other metrics with an interval that excludes 1".into(),
        columns: columns.chain(["A", "B", "B : A"].map(Column::number)).collect(),
        rows: vec![],
    };
    let metrics = || Metric::ALL.into_iter().filter(|m| *m != Metric::Figure && m.better() != Better::Neither);
    for ((case, arm), metric) in common(a, b).flat_map(|cell| metrics().map(move |metric| (cell, metric))) {
        let [of_a, of_b] = [a, b].map(|results| values(results, case, arm, metric));
        let Some(ratio) = Comparison::of_unpaired(&of_b, &of_a, metric.better()) else { continue };
        if let Verdict::Better | Verdict::Worse = ratio.verdict {
            let name = format!("{} {}", metric.title(), metric.unit()).trim_end().to_owned();
            let numbers = [number(median(of_a)), number(median(of_b)), ratio.to_string()];
            grid.rows.push([case.name.clone(), arm.name.clone(), name].into_iter().chain(numbers).collect());
        }
    }
    (!grid.rows.is_empty()).then(|| Section {
        title: "Other differences".into(),
        tables: vec![grid],
        ..Section::default()
    })
}

fn machines(a: &Results, b: &Results) -> Section {
    let columns = ["property", "A", "B"].map(Column::text).into();
    let both = machine_rows(a).into_iter().zip(machine_rows(b));
    let differing = both.filter(|((what, of_a), (_, of_b))| of_a != of_b && !ALWAYS_DIFFERENT.contains(what));
    let rows: Vec<Vec<String>> = differing.map(|((what, of_a), (_, of_b))| vec![what.to_owned(), of_a, of_b]).collect();
    let when = |results: &Results| format!("{}, {} runs", results.started, results.runs.len());
    let mut paragraphs = vec![format!("A: {}. B: {}.", when(a), when(b))];
    if rows.is_empty() {
        paragraphs.push("The recorded properties of the machines are the same.".into());
        return Section { title: "The machines".into(), paragraphs, ..Section::default() };
    }
    let grid = Grid { caption: "Differences".into(), columns, rows };
    Section { title: "The machines".into(), paragraphs, tables: vec![grid], plots: vec![] }
}

#[cfg(test)]
mod tests;
