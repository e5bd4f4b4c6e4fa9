//! Swap: a window of anonymous RAM gets a huge page in place of its base pages, without the kernel's
//! collapse (`UFFDIO_MOVE`, Linux 6.8). Its cost is the copy alone, into a page that was made ready before,
//! and past the cache.
//!
//! ```text
//!   look ─▶ take aside ─▶ copy into the ready huge page ─▶ drop empty page table ─▶ move it in ─▶ wake ─▶ look again
//!           └───────────────── a thread that touches it waits ─────────────────────────────────┘
//! ```
//!
//! The page table must go (Linux 6.14 gives it back with `MADV_DONTNEED`), since a huge page that is moved under a
//! page table is split. A kernel that keeps page tables is detected before the first page is made ready, and no
//! window is touched:
//!
//! ```text
//!   trial slot   populated, split, given back ─▶ populated again: huge? ── yes ─▶ page tables are given back
//!                                                        │ no
//!   ready slot   never had a page table  ──────▶ populated: huge? ── no ─▶ not known yet: the host lacks huge pages
//!                                                        └── yes, as often as it is compared ─▶ page tables are kept
//! ```
//!
//! If a single page table stays, the outcome is "not observed", but the contents are right.
//!
//! A window with a page pinned for a transfer is not swapped: the kernel does not move that page (`EBUSY`), and pages
//! moved before it go back.
//!
//! A huge page that another window of the VM has left ([`super::vacate`]) is used before any that would have to be
//! allocated.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use super::vacated_pages::VacatedPages;
use crate::claims::Claimed;
use crate::detached::Aside;
use crate::host::{Host, HostError, beside_huge_pages};
use crate::mover::{ALL_PAGES, Mover, Place, PlaceBacking, READY_SLOTS, TRIAL_SLOT};
use crate::numa::placement::Source;

/// A swap that was tried, or found unnecessary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// Result of the swap.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of all steps: scanning, moving, copying, scanning again.
    pub cost: Cost,
    /// Time that the window was out of the guest's reach: no thread waited longer.
    pub unavailable: Duration,
    /// Bytes that became resident only because the page is large; they read zero.
    pub bloat: Bytes,
}

/// Swaps windows of one VM, and keeps huge pages ready for it.
#[derive(Debug)]
pub struct Swapper {
    pub(super) aside: Arc<Aside>,
    /// Slots with a huge page, filled with zeroes, and the sources of the pages.
    ready: Vec<(u16, Source)>,
    /// Source of the latest window, for pages that are made ready in advance.
    latest: Source,
    /// Slots without a page.
    empty: Vec<u16>,
    /// Pages that vacated windows left, and base pages for the next ones.
    pub(super) vacated: VacatedPages,
    /// Treatment of page tables, found out by one of the VM's swappers for all.
    page_tables: Arc<Mutex<PageTables>>,
}

/// Treatment of a page table after its last page was given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PageTables {
    /// Nothing was made ready yet, or huge pages were short at every attempt.
    #[default]
    Unknown,
    GivenBack,
    /// No window can be swapped, and no slot with a page table gets a huge page again.
    Kept,
}

/// Number of comparisons of the two slots that prove that a kernel keeps page tables, which is final. In one
/// comparison, a shortage of huge pages that ends in between looks the same; in two, two such shortages. Only a
/// kernel that keeps them reaches the third.
const COMPARISONS: u32 = 3;

impl Swapper {
    /// A swapper without ready pages.
    pub fn new(aside: Arc<Aside>) -> Swapper {
        Swapper::with_slots(aside, 0..READY_SLOTS, Arc::default())
    }

    /// Makes `count` swappers, at most [`READY_SLOTS`], each for a thread of its own.
    pub fn several(aside: &Arc<Aside>, count: u16) -> Vec<Swapper> {
        let count = count.clamp(1, READY_SLOTS);
        let slots = |i: u16| i * READY_SLOTS / count..(i + 1) * READY_SLOTS / count;
        let page_tables = Arc::default();
        (0..count).map(|i| Swapper::with_slots(aside.clone(), slots(i), Arc::clone(&page_tables))).collect()
    }

    fn with_slots(aside: Arc<Aside>, slots: Range<u16>, page_tables: Arc<Mutex<PageTables>>) -> Swapper {
        let vacated = VacatedPages::new(slots.start);
        let (ready, latest) = (Vec::new(), Source::default());
        Swapper { aside, ready, latest, empty: slots.collect(), vacated, page_tables }
    }

