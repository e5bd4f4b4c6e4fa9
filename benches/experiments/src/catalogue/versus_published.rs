//! Comparison with published measurements: common parts of the tables and sentences of the experiments that
//! repeat a published form.
//!
//! ```text
//!   saved, percent         0            published, within 2 %
//!   ───────────────────────┼──────────────────────[═══x═══]──────────▶
//!    ├──┤ opposite sign  ├─┼─┤ none within 2 %     ├─┤ as published
//!         ├────────────────┼──┤ not decided         ├───────┤ the same sign   ├──┤ more
//! ```

use crate::metric::{Better, Metric};
use crate::report::common_sections::{decimals, left_out, number};
use crate::results::Results;
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict};

/// Published differences below this count as none, in percent: repeated runs of the authors spread as far.
const THEIRS_MIN_PERCENT: f64 = 1.0;
/// Largest difference that counts as equal, in percent of the time on base pages.
const MARGIN_PERCENT: f64 = Equivalence::MARGIN * 100.0;

/// Published saving of time by large pages, in percent of the time on base pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct PublishedSaving {
    /// Lowest saving that the publication allows.
    low: f64,
    /// Highest saving that the publication allows.
    high: f64,
    /// Whether a number is printed; otherwise the text says that there is no difference.
    is_printed: bool,
}

impl PublishedSaving {
    /// No significant difference, without a number.
    pub(super) const NONE: PublishedSaving = PublishedSaving { low: 0.0, high: 0.0, is_printed: false };

    /// A saving of time.
    pub(super) const fn percent(saved: f64) -> PublishedSaving {
        PublishedSaving { low: saved, high: saved, is_printed: true }
    }

    /// An improvement of time or of speed: the text does not say which.
    pub(super) fn of_time_or_speed(percent: f64) -> PublishedSaving {
        PublishedSaving { low: percent / (1.0 + percent / 100.0), high: percent, is_printed: true }
    }

    /// Sign of the saving; 0 if there is almost none.
    fn sign(self) -> i32 {
        match self {
            PublishedSaving { low, .. } if low >= THEIRS_MIN_PERCENT => 1,
            PublishedSaving { high, .. } if high <= -THEIRS_MIN_PERCENT => -1,
            _ => 0,
        }
    }

    fn in_words(self) -> String {
        match decimals(self.high, 1) {
            _ if !self.is_printed => "none published".into(),
            loss if self.sign() < 0 => format!("published loss: {loss} %"),
            saved => format!("{saved} % published"),
        }
    }
}

/// A published result and ours.
#[derive(Debug)]
pub(super) struct Pair {
    /// Name of the case.
    pub case: String,
    /// Published saving of time by large pages.
    pub theirs: PublishedSaving,
    /// Ratio of the time on large pages to that on base pages on this host, if measured.
    pub ours: Option<Comparison>,
}

/// What a measurement shows beside a published one. The order is that of the sentences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VersusPublished {
    OppositeSign,
    NoneHere,
    OnlyHere,
    OtherAmount,
    AsPublished,
    SameSign,
    NotDecided,
    TooFewRounds,
}

impl VersusPublished {
    /// Standings that differ from the published result, then the others, each with the begin of its sentence.
    const OTHERWISE: [(VersusPublished, &str); 4] = [
        (
            VersusPublished::OppositeSign,
            "Otherwise than published, large pages save time in one of both (published, here) and cost time in the \
             other",
        ),
        (VersusPublished::NoneHere, "Otherwise than published, no difference within 2 % here"),
        (VersusPublished::OnlyHere, "Otherwise than published, a difference here, where almost none is published"),
        (VersusPublished::OtherAmount, "Otherwise than published, over 2 % of the time more or less is saved"),
    ];
    const REST: [(VersusPublished, &str); 4] = [
        (VersusPublished::AsPublished, "As published, within 2 % of the time"),
        (VersusPublished::SameSign, "Same sign as published; whether the amount is the same within 2 % is not decided"),
        (VersusPublished::NotDecided, "Not decided, as the interval has 0 % in it and reaches beyond 2 %"),
        (VersusPublished::TooFewRounds, "Too few rounds to tell"),
    ];

