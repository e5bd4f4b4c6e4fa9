//! Speed of a guest around its move to another process, by the marks of progress in the reports of both.
//!
//! ```text
//!   marks   ·  ·  ·  ·  ·  ·  · · ·  ·   ·    · ‖        ·   ·  ·  ·  ·  ·  ·  ·  ·  ·  ·
//!           │◀─ before, 2 s ─▶│◀──── rounds ───▶│ pause                │◀─ after, 1 s ─▶│
//!                                               └─────────── 2 s ─────▶
//! ```
//!
//! All times are of the guest's clock, which goes on at the target where it was. The 2 s begin with the last mark of
//! the source, so that a pause is part of them where that clock counts it.

/// Length of the stretch before the rounds, in seconds.
const BEFORE_S: f64 = 2.0;
/// Length of the slowest stretch, in seconds.
const SLOWEST_S: f64 = 0.1;
/// Begin of the stretch at the target, in seconds after the last mark of the source.
const AFTER_S: f64 = 2.0;
/// Length of the stretch at the target, in seconds.
const AFTER_FOR_S: f64 = 1.0;

/// A mark: seconds by the guest's clock, and units of work done.
pub type Mark = (f64, u64);

/// Speeds in units per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MovedSpeeds {
    /// Speed before the rounds.
    pub before: f64,
    /// Speed in the slowest 0.1 s of the rounds; that of all of them if they are shorter.
    pub slowest: f64,
    /// Speed from 2 s after the switch on.
    pub after: f64,
}

impl MovedSpeeds {
    /// Speeds by the target's marks, which begin with those of the source: the source had its last one at `left_s`, and
    /// its rounds took `rounds_s`. `None` if a stretch has no two marks.
    pub fn of(marks: &[Mark], left_s: f64, rounds_s: f64) -> Option<MovedSpeeds> {
        let began_s = left_s - rounds_s.max(0.0);
        let until = |end_s: f64| marks.partition_point(|(at_s, _)| *at_s <= end_s);
        // A guest that stood still at the begin has had its latest mark before.
        let in_rounds = &marks[until(began_s).saturating_sub(1)..until(left_s)];
        Some(MovedSpeeds {
            before: rate(&marks[until(began_s - BEFORE_S)..until(began_s)])?,
            slowest: slowest(in_rounds).or_else(|| rate(in_rounds))?,
            after: rate(&marks[until(left_s + AFTER_S)..until(left_s + AFTER_S + AFTER_FOR_S)])?,
        })
    }
}

/// Units per second between the first and the last mark. `None` without time between them.
pub fn rate(marks: &[Mark]) -> Option<f64> {
    let ((begin_s, begin), (end_s, end)) = (*marks.first()?, *marks.last()?);
    (end_s > begin_s).then(|| end.saturating_sub(begin) as f64 / (end_s - begin_s))
}

/// The lowest rate from any mark to the first one that is 0.1 s later. `None` if no mark is.
pub fn slowest(marks: &[Mark]) -> Option<f64> {
    let rate_from = |first: usize| {
        let end_s = marks[first].0 + SLOWEST_S;
        let last = marks.iter().position(|(at_s, _)| *at_s >= end_s)?;
        rate(&marks[first..=last])
    };
    (0..marks.len()).filter_map(rate_from).min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks every 20 ms from 0 to 8 s of a guest with this speed at this time.
    fn marks(speed: impl Fn(f64) -> f64) -> Vec<Mark> {
        let mut done = 0.0;
        let mark = |number: u32| {
            let at_s = f64::from(number) * 0.02;
            done += 0.02 * speed(at_s);
            (at_s, done as u64)
        };
        (0..400).map(mark).collect()
    }

    fn percent(speeds: MovedSpeeds) -> [i64; 3] {
        [speeds.before, speeds.slowest, speeds.after].map(|speed| (speed / 1e4).round() as i64)
    }

    #[test]
    fn the_slowest_tenth_of_a_second_of_the_rounds_and_the_speed_two_seconds_later_are_found() {
        let speed = |at_s: f64| match at_s {
            2.0..3.0 => 5e5,
            3.0..3.15 => 1e5,
            3.15..4.0 => 5e5,
            4.0..6.0 => 7e5,
            6.0.. => 9e5,
            _ => 1e6,
        };
        let speeds = MovedSpeeds::of(&marks(speed), 3.99, 2.0).expect("it has marks everywhere");
        assert_eq!(percent(speeds), [100, 10, 90]);
    }

    #[test]
    fn a_guest_that_stands_still_while_rounds_run_is_slow_for_all_of_that_time() {
        let mut marks = marks(|_| 1e6);
        // No mark between 2 and 3.5 s, and no work.
        marks.retain(|(at_s, _)| !(2.01..3.49).contains(at_s));
        marks.iter_mut().filter(|(at_s, _)| *at_s > 3.0).for_each(|(_, done)| *done -= 1_490_000);
        let speeds = MovedSpeeds::of(&marks, 4.0, 1.5).expect("it has marks before and after");
        assert_eq!(percent(speeds)[1], 1);
    }

    #[test]
    fn rounds_shorter_than_that_count_whole_and_without_marks_there_is_no_speed() {
        let marks = marks(|_| 1e6);
        let speeds = MovedSpeeds::of(&marks, 4.0, 0.05).expect("it has marks");
        assert_eq!(percent(speeds), [100; 3]);
        assert_eq!(MovedSpeeds::of(&marks, 7.0, 1.0), None, "nothing is known of it two seconds later");
        assert_eq!(MovedSpeeds::of(&[], 4.0, 1.0), None);
    }
}
