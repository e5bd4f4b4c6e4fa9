//! The door to the kernel for moving the pages of one VM's RAM: whole windows at a time, without copying, while the guest
//! runs (`UFFDIO_MOVE`, Linux 6.8). Everything the access sensor and the swap do to memory goes through [`Mover`], so that
//! the fake one can fail at each call.
//!
//! ```text
//!   Guest(window)     watched: who touches a page that is not there waits
//!      ▲   │
//!      │   └── move ──▶  Aside(slot)   nobody touches it; always watched, since pages are moved to watched memory only
//!      │                     │
//!      │                     └── copy ──▶  Ready(slot)   a huge page, populated and zero
//!      └────────────── move ──────────────────┘
//! ```

use std::ops::Range;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, WindowIndex};

use crate::host::HostError;

pub mod failing;
pub mod fake;
pub mod linux;

/// How many windows can be aside at once. It bounds what a sample can take away from a guest (128 MiB), and the mappings
/// that watching costs (three a window, of 65530).
pub const ASIDE_SLOTS: u16 = 64;
/// How many huge pages can be held ready: 16 MiB, a few milliseconds of swapping.
pub const READY_SLOTS: u16 = 8;
/// The ready slot behind these, where it is tried out what becomes of page tables: it has had one.
pub const TRIAL_SLOT: u16 = READY_SLOTS;

/// All pages of a window.
pub const ALL_PAGES: Range<u16> = 0..BASE_PAGES_PER_WINDOW;

/// Where a window's pages can be. Each is 2 MiB and begins at a multiple of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Where the guest sees it.
    Guest(WindowIndex),
    /// Where nobody does, below [`ASIDE_SLOTS`].
    Aside(u16),
    /// Where huge pages are kept ready, below [`READY_SLOTS`], or [`TRIAL_SLOT`].
    Ready(u16),
}

/// What a window is backed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Base pages present, the shared zero page not counted.
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
    /// From now on, who touches a page of the window that is not there waits until [`Mover::unwatch`].
    ///
    /// # Errors
    /// [`HostError`]; `EBUSY` where somebody else watches it.
    fn watch(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Who touches a missing page gets a zero page from the kernel again. Whoever waits is woken.
    ///
    /// # Errors
    /// [`HostError`]; nobody is woken then.
    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Wakes whoever waits for a page of the window. Where the page is still missing and watched, they wait again.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn wake(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Moves pages to the same place of a watched window; holes stay holes. Returns how many pages from the first it came,
    /// holes counted, at least one. Wakes nobody.
    ///
    /// # Errors
    /// [`HostError`] where it did not come anywhere; `EAGAIN` asks to be tried again, `EEXIST` says that the first page is
    /// there already.
    fn move_pages(&self, from: Place, to: Place, pages: Range<u16>) -> Result<u16, HostError>;

    /// Fills a missing page of a watched window with a copy: for what cannot be moved. Wakes nobody.
    ///
    /// # Errors
    /// [`HostError`]; `EEXIST` where the page is there already.
    fn copy_page(&self, from: Place, to: Place, page: u16) -> Result<(), HostError>;

    /// Copies what `from` holds into a populated `to`.
    ///
    /// # Errors
    /// [`HostError`] where what it holds cannot be told; nothing is copied then.
    fn copy_all(&self, from: Place, to: Place) -> Result<(), HostError>;

    /// Gives pages back. A whole window's empty page table goes with them where the kernel reclaims those (Linux 6.14).
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn discard(&self, place: Place, pages: Range<u16>) -> Result<(), HostError>;

    /// The pages that are anything at all, swapped ones too, ascending.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn held(&self, place: Place) -> Result<Vec<Range<u16>>, HostError>;

    /// The pages that are present and hold only zeroes when they are read, ascending, and how many bytes were read to
    /// find them. The shared zero page is not one of them: there is nothing to give back.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn zero_pages(&self, place: Place) -> Result<(Vec<Range<u16>>, Bytes), HostError>;

    /// What the place is backed with.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn look(&self, place: Place) -> Result<Look, HostError>;

    /// Lifts a window's mark `MADV_NOHUGEPAGE`: under it the kernel makes a page table at the first touch, and a huge page
    /// cannot be moved to where one is.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn allow_huge(&self, window: WindowIndex) -> Result<(), HostError>;

    /// Faults in a ready slot, as a huge page if one is to be had; otherwise perhaps a part of it only.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn populate(&self, slot: u16) -> Result<(), HostError>;

    /// Appends the windows in which somebody waits since the last call, once for each who waits. Never blocks.
    ///
    /// # Errors
    /// [`HostError`] where the messages cannot be read or understood.
    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError>;
}
