//! The state of a window between two snapshots: whether it may be acted on, and how often it refused.
//!
//! ```text
//!            begin                    done
//!   Ready ──────────▶ Acting ──────────────────────▶ Ready
//!     ▲                 │ refused
//!     │  now ≥ until    ▼
//!     └───────────── BackedOff { until, refusals, last }  until = now + first · 2^(refusals-1), at most `longest`
//! ```
//!
//! A busy window is retried soon, and one that is not eligible again and again is retried rarely, since the reason (a
//! hole, an advice) changes rarely. Demotion uses the same states.

use core::time::Duration;

use crate::outcome::Refusal;
use crate::units::Moment;

/// State of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WindowState {
    /// Actions on the window are allowed.
    #[default]
    Ready,
    /// An actuator is working on it; `refusals` is the number of preceding refusals in a row.
    Acting {
        /// Number of refusals in a row so far.
        refusals: u8,
    },
    /// It refused, and is left alone until `until`.
    BackedOff {
        /// Earliest moment of the next action.
        until: Moment,
        /// Number of refusals in a row so far.
        refusals: u8,
        /// Reason of the latest refusal.
        last: Refusal,
    },
}

/// First and longest wait after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Backoff {
    first: Duration,
    longest: Duration,
}

const fn backoff_after(refusal: Refusal) -> Backoff {
    match refusal {
        // A locked page is unlocked within milliseconds.
        Refusal::Busy | Refusal::NotObserved => {
            Backoff { first: Duration::from_millis(10), longest: Duration::from_secs(1) }
        }
        // Huge pages become free when a process frees memory or compaction has run: seconds.
        Refusal::NoHugePage => Backoff { first: Duration::from_millis(250), longest: Duration::from_secs(10) },
        // Only giants are outrun, and each attempt copies 1 GiB without success. A guest may write like that for good.
        Refusal::OutrunByWrites => Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(600) },
        // A page that the kernel is moving elsewhere ends a collapse with the same `EINVAL` as a hole or an advice,
        // which stay for long.
        Refusal::NotEligible => Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(60) },
        Refusal::NotPermitted | Refusal::Merged | Refusal::Gone | Refusal::Other(_) => {
            Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(60) }
        }
    }
}

/// A transition that the drawing above does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAllowed {
    /// The window backs off until this moment.
    BackedOff(Moment),
    /// An actuator is already working on it.
    AlreadyActing,
    /// No actuator was working on it.
    NotActing,
}

impl WindowState {
    /// Earliest moment of an action on the window; in the past for [`WindowState::Ready`].
    pub const fn ready_at(self) -> Moment {
        match self {
            WindowState::Ready => Moment::START,
            WindowState::Acting { .. } => Moment::after_start(Duration::MAX),
            WindowState::BackedOff { until, .. } => until,
        }
    }

    /// Reason why it backs off at `now`; `None` if it does not.
    pub fn backs_off_for(self, now: Moment) -> Option<Refusal> {
        match self {
            WindowState::BackedOff { until, last, .. } if now < until => Some(last),
            WindowState::BackedOff { .. } | WindowState::Ready | WindowState::Acting { .. } => None,
        }
    }

    /// An actuator begins work.
    ///
    /// # Errors
    /// [`NotAllowed`] with the reason; the state stays as it was.
    pub fn begin(self, now: Moment) -> Result<WindowState, NotAllowed> {
        match self {
            WindowState::Ready => Ok(WindowState::Acting { refusals: 0 }),
            WindowState::BackedOff { until, refusals, .. } if now >= until => Ok(WindowState::Acting { refusals }),
            WindowState::BackedOff { until, .. } => Err(NotAllowed::BackedOff(until)),
            WindowState::Acting { .. } => Err(NotAllowed::AlreadyActing),
        }
    }

    /// The actuator is done, or found nothing to do.
    ///
    /// # Errors
    /// [`NotAllowed::NotActing`] if no actuator was working.
    pub fn done(self) -> Result<WindowState, NotAllowed> {
        match self {
            WindowState::Acting { .. } => Ok(WindowState::Ready),
            WindowState::Ready | WindowState::BackedOff { .. } => Err(NotAllowed::NotActing),
        }
    }

    /// The kernel refused the action.
    ///
    /// # Errors
    /// [`NotAllowed::NotActing`] if no actuator was working.
    pub fn refused(self, refusal: Refusal, now: Moment) -> Result<WindowState, NotAllowed> {
        let WindowState::Acting { refusals } = self else {
            return Err(NotAllowed::NotActing);
        };
        let Backoff { first, longest } = backoff_after(refusal);
        let wait = first.saturating_mul(1 << refusals.min(16)).min(longest);
        Ok(WindowState::BackedOff { until: now + wait, refusals: refusals.saturating_add(1), last: refusal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::after_start(Duration::from_millis(ms))
    }

    #[test]
    fn the_wait_doubles_with_each_refusal_up_to_the_longest() {
        let mut state = WindowState::Ready;
        let mut waits = alloc::vec::Vec::new();
        let mut now = at(0);
        for _ in 0..9 {
            state = state.begin(now).expect("its time has come").refused(Refusal::Busy, now).expect("it is acting");
            waits.push(state.ready_at().since(now).as_millis());
            now = state.ready_at();
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
    }

    /// Attempts after 0, 1, 3, 7, ... 1023 s, and one 600 s later. Each copies a giant while the guest writes it all.
    #[test]
    fn a_giant_that_its_guest_always_outruns_is_copied_twelve_times_in_half_an_hour() {
        let (mut state, mut now, mut attempts) = (WindowState::Ready, at(0), 0);
        while now < at(30 * 60 * 1000) {
            state = state.begin(now).and_then(|acting| acting.refused(Refusal::OutrunByWrites, now)).expect("legal");
            now = state.ready_at();
            attempts += 1;
        }
        assert_eq!(attempts, 12);
    }

    #[test]
    fn success_forgets_the_refusals() {
        let refused = WindowState::Ready.begin(at(0)).and_then(|s| s.refused(Refusal::Busy, at(0))).expect("legal");
        let ready = refused.begin(at(10)).and_then(WindowState::done).expect("legal");
        assert_eq!(ready, WindowState::Ready);
    }

    #[test]
    fn a_window_that_backs_off_cannot_be_acted_on_early() {
        let refused =
            WindowState::Ready.begin(at(5)).and_then(|s| s.refused(Refusal::NoHugePage, at(5))).expect("legal");
        assert_eq!(refused.begin(at(254)), Err(NotAllowed::BackedOff(at(255))));
        assert!(refused.begin(at(255)).is_ok());
        assert_eq!(
            [254, 255].map(|ms| refused.backs_off_for(at(ms))),
            [Some(Refusal::NoHugePage), None],
            "the reason is known for as long as it keeps the window back"
        );
    }

    #[test]
    fn only_one_actuator_at_a_time_works_on_a_window() {
        let acting = WindowState::Ready.begin(at(0)).expect("legal");
        assert_eq!(acting.begin(at(0)), Err(NotAllowed::AlreadyActing));
        assert_eq!(WindowState::Ready.done(), Err(NotAllowed::NotActing));
        assert_eq!(WindowState::Ready.refused(Refusal::Busy, at(0)), Err(NotAllowed::NotActing));
    }
}
