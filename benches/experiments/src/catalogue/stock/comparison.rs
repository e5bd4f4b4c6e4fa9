//! First paragraphs of the report on `stock`, from its results alone: wideleafd compared with THP in each case and
//! quantity. The rows that it loses come first, then its speed with a margin of 2 %, then the targets. Values of one
//! round are compared with each other only.

use wideleaf_measure::event_times::EventTimes;
use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict, median};
use wideleaf_measure::table::Cell;

use super::{SITUATIONS, THP, WIDELEAFD};
use crate::disturbance::{FREE_HUGE_PAGES, LOOK_EVERY_MS, TO_NEARLY_ALL_S, WATCHED_S};
use crate::each_guest::left_out_in_words;
use crate::metric::{Better, Metric};
use crate::report::common_sections::bar_in_words;
use crate::results::Results;

/// Lowest speed that is allowed anywhere, as a ratio to THP.
const SPEED_MIN: f64 = 0.99;
/// Gain that counts as ahead, and the number of cases in which wideleafd must be that far ahead.
const AHEAD: f64 = 1.05;
const CASES_AHEAD_MIN: f64 = 4.0;
/// Guest RAM beyond that under THP that counts as the same, in MiB: two windows, by which two runs of one arm differ.
const RAM_SAME_MIB: f64 = 4.0;
/// Number of times that coverage must come sooner than by khugepaged at its defaults.
const TIMES_SOONER_MIN: f64 = 20.0;
/// Time of THP to coverage from which on huge pages were missing after the event, in seconds. Two looks less is noise.
const MISSING_FROM_S: f64 = 0.5;

/// A quantity in which the two are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    Speed,
    ToNearlyAll,
    GuestRam,
    GapP99,
    GapMax,
    FreeHugePages,
}

impl Quantity {
    const ALL: [Quantity; 6] = [
        Quantity::Speed,
        Quantity::ToNearlyAll,
        Quantity::GuestRam,
        Quantity::GapP99,
        Quantity::GapMax,
        Quantity::FreeHugePages,
    ];

    const fn in_words(self) -> &'static str {
        match self {
            Quantity::Speed => "speed",
            Quantity::ToNearlyAll => "time to 99 %",
            Quantity::GuestRam => "guest RAM",
            Quantity::GapP99 => "gap p99",
            Quantity::GapMax => "longest gap",
            Quantity::FreeHugePages => "free huge pages",
        }
    }

    const fn better(self) -> Better {
        match self {
            Quantity::Speed | Quantity::FreeHugePages => Better::Higher,
            _ => Better::Lower,
        }
    }

    /// Values by round. None is zero, so that ratios exist.
    fn values(self, results: &Results, case: &str, arm: &str) -> Vec<(u32, f64)> {
        match self {
            Quantity::Speed => results.values(case, arm, Metric::Figure),
            Quantity::ToNearlyAll => times(results, case, arm),
            Quantity::GuestRam => results.values(case, arm, Metric::ResidentMib),
            Quantity::GapP99 => results.values(case, arm, Metric::GapP99Us),
            Quantity::GapMax => results.values(case, arm, Metric::GapMaxUs),
            Quantity::FreeHugePages => {
                let free = results.told(case, arm, FREE_HUGE_PAGES).into_iter();
                free.map(|(round, pages)| (round, pages + 1.0)).collect()
            }
        }
    }

    /// wideleafd : THP, by rounds.
    fn compared(self, results: &Results, case: &str) -> Option<Comparison> {
        let pairs = match self {
            Quantity::ToNearlyAll => times_of_both(results, case),
            _ => paired(&self.values(results, case, WIDELEAFD), &self.values(results, case, THP)),
        };
        let ratios: Vec<f64> = pairs.into_iter().filter(|(_, thp)| *thp > 0.0).map(|(ours, thp)| ours / thp).collect();
        Comparison::of(&ratios, self.better())
    }
}

/// Times from the event to 99 %, by round. A time that never came counts as the time that was watched: a lower bound.
fn times(results: &Results, case: &str, arm: &str) -> Vec<(u32, f64)> {
    let came = results.told(case, arm, TO_NEARLY_ALL_S);
    let time = |(round, watched): (u32, f64)| {
        let time = came.iter().find(|(of, _)| *of == round).map_or(watched, |(_, time)| *time);
        // A shorter time is not resolved.
        (round, time.max(LOOK_EVERY_MS as f64 / 1e3))
    };
    results.told(case, arm, WATCHED_S).into_iter().map(time).collect()
}

