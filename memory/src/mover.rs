//! Interface to the kernel for moving the pages of one VM's RAM, whole windows at a time, without copying, while the
//! guest runs (`UFFDIO_MOVE`, Linux 6.8). All memory operations of the access sensor and the swap go through
//! [`Mover`], so that the fake one can fail at each call.
//!
//! ```text
//!   Guest(window)     watched: a thread that touches a missing page waits
//!      ▲   │
//!      │   └── move ──▶  Aside(slot)   never touched; always watched, since pages are moved to watched memory only
//!      │                     │
//!      │                     └── copy ──▶  Ready(slot)   a huge page, populated and zero
//!      └────────────── move ────────────────  Base(slot)   base pages, populated
//! ```
//!
//! Pages may also be moved to the guest from the slot of another window that was aside and has got other pages since.

use std::ops::Range;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, WindowIndex};

use crate::host::HostError;
use crate::numa::placement::Source;

pub mod linux;

/// Maximum number of windows aside at the same time. It bounds what a sample can take away from a guest (128 MiB),
/// and the mappings that watching costs (three a window, of 65530).
pub const ASIDE_SLOTS: u16 = 64;
/// Maximum number of huge pages held ready: 16 MiB, a few milliseconds of swapping.
pub const READY_SLOTS: u16 = 8;
/// The ready slot after these, for testing the treatment of page tables: it has had one.
pub const TRIAL_SLOT: u16 = READY_SLOTS;

/// Number of slots for base pages, one for each of as many swappers as there can be.
pub const BASE_SLOTS: u16 = READY_SLOTS;

/// All pages of a window.
pub const ALL_PAGES: Range<u16> = 0..BASE_PAGES_PER_WINDOW;

/// Places of a window's pages. Each is 2 MiB and begins at a multiple of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Address at which the guest sees it.
    Guest(WindowIndex),
    /// Slot outside the reach of all threads, below [`ASIDE_SLOTS`].
    Aside(u16),
    /// Slot with a huge page ready, below [`READY_SLOTS`], or [`TRIAL_SLOT`].
    Ready(u16),
    /// Slot with base pages ready, below [`BASE_SLOTS`].
    Base(u16),
}

/// Backing of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceBacking {
    /// Number of base pages present, without the shared zero page.
    pub resident: u16,
    /// Whether it is one huge page.
    pub is_huge: bool,
}

/// Runs of neighbours of ascending pages.
pub(crate) fn runs_of(pages: impl IntoIterator<Item = u16>) -> Vec<Range<u16>> {
    let mut runs: Vec<Range<u16>> = Vec::new();
    for page in pages {
        match runs.last_mut().filter(|run| run.end == page) {
            Some(run) => run.end += 1,
            None => runs.push(page..page + 1),
        }
    }
    runs
}

/// The pages of one VM's RAM.
pub trait Mover: Send + Sync {
    /// Makes a thread that touches a missing page of the window wait until [`Mover::unwatch`].
    ///
    /// # Errors
    /// [`HostError`]; `EBUSY` if another userfaultfd watches it.
    fn watch(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Lets the kernel answer touches of missing pages with zero pages again, and wakes waiting threads.
    ///
    /// # Errors
    /// [`HostError`]; then no thread is woken.
    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Wakes the threads that wait for a page of the window. If the page is still missing and watched,
    /// they wait again.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn wake(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Moves pages to the same offsets of a watched window; holes stay holes. Returns the number of pages done,
    /// including holes, at least one. Wakes no thread.
    ///
    /// # Errors
    /// [`HostError`] if no page was done; `EAGAIN` asks for a retry, `EEXIST` says that the first page
    /// is there already.
    fn move_pages(&self, from: Place, to: Place, pages: Range<u16>) -> Result<u16, HostError>;

    /// Fills a missing page of a watched window with a copy, if it cannot be moved. Wakes no thread.
    ///
    /// # Errors
    /// [`HostError`]; `EEXIST` if the page is there already.
    fn copy_page(&self, from: Place, to: Place, page: u16) -> Result<(), HostError>;

    /// Copies the pages of `from` into a populated `to`.
    ///
    /// # Errors
    /// [`HostError`] if the pages cannot be determined; then nothing is copied.
    fn copy_all(&self, from: Place, to: Place) -> Result<(), HostError>;

    /// Fills a populated place with zeroes.
    ///
    /// # Errors
    /// [`HostError`]: nothing or a part was filled.
    fn clear(&self, place: Place) -> Result<(), HostError>;

    /// Gives pages back. A whole window's empty page table goes with them if the kernel reclaims it (Linux 6.14).
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn discard(&self, place: Place, pages: Range<u16>) -> Result<(), HostError>;

    /// The pages that exist in any form, including swapped ones, ascending.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn held(&self, place: Place) -> Result<Vec<Range<u16>>, HostError>;

    /// Number of pages that hold data: present or swapped out, without the shared zero page.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn occupied(&self, place: Place) -> Result<u16, HostError>;

    /// The present pages that hold only zeroes when they are read, ascending, and the number of bytes read to find
    /// them. The shared zero page does not count: there is nothing to give back.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn zero_pages(&self, place: Place) -> Result<(Vec<Range<u16>>, Bytes), HostError>;

    /// Backing of the place.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn look(&self, place: Place) -> Result<PlaceBacking, HostError>;

    /// Lifts a window's mark `MADV_NOHUGEPAGE`: under it the kernel makes a page table at the first touch, and a huge
    /// page cannot be moved under a page table.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn allow_huge(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Marks a window `MADV_NOHUGEPAGE`: neither a fault nor khugepaged gives it a huge page. Keeps the pages that it
    /// has.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn forbid_huge(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Source of the pages that a window gets: those of another one lie on other NUMA nodes than its memory policy
    /// says.
    fn source_of(&self, _: WindowIndex) -> Source {
        Source::default()
    }

    /// Faults in all pages of a slot for base pages, from this source. Their contents are undefined.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn populate_base(&self, slot: u16, from: Source) -> Result<(), HostError>;

    /// Faults in a ready slot, as a huge page if the source has one; otherwise perhaps only a part of it.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn populate(&self, slot: u16, from: Source) -> Result<(), HostError>;

    /// Appends the windows in which a thread has started to wait since the last call, once for each
    /// thread. Never blocks.
    ///
    /// # Errors
    /// [`HostError`] if the messages cannot be read or understood.
    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError>;
}
