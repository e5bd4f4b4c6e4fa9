//! What a guest of our image said on its console: its data, its progress, its gaps and its verification.
//!
//! Two QEMUs print the console of a guest that moved. A line may break between them, so that a line that cannot be
//! read is left out.

use std::time::Instant;

use wideleaf_policies::{Bytes, Gpa, GpaRange};
use wideleaf_protocol::{ExitCode, Message, Status, parse};
use wideleaf_run::failure::Failure;

use crate::experiment::jobs::together::shared_time::TimedPart;

/// Timed part of GUPS.
const TIMED: &str = "update";
/// Data of GUPS that it updates all over.
const HOT: &str = "table";

/// Names of what is heard of a guest.
#[derive(Clone, Debug)]
pub(in crate::experiment::jobs) struct Names {
    /// Name of the timed part.
    pub(in crate::experiment::jobs) timed: String,
    /// Names of the regions that are its hot set.
    pub(in crate::experiment::jobs) hot: Vec<String>,
}

/// Those of GUPS.
impl Default for Names {
    fn default() -> Names {
        Names { timed: TIMED.to_owned(), hot: vec![HOT.to_owned()] }
    }
}

/// Begin of a guest's last line.
const EXIT: &str = "@wideleaf exit";

/// What the guest said so far.
#[derive(Debug, Default)]
pub(in crate::experiment::jobs) struct GuestMessages {
    names: Names,
    tsc_hz: u64,
    /// All of the hot set that the guest has named.
    pub(in crate::experiment::jobs) hot_set: Vec<GpaRange>,
    /// The first part of the hot set, and when the guest named it.
    pub(in crate::experiment::jobs) hot: Option<(Instant, GpaRange)>,
    /// When the timed part began.
    pub(in crate::experiment::jobs) began: Option<Instant>,
    /// When the timed part ended.
    pub(in crate::experiment::jobs) ended: Option<Instant>,
    marks: Vec<Mark>,
    /// p99 and maximum of the gaps, in microseconds.
    pub(in crate::experiment::jobs) gaps_us: Option<[f64; 2]>,
    verified: Option<(Status, u64)>,
    complaint: Option<String>,
    exit: Option<ExitCode>,
    /// The last line before the exit.
    last: String,
}

/// Work done by a time.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Instant,
    tsc: u64,
    done: u64,
}

impl GuestMessages {
    /// What a guest says of these.
    pub(in crate::experiment::jobs) fn of(names: Names) -> GuestMessages {
        GuestMessages { names, ..GuestMessages::default() }
    }

    /// The same for a guest that goes on elsewhere: it says neither hello nor its regions again.
    pub(in crate::experiment::jobs) fn continued(&self) -> GuestMessages {
        let (names, hot_set) = (self.names.clone(), self.hot_set.clone());
        GuestMessages {
            names,
            hot_set,
            tsc_hz: self.tsc_hz,
            hot: self.hot,
            began: self.began,
            ..GuestMessages::default()
        }
    }

    /// Takes a line that arrived at this time.
    pub(in crate::experiment::jobs) fn hear(&mut self, at: Instant, line: &str) {
        if self.exit.is_none() && !line.trim_start().starts_with(EXIT) {
            line.trim().clone_into(&mut self.last);
        }
        let Some(Ok(message)) = parse(line) else { return };
        match message {
            Message::Hello { tsc_hz, .. } => self.tsc_hz = tsc_hz,
            Message::Region { name, address, bytes } if self.names.hot.iter().any(|hot| hot == name.as_str()) => {
                let range = GpaRange::new(Gpa::new(address), Bytes::new(bytes));
                self.hot_set.extend(range);
                self.hot = self.hot.or(range.map(|range| (at, range)));
            }
            Message::Begin { phase, tsc } if phase == *self.names.timed => {
                self.began = Some(at);
                self.marks = vec![Mark { at, tsc, done: 0 }];
            }
            Message::Progress { phase, tsc, done, .. } if phase == *self.names.timed => {
                self.marks.push(Mark { at, tsc, done });
            }
            Message::End { phase, .. } if phase == *self.names.timed => self.ended = Some(at),
            Message::Gaps { p99_ns, max_ns, .. } => {
                self.gaps_us = Some([p99_ns, max_ns].map(|ns| ns as f64 / 1e3));
            }
            Message::Verify { status, errors, .. } => self.verified = Some((status, errors)),
            Message::Mismatch(_) | Message::Panic { .. } => self.complaint = Some(line.trim().to_owned()),
            Message::Exit { code } => self.exit = Some(code),
            _ => {}
        }
    }

    /// Whether the guest has said that it ends.
    pub(in crate::experiment::jobs) fn is_over(&self) -> bool {
        self.exit.is_some()
    }

    /// Billions of updates a second of the guest's clock from the first mark after `since` on; `None` with fewer than
    /// two marks.
    pub(in crate::experiment::jobs) fn rate_since(&self, since: Instant) -> Option<f64> {
        let first = self.marks.iter().find(|mark| mark.at >= since)?;
        let last = self.marks.last()?;
        let seconds = last.tsc.checked_sub(first.tsc)? as f64 / self.tsc_hz as f64;
        (seconds > 0.0).then(|| (last.done - first.done) as f64 / seconds / 1e9)
    }

