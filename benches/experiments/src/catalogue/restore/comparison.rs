//! `moved` beside the other arms: where it loses, and the targets with their figures, case by case.

use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict, median};
use wideleaf_measure::table::Cell;

use super::full_speed::{t99s, told_if_restored};
use super::{ARMS, COPIES, IN_QEMU, MOVED, NEVER_SAVED};
use crate::metric::{Better, Metric};
use crate::restoring::speeds::limit_s;
use crate::restoring::{DISK_MIB, HOT_MIB, HUGE_AT_FIRST_PERCENT, READ_BYTES_PER_S, STORED_MIB};
use crate::results::Results;

/// Largest T99 as a ratio to 1.3 times the time in which the hot set is read, and 50 ms.
const OF_LIMIT_MAX: f64 = 1.0;
/// Number of times that T99 is to be shorter than with copies of 4 KiB, and than in QEMU.
const TIMES_SHORTER_MIN: f64 = 5.0;
/// Smallest share of the hot set on 2 MiB pages when first at 99 %, in per cent.
const HUGE_PERCENT_MIN: f64 = 99.0;
/// Largest size of a snapshot's files as a ratio to pages that are not zero.
const DISK_MAX: f64 = 1.05;

/// T99 of an arm as a ratio to that of `moved`, round by round: an upper bound where `moved` never came to it. `None`
/// stands for a round in which neither came.
fn beside_moved(results: &Results, case: &str, arm: &str) -> Vec<Option<f64>> {
    let moved = t99s(results, case, MOVED);
    let ratio = |(round, time, has_come): (u32, f64, bool)| {
        let (_, ours, has_moved_come) = moved.iter().find(|(of, ..)| *of == round)?;
        Some((has_come || *has_moved_come).then_some(time / ours))
    };
    t99s(results, case, arm).into_iter().filter_map(ratio).collect()
}

/// The ratios to `moved` of the rounds that have one.
pub(super) fn to_moved(results: &Results, case: &str, arm: &str) -> Vec<f64> {
    beside_moved(results, case, arm).into_iter().flatten().collect()
}

/// Rounds without a ratio to `moved`, in words; `None` without such rounds.
fn left_out(results: &Results, cases: &[&str]) -> Option<String> {
    let place = |case: &str, arm: &str| {
        let rounds = beside_moved(results, case, arm);
        let out = rounds.iter().filter(|ratio| ratio.is_none()).count();
        (out > 0).then(|| format!("{out} of {} of `{arm}` in {case}", rounds.len()))
    };
    let places = cases.iter().flat_map(|case| others().filter_map(move |arm| place(case, arm)));
    let places: Vec<String> = places.collect();
    let why = format!("Rounds without a ratio to `{MOVED}`, because neither of the two came to full speed");
    (!places.is_empty()).then(|| format!("{why}: {}.", places.join("; ")))
}

/// Arms of the other ways to continue a saved guest.
fn others() -> impl Iterator<Item = &'static str> {
    ARMS.iter().map(|(_, arm, _)| *arm).filter(|arm| ![MOVED, NEVER_SAVED].contains(arm))
}

/// T99 of an arm as a ratio to its limit, by the hot set and the read bandwidth of the same run; infinite if it never
/// came.
pub(super) fn of_limit(results: &Results, case: &str, arm: &str) -> Option<f64> {
    let at = |name: &str, round: u32| {
        results.told(case, arm, name).into_iter().find(|(of, _)| *of == round).map(|(_, value)| value)
    };
    let ratio = |(round, time, has_come): (u32, f64, bool)| {
        let limit = limit_s(at(HOT_MIB, round)? * f64::from(1 << 20), at(READ_BYTES_PER_S, round)?);
        Some(if has_come { time / limit } else { f64::INFINITY })
    };
    median_of(t99s(results, case, arm).into_iter().filter_map(ratio).collect())
}

fn median_of(values: Vec<f64>) -> Option<f64> {
    (!values.is_empty()).then(|| median(values))
}

fn values_of(by_round: Vec<(u32, f64)>) -> Vec<f64> {
    by_round.into_iter().map(|(_, value)| value).collect()
}

fn told(results: &Results, case: &str, name: &str) -> Option<f64> {
    median_of(values_of(results.told(case, MOVED, name)))
}

/// Space of a snapshot's files as a ratio to what is stored.
fn disk_share(results: &Results, case: &str) -> Option<f64> {
    Some(told(results, case, DISK_MIB)? / told(results, case, STORED_MIB)?)
}

/// What has to be said first.
pub(super) fn lead(results: &Results) -> Vec<String> {
    let cases: Vec<&str> = results.experiment.cases.iter().map(|case| case.name.as_str()).collect();
    if cases.iter().all(|case| t99s(results, case, MOVED).is_empty()) {
        return vec![format!("Nothing is compared yet: no run of `{MOVED}` is there.")];
    }
    let bars = cases.iter().flat_map(|case| bars(results, case)).filter(|bar| !bar.is_met);
    let missed: Vec<String> = bars.map(|bar| format!("{bar}.")).collect();
    let told = match missed.is_empty() {
        true => vec!["Every target is met.".to_owned()],
        false => missed,
    };
    [lost(results, &cases), told, left_out(results, &cases).into_iter().collect()].concat()
}

