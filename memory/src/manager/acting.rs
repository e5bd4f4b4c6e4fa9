//! Chooses the mechanism for an action, and performs the action with it.
//!
//! ```text
//!   promote 2M   held?       ─▶ recover     lifts the hold: nothing is copied
//!                can move?   ─▶ swap        out of the guest's reach for 0.22 ms (`cargo bench --bench swap`)
//!                otherwise   ─▶ collapse    for 0.62 ms
//!   demote 4K    anonymous   ─▶ split       this window alone
//!                otherwise   ─▶ hold at 4K  its whole memslot, as far as there is KVM
//!   release                  ─▶ release     zero pages of the window
//! ```

use std::time::Duration;

use wideleaf_policies::{Action, Bytes, Cost, Moment, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use super::ManagedVm;
use super::releasing::Releasing;
use super::sampling::SharedAccess;
use crate::actuators::collapse::{Collapse, collapse_full_window, collapse_window};
use crate::actuators::hold::{Hold, hold_cost, set_hold};
use crate::actuators::release::release_window;
use crate::actuators::split::split_window;
use crate::actuators::swap::{Swap, Swapper};
use crate::backing::BackingKind;
use crate::host::Host;
use crate::region::RamRange;
use crate::second_level::SecondLevel;

/// Mechanisms of actions; reports count under the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mechanism {
    Collapse,
    Swap,
    Split,
    HoldAt4K,
    Recover,
    Release,
    GiantPromote,
    GiantDemote,
    None,
}

impl Mechanism {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Mechanism::Collapse => "collapse",
            Mechanism::Swap => "swap",
            Mechanism::Split => "split",
            Mechanism::HoldAt4K => "hold_at_4k",
            Mechanism::Recover => "recover",
            Mechanism::Release => "release",
            Mechanism::GiantPromote => "giant_promote",
            Mechanism::GiantDemote => "giant_demote",
            Mechanism::None => "none",
        }
    }
}

/// Result of an action, with its cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Performed {
    pub mechanism: Mechanism,
    pub result: OutcomeResult,
    /// Moment at which it was over.
    pub at: Moment,
    /// Cost of all attempts together.
    pub cost: Cost,
    pub unavailable: Duration,
    /// Bytes that became resident only because the page is large.
    pub bloat: Bytes,
    /// Bytes given back to the host.
    pub freed: Bytes,
    /// Result of a swap that was tried first and that this host may not support at all.
    pub unswapped: Option<OutcomeResult>,
}

impl Performed {
    /// Nothing was done, for this reason.
    pub fn skipped(skip: Skip, at: Moment) -> Performed {
        Performed::not_tried(OutcomeResult::Skipped(skip), at)
    }

    /// Nothing was done, with this result.
    pub fn not_tried(result: OutcomeResult, at: Moment) -> Performed {
        Performed {
            mechanism: Mechanism::None,
            result,
            at,
            cost: Cost::default(),
            unavailable: Duration::ZERO,
            bloat: Bytes::ZERO,
            freed: Bytes::ZERO,
            unswapped: None,
        }
    }
}

/// Swaps windows of one VM, until swapping turns out to be impossible on this host.
pub(super) struct Swaps {
    access: SharedAccess,
    /// One swapper for each thread that copies.
    swappers: Vec<Swapper>,
    /// Number of consecutive refusals that suggest that the kernel or the RAM does not support swapping.
    refusals: u32,
}

/// After this many such refusals in a row swapping ends: the kernel keeps page tables, or the RAM does not allow it.
const SWAP_REFUSALS_MAX: u32 = 3;

/// Means of one thread for swapping windows of one VM.
pub(super) struct SwapHand<'a> {
    access: &'a SharedAccess,
    swapper: &'a mut Swapper,
}

impl Swaps {
    /// `None` where windows are not moved.
    pub fn new(access: SharedAccess, threads: u16) -> Option<Swaps> {
        Some(Swaps { swappers: access.swappers(threads)?, access, refusals: 0 })
    }

