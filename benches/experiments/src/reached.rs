//! Times to an event that some rounds do not reach, such as 95 % coverage. Their median counts all rounds: that of the
//! rounds with the event alone would be short wherever few reach it.
//!
//! ```text
//!   rounds     0.4   -    0.1   -    0.2   -
//!   in order   0.1  0.2   0.4 │ -     -    -      a round without the event is later than all others
//!                        median: not reached (3 of 6)
//! ```

use crate::metric::Metric;
use crate::report::common_sections::number;
use crate::results::{Results, Run};
use wideleaf_measure::statistics::median;

/// Word for a median among rounds without the event.
pub(crate) const NOT_REACHED: &str = "not reached";

/// Meaning of the brackets, for the text above a table.
pub(crate) const LEGEND: &str = "(n of m) means that n of m rounds reached it; a round that did not counts as later \
than all others.";

/// Times to an event over the rounds of a case in an arm, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Times {
    reached: Vec<f64>,
    /// Number of rounds without the event.
    missed: usize,
}

impl FromIterator<Option<f64>> for Times {
    /// The time of each round; `None` is a round without the event.
    fn from_iter<I: IntoIterator<Item = Option<f64>>>(rounds: I) -> Times {
        let rounds: Vec<Option<f64>> = rounds.into_iter().collect();
        let reached: Vec<f64> = rounds.iter().copied().flatten().collect();
        Times { missed: rounds.len() - reached.len(), reached }
    }
}

impl Times {
    /// Times to 95 % coverage. A run that tells neither its coverage nor the time has no data to cover, and is left
    /// out.
    pub(crate) fn to_coverage(results: &Results, case: &str, arm: &str) -> Times {
        let time = |run: &Run| {
            let metrics = &run.measured()?.metrics;
            let time = metrics.get(&Metric::TimeToCoverageS).copied();
            (time.is_some() || metrics.contains_key(&Metric::CoveragePercent)).then_some(time)
        };
        results.runs_of(case, arm).filter_map(time).collect()
    }

    /// Whether there are rounds, and all of them reached it.
    pub(crate) fn is_complete(&self) -> bool {
        self.missed == 0 && !self.reached.is_empty()
    }

    /// Whether some rounds reached it and others did not.
    pub(crate) fn is_partial(&self) -> bool {
        self.missed > 0 && !self.reached.is_empty()
    }

    /// Median over all rounds; `None` without rounds, or if it falls among those that did not reach it.
    pub(crate) fn middle(&self) -> Option<f64> {
        let later = std::iter::repeat_n(f64::INFINITY, self.missed);
        let all: Vec<f64> = self.reached.iter().copied().chain(later).collect();
        (!all.is_empty()).then(|| median(all)).filter(|middle| middle.is_finite())
    }

    /// The median as a cell of a table, with the number of rounds where not all reached it. `not_reached` stands for a
    /// median that is later than the rounds.
    pub(crate) fn in_words(&self, not_reached: &str) -> String {
        let (reached, rounds) = (self.reached.len(), self.reached.len() + self.missed);
        let middle = self.middle().map_or_else(|| not_reached.to_owned(), number);
        match rounds {
            0 => "-".to_owned(),
            _ if self.is_partial() => format!("{middle} ({reached} of {rounds})"),
            _ => middle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;
    use crate::results::RunOutcome;

    fn words(rounds: &[Option<f64>]) -> String {
        rounds.iter().copied().collect::<Times>().in_words(NOT_REACHED)
    }

    #[test]
    fn a_median_counts_the_rounds_without_the_event_as_later_than_all_others() {
        assert_eq!(words(&[Some(0.1), None, None, None, None, None]), "not reached (1 of 6)");
        assert_eq!(words(&[Some(0.4), None, Some(0.1), None, Some(0.2), None]), "not reached (3 of 6)");
        // In order: 0.1, 0.2, 0.3, 0.5, then two that are later.
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
        let of = |case: &str, arm: &str| Times::to_coverage(&results, case, arm);
        assert_eq!(of("CG A", "auto"), Times { reached: vec![1.0, 3.0, 4.0], missed: 2 });
        assert_eq!(of("CG A", "auto").middle(), Some(4.0));
        assert_eq!(of("CG A", "base").in_words(NOT_REACHED), NOT_REACHED);
        assert_eq!(of("CG A", "hugetlb-1g"), Times::default(), "absent");
    }
}
