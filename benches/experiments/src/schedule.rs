//! The order of the runs. Arms alternate within a round, and every case has its round before any case has its next
//! one. An experiment that ends early is therefore a shorter experiment, not a different one.

use std::time::Duration;

use wideleaf_measure::order::{arms_of_round, pairs_of_round};

use crate::definition::Experiment;
use crate::results::Run;

/// A run that is still to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Index of the case.
    pub case: usize,
    /// Index of the arm.
    pub arm: usize,
    /// Number of the round, from one.
    pub round: u32,
}

/// All turns of an experiment in order.
pub fn turns(experiment: &Experiment) -> Vec<Turn> {
    let mut turns = Vec::new();
    for round in 1..=experiment.rounds {
        for case in 0..experiment.cases.len() {
            turns.extend(arms_in_turn(experiment, case, round).into_iter().map(|arm| Turn { case, arm, round }));
        }
    }
    turns
}

/// The arms that run in a round of a case, in order. Absent arms have no place in it: the others alternate.
fn arms_in_turn(experiment: &Experiment, case: usize, round: u32) -> Vec<usize> {
    let runs = |arm: &usize| experiment.job(case, *arm).is_some_and(|job| round <= experiment.rounds_of(job));
    let all = experiment.arms.len();
    if experiment.arms_of_two_programs().is_empty() {
        let arms: Vec<usize> = (0..all).filter(runs).collect();
        return arms_of_round(arms.len(), round).map(|index| arms[index]).collect();
    }
    // A pair keeps its turn if one of its arms is absent.
    let pairs: Vec<usize> = (0..all / 2).filter(|pair| runs(&(2 * pair)) || runs(&(2 * pair + 1))).collect();
    let arms = pairs_of_round(pairs.len(), round).map(|index| 2 * pairs[index / 2] + index % 2);
    arms.filter(runs).collect()
}

/// Turns that have no run yet.
pub fn left(experiment: &Experiment, runs: &[Run]) -> Vec<Turn> {
    let is_made = |turn: &Turn| {
        let (case, arm) = (&experiment.cases[turn.case].name, &experiment.arms[turn.arm].name);
        runs.iter().any(|run| run.case == *case && run.arm == *arm && run.round == turn.round)
    };
    turns(experiment).into_iter().filter(|turn| !is_made(turn)).collect()
}

