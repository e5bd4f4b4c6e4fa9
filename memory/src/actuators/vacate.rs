//! Vacate: a window of anonymous RAM leaves its huge page whole, with all contents, for base pages (`UFFDIO_MOVE`,
//! Linux 6.8). The huge page is then behind another window, by a swap, without an allocation of 2 MiB, or goes back to
//! the host.
//!
//! ```text
//!   cold window   look ─▶ make base pages ─▶ take aside whole ─▶ copy ─▶ move base pages in ─▶ look ─▶ clear the page
//!                                            └───── a thread that touches it waits ───────┘              │
//!   hot window    look ─▶ take aside ─▶ copy into that huge page ─▶ move it in ─▶ wake ─▶ look           ▼
//!                    │                           ▲                                          its slot, aside: read zero
//!                    │                           └──────────────────────────────────────────────────────┘
//!                    └─▶ its 512 base pages are those of the next cold window: no page is allocated at all
//! ```
//!
//! Both together are a *trade*. The huge page stays in the slot where the cold window was aside, and is moved to the
//! hot one from there. Until then it counts as one of the swapper's ready pages; where all of these are there, it goes
//! back at once. Pages that no swap has used by the end of a tick go back too ([`Swapper::give_back_vacated`]).
//!
//! A window is vacated even if all of its pages hold zeroes: 512 base pages take the place of one huge page, no more
//! and no less memory. Afterwards the mark `MADV_NOHUGEPAGE` keeps khugepaged from undoing it. It is set before the
//! window is taken aside, so that a touch of the window meanwhile makes no huge page only to wait, and it stays if the
//! kernel then refuses, as after a split. A swap or a collapse lifts it.
//!
//! Whatever fails after the window was taken aside, it gets its pages back ([`crate::detached`]). The huge page is
//! whole then, unless some base pages had arrived. A page that is pinned for a transfer does not move (`EBUSY`).

use std::time::Duration;

use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use super::swap::{Swapper, refused};
use crate::claims::Claimed;
use crate::host::{Host, beside_huge_pages};
use crate::mover::{Place, PlaceBacking};
use crate::numa::placement::Source;

/// An attempt to vacate a window, or the reason why there was none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vacate {
    /// Result: `Done` if the window is on base pages and its huge page is whole.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of all steps.
    pub cost: Cost,
    /// Time that the window was out of the guest's reach: no thread waited longer.
    pub unavailable: Duration,
}

impl Swapper {
    /// Moves one window from its huge page to base pages, and keeps the huge page ready. Scans first, and leaves a
    /// window on base pages or without pages alone. Scans again afterwards. After any failure the guest continues with
    /// all its pages. A shortage of base pages is an error before anything has changed.
    pub fn vacate(&mut self, host: &dyn Host, window: WindowIndex) -> Vacate {
        let began_cpu = host.thread_cpu_time();
        let mut moved_in = None;
        let result = match self.try_vacate(window, &mut moved_in) {
            Ok(()) => OutcomeResult::Done,
            Err(other) => beside_huge_pages(other),
        };
        self.vacated.give_back_stale(&self.aside);
        let copied = if moved_in.is_some() { PageSize::Huge2M.bytes() } else { Bytes::ZERO };
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        Vacate { result, cost: Cost { copied, cpu }, unavailable: moved_in.unwrap_or_default() }
    }

    /// Whether a window that was vacated left a huge page that no swap has used yet.
    pub fn has_vacated(&self) -> bool {
        self.vacated.huge_pages() > 0
    }

    /// Gives the pages back to the machine that vacated windows left and no swap has used, and base pages kept for
    /// further windows.
    pub fn give_back_vacated(&mut self) {
        self.vacated.give_back(&self.aside);
    }

    /// `moved_in` becomes the time out of reach once the window is on base pages, also if there is an error then.
    fn try_vacate(&mut self, window: WindowIndex, moved_in: &mut Option<Duration>) -> Result<(), OutcomeResult> {
        let guest = Place::Guest(window);
        let _claim = self.aside.claim(window).map_err(Claimed::result)?;
        if self.aside.is_aside(window) {
            return Err(OutcomeResult::Refused(Refusal::Busy)); // it would look like a hole
        }
        match self.aside.mover().look(guest).map_err(refused)? {
            PlaceBacking { resident: 0, .. } => return Err(OutcomeResult::Skipped(Skip::NotResident)),
            PlaceBacking { is_huge: false, .. } => return Err(OutcomeResult::Skipped(Skip::AlreadyDone)),
            _ if self.keeps_page_tables() => return Err(OutcomeResult::Skipped(Skip::NoMechanism)),
            _ => {}
        }
        let source = self.aside.mover().source_of(window);
        let base = self.vacated.take_base_pages(self.aside.mover(), source).map_err(refused)?;
        self.aside.mover().forbid_huge(window).map_err(refused)?;
        let (unavailable, slot) = self.aside.exchange_full(window, base)?;
        self.vacated.take_over(slot);
        *moved_in = Some(unavailable);
        if self.aside.mover().look(guest).map_err(refused)?.is_huge {
            return Err(OutcomeResult::Refused(Refusal::NotObserved));
        }
        self.keep_huge_page(slot, source)
    }

    /// Makes the huge page of a slot ready, if there is a free place for it among the ready pages.
    fn keep_huge_page(&mut self, slot: u16, of: Source) -> Result<(), OutcomeResult> {
        let (mover, huge) = (self.aside.mover(), Place::Aside(slot));
        if !mover.look(huge).map_err(refused)?.is_huge {
            return Err(OutcomeResult::Refused(Refusal::NotObserved)); // the kernel has split it on the way
        }
        // The host gets the page if it cannot be cleared.
        if self.has_room_for_ready_page() && mover.clear(huge).is_ok() {
            self.vacated.keep_huge_page(slot, of);
        }
        Ok(())
    }
}