/// Times from the event to 99 % of wideleafd and THP, by rounds. A round in which neither came has two lower bounds,
/// which have no ratio, and is left out.
fn times_of_both(results: &Results, case: &str) -> Vec<(f64, f64)> {
    let came = [WIDELEAFD, THP].map(|arm| results.told(case, arm, TO_NEARLY_ALL_S)).concat();
    let mut ours = times(results, case, WIDELEAFD);
    ours.retain(|(round, _)| came.iter().any(|(of, _)| of == round));
    paired(&ours, &times(results, case, THP))
}

/// Times from the event to 99 %, of all rounds.
pub(super) fn reached(results: &Results, case: &str, arm: &str) -> EventTimes {
    let came = results.told(case, arm, TO_NEARLY_ALL_S);
    let has_come = |(round, time): (u32, f64)| came.iter().any(|(of, _)| *of == round).then_some(time);
    times(results, case, arm).into_iter().map(has_come).collect()
}

/// Median time to 99 %, in seconds; where it falls among rounds without it, a lower bound by the time that was watched.
/// `None` without a run.
pub(super) fn time(results: &Results, case: &str, arm: &str) -> Option<f64> {
    let bounds: Vec<f64> = times(results, case, arm).into_iter().map(|(_, time)| time).collect();
    let bound = (!bounds.is_empty()).then(|| median(bounds));
    reached(results, case, arm).middle().or(bound)
}

fn paired(ours: &[(u32, f64)], thp: &[(u32, f64)]) -> Vec<(f64, f64)> {
    let other = |round: u32| thp.iter().find(|(of, _)| *of == round).map(|(_, value)| *value);
    ours.iter().filter_map(|(round, value)| Some((*value, other(*round)?))).collect()
}

/// The speed of wideleafd, compared with THP in the same round.
pub(super) fn speed(results: &Results, case: &str) -> Option<Comparison> {
    Quantity::Speed.compared(results, case)
}

/// Paragraphs before all others: the lost rows, the speed, the targets.
pub(super) fn lead(results: &Results) -> Vec<String> {
    let cases: Vec<&str> = results.experiment.cases.iter().map(|case| case.name.as_str()).collect();
    if cases.iter().all(|case| speed(results, case).is_none()) {
        return vec!["Nothing is compared yet: no round has a run of both THP and wideleafd.".into()];
    }
    let bars = bars(results, &cases);
    let bound = bound(results, &cases);
    let left_out = left_out_in_words(results).into_iter().collect();
    [vec![lost(results, &cases), speeds(results, &cases)], bars.iter().map(bar_in_words).collect(), bound, left_out]
        .concat()
}

/// A note that the last target has only a lower bound, if so.
fn bound(results: &Results, cases: &[&str]) -> Vec<String> {
    let is_bound = |case: &&&str| times_sooner(results, case).is_some() && !reached(results, case, THP).is_complete();
    let those: Vec<&str> = cases.iter().filter(is_bound).copied().collect();
    let what = "The times by which coverage comes sooner are lower bounds, because the guest ended before \
                khugepaged was done";
    if those.is_empty() { vec![] } else { vec![format!("{what}; `--long` waits for it: {}.", those.join(", "))] }
}

/// The rows that wideleafd loses by more than 2 %.
fn lost(results: &Results, cases: &[&str]) -> String {
    let of = |case: &str, quantity: Quantity| {
        let compared = quantity.compared(results, case)?;
        let is_lost =
            compared.verdict == Verdict::Worse && (compared.interval.median - 1.0).abs() > Equivalence::MARGIN;
        is_lost.then(|| format!("{case}, {}: {compared}", quantity.in_words()))
    };
    let rows = cases.iter().flat_map(|case| Quantity::ALL.map(|quantity| of(case, quantity)));
    let rows: Vec<String> = rows.flatten().collect();
    match rows.len() {
        0 => "wideleafd loses no row by more than 2 % for certain.".into(),
        some => format!("wideleafd loses {some} rows (wideleafd : THP): {}.", rows.join("; ")),
    }
}