    fn of(theirs: PublishedSaving, ours: &Comparison) -> VersusPublished {
        let [least, most] = [ours.interval.high, ours.interval.low].map(|ratio| (1.0 - ratio) * 100.0);
        let is_within = |low: f64, high: f64| least >= low - MARGIN_PERCENT && most <= high + MARGIN_PERCENT;
        let here = match ours.verdict {
            Verdict::Better => 1,
            Verdict::Worse => -1,
            Verdict::Indistinguishable => 0,
            Verdict::Unknown => return VersusPublished::TooFewRounds,
        };
        match theirs.sign() {
            _ if is_within(theirs.low, theirs.high) => VersusPublished::AsPublished,
            sign if sign != 0 && is_within(0.0, 0.0) => VersusPublished::NoneHere,
            0 if here != 0 => VersusPublished::OnlyHere,
            sign if sign == -here && here != 0 => VersusPublished::OppositeSign,
            _ if most < theirs.low - MARGIN_PERCENT || least > theirs.high + MARGIN_PERCENT => {
                VersusPublished::OtherAmount
            }
            _ if here == 0 => VersusPublished::NotDecided,
            _ => VersusPublished::SameSign,
        }
    }
}

/// Ratios of the time in one arm to that in another, by pairs.
pub(super) fn times(results: &Results, case: &str, arm: &str, to: &str) -> Option<Comparison> {
    Comparison::of(&results.ratios(case, arm, to, Metric::Seconds), Better::Lower)
}

/// The results that differ from the published ones in sentences, which come before all others of a report.
pub(super) fn otherwise(pairs: &[Pair]) -> Vec<String> {
    sentences(pairs, &VersusPublished::OTHERWISE)
}

/// All other results in sentences.
pub(super) fn other_sentences(pairs: &[Pair]) -> Vec<String> {
    if pairs.iter().all(|pair| pair.ours.is_none()) {
        return vec!["No time was measured yet.".into()];
    }
    sentences(pairs, &VersusPublished::REST)
}

/// First paragraphs of a report: what came otherwise than published, and how many rows were left out.
pub(super) fn lead(results: &Results, otherwise: Vec<String>) -> Vec<String> {
    otherwise.into_iter().chain(left_out::count(results)).collect()
}

fn sentences(pairs: &[Pair], standings: &[(VersusPublished, &str)]) -> Vec<String> {
    let of = |(standing, what): &(VersusPublished, &str)| {
        let texts: Vec<String> = pairs.iter().filter_map(|pair| pair_in_words(pair, *standing)).collect();
        sentence(what, &texts)
    };
    standings.iter().filter_map(of).collect()
}

/// The pair in words, if it has this standing.
fn pair_in_words(pair: &Pair, standing: VersusPublished) -> Option<String> {
    let ours = pair.ours.as_ref().filter(|ours| VersusPublished::of(pair.theirs, ours) == standing)?;
    Some(format!("{} ({}, {} here)", pair.case, pair.theirs.in_words(), saved(ours)))
}

