//! Times to an event that some rounds do not reach, such as 95 % coverage. Their median counts all rounds: that of the
//! rounds with the event alone would be short wherever few reach it.
//!
//! ```text
//!   rounds     0.4   -    0.1   -    0.2   -
//!   in order   0.1  0.2   0.4 │ -     -    -      a round without the event is later than all others
//!                        median: not reached (3 of 6)
//! ```

use crate::statistics::median;

/// Times to an event over the rounds of an arm, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventTimes {
    reached: Vec<f64>,
    missed: usize,
}

impl FromIterator<Option<f64>> for EventTimes {
    /// The time of each round; `None` is a round without the event.
    fn from_iter<I: IntoIterator<Item = Option<f64>>>(rounds: I) -> EventTimes {
        let rounds: Vec<Option<f64>> = rounds.into_iter().collect();
        let reached: Vec<f64> = rounds.iter().copied().flatten().collect();
        EventTimes { missed: rounds.len() - reached.len(), reached }
    }
}

impl EventTimes {
    /// Times of the rounds that reached it, in seconds.
    pub fn reached(&self) -> &[f64] {
        &self.reached
    }

    /// Number of rounds that did not reach it.
    pub fn missed(&self) -> usize {
        self.missed
    }

    /// Number of all rounds.
    pub fn rounds(&self) -> usize {
        self.reached.len() + self.missed
    }

    /// Whether there are rounds, and all of them reached it.
    pub fn is_complete(&self) -> bool {
        self.missed == 0 && !self.reached.is_empty()
    }

    /// Whether some rounds reached it and others did not.
    pub fn is_partial(&self) -> bool {
        self.missed > 0 && !self.reached.is_empty()
    }

    /// Median over all rounds in seconds; `None` without rounds, or if it falls among those that did not reach it.
    pub fn middle(&self) -> Option<f64> {
        let later = std::iter::repeat_n(f64::INFINITY, self.missed);
        let all: Vec<f64> = self.reached.iter().copied().chain(later).collect();
        (!all.is_empty()).then(|| median(all)).filter(|middle| middle.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_counts_the_rounds_without_the_event_as_later_than_all_others() {
        let middle = |rounds: &[Option<f64>]| rounds.iter().copied().collect::<EventTimes>().middle();
        assert_eq!(middle(&[Some(0.1), None, None]), None);
        assert_eq!(middle(&[Some(0.4), None, Some(0.1), None, Some(0.2), None]), None);
        // In order: 0.1, 0.2, 0.3, 0.5, then two that are later.
        assert_eq!(middle(&[Some(0.5), None, Some(0.1), Some(0.3), Some(0.2), None]), Some(0.4));
        assert_eq!(middle(&[Some(0.3), Some(0.1), Some(0.2)]), Some(0.2));
        assert_eq!((middle(&[None, None]), middle(&[])), (None, None));
    }
}
