//! Chooses the mechanism for an action, and performs the action with it.
//!
//! ```text
//!   promote 2M   held?       ─▶ recover     lifts the hold: nothing is copied
//!                can move?   ─▶ swap        out of the guest's reach for 0.22 ms (`cargo bench --bench swap`)
//!                otherwise   ─▶ collapse    for 0.62 ms
//!   demote 4K    anonymous   ─▶ split       this window alone
//!                otherwise   ─▶ hold at 4K  its whole memslot, as far as there is KVM
//!   release                  ─▶ release     zero pages of the window
//!   vacate       can move?   ─▶ vacate      out of the guest's reach for about as long as by a swap
//!   move         not pooled  ─▶ move_to_node  the kernel copies; so does one behind a promotion that ended elsewhere
//! ```

use wideleaf_policies::{Action, Cost, OutcomeResult, PageSize, Skip, WindowIndex};

use super::attempt::{Attempt, Mechanism};
use super::collapsing::Collapsing;
use super::managed_vm::ManagedVm;
use super::releasing::Releasing;
use super::steering::Steering;
use super::swaps::{SwapHand, is_for_collapse};
use crate::actuators::collapse::Collapse;
use crate::actuators::hold::{Hold, hold_cost, set_hold};
use crate::actuators::move_to_node::{Moved, move_window};
use crate::actuators::release::release_window;
use crate::actuators::split::split_window;
use crate::actuators::swap::Swap;
use crate::actuators::vacate::Vacate;
use crate::backing::BackingKind;
use crate::host::Host;
use crate::region::RamRange;

/// Cheapest mechanism that achieves an action. `is_held`: whether only a hold keeps the window from being large;
/// `can_swap`: whether the acting thread can swap windows of the VM.
pub(super) fn choose(vm: &ManagedVm, action: Action, is_held: bool, can_swap: bool) -> Mechanism {
    let has_kvm = vm.second_level.is_some();
    match action {
        Action::Promote { to: PageSize::Huge2M, .. } if is_held && has_kvm => Mechanism::Recover,
        // Untouched pages of reserved frames may be given back: nothing else may map them, as a collapse would.
        Action::Promote { .. } if vm.backing.is_reservable() => Mechanism::None,
        Action::Promote { to: PageSize::Huge2M, .. } if vm.backing.fixed_page().is_none() => match can_swap {
            true => Mechanism::Swap,
            false => Mechanism::Collapse,
        },
        Action::Demote { to: PageSize::Base4K, .. } if vm.backing.kind() == BackingKind::Anon => Mechanism::Split,
        Action::Demote { to: PageSize::Base4K, .. } if has_kvm => Mechanism::HoldAt4K,
        Action::Release { .. } => Mechanism::Release,
        Action::Vacate { .. } if can_swap && may_vacate(vm) => Mechanism::Vacate,
        // The pages of a pool belong to its node; reserved frames stay where their huge page will be.
        Action::Move { .. } if vm.backing.fixed_page().is_none() && !vm.backing.is_reservable() => {
            Mechanism::MoveToNode
        }
        _ => Mechanism::None,
    }
}

/// Whether a huge page of the VM can be behind another window of it later. Where holes are kept, windows are not
/// swapped.
fn may_vacate(vm: &ManagedVm) -> bool {
    let is_anonymous = vm.backing.kind() == BackingKind::Anon && vm.backing.fixed_page().is_none();
    is_anonymous && !vm.backing.is_reservable() && vm.keeps_holes().is_none()
}

/// Everything that a mechanism needs.
pub(super) struct Site<'a, 'b> {
    pub host: &'a dyn Host,
    pub vm: &'a ManagedVm,
    /// Range of RAM that contains the window.
    pub range: RamRange,
    /// State for releases.
    pub releasing: &'a Releasing,
    /// State for collapses.
    pub collapsing: &'a Collapsing,
    /// Commands of the loop's users.
    pub steering: &'a Steering,
    /// The acting thread's means of swapping.
    pub hand: Option<&'a mut SwapHand<'b>>,
}

impl Site<'_, '_> {
    /// Performs the action with the chosen mechanism.
    pub(super) fn perform(self, attempt: Attempt, mechanism: Mechanism) -> Attempt {
        let window = attempt.planned.action.window();
        match mechanism {
            Mechanism::Recover => self.switch_hold(attempt, mechanism, window, Hold::Recover),
            Mechanism::HoldAt4K => self.switch_hold(attempt, mechanism, window, Hold::At4K),
            Mechanism::Swap | Mechanism::Collapse => self.promote(attempt, window),
            Mechanism::MoveToNode => self.move_to_node(attempt, window),
            Mechanism::Vacate => self.vacate(attempt, window),
            Mechanism::Split => self.split(attempt, window),
            Mechanism::Release => self.release(attempt, window),
            Mechanism::GiantPromote | Mechanism::GiantDemote | Mechanism::None => attempt,
        }
    }

