//! Numbers as the cells of tables have them: alike in every form of a report.

use wideleaf_measure::statistics::{Comparison, median_interval};

/// A number with four significant digits, or whole if it is large.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v >= 1000.0 => decimals(value, 0),
        v if v >= 100.0 => decimals(value, 1),
        v if v >= 10.0 => decimals(value, 2),
        v if v >= 1.0 => decimals(value, 3),
        _ => decimals(value, 4),
    }
}

/// A number with `decimals` decimal places. A negative number that rounds to zero has no sign.
pub fn decimals(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(zero) if zero.chars().all(|c| c == '0' || c == '.') => zero.to_owned(),
        _ => text,
    }
}

/// Median of values of independent rounds with its interval, as tables print it. A question mark shows that there are
/// too few values for a 95 % interval: the range stands in its place.
pub fn interval(values: &[f64]) -> String {
    if values.is_empty() {
        return "-".into();
    }
    let interval = median_interval(values);
    let mark = if values.len() < Comparison::PAIRS_MIN { " ?" } else { "" };
    match values {
        [one] => number(*one),
        _ => format!("{} ({} - {}){mark}", number(interval.median), number(interval.low), number(interval.high)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_figures() {
        assert_eq!(
            [0.0, 0.01234, 1.2345, 45.678, 123.456, 123_456.7].map(number),
            ["0", "0.0123", "1.234", "45.68", "123.5", "123457"]
        );
        assert_eq!([-0.000_01, -0.1, -1.5].map(number), ["0.0000", "-0.1000", "-1.500"], "zero has no sign");
    }

    #[test]
    fn the_interval_of_six_rounds_is_their_range() {
        assert_eq!(interval(&[5.0, 1.0, 2.0, 3.0, 4.0, 9.0]), "3.500 (1.000 - 9.000)");
        assert_eq!(interval(&[1.0, 2.0, 9.0]), "2.000 (1.000 - 9.000) ?");
    }
}
