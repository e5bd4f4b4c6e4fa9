//! The speed of a guest, from its own count of its work: units of work in a second of its CPU time.
//!
//! ```text
//!   readings    r1 ──────── r2 ──────── r3 ─ ─ ─ ─ ─ r4 ─ ─ ─ ─ ─ r5 ──────── r6
//!   speeds           s12         s23      promotion    refaults        s56
//!                                         (left out)  (left out)
//! ```
//!
//! CPU time contains neither the waits of a vCPU nor the time that another guest took its core. An interval with a
//! promotion, and the next one, in which the guest takes its faults on the new mappings, say nothing of what comes
//! after and are left out.

use alloc::collections::VecDeque;
use core::time::Duration;

use crate::snapshot::GuestProgress;

/// Number of speeds before a promotion that are kept: each makes one pair.
const KEPT: usize = 16;

/// Number of intervals left out after a promotion: the one that contains it, and the one of the faults after it.
const UNSETTLED: u8 = 2;

/// Time without a reading after which the guest's count is not live: the slowest of our guests reports at 4 Hz.
const STALE: Duration = Duration::from_millis(500);

/// A millionth: unit of differences between speeds.
pub(super) const MILLION: u64 = 1_000_000;

/// Speed in one interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Speed {
    /// Units of work in 1,000 seconds of CPU time.
    pub value: u64,
    /// Units of work in the interval: one more or less is the precision.
    pub counted: u64,
}

impl Speed {
    fn between(before: GuestProgress, now: GuestProgress) -> Option<Speed> {
        let counted = now.done.checked_sub(before.done).filter(|counted| *counted > 0)?;
        let cpu_ns = now.cpu.checked_sub(before.cpu)?.as_nanos();
        let value = (u128::from(counted) * 1_000_000_000_000).checked_div(cpu_ns)?;
        Some(Speed { value: u64::try_from(value).ok()?, counted })
    }

    /// Difference to an earlier speed, in millionths of that one.
    pub fn gain_on(self, before: Speed) -> i64 {
        let difference = i128::from(self.value) - i128::from(before.value);
        let parts = difference * i128::from(MILLION) / i128::from(before.value.max(1));
        parts.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    /// Whether the count resolves half of that part, in millionths.
    pub fn resolves(self, parts: u64) -> bool {
        u128::from(self.counted) * u128::from(parts) >= 2 * u128::from(MILLION)
    }
}

/// Result of one more reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// No speed: the first reading, no work, or an interval that is left out.
    None,
    /// The guest does other work now; earlier speeds do not compare.
    OtherWork,
    /// Speed in the interval that the reading ends.
    Speed(Speed),
}

/// Readings of one guest, and the speeds before the next promotion.
#[derive(Clone, Debug, Default)]
pub(super) struct Speedometer {
    latest: Option<GuestProgress>,
    /// Moment of the latest reading, as far as plans know it, since the manager's start.
    read_at: Duration,
    /// Time between the two latest readings; `None` before the second.
    interval: Option<Duration>,
    unsettled: u8,
    /// Speeds since the latest promotion, oldest first.
    before: VecDeque<Speed>,
}

impl Speedometer {
    /// Takes a reading.
    pub fn read(&mut self, reading: GuestProgress) -> News {
        let Some(before) = self.latest.replace(reading) else { return News::None };
        if before.phase != reading.phase || reading.done < before.done || reading.cpu < before.cpu {
            self.before.clear();
            // Its speeds are compared with each other alone.
            self.unsettled = 0;
            return News::OtherWork;
        }
        if self.unsettled > 0 {
            self.unsettled -= 1;
            return News::None;
        }
        Speed::between(before, reading).map_or(News::None, News::Speed)
    }

    /// Notes the time of a plan that came with `readings` of them.
    pub fn note_time(&mut self, now: Duration, readings: usize) {
        if readings > 0 {
            let since = now.saturating_sub(self.read_at);
            self.interval = (self.read_at > Duration::ZERO).then(|| since / readings as u32);
            self.read_at = now;
        }
    }

    /// Keeps a speed as one before the next promotion.
    pub fn keep(&mut self, speed: Speed) {
        if self.before.len() == KEPT {
            self.before.pop_front();
        }
        self.before.push_back(speed);
    }

    /// Gives back speeds that [`Speedometer::take_before`] has taken.
    pub fn restore(&mut self, before: VecDeque<Speed>) {
        self.before = before;
    }

    /// Notes that a window was promoted since the latest reading.
    pub fn promoted(&mut self) {
        self.unsettled = UNSETTLED;
    }

    /// Whether promotions and the faults after them are over.
    pub fn is_settled(&self) -> bool {
        self.unsettled == 0
    }

    /// Whether the guest reports its progress now.
    pub fn is_live(&self, now: Duration) -> bool {
        self.latest.is_some() && now.saturating_sub(self.read_at) <= STALE
    }

    /// Time between two readings, as of the latest; `None` before the second.
    pub fn interval(&self) -> Option<Duration> {
        self.interval
    }

    /// Speeds before the next promotion, oldest first.
    pub fn before(&self) -> &VecDeque<Speed> {
        &self.before
    }

    /// The speeds before the promotion that comes now; the next ones are those after it.
    pub fn take_before(&mut self) -> VecDeque<Speed> {
        core::mem::take(&mut self.before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(phase: u64, done: u64, cpu_ms: u64) -> GuestProgress {
        GuestProgress { phase, done, cpu: Duration::from_millis(cpu_ms) }
    }

    #[test]
    fn a_speed_is_work_over_cpu_time_and_not_over_the_time_between_readings() {
        let mut meter = Speedometer::default();
        assert_eq!(meter.read(reading(0, 100, 10)), News::None);
        let speed = Speed { value: 50_000_000, counted: 1_000 };
        assert_eq!(meter.read(reading(0, 1_100, 30)), News::Speed(speed), "50 000 a second");
        assert_eq!(meter.read(reading(0, 1_100, 90)), News::None, "no work is no speed");
    }

    #[test]
    fn intervals_with_a_promotion_and_with_the_faults_after_it_are_left_out() {
        let mut meter = Speedometer::default();
        meter.read(reading(0, 100, 10));
        meter.promoted();
        assert_eq!((meter.read(reading(0, 110, 20)), meter.is_settled()), (News::None, false));
        assert_eq!((meter.read(reading(0, 150, 30)), meter.is_settled()), (News::None, true));
        assert!(matches!(meter.read(reading(0, 250, 40)), News::Speed(_)));
    }

    #[test]
    fn another_phase_or_a_count_that_begins_again_is_other_work() {
        let mut meter = Speedometer::default();
        meter.read(reading(0, 100, 10));
        meter.keep(Speed { value: 1, counted: 1 });
        assert_eq!(meter.read(reading(1, 200, 20)), News::OtherWork);
        assert!(meter.before().is_empty());
        assert_eq!(meter.read(reading(1, 100, 30)), News::OtherWork);
        assert!(matches!(meter.read(reading(1, 300, 40)), News::Speed(_)));
    }

    #[test]
    fn gains_are_millionths_and_a_coarse_count_resolves_no_small_one() {
        let speed = |value| Speed { value, counted: 2_000 };
        assert_eq!([1_010, 990, 0].map(|value| speed(value).gain_on(speed(1_000))), [10_000, -10_000, -1_000_000]);
        assert_eq!([1_000, 999].map(|parts| speed(1).resolves(parts)), [true, false]);
    }
}