/// Rows in which another way is sooner at full speed, or `moved` ends at a lower one than a guest that was never saved:
/// first those with the whole interval below 1, then the others.
fn lost(results: &Results, cases: &[&str]) -> Vec<String> {
    let of_case = |case: &&str| {
        let sooner = others().map(|arm| (format!("T99 of `{arm}` : `{MOVED}`"), to_moved(results, case, arm)));
        let steady = results.ratios(case, MOVED, NEVER_SAVED, Metric::Figure);
        let speed = (format!("steady speed of `{MOVED}` : `{NEVER_SAVED}`"), steady);
        let row = |(what, ratios): (String, Vec<f64>)| {
            Some((format!("{case}: {what}"), Comparison::of(&ratios, Better::Higher)?))
        };
        sooner.chain([speed]).filter_map(row).collect::<Vec<_>>()
    };
    let rows: Vec<(String, Comparison)> = cases.iter().flat_map(of_case).collect();
    let of = |is: fn(&Comparison) -> bool| {
        let those = rows.iter().filter(|(_, to)| is(to)).map(|(what, to)| format!("{what} is {to}"));
        those.collect::<Vec<_>>()
    };
    let certain = of(|to| to.verdict == Verdict::Worse);
    let open = of(|to| to.verdict != Verdict::Worse && to.interval.median < 1.0 - Equivalence::MARGIN);
    let certain = match certain.len() {
        0 => format!("`{MOVED}` loses no row for certain."),
        some => format!("`{MOVED}` loses {some} rows: {}.", certain.join("; ")),
    };
    let why = "behind by more than 2 % in the median, while the interval allows 1 or has fewer than six rounds";
    let open = (!open.is_empty()).then(|| format!("Rows in which `{MOVED}` is {why}: {}.", open.join("; ")));
    [certain].into_iter().chain(open).collect()
}

