//! The parts that every report has: failures, the kind of evidence, ratios to the first arm, figures of each case and
//! arm, their development over time, what was left out, the commands, and the machine.

use crate::definition::{Arm, Case, Cell, Experiment};
use crate::metric::{Better, Metric};
use crate::report::{BarGroup, Bars, Column, Grid, Plot, Section};
use crate::results::{Environment, Results, RunOutcome};
use wideleaf_measure::figures::Bar;
use wideleaf_measure::statistics::{Comparison, Verdict};

pub use super::numbers::{decimals, interval, number};

mod actions;
mod figures;
pub(crate) mod left_out;
mod over_time;

/// Failed and missing runs, which come first.
pub fn lead(results: &Results) -> Vec<String> {
    let failed: Vec<String> = results
        .runs
        .iter()
        .filter_map(|run| match &run.outcome {
            RunOutcome::Failed(why) => Some(format!("{}, {}, round {}: {why}", run.case, run.arm, run.round)),
            RunOutcome::Measured(_) => None,
        })
        .collect();
    let mut lead = Vec::new();
    if !failed.is_empty() {
        lead.push(format!("{} of {} runs failed: {}.", failed.len(), results.runs.len(), failed.join("; ")));
    }
    if !results.is_complete {
        let left = crate::schedule::left(&results.experiment, &results.runs).len();
        lead.push(format!("This is not all of it: {left} runs were not made."));
    }
    lead
}

/// Overall results in sentences: `auto` against huge pages from the start, and both against the first arm. Without
/// `auto`: each arm against the first. `figure` says what the figure means.
pub fn summary(results: &Results, figure: &str) -> Vec<String> {
    let arms = &results.experiment.arms;
    let has = |name: &str| arms.iter().any(|arm| arm.name == name);
    let huge = ["huge", "hugetlb"].into_iter().find(|name| has(name));
    let pairs = match (has("auto"), huge, &arms[..]) {
        (true, Some(huge), [first, ..]) => vec![("auto", huge), ("auto", &*first.name), (huge, &*first.name)],
        (true, None, [first, ..]) => vec![("auto", &*first.name)],
        (false, _, [first, others @ ..]) => others.iter().map(|arm| (&*arm.name, &*first.name)).collect(),
        (_, _, []) => vec![],
    };
    pairs.into_iter().filter(|(arm, to)| arm != to).filter_map(|(arm, to)| gives(results, figure, [arm, to])).collect()
}