    /// Makes huge pages ready in advance for [`Swapper::swap`], from the nodes of the latest window: 0.2 ms each, best
    /// while waiting for budget. Returns the number of ready pages.
    ///
    /// # Errors
    /// [`HostError`] if no more are available; `ENOMEM` if the kernel supplied base pages. Ready pages stay ready.
    pub fn refill(&mut self) -> Result<usize, HostError> {
        while !self.empty.is_empty() {
            self.make_ready(self.latest)?;
        }
        Ok(self.ready.len())
    }

    /// Gives all pages that it has back to the machine.
    pub fn drain(&mut self) {
        self.vacated.give_back(&self.aside);
        for (slot, _) in std::mem::take(&mut self.ready) {
            self.clear(slot);
            self.empty.push(slot);
        }
    }

    /// Swaps one window. Scans first, and leaves a large or empty window alone. Scans again afterwards. After any
    /// failure the guest continues with all its pages.
    pub fn swap(&mut self, host: &dyn Host, window: WindowIndex) -> Swap {
        let began_cpu = host.thread_cpu_time();
        let (result, unavailable, bloat) = match self.try_swap(window) {
            Ok(Swapped { unavailable, bloat }) => (OutcomeResult::Done, unavailable, bloat),
            Err(other) => (other, Duration::ZERO, Bytes::ZERO),
        };
        let copied = if result == OutcomeResult::Done { PageSize::Huge2M.bytes() } else { Bytes::ZERO };
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        Swap { result, cost: Cost { copied, cpu }, unavailable, bloat }
    }

    fn try_swap(&mut self, window: WindowIndex) -> Result<Swapped, OutcomeResult> {
        let guest = Place::Guest(window);
        let _claim = self.aside.claim(window).map_err(Claimed::result)?;
        if self.aside.is_aside(window) {
            return Err(OutcomeResult::Refused(Refusal::Busy)); // it would look like a hole
        }
        let before = self.aside.mover().look(guest).map_err(refused)?;
        if before.resident == 0 {
            return Err(OutcomeResult::Skipped(Skip::NotResident));
        }
        if before.is_huge {
            return Err(OutcomeResult::Skipped(Skip::AlreadyDone));
        }
        let occupied = match before.resident {
            BASE_PAGES_PER_WINDOW => BASE_PAGES_PER_WINDOW,
            _ => self.aside.mover().occupied(guest).map_err(refused)?,
        };
        let unavailable = match self.vacated.take_huge_page(self.aside.mover().source_of(window)) {
            Some(slot) => self.swap_in_vacated(window, slot, before)?,
            None => self.swap_in(window)?,
        };
        let after = self.aside.mover().look(guest).map_err(refused)?;
        if !after.is_huge {
            return Err(OutcomeResult::Refused(Refusal::NotObserved));
        }
        let holes = BASE_PAGES_PER_WINDOW - occupied;
        Ok(Swapped { unavailable, bloat: PageSize::Base4K.bytes() * u64::from(holes) })
    }

    /// Swaps in the huge page that a vacated window left. The old pages of `window`, which looked like `before`, are
    /// kept for the next window that is vacated, if there are enough of them.
    fn swap_in_vacated(
        &mut self,
        window: WindowIndex,
        slot: u16,
        before: PlaceBacking,
    ) -> Result<Duration, OutcomeResult> {
        let exchanged = self.exchange(window, Place::Aside(slot));
        match exchanged {
            Ok((_, old)) if before.resident == BASE_PAGES_PER_WINDOW => {
                self.vacated.keep_base_pages(old, self.aside.mover().source_of(window));
            }
            Ok((_, old)) => self.vacated.take_over(old),
            Err(_) => {}
        }
        self.vacated.give_back_stale(&self.aside);
        exchanged.map(|(unavailable, _)| unavailable)
    }

    /// Swaps in a page that was ready, or is made now.
    fn swap_in(&mut self, window: WindowIndex) -> Result<Duration, OutcomeResult> {
        let slot =
            self.take_ready(self.aside.mover().source_of(window)).map_err(|error| OutcomeResult::from(&error))?;
        let exchanged = self.exchange(window, Place::Ready(slot)).map(|(unavailable, old)| {
            self.aside.give_back(old);
            unavailable
        });
        if exchanged.is_err() {
            self.clear(slot); // a copy in it is of no use any more
        }
        exchanged
    }

    /// A slot with a huge page of this source, ready before or made now. It counts as empty from now on: anything left
    /// in it is discarded before it is populated again.
    fn take_ready(&mut self, from: Source) -> Result<u16, HostError> {
        self.latest = from;
        if !self.ready.iter().any(|(_, source)| *source == from) {
            self.make_ready(from)?;
        }
        let at = self.ready.iter().rposition(|(_, source)| *source == from).expect("one was made");
        let (slot, _) = self.ready.remove(at);
        self.empty.push(slot);
        Ok(slot)
    }