    /// Yields one hand for each thread that copies.
    pub fn hands(&mut self) -> impl Iterator<Item = SwapHand<'_>> {
        let Swaps { access, swappers, .. } = self;
        swappers.iter_mut().map(|swapper| SwapHand { access, swapper })
    }

    /// Records the result of a promotion. Returns `false` when swapping has proved to be impossible here.
    pub fn remains_possible(&mut self, performed: &Performed) -> bool {
        match (performed.mechanism, performed.unswapped) {
            (_, Some(_)) => self.refusals += 1,
            (Mechanism::Swap, None) => self.refusals = 0,
            _ => {}
        }
        self.refusals < SWAP_REFUSALS_MAX
    }
}

impl SwapHand<'_> {
    /// Swaps while no caller needs every window in its place.
    fn swap(&mut self, host: &dyn Host, window: WindowIndex) -> Swap {
        let SwapHand { access, swapper } = self;
        access.unseen(|| swapper.swap(host, window))
    }
}

/// Whether a window may still be collapsed after a swap with this result.
fn is_for_collapse(result: OutcomeResult) -> bool {
    matches!(result, OutcomeResult::Refused(Refusal::NotObserved | Refusal::NotEligible | Refusal::Other(_)))
}

/// Means of moving pages of one VM.
pub(super) struct Moves<'a, 'b> {
    /// For swaps: the hand of the acting thread.
    pub hand: Option<&'a mut SwapHand<'b>>,
    /// For releases: the VM's state.
    pub releasing: &'a Releasing,
}

/// Claims the window and performs the action.
pub(super) fn perform_claimed(
    host: &dyn Host,
    vm: &ManagedVm,
    moves: Moves<'_, '_>,
    action: Action,
    is_held: bool,
) -> Performed {
    // Recovery concerns the slot, not pages, and is also possible for windows on a giant page.
    let is_recovery = is_held && matches!(action, Action::Promote { .. });
    let claims = vm.ram.as_ref().filter(|_| !is_recovery).map(|ram| ram.claims());
    match claims.map(|claims| claims.window(action.window())).transpose() {
        // A release relies on the zero pages that it saw: it keeps every other thread from discarding pages.
        Ok(_claim) if matches!(action, Action::Release { .. }) => {
            let _alone = vm.ram.as_ref().map(|ram| ram.given_back().discarding());
            perform(host, vm, moves, action, is_held)
        }
        Ok(_claim) => perform(host, vm, moves, action, is_held),
        Err(claimed) => Performed::not_tried(claimed.result(), host.now()),
    }
}

/// Performs an action with the cheapest mechanism that achieves it. `is_held`: whether only a hold keeps the
/// window from being large.
fn perform(host: &dyn Host, vm: &ManagedVm, moves: Moves<'_, '_>, action: Action, is_held: bool) -> Performed {
    let no_mechanism = || Performed::skipped(Skip::NoMechanism, host.now());
    let Some(range) = vm.ranges.iter().find(|range| range.gpa.contains(action.window().start())).copied() else {
        return no_mechanism();
    };
    match (action, vm.second_level.as_deref()) {
        (Action::Promote { window, to: PageSize::Huge2M, .. }, Some(kvm)) if is_held => {
            switch_hold(host, kvm, window, Hold::Recover)
        }
        // Untouched pages of reserved frames may be given back: nothing else may map them, as a collapse would.
        (Action::Promote { .. }, _) if vm.backing.is_reservable() => no_mechanism(),
        // No policy plans it, but the guest may have given back more since.
        (Action::Promote { window, .. }, _) if vm.is_given_back(window) => {
            Performed::skipped(Skip::GivenBack, host.now())
        }
        (Action::Promote { window, to: PageSize::Huge2M, .. }, _) if vm.backing.fixed_page().is_none() => {
            promote(host, vm, range, moves.hand, window)
        }
        (Action::Demote { window, to: PageSize::Base4K, .. }, _) if vm.backing.kind() == BackingKind::Anon => {
            let split = split_window(host, BackingKind::Anon, range, window);
            Performed {
                mechanism: Mechanism::Split,
                result: split.result,
                cost: split.cost,
                unavailable: split.unavailable,
                freed: split.freed,
                ..no_mechanism()
            }
        }
        (Action::Demote { window, to: PageSize::Base4K, .. }, Some(kvm)) => switch_hold(host, kvm, window, Hold::At4K),
        (Action::Release { window, .. }, _) => release(host, vm, moves.releasing, range, window),
        _ => no_mechanism(),
    }
}

