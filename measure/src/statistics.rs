//! Medians and their confidence intervals, and ratios of pairs.
//!
//! ```text
//!   values of independent rounds ─▶ ranks (exact): two of the values
//!   values in groups, such as turns of one set of guests ─▶ bootstrap (approximate): groups, then values within them
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// Direction in which a quantity is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// A higher value is better.
    Higher,
    /// A lower value is better.
    Lower,
    /// The value is neither good nor bad.
    Neither,
}

/// A median with its 95 % interval; with fewer than six independent values, which allow none, their range.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct Interval {
    /// Median of all values.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// Number of bootstrap samples: 100 medians lie beyond each end of the interval.
const RESAMPLES: usize = 4000;

/// Median of all values with its 95 % interval by bootstrap (Efron, "Bootstrap methods", 1979). Values come in groups
/// that share influences that cannot be controlled, for instance the memory of a run. The bootstrap draws groups
/// first, then values within each group. It is approximate: with few groups, it holds the true median in fewer than
/// 95 % of all cases.
///
/// One group alone, and groups of one value each, are independent values. They have the exact interval of
/// [`median_interval`]: of six values, the bootstrap's holds the median in 93 % only.
///
/// # Panics
/// If there are no values, or a value is NaN.
pub fn bootstrap_median(groups: &[Vec<f64>]) -> Interval {
    let groups: Vec<&Vec<f64>> = groups.iter().filter(|group| !group.is_empty()).collect();
    let all: Vec<f64> = groups.iter().flat_map(|group| group.iter().copied()).collect();
    if groups.len() == 1 || groups.iter().all(|group| group.len() == 1) {
        return median_interval(&all).into();
    }
    let median = median(all);
    // A fixed seed: the same values give the same interval.
    let mut random = fastrand::Rng::with_seed(1);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let mut values = Vec::new();
            for _ in 0..groups.len() {
                let group = groups[random.usize(..groups.len())];
                values.extend((0..group.len()).map(|_| group[random.usize(..group.len())]));
            }
            self::median(values)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Interval { median, low: medians[RESAMPLES / 40], high: medians[RESAMPLES - 1 - RESAMPLES / 40] }
}

/// Ratio of the median of `a` to the median of `b`, with its 95 % interval by bootstrap. Both are resampled
/// independently, because the values are not paired. No ranks give this interval; of six to twelve values on each side,
/// from a normal, a log-normal and an exponential distribution, it held the true ratio in 95 to 97 %.
///
/// # Panics
/// If either side has no values, or a value is NaN.
pub fn bootstrap_ratio(a: &[f64], b: &[f64]) -> Interval {
    let mut random = fastrand::Rng::with_seed(1);
    let mut drawn = |of: &[f64]| median((0..of.len()).map(|_| of[random.usize(..of.len())]).collect());
    let mut ratios: Vec<f64> = (0..RESAMPLES).map(|_| drawn(a) / drawn(b)).collect();
    ratios.sort_by(f64::total_cmp);
    let median = median(a.to_vec()) / median(b.to_vec());
    Interval { median, low: ratios[RESAMPLES / 40], high: ratios[RESAMPLES - 1 - RESAMPLES / 40] }
}

/// Median ratio of arm `a` to arm `b` within each turn of each set. A turn has one rate per arm.
///
/// # Panics
/// If there are no turns.
pub fn ratio_within_turns(sets: &[Vec<Vec<f64>>], a: usize, b: usize) -> Interval {
    let ratios: Vec<Vec<f64>> = sets.iter().map(|set| set.iter().map(|turn| turn[a] / turn[b]).collect()).collect();
    bootstrap_median(&ratios)
}

/// Middle value, or the mean of the two middle values.
///
/// # Panics
/// If there are no values, or a value is NaN.
pub fn median(mut values: Vec<f64>) -> f64 {
    assert!(!values.is_empty() && values.iter().all(|value| !value.is_nan()), "numbers, at least one");
    values.sort_unstable_by(f64::total_cmp);
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

/// The value at a share of the sorted values, from 0 (lowest) to 1 (highest), by the nearest rank. `None` without
/// values.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    sorted.get((last as f64 * share).round() as usize).copied()
}

