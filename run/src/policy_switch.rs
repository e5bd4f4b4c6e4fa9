//! Sets a run's policy while it runs, or switches it off, for wideleafd or for a client of the VM's control socket.
//! The latest request counts. A request waits while the manager rests, as during a save; a question never waits.

use parking_lot::Mutex;

use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{Policy, PolicyChoice};

use crate::session::Session;

/// Policy of a VM that is only observed.
pub const OFF: &str = "off";

/// The policy of a run, and whether it is off.
#[derive(Debug)]
pub struct PolicySwitch {
    /// Cost of a TLB miss, for policies that use it.
    walk: WalkCost,
    /// Held while the policy changes, which can last as long as the manager rests. Taken before `set`.
    turn: Mutex<()>,
    /// Held for moments: a thread that has the manager rest reads it.
    set: Mutex<Set>,
}

#[derive(Clone, Debug)]
struct Set {
    policy: PolicyChoice,
    is_off: bool,
    /// The VM's own policy, while `policy` is that of a guarantee's pursuit.
    own: Option<PolicyChoice>,
}

impl PolicySwitch {
    /// A policy that is on.
    pub fn new(policy: PolicyChoice, walk: WalkCost) -> PolicySwitch {
        PolicySwitch { walk, turn: Mutex::default(), set: Mutex::new(Set { policy, is_off: false, own: None }) }
    }

    /// Whether it was set to `off`.
    pub fn is_off(&self) -> bool {
        self.set.lock().is_off
    }

    /// The policy with which a saved VM continues: its own one while a guarantee is pursued, and `never` while it is
    /// off.
    pub fn lasting(&self) -> PolicyChoice {
        self.set.lock().lasting()
    }

    /// The policy as it is set.
    pub fn shown(&self) -> String {
        self.set.lock().shown()
    }

    /// Replaces the policy, or switches it off or on. Concurrent callers wait.
    ///
    /// # Errors
    /// One line: the policy that stays, and why.
    pub fn set(&self, session: &Session, wanted: &str) -> Result<(), String> {
        self.change(session, None, wanted, None).map(drop)
    }

    /// As [`PolicySwitch::set`], if the policy is `from`. Returns whether it was.
    ///
    /// # Errors
    /// As for [`PolicySwitch::set`].
    pub fn exchange(&self, session: &Session, from: &str, wanted: &str) -> Result<bool, String> {
        self.change(session, Some(from), wanted, None)
    }

    /// As [`PolicySwitch::set`], for as long as a guarantee is pursued; `own` is the policy afterwards.
    ///
    /// # Errors
    /// As for [`PolicySwitch::set`].
    pub fn set_in_pursuit(&self, session: &Session, wanted: &str, own: &str) -> Result<(), String> {
        self.change(session, None, wanted, Some(own)).map(drop)
    }

    /// As [`PolicySwitch::set_in_pursuit`], if the policy is `own`. Returns whether it was.
    ///
    /// # Errors
    /// As for [`PolicySwitch::set`].
    pub fn pursue(&self, session: &Session, own: &str, wanted: &str) -> Result<bool, String> {
        self.change(session, Some(own), wanted, Some(own))
    }

    fn change(&self, session: &Session, from: Option<&str>, wanted: &str, own: Option<&str>) -> Result<bool, String> {
        let _turn = self.turn.lock();
        if from.is_some_and(|from| self.shown() != from) {
            return Ok(false);
        }
        self.set_in_turn(session, wanted)?;
        self.set.lock().own = own.and_then(|own| PolicyChoice::parse(own).ok());
        Ok(true)
    }

    fn set_in_turn(&self, session: &Session, wanted: &str) -> Result<(), String> {
        let set = self.set.lock().clone();
        let shown = set.shown();
        let stays = |why: &dyn std::fmt::Display| format!("its policy stays {shown}: {why}");
        if wanted == OFF {
            if set.policy.make().answers_faults() {
                return Err(stays(
                    &"it serves the guest's page faults, which cannot wait; restart the VM with another --policy",
                ));
            }
            self.set.lock().is_off = true;
            session.set_off(true);
            return Ok(());
        }
        let wanted = PolicyChoice::parse(wanted).map_err(|error| stays(&error))?;
        if wanted.to_string() != set.policy.to_string() {
            session.set_policy(wanted.make_for(&self.walk)).map_err(|error| stays(&error))?;
        }
        *self.set.lock() = Set { policy: wanted, is_off: false, own: None };
        session.set_off(false);
        Ok(())
    }

    /// Calls `work` with the policy as it is set, without its history, while no other caller sets one.
    pub fn afresh<T>(&self, work: impl FnOnce(Box<dyn Policy>) -> T) -> T {
        let _turn = self.turn.lock();
        let policy = self.set.lock().policy.clone();
        work(policy.make_for(&self.walk))
    }
}

impl Set {
    fn lasting(&self) -> PolicyChoice {
        match &self.own {
            _ if self.is_off => PolicyChoice::parse("never").expect("this policy exists"),
            Some(own) => own.clone(),
            None => self.policy.clone(),
        }
    }

    fn shown(&self) -> String {
        if self.is_off { OFF.to_owned() } else { self.policy.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_vm_continues_with_its_own_policy_and_with_none_that_acts_if_it_was_off() {
        let policy = |name: &str| PolicyChoice::parse(name).expect("it exists");
        let set = |own: Option<&str>, is_off| Set { policy: policy("greedy"), is_off, own: own.map(policy) };
        let lasting = |set: Set| set.lasting().to_string();
        assert_eq!(lasting(set(None, false)), "greedy");
        assert_eq!(lasting(set(Some("auto:horizon_s=20"), false)), "auto:horizon_s=20");
        assert_eq!(lasting(set(Some("auto"), true)), "never");
    }
}