/// The cases by their speed, with a margin of 2 %, slower ones first.
fn speeds(results: &Results, cases: &[&str]) -> String {
    const ORDER: [Equivalence; 5] = [
        Equivalence::Slower,
        Equivalence::NotDecided,
        Equivalence::NotSlower,
        Equivalence::Within,
        Equivalence::Faster,
    ];
    let of = |wanted: Equivalence| {
        let is_that = |case: &&&str| speed(results, case).is_some_and(|to| Equivalence::of(&to) == wanted);
        let those: Vec<&str> = cases.iter().filter(is_that).copied().collect();
        (!those.is_empty()).then(|| format!("{}: {}", wanted.in_words(), those.join(", ")))
    };
    let told: Vec<String> = ORDER.into_iter().filter_map(of).collect();
    format!("Speed of wideleafd against THP, equivalence within 2 %: {}.", told.join("; "))
}

/// The targets, each judged by medians.
fn bars(results: &Results, cases: &[&str]) -> Vec<Bar> {
    let number = |value: Option<f64>, decimals, unit: &str| {
        value.map_or_else(|| Cell::missing("not measured"), |value| Cell::number(value, decimals, unit))
    };
    let speeds: Vec<f64> = cases.iter().filter_map(|case| Some(speed(results, case)?.interval.median)).collect();
    let ahead = cases.iter().filter_map(|case| speed(results, case));
    let ahead = ahead.filter(|to| to.verdict == Verdict::Better && to.interval.median >= AHEAD).count();
    let more = cases.iter().filter_map(|case| more_ram(results, case)).reduce(f64::max);
    let sooner = cases.iter().filter_map(|case| times_sooner(results, case)).reduce(f64::min);
    vec![
        Bar::new(
            "lowest median speed of all cases, wideleafd : THP",
            number(speeds.into_iter().reduce(f64::min), 3, ""),
            Limit::AtLeast(SPEED_MIN),
        ),
        Bar::new(
            "number of cases in which wideleafd is ahead by 5 % or more, for certain",
            Cell::count(ahead as u64),
            Limit::AtLeast(CASES_AHEAD_MIN),
        ),
        Bar::new(
            "most guest RAM beyond that under THP, median of a case",
            number(more, 1, "MiB"),
            Limit::AtMost(RAM_SAME_MIB),
        ),
        Bar::new(
            "fewest times that coverage comes sooner than by khugepaged at its defaults, median of a case",
            number(sooner, 1, ""),
            Limit::AtLeast(TIMES_SOONER_MIN),
        ),
    ]
}

/// Median of the guest RAM beyond that under THP in the same round, in MiB.
fn more_ram(results: &Results, case: &str) -> Option<f64> {
    let quantity = Quantity::GuestRam;
    let pairs = paired(&quantity.values(results, case, WIDELEAFD), &quantity.values(results, case, THP));
    let more: Vec<f64> = pairs.into_iter().map(|(ours, thp)| ours - thp).collect();
    (!more.is_empty()).then(|| median(more))
}

/// Median of how many times sooner 99 % comes than by THP, for an event in the life of a guest after which huge pages
/// are missing and can be had; a lower bound where THP never came to it.
pub(super) fn times_sooner(results: &Results, case: &str) -> Option<f64> {
    let (ours, thp) = (times(results, case, WIDELEAFD), times(results, case, THP));
    let is_disturbed = SITUATIONS.iter().any(|known| known.name == case && known.event.is_later());
    let can_be_had = [THP, WIDELEAFD].iter().any(|arm| !results.told(case, arm, TO_NEARLY_ALL_S).is_empty());
    let are_missing = time(results, case, THP).is_some_and(|time| time >= MISSING_FROM_S);
    let times: Vec<f64> = paired(&ours, &thp).into_iter().map(|(ours, thp)| thp / ours).collect();
    (is_disturbed && can_be_had && are_missing && !times.is_empty()).then(|| median(times))
}

#[cfg(test)]
mod tests {
    use super::super::Stock;
    use super::*;
    use crate::catalogue::Catalogued as _;
    use crate::catalogue::fixture::{host, results_of};
    use crate::results::RunOutcome;

