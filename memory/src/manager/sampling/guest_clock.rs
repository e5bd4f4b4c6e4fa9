//! The clock of a guest, which stands still while the guest is paused. Nothing that a sample tells can change then: the
//! slower sensors rest, and what they know grows no older.
//!
//! ```text
//!   tick        runs     paused   paused   paused   runs
//!   clock   ─────────────┐                          ┌─────────
//!                        └─────── stands still ─────┘
//!   sensors ─────────────┘ rest                         └─────
//!                                                   SETTLES
//! ```

use std::time::Duration;

use wideleaf_policies::Moment;

/// Time from the end of a pause to the next sample: the kernel's monitor counts accesses over 200 ms.
const SETTLES: Duration = Duration::from_millis(200);

/// The clock of one guest, as of its latest tick.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GuestClock {
    /// Time of all pauses before that tick.
    stood: Duration,
    /// That tick, if the guest was paused.
    paused_at: Option<Moment>,
    /// End of the rest after the latest pause.
    rests_until: Moment,
}

impl GuestClock {
    /// Takes note, at a tick, of whether the guest is paused.
    pub fn tick(&mut self, is_paused: bool, now: Moment) {
        if let Some(before) = self.paused_at.take() {
            self.stood += now.since(before);
            self.rests_until = now + SETTLES;
        }
        self.paused_at = is_paused.then_some(now);
    }

    /// Whether the guest was paused at the latest tick.
    pub const fn is_paused(&self) -> bool {
        self.paused_at.is_some()
    }

    /// Whether sensors rest: the guest was paused at the latest tick, or has just gone on.
    pub fn is_at_rest(&self, now: Moment) -> bool {
        self.is_paused() || now < self.rests_until
    }

    /// This clock at the moment `now` of the manager's.
    pub fn at(&self, now: Moment) -> Moment {
        let paused = self.paused_at.map_or(Duration::ZERO, |since| now.since(since));
        Moment::after_start(now.since_start().saturating_sub(self.stood + paused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_stands_still_from_the_first_tick_in_a_pause_to_the_first_one_after_it() {
        let at = |ms| Moment::after_start(Duration::from_millis(ms));
        let mut clock = GuestClock::default();
        let mut after_tick = |is_paused, ms| {
            clock.tick(is_paused, at(ms));
            (clock.is_at_rest(at(ms)), clock.at(at(ms)), clock.at(at(ms + 7)))
        };
        assert_eq!(after_tick(false, 1000), (false, at(1000), at(1007)));
        for paused in [2000, 3000, 600_000] {
            assert_eq!(after_tick(true, paused), (true, at(2000), at(2000)), "{paused}");
        }
        assert_eq!(after_tick(false, 601_000), (true, at(2000), at(2007)), "it has just gone on");
        assert_eq!(after_tick(false, 601_199), (true, at(2199), at(2206)));
        assert_eq!(after_tick(false, 601_200), (false, at(2200), at(2207)));
        assert_eq!(after_tick(true, 602_000), (true, at(3000), at(3000)), "a second pause");
        assert_eq!(after_tick(false, 603_000).1, at(3000));
    }
}