/// Ratios of one arm to another, each within one round.
pub fn ratios_within_rounds(of: &[f64], to: &[f64]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of / to).collect()
}

/// Median, lowest and highest of a few values: all that fewer than six rounds can show.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct Spread {
    /// Median of the values.
    pub median: f64,
    /// Lowest value of the sample.
    pub lowest: f64,
    /// Highest value of the sample.
    pub highest: f64,
}

impl Spread {
    /// Spread of the values; `None` without values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let [lowest, highest] = [quantile(values, 0.0)?, quantile(values, 1.0)?];
        Some(Spread { median: median(values.to_vec()), lowest, highest })
    }
}

/// A median and its confidence interval between two values, by their ranks, without an assumption on their
/// distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MedianInterval {
    /// Median of the values.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Probability that such an interval holds the true median: 0.95 or more, or less with too few values. Each side
    /// has half of the rest.
    pub confidence: f64,
}

impl From<MedianInterval> for Interval {
    fn from(MedianInterval { median, low, high, .. }: MedianInterval) -> Interval {
        Interval { median, low, high }
    }
}

/// The narrowest pair of ranks, symmetric from both ends, that holds the median with 95 %; the lowest and highest
/// value if no pair does (a binomial with probability one half: the sign test's interval).
///
/// # Panics
/// If there are no values.
pub fn median_interval(values: &[f64]) -> MedianInterval {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let mut chosen = (0, 1.0 - 2.0 * 0.5_f64.powi(n as i32));
    let (mut outside, mut ways) = (0.0, 1.0);
    for rank in 0..n.div_ceil(2) {
        outside += ways * 0.5_f64.powi(n as i32);
        ways *= (n - rank) as f64 / (rank + 1) as f64;
        if 1.0 - 2.0 * outside >= 0.95 {
            chosen = (rank, 1.0 - 2.0 * outside);
        }
    }
    MedianInterval {
        median: median(values.to_vec()),
        low: sorted[chosen.0],
        high: sorted[n - 1 - chosen.0],
        confidence: chosen.1,
    }
}

/// A comparison of two arms, by the ratios of pairs that were measured in the same round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Median of the ratios, with its interval.
    pub interval: Interval,
    /// Number of pairs.
    pub pairs: usize,
    /// Conclusion that the interval allows.
    pub verdict: Verdict,
}

/// Conclusion that a comparison allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The whole interval is on the better side of 1.
    Better,
    /// The whole interval is on the worse side of 1.
    Worse,
    /// The interval contains 1, or neither side is better.
    Indistinguishable,
    /// Too few pairs for an interval.
    Unknown,
}

impl Verdict {
    /// Meaning of the marks, for the text above a table.
    pub const LEGEND: &str = "= means that the interval contains 1: it shows no difference, but does not prove \
     equality; ? means fewer than six pairs, too few for a 95 % interval.";

    /// The verdict in words, for a sentence.
    pub const fn in_words(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::Indistinguishable => "indistinguishable",
            Verdict::Unknown => "too few rounds to tell",
        }
    }

    fn of(interval: Interval, pairs: usize, better: Better) -> Verdict {
        match better {
            _ if pairs < Comparison::PAIRS_MIN => Verdict::Unknown,
            Better::Higher if interval.low > 1.0 => Verdict::Better,
            Better::Higher if interval.high < 1.0 => Verdict::Worse,
            Better::Lower if interval.high < 1.0 => Verdict::Better,
            Better::Lower if interval.low > 1.0 => Verdict::Worse,
            _ => Verdict::Indistinguishable,
        }
    }
}

