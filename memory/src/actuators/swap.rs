//! Swap: a window of anonymous RAM gets a huge page in place of its base pages, without the kernel's collapse
//! (`UFFDIO_MOVE`, Linux 6.8). Only the copy costs: into a page that was made ready before, and past the cache.
//!
//! ```text
//!   look ─▶ take aside ─▶ copy into the ready huge page ─▶ drop the empty page table ─▶ move it in ─▶ wake ─▶ look again
//!           └───────────────── who touches the window waits ─────────────────────────────────────┘
//! ```
//!
//! The page table must go (Linux 6.14 gives it back with `MADV_DONTNEED`): where one is, a huge page that is moved in is
//! split. A kernel that keeps them is found out before the first page is made ready, and no window is touched:
//!
//! ```text
//!   trial slot   populated, split, given back ─▶ populated again: huge? ── yes ─▶ page tables are given back
//!                                                        │ no
//!   ready slot   never had a page table  ──────▶ populated: huge? ── no ─▶ not known yet: the host is short of huge pages
//!                                                        └── yes, as often as it is compared ─▶ page tables are kept
//! ```
//!
//! Where only one stays, the outcome is "not observed", and the contents are right all the same.
//!
//! A window of which a page is pinned for a transfer is not swapped: the kernel does not move that page (`EBUSY`), and
//! what was moved before it goes back.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::aside::{Aside, AsideError};
use crate::claims::Claimed;
use crate::host::{Host, HostError};
use crate::mover::{ALL_PAGES, Mover, Place, READY_SLOTS, TRIAL_SLOT};

/// A swap that was tried, or found needless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// What came of it.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of everything: looking, moving, copying, looking again.
    pub cost: Cost,
    /// How long the window was out of the guest's reach: nobody had to wait longer.
    pub unavailable: Duration,
    /// What became resident only because the page is large. It reads zero.
    pub bloat: Bytes,
}

/// Swaps windows of one VM, and keeps huge pages ready for it.
#[derive(Debug)]
pub struct Swapper {
    aside: Arc<Aside>,
    /// Slots with a huge page that is zero.
    ready: Vec<u16>,
    /// Slots without.
    empty: Vec<u16>,
    /// Found out by one of the VM's swappers for all.
    page_tables: Arc<Mutex<PageTables>>,
}

/// What becomes of a page table whose last page is given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PageTables {
    /// Nothing was made ready yet, or huge pages were short whenever it was tried.
    #[default]
    Unknown,
    GivenBack,
    /// Nothing can be swapped, and no slot that has one gets a huge page again.
    Kept,
}

/// How often the two slots are compared before a kernel is said to keep page tables, which is for good. Compared once, a
/// shortage of huge pages that ends in between looks the same; compared twice, two of them that do. Only a kernel that keeps them is
/// compared a third time.
const COMPARISONS: u32 = 3;

impl Swapper {
    /// Nothing is ready yet.
    pub fn new(aside: Arc<Aside>) -> Swapper {
        Swapper::with_slots(aside, 0..READY_SLOTS, Arc::default())
    }

    /// As many as asked for, [`READY_SLOTS`] at most, each to be used by a thread of its own.
    pub fn several(aside: &Arc<Aside>, count: u16) -> Vec<Swapper> {
        let count = count.clamp(1, READY_SLOTS);
        let slots = |i: u16| i * READY_SLOTS / count..(i + 1) * READY_SLOTS / count;
        let page_tables = Arc::default();
        (0..count).map(|i| Swapper::with_slots(aside.clone(), slots(i), Arc::clone(&page_tables))).collect()
    }

    fn with_slots(aside: Arc<Aside>, slots: Range<u16>, page_tables: Arc<Mutex<PageTables>>) -> Swapper {
        Swapper { aside, ready: Vec::new(), empty: slots.collect(), page_tables }
    }

    /// Makes huge pages ready, so that [`Swapper::swap`] need not: 0.2 ms each, best while the budget is waited for.
    /// Returns how many are ready.
    ///
    /// # Errors
    /// [`HostError`] where no more are to be had; `ENOMEM` where the kernel gave base pages. What is ready stays.
    pub fn refill(&mut self) -> Result<usize, HostError> {
        while !self.empty.is_empty() {
            self.make_ready()?;
        }
        Ok(self.ready.len())
    }

    /// Gives the ready pages back to the machine.
    pub fn drain(&mut self) {
        for slot in std::mem::take(&mut self.ready) {
            self.clear(slot);
            self.empty.push(slot);
        }
    }