    /// Results by case and arm: speed, time to 99 % if it came, guest RAM, free huge pages.
    fn made_up(of: impl Fn(&str, &str) -> (f64, Option<f64>, f64, f64)) -> Results {
        let mut results = results_of(Stock.define(&host()), |case, arm, _| Some((Metric::Figure, of(case, arm).0)));
        for run in &mut results.runs {
            let (_, time, ram, free) = of(&run.case, &run.arm);
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            measured.metrics.insert(Metric::ResidentMib, ram);
            measured.told.insert(WATCHED_S.into(), 6.0);
            measured.told.insert(FREE_HUGE_PAGES.into(), free);
            measured.told.extend(time.map(|time| (TO_NEARLY_ALL_S.to_owned(), time)));
        }
        results
    }

    #[test]
    fn lost_rows_come_first_and_every_missed_target_is_named() {
        let results = made_up(|case, arm| match (case, arm) {
            ("postcopy", WIDELEAFD) => (0.9, Some(1.0), 190.0, 50.0),
            ("postcopy", _) => (1.0, None, 150.0, 100.0),
            _ => (1.0, Some(0.1), 180.0, 100.0),
        });
        let lead = lead(&results);
        assert!(lead[0].starts_with("wideleafd loses 3 rows"), "{}", lead[0]);
        for row in ["postcopy, speed: 0.900", "postcopy, guest RAM: 1.267", "postcopy, free huge pages: 0.505"] {
            assert!(lead[0].contains(row), "no {row:?} in {}", lead[0]);
        }
        assert!(lead[1].contains("2 %: slower: postcopy; within 2 %: start, saved and restored"), "{}", lead[1]);
        let missed = ["0.900, at least 0.99", " 0, at least 4", "40.0 MiB, at most 4", " 6.0, at least 20"];
        for (line, words) in lead[2..].iter().zip(missed) {
            assert!(line.starts_with("MISSED:") && line.ends_with(&format!("{words}.")), "{line}");
        }
        assert!(lead[6].ends_with("waits for it: postcopy."), "{}", lead[6]);
    }

    #[test]
    fn every_target_can_be_met() {
        let results = made_up(|case, arm| match (case.contains("in pieces") || case == "postcopy", arm) {
            (true, WIDELEAFD) => (1.2, Some(0.2), 180.0, 100.0),
            (true, _) => (1.0, None, 180.0, 100.0),
            _ => (1.0, Some(0.1), 180.0, 100.0),
        });
        let lead = lead(&results);
        assert_eq!(lead[0], "wideleafd loses no row by more than 2 % for certain.");
        assert!(lead[2..6].iter().all(|line| line.starts_with("met: ")), "{lead:?}");
    }

    #[test]
    fn coverage_that_comes_to_neither_is_not_a_time() {
        let results = made_up(|_, _| (1.0, None, 180.0, 100.0));
        assert_eq!(times_sooner(&results, "postcopy"), None);
        assert!(!reached(&results, "in pieces", THP).is_complete());
    }

    #[test]
    fn two_lower_bounds_are_not_compared() {
        let mut results = made_up(|_, _| (1.0, None, 180.0, 100.0));
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            measured.told.insert(WATCHED_S.into(), if run.arm == WIDELEAFD { 7.4 } else { 7.0 });
        }
        assert_eq!(lead(&results)[0], "wideleafd loses no row by more than 2 % for certain.");
    }

    #[test]
    fn coverage_that_comes_to_thp_alone_is_a_lost_row() {
        let results = made_up(|_, arm| (1.0, (arm == THP).then_some(1.0), 180.0, 100.0));
        assert_eq!(times_sooner(&results, "start"), None, "a start is no disturbance");
        let lead = lead(&results);
        assert!(lead[0].contains("start, time to 99 %: 6.000"), "{}", lead[0]);
        assert_eq!(times_sooner(&results, "postcopy").map(|times| (times * 60.0).round()), Some(10.0));
    }

    #[test]
    fn without_both_arms_nothing_is_claimed() {
        let mut results = made_up(|_, _| (1.0, None, 180.0, 100.0));
        results.runs.retain(|run| run.arm == THP);
        assert_eq!(lead(&results), ["Nothing is compared yet: no round has a run of both THP and wideleafd."]);
    }
}
