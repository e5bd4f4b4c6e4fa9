//! The calls of the kernel for a window that is filled, so that a test can have each of them fail.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

use crate::host::{Advice, PageRun};
use crate::numa::placement::Source;
use crate::region::GuestRam;
use crate::sys::fill_slot::FillSlot;
use crate::sys::mapping::Piece;
use crate::sys::userfaultfd::{Message, Userfaultfd};
use crate::sys::{madvise::madvise, pagemap};

const WINDOW: Bytes = PageSize::Huge2M.bytes();
const PAGE: Bytes = PageSize::Base4K.bytes();

/// Calls of the kernel for the windows of one VM. None of them touches guest RAM as a thread of the guest does, so
/// none can wait for an answer of its own thread.
pub(super) trait KernelCalls: Send + Sync {
    /// Address of a page for which a thread waits, if there is an unread message. Never blocks.
    fn next_touch(&self) -> io::Result<Option<Hva>>;

    /// Lets the kernel make a huge page in the window (`MADV_HUGEPAGE`).
    fn allow_huge(&self, window: WindowIndex) -> io::Result<()>;

    /// Gives back the page table of a window that has no page (`MADV_DONTNEED`).
    fn drop_page_table(&self, window: WindowIndex) -> io::Result<()>;

    /// Moves these pages of a slot to the window. Returns the number of pages done. Wakes no thread.
    fn move_in(&self, slot: &FillSlot, window: WindowIndex, pages: Range<u16>) -> io::Result<u16>;

    /// Fills these missing pages of the window with copies. Returns the number of pages done. Wakes no thread.
    fn copy_in(&self, slot: &FillSlot, window: WindowIndex, pages: Range<u16>) -> io::Result<u16>;

    /// Maps the zero page at a missing page, and wakes the threads that wait for it.
    fn zero_page(&self, page: Hva) -> io::Result<()>;

    /// Lets the kernel answer the touches of a range of windows from now on, and wakes all threads that wait there.
    fn let_go(&self, start: Hva, bytes: Bytes) -> io::Result<()>;

    /// Wakes the threads that wait in a range; they retry.
    fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()>;

    /// Source of the pages that a window gets.
    fn source_of(&self, window: WindowIndex) -> Source;

    /// Has the pages of an empty slot come from this source.
    fn place(&self, slot: &FillSlot, source: Source) -> io::Result<()>;

    /// Whether one huge page is mapped at the whole slot or window.
    fn is_huge(&self, start: Hva) -> io::Result<bool>;

    /// Descriptor that is readable when a thread waits.
    fn touches(&self) -> BorrowedFd<'_>;
}

/// The real calls.
#[derive(Debug)]
pub(super) struct LinuxCalls {
    pub uffd: Userfaultfd,
    pub pagemap: File,
    pub ram: Arc<GuestRam>,
}

fn part<'a>(of: Piece<'a>, pages: &Range<u16>) -> Piece<'a> {
    of.part(PAGE * u64::from(pages.start), PAGE * pages.len() as u64)
}

fn page_count(bytes: Bytes) -> u16 {
    u16::try_from(bytes.pages(PageSize::Base4K)).expect("a window has 512 pages")
}

impl KernelCalls for LinuxCalls {
    fn next_touch(&self) -> io::Result<Option<Hva>> {
        match self.uffd.read_one()? {
            Some(Message::Fault(page)) => Ok(Some(page)),
            Some(other) => Err(io::Error::other(format!("unexpected message {other:?}"))),
            None => Ok(None),
        }
    }

    fn allow_huge(&self, window: WindowIndex) -> io::Result<()> {
        madvise(self.ram.window(window).start(), WINDOW, Advice::HugePage)
    }

    fn drop_page_table(&self, window: WindowIndex) -> io::Result<()> {
        self.ram.window(window).discard()
    }

    fn move_in(&self, slot: &FillSlot, window: WindowIndex, pages: Range<u16>) -> io::Result<u16> {
        let moved = self.uffd.move_pages(part(slot.piece(), &pages), part(self.ram.window(window), &pages));
        moved.map(page_count)
    }

    fn copy_in(&self, slot: &FillSlot, window: WindowIndex, pages: Range<u16>) -> io::Result<u16> {
        let copied = self.uffd.copy_pages(part(slot.piece(), &pages), part(self.ram.window(window), &pages));
        copied.map(page_count)
    }

    fn zero_page(&self, page: Hva) -> io::Result<()> {
        self.uffd.zero_page(page, PAGE)
    }

    fn let_go(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        self.uffd.unregister(start, bytes)?;
        // Unregistering wakes before it lets go: a thread that touches a page in between waits again.
        self.uffd.wake(start, bytes)
    }

    fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        self.uffd.wake(start, bytes)
    }

    fn source_of(&self, window: WindowIndex) -> Source {
        self.ram.placement().source_of(window)
    }

    fn place(&self, slot: &FillSlot, source: Source) -> io::Result<()> {
        let policy = self.ram.placement().policy_of(source);
        policy.map_or(Ok(()), |policy| policy.apply(slot.piece().start(), WINDOW))
    }

    fn is_huge(&self, start: Hva) -> io::Result<bool> {
        let mut runs: Vec<PageRun> = Vec::new();
        pagemap::scan(&self.pagemap, start, WINDOW, &mut runs)?;
        let huge = runs.iter().filter(|run| run.is_huge).map(|run| page_count(run.bytes)).sum::<u16>();
        Ok(huge == BASE_PAGES_PER_WINDOW)
    }

    fn touches(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}
