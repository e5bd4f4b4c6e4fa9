//! The time in which all guests are at work, and their speed in it.
//!
//! ```text
//!   guest a     fill ██████████████████████████████ check
//!   guest b          fill ████████████████████████████████ check
//!   guest c                 fill ███████████████████████████ check
//!                                │ shared time  │
//! ```
//!
//! Outside of it, a guest has the CPUs with fewer others: guests that start apart are faster than those that start
//! together, whatever pages they have.

use ::wideleaf_run::report::{Phase, RunReport};

use crate::experiment::jobs::wideleaf_run::timed_part;

/// Timed part of a guest. All times are in seconds from the start of all runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::experiment::jobs) struct TimedPart {
    began_s: f64,
    ended_s: f64,
    /// Progress: time, and units of work done since the begin. The begin is the first of them.
    marks: Vec<(f64, f64)>,
    /// Units of work per second over all of it.
    rate_per_s: f64,
}

impl TimedPart {
    /// Of a run that ended at that time. Its process takes some 0.1 s to free memory, which counts as the part's.
    pub(super) fn of(report: &RunReport, run_ended_s: f64) -> Option<TimedPart> {
        let end_s = |phase: &Phase| phase.began_at_s + phase.seconds;
        let phase = timed_part(report)?;
        let last_s = report.phases.iter().map(end_s).fold(0.0, f64::max);
        let ended_s = run_ended_s - (last_s - end_s(phase));
        let began_s = ended_s - phase.seconds;
        let later = phase.progress.iter().map(|(at_s, units)| (began_s + at_s, *units as f64));
        let marks = [(began_s, 0.0)].into_iter().chain(later).collect();
        Some(TimedPart { began_s, ended_s, marks, rate_per_s: phase.rate_per_s })
    }

    /// Between the first and the last of these marks: time, and units of work done. `None` without time between them.
    pub(in crate::experiment::jobs) fn of_marks(marks: Vec<(f64, f64)>) -> Option<TimedPart> {
        let ((began_s, before), (ended_s, after)) = (*marks.first()?, *marks.last()?);
        let rate_per_s = (after - before) / (ended_s - began_s);
        (ended_s > began_s).then_some(TimedPart { began_s, ended_s, marks, rate_per_s })
    }

    /// Units of work done until then, in proportion between two marks. `None` after the last mark.
    fn done_until(&self, at_s: f64) -> Option<f64> {
        let next = self.marks.iter().position(|(mark_s, _)| *mark_s >= at_s)?;
        let (to_s, to) = self.marks[next];
        let (from_s, from) = next.checked_sub(1).map_or((to_s, to), |before| self.marks[before]);
        let share = if to_s > from_s { (at_s - from_s) / (to_s - from_s) } else { 1.0 };
        Some(from + (to - from) * share)
    }

    /// Time of its last mark, but not later than that.
    fn last_mark_s(&self, at_most_s: f64) -> f64 {
        self.marks.last().map_or(self.began_s, |(at_s, _)| at_s.min(at_most_s))
    }
}

/// The time in which the timed parts of all guests are under way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::experiment::jobs) struct SharedTime {
    from_s: f64,
    to_s: f64,
    /// Length of the shortest timed part.
    shortest_s: f64,
}

impl SharedTime {
    /// Of these parts; empty where one ends before another begins. `None` without parts.
    pub(in crate::experiment::jobs) fn of(parts: &[TimedPart]) -> Option<SharedTime> {
        let from_s = parts.iter().map(|part| part.began_s).reduce(f64::max)?;
        let to_s = parts.iter().map(|part| part.ended_s).reduce(f64::min)?;
        let shortest_s = parts.iter().map(|part| part.ended_s - part.began_s).reduce(f64::min)?;
        (shortest_s > 0.0).then_some(SharedTime { from_s, to_s: to_s.max(from_s), shortest_s })
    }

    /// Its length in percent of the shortest timed part.
    pub(in crate::experiment::jobs) fn percent(self) -> f64 {
        (self.to_s - self.from_s) * 100.0 / self.shortest_s
    }

