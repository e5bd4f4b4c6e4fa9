//! When the guests of a case came to full speed, round by round.

use super::NEVER_SAVED;
use crate::disturbance::WATCHED_S;
use crate::metric::Metric;
use crate::restoring::FIRST_PROGRESS_S;
use crate::restoring::speeds::{Speeds, T99};
use crate::results::{Measured, Results, Run};

/// Smallest share of the steady speed of a guest that was never saved at which a restored one counts as restored. The
/// speed of a guest that still waits for most of its pages is steady too. Base pages alone cost GUPS a third.
const RESTORED_FROM: f64 = 0.5;

/// Whether the steady speed of a guest in a round is that of a restored one.
pub(super) fn is_restored(results: &Results, case: &str, arm: &str, round: u32) -> bool {
    let speed = |arm: &str| {
        let speeds = results.values(case, arm, Metric::Figure);
        speeds.into_iter().find(|(of, _)| *of == round).map(|(_, speed)| speed)
    };
    speed(NEVER_SAVED).is_none_or(|full| speed(arm).is_some_and(|speed| speed >= RESTORED_FROM * full))
}

/// A number that runs tell, by round. A guest that was not restored while it was watched has none.
pub(super) fn told_if_restored(results: &Results, case: &str, arm: &str, name: &str) -> Vec<(u32, f64)> {
    let told = results.told(case, arm, name).into_iter();
    told.filter(|(round, _)| is_restored(results, case, arm, *round)).collect()
}

/// Speeds of the guest of a run.
pub(super) fn speeds(run: &Run) -> Option<Speeds> {
    let Measured { series, told, .. } = run.measured()?;
    let intervals = series.iter().filter_map(|sample| Some((sample.at_s, sample.rate_per_s?))).collect();
    Some(Speeds::of_intervals(*told.get(FIRST_PROGRESS_S)?, intervals))
}

/// T99 of an arm by round. A guest that never came to it, or that was not restored while it was watched, has none.
pub(super) fn t99_by_round(results: &Results, case: &str, arm: &str) -> Vec<(u32, Option<T99>)> {
    let of_run = |run: &Run| Some((run.round, speeds(run)?));
    let mut rounds: Vec<(u32, Speeds)> = results.runs_of(case, arm).filter_map(of_run).collect();
    rounds.sort_by_key(|(round, _)| *round);
    let kept = kept(&rounds);
    let t99 = |(round, speeds): (u32, Speeds)| {
        let t99 = kept.and_then(|kept| speeds.t99(kept));
        (round, t99.filter(|_| is_restored(results, case, arm, round)))
    };
    rounds.into_iter().map(t99).collect()
}

/// Share of the steady speed below which no five intervals may fall after T99: what the lowest five of all rounds'
/// steady halves have. A round that was not at full speed before that half says nothing about noise, unless all are so.
fn kept(rounds: &[(u32, Speeds)]) -> Option<f64> {
    let lowest = |says_something: fn(&Speeds) -> bool| {
        let speeds = rounds.iter().map(|(_, speeds)| speeds).filter(|speeds| says_something(speeds));
        speeds.filter_map(Speeds::lowest_steady).min_by(f64::total_cmp)
    };
    lowest(Speeds::is_fast_before_its_half).or_else(|| lowest(|_| true))
}

/// T99 of an arm by round, in seconds, and whether it came. A guest without it has the time for which it was watched: a
/// lower bound.
pub(super) fn t99s(results: &Results, case: &str, arm: &str) -> Vec<(u32, f64, bool)> {
    let came = t99_by_round(results, case, arm);
    let of = |(round, watched): (u32, f64)| {
        let t99 = came.iter().find(|(of, _)| *of == round).and_then(|(_, t99)| *t99);
        (round, t99.map_or(watched, |t99| t99.at_s), t99.is_some())
    };
    results.told(case, arm, WATCHED_S).into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::come_to_full_speed;
    use super::super::{MOVED, Restore};
    use super::*;
    use crate::catalogue::Catalogued as _;
    use crate::catalogue::fixture::{host, results_of};
    use crate::results::RunOutcome;

    /// Speeds of marks 0.1 s apart, of which some are slower than 1000 units per 0.1 s.
    fn speeds(slow: &[(std::ops::Range<usize>, u64)]) -> Speeds {
        let mut done = 0;
        let mark = |index: usize| {
            let mark = (0.1 * index as f64, done);
            done += slow.iter().find(|(range, _)| range.contains(&index)).map_or(1000, |(_, speed)| *speed);
            mark
        };
        Speeds::of(&(0..=40).map(mark).collect::<Vec<_>>())
    }

    fn percent(rounds: &[&Speeds]) -> Option<f64> {
        let rounds: Vec<(u32, Speeds)> = (1..).zip(rounds.iter().copied().cloned()).collect();
        kept(&rounds).map(|kept| (kept * 100.0).round())
    }

    #[test]
    fn noise_is_known_from_the_steady_halves_of_all_rounds_that_were_restored_before() {
        let (quiet, noisy, early) = (speeds(&[]), speeds(&[(30..34, 900)]), speeds(&[(5..9, 700)]));
        assert_eq!((percent(&[&quiet, &early]), percent(&[&quiet, &noisy, &early])), (Some(99.0), Some(90.0)));
        let late = speeds(&[(0..25, 100)]);
        assert_eq!(percent(&[&late, &noisy]), Some(90.0), "it waited for its pages in its half");
        assert_eq!((percent(&[&late]), percent(&[])), (Some(10.0), None));
    }

    #[test]
    fn a_slow_part_after_full_speed_counts_unless_a_steady_half_of_some_round_has_a_slower_one() {
        let case = "GUPS 1 GiB, warm";
        let first_t99 = |slow: &[(u32, std::ops::Range<usize>, f64)]| {
            let mut results = results_of(Restore.define(&host()), |_, _, _| Some((Metric::Figure, 1e8)));
            for run in results.runs.iter_mut().filter(|run| run.case == case && run.arm == MOVED) {
                let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
                come_to_full_speed(measured, 5.0, Some(1.0)); // then intervals of 0.04 s
                for (_, range, rate) in slow.iter().filter(|(round, ..)| *round == run.round) {
                    measured.series[range.clone()].iter_mut().for_each(|sample| sample.rate_per_s = Some(*rate));
                }
            }
            t99s(&results, case, MOVED)[0].1
        };
        let (early, in_half) = ((1, 11..15, 70.0), (2, 80..84, 60.0));
        assert_eq!(first_t99(&[]), 1.0);
        assert!((first_t99(std::slice::from_ref(&early)) - 1.56).abs() < 1e-9, "14 intervals later");
        assert_eq!(first_t99(&[early, in_half]), 1.0);
    }
}
