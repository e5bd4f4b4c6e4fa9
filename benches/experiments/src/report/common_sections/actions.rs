//! Number and cost of the manager's actions. The cost is known for recorded runs.

use crate::definition::Arm;
use crate::report::common_sections::{figures, number};
use crate::report::{BarGroup, Bars, Column, Grid, Plot, Section};
use crate::results::{Actions, Results, Run};
use wideleaf_measure::statistics::median;

/// The section; `None` if no manager took any action.
pub(super) fn section(results: &Results) -> Option<Section> {
    let columns = ["case", "arm", "action"].map(Column::text).into_iter();
    let numbers = ["times", "CPU, ms", "CPU each, us", "longest unavailable, us"].map(Column::number);
    let mut grid = Grid {
        caption: "Actions by mechanism and result: medians over the rounds; cost for recorded rounds".into(),
        columns: columns.chain(numbers).collect(),
        rows: vec![],
    };
    for (case, arm, _) in figures::cells(results) {
        for name in names(results, &case.name, &arm.name) {
            grid.rows.push(row([&case.name, &arm.name, &name], &of_rounds(results, &case.name, &arm.name, &name)));
        }
    }
    if grid.rows.is_empty() {
        return None;
    }
    let mut section = Section { title: "Cost of actions".into(), tables: vec![grid], ..Section::default() };
    section.plots.extend(bars(results).map(Plot::Bars));
    Some(section)
}

/// Names of all actions in any of the rounds.
fn names(results: &Results, case: &str, arm: &str) -> Vec<String> {
    let runs = results.runs_of(case, arm).filter_map(Run::measured);
    let mut names: Vec<String> = runs.flat_map(|measured| measured.actions.keys().cloned()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Actions of each round; the default for a round without such actions.
fn of_rounds(results: &Results, case: &str, arm: &str, name: &str) -> Vec<Actions> {
    let runs = results.runs_of(case, arm).filter_map(Run::measured);
    runs.map(|measured| measured.actions.get(name).copied().unwrap_or_default()).collect()
}

fn row(names: [&String; 3], rounds: &[Actions]) -> Vec<String> {
    let median_of = |values: Vec<f64>| if values.is_empty() { "-".into() } else { number(median(values)) };
    let times = median(rounds.iter().map(|actions| actions.count as f64).collect());
    let known = |of: fn(&Actions) -> Option<f64>| rounds.iter().filter_map(of).collect::<Vec<f64>>();
    let each = known(|actions| Some(actions.cpu_ms? * 1e3 / actions.count as f64).filter(|each| each.is_finite()));
    let numbers = [
        figures::count(times),
        median_of(known(|actions| actions.cpu_ms)),
        median_of(each),
        median_of(known(|actions| actions.unavailable_max_us)),
    ];
    names.into_iter().cloned().chain(numbers).collect()
}

/// CPU time by kind of action, with a bar for each recorded arm.
fn bars(results: &Results) -> Option<Bars> {
    let is_recorded = |arm: &&Arm| {
        let runs = results.runs.iter().filter(|run| run.arm == arm.name).filter_map(Run::measured);
        runs.flat_map(|measured| measured.actions.values()).any(|actions| actions.cpu_ms.is_some())
    };
    let arms: Vec<&Arm> = results.experiment.arms.iter().filter(is_recorded).collect();
    let mut groups = Vec::new();
    for case in &results.experiment.cases {
        let mut all: Vec<String> = arms.iter().flat_map(|arm| names(results, &case.name, &arm.name)).collect();
        all.sort_unstable();
        all.dedup();
        for name in all {
            let cpu = |arm: &&Arm| cpu_ms(&of_rounds(results, &case.name, &arm.name, &name));
            let bars = arms.iter().map(|arm| cpu(arm).map(|ms| (ms, ms, ms))).collect();
            groups.push(BarGroup { name: format!("{}: {name}", case.name), bars });
        }
    }
    groups.retain(|group| group.bars.iter().any(Option::is_some));
    (!groups.is_empty()).then(|| Bars {
        name: "actions".into(),
        caption: "CPU time of the manager's actions, by mechanism and result".into(),
        axis: "total CPU time, ms".into(),
        reference: None,
        series: arms.iter().map(|arm| arm.name.clone()).collect(),
        groups,
    })
}

fn cpu_ms(rounds: &[Actions]) -> Option<f64> {
    let known: Vec<f64> = rounds.iter().filter_map(|actions| actions.cpu_ms).collect();
    (!known.is_empty()).then(|| median(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn an_action_without_recording_has_a_count_and_no_cost() {
        let actions = |count, cpu_ms| Actions { count, cpu_ms, unavailable_max_us: None };
        let name = String::from("x");
        let row = |rounds: &[Actions]| row([&name, &name, &name], rounds)[3..].to_vec();
        assert_eq!(row(&[actions(4, Some(2.0)), actions(6, None)]), ["5", "2.000", "500.0", "-"]);
        assert_eq!(row(&[actions(0, None)]), ["0", "-", "-", "-"]);
    }

    #[test]
    fn only_recorded_arms_have_bars_and_all_actions_have_rows() {
        let section = section(&fixture::results()).expect("auto has actions");
        assert_eq!(section.tables[0].rows.len(), 2 * 2, "two kinds of auto, in two cases");
        let [Plot::Bars(bars)] = &section.plots[..] else { panic!("one picture: {:?}", section.plots) };
        assert_eq!(bars.series, ["auto"]);
        assert_eq!(bars.groups.len(), 2 * 2);
        assert!(bars.groups.iter().all(|group| group.bars[0].is_some()), "{bars:?}");
    }
}