    /// Promotes, and moves the huge page if the plan wants it on another node than the one that the kernel chose, and
    /// the placement of the RAM leaves that to the plan.
    fn promote(self, attempt: Attempt, window: WindowIndex) -> Attempt {
        let Site { host, vm, range, .. } = self;
        let wanted = attempt.planned.node.filter(|_| !vm.fixes_nodes);
        let promoted = self.swap_or_collapse(attempt, window);
        match wanted {
            Some(node) if promoted.result == OutcomeResult::Done => {
                after_move(promoted, move_window(host, range, vm.backing, window, node))
            }
            _ => promoted,
        }
    }

    fn move_to_node(self, attempt: Attempt, window: WindowIndex) -> Attempt {
        let Action::Move { node, .. } = attempt.planned.action else { return attempt };
        let Moved { result, cost, unavailable } = move_window(self.host, self.range, self.vm.backing, window, node);
        Attempt { mechanism: Mechanism::MoveToNode, result, cost, unavailable, ..attempt }
    }

    fn swap_or_collapse(self, attempt: Attempt, window: WindowIndex) -> Attempt {
        let Site { host, vm, range, collapsing, steering, hand, .. } = self;
        if vm.keeps_holes().is_some() {
            return collapsed(attempt, collapsing.run(host, vm, range, window, steering), None);
        }
        // With the page of a vacated window, nothing has asked whether the host has another one for a collapse.
        let has_vacated = hand.as_ref().is_some_and(|hand| hand.has_vacated());
        match hand.map(|hand| hand.swap(host, window)) {
            Some(swap) if has_vacated || !is_for_collapse(swap.result) => swapped(attempt, swap),
            tried => collapsed(attempt, collapsing.run(host, vm, range, window, steering), tried),
        }
    }

    fn vacate(self, attempt: Attempt, window: WindowIndex) -> Attempt {
        let Some(hand) = self.hand else { return attempt };
        let Vacate { result, cost, unavailable } = hand.vacate(self.host, window);
        Attempt { mechanism: Mechanism::Vacate, result, cost, unavailable, ..attempt }
    }

    fn split(self, attempt: Attempt, window: WindowIndex) -> Attempt {
        let split = split_window(self.host, BackingKind::Anon, self.range, window);
        Attempt {
            mechanism: Mechanism::Split,
            result: split.result,
            cost: split.cost,
            unavailable: split.unavailable,
            freed: split.freed,
            ..attempt
        }
    }

    fn release(self, attempt: Attempt, window: WindowIndex) -> Attempt {
        let Site { host, vm, range, releasing, .. } = self;
        let mechanism = Mechanism::Release;
        let Some(ram) = vm.ram.as_ref().filter(|ram| ram.backing().kind() == BackingKind::Anon) else {
            return attempt.ended(mechanism, OutcomeResult::Skipped(Skip::NoMechanism));
        };
        let aside = match releasing.aside(ram) {
            Ok(aside) => aside,
            Err(result) => return attempt.ended(mechanism, result),
        };
        let release = release_window(&aside, host, range, window);
        Attempt {
            mechanism,
            result: release.result,
            cost: release.cost,
            unavailable: release.unavailable,
            freed: release.freed,
            ..attempt
        }
    }

    fn switch_hold(self, attempt: Attempt, mechanism: Mechanism, window: WindowIndex, hold: Hold) -> Attempt {
        let Some(kvm) = self.vm.second_level.as_deref() else { return attempt };
        let began_cpu = self.host.thread_cpu_time();
        let result = set_hold(kvm, window, hold);
        let cpu = self.host.thread_cpu_time().saturating_sub(began_cpu);
        Attempt { mechanism, result, cost: hold_cost(cpu), ..attempt }
    }
}

fn swapped(attempt: Attempt, swap: Swap) -> Attempt {
    Attempt {
        mechanism: Mechanism::Swap,
        result: swap.result,
        cost: swap.cost,
        unavailable: swap.unavailable,
        bloat: swap.bloat,
        ..attempt
    }
}

/// A promotion is done, whether its huge page could be moved or not: the sensor sees where it is.
fn after_move(promoted: Attempt, moved: Moved) -> Attempt {
    let cost = Cost { copied: promoted.cost.copied + moved.cost.copied, cpu: promoted.cost.cpu + moved.cost.cpu };
    Attempt { cost, unavailable: promoted.unavailable.max(moved.unavailable), ..promoted }
}

/// Ends with a collapse, after a swap that was tried without success.
fn collapsed(attempt: Attempt, collapse: Collapse, tried: Option<Swap>) -> Attempt {
    let before = tried.map_or(Cost::default(), |swap| swap.cost);
    Attempt {
        mechanism: Mechanism::Collapse,
        result: collapse.result,
        cost: Cost { copied: collapse.cost.copied + before.copied, cpu: collapse.cost.cpu + before.cpu },
        unavailable: collapse.unavailable,
        bloat: collapse.bloat,
        unswapped: tried.map(|swap| swap.result),
        ..attempt
    }
}
