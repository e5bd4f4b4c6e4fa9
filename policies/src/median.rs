//! The median, for any ordered values: costs of a recording, rates of a demo, times of a bench.

use core::cmp::Ordering;

/// The median of `values` by `compare`. For an even count, `between` combines the two middle values, the lower
/// first. `None` without values. Sorts the values.
///
/// ```
/// use wideleaf_policies::median::median;
/// assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0], f64::total_cmp, f64::midpoint), Some(2.5));
/// ```
pub fn median<T: Copy>(
    values: &mut [T],
    compare: impl FnMut(&T, &T) -> Ordering,
    between: impl FnOnce(T, T) -> T,
) -> Option<T> {
    values.sort_unstable_by(compare);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { between(values[middle - 1], upper) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_combines_two_values() {
        let both = |low, high| low * 10 + high;
        assert_eq!(median(&mut [4, 1, 3, 2], Ord::cmp, both), Some(23));
        assert_eq!(median(&mut [9, 1, 3], Ord::cmp, both), Some(3));
        assert_eq!(median(&mut [7], Ord::cmp, both), Some(7));
        assert_eq!(median(&mut [], Ord::cmp, both), None);
    }
}
