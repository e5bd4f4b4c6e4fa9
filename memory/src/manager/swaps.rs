//! Swappers of one VM, until swapping turns out to be impossible on this host.

use wideleaf_policies::{OutcomeResult, Refusal, WindowIndex};

use super::attempt::{Attempt, Mechanism};
use super::sampling::SharedAccess;
use crate::actuators::swap::{Swap, Swapper};
use crate::actuators::vacate::Vacate;
use crate::host::Host;

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
    pub fn remains_possible(&mut self, attempt: &Attempt) -> bool {
        match (attempt.mechanism, attempt.unswapped) {
            (_, Some(_)) => self.refusals += 1,
            // Into the page of a vacated window; no collapse was tried.
            (Mechanism::Swap, None) if is_for_collapse(attempt.result) => self.refusals += 1,
            (Mechanism::Swap, None) => self.refusals = 0,
            _ => {}
        }
        self.refusals < SWAP_REFUSALS_MAX
    }

    /// Gives the huge pages back to the host that vacated windows left and no promotion of the tick has used.
    pub fn give_back_vacated(&mut self) {
        self.swappers.iter_mut().for_each(Swapper::give_back_vacated);
    }
}

/// Whether a window may still be collapsed after a swap with this result.
pub(super) fn is_for_collapse(result: OutcomeResult) -> bool {
    matches!(result, OutcomeResult::Refused(Refusal::NotObserved | Refusal::NotEligible | Refusal::Other(_)))
}

impl SwapHand<'_> {
    /// Swaps while no caller needs every window in its place.
    pub fn swap(&mut self, host: &dyn Host, window: WindowIndex) -> Swap {
        let SwapHand { access, swapper } = self;
        access.unseen(|| swapper.swap(host, window))
    }

    /// Vacates a window while no caller needs every window in its place.
    pub fn vacate(&mut self, host: &dyn Host, window: WindowIndex) -> Vacate {
        let SwapHand { access, swapper } = self;
        access.unseen(|| swapper.vacate(host, window))
    }

    /// Whether it has a huge page that a vacated window left.
    pub fn has_vacated(&self) -> bool {
        self.swapper.has_vacated()
    }
}
