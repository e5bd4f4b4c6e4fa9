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
/// exponential distribution has no memory). Older samples count less and less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TouchFrequency {
    watched_ns: u64,
    /// Number of touches, in units of 1/1024.
    touches: u32,
}

impl TouchFrequency {
    const ONE: u32 = 1024;

    /// Adds one sample. The older ones keep three quarters of their weight, so the latest four samples dominate.
    pub fn add(&mut self, was_touched: bool, watched_for: Duration) {
        let watched_ns = u64::try_from(watched_for.as_nanos()).unwrap_or(u64::MAX);
        self.watched_ns = (self.watched_ns - self.watched_ns / 4).saturating_add(watched_ns);
        self.touches = self.touches - self.touches / 4 + if was_touched { Self::ONE } else { 0 };
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
