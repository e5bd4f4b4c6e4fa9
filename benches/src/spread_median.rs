//! A median as people and programs see it: with its 95 % interval from six rounds on, and with the range of fewer.
//!
//! ```text
//!   rounds    table                       bar, judged by the median
//!   1         2.320                       speed 2.320, at least 1.3
//!   2 to 5    2.320 │ 1.250 - 3.170       speed, range 1.250 - 3.170, median 2.320, at least 1.3
//!   6, 7, …   2.320 (1.400 - 3.100)       speed, median 2.320 (1.400 - 3.100), at least 1.3
//! ```
//!
//! Values of one set of guests share that set's memory, so a set counts as one round. The range of sets is that of
//! their medians.

use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Comparison, Interval, bootstrap_median, bootstrap_ratio, median, quantile};
use wideleaf_measure::table::Cell;

/// Smallest number of rounds with a 95 % interval.
const ROUNDS_MIN: usize = Comparison::PAIRS_MIN;

/// A median, with an interval or a range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpreadMedian {
    spread: Spread,
    /// Median, and the ends of its 95 % interval or of the range.
    values: Interval,
}

/// Kind of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    Nothing,
    Range,
    Interval,
}

impl Spread {
    fn of_rounds(rounds: usize) -> Spread {
        match rounds {
            0 | 1 => Spread::Nothing,
            ROUNDS_MIN.. => Spread::Interval,
            _ => Spread::Range,
        }
    }
}

impl SpreadMedian {
    /// Median of rounds with one value each.
    ///
    /// # Panics
    /// If there are no values, or a value is NaN.
    pub fn of(values: &[f64]) -> SpreadMedian {
        SpreadMedian::of_sets(&values.iter().map(|value| vec![*value]).collect::<Vec<_>>())
    }

    /// Median of all values of all sets. Sets without values do not count.
    ///
    /// # Panics
    /// If there are no values, or a value is NaN.
    pub fn of_sets(sets: &[Vec<f64>]) -> SpreadMedian {
        let sets: Vec<Vec<f64>> = sets.iter().filter(|set| !set.is_empty()).cloned().collect();
        let spread = Spread::of_rounds(sets.len());
        if spread == Spread::Interval {
            return SpreadMedian { spread, values: bootstrap_median(&sets) };
        }
        let medians: Vec<f64> = sets.iter().cloned().map(median).collect();
        let [low, high] = ends(&medians);
        SpreadMedian { spread, values: Interval { median: median(sets.concat()), low, high } }
    }

    /// Median ratio of arm `a` to arm `b` within each turn of each set. A turn has one rate per arm.
    ///
    /// # Panics
    /// If there are no turns.
    pub fn ratio_within_turns(sets: &[Vec<Vec<f64>>], a: usize, b: usize) -> SpreadMedian {
        let ratios = sets.iter().map(|set| set.iter().map(|turn| turn[a] / turn[b]).collect());
        SpreadMedian::of_sets(&ratios.collect::<Vec<_>>())
    }

    /// Ratio of the median of `a` to the median of `b`, which have different runs. The range is that of all pairs.
    ///
    /// # Panics
    /// If either side has no values, or a value is NaN.
    pub fn unpaired_ratio(a: &[f64], b: &[f64]) -> SpreadMedian {
        if a.len().min(b.len()) >= ROUNDS_MIN {
            return SpreadMedian { spread: Spread::Interval, values: bootstrap_ratio(a, b) };
        }
        let spread = if a.len().max(b.len()) > 1 { Spread::Range } else { Spread::Nothing };
        let median = median(a.to_vec()) / median(b.to_vec());
        let ([lowest_a, highest_a], [lowest_b, highest_b]) = (ends(a), ends(b));
        SpreadMedian { spread, values: Interval { median, low: lowest_a / highest_b, high: highest_a / lowest_b } }
    }

    /// Median of all values.
    pub fn median(&self) -> f64 {
        self.values.median
    }

    /// The same in another unit, by a function that only rises or only falls.
    #[must_use]
    pub fn map(self, of: impl Fn(f64) -> f64) -> SpreadMedian {
        let Interval { median, low, high } = self.values;
        let (one, other) = (of(low), of(high));
        let values = Interval { median: of(median), low: one.min(other), high: one.max(other) };
        SpreadMedian { values, ..self }
    }

    /// Cells of the columns that [`columns`] names for this number of rounds.
    pub fn cells(&self, decimals: usize, unit: &str) -> Vec<Cell> {
        let median = Cell::number(self.values.median, decimals, unit);
        match self.spread {
            Spread::Nothing => vec![median],
            Spread::Range => vec![median, self.range(decimals, unit)],
            Spread::Interval => vec![Cell::interval(self.values, decimals, unit)],
        }
    }

    fn range(&self, decimals: usize, unit: &str) -> Cell {
        Cell::range(self.values.low, self.values.high, decimals, unit)
    }

