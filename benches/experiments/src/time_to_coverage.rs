//! Times to 95 % coverage, and times to other events that some rounds do not reach, in the words of a report.

use crate::metric::Metric;
use crate::report::common_sections::number;
use crate::results::{Results, Run};
use wideleaf_measure::event_times::EventTimes;

/// Word for a median among rounds without the event.
pub(crate) const NOT_REACHED: &str = "not reached";

/// Meaning of the brackets, for the text above a table.
pub(crate) const LEGEND: &str = "(n of m) means that n of m rounds reached it; a round that did not counts as later \
than all others.";

/// Times to 95 % coverage over the rounds of a case in an arm. A run that tells neither its coverage nor the time has
/// no data to cover, and is left out.
pub(crate) fn to_coverage(results: &Results, case: &str, arm: &str) -> EventTimes {
    let time = |run: &Run| {
        let metrics = &run.measured()?.metrics;
        let time = metrics.get(&Metric::TimeToCoverageS).copied();
        (time.is_some() || metrics.contains_key(&Metric::CoveragePercent)).then_some(time)
    };
    results.runs_of(case, arm).filter_map(time).collect()
}

/// The median as a cell of a table, with the number of rounds where not all reached it. `not_reached` stands for a
/// median that is later than the rounds.
pub(crate) fn in_words(times: &EventTimes, not_reached: &str) -> String {
    let middle = times.middle().map_or_else(|| not_reached.to_owned(), number);
    match times.rounds() {
        0 => "-".to_owned(),
        rounds if times.is_partial() => format!("{middle} ({} of {rounds})", times.reached().len()),
        _ => middle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;
    use crate::results::RunOutcome;

    fn words(rounds: &[Option<f64>]) -> String {
        in_words(&rounds.iter().copied().collect(), NOT_REACHED)
    }

    #[test]
    fn a_median_has_the_number_of_rounds_beside_it_where_not_all_reached_the_event() {
        assert_eq!(words(&[Some(0.1), None, None, None, None, None]), "not reached (1 of 6)");
        assert_eq!(words(&[Some(0.4), None, Some(0.1), None, Some(0.2), None]), "not reached (3 of 6)");
        assert_eq!(words(&[Some(0.5), None, Some(0.1), Some(0.3), Some(0.2), None]), "0.4000 (4 of 6)");
        assert_eq!(words(&[Some(0.3), Some(0.1), Some(0.2)]), "0.2000");
        assert_eq!((words(&[None, None]), words(&[])), ("not reached".into(), "-".into()));
    }

    #[test]
    fn a_round_without_the_event_is_known_by_its_coverage() {
        let mut results = fixture::results();
        for run in results.runs.iter_mut().filter(|run| run.arm == "auto") {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            match run.round {
                1..=4 => drop(measured.metrics.insert(Metric::TimeToCoverageS, f64::from(run.round))),
                7 => drop(measured.metrics.remove(&Metric::CoveragePercent)),
                _ => {}
            }
        }
        // Round 2 of CG A failed; rounds 5 and 6 did not reach it; round 7 has no data.
        let of = |case: &str, arm: &str| to_coverage(&results, case, arm);
        assert_eq!(of("CG A", "auto"), [Some(1.0), Some(3.0), Some(4.0), None, None].into_iter().collect());
        assert_eq!(of("CG A", "auto").middle(), Some(4.0));
        assert_eq!(in_words(&of("CG A", "base"), NOT_REACHED), NOT_REACHED);
        assert_eq!(of("CG A", "hugetlb-1g"), EventTimes::default(), "absent");
    }
}