fn gives(results: &Results, figure: &str, [arm, to]: [&str; 2]) -> Option<String> {
    let median = |case: &Case| {
        let ratios = results.ratios(&case.name, arm, to, Metric::Figure);
        Comparison::of(&ratios, Better::Higher).map(|ratio| ratio.interval.median)
    };
    let cases = results.experiment.cases.iter();
    let ratios = cases.filter_map(|case| Some((&*case.name, median(case).filter(|ratio| *ratio > 0.0)?)));
    let ratios: Vec<(&str, f64)> = ratios.collect();
    let least = ratios.iter().min_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let most = ratios.iter().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let mean = (ratios.iter().map(|(_, ratio)| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let percent = |ratio: f64| decimals(ratio * 100.0, 1);
    Some(match &ratios[..] {
        [(case, ratio)] => format!("{arm} gives {} % of {figure} that {to} gives in {case}.", percent(*ratio)),
        _ => format!(
            "{arm} gives {} % of {figure} that {to} gives: the geometric mean of the medians of {} cases, from {} % \
             ({}) to {} % ({}).",
            percent(mean),
            ratios.len(),
            percent(least.1),
            least.0,
            percent(most.1),
            most.0
        ),
    })
}

/// A target as a sentence: a bar has blanks to be aligned with others.
pub(crate) fn bar_in_words(bar: &Bar) -> String {
    format!("{}.", bar.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The kind of evidence behind the numbers, in a sentence.
pub fn evidence(results: &Results) -> String {
    figures::evidence_line(results)
}

/// Sections of every report.
pub fn sections(results: &Results) -> Vec<Section> {
    let sections = [
        two_programs(results),
        ratios(results),
        figures::section(results),
        over_time::section(results),
        actions::section(results),
        notes(results),
        left_out::section(results),
        what_was_run(&results.experiment),
        machine(results),
    ];
    sections.into_iter().flatten().collect()
}

/// Sections for a report with the figures of all cells in its own sections: the arms and the machine.
pub fn sections_without_cells(results: &Results) -> Vec<Section> {
    let mut run = what_was_run(&results.experiment);
    run.iter_mut().for_each(|section| section.tables.truncate(1));
    [run, machine(results)].into_iter().flatten().collect()
}

/// Meaning of a ratio above 1, for the text above a table. Cases with a time as their figure are named.
pub(crate) fn above_one(faster: &str, cases: &[Case]) -> String {
    let timed: Vec<&str> = cases.iter().filter(|case| case.is_timed()).map(|case| case.name.as_str()).collect();
    match timed.is_empty() {
        true => format!("Above 1 {faster}."),
        false => format!("Above 1 {faster}, but slower in these cases, which measure a time: {}.", timed.join(", ")),
    }
}

/// Ratios between the other program and this one in each arm, for an experiment that compares two programs.
fn two_programs(results: &Results) -> Option<Section> {
    let pairs = results.experiment.arms_of_two_programs();
    let columns = pairs.iter().map(|(a, b)| Column::number(format!("{} : {}", b.name, a.name)));
    let caption = "Ratios of the figure within a round, B : A: median, 95 % interval".into();
    let mut grid =
        Grid { caption, columns: std::iter::once(Column::text("case")).chain(columns).collect(), rows: vec![] };
    for case in &results.experiment.cases {
        let ratio = |(a, b): &(&Arm, &Arm)| {
            let ratios = results.ratios(&case.name, &b.name, &a.name, Metric::Figure);
            Comparison::of(&ratios, case.better()).map_or("-".into(), |ratio| ratio.to_string())
        };
        grid.rows.push(std::iter::once(case.name.clone()).chain(pairs.iter().map(ratio)).collect());
    }
    let above_one = above_one("the other program, B, is faster", &results.experiment.cases);
    let what = format!("{above_one} {}", Verdict::LEGEND);
    let title = "B : A".into();
    (!pairs.is_empty()).then(|| Section { title, paragraphs: vec![what], tables: vec![grid], plots: vec![] })
}

/// Ratios of each arm to the first one in the figure.
fn ratios(results: &Results) -> Option<Section> {
    let experiment = &results.experiment;
    let (first, others) = experiment.arms.split_first()?;
    let columns: Vec<Column> = std::iter::once(Column::text("case"))
        .chain(others.iter().map(|arm| Column::number(format!("{} : {}", arm.name, first.name))))
        .collect();
    let mut grid =
        Grid { caption: "Ratios of the figure within a round: median, 95 % interval".into(), columns, rows: vec![] };
    let mut bars = Bars {
        name: "ratios".into(),
        caption: format!("Figure of each case, as a ratio to {}; median and 95 % interval", first.name),
        axis: format!("ratio to {}", first.name),
        reference: Some(1.0),
        series: others.iter().map(|arm| arm.name.clone()).collect(),
        groups: vec![],
    };
    for case in &experiment.cases {
        let compare = |arm: &Arm| {
            Comparison::of(&results.ratios(&case.name, &arm.name, &first.name, Metric::Figure), case.better())
        };
        let compared: Vec<Option<Comparison>> = others.iter().map(compare).collect();
        if compared.iter().all(Option::is_none) {
            continue;
        }
        let cell = |comparison: &Option<Comparison>| comparison.as_ref().map_or("-".into(), Comparison::to_string);
        grid.rows.push(std::iter::once(case.name.clone()).chain(compared.iter().map(cell)).collect());
        let bar = |comparison: &Option<Comparison>| {
            comparison.as_ref().map(|c| (c.interval.median, c.interval.low, c.interval.high))
        };
        bars.groups.push(BarGroup { name: case.name.clone(), bars: compared.iter().map(bar).collect() });
    }
    if grid.rows.is_empty() {
        return None;
    }
    let above_one = above_one(&format!("an arm is faster than {}", first.name), &experiment.cases);
    let what = format!("{above_one} {}", Verdict::LEGEND);
    Some(Section { title: "Ratios".into(), paragraphs: vec![what], tables: vec![grid], plots: vec![Plot::Bars(bars)] })
}

/// The arms and the commands.
fn what_was_run(experiment: &Experiment) -> Option<Section> {
    let mut arms =
        Grid { caption: "Arms".into(), columns: vec![Column::text("arm"), Column::text("description")], rows: vec![] };
    arms.rows.extend(experiment.arms.iter().map(|arm| vec![arm.name.clone(), arm.summary.clone()]));
    let columns = ["case", "arm", "command"].map(Column::text).to_vec();
    let mut commands = Grid { caption: "Commands".into(), columns, rows: vec![] };
    for case in &experiment.cases {
        for (arm, cell) in experiment.arms.iter().zip(&case.cells) {
            if let Cell::Job(job) = cell {
                commands.rows.push(vec![case.name.clone(), arm.name.clone(), job.command()]);
            }
        }
    }
    let paragraphs = experiment.source.iter().map(|source| format!("In the form of {source}.")).collect();
    Some(Section { title: "What was run".into(), paragraphs, tables: vec![arms, commands], plots: vec![] })
}

/// Notes of the runs, each once.
fn notes(results: &Results) -> Option<Section> {
    let mut paragraphs: Vec<String> = Vec::new();
    for run in &results.runs {
        for note in run.measured().into_iter().flat_map(|measured| &measured.notes) {
            let note = format!("{}, {}: {note}", run.case, run.arm);
            if !paragraphs.contains(&note) {
                paragraphs.push(note);
            }
        }
    }
    (!paragraphs.is_empty()).then(|| Section { title: "Notes".into(), paragraphs, ..Section::default() })
}

/// Section with the machine's properties.
fn machine(results: &Results) -> Option<Section> {
    let columns = vec![Column::text("property"), Column::text("value")];
    let rows = machine_rows(results).into_iter().map(|(what, value)| vec![what.to_owned(), value]).collect();
    let grid = Grid { caption: "Machine of the runs".into(), columns, rows };
    Some(Section { title: "The machine".into(), tables: vec![grid], ..Section::default() })
}

/// Properties of the machine, and times of the runs.
pub(crate) fn machine_rows(results: &Results) -> Vec<(&'static str, String)> {
    let Environment {
        wideleaf,
        kernel,
        cpu,
        microcode,
        cpus,
        numa_nodes,
        memory_total_mib,
        memory_available_mib,
        paging,
        is_virtual,
        has_pmu,
        walk_events,
        thp,
        khugepaged,
        governor,
        load_1m,
        not_controlled,
    } = &results.environment;
    let says = |yes: &bool| if *yes { "yes" } else { "no" }.to_owned();
    let stolen_ms = results.runs.iter().filter_map(|run| run.measured()?.metrics.get(&Metric::StolenMs));
    let stolen_ms = stolen_ms.fold(0.0, |sum, ms| sum + ms);
    vec![
        ("wideleaf", wideleaf.clone()),
        ("began, ended", format!("{}, {}", results.started, results.ended)),
        ("ran for", format!("{:.1} min, {} runs", results.elapsed_s / 60.0, results.runs.len())),
        ("CPU", format!("{cpus} x {cpu}, microcode {microcode}")),
        ("kernel", kernel.clone()),
        ("paging of guests", paging.clone()),
        ("is itself a virtual machine", says(is_virtual)),
        ("event counters (PMU)", says(has_pmu)),
        ("events of page walks", walk_events.clone()),
        (
            "memory, MiB",
            format!("{memory_total_mib}, of which {memory_available_mib} available; {numa_nodes} NUMA nodes"),
        ),
        ("THP enabled, shmem, defrag", thp.join(", ")),
        ("khugepaged", format!("{} pages every {} ms", khugepaged[1], khugepaged[0])),
        ("frequency governor", if governor.is_empty() { "none".into() } else { governor.clone() }),
        ("load at the start", load_1m.to_string()),
        ("stolen by the hypervisor during all runs, ms", format!("{stolen_ms:.0}")),
        ("not controlled", not_controlled.join(", ")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn a_case_that_measures_a_time_is_slower_above_one() {
        let mut results = fixture::results();
        results.experiment = results.experiment.against("other", "wideleaf 2");
        let said = |results: &Results| sections(results)[0].paragraphs[0].clone();
        assert!(said(&results).starts_with("Above 1 the other program, B, is faster. "), "{}", said(&results));
        results.experiment.cases[0].unit = "ns".into();
        let named = "B, is faster, but slower in these cases, which measure a time: CG A. ";
        assert!(said(&results).contains(named), "{}", said(&results));
        assert_eq!([0, 1].map(|case| results.experiment.cases[case].better()), [Better::Lower, Better::Higher]);
    }
}