    /// Swaps one window. Looks first: what is large already or holds nothing is left alone. Looks again afterwards.
    /// Whatever fails, the guest has all its pages when it goes on.
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
        let slot = self.take_ready().map_err(refused)?;
        // Only now: a window that cannot be swapped keeps its mark.
        let allowed = self.aside.mover().allow_huge(window).map_err(refused);
        let exchanged = allowed.and_then(|()| self.exchange(window, slot));
        if exchanged.is_err() {
            self.clear(slot); // the copy in it, if it came that far, is of no use
        }
        let unavailable = exchanged?;
        let after = self.aside.mover().look(guest).map_err(refused)?;
        if !after.is_huge {
            return Err(OutcomeResult::Refused(Refusal::NotObserved));
        }
        let holes = BASE_PAGES_PER_WINDOW - before.resident;
        Ok(Swapped { unavailable, bloat: PageSize::Base4K.bytes() * u64::from(holes) })
    }

    /// A slot with a huge page: one that was ready, or one made now. It counts as empty from now on, whatever becomes of its page:
    /// what is left in it goes before it is populated again.
    fn take_ready(&mut self) -> Result<u16, HostError> {
        if self.ready.is_empty() {
            self.make_ready()?;
        }
        let slot = self.ready.pop().expect("one was made");
        self.empty.push(slot);
        Ok(slot)
    }

    fn make_ready(&mut self) -> Result<(), HostError> {
        let slot = *self.empty.last().expect("each slot is ready or empty");
        let made = self.check_page_tables(slot).and_then(|()| populate_huge(self.aside.mover(), slot));
        match made {
            Ok(()) => self.ready.extend(self.empty.pop()),
            Err(_) => {
                self.clear(slot);
                // Base pages may have left it a page table that stays: the next attempt is made with another slot.
                self.empty.rotate_right(1);
            }
        }
        made
    }

    /// Sees that page tables are given back. `slot` is one without.
    fn check_page_tables(&self, slot: u16) -> Result<(), HostError> {
        // Changed by one assignment: a panic elsewhere leaves it true. Others wait for what this one finds out.
        let mut known = self.page_tables.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == PageTables::Unknown {
            *known = find_out_page_tables(self.aside.mover(), slot)?;
        }
        match *known {
            PageTables::GivenBack => Ok(()),
            PageTables::Kept => Err(keeps_page_tables()),
            PageTables::Unknown => Err(no_huge_page()),
        }
    }

    /// The part during which the guest waits.
    fn exchange(&self, window: WindowIndex, slot: u16) -> Result<Duration, OutcomeResult> {
        let held = self.aside.hold(window).map_err(AsideError::result)?;
        self.aside.mover().copy_all(held.place(), Place::Ready(slot)).map_err(refused)?;
        held.replace_with(slot).map_err(refused)
    }

    /// If the pages stay, they are given back before the slot is populated again.
    fn clear(&self, slot: u16) {
        if let Err(error) = self.aside.mover().discard(Place::Ready(slot), ALL_PAGES) {
            tracing::warn!("a huge page can not be given back yet: {error}");
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

/// Populates a slot, and says whether with a huge page. What an earlier attempt left there goes first: the holes of the next
/// window must be zero.
fn is_populated_huge(mover: &dyn Mover, slot: u16) -> Result<bool, HostError> {
    let place = Place::Ready(slot);
    mover.discard(place, ALL_PAGES)?;
    mover.populate(slot)?;
    Ok(mover.look(place)?.is_huge)
}

/// Compares the trial slot, which has had a page table, with `slot`, which has not. Nothing stays in the trial slot.
fn find_out_page_tables(mover: &dyn Mover, slot: u16) -> Result<PageTables, HostError> {
    let found = compare(mover, slot);
    mover.discard(Place::Ready(TRIAL_SLOT), ALL_PAGES)?;
    found
}

fn compare(mover: &dyn Mover, slot: u16) -> Result<PageTables, HostError> {
    for _ in 0..COMPARISONS {
        mover.populate(TRIAL_SLOT)?;
        mover.discard(Place::Ready(TRIAL_SLOT), 0..1)?; // a huge page is split by it
        if is_populated_huge(mover, TRIAL_SLOT)? {
            return Ok(PageTables::GivenBack);
        }
        if !is_populated_huge(mover, slot)? {
            return Ok(PageTables::Unknown);
        }
    }
    Ok(PageTables::Kept)
}

fn keeps_page_tables() -> HostError {
    let source = std::io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    HostError { what: "giving back a page table (Linux 6.14)", source }
}

fn populate_huge(mover: &dyn Mover, slot: u16) -> Result<(), HostError> {
    if is_populated_huge(mover, slot)? { Ok(()) } else { Err(no_huge_page()) }
}

fn no_huge_page() -> HostError {
    HostError { what: "populating a huge page", source: std::io::Error::from_raw_os_error(libc::ENOMEM) }
}

fn refused(error: HostError) -> OutcomeResult {
    (&error).into()
}