fn promote(
    host: &dyn Host,
    vm: &ManagedVm,
    range: RamRange,
    hand: Option<&mut SwapHand<'_>>,
    window: WindowIndex,
) -> Performed {
    if let Some(result) = keeps_merged(vm, range, window) {
        let mechanism = Mechanism::Collapse;
        return Performed { mechanism, ..Performed::not_tried(result, host.now()) };
    }
    if vm.keeps_holes() {
        return collapsed(host, collapse_full_window(host, range, window), None);
    }
    let swap = hand.map(|hand| hand.swap(host, window));
    match swap {
        Some(swap) if !is_for_collapse(swap.result) => swapped(host, swap),
        tried => collapsed(host, collapse_window(host, range, window), tried),
    }
}

/// The refusal, where pages of the window are merged or the merged pages cannot be counted.
fn keeps_merged(vm: &ManagedVm, range: RamRange, window: WindowIndex) -> Option<OutcomeResult> {
    let start = range.hva + (window.start() - range.gpa.start());
    match vm.merged.as_ref()?.of_window(start) {
        Ok(0) => None,
        Ok(_) => Some(OutcomeResult::Refused(Refusal::Merged)),
        Err(error) => Some(error.into()),
    }
}

fn swapped(host: &dyn Host, swap: Swap) -> Performed {
    Performed {
        mechanism: Mechanism::Swap,
        result: swap.result,
        cost: swap.cost,
        unavailable: swap.unavailable,
        bloat: swap.bloat,
        ..Performed::skipped(Skip::NoMechanism, host.now())
    }
}

/// A collapse, after a swap that was tried without success.
fn collapsed(host: &dyn Host, collapse: Collapse, tried: Option<Swap>) -> Performed {
    let in_vain = tried.map_or(Cost::default(), |swap| swap.cost);
    Performed {
        mechanism: Mechanism::Collapse,
        result: collapse.result,
        cost: Cost { copied: collapse.cost.copied + in_vain.copied, cpu: collapse.cost.cpu + in_vain.cpu },
        unavailable: collapse.unavailable,
        bloat: collapse.bloat,
        unswapped: tried.map(|swap| swap.result),
        ..Performed::skipped(Skip::NoMechanism, host.now())
    }
}

fn release(host: &dyn Host, vm: &ManagedVm, releasing: &Releasing, range: RamRange, window: WindowIndex) -> Performed {
    let mechanism = Mechanism::Release;
    let Some(ram) = vm.ram.as_ref().filter(|ram| ram.backing().kind() == BackingKind::Anon) else {
        return Performed { mechanism, ..Performed::skipped(Skip::NoMechanism, host.now()) };
    };
    let aside = match releasing.aside(ram) {
        Ok(aside) => aside,
        Err(result) => return Performed { mechanism, ..Performed::not_tried(result, host.now()) },
    };
    let release = release_window(&aside, host, range, window);
    Performed {
        mechanism,
        result: release.result,
        cost: release.cost,
        unavailable: release.unavailable,
        freed: release.freed,
        ..Performed::skipped(Skip::NoMechanism, host.now())
    }
}

fn switch_hold(host: &dyn Host, kvm: &dyn SecondLevel, window: WindowIndex, hold: Hold) -> Performed {
    let mechanism = match hold {
        Hold::At4K => Mechanism::HoldAt4K,
        Hold::Recover => Mechanism::Recover,
    };
    let began_cpu = host.thread_cpu_time();
    let result = set_hold(kvm, window, hold);
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    Performed { mechanism, result, cost: hold_cost(cpu), ..Performed::skipped(Skip::NoMechanism, host.now()) }
}