/// The targets of a case, each judged by medians. Those of arms that did not run are left out.
pub(super) fn bars(results: &Results, case: &str) -> Vec<Bar> {
    let times = |arm: &str| {
        let shorter = median_of(to_moved(results, case, arm))?;
        let what = format!("{case}: times that T99 is shorter than that of `{arm}`");
        Some(Bar::new(what, Cell::number(shorter, 1, ""), Limit::AtLeast(TIMES_SHORTER_MIN)))
    };
    let limit = |arm: &str| {
        let ratio = of_limit(results, case, arm)?;
        let what = format!("{case}: T99 of `{arm}` as a ratio to 1.3 x hot set / read bandwidth + 50 ms");
        Some(Bar::new(what, Cell::number(ratio, 2, ""), Limit::AtMost(OF_LIMIT_MAX)))
    };
    let huge = values_of(told_if_restored(results, case, MOVED, HUGE_AT_FIRST_PERCENT));
    let huge = median_of(huge).map(|percent| {
        let what = format!("{case}: hot set on 2 MiB pages when first at 99 %");
        Bar::new(what, Cell::number(percent, 1, "%"), Limit::AtLeast(HUGE_PERCENT_MIN))
    });
    let disk = disk_share(results, case).map(|share| {
        let what = format!("{case}: files of the snapshot as a ratio to pages that are not zero");
        Bar::new(what, Cell::number(share, 3, ""), Limit::AtMost(DISK_MAX))
    });
    [limit(MOVED), times(COPIES), times(IN_QEMU), huge, disk].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::super::Restore;
    use super::super::fixture::come_to_full_speed;
    use super::*;
    use crate::catalogue::Catalogued as _;
    use crate::catalogue::fixture::{host, results_of};
    use crate::results::RunOutcome;

    /// Results in which each arm has this T99, if it comes.
    fn made_up(t99: impl Fn(&str, &str) -> Option<f64>) -> Results {
        let mut results = results_of(Restore.define(&host()), |_, _, _| Some((Metric::Figure, 1e8)));
        for run in &mut results.runs {
            let time = t99(&run.case, &run.arm);
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let told = [
                (HOT_MIB, 1024.0),
                (READ_BYTES_PER_S, f64::from(1 << 30)),
                (HUGE_AT_FIRST_PERCENT, 99.5),
                (STORED_MIB, 1000.0),
                (DISK_MIB, 1010.0),
            ];
            measured.told.extend(told.map(|(name, value)| (name.to_owned(), value)));
            come_to_full_speed(measured, 6.0, time);
        }
        results
    }

    #[test]
    fn every_target_can_be_met_and_a_lower_bound_counts_for_other_arms() {
        // The limit is 1.35 s.
        let results = made_up(|_, arm| match arm {
            MOVED => Some(0.5),
            COPIES => None, // at least 6 s
            _ => Some(2.6),
        });
        assert_eq!(lead(&results), ["`moved` loses no row for certain.", "Every target is met."]);
        let bars = bars(&results, "GUPS 1 GiB, cold");
        let values: Vec<String> = bars.iter().map(|bar| bar.value.to_string()).collect();
        assert_eq!(values, ["0.37", "12.0", "5.2", "99.5 %", "1.010"]);
    }

    #[test]
    fn a_way_that_is_sooner_is_named_first_and_every_missed_target_after_it() {
        let results = made_up(|case, arm| match (case, arm) {
            ("GUPS 1 GiB, warm", MOVED) => Some(2.7),
            (_, MOVED) => Some(0.5),
            _ => Some(2.6),
        });
        let lead = lead(&results);
        assert!(lead[0].starts_with("`moved` loses 4 rows: GUPS 1 GiB, warm: T99 of `moved, in order`"), "{}", lead[0]);
        assert_eq!(lead.len(), 4);
        assert!(lead[1].starts_with("MISSED:") && lead[1].ends_with("2.00, at most 1."), "{}", lead[1]);
        assert!(lead[2].contains("`4k copies`") && lead[2].ends_with("1.0, at least 5."), "{}", lead[2]);
    }

    #[test]
    fn a_guest_that_never_comes_to_full_speed_misses_its_limit() {
        let results = made_up(|_, arm| (arm != MOVED).then_some(1.0));
        let bars = bars(&results, "CG B, 1 GiB, warm");
        assert!(!bars[0].is_met && bars[0].what.contains("T99 of `moved` as a ratio"), "{:?}", bars[0]);
        let values: Vec<String> = bars[1..3].iter().map(|bar| bar.value.to_string()).collect();
        assert_eq!(values, ["0.2"; 2], "1 s as a ratio to a lower bound of 6 s");
        let lead = lead(&results);
        assert!(lead[0].starts_with("`moved` loses 27 rows: GUPS 1 GiB, warm: T99 of `moved, in order`"), "{lead:?}");
    }

    /// Results of six rounds in which T99 of an arm, if it comes, differs between the rounds.
    fn by_round(t99: impl Fn(&str, u32) -> Option<f64>) -> Results {
        let mut results = made_up(|_, _| None);
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            come_to_full_speed(measured, 6.0, t99(&run.arm, run.round));
        }
        results
    }

    #[test]
    fn rounds_in_which_moved_alone_never_came_count_against_it() {
        let results = by_round(|arm, round| match (arm, round) {
            (MOVED, 1..=4) | (IN_QEMU, 1) => None,
            (MOVED, _) => Some(0.5),
            _ => Some(3.0),
        });
        let case = "GUPS 1 GiB, warm";
        assert_eq!(to_moved(&results, case, COPIES), [0.5, 0.5, 0.5, 0.5, 6.0, 6.0]);
        assert_eq!(to_moved(&results, case, IN_QEMU), [0.5, 0.5, 0.5, 6.0, 6.0], "neither came in the first");
        let lead = lead(&results);
        assert!(lead[0].contains("no row for certain") && lead[1].contains("T99 of `4k copies` : `moved` is 0.500"));
        let last = lead.last().expect("a sentence on the rounds left out");
        assert!(last.contains("came to full speed: 1 of 6 of `QEMU` in GUPS 1 GiB, warm;"), "{last}");
    }

    #[test]
    fn a_row_of_too_few_rounds_is_open() {
        let mut results = by_round(|arm, _| Some(if arm == MOVED { 2.0 } else { 1.0 }));
        results.runs.retain(|run| run.round <= 3);
        let lead = lead(&results);
        assert_eq!(lead[0], "`moved` loses no row for certain.");
        assert!(lead[1].contains("fewer than six rounds: GUPS 1 GiB, warm: T99 of `moved, in order`"), "{}", lead[1]);
    }

    #[test]
    fn a_guest_that_still_waits_for_its_pages_has_not_come_to_full_speed() {
        let mut results = made_up(|_, _| Some(0.1));
        let mapped = results.runs.iter_mut().filter(|run| run.arm == super::super::MAPPED);
        for run in mapped {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            measured.metrics.insert(Metric::Figure, 4.9e7);
        }
        let came = |arm: &str| t99s(&results, "GUPS 1 GiB, cold", arm).iter().all(|(.., has_come)| *has_come);
        assert_eq!((came(MOVED), came(super::super::MAPPED)), (true, false), "half of 1e8 is not reached");
        assert!(to_moved(&results, "GUPS 1 GiB, cold", super::super::MAPPED).iter().all(|ratio| *ratio > 50.0));
        let huge = |arm: &str| told_if_restored(&results, "GUPS 1 GiB, cold", arm, HUGE_AT_FIRST_PERCENT).len();
        assert_eq!((huge(MOVED), huge(super::super::MAPPED)), (6, 0));
    }

    #[test]
    fn without_runs_nothing_is_claimed() {
        let mut results = made_up(|_, _| None);
        results.runs.clear();
        assert_eq!(lead(&results), ["Nothing is compared yet: no run of `moved` is there."]);
        assert!(bars(&results, "GUPS 1 GiB, cold").is_empty());
    }
}
