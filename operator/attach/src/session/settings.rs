//! Settings for the management of a guest, and what follows from them. They touch nothing.

use std::path::PathBuf;

use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::manager::{ManagerConfig, OutOfReach};
use wideleaf_policies::recovery::RecoveryLimits;
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{BudgetLimits, Policy, PolicyChoice};

use super::error::AttachError;
use crate::refuse::refuse_policy;

/// Settings for the management of a guest.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Policy to use; `None`: off, the guest is only observed.
    pub policy: Option<PolicyChoice>,
    /// Whether shared memory may be collapsed, which stops the guest for 15 to 30 ms a window.
    pub may_collapse_shared: bool,
    /// A QMP socket of the guest with no other client.
    pub qmp: Option<PathBuf>,
    /// Limits on its costs.
    pub limits: BudgetLimits,
    /// Largest part of the time for which windows may be out of the guest's reach.
    pub out_of_reach: OutOfReach,
    /// Cost of a TLB miss on this machine.
    pub walk: WalkCost,
    /// Bounds on recoveries after a migration, a dirty log, a balloon and the like.
    pub recovery: RecoveryLimits,
    /// Whether the guest is left alone from the start, until [`super::Attached::leave_alone`] ends that.
    pub is_left_alone: bool,
}

impl Settings {
    /// Settings of the guest's manager.
    pub(super) fn of_manager(&self) -> ManagerConfig {
        let Settings { limits, out_of_reach, .. } = *self;
        ManagerConfig { limits, out_of_reach, ..ManagerConfig::for_external_guests() }
    }
}

/// Reason for windows that have no reason of their own to stay small.
pub(super) fn otherwise(settings: &Settings) -> WhyNot {
    if policy(settings).promotes() { WhyNot::NotChosen } else { WhyNot::PolicyNeverPromotes }
}

/// Refuses a policy that cannot manage an external guest.
pub(super) fn check(policy: Option<&PolicyChoice>) -> Result<(), AttachError> {
    policy.and_then(refuse_policy).map_or(Ok(()), |why| Err(AttachError::Policy(why)))
}

/// The policy in force: `never` where it is off.
pub(super) fn policy(settings: &Settings) -> Box<dyn Policy> {
    let off = || PolicyChoice::parse("never").expect("the policy that does nothing exists");
    settings.policy.clone().unwrap_or_else(off).make_for(&settings.walk)
}

/// Whether the policy asks which memory the guest uses.
pub(super) fn needs_access(settings: &Settings) -> bool {
    policy(settings).needs().access
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::mib;

    #[test]
    fn a_policy_that_cannot_manage_the_guest_is_refused_before_anything_is_done() {
        let giant = PolicyChoice::parse("giant").expect("it exists");
        let refused = check(Some(&giant)).expect_err("only our own VMM can");
        assert!(refused.to_string().contains("wideleaf run"), "{refused}");
        assert!(check(None).is_ok());
    }

    #[test]
    fn the_manager_keeps_to_the_limits_and_the_part_of_the_time_that_the_settings_say() {
        let out_of_reach = "10%".parse().expect("it is a part");
        let limits = BudgetLimits { copy_per_second: mib(7), ..BudgetLimits::default() };
        let config = Settings { limits, out_of_reach, ..Settings::default() }.of_manager();
        assert_eq!((config.limits, config.out_of_reach), (limits, out_of_reach));
        assert_eq!(Settings::default().of_manager().out_of_reach, ManagerConfig::default().out_of_reach);
    }
}
