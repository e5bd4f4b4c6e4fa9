//! `wideleaf run --on-reset restart`: what becomes of all that knows the guest when it boots again, and how often it may.
//!
//! ```text
//!   all vCPUs stand still ─▶ the manager rests ─▶ the machine is put back ─▶ what the guest said is forgotten ─▶ a fresh policy ─▶ it runs
//!          └─ the tenth within a minute: the end
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use wideleaf_memory::actuators::clear::Pages;
use wideleaf_policies::PolicyChoice;
use wideleaf_vmm::Machine;
use wideleaf_vmm::boot::again::BootAgainError;
use wideleaf_vmm::run_loop::OnReset;

use super::policy_switch::PolicySwitch;
use crate::args::{OnResetArg, RunArgs};
use crate::failure::Failure;
use crate::session::Session;

/// So many resets within [`WITHIN`] are a loop: a guest that installs or updates itself resets two or three times in a row, and comes to a user space
/// each time; a kernel that panics early and resets does so every few seconds, or many times a second.
const RESETS_MAX: usize = 10;

/// See [`RESETS_MAX`].
const WITHIN: Duration = Duration::from_secs(60);

/// What a reset leads to, as the arguments say.
///
/// # Errors
/// [`Failure::Usage`] for what is about one boot alone.
pub(super) fn on_reset(args: &RunArgs, policy: &PolicyChoice) -> Result<OnReset, Failure> {
    if args.on_reset == OnResetArg::Stop {
        return Ok(OnReset::Stop);
    }
    if args.record.is_some() {
        return Err(Failure::Usage(
            "--on-reset restart: a recording is of one boot; leave --record out, or use --on-reset stop".into(),
        ));
    }
    if policy.make().answers_faults() {
        return Err(Failure::Usage(format!(
            "--on-reset restart: --policy {policy} answers the guest's first touch of a page, and asks once; use another policy, or --on-reset stop"
        )));
    }
    Ok(OnReset::Restart)
}

/// See the module.
pub(crate) struct Restarts<'a> {
    session: &'a Session,
    policy: &'a PolicySwitch,
    pages: Pages,
    latest: Latest,
}

/// Why the run ends with a reset.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoRestart {
    /// It goes on and on.
    #[error(
        "the guest reset itself {RESETS_MAX} times within {:.1} s: it does not come up; --on-reset stop ends the run at the first one, with what it said",
        .0.as_secs_f64()
    )]
    Loop(Duration),
    /// The machine is not as it was at the start.
    #[error("the guest reset itself, and cannot boot again: {0}")]
    Failed(#[from] BootAgainError),
}

impl<'a> Restarts<'a> {
    /// Of a run, whose RAM was faulted in before it began or was not.
    pub(super) fn new(session: &'a Session, policy: &'a PolicySwitch, is_prefaulted: bool) -> Restarts<'a> {
        let pages = if is_prefaulted { Pages::Kept } else { Pages::Released };
        Restarts { session, policy, pages, latest: Latest::default() }
    }

    /// Boots the machine again, which stands still for it.
    ///
    /// # Errors
    /// [`NoRestart`]: it is to be stopped.
    pub(crate) fn restart(&mut self, machine: &Machine) -> Result<(), NoRestart> {
        self.latest.add(Instant::now()).map_err(NoRestart::Loop)?;
        // Nobody sets another policy meanwhile: who does so waits for the manager, and the manager for us.
        self.policy.afresh(|policy| {
            let resting = self.session.ask_to_rest().map(|asked| asked.wait());
            machine.put_back(self.pages)?;
            // The end of a line that was cut off has come by now.
            self.session.forget_guest();
            machine.boot_again();
            // It may run already; what the manager finds is this boot's.
            if let Some(resting) = resting {
                resting.begin_anew(policy);
            }
            Ok(())
        })
    }
}

/// When the latest resets were, the first of them first.
#[derive(Debug, Default)]
struct Latest(VecDeque<Instant>);

impl Latest {
    /// Another one, now; in how short a time they came where they are too many.
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
    fn the_line_says_in_how_short_a_time() {
        let mut latest = Latest::default();
        let start = Instant::now();
        let answers = (0..10).map(|number| latest.add(start + Duration::from_millis(250) * number));
        let error = NoRestart::Loop(answers.last().expect("ten").expect_err("too many"));
        assert!(error.to_string().contains("10 times within 2.2 s") || error.to_string().contains("within 2.3 s"));
    }
}
