//! Medians and how far they can be trusted.

/// A median with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Of all values.
    pub median: f64,
    /// 2.5 % of the resampled medians are below.
    pub low: f64,
    /// 2.5 % are above.
    pub high: f64,
}

/// How often the values are resampled: the 2.5 % ends then rest on 100 medians each.
const RESAMPLES: usize = 4000;

/// The median of all values and its 95 % interval by bootstrap (Efron, "Bootstrap methods", 1979). Values come in groups
/// that share what cannot be controlled, for instance their memory: groups are drawn first, then values within each.
///
/// # Panics
/// Where there is no value, or one is not a number.
pub fn bootstrap_median(groups: &[Vec<f64>]) -> Interval {
    let groups: Vec<&Vec<f64>> = groups.iter().filter(|group| !group.is_empty()).collect();
    let median = median(groups.iter().flat_map(|group| group.iter().copied()).collect());
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

/// The ratio of arm `a` to arm `b` within each turn of each set, where a turn has a rate of each arm.
///
/// # Panics
/// Where there is no turn at all.
pub fn ratio_within_turns(sets: &[Vec<Vec<f64>>], a: usize, b: usize) -> Interval {
    let ratios: Vec<Vec<f64>> = sets.iter().map(|set| set.iter().map(|turn| turn[a] / turn[b]).collect()).collect();
    bootstrap_median(&ratios)
}

/// The middle value, or the mean of the two in the middle.
///
/// # Panics
/// Where there is no value, or one is not a number.
pub fn median(mut values: Vec<f64>) -> f64 {
    assert!(!values.is_empty() && values.iter().all(|value| !value.is_nan()), "numbers, at least one");
    wideleaf_policies::median::median(&mut values, f64::total_cmp, f64::midpoint).expect("there is one")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_leave_no_doubt_and_spread_ones_do() {
        let sure = bootstrap_median(&[vec![1.5; 5], vec![1.5; 3]]);
        assert_eq!(sure, Interval { median: 1.5, low: 1.5, high: 1.5 });
        let unsure = bootstrap_median(&[(0..50).map(f64::from).collect()]);
        assert!(unsure.low > 10.0 && unsure.low < unsure.median, "{unsure:?}");
        assert!(unsure.high < 40.0 && unsure.high > unsure.median, "{unsure:?}");
    }

    #[test]
    fn few_groups_that_differ_make_the_interval_wide() {
        // Two groups, each without spread: half of the draws hold both, a quarter each only one of them.
        let interval = bootstrap_median(&[vec![1.0; 20], vec![2.0; 20]]);
        assert_eq!((interval.low, interval.high), (1.0, 2.0));
    }
}
