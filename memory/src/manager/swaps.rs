//! Swappers of one VM, until swapping turns out to be impossible on this host.
//!
//! ```text
//!   Swaps ── three refusals in a row ─┬─ the kernel keeps page tables, the RAM cannot be moved, or the thread that
//!     ▲                               │  answers touches has ended ─▶ ended for good
//!     │                               │
//!     └──────── a minute ◀── Pauses ◀─┴─ any other reason: promotions collapse, vacates back off
//! ```

use std::time::Duration;

use wideleaf_policies::{Moment, OutcomeResult, Refusal, Skip, WindowIndex};

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
    /// Moment until which no window is swapped or vacated.
    paused_until: Moment,
}

/// Number of such refusals in a row after which swapping pauses, or ends if they prove that it is impossible.
const SWAP_REFUSALS_MAX: u32 = 3;

/// Pause after refusals that prove nothing: a page table that another vCPU's touch makes during a swap has the same
/// result as one that the kernel keeps. At most three copies a minute are made without success.
const SWAP_PAUSE: Duration = Duration::from_secs(60);

/// Means of one thread for swapping windows of one VM.
pub(super) struct SwapHand<'a> {
    access: &'a SharedAccess,
    swapper: &'a mut Swapper,
    paused_until: Moment,
}

impl Swaps {
    /// `None` where windows are not moved.
    pub fn new(access: SharedAccess, threads: u16) -> Option<Swaps> {
        Some(Swaps { swappers: access.swappers(threads)?, access, refusals: 0, paused_until: Moment::START })
    }

    /// Yields one hand for each thread that copies.
    pub fn hands(&mut self) -> impl Iterator<Item = SwapHand<'_>> {
        let Swaps { access, swappers, paused_until, .. } = self;
        swappers.iter_mut().map(|swapper| SwapHand { access, swapper, paused_until: *paused_until })
    }

    /// Records the result of a promotion. Returns `false` when swapping has proved to be impossible here.
    pub fn remains_possible(&mut self, attempt: &Attempt) -> bool {
        let refused = match (attempt.mechanism, attempt.unswapped) {
            (_, Some(refused)) => refused,
            // Into the page of a vacated window; no collapse was tried.
            (Mechanism::Swap, None) if is_for_collapse(attempt.result) => attempt.result,
            (Mechanism::Swap, None) => {
                self.refusals = 0;
                return true;
            }
            _ => return true,
        };
        self.refusals += 1;
        if self.refusals < SWAP_REFUSALS_MAX {
            return true;
        }
        (self.refusals, self.paused_until) = (0, attempt.at + SWAP_PAUSE);
        let is_eligible = ![OutcomeResult::Refused(Refusal::NotEligible), SERVICE_ENDED].contains(&refused);
        is_eligible && !self.swappers.iter().any(Swapper::keeps_page_tables)
    }

    /// Gives the huge pages back to the host that vacated windows left and no promotion of the tick has used.
    pub fn give_back_vacated(&mut self) {
        self.swappers.iter_mut().for_each(Swapper::give_back_vacated);
    }
}

/// Result of a swap after the end of the service that moves windows; while the loop itself stops, it asks for no swap.
const SERVICE_ENDED: OutcomeResult = OutcomeResult::Skipped(Skip::Stopping);

/// Whether a window may still be collapsed after a swap with this result.
pub(super) fn is_for_collapse(result: OutcomeResult) -> bool {
    matches!(result, OutcomeResult::Refused(Refusal::NotObserved | Refusal::NotEligible | Refusal::Other(_)))
        || result == SERVICE_ENDED
}

