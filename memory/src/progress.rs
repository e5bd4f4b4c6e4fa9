//! A guest's own count of its work, on its way from the thread that hears of it to the manager's loop.
//!
//! ```text
//!   a progress line of the guest ─▶ add (done, CPU time now) ─▶ [ r1 r2 r3 ] ─▶ take, at a tick ─▶ snapshot
//! ```
//!
//! The CPU time is read together with the count, not at the tick: between the two a guest does a tenth more work.

use std::collections::VecDeque;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::GuestProgress;

/// Number of readings that are kept for a tick that comes late: three seconds of a guest that reports at 20 Hz. The
/// oldest ones are dropped.
const READINGS_MAX: usize = 64;

/// Readings of one guest's progress that the loop has not taken yet.
#[derive(Debug, Default)]
pub struct ProgressReadings(Mutex<VecDeque<GuestProgress>>);

impl ProgressReadings {
    /// Adds a reading.
    pub fn add(&self, reading: GuestProgress) {
        let mut readings = self.lock();
        if readings.len() == READINGS_MAX {
            readings.pop_front();
        }
        readings.push_back(reading);
    }

    /// Takes all readings since the latest call, oldest first.
    pub fn take(&self) -> Vec<GuestProgress> {
        std::mem::take(&mut *self.lock()).into()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<GuestProgress>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_taken_once_and_the_oldest_are_dropped() {
        let readings = ProgressReadings::default();
        (0..READINGS_MAX as u64 + 2).for_each(|done| readings.add(GuestProgress { done, ..GuestProgress::default() }));
        let taken: Vec<u64> = readings.take().iter().map(|reading| reading.done).collect();
        assert_eq!(taken, (2..READINGS_MAX as u64 + 2).collect::<Vec<_>>());
        assert_eq!(readings.take(), []);
    }
}
