//! Limits on the guest's output that is kept: each kind has a limit, messages beyond it are counted by name, and
//! the report says so.
//!
//! ```text
//!   phases, regions, results, gaps, malformed lines    the first ones, up to a limit; the rest is counted
//!   progress marks of a phase                          all of a short phase; of a long one some, and the latest
//!   samples of the host's backing (begin, end)         64 at once, then one per second: each stops a sample
//! ```
//!
//! Any guest can print any number of lines that begin like protocol lines; so can users of a Linux guest. Together
//! the limits allow about 10 MiB.

use std::collections::BTreeMap;
use std::time::Duration;

use wideleaf_policies::Moment;

/// Most phases: the kernel with the most, `phases`, has some dozens.
pub(super) const PHASES_MAX: usize = 256;

/// Most regions: a kernel names an array with each.
pub(super) const REGIONS_MAX: usize = 256;

/// The kept regions have at most this multiple of the guest's RAM together, because all of them are sampled at the
/// end of a phase.
pub(super) const REGIONS_OF_RAM_MAX: u64 = 4;

/// Most results, by name.
pub(super) const RESULTS_MAX: usize = 1024;

/// Most lines of gaps: one for each vCPU, several times.
pub(super) const GAPS_MAX: usize = 1024;

/// Most malformed lines: the first is in the error, and a person reads a few more.
pub(super) const MALFORMED_MAX: usize = 64;

/// Most characters of a malformed line, of a panic's message, of a name and of a unit.
pub(super) const TEXT_MAX: usize = 512;

/// Most marks of one phase. A kernel prints ten a second: all those of a phase of 50 s.
const MARKS_MAX: usize = 512;

/// Most samples that lines may cause at once.
const SAMPLES_MAX: u32 = 64;

/// Time after which one more sample is allowed: a sample of the access sensor takes less.
const LOOK_EARNED_EVERY: Duration = Duration::from_secs(1);

/// Shortest time between two calls of the manager by progress lines.
const CALL_EVERY: Duration = Duration::from_millis(100);

/// Number of messages that were not kept, by kind.
#[derive(Debug, Default)]
pub(super) struct DroppedMessages(BTreeMap<&'static str, u64>);

impl DroppedMessages {
    pub(super) fn count(&mut self, what: &'static str, times: u64) {
        if times > 0 {
            *self.0.entry(what).or_default() += times;
        }
    }

    /// Adds to `list`, unless it already has `most` entries.
    pub(super) fn keep<T>(&mut self, what: &'static str, list: &mut Vec<T>, most: usize, item: T) {
        if list.len() < most { list.push(item) } else { self.count(what, 1) }
    }

    pub(super) fn by_name(&self) -> BTreeMap<String, u64> {
        self.0.iter().map(|(what, count)| ((*what).to_owned(), *count)).collect()
    }
}

/// The beginning of a text of the guest.
pub(super) fn begin_of(text: &str) -> &str {
    text.char_indices().nth(TEXT_MAX).map_or(text, |(end, _)| &text[..end])
}

/// Progress of the guest, on both clocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pub(super) at: Moment,
    pub(super) tsc: u64,
    pub(super) done: u64,
}

/// Marks of a phase in order: at most [`MARKS_MAX`], including the latest.
#[derive(Debug, Default)]
pub(super) struct Marks {
    marks: Vec<Mark>,
    /// Shortest time between two marks, except the latest.
    spacing: Duration,
}

impl Marks {
    /// Adds the latest mark. Returns the number of marks that were dropped for it.
    pub(super) fn add(&mut self, mark: Mark) -> u64 {
        if let [.., before, latest] = &mut self.marks[..]
            && latest.at.since(before.at) < self.spacing
        {
            *latest = mark;
            return 1;
        }
        self.marks.push(mark);
        if self.marks.len() < MARKS_MAX {
            return 0;
        }
        let before = self.marks.len();
        let mut index = 0;
        self.marks.retain(|_| {
            index += 1;
            index % 2 == 0 || index == before
        });
        let length = mark.at.since(self.marks[0].at);
        self.spacing = length / (MARKS_MAX / 2) as u32;
        (before - self.marks.len()) as u64
    }

    pub(super) fn all(&self) -> &[Mark] {
        &self.marks
    }

    pub(super) fn last(&self) -> Option<&Mark> {
        self.marks.last()
    }
}

/// Number of samples that lines may cause now.
#[derive(Debug)]
pub(super) struct SampleAllowance {
    left: u32,
    earned_at: Moment,
    called_at: Option<Moment>,
}

impl SampleAllowance {
    pub(super) fn new(now: Moment) -> SampleAllowance {
        SampleAllowance { left: SAMPLES_MAX, earned_at: now, called_at: None }
    }

    /// Whether another sample is allowed now.
    pub(super) fn take(&mut self, now: Moment) -> bool {
        let earned =
            (now.since(self.earned_at).as_nanos() / LOOK_EARNED_EVERY.as_nanos()).min(u128::from(SAMPLES_MAX)) as u32;
        if earned > 0 {
            (self.left, self.earned_at) = ((self.left + earned).min(SAMPLES_MAX), now);
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }

    /// Whether the manager may be called now.
    pub(super) fn may_call(&mut self, now: Moment) -> bool {
        let may = self.called_at.is_none_or(|at| now.since(at) >= CALL_EVERY);
        if may {
            self.called_at = Some(now);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(ms: u64) -> Mark {
        Mark { at: Moment::after_start(Duration::from_millis(ms)), tsc: ms, done: ms }
    }

    #[test]
    fn a_short_phase_keeps_all_its_marks() {
        let mut marks = Marks::default();
        let dropped: u64 = (0..500).map(|number| marks.add(mark(number * 100))).sum();
        assert_eq!((dropped, marks.all().len()), (0, 500));
    }

    /// A million marks, 100 ms apart and a microsecond apart.
    #[test]
    fn a_long_phase_keeps_marks_over_all_its_length_and_the_latest() {
        for every_us in [100_000_u64, 1] {
            let at = |number: u64| Moment::after_start(Duration::from_micros(number * every_us));
            let mut marks = Marks::default();
            let mut dropped = 0;
            for number in 0..1_000_000_u64 {
                dropped += marks.add(Mark { at: at(number), tsc: number, done: number });
                assert!(marks.all().len() <= MARKS_MAX);
                assert_eq!(marks.last().map(|mark| mark.done), Some(number));
            }
            let kept = marks.all();
            assert_eq!(kept.len() as u64 + dropped, 1_000_000);
            assert!(kept.len() >= MARKS_MAX / 4, "{}", kept.len());
            let widest = kept.windows(2).map(|pair| pair[1].done - pair[0].done).max();
            assert!(widest <= Some(1_000_000 / (MARKS_MAX as u64 / 8)), "no part of it is without marks: {widest:?}");
        }
    }

    #[test]
    fn lines_cause_64_samples_at_once_and_then_one_a_second() {
        let at = |ms: u64| Moment::after_start(Duration::from_millis(ms));
        let mut allowance = SampleAllowance::new(at(0));
        assert_eq!((0..1_000_000).filter(|_| allowance.take(at(10))).count(), 64);
        // Requested every millisecond for a minute.
        assert_eq!((10..60_010).filter(|ms| allowance.take(at(*ms))).count(), 60);
        assert_eq!((0..1000).filter(|_| allowance.take(at(3_600_000))).count(), 64, "the saved number is limited");
    }
}