    /// Progress marks: seconds since `began` by the guest's clock, and work done. The mark that came with the least
    /// delay ties that clock to ours: a console that is read late makes no mark late.
    pub(in crate::experiment::jobs) fn progress_since(&self, began: Instant) -> Vec<(f64, u64)> {
        if self.tsc_hz == 0 {
            return Vec::new();
        }
        let seconds = |tsc: u64| tsc as f64 / self.tsc_hz as f64;
        let late = |mark: &Mark| mark.at.saturating_duration_since(began).as_secs_f64() - seconds(mark.tsc);
        let offset_s = self.marks.iter().map(late).fold(f64::INFINITY, f64::min);
        self.marks.iter().map(|mark| (seconds(mark.tsc) + offset_s, mark.done)).collect()
    }

    /// The timed part between the first and the last mark, in seconds since `began`. `None` with fewer than two marks.
    pub(in crate::experiment::jobs) fn timed_part(&self, began: Instant) -> Option<TimedPart> {
        let marks = self.progress_since(began).into_iter();
        TimedPart::of_marks(marks.map(|(at_s, done)| (at_s, done as f64)).collect())
    }

    /// Checks that the guest ended well and found its memory intact.
    ///
    /// # Errors
    /// [`Failure::GuestFailed`] or [`Failure::GuestCrashed`] otherwise.
    pub(in crate::experiment::jobs) fn judge(&self) -> Result<(), Failure> {
        match (self.verified, &self.complaint) {
            (Some((Status::Fail, errors)), _) => {
                Err(Failure::GuestFailed(format!("the guest found {errors} wrong words")))
            }
            (_, Some(complaint)) => Err(Failure::GuestFailed(format!("the guest complained: {complaint}"))),
            (Some((Status::Pass, _)), None) if self.is_over() => Ok(()),
            _ => Err(Failure::GuestCrashed(format!(
                "the guest ended before it had checked its memory; its last line is {:?}",
                self.last
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LINES: [&str; 10] = [
        "@wideleaf hello version=1 kernel=gups vcpus=1 guest_page=2m tsc_hz=1000 entry=pvh",
        "@wideleaf region name=table address=0x400000 bytes=8388608",
        "@wideleaf region name=sparse address=0xc00000 bytes=2097152",
        "@wideleaf begin phase=update tsc=1000",
        "@wideleaf progress phase=update tsc=2000 done=1000000000 total=0",
        "@wideleaf prog",
        "@wideleaf progress phase=update tsc=4000 done=5000000000 total=0",
        "@wideleaf end phase=update tsc=5000",
        "@wideleaf gaps vcpu=0 count=9 p50_ns=1 p99_ns=2000 p999_ns=3000 max_ns=4000",
        "@wideleaf verify status=pass errors=0 checked=5",
    ];

    /// A guest that said these lines, a second apart.
    fn said(began: Instant, lines: &[&str]) -> GuestMessages {
        let mut said = GuestMessages::default();
        lines.iter().enumerate().for_each(|(second, line)| said.hear(began + Duration::from_secs(second as u64), line));
        said
    }

    #[test]
    fn the_speed_counts_from_the_first_mark_after_the_event() {
        let began = Instant::now();
        let said = said(began, &LINES);
        assert_eq!(said.rate_since(began), Some(5.0 / 3.0), "from the begin on");
        // The event comes after the begin and before the first mark.
        assert_eq!(said.rate_since(began + Duration::from_millis(3500)), Some(2.0));
        assert_eq!(said.rate_since(began + Duration::from_secs(60)), None);
        assert_eq!((said.hot.map(|(_, hot)| hot.bytes().get()), said.gaps_us), (Some(8 << 20), Some([2.0, 4.0])));
    }

    #[test]
    fn a_guest_that_goes_on_elsewhere_is_timed_by_its_own_clock_and_the_mark_with_the_least_delay() {
        let began = Instant::now();
        let before = said(began, &LINES);
        let mut after = before.continued();
        let at = |ms| began + Duration::from_millis(ms);
        // A tick is a millisecond. The first line was read 500 ms late, the second at once.
        after.hear(at(900), "@wideleaf progress phase=update tsc=7400 done=10 total=0");
        after.hear(at(1000), "@wideleaf progress phase=update tsc=8000 done=30 total=0");
        let marks: Vec<_> = after.progress_since(began).iter().map(|(s, done)| ((s * 1e3).round(), *done)).collect();
        assert_eq!(marks, [(400.0, 10), (1000.0, 30)]);
        assert_eq!(after.hot_set.len(), 1);
        assert!(GuestMessages::default().progress_since(began).is_empty(), "a clock that is not known");
    }

    #[test]
    fn a_guest_that_did_not_check_its_memory_has_failed() {
        let began = Instant::now();
        let judged = |more: &[&str]| said(began, &[&LINES[..], more].concat()).judge().map_err(|why| why.to_string());
        assert_eq!(judged(&["@wideleaf exit code=0"]), Ok(()));
        assert!(judged(&[]).expect_err("no exit").contains("before it had checked"));
        let wrong = "@wideleaf verify status=fail errors=3 checked=5";
        assert!(judged(&[wrong, "@wideleaf exit code=1"]).expect_err("wrong words").contains("3 wrong words"));
    }
}