impl SwapHand<'_> {
    /// Swaps while no caller needs every window in its place.
    pub fn swap(&mut self, host: &dyn Host, window: WindowIndex) -> Swap {
        let SwapHand { access, swapper, .. } = self;
        access.unseen(|| swapper.swap(host, window))
    }

    /// Vacates a window while no caller needs every window in its place.
    pub fn vacate(&mut self, host: &dyn Host, window: WindowIndex) -> Vacate {
        let SwapHand { access, swapper, .. } = self;
        access.unseen(|| swapper.vacate(host, window))
    }

    /// Whether windows are neither swapped nor vacated now.
    pub fn is_paused(&self, now: Moment) -> bool {
        now < self.paused_until
    }

    /// Whether it has a huge page that a vacated window left.
    pub fn has_vacated(&self) -> bool {
        self.swapper.has_vacated()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::claims::Claims;
    use crate::detached::Aside;
    use crate::mover::ALL_PAGES;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_mover::FakeMover;
    use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
    use wideleaf_policies::{Action, Cost, PageSize, PlannedAction, VmId};

    const NOT_OBSERVED: OutcomeResult = OutcomeResult::Refused(Refusal::NotObserved);

    struct Bed {
        host: Arc<FakeHost>,
        mover: Arc<FakeMover>,
        aside: Arc<Aside>,
        swaps: Swaps,
    }

    impl Bed {
        /// A VM with one thread that copies.
        fn new() -> Bed {
            let (host, mover) = (Arc::<FakeHost>::default(), Arc::<FakeMover>::default());
            let aside = Arc::new(Aside::new(host.clone(), mover.clone(), Arc::<Claims>::default()));
            let (access, swappers) = (SharedAccess::of_no_windows(aside.clone()), Swapper::several(&aside, 1));
            let swaps = Swaps { access, swappers, refusals: 0, paused_until: Moment::START };
            Bed { host, mover, aside, swaps }
        }

        /// Swaps a window full of base pages, if swaps are not paused. Returns the result, and whether swaps remain
        /// possible.
        fn swap(&mut self, window: u64) -> Option<(OutcomeResult, bool)> {
            let (host, window) = (self.host.clone(), WindowIndex::new(window));
            let mut hand = self.swaps.hands().next().filter(|hand| !hand.is_paused(host.now()))?;
            self.mover.write(window, ALL_PAGES);
            let result = hand.swap(host.as_ref(), window).result;
            let action = Action::Promote { vm: VmId(0), window, to: PageSize::Huge2M };
            let planned = PlannedAction { action, cost: Cost::default(), node: None };
            let attempt = Attempt::requested(planned, 0, host.now()).ended(Mechanism::Swap, result);
            Some((result, self.swaps.remains_possible(&attempt)))
        }
    }

    #[test]
    fn swaps_pause_for_a_minute_after_three_pages_that_were_split_on_the_way() {
        let mut bed = Bed::new();
        bed.mover.limit_moves(100);
        assert_eq!([1, 2, 3].map(|window| bed.swap(window)), [Some((NOT_OBSERVED, true)); 3]);
        bed.mover.limit_moves(BASE_PAGES_PER_WINDOW);
        bed.host.sleep(SWAP_PAUSE - Duration::from_millis(1));
        assert_eq!(bed.swap(4), None);
        bed.host.sleep(Duration::from_millis(1));
        assert_eq!(bed.swap(4), Some((OutcomeResult::Done, true)));
    }

    #[test]
    fn swaps_end_with_the_service_that_moves_windows_and_windows_are_collapsed() {
        let mut bed = Bed::new();
        bed.aside.close();
        let results = [1, 2, 3].map(|window| bed.swap(window));
        let ended = OutcomeResult::Skipped(Skip::Stopping);
        assert_eq!(results, [Some((ended, true)), Some((ended, true)), Some((ended, false))]);
        assert!(is_for_collapse(ended));
    }

    #[test]
    fn swaps_end_on_a_kernel_that_keeps_page_tables() {
        let mut bed = Bed::new();
        bed.mover.keep_tables();
        let possible = [1, 2, 3].map(|window| bed.swap(window).is_some_and(|(_, is_possible)| is_possible));
        assert_eq!(possible, [true, true, false]);
    }
}
