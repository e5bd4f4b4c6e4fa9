//! Comparison with published measurements: common parts of the tables and sentences of the experiments that
//! repeat a published form.
//!
//! ```text
//!   published: saved 45.9 %   ours: 0.981 (0.962 - 1.004) of the time ──▶ "…, indistinguishable here: CG B"
//! ```

use crate::metric::{Better, Metric};
use crate::report::common_sections::{decimals, number};
use crate::results::Results;
use wideleaf_measure::statistics::{Comparison, Verdict};

/// Published differences below this count as none, in percent: repeated runs of the authors spread as far.
const THEIRS_MIN_PERCENT: f64 = 1.0;

/// A published result and ours.
#[derive(Debug)]
pub(super) struct Pair {
    /// Name of the case.
    pub case: String,
    /// Published saving of time by large pages, in percent of the time on base pages.
    pub theirs_percent: f64,
    /// Ratio of the time on large pages to that on base pages on this host, if measured.
    pub ours: Option<Comparison>,
}

/// Ratios of the time in one arm to that in another, by pairs.
pub(super) fn times(results: &Results, case: &str, arm: &str, to: &str) -> Option<Comparison> {
    Comparison::of(&results.ratios(case, arm, to, Metric::Seconds), Better::Lower)
}

/// The comparison in sentences, with disagreements first. Each sentence is derived from the numbers.
pub(super) fn told(pairs: &[Pair]) -> Vec<String> {
    let (mut opposite, mut not_here, mut only_here, mut alike, mut unknown) = (vec![], vec![], vec![], vec![], vec![]);
    for pair in pairs {
        let Some(ours) = &pair.ours else { continue };
        let sign = match pair.theirs_percent {
            saved if saved >= THEIRS_MIN_PERCENT => 1,
            saved if saved <= -THEIRS_MIN_PERCENT => -1,
            _ => 0,
        };
        let here = match ours.verdict {
            Verdict::Better => 1,
            Verdict::Worse => -1,
            Verdict::Indistinguishable => 0,
            Verdict::Unknown => {
                unknown.push(pair.case.clone());
                continue;
            }
        };
        let there = match decimals(pair.theirs_percent, 1) {
            loss if sign < 0 => format!("published loss: {loss} %"),
            saved => format!("{saved} % published"),
        };
        let text = format!("{} ({there}, {} here)", pair.case, saved(ours));
        match (sign, here) {
            (1, -1) | (-1, 1) => opposite.push(text),
            (_, 0) if sign != 0 => not_here.push(text),
            (0, _) if here != 0 => only_here.push(text),
            _ => alike.push(text),
        }
    }
    let sentence = |what: &str, of: Vec<String>| (!of.is_empty()).then(|| format!("{what}: {}.", of.join(", ")));
    let all: Vec<String> = [
        sentence(
            "Opposite sign: large pages save time in one of both (published, here) and cost time in the other",
            opposite,
        ),
        sentence("Published difference, indistinguishable here", not_here),
        sentence("Almost no published difference, but a difference here", only_here),
        sentence("As published", alike),
        sentence("Too few rounds to tell", unknown),
    ]
    .into_iter()
    .flatten()
    .collect();
    if all.is_empty() { vec!["No time was measured yet.".into()] } else { all }
}

/// Time saved in percent with its interval, from a ratio of times.
pub(super) fn saved(times: &Comparison) -> String {
    let percent = |ratio: f64| decimals((1.0 - ratio) * 100.0, 1);
    let interval = times.interval;
    let mark = match times.verdict {
        Verdict::Better | Verdict::Worse => "",
        Verdict::Indistinguishable => " =",
        Verdict::Unknown => " ?",
    };
    match times.pairs {
        1 => format!("{} %{mark}", percent(interval.median)),
        _ => format!("{} % ({} - {}){mark}", percent(interval.median), percent(interval.high), percent(interval.low)),
    }
}

/// Values of a metric, without their rounds.
pub(super) fn values(results: &Results, case: &str, arm: &str, metric: Metric) -> Vec<f64> {
    results.values(case, arm, metric).into_iter().map(|(_, value)| value).collect()
}

/// First value of a metric, for cells that run once.
pub(super) fn value(results: &Results, case: &str, arm: &str, metric: Metric) -> Option<f64> {
    values(results, case, arm, metric).first().copied()
}

/// Mean of the values; `None` without values.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// A number as a table cell.
pub(super) fn cell(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), number)
}

/// A count in millions as a table cell.
pub(super) fn millions(count: Option<f64>) -> String {
    cell(count.map(|count| count / 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(case: &str, theirs_percent: f64, times: [f64; 6]) -> Pair {
        Pair { case: case.into(), theirs_percent, ours: Comparison::of(&times, Better::Lower) }
    }

    #[test]
    fn disagreements_with_the_published_results_come_first() {
        let pairs = [
            pair("a", 10.0, [0.90, 0.91, 0.92, 0.90, 0.91, 0.92]),
            pair("b", 10.0, [1.10, 1.11, 1.12, 1.10, 1.11, 1.12]),
            pair("c", -2.0, [0.99, 1.01, 0.98, 1.02, 1.0, 1.0]),
            pair("d", 0.5, [0.90, 0.91, 0.92, 0.90, 0.91, 0.92]),
        ];
        let told = told(&pairs);
        assert!(told[0].contains("cost time in the other: b (10.0 % published, -11"), "{}", told[0]);
        assert!(
            told[1].starts_with("Published difference, indistinguishable here: c (published loss: -2.0 %,"),
            "{}",
            told[1]
        );
        assert!(told[2].starts_with("Almost no published difference, but a difference here: d"), "{}", told[2]);
        assert!(told[3].starts_with("As published: a (10.0 % published, 9.0 % (8.0 - 10.0) here)"), "{}", told[3]);
    }

    #[test]
    fn few_rounds_are_not_a_result() {
        let three =
            Pair { case: "a".into(), theirs_percent: 10.0, ours: Comparison::of(&[0.5, 0.5, 0.5], Better::Lower) };
        assert_eq!(told(&[three]), ["Too few rounds to tell: a."]);
        assert_eq!(told(&[]), ["No time was measured yet."]);
    }
}
