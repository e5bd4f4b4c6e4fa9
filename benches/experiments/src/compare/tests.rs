//! Comparisons of the fixture with changed copies of itself: the sentences and rows that name the differences.

use super::*;
use crate::definition::{Cell, Job};
use crate::report::fixture;
use crate::report::text::text;
use crate::results::RunOutcome;

/// The fixture with every figure of an arm multiplied by a factor.
fn scaled(arm: &str, by: f64) -> Results {
    let mut results = fixture::results();
    for run in results.runs.iter_mut().filter(|run| run.arm == arm) {
        if let RunOutcome::Measured(measured) = &mut run.outcome {
            measured.metrics.entry(Metric::Figure).and_modify(|figure| *figure *= by);
        }
    }
    results
}

fn lead(a: &Results, b: &Results) -> String {
    report(a, b).expect("the results have common figures").lead.join(" ")
}

#[test]
fn the_same_results_agree_in_all_rows() {
    let results = fixture::results();
    let said = lead(&results, &results);
    let expected = "intervals overlap in 2 of 2 rows; half-width at most 2 % in 2 of 2 rows of A, 2 of B.";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn a_faster_machine_changes_no_ratio_and_a_slower_arm_does() {
    let once = fixture::results();
    let twice_as_fast = {
        let mut all = scaled("base", 2.0);
        all.runs.retain(|r| r.arm == "base");
        all.runs.extend(scaled("auto", 2.0).runs.into_iter().filter(|r| r.arm == "auto"));
        all
    };
    assert!(lead(&once, &twice_as_fast).contains("overlap in 2 of 2 rows"));
    let text = text(&report(&once, &twice_as_fast).expect("comparable"));
    assert!(text.contains("2.000 (1."), "all medians double: {text}");
    let slower = scaled("auto", 0.9);
    assert!(lead(&once, &slower).contains("overlap in 0 of 2 rows"));
    assert!(self::text(&report(&once, &slower).expect("comparable")).contains("apart"));
}

#[test]
fn a_case_that_measures_a_time_is_named_as_slower_above_one() {
    let mut a = fixture::results();
    a.experiment.cases[1].unit = "ns".into();
    let compared = report(&a, &scaled("base", 2.0)).expect("comparable");
    let said = &compared.sections[0].paragraphs[0];
    let named = "Above 1 B is faster, but slower in these cases, which measure a time: IS <A>. ";
    assert!(said.starts_with(named), "{said}");
}

#[test]
fn rows_of_too_few_pairs_do_not_count() {
    let all = fixture::results();
    let mut few = fixture::results();
    few.runs.retain(|run| run.round <= 5 || run.case == "IS <A>");
    let said = lead(&all, &few);
    assert!(
        said.contains("overlap in 1 of 1 rows") && said.contains("1 more rows have fewer than six pairs"),
        "{said}"
    );
}

#[test]
fn different_experiments_and_results_without_common_figures_are_refused() {
    let a = fixture::results();
    let mut b = fixture::results();
    b.experiment.name = "another".into();
    let refused = report(&a, &b).expect_err("another experiment").to_string();
    assert_eq!(
        refused,
        "cannot compare A with B: A has results of made-by-hand, B of another; choose results of the same experiment"
    );
    let mut nothing = fixture::results();
    nothing.runs.clear();
    assert_eq!(report(&a, &nothing), Err(NotComparable::NothingInCommon));
}

#[test]
fn differences_between_the_definitions_are_named() {
    let a = fixture::results();
    let mut b = fixture::results();
    b.environment.paging = "ept".into();
    b.experiment.cases.remove(1);
    b.experiment.cases[0].cells[1] = Cell::of(Job::run(&["npb.cg", "--policy=auto", "--vcpus=2"], 3.0));
    let report = report(&a, &b).expect("CG A is in both");
    let lead = report.lead.join(" ");
    assert!(lead.contains("Only in A: case IS <A>.") && lead.contains("two things: CG A, auto."), "{lead}");
    let machines = report.sections.last().expect("the machines");
    let paging = [["paging of guests", "shadow", "ept"].map(str::to_owned).to_vec()];
    assert_eq!(machines.tables[0].rows, paging);
}

#[test]
fn other_metrics_are_shown_if_their_interval_excludes_one() {
    let a = fixture::results();
    let mut b = fixture::results();
    for run in b.runs.iter_mut().filter(|run| run.arm == "auto") {
        if let RunOutcome::Measured(measured) = &mut run.outcome {
            measured.metrics.insert(Metric::ResidentMib, 1060.0);
        }
    }
    let report = report(&a, &b).expect("comparable");
    let rows: Vec<&Vec<String>> =
        report.sections.iter().filter(|s| s.title == "Other differences").flat_map(|s| &s.tables[0].rows).collect();
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert_eq!(
        rows[0][..6],
        ["CG A", "auto", "resident MiB", "530.0", "1060", "2.000 (2.000 - 2.000)"].map(str::to_owned)
    );
}

#[test]
fn a_time_that_some_rounds_did_not_reach_is_not_compared() {
    let made = |rounds: u32, time_s: f64| {
        let mut results = fixture::results();
        for run in results.runs.iter_mut().filter(|run| run.arm == "auto" && run.round <= rounds) {
            if let RunOutcome::Measured(measured) = &mut run.outcome {
                measured.metrics.insert(Metric::TimeToCoverageS, time_s);
            }
        }
        results
    };
    let others = |b: &Results| {
        let report = report(&made(7, 1.0), b).expect("comparable");
        report.sections.iter().filter(|section| section.title == "Other differences").count()
    };
    assert_eq!([others(&made(7, 0.5)), others(&made(6, 0.5))], [1, 0]);
}