    /// Target that the median is judged by, with the interval or the range beside it.
    pub fn bar(&self, what: &str, decimals: usize, unit: &str, limit: Limit) -> Bar {
        let bar = Bar::new(what, Cell::number(self.values.median, decimals, unit), limit);
        match self.spread {
            Spread::Nothing => bar,
            Spread::Range => Bar { what: format!("{what}, range {}, median", self.range(decimals, unit)), ..bar },
            Spread::Interval => {
                Bar { what: format!("{what}, median"), value: Cell::interval(self.values, decimals, unit), ..bar }
            }
        }
    }
}

/// Lowest and highest value; NaN without values.
fn ends(values: &[f64]) -> [f64; 2] {
    [0.0, 1.0].map(|share| quantile(values, share).unwrap_or(f64::NAN))
}

/// Headings of the columns of a median of this number of rounds.
pub fn columns(name: &str, rounds: usize) -> Vec<&str> {
    match Spread::of_rounds(rounds) {
        Spread::Range => vec![name, "range"],
        Spread::Nothing | Spread::Interval => vec![name],
    }
}

/// What stands beside the medians of this number of rounds, for a note.
pub fn spread_in_words(rounds: usize) -> &'static str {
    match Spread::of_rounds(rounds) {
        Spread::Nothing => "one round has no range",
        Spread::Range => "ranges: fewer than six have no 95 % interval",
        Spread::Interval => "95 % intervals",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(shown: &SpreadMedian) -> Vec<String> {
        shown.cells(1, "s").iter().map(Cell::to_string).collect()
    }

    #[test]
    fn only_six_rounds_have_an_interval() {
        assert_eq!(texts(&SpreadMedian::of(&[2.0])), ["2.0 s"]);
        assert_eq!(texts(&SpreadMedian::of(&[2.0, 3.0, 1.0, 9.0, 4.0])), ["3.0 s", "1.0 - 9.0 s"]);
        let six = SpreadMedian::of(&[2.0; 6]);
        assert_eq!(texts(&six), ["2.0 (2.0 - 2.0) s"]);
        for rounds in 1..9 {
            let shown = SpreadMedian::of(&vec![1.0; rounds]);
            assert_eq!(shown.cells(1, "").len(), columns("", rounds).len(), "{rounds} rounds");
            assert_eq!(spread_in_words(rounds).contains("intervals"), rounds >= 6);
        }
    }

    #[test]
    fn a_set_is_one_round_however_many_turns_it_has() {
        let sets = [vec![1.0; 16], vec![2.0; 16], Vec::new(), vec![4.0; 16]];
        assert_eq!(texts(&SpreadMedian::of_sets(&sets)), ["2.0 s", "1.0 - 4.0 s"]);
        let turns = [vec![vec![2.0, 1.0]; 16], vec![vec![9.0, 3.0]; 16]];
        assert_eq!(texts(&SpreadMedian::ratio_within_turns(&turns, 0, 1)), ["2.5 s", "2.0 - 3.0 s"]);
    }

    #[test]
    fn a_bar_is_judged_by_the_median_and_shows_what_is_beside_it() {
        let told = |values: &[f64]| SpreadMedian::of(values).bar("speed", 1, "", Limit::AtLeast(1.0)).to_string();
        assert_eq!(told(&[0.5]), "MISSED: speed 0.5, at least 1");
        assert_eq!(told(&[0.5, 1.5, 2.0]), "met:    speed, range 0.5 - 2.0, median 1.5, at least 1");
        let bar = SpreadMedian::of(&[0.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]).bar("speed", 1, "", Limit::AtLeast(1.0));
        assert!(bar.is_met && matches!(bar.value, Cell::Interval { .. }), "{bar}");
        let below = SpreadMedian::of(&[0.9; 6]).bar("speed", 1, "", Limit::AtLeast(1.0));
        assert_eq!(below.to_string(), "MISSED: speed, median 0.9 (0.9 - 0.9), at least 1");
        let infinite = SpreadMedian::of(&[f64::INFINITY; 6]).bar("speed", 1, "", Limit::AtLeast(1.0));
        assert!(!infinite.is_met && matches!(infinite.value, Cell::Missing { .. }), "{infinite}");
    }

    #[test]
    fn a_ratio_without_pairs_ranges_over_all_pairs() {
        let ratio = SpreadMedian::unpaired_ratio(&[8.0, 4.0, 6.0], &[2.0]);
        assert_eq!(texts(&ratio), ["3.0 s", "2.0 - 4.0 s"]);
        assert_eq!(texts(&SpreadMedian::unpaired_ratio(&[8.0], &[2.0])), ["4.0 s"]);
        assert_eq!(texts(&SpreadMedian::unpaired_ratio(&[8.0; 6], &[2.0; 7])), ["4.0 (4.0 - 4.0) s"]);
    }

    #[test]
    fn in_a_unit_that_falls_the_ends_change_places() {
        let lost = SpreadMedian::of(&[0.5, 0.75, 1.0]).map(|ratio| (1.0 - ratio) * 100.0);
        assert_eq!(texts(&lost), ["25.0 s", "0.0 - 50.0 s"]);
    }
}