    fn make_ready(&mut self, from: Source) -> Result<(), HostError> {
        if self.empty.is_empty() && !self.ready.is_empty() {
            // Pages of other nodes take all slots.
            let (slot, _) = self.ready.remove(0);
            self.clear(slot);
            self.empty.push(slot);
        }
        let slot = *self.empty.last().expect("each slot is ready or empty");
        let made = self.check_page_tables(slot, from).and_then(|()| populate_huge(self.aside.mover(), slot, from));
        match made {
            Ok(()) => self.ready.extend(self.empty.pop().map(|slot| (slot, from))),
            Err(_) => {
                self.clear(slot);
                // Base pages may have left it a page table that stays: the next attempt uses another slot.
                self.empty.rotate_right(1);
            }
        }
        made
    }

    /// Checks that page tables are given back. `slot` must have none.
    fn check_page_tables(&self, slot: u16, from: Source) -> Result<(), HostError> {
        // Changed by one assignment, so it is consistent after a panic elsewhere. Other threads wait for the result.
        let mut known = self.page_tables.lock();
        if *known == PageTables::Unknown {
            *known = find_out_page_tables(self.aside.mover(), slot, from)?;
        }
        match *known {
            PageTables::GivenBack => Ok(()),
            PageTables::Kept => Err(keeps_page_tables()),
            PageTables::Unknown => Err(no_huge_page()),
        }
    }

    /// Puts the huge page of a place that reads zero behind the window, with the window's contents. Returns the time
    /// for which the guest may have waited, and the slot of the old pages, which the caller gives back.
    fn exchange(&self, window: WindowIndex, huge: Place) -> Result<(Duration, u16), OutcomeResult> {
        // Only now, so that a window that cannot be swapped keeps its mark.
        self.aside.mover().allow_huge(window).map_err(refused)?;
        self.aside.exchange(window, huge).map_err(beside_huge_pages)
    }

    /// Whether the kernel is known to keep page tables, so that no huge page arrives whole.
    pub(crate) fn keeps_page_tables(&self) -> bool {
        *self.page_tables.lock() == PageTables::Kept
    }

    /// Whether the swapper has fewer huge pages than slots for ready ones.
    pub(super) fn has_room_for_ready_page(&self) -> bool {
        self.vacated.huge_pages() < self.empty.len()
    }

    /// Pages that stay are given back before the slot is populated again.
    fn clear(&self, slot: u16) {
        if let Err(error) = self.aside.mover().discard(Place::Ready(slot), ALL_PAGES) {
            tracing::warn!("cannot give back a huge page yet: {error}");
        }
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.drain();
    }
}

struct Swapped {
    unavailable: Duration,
    bloat: Bytes,
}

/// Populates a slot, and returns whether with a huge page. Anything left by an earlier attempt goes first: the holes
/// of the next window must be zero.
fn is_populated_huge(mover: &dyn Mover, slot: u16, from: Source) -> Result<bool, HostError> {
    let place = Place::Ready(slot);
    mover.discard(place, ALL_PAGES)?;
    mover.populate(slot, from)?;
    Ok(mover.look(place)?.is_huge)
}

/// Compares the trial slot, which has had a page table, with `slot`, which has not. The trial slot is empty
/// afterwards.
fn find_out_page_tables(mover: &dyn Mover, slot: u16, from: Source) -> Result<PageTables, HostError> {
    let found = compare(mover, slot, from);
    mover.discard(Place::Ready(TRIAL_SLOT), ALL_PAGES)?;
    found
}

fn compare(mover: &dyn Mover, slot: u16, from: Source) -> Result<PageTables, HostError> {
    for _ in 0..COMPARISONS {
        mover.populate(TRIAL_SLOT, from)?;
        mover.discard(Place::Ready(TRIAL_SLOT), 0..1)?; // a huge page is split by it
        if is_populated_huge(mover, TRIAL_SLOT, from)? {
            return Ok(PageTables::GivenBack);
        }
        if !is_populated_huge(mover, slot, from)? {
            return Ok(PageTables::Unknown);
        }
    }
    Ok(PageTables::Kept)
}

fn keeps_page_tables() -> HostError {
    let source = std::io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    HostError { what: "giving back a page table (Linux 6.14)", source }
}

fn populate_huge(mover: &dyn Mover, slot: u16, from: Source) -> Result<(), HostError> {
    if is_populated_huge(mover, slot, from)? { Ok(()) } else { Err(no_huge_page()) }
}

fn no_huge_page() -> HostError {
    HostError { what: "populating a huge page", source: std::io::Error::from_raw_os_error(libc::ENOMEM) }
}

/// Result of a refused call that asks for no huge page.
pub(super) fn refused(error: HostError) -> OutcomeResult {
    beside_huge_pages((&error).into())
}
