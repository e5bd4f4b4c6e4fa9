//! `wideleaf run --on-reset restart`: resets all state about the guest when it boots again, and limits the number
//! of boots.
//!
//! ```text
//!   all vCPUs stand still ─▶ the manager rests ─▶ the machine is restored ─▶ the guest's messages are dropped
//!          │                                      ─▶ a fresh policy ─▶ the guest runs
//!          └─ the tenth within a minute: the end
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use wideleaf_memory::actuators::clear::Pages;
use wideleaf_vmm::Machine;
use wideleaf_vmm::boot::reboot::RebootError;

use crate::policy_switch::PolicySwitch;
use crate::session::Session;

/// This number of resets within [`WITHIN`] is a loop. A guest that installs or updates itself resets two or three
/// times in a row, and reaches user space each time; a kernel that panics early and resets does so every few
/// seconds, or many times a second.
const RESETS_MAX: usize = 10;

/// Period of [`RESETS_MAX`].
const WITHIN: Duration = Duration::from_secs(60);

/// Restarts of a run's guest.
pub struct Restarts<'a> {
    session: &'a Session,
    policy: &'a PolicySwitch,
    pages: Pages,
    latest: Latest,
}

/// Reason why the run ends with a reset.
#[derive(Debug, thiserror::Error)]
pub enum NoRestart {
    /// The guest resets again and again.
    #[error(
        "the guest reset itself {RESETS_MAX} times within {:.1} s: it does not come up; use --on-reset stop to end \
        the run at the first reset, with the guest's output",
        .0.as_secs_f64()
    )]
    Loop(Duration),
    /// The machine could not be restored to its initial state.
    #[error("cannot boot the guest again after its reset: {0}")]
    Failed(#[from] RebootError),
}

impl<'a> Restarts<'a> {
    /// Restarts for a run; `is_prefaulted`: its RAM was faulted in before it began.
    pub fn new(session: &'a Session, policy: &'a PolicySwitch, is_prefaulted: bool) -> Restarts<'a> {
        let pages = if is_prefaulted { Pages::Kept } else { Pages::Released };
        Restarts { session, policy, pages, latest: Latest::default() }
    }

    /// Boots the machine again; it must stand still.
    ///
    /// # Errors
    /// [`NoRestart`]: the machine must be stopped.
    pub fn restart(&mut self, machine: &Machine) -> Result<(), NoRestart> {
        self.latest.add(Instant::now()).map_err(NoRestart::Loop)?;
        // The policy cannot change during this: the caller that changes it waits for the manager, and the manager
        // for this thread.
        self.policy.afresh(|policy| {
            let resting = self.session.ask_to_rest().map(|asked| asked.wait());
            machine.put_back(self.pages)?;
            // The end of a line that was cut off has arrived by now.
            self.session.forget_guest();
            machine.reboot();
            // The guest may already run; what the manager finds belongs to this boot.
            if let Some(resting) = resting {
                resting.begin_anew(policy);
            }
            Ok(())
        })
    }
}

/// Times of the latest resets, oldest first.
#[derive(Debug, Default)]
struct Latest(VecDeque<Instant>);

impl Latest {
    /// Adds a reset, now. If there are too many, returns the time within which they came.
    fn add(&mut self, now: Instant) -> Result<(), Duration> {
        self.0.push_back(now);
        self.0.retain(|at| now.duration_since(*at) <= WITHIN);
        match self.0.front() {
            Some(first) if self.0.len() >= RESETS_MAX => Err(now.duration_since(*first)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_resets_within_a_minute_are_a_loop_and_ten_over_an_hour_are_not() {
        let start = Instant::now();
        let resets = |every: Duration| {
            let mut latest = Latest::default();
            (0..20).map(|number| latest.add(start + every * number)).position(|answer| answer.is_err())
        };
        assert_eq!(resets(Duration::from_millis(1)), Some(9), "the tenth");
        // Nine intervals of 6.66 s are just below a minute, of 6.67 s just above.
        assert_eq!(resets(Duration::from_millis(6_660)), Some(9));
        assert_eq!(resets(Duration::from_millis(6_670)), None);
        assert_eq!(resets(Duration::from_secs(360)), None);
    }

    #[test]
    fn the_message_says_within_what_time() {
        let mut latest = Latest::default();
        let start = Instant::now();
        let answers = (0..10).map(|number| latest.add(start + Duration::from_millis(250) * number));
        let error = NoRestart::Loop(answers.last().expect("ten").expect_err("too many"));
        assert!(error.to_string().contains("10 times within 2.2 s") || error.to_string().contains("within 2.3 s"));
    }
}
