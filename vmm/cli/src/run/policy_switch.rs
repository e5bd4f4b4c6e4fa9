//! Switches a run's policy off and on again, whoever asks for it: wideleafd, or somebody over the VM's control socket. The latest wish
//! counts.

use std::sync::atomic::{AtomicBool, Ordering};

use wideleaf_policies::PolicyChoice;

use crate::guests::settings::OFF;
use crate::session::Session;

/// The policy that a run began with, and whether it is off.
#[derive(Debug)]
pub(crate) struct PolicySwitch {
    policy: PolicyChoice,
    is_off: AtomicBool,
}

impl PolicySwitch {
    /// On.
    pub(crate) fn new(policy: PolicyChoice) -> PolicySwitch {
        PolicySwitch { policy, is_off: AtomicBool::new(false) }
    }

    /// Whether somebody has set it `off`.
    pub(crate) fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Relaxed)
    }

    /// As it is set.
    pub(crate) fn shown(&self) -> String {
        if self.is_off() { OFF.to_owned() } else { self.policy.to_string() }
    }

    /// A run's policy began with its RAM, its sensors and its recording: it can be switched off and on again, and nothing else.
    ///
    /// # Errors
    /// One line: what it stays, and what can be set.
    pub(crate) fn set(&self, session: &Session, wanted: &str) -> Result<(), String> {
        let own = self.policy.to_string();
        let is_off = match wanted {
            OFF if works_at_faults(&self.policy) => {
                return Err(format!("its policy stays {own}: it answers the guest's faults, which can not wait"));
            }
            OFF => true,
            policy if policy == own => false,
            other => {
                return Err(format!(
                    "its policy stays {own}: `wideleaf run` takes {other} at its start alone, with --policy; off and {own} can be set"
                ));
            }
        };
        self.is_off.store(is_off, Ordering::Relaxed);
        session.set_off(is_off);
        Ok(())
    }
}

/// Whether it has a service beside the manager's loop that faults of the guest wait for.
fn works_at_faults(policy: &PolicyChoice) -> bool {
    let policy = policy.make();
    policy.decides_at_first_touch() || policy.reserves().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_answers_faults_can_not_be_switched_off() {
        let policy = |text| PolicyChoice::parse(text).expect("it is in the list");
        for text in ["at-fault", "reservation"] {
            assert!(works_at_faults(&policy(text)), "{text}");
        }
        for text in ["auto", "greedy", "never"] {
            assert!(!works_at_faults(&policy(text)), "{text}");
        }
    }
}