/// Expected duration of a turn: the median of the runs already made of the same cell, otherwise the guess.
pub fn expected(experiment: &Experiment, runs: &[Run], turn: Turn) -> Duration {
    let (case, arm) = (&experiment.cases[turn.case].name, &experiment.arms[turn.arm].name);
    let made: Vec<f64> = runs.iter().filter(|run| run.case == *case && run.arm == *arm).map(|run| run.took_s).collect();
    let guess = || experiment.job(turn.case, turn.arm).map_or(0.0, |job| job.seconds_guess);
    let seconds = if made.is_empty() { guess() } else { wideleaf_measure::statistics::median(made) };
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// Expected duration of several turns together.
pub fn expected_of_all(experiment: &Experiment, runs: &[Run], turns: &[Turn]) -> Duration {
    turns.iter().map(|turn| expected(experiment, runs, *turn)).sum()
}

/// The next turn within the remaining budget. A round of a case is made whole or not at all, because half a
/// round cannot be compared.
pub fn next(experiment: &Experiment, runs: &[Run], budget_left: Option<Duration>) -> Option<Turn> {
    let left = left(experiment, runs);
    let first = *left.first()?;
    let row: Vec<Turn> =
        left.into_iter().take_while(|turn| (turn.case, turn.round) == (first.case, first.round)).collect();
    let is_affordable = budget_left.is_none_or(|budget| expected_of_all(experiment, runs, &row) <= budget);
    let is_begun =
        row.len() < turns(experiment).iter().filter(|t| (t.case, t.round) == (first.case, first.round)).count();
    (is_affordable || is_begun).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::{Arm, Case, Cell, Job};
    use crate::results::{Measured, RunOutcome};

    fn experiment() -> Experiment {
        let arm = |name: &str| Arm { name: name.into(), summary: String::new() };
        let job = || Cell::of(Job::run(&["gups"], 10.0));
        let exact = || Cell::of(Job { is_exact: true, ..Job::run(&["gups"], 10.0) });
        let case = |name: &str, cells| Case { name: name.into(), unit: "x".into(), working_set_mib: 1, cells };
        Experiment {
            name: "e".into(),
            title: String::new(),
            question: String::new(),
            source: None,
            rounds: 2,
            arms: vec![arm("a"), arm("b"), arm("c")],
            cases: vec![
                case("one", vec![job(), job(), Cell::Absent("no such page".into())]),
                case("two", vec![job(), job(), exact()]),
            ],
        }
    }

    fn run(experiment: &Experiment, turn: Turn, took_s: f64) -> Run {
        Run {
            case: experiment.cases[turn.case].name.clone(),
            arm: experiment.arms[turn.arm].name.clone(),
            round: turn.round,
            at_s: 0.0,
            took_s,
            load_1m: 0.0,
            outcome: RunOutcome::Measured(Measured::default()),
        }
    }

    #[test]
    fn arms_alternate_and_all_cases_have_a_round_before_any_has_two() {
        let order: Vec<_> = turns(&experiment()).iter().map(|turn| (turn.round, turn.case, turn.arm)).collect();
        let first = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 1, 2)];
        let second = [(2, 0, 1), (2, 0, 0), (2, 1, 1), (2, 1, 0)]; // b is first; the exact job has run already
        assert_eq!(order, [&first[..], &second[..]].concat());
    }

    #[test]
    fn an_absent_arm_has_no_place_in_the_order_and_two_programs_take_turns_next_to_each_other() {
        let mut present = experiment();
        present.cases.truncate(1);
        present.rounds = 4;
        let firsts = |experiment: &Experiment| {
            let turns = turns(experiment);
            let first = |round| turns.iter().find(|turn| turn.round == round).map(|turn| turn.arm);
            [1, 2, 3, 4].map(first)
        };
        assert_eq!(firsts(&present), [Some(0), Some(1), Some(0), Some(1)]);
        let both = present.against("other", "version 2");
        assert_eq!(firsts(&both), [Some(0), Some(3), Some(0), Some(3)]);
        for turns in turns(&both).chunks(2) {
            assert_eq!((turns[0].arm / 2, turns[0].round), (turns[1].arm / 2, turns[1].round), "a pair");
        }
    }

    #[test]
    fn an_arm_without_a_twin_has_one_turn_in_a_round_and_separates_no_twins() {
        let mut experiment = experiment();
        let measured = || Cell::of(Job { is_exact: false, ..Job::tlbcost(&["tlbcost"], 10.0) });
        experiment.cases.truncate(1);
        experiment.cases[0].cells[1] = measured();
        experiment.cases[0].cells[2] = Cell::of(Job::run(&["gups"], 10.0));
        let both = experiment.against("other", "version 2");
        for round in 1..=2 {
            let all = turns(&both).into_iter();
            let arms: Vec<usize> = all.filter(|turn| turn.round == round).map(|turn| turn.arm).collect();
            let mut sorted = arms.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 4, 5], "arm 3 would run another program's tlbcost: {arms:?}");
            let place = |arm: usize| arms.iter().position(|of| *of == arm).expect("it has a turn");
            assert!([0, 4].iter().all(|first| place(*first).abs_diff(place(first + 1)) == 1), "{arms:?}");
        }
    }

    #[test]
    fn a_finished_run_is_not_repeated_and_its_duration_is_expected_of_the_rest() {
        let experiment = experiment();
        let all = turns(&experiment);
        let runs: Vec<Run> = all[..2].iter().map(|turn| run(&experiment, *turn, 3.0)).collect();
        assert_eq!(next(&experiment, &runs, None), Some(all[2]));
        // Left: three turns of case two as guessed, two of case one at their measured duration, two of
        // case two as guessed.
        let left = left(&experiment, &runs);
        assert_eq!(expected_of_all(&experiment, &runs, &left), Duration::from_secs(3 * 10 + 2 * 3 + 2 * 10));
    }

    #[test]
    fn a_round_beyond_the_budget_is_not_begun_but_a_begun_round_is_finished() {
        let experiment = experiment();
        let all = turns(&experiment);
        assert_eq!(next(&experiment, &[], Some(Duration::from_secs(19))), None);
        assert_eq!(next(&experiment, &[], Some(Duration::from_secs(20))), Some(all[0]));
        let begun = [run(&experiment, all[0], 10.0)];
        assert_eq!(next(&experiment, &begun, Some(Duration::ZERO)), Some(all[1]));
    }
}
