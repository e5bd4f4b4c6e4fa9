//! Hold at 4K and recover: KVM maps a memslot with 4 KiB leaves while its dirty log is on, and large again once it is
//! off. The host's pages stay as they are; only the second level is split. The unit is the memslot.

use std::time::Duration;

use wideleaf_policies::{Cost, OutcomeResult, Refusal, Skip, WindowIndex};

use super::dirty::refused;
use crate::second_level::SecondLevel;

/// Direction of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Map with 4 KiB leaves.
    At4K,
    /// Let KVM map large again.
    Recover,
}

/// Switches the memslot that covers `window`. Mappings follow when the guest touches the memory again; KVM's totals
/// show it at a later tick.
pub fn set_hold(second_level: &dyn SecondLevel, window: WindowIndex, hold: Hold) -> OutcomeResult {
    let find = || second_level.slots().into_iter().find(|slot| slot.range.contains(window.start()));
    let Some(slot) = find() else {
        // From outside of the guest's VMM no memslot is known, and none can be switched.
        let is_outside = second_level.slots().is_empty();
        return OutcomeResult::Skipped(if is_outside { Skip::NoMechanism } else { Skip::NotResident });
    };
    let is_on = hold == Hold::At4K;
    if slot.is_dirty_logged == is_on {
        return OutcomeResult::Skipped(Skip::AlreadyDone);
    }
    match second_level.set_dirty_log(slot.id, is_on) {
        Err(error) => refused(&error),
        Ok(()) if find().is_none_or(|slot| slot.is_dirty_logged != is_on) => {
            OutcomeResult::Refused(Refusal::NotObserved)
        }
        Ok(()) => OutcomeResult::Done,
    }
}

/// Switching copies nothing.
pub fn hold_cost(cpu: Duration) -> Cost {
    Cost { cpu, ..Cost::default() }
}