/// Relation of one arm to another in a metric where more is better. A difference of up to 2 % counts as equal. A row
/// that shows none of these is "not decided": two indistinguishable arms are not thereby shown to be equal.
///
/// The interval of pairs leaves at most 2.5 % on each side of it ([`median_interval`]). So one within two bounds
/// corresponds to two one-sided tests at 2.5 % each (Schuirmann, "A comparison of the two one-sided tests procedure",
/// 1987).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Equivalence {
    /// The whole interval is above 1, and not all of it within 2 %.
    Faster,
    /// The whole interval is between 0.98 and 1.02.
    Within,
    /// The whole interval is above 0.98: within 2 % or faster, but the data do not show which.
    NotSlower,
    /// The interval allows more than one of the other variants, or there are fewer than six pairs.
    NotDecided,
    /// The whole interval is below 1, and not all of it within 2 %.
    Slower,
}

impl Equivalence {
    /// Largest difference that counts as equal.
    pub const MARGIN: f64 = 0.02;

    /// Equivalence that a comparison shows.
    pub fn of(comparison: &Comparison) -> Equivalence {
        let Interval { low, high, .. } = comparison.interval;
        let (least, most) = (1.0 - Equivalence::MARGIN, 1.0 + Equivalence::MARGIN);
        match comparison.pairs {
            pairs if pairs < Comparison::PAIRS_MIN => Equivalence::NotDecided,
            _ if low >= least && high <= most => Equivalence::Within,
            _ if low > 1.0 => Equivalence::Faster,
            _ if low >= least => Equivalence::NotSlower,
            _ if high < 1.0 => Equivalence::Slower,
            _ => Equivalence::NotDecided,
        }
    }

    /// The equivalence in words, for a table.
    pub const fn in_words(self) -> &'static str {
        match self {
            Equivalence::Faster => "faster",
            Equivalence::Within => "within 2 %",
            Equivalence::NotSlower => "within 2 % or faster",
            Equivalence::NotDecided => "not decided",
            Equivalence::Slower => "slower",
        }
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(3);
        write!(f, "{:.digits$} ({:.digits$} - {:.digits$})", self.median, self.low, self.high)
    }
}

impl Interval {
    /// Whether the two intervals have a value in common.
    pub fn overlaps(&self, other: &Interval) -> bool {
        self.low <= other.high && other.low <= self.high
    }
}

impl Comparison {
    /// Smallest number of pairs with a 95 % interval for the median, which is the range of their ratios: the chance
    /// that all six lie on one side of the true median is 2 in 2^6. Of five it is 2 in 2^5, which is more than 5 %.
    pub const PAIRS_MIN: usize = 6;

    /// Comparison from the ratios of one arm to another, one of each round; `None` without ratios.
    pub fn of(ratios: &[f64], better: Better) -> Option<Comparison> {
        if ratios.is_empty() {
            return None;
        }
        let interval = median_interval(ratios).into();
        let verdict = Verdict::of(interval, ratios.len(), better);
        Some(Comparison { interval, pairs: ratios.len(), verdict })
    }

    /// Comparison of two medians without pairs, from all values of each side. `None` if a side has no values or a
    /// value is not above zero.
    pub fn of_unpaired(values: &[f64], to: &[f64], better: Better) -> Option<Comparison> {
        let is_usable = |values: &[f64]| !values.is_empty() && values.iter().all(|value| *value > 0.0);
        (is_usable(values) && is_usable(to)).then(|| {
            let pairs = values.len().min(to.len());
            let interval = bootstrap_ratio(values, to);
            Comparison { interval, pairs, verdict: Verdict::of(interval, pairs, better) }
        })
    }

