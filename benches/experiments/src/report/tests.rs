//! Reports on the fixture: the order of their sections, the text for a terminal, and which runs count in a median.

use super::*;
use crate::definition::Cell;
use crate::metric::Metric;
use crate::results::{Results, RunOutcome};

fn said(results: &Results) -> String {
    text::text(&Report::of(results))
}

#[test]
fn failures_come_first_then_the_question_and_the_kind_of_evidence() {
    let report = Report::of(&fixture::results());
    assert_eq!(
        report.lead,
        [
            "1 of 28 runs failed: CG A, auto, round 2: the guest found 3 wrong words or results.",
            "auto gives 150.5 % of the figure that base gives: the geometric mean of the medians of 2 cases, from \
             150.5 % (CG A) to 150.5 % (IS <A>).",
            "Is auto faster than base & by how much?",
            "Evidence: of 6 cells, 4 measured on this machine, which is itself a virtual machine (paging of guests: \
             shadow); \
             2 absent, for the reasons below."
        ]
    );
}

#[test]
fn a_report_for_a_terminal_has_the_expected_text() {
    let mut results = fixture::results();
    results.experiment.cases.truncate(1);
    let text = said(&results);
    let ratios = "
Ratios
Above 1 an arm is faster than base. = means that the interval contains 1: it shows no difference, but does not \
prove equality; ? means fewer than six pairs, too few for a 95 % interval.
Ratios of the figure within a round: median, 95 % interval
┌──────┬───────────────────────┬───────────────────┐
│ case ┆           auto : base ┆ hugetlb-1g : base │
╞══════╪═══════════════════════╪═══════════════════╡
│ CG A ┆ 1.505 (1.500 - 1.510) ┆                 - │
└──────┴───────────────────────┴───────────────────┘
";
    assert!(text.contains(ratios), "{text}");
    assert!(text.contains("│ no free page of 1 GiB ┆ hugetlb-1g ┆ CG A  │"), "{text}");
}

#[test]
fn a_column_with_one_value_becomes_a_sentence() {
    let report = Report::of(&fixture::results());
    let figures = report.sections.iter().find(|section| section.title == "Figures").expect("there are figures");
    let columns: Vec<&str> = figures.tables.iter().flat_map(|t| &t.columns).map(|c| c.title.as_str()).collect();
    assert!(columns.contains(&"coverage, %") && !columns.contains(&"bloat, MiB"), "{columns:?}");
    assert!(!figures.paragraphs.is_empty());
    assert!(figures.tables.iter().all(|table| table.columns.len() <= 10), "narrow enough for a page");
}

#[test]
fn coverage_that_one_round_reaches_is_a_number_of_rounds_and_not_its_time() {
    let mut results = fixture::results();
    for run in results.runs.iter_mut().filter(|run| run.arm == "auto" && (run.round == 1 || run.case != "CG A")) {
        if let RunOutcome::Measured(measured) = &mut run.outcome {
            measured.metrics.insert(Metric::TimeToCoverageS, 0.1);
        }
    }
    let report = Report::of(&results);
    let figures = report.sections.iter().find(|section| section.title == "Figures").expect("there are figures");
    let (memory, title) = (&figures.tables[1], "to 95 % coverage, s");
    let column = memory.columns.iter().position(|column| column.title == title).expect("it was measured");
    let cells: Vec<&str> = memory.rows.iter().map(|row| row[column].as_str()).collect();
    assert_eq!(cells, ["not reached", "not reached (1 of 6)", "not reached", "0.1000"]);
    assert!(figures.paragraphs.iter().any(|said| said.contains("(n of m)")), "{:?}", figures.paragraphs);
}

#[test]
fn a_round_without_a_figure_counts_in_no_median_of_a_cell_with_figures() {
    let mut results = fixture::results();
    for run in results.runs.iter_mut().filter(|run| run.arm == "auto" && (run.round <= 4 || run.case != "CG A")) {
        if let RunOutcome::Measured(measured) = &mut run.outcome {
            measured.metrics.remove(&Metric::Figure);
            measured.metrics.insert(Metric::ResidentMib, 900.0);
        }
    }
    let report = Report::of(&results);
    let figures = report.sections.iter().find(|section| section.title == "Figures").expect("there are figures");
    let memory = &figures.tables[1];
    let column = |title: &str| memory.columns.iter().position(|column| column.title == title).expect("it is there");
    let [rounds, resident] = ["rounds", "resident, MiB"].map(column);
    let cells: Vec<[&str; 2]> = memory.rows.iter().map(|row| [&*row[rounds], &*row[resident]]).collect();
    // No round of IS has a figure under auto: all seven count.
    assert_eq!(cells, [["7", "520.0"], ["3", "530.0"], ["7", "520.0"], ["7", "900.0"]]);
}

#[test]
fn an_absent_cell_has_its_reason_and_no_row_of_figures() {
    let report = Report::of(&fixture::results());
    let figures = report.sections.iter().find(|section| section.title == "Figures").expect("there are figures");
    let rows = figures.tables.iter().flat_map(|table| &table.rows);
    assert!(rows.clone().count() > 0 && rows.clone().all(|row| row[1] != "hugetlb-1g"), "{figures:?}");
    assert!(said(&fixture::results()).contains("no free page of 1 GiB"));
}

#[test]
fn few_rounds_are_marked_in_ratios_and_in_figures() {
    let mut results = fixture::results();
    results.runs.retain(|run| run.round <= 3);
    let report = Report::of(&results);
    let cells = |title: &str| -> Vec<String> {
        let section = report.sections.iter().find(|section| section.title == title).expect("the section exists");
        section.tables[0].rows.concat()
    };
    assert!(cells("Ratios").iter().filter(|cell| cell.ends_with(" ?")).count() == 2, "{:?}", cells("Ratios"));
    assert!(cells("Figures").iter().any(|cell| cell.contains(" ? Mop/s")), "{:?}", cells("Figures"));
}

#[test]
fn every_picture_has_a_file_of_its_own_with_a_plain_name() {
    let report = Report::of(&fixture::results());
    let mut names: Vec<String> = report.pictures().into_iter().map(|(name, _)| name).collect();
    assert!(
        names.contains(&"01-ratios.svg".to_owned()) && names.contains(&"04-coverage-IS--A-.svg".to_owned()),
        "{names:?}"
    );
    names.dedup();
    assert_eq!(names.len(), 8);
}

#[test]
fn results_without_maps_are_read_and_reported() {
    let results = fixture::results();
    let mut value = serde_json::to_value(&results).expect("plain data");
    for run in value["runs"].as_array_mut().expect("runs") {
        if let Some(measured) = run.pointer_mut("/outcome/measured").and_then(|measured| measured.as_object_mut()) {
            measured.retain(|key, _| !["map", "actions", "series"].contains(&key.as_str()));
        }
    }
    let old: Results = serde_json::from_value(value).expect("a missing key has a default");
    let report = Report::of(&old);
    assert!(report.sections.iter().all(|section| !["Over time", "Cost of actions"].contains(&section.title.as_str())));
    let Cell::Job(job) = &old.experiment.cases[0].cells[1] else { panic!("auto is a job") };
    assert!(job.wants_map);
}
