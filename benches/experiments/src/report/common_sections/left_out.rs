//! Rows and cells that were left out: how many, and for which reasons.
//!
//! ```text
//!   BT C, guests: "only with --long: a run takes about 290 s" ─┐
//!   CG B, guests: "only with --long: a run takes about 32 s"  ─┴▶ reason │ guests │ BT C (290 s); CG B (32 s)
//! ```

use crate::definition::{Arm, Case, Cell, Experiment, Work};
use crate::report::{Column, Grid, Section};
use crate::results::Results;

/// Begin of the names of arms that run in a guest, in experiments that also run processes.
const GUEST: &str = "guest ";
/// Begin of the descriptions of arms that are simulated.
const SIMULATED: &str = "simulated";

/// The section; `None` if all cells were run.
pub(super) fn section(results: &Results) -> Option<Section> {
    let experiment = &results.experiment;
    let mut groups: Vec<(String, String, Vec<String>)> = vec![];
    for case in &experiment.cases {
        for (why, arms) in reasons(experiment, case) {
            let (reason, amount) = reason_and_amount(why);
            let row = amount.map_or_else(|| case.name.clone(), |amount| format!("{} ({amount})", case.name));
            let cells = in_words(experiment, &arms);
            match groups.iter_mut().find(|group| group.0 == reason && group.1 == cells) {
                Some(group) => group.2.push(row),
                None => groups.push((reason.into(), cells, vec![row])),
            }
        }
    }
    let rows: Vec<Vec<String>> =
        groups.into_iter().map(|(reason, cells, rows)| vec![reason, cells, rows.join("; ")]).collect();
    let columns = ["reason", "arms", "cases"].map(Column::text).to_vec();
    let grid = Grid { caption: "Cells without a run, by reason".into(), columns, rows };
    let is_any = !grid.rows.is_empty();
    is_any.then(|| Section {
        title: "Left out".into(),
        paragraphs: count(results).into_iter().collect(),
        tables: vec![grid],
        plots: vec![],
    })
}

/// Number of rows that were measured, of all rows, in a sentence; `None` if all of them were, in all their kinds of
/// arms.
pub(crate) fn count(results: &Results) -> Option<String> {
    let experiment = &results.experiment;
    let measured = |is_of: &dyn Fn(&Arm) -> bool| {
        let is_measured = |case: &&Case| {
            let mut cells = experiment.arms.iter().zip(&case.cells).filter(|(arm, _)| is_of(arm));
            cells.any(|(arm, cell)| is_run(results, case, arm, cell))
        };
        experiment.cases.iter().filter(is_measured).count()
    };
    let all = experiment.cases.len();
    if !has_guests_and_processes(experiment) {
        let measured = measured(&|_| true);
        return (measured < all).then(|| format!("Measured: {measured} of {all} rows."));
    }
    let [processes, guests] = [measured(&|arm| !is_guest(arm)), measured(&|arm| is_guest(arm))];
    let text = format!("Measured in a process: {processes} of {all} rows; in guests: {guests}.");
    (processes.min(guests) < all).then_some(text)
}

fn is_run(results: &Results, case: &Case, arm: &Arm, cell: &Cell) -> bool {
    let is_simulation = |cell: &Cell| matches!(cell, Cell::Job(job) if matches!(job.work, Work::Simulation { .. }));
    !is_simulation(cell) && results.runs_of(&case.name, &arm.name).any(|run| run.measured().is_some())
}

fn is_guest(arm: &Arm) -> bool {
    arm.name.starts_with(GUEST)
}

fn has_guests_and_processes(experiment: &Experiment) -> bool {
    experiment.arms.iter().any(is_guest) && !experiment.arms.iter().all(is_guest)
}

/// The reasons of a case's absent cells, each with its arms.
fn reasons<'a>(experiment: &'a Experiment, case: &'a Case) -> Vec<(&'a str, Vec<&'a Arm>)> {
    let mut all: Vec<(&str, Vec<&Arm>)> = vec![];
    for (arm, cell) in experiment.arms.iter().zip(&case.cells) {
        let Cell::Absent(why) = cell else { continue };
        match all.iter_mut().find(|of| of.0 == why.as_str()) {
            Some((_, arms)) => arms.push(arm),
            None => all.push((why.as_str(), vec![arm])),
        }
    }
    all
}

/// A reason without the time that ends it, and that time: rows of different lengths have the same reason.
fn reason_and_amount(why: &str) -> (&str, Option<&str>) {
    match why.rsplit_once(": ").filter(|(_, detail)| detail.contains(" about ")) {
        Some((reason, detail)) => (reason, detail.rsplit_once(" about ").map(|(_, amount)| amount)),
        None => (why, None),
    }
}

/// Arms in words: a kind of arms if all of that kind are there, otherwise their names.
fn in_words(experiment: &Experiment, arms: &[&Arm]) -> String {
    let kind = |arm: &Arm| match arm {
        _ if arm.summary.starts_with(SIMULATED) => "simulations",
        _ if !has_guests_and_processes(experiment) => "runs",
        _ if is_guest(arm) => "guests",
        _ => "processes",
    };
    let mut words: Vec<&str> = vec![];
    for arm in arms {
        let is_whole =
            experiment.arms.iter().filter(|other| kind(other) == kind(arm)).all(|other| arms.contains(&other));
        let word = if is_whole { kind(arm) } else { arm.name.as_str() };
        if !words.contains(&word) {
            words.push(word);
        }
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn cells_without_a_run_are_grouped_by_reason_without_their_times() {
        let mut results = fixture::results();
        let arm = |name: &str, summary: &str| Arm { name: name.into(), summary: summary.into() };
        results.experiment.arms.extend([
            arm("4K on K8", "simulated, K8"),
            arm("guest never", ""),
            arm("guest auto", ""),
        ]);
        let long = |seconds| Cell::Absent(format!("only with --long: a run takes about {seconds} s"));
        for (case, seconds) in results.experiment.cases.iter_mut().zip([32, 290]) {
            case.cells.extend([Cell::Absent("left out for time".into()), long(seconds), long(seconds)]);
        }
        results.experiment.cases[1].cells[5] = Cell::Absent("2 threads: this host has 1 CPU".into());
        let section = section(&results).expect("cells are absent");
        assert_eq!(section.paragraphs, ["Measured in a process: 2 of 2 rows; in guests: 0."]);
        assert_eq!(
            section.tables[0].rows,
            [
                ["no free page of 1 GiB", "hugetlb-1g", "CG A; IS <A>"],
                ["left out for time", "simulations", "CG A; IS <A>"],
                ["only with --long", "guests", "CG A (32 s)"],
                ["only with --long", "guest never", "IS <A> (290 s)"],
                ["2 threads: this host has 1 CPU", "guest auto", "IS <A>"],
            ]
        );
    }

    #[test]
    fn an_experiment_without_guests_counts_its_rows_once_and_whole_ones_not_at_all() {
        let mut results = fixture::results();
        assert_eq!(count(&results), None);
        results.runs.retain(|run| run.case != "CG A");
        assert_eq!(count(&results).as_deref(), Some("Measured: 1 of 2 rows."));
        results.experiment.cases.iter_mut().for_each(|case| case.cells.truncate(2));
        assert_eq!(section(&results), None, "a run that is missing is no reason");
    }
}