    /// Its second half.
    pub(super) fn second_half(self) -> SharedTime {
        SharedTime { from_s: self.from_s.midpoint(self.to_s), ..self }
    }

    /// Units of work per second of a guest in it. `None` without progress in it.
    pub(in crate::experiment::jobs) fn rate_per_s(self, part: &TimedPart) -> Option<f64> {
        let to_s = part.last_mark_s(self.to_s);
        let done = part.done_until(to_s)? - part.done_until(self.from_s)?;
        (to_s > self.from_s).then(|| done / (to_s - self.from_s))
    }

    /// Speed of a guest in it, as a ratio to that of the guest's whole timed part. `None` without progress in it.
    pub(super) fn speed_to_whole(self, part: &TimedPart) -> Option<f64> {
        let rate = self.rate_per_s(part)?;
        (part.rate_per_s > 0.0).then(|| rate / part.rate_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(began_s: f64, ended_s: f64) -> TimedPart {
        TimedPart { began_s, ended_s, ..TimedPart::default() }
    }

    fn phase(name: &str, began_at_s: f64, seconds: f64) -> Phase {
        Phase { name: name.into(), began_at_s, seconds, ..Phase::default() }
    }

    #[test]
    fn the_shared_time_is_that_of_all_timed_parts_by_the_shortest() {
        let percent = |parts: &[TimedPart]| SharedTime::of(parts).map(|shared| shared.percent().round());
        assert_eq!(percent(&[part(0.0, 6.0), part(1.0, 6.0), part(0.5, 5.5)]), Some(90.0));
        assert_eq!(percent(&[part(0.0, 6.0), part(7.0, 12.0)]), Some(0.0), "one after the other");
        assert_eq!(percent(&[]), None);
        let phases = vec![phase("init", 0.0, 1.0), phase("update", 1.0, 5.0), phase("verify", 6.0, 0.5)];
        let timed = TimedPart::of(&RunReport { phases, ..RunReport::default() }, 10.0).expect("it has a timed part");
        assert_eq!((timed.began_s, timed.ended_s), (4.5, 9.5));
    }

    #[test]
    fn a_guest_is_as_fast_as_its_marks_say_while_all_are_at_work() {
        // 100 units/s for 2 s beside the others, then 300 units/s for 2 s without them.
        let progress = vec![(1.0, 100), (2.0, 200), (3.0, 500), (4.0, 800)];
        let phases = vec![Phase { progress, rate_per_s: 200.0, ..phase("update", 0.0, 4.0) }];
        let first = TimedPart::of(&RunReport { phases, ..RunReport::default() }, 4.0).expect("it has a timed part");
        let speed = |other: TimedPart| SharedTime::of(&[first.clone(), other])?.speed_to_whole(&first);
        assert_eq!(speed(part(-1.0, 2.0)), Some(0.5));
        assert_eq!(speed(part(2.0, 9.0)), Some(1.5));
        assert_eq!(speed(part(0.0, 4.0)), Some(1.0));
        assert_eq!(speed(part(1.5, 2.5)), Some(1.0), "between marks, in proportion: 50 and 150 units");
        assert_eq!(speed(part(5.0, 9.0)), None, "one after the other");
        let half = SharedTime::of(&[first.clone(), part(0.0, 4.0)]).map(SharedTime::second_half);
        assert_eq!(half.and_then(|half| half.speed_to_whole(&first)), Some(1.5));
    }

    #[test]
    fn a_guest_without_marks_has_no_speed_in_the_shared_time() {
        let phases = vec![Phase { rate_per_s: 200.0, ..phase("update", 0.0, 4.0) }];
        let alone = TimedPart::of(&RunReport { phases, ..RunReport::default() }, 4.0).expect("it has a timed part");
        let shared = SharedTime::of(std::slice::from_ref(&alone)).expect("it is under way");
        assert_eq!((shared.percent(), shared.speed_to_whole(&alone)), (100.0, None));
    }
}