    /// Half of the interval's width, relative to the median.
    pub fn half_width(&self) -> f64 {
        (self.interval.high - self.interval.low) / 2.0 / self.interval.median
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Interval { median, low, high } = self.interval;
        let mark = match self.verdict {
            Verdict::Better | Verdict::Worse => "",
            Verdict::Indistinguishable => " =",
            Verdict::Unknown => " ?",
        };
        match self.pairs {
            1 => write!(f, "{median:.3}{mark}"),
            _ => write!(f, "{median:.3} ({low:.3} - {high:.3}){mark}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_give_a_narrow_interval_and_spread_values_a_wide_one() {
        let sure = bootstrap_median(&[vec![1.5; 5], vec![1.5; 3]]);
        assert_eq!(sure, Interval { median: 1.5, low: 1.5, high: 1.5 });
        let unsure = bootstrap_median(&[(0..50).map(f64::from).collect()]);
        assert!(unsure.low > 10.0 && unsure.low < unsure.median, "{unsure:?}");
        assert!(unsure.high < 40.0 && unsure.high > unsure.median, "{unsure:?}");
    }

    #[test]
    fn six_pairs_decide_only_if_all_of_them_are_on_one_side() {
        // The bootstrap's interval of these ends above 1: it leaves out the one ratio below.
        let five_of_six = [0.99, 1.1, 1.1, 1.2, 1.2, 1.3];
        let compared = Comparison::of(&five_of_six, Better::Higher).expect("six pairs");
        assert_eq!((compared.interval.low, compared.interval.high), (0.99, 1.3), "their range: 96.9 %");
        assert_eq!(compared.verdict, Verdict::Indistinguishable);
        let within = [0.975, 0.99, 1.0, 1.0, 1.01, 1.01];
        let shown = Comparison::of(&within, Better::Higher).as_ref().map(Equivalence::of);
        assert_eq!(shown, Some(Equivalence::NotDecided), "one of six is not within 2 %");
        let of = |pairs: usize| median_interval(&five_of_six[..pairs]).confidence;
        assert!(of(Comparison::PAIRS_MIN) >= 0.95 && of(Comparison::PAIRS_MIN - 1) < 0.95);
    }

    #[test]
    fn values_without_groups_have_the_exact_interval_and_grouped_ones_the_bootstraps() {
        let six = [0.9, 1.1, 1.1, 1.2, 1.2, 1.3];
        let exact = Interval::from(median_interval(&six));
        assert_eq!(bootstrap_median(&[six.to_vec()]), exact);
        assert_eq!(bootstrap_median(&six.map(|value| vec![value])), exact, "a group of each round");
        assert_eq!(bootstrap_median(&[six.to_vec(), vec![]]), exact);
        // Of 300 independent values, the interval would be within the middle hundred.
        let grouped = bootstrap_median(&[1.0, 2.0, 3.0].map(|value| vec![value; 100]));
        assert_eq!((grouped.low, grouped.high), (1.0, 3.0));
    }

    #[test]
    fn few_groups_that_differ_make_the_interval_wide() {
        // Two groups, each without spread: half of the draws hold both, a quarter each only one of them.
        let interval = bootstrap_median(&[vec![1.0; 20], vec![2.0; 20]]);
        assert_eq!((interval.low, interval.high), (1.0, 2.0));
    }

    #[test]
    fn a_ratio_of_medians_is_as_uncertain_as_both() {
        let [sure, unsure]: [Vec<f64>; 2] = [vec![2.0; 9], (1..=9).map(f64::from).collect()];
        assert_eq!(bootstrap_ratio(&sure, &sure), Interval { median: 1.0, low: 1.0, high: 1.0 });
        let ratio = bootstrap_ratio(&unsure, &sure);
        assert!(ratio.median == 2.5 && ratio.low < 2.0 && ratio.high > 3.0, "{ratio:?}");
        assert_eq!(Comparison::of_unpaired(&[0.0; 9], &sure, Better::Higher), None);
    }

    #[test]
    fn intervals_that_touch_overlap() {
        let interval = |low, high| Interval { median: low, low, high };
        assert!(interval(1.0, 2.0).overlaps(&interval(2.0, 3.0)));
        assert!(!interval(1.0, 2.0).overlaps(&interval(2.1, 3.0)));
        assert!(interval(1.0, 4.0).overlaps(&interval(2.0, 3.0)));
    }

    #[test]
    fn an_interval_is_between_ranks_that_hold_the_median_with_95_per_cent() {
        let of = |n: u32| median_interval(&(1..=n).map(f64::from).collect::<Vec<_>>());
        // Six values: 1 - 2/64. Eight: the second and the seventh hold it with only 93 %.
        assert_eq!(of(6), MedianInterval { median: 3.5, low: 1.0, high: 6.0, confidence: 1.0 - 2.0 / 64.0 });
        assert_eq!((of(8).low, of(8).high), (1.0, 8.0));
        // Nine: 1 - 2 (1 + 9)/512.
        assert_eq!((of(9).low, of(9).high, of(9).confidence), (2.0, 8.0, 1.0 - 20.0 / 512.0));
        assert_eq!((of(3).low, of(3).high, of(3).confidence), (1.0, 3.0, 0.75));
        assert_eq!((of(1).median, of(1).confidence), (1.0, 0.0));
    }

    #[test]
    fn a_spread_is_median_lowest_and_highest() {
        let spread = Spread { median: 2.5, lowest: 1.0, highest: 9.0 };
        assert_eq!(Spread::of(&[2.0, 9.0, 1.0, 3.0]), Some(spread));
        assert_eq!((Spread::of(&[]), quantile(&[], 0.5)), (None, None));
        let values: Vec<f64> = (0..=10).map(f64::from).collect();
        assert_eq!([0.5, 0.9].map(|share| quantile(&values, share)), [Some(5.0), Some(9.0)]);
        assert_eq!(ratios_within_rounds(&[3.0, 8.0], &[2.0, 4.0]), [1.5, 2.0]);
    }

    #[test]
    fn an_interval_is_printed_with_the_digits_that_are_asked_for() {
        let interval = Interval { median: 1.5, low: 1.0, high: 2.25 };
        assert_eq!(
            (interval.to_string(), format!("{interval:.1}")),
            ("1.500 (1.000 - 2.250)".into(), "1.5 (1.0 - 2.2)".into())
        );
    }

    #[test]
    fn one_pair_has_no_interval_to_print() {
        let shown = |ratios: &[f64]| Comparison::of(ratios, Better::Higher).map(|ratio| ratio.to_string());
        assert_eq!(shown(&[0.484]).as_deref(), Some("0.484 ?"));
        assert_eq!(shown(&[0.5; 2]).as_deref(), Some("0.500 (0.500 - 0.500) ?"));
    }

    #[test]
    fn indistinguishable_arms_are_not_thereby_within_two_percent() {
        let shown = |low, high, pairs| {
            let interval = Interval { median: f64::midpoint(low, high), low, high };
            Equivalence::of(&Comparison { interval, pairs, verdict: Verdict::Indistinguishable })
        };
        let shown_by_six = [(0.981, 1.019), (1.001, 1.1), (0.99, 1.05), (0.9, 0.99), (0.95, 1.01), (0.95, 1.05)];
        assert_eq!(
            shown_by_six.map(|(low, high)| shown(low, high, 6).in_words()),
            ["within 2 %", "faster", "within 2 % or faster", "slower", "not decided", "not decided"]
        );
        // A certain difference of 1 % is still within 2 %.
        assert_eq!([shown(0.985, 0.995, 6), shown(1.005, 1.015, 6)], [Equivalence::Within; 2]);
        assert_eq!(shown(0.99, 1.01, 5), Equivalence::NotDecided);
    }

    #[test]
    fn only_an_interval_without_one_distinguishes_two_arms() {
        let verdict = |ratios: &[f64], better| Comparison::of(ratios, better).map(|comparison| comparison.verdict);
        let faster = [1.1, 1.2, 1.15, 1.12, 1.18, 1.13];
        assert_eq!(verdict(&faster, Better::Higher), Some(Verdict::Better));
        assert_eq!(verdict(&faster, Better::Lower), Some(Verdict::Worse));
        assert_eq!(verdict(&faster[..5], Better::Higher), Some(Verdict::Unknown));
        assert_eq!(verdict(&[0.9, 1.1, 0.95, 1.05, 1.0, 1.02], Better::Higher), Some(Verdict::Indistinguishable));
        assert_eq!(verdict(&[], Better::Higher), None);
    }
}
