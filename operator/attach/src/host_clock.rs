//! The clock of a manager's host, as clients see it: as wall-clock time, and as an age that a change of the wall clock
//! does not touch.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use wideleaf_policies::Moment;

/// The clock of a host, read once.
#[derive(Clone, Copy, Debug)]
pub struct HostClock {
    /// What it showed.
    showed: Moment,
    /// When it was read.
    read: Instant,
    /// Wall-clock time at which it began.
    began_at: SystemTime,
}

impl HostClock {
    /// The clock that shows `now` now.
    pub fn showing(now: Moment) -> HostClock {
        HostClock { showed: now, read: Instant::now(), began_at: SystemTime::now() - now.since_start() }
    }

    /// That moment in seconds since the epoch; `None` for a wall clock that is set to a time before it.
    pub fn wall_s(self, moment: Moment) -> Option<f64> {
        let at = self.began_at + moment.since_start();
        at.duration_since(UNIX_EPOCH).ok().map(|at| at.as_secs_f64())
    }

    /// Time since that moment.
    pub fn age(self, moment: Moment) -> Duration {
        (self.showed.since_start() + self.read.elapsed()).saturating_sub(moment.since_start())
    }

    /// [`HostClock::age`] in seconds, of a moment that may not have come yet.
    pub fn age_s(self, moment: Option<Moment>) -> Option<f64> {
        moment.map(|moment| self.age(moment).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_counts_from_the_moment_and_a_moment_to_come_has_none() {
        let of = |seconds| Moment::after_start(Duration::from_secs(seconds));
        let clock = HostClock::showing(of(100));
        let age = clock.age(of(30));
        assert!((Duration::from_secs(70)..Duration::from_secs(75)).contains(&age), "{age:?}");
        assert_eq!(clock.age(of(1000)), Duration::ZERO);
    }

    #[test]
    fn a_moment_is_shown_in_seconds_since_the_epoch() {
        let clock = HostClock { began_at: UNIX_EPOCH + Duration::from_secs(1000), ..HostClock::showing(Moment::START) };
        assert_eq!(clock.wall_s(Moment::after_start(Duration::from_millis(1500))), Some(1001.5));
    }
}
