//! Sampling some windows at a time to estimate all: the rotation of the samples, and the touch frequency from the
//! time to a touch.
//!
//! ```text
//!   windows   [ 0  1  2  3 | 4  5  6  7 | 8  9 … ]     a share in each interval, never all
//!                └─ share ─┘
//!   watched: touched after 1 ms, 3 ms, not at all in 10 ms   ──▶   2 touches in 14 ms
//! ```
//!
//! The access sensors of a live and of a simulated host both count here, so they count alike.

use alloc::vec::Vec;
use core::time::Duration;

use crate::units::WindowIndex;

/// Touch frequency of a window, from the time between the start of watching and the first touch. For touches at
/// random times the mean time to the next one is the inverse of their rate, whenever the watching begins (the
/// exponential distribution has no memory). Older samples count less and less. They are forgotten when a window that
/// was idle is touched much sooner than they let expect: it has become hot, and the long time without a touch would
/// hide that for ten samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TouchFrequency {
    watched_ns: u64,
    /// Number of touches, in units of 1/1024.
    touches: u32,
}

impl TouchFrequency {
    const ONE: u32 = 1024;

    /// A touch means a change if older samples let expect one after at least this many times the time it took. By
    /// chance one touch in 16 comes as soon.
    const SOONER: u64 = 16;

    /// Adds one sample. The older ones keep three quarters of their weight, so the latest four samples dominate.
    pub fn add(&mut self, was_touched: bool, watched_for: Duration) {
        let watched_ns = u64::try_from(watched_for.as_nanos()).unwrap_or(u64::MAX);
        if was_touched && self.is_idle() && watched_ns.saturating_mul(Self::SOONER) <= self.expected_ns() {
            *self = TouchFrequency::default();
        }
        self.watched_ns = (self.watched_ns - self.watched_ns / 4).saturating_add(watched_ns);
        self.touches = self.touches - self.touches / 4 + if was_touched { Self::ONE } else { 0 };
    }

    /// Whether the newest sample saw no touch, nor most of those before.
    fn is_idle(self) -> bool {
        self.touches <= Self::ONE * 3 / 4
    }

    /// Shortest mean time to a touch that the samples so far allow: as if the next touch came now.
    fn expected_ns(self) -> u64 {
        let touches = u128::from(self.touches + Self::ONE);
        u64::try_from(u128::from(self.watched_ns) * u128::from(Self::ONE) / touches).unwrap_or(u64::MAX)
    }

    /// Touches per second; `None` before the first sample.
    pub fn per_second(self) -> Option<u64> {
        let touches_ns = u64::from(self.touches) * 1_000_000_000 / u64::from(Self::ONE);
        touches_ns.checked_div(self.watched_ns)
    }
}

/// Rotation of the samples: each interval takes the next share of windows, round and round. Windows appear and
/// disappear between intervals, so the rotation stores the last window taken, not a position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rotation {
    last: Option<WindowIndex>,
}

impl Rotation {
    /// The next `share` of `windows`, which ascend: those behind the last one taken, then from the beginning again,
    /// each at most once.
    pub fn next_share(&mut self, windows: &[WindowIndex], share: usize) -> Vec<WindowIndex> {
        let first = windows.partition_point(|window| Some(*window) <= self.last);
        let (done, due) = windows.split_at(first);
        let share: Vec<WindowIndex> = due.iter().chain(done).copied().take(share).collect();
        self.last = share.last().copied().or(self.last);
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(rotation: &mut Rotation, windows: &[u64], share: usize) -> Vec<u64> {
        let windows: Vec<_> = windows.iter().copied().map(WindowIndex::new).collect();
        rotation.next_share(&windows, share).into_iter().map(WindowIndex::get).collect()
    }

    #[test]
    fn a_frequency_is_touches_over_the_time_watched() {
        let mut frequency = TouchFrequency::default();
        assert_eq!(frequency.per_second(), None);
        frequency.add(true, Duration::from_millis(1));
        assert_eq!(frequency.per_second(), Some(1000));
        // 0.75 touches in 0.75 ms before, none in 99.25 ms now
        frequency.add(false, Duration::from_micros(99_250));
        assert_eq!(frequency.per_second(), Some(7));
        for _ in 0..20 {
            frequency.add(false, Duration::from_secs(1));
        }
        assert_eq!(frequency.per_second(), Some(0));
    }

    #[test]
    fn a_window_that_becomes_hot_is_known_by_its_first_quick_touch() {
        let idle = |samples| {
            let mut frequency = TouchFrequency::default();
            (0..samples).for_each(|_| frequency.add(false, Duration::from_millis(40)));
            frequency
        };
        let after = |mut frequency: TouchFrequency, touched_after_ms| {
            frequency.add(true, Duration::from_millis(touched_after_ms));
            frequency.per_second()
        };
        // 70 ms without a touch: one after 4 ms is a change, one after 5 ms may be chance and counts as one in 57 ms.
        assert_eq!([after(idle(2), 4), after(idle(2), 5)], [Some(250), Some(17)]);
        // A window with a touch in each sample is no idle one: the third in 13.6 ms.
        let mut busy = TouchFrequency::default();
        (0..2).for_each(|_| busy.add(true, Duration::from_millis(10)));
        assert_eq!(after(busy, 0), Some(176));
        // It was hot, was idle once and is hot again.
        let mut hot_before = TouchFrequency::default();
        (0..20).for_each(|_| hot_before.add(true, Duration::from_millis(1)));
        hot_before.add(false, Duration::from_millis(40));
        assert_eq!(after(hot_before, 1), Some(97), "most samples before saw a touch, so none is forgotten");
    }

    #[test]
    fn every_window_has_its_turn_before_any_has_a_second() {
        let mut rotation = Rotation::default();
        let windows = [0, 1, 2, 5, 6, 7, 9];
        assert_eq!(share(&mut rotation, &windows, 3), [0, 1, 2]);
        assert_eq!(share(&mut rotation, &windows, 3), [5, 6, 7]);
        assert_eq!(share(&mut rotation, &windows, 3), [9, 0, 1]);
        assert_eq!(share(&mut rotation, &windows, 3), [2, 5, 6]);
    }

    #[test]
    fn windows_that_come_and_go_do_not_disturb_the_turns() {
        let mut rotation = Rotation::default();
        assert_eq!(share(&mut rotation, &[0, 4, 8], 2), [0, 4]);
        // 4 is gone, 3 and 6 are new: 3 has to wait for the next round.
        assert_eq!(share(&mut rotation, &[0, 3, 6, 8], 2), [6, 8]);
        assert_eq!(share(&mut rotation, &[], 2), [0; 0]);
        assert_eq!(share(&mut rotation, &[0, 3], 2), [0, 3]);
    }

    #[test]
    fn a_share_contains_each_window_at_most_once() {
        assert_eq!(share(&mut Rotation::default(), &[1, 2], 5), [1, 2]);
        assert_eq!(share(&mut Rotation::default(), &[1, 2], 0), [0; 0]);
    }
}