/// A sentence with a list; `None` if the list is empty.
pub(super) fn sentence(what: &str, of: &[String]) -> Option<String> {
    (!of.is_empty()).then(|| format!("{what}: {}.", of.join(", ")))
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

    fn pair(case: &str, theirs: PublishedSaving, saved_percent: [f64; 6]) -> Pair {
        let times = saved_percent.map(|saved| 1.0 - saved / 100.0);
        Pair { case: case.into(), theirs, ours: Comparison::of(&times, Better::Lower) }
    }

    /// Six values from `low` to `high`.
    fn between(low: f64, high: f64) -> [f64; 6] {
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].map(|share| low + (high - low) * share)
    }

    #[test]
    fn disagreements_with_the_published_results_come_first() {
        let pairs = [
            pair("a", PublishedSaving::percent(9.5), between(8.0, 10.0)),
            pair("b", PublishedSaving::percent(10.0), between(-12.0, -10.0)),
            pair("c", PublishedSaving::percent(-3.0), between(-0.5, 1.5)),
            pair("d", PublishedSaving::percent(0.5), between(8.0, 10.0)),
            pair("e", PublishedSaving::percent(13.6), between(38.0, 50.0)),
        ];
        let first = otherwise(&pairs);
        assert_eq!(first.len(), 4, "{first:?}");
        assert!(first[0].contains("cost time in the other: b (10.0 % published, -11"), "{}", first[0]);
        assert!(first[1].contains("no difference within 2 % here: c (published loss: -3.0 %,"), "{}", first[1]);
        assert!(first[2].contains("where almost none is published: d (0.5 % published"), "{}", first[2]);
        assert!(first[3].contains("more or less is saved: e (13.6 % published"), "{}", first[3]);
        assert_eq!(
            other_sentences(&pairs),
            ["As published, within 2 % of the time: a (9.5 % published, 9.0 % (8.0 - 10.0) here)."]
        );
    }

    #[test]
    fn an_interval_that_reaches_beyond_two_percent_shows_neither_equality_nor_the_published_amount() {
        let standing =
            |theirs, low, high| VersusPublished::of(theirs, &pair("a", theirs, between(low, high)).ours.expect("six"));
        assert_eq!(
            standing(PublishedSaving::percent(0.0), -0.5, 4.8),
            VersusPublished::NotDecided,
            "0 is in it, and so is 4"
        );
        assert_eq!(standing(PublishedSaving::percent(0.0), -13.3, 28.6), VersusPublished::NotDecided);
        assert_eq!(standing(PublishedSaving::percent(0.0), -1.9, 1.9), VersusPublished::AsPublished);
        assert_eq!(standing(PublishedSaving::NONE, -1.9, 1.9), VersusPublished::AsPublished);
        assert_eq!(standing(PublishedSaving::NONE, 1.0, 3.0), VersusPublished::OnlyHere);
        assert_eq!(standing(PublishedSaving::percent(21.6), 20.0, 27.2), VersusPublished::SameSign);
        assert_eq!(standing(PublishedSaving::percent(21.6), 23.8, 27.2), VersusPublished::OtherAmount);
        assert_eq!(standing(PublishedSaving::percent(21.6), 20.0, 23.0), VersusPublished::AsPublished);
        assert_eq!(standing(PublishedSaving::percent(5.0), -1.0, 8.0), VersusPublished::NotDecided);
        assert_eq!(
            standing(PublishedSaving::percent(20.0), -5.3, 7.6),
            VersusPublished::OtherAmount,
            "at most 7.6 % are saved"
        );
    }

    #[test]
    fn a_percentage_of_time_or_speed_allows_both() {
        // 25 % faster takes 20 % less time.
        let theirs = PublishedSaving::of_time_or_speed(25.0);
        let standing =
            |low, high| VersusPublished::of(theirs, &pair("a", theirs, between(low, high)).ours.expect("six"));
        assert_eq!(
            [standing(18.5, 26.5), standing(10.0, 17.5)],
            [VersusPublished::AsPublished, VersusPublished::OtherAmount]
        );
        assert_eq!(
            [theirs, PublishedSaving::NONE].map(PublishedSaving::in_words),
            ["25.0 % published", "none published"]
        );
    }

    #[test]
    fn few_rounds_are_not_a_result() {
        let ours = Comparison::of(&[0.5, 0.5, 0.5], Better::Lower);
        let three = [Pair { case: "a".into(), theirs: PublishedSaving::percent(10.0), ours }];
        assert_eq!(
            other_sentences(&three),
            ["Too few rounds to tell: a (10.0 % published, 50.0 % (50.0 - 50.0) ? here)."]
        );
        assert_eq!((otherwise(&three).len(), other_sentences(&[])), (0, vec!["No time was measured yet.".to_owned()]));
    }
}
