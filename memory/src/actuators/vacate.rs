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

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use super::swap::{Swapper, refused};
use crate::claims::Claimed;
use crate::host::{Host, HostError};
use crate::mover::{ALL_PAGES, Look, Mover, Place};

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

/// State of a swapper between a vacated window and the swap that uses its huge page.
#[derive(Debug)]
pub(super) struct Vacating {
    /// Slots aside with a huge page that reads zero.
    huge: Vec<u16>,
    /// Slot aside with the 512 base pages of a window that got a vacated page.
    spare: Option<u16>,
    /// Slots aside with pages of no more use. They are here while they are used: after a panic they are given back.
    stale: Vec<u16>,
    /// Slot of this swapper for base pages.
    base: u16,
    /// Whether that slot may have pages.
    is_base_used: bool,
}

impl Vacating {
    /// A state without pages; `base` is the number of the swapper's slot for base pages.
    pub fn new(base: u16) -> Vacating {
        Vacating { huge: Vec::new(), spare: None, stale: Vec::new(), base, is_base_used: false }
    }
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
            // It asks for no huge page; without memory for something else, others may still get one.
            Err(OutcomeResult::Refused(Refusal::NoHugePage)) => OutcomeResult::Refused(Refusal::Other(libc::ENOMEM)),
            Err(other) => other,
        };
        self.give_back_stale();
        let copied = if moved_in.is_some() { PageSize::Huge2M.bytes() } else { Bytes::ZERO };
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        Vacate { result, cost: Cost { copied, cpu }, unavailable: moved_in.unwrap_or_default() }
    }

    /// Whether a window that was vacated left a huge page that no swap has used yet.
    pub fn has_vacated(&self) -> bool {
        !self.vacating.huge.is_empty()
    }

    /// Gives the pages back to the machine that vacated windows left and no swap has used, and base pages kept for
    /// further windows.
    pub fn give_back_vacated(&mut self) {
        let Vacating { huge, spare, stale, base, is_base_used } = &mut self.vacating;
        stale.append(huge);
        stale.extend(spare.take());
        if std::mem::take(is_base_used)
            && let Err(error) = self.aside.mover().discard(Place::Base(*base), ALL_PAGES)
        {
            tracing::warn!("cannot give back base pages yet: {error}");
            *is_base_used = true;
        }
        self.give_back_stale();
    }

    /// `moved_in` becomes the time out of reach once the window is on base pages, also if there is an error then.
    fn try_vacate(&mut self, window: WindowIndex, moved_in: &mut Option<Duration>) -> Result<(), OutcomeResult> {
        let guest = Place::Guest(window);
        let _claim = self.aside.claim(window).map_err(Claimed::result)?;
        if self.aside.is_aside(window) {
            return Err(OutcomeResult::Refused(Refusal::Busy)); // it would look like a hole
        }
        match self.aside.mover().look(guest).map_err(refused)? {
            Look { resident: 0, .. } => return Err(OutcomeResult::Skipped(Skip::NotResident)),
            Look { is_huge: false, .. } => return Err(OutcomeResult::Skipped(Skip::AlreadyDone)),
            _ if self.keeps_page_tables() => return Err(OutcomeResult::Skipped(Skip::NoMechanism)),
            _ => {}
        }
        let base = self.take_base_pages().map_err(refused)?;
        self.aside.mover().forbid_huge(window).map_err(refused)?;
        let (unavailable, slot) = self.aside.exchange(window, base)?;
        self.vacating.stale.push(slot);
        *moved_in = Some(unavailable);
        if self.aside.mover().look(guest).map_err(refused)?.is_huge {
            return Err(OutcomeResult::Refused(Refusal::NotObserved));
        }
        self.keep_huge_page(slot)
    }

    /// A place with 512 base pages. Those of a spare slot count as of no more use from now on.
    fn take_base_pages(&mut self) -> Result<Place, HostError> {
        if let Some(slot) = self.vacating.spare.take() {
            self.vacating.stale.push(slot);
            let spare = Place::Aside(slot);
            if is_full_of_base_pages(self.aside.mover(), spare)? {
                return Ok(spare);
            }
        }
        let base = Place::Base(self.vacating.base);
        self.vacating.is_base_used = true;
        self.aside.mover().populate_base(self.vacating.base)?;
        match is_full_of_base_pages(self.aside.mover(), base)? {
            true => Ok(base),
            false => Err(no_base_pages()),
        }
    }

    /// Makes the huge page of a slot ready, if there is a free place for it among the ready pages.
    fn keep_huge_page(&mut self, slot: u16) -> Result<(), OutcomeResult> {
        let (mover, huge) = (self.aside.mover(), Place::Aside(slot));
        if !mover.look(huge).map_err(refused)?.is_huge {
            return Err(OutcomeResult::Refused(Refusal::NotObserved)); // the kernel has split it on the way
        }
        let [ready, all] = self.ready_of_all();
        // The host has the page if it cannot be cleared.
        if ready + self.vacating.huge.len() < all && mover.clear(huge).is_ok() {
            self.vacating.stale.retain(|stale| *stale != slot);
            self.vacating.huge.push(slot);
        }
        Ok(())
    }

    /// The slot of a huge page that a vacated window left. It counts as of no more use from now on.
    pub(super) fn take_vacated(&mut self) -> Option<u16> {
        let slot = self.vacating.huge.pop()?;
        self.vacating.stale.push(slot);
        Some(slot)
    }

    /// Swaps in the huge page that a vacated window left. The old pages of `window`, which looked like `before`, are
    /// kept for the next window that is vacated, if there are enough of them.
    pub(super) fn trade(&mut self, window: WindowIndex, slot: u16, before: Look) -> Result<Duration, OutcomeResult> {
        let exchanged = self.exchange(window, Place::Aside(slot));
        if let Ok((_, old)) = exchanged {
            let is_full = before.resident == BASE_PAGES_PER_WINDOW;
            let place = if is_full { self.vacating.spare.replace(old) } else { Some(old) };
            self.vacating.stale.extend(place);
        }
        self.give_back_stale();
        exchanged.map(|(unavailable, _)| unavailable)
    }

    fn give_back_stale(&mut self) {
        while let Some(slot) = self.vacating.stale.pop() {
            self.aside.give_back(slot);
        }
    }
}

fn is_full_of_base_pages(mover: &dyn Mover, place: Place) -> Result<bool, HostError> {
    let look = mover.look(place)?;
    Ok(!look.is_huge && look.resident == BASE_PAGES_PER_WINDOW)
}

fn no_base_pages() -> HostError {
    HostError { what: "populating base pages", source: std::io::Error::from_raw_os_error(libc::ENOMEM) }
}
