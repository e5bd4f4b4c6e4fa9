//! Placing the contents of one window, which are ready and checked, and letting it go.

use std::io;
use std::ops::Range;
use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Hva, PageSet, PageSize, PerTenThousand, WindowIndex};

use super::SavedWindow;
use super::kernel_calls::KernelCalls;
use super::rows::Row;
use super::shared::Shared;
use super::slots::{Prepared, clear_others};
use super::window_states::{Mapping, Settled};
use crate::backing::BackingKind;
use crate::host::Host;
use crate::sys::fill_slot::FillSlot;

const WINDOW: Bytes = PageSize::Huge2M.bytes();
const ALL: Range<u16> = 0..BASE_PAGES_PER_WINDOW;

/// Maximum number of absent pages of a window that gets a huge page although it had none: an eighth of it, which the
/// huge page would make resident for nothing.
const ABSENT_PAGES_MAX: u16 = BASE_PAGES_PER_WINDOW / 8;

/// Share of samples from which on a window counts as hot: it was touched in every second one.
const HOT_FROM: PerTenThousand = PerTenThousand::new(5_000);

/// Maximum number of repetitions of a call that the kernel asks to repeat (`EAGAIN`).
const REPETITIONS_MAX: u32 = 100;
/// Time between these repetitions: the mapping is changed by another thread, or a page is locked.
const REPETITION_PAUSE: Duration = Duration::from_micros(20);

/// Number of attempts to place pages while the host has no memory for them.
const MEMORY_ATTEMPTS: u32 = 40;
/// Time between these attempts: in all, the guest waits some seconds before it is given up.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Place of a page in the bytes of its window.
pub(super) fn place_of(page: u16) -> Range<usize> {
    let bytes = PageSize::Base4K.bytes().as_usize();
    usize::from(page) * bytes..(usize::from(page) + 1) * bytes
}

/// Whether a window gets a huge page: as before, if it was on one. One that was on base pages gets a huge page if
/// the guest uses it often (that is what the page is good for) and nearly all of it (or the page would take memory that
/// the guest did not use). All others get base pages, and their holes stay holes.
pub(super) fn wants_huge(saved: &SavedWindow) -> bool {
    let is_full = saved.pages.len() >= BASE_PAGES_PER_WINDOW - ABSENT_PAGES_MAX;
    saved.was_huge || saved.heat >= HOT_FROM && is_full
}

/// Result of placing a window's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub settled: Settled,
    /// Number of calls that were refused.
    pub refused: u64,
    /// Whether all pages went in by moves from a huge page.
    pub was_moved: bool,
}

/// Everything for placing one window.
pub(super) struct Filling<'a> {
    pub shared: &'a Shared,
    pub kernel: &'a dyn KernelCalls,
    pub row: Row,
    pub window: WindowIndex,
    pub saved: SavedWindow,
    /// Whether a thread waits for the window, so that it has a page table.
    pub is_touched: bool,
}

impl Filling<'_> {
    /// Address of the window.
    pub(super) fn start(&self) -> Hva {
        self.shared.rows.place(&(self.row..self.row + 1)).0
    }

    /// Bytes of the window that the saved RAM has.
    pub(super) fn stored(&self) -> Bytes {
        PageSize::Base4K.bytes() * u64::from(self.saved.pages.len())
    }

    /// Whether the contents are to be read to a huge page, which is then moved in.
    pub(super) fn is_for_move(&self) -> bool {
        let is_split_there = self.is_touched && self.shared.tables_stay();
        self.shared.can_move && wants_huge(&self.saved) && !self.saved.has_others && !is_split_there
    }

    /// Puts the prepared contents into the window, and lets it go. The caller wakes the threads of a window that is
    /// kept.
    ///
    /// # Errors
    /// Error of the kernel, which had no memory for the pages for seconds. The pages that are there are right; the
    /// window is still registered.
    pub(super) fn place(&self, prepared: &mut Prepared) -> io::Result<Placed> {
        let may_cut = self.shared.states.may_cut();
        let mut refused = 0;
        let mut is_marked = false;
        if prepared.is_huge {
            is_marked = may_cut && self.kernel.allow_huge(self.window).is_ok();
            // Without it the contents are right all the same.
            refused += u64::from(self.kernel.drop_page_table(self.window).is_err());
        }
        let moved = if prepared.is_huge { self.move_in(&prepared.slot) } else { 0..0 };
        let was_moved = moved == ALL;
        if !was_moved {
            refused += u64::from(prepared.is_huge);
            self.copy_in(&mut prepared.slot, moved.end)?;
        }
        let mapping = if is_marked { Mapping::Huge } else { Mapping::Base };
        Ok(Placed { settled: self.let_go(may_cut, mapping), refused, was_moved })
    }

    /// Moves all pages in. Returns those that were moved before the kernel refused one, if it did.
    fn move_in(&self, slot: &FillSlot) -> Range<u16> {
        let moved = in_steps(self.shared, ALL, |pages| self.kernel.move_in(slot, self.window, pages));
        match moved {
            Ok(()) => ALL,
            Err((page, error)) => {
                tracing::debug!("{}: page {page} is copied: {error}", self.window);
                0..page
            }
        }
    }

    /// Copies the stored pages from `first` on, or all pages where the kernel can only make whole ones.
    fn copy_in(&self, slot: &mut FillSlot, first: u16) -> io::Result<()> {
        let is_whole = self.shared.ram.backing().kind() == BackingKind::Hugetlb;
        if is_whole {
            clear_others(slot, self.saved.pages);
        }
        let pages = if is_whole { PageSet::ALL } else { self.saved.pages };
        for run in pages.runs().filter(|run| run.end > first) {
            self.copy_run(slot, run.start.max(first)..run.end)?;
        }
        Ok(())
    }

    /// Copies neighbouring pages; waits for memory if there is none.
    fn copy_run(&self, slot: &FillSlot, run: Range<u16>) -> io::Result<()> {
        let mut run = run;
        for attempt in 1.. {
            let copied = in_steps(self.shared, run.clone(), |pages| self.copy_some(slot, pages));
            match copied {
                Ok(()) => return Ok(()),
                Err((_, error)) if attempt == MEMORY_ATTEMPTS => return Err(error),
                Err((page, _)) => {
                    run.start = page;
                    self.shared.host.sleep(MEMORY_PAUSE);
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Copies as many of these pages as one call is to copy.
    fn copy_some(&self, slot: &FillSlot, pages: Range<u16>) -> io::Result<u16> {
        let end = if self.shared.config.is_page_by_page { pages.start + 1 } else { pages.end };
        self.kernel.copy_in(slot, self.window, pages.start..end)
    }

    /// Lets the kernel answer the window's touches, which wakes its threads. If that would take a mapping too many, the
    /// window is kept: the caller settles it first and then wakes its threads. A thread that was woken before would
    /// touch a hole again, and its message would be taken for one of a window that another thread is about to fill.
    pub(super) fn let_go(&self, may_cut: bool, mapping: Mapping) -> Settled {
        if may_cut && self.kernel.let_go(self.start(), WINDOW).is_ok() {
            Settled::LetGo(mapping)
        } else {
            Settled::Kept
        }
    }
}

/// Does all pages in as many steps as that takes. A page that is there already is right: an earlier step put it there.
///
/// # Errors
/// The first page that was refused, and why.
pub(super) fn in_steps(
    shared: &Shared,
    mut pages: Range<u16>,
    mut step: impl FnMut(Range<u16>) -> io::Result<u16>,
) -> Result<(), (u16, io::Error)> {
    let mut repetitions = 0;
    while !pages.is_empty() {
        match step(pages.clone()) {
            // A page that was skipped would read zero.
            Ok(0) => return Err((pages.start, io::ErrorKind::WriteZero.into())),
            Ok(done) => pages.start += done,
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => pages.start += 1,
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && repetitions < REPETITIONS_MAX => {
                repetitions += 1;
                shared.host.sleep(REPETITION_PAUSE);
            }
            Err(error) => return Err((pages.start, error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_large_if_it_was_or_if_it_is_hot_and_full() {
        let pages = |count: u16| (0..count).collect::<PageSet>();
        let window = |count, was_huge, heat| {
            let heat = PerTenThousand::new(heat);
            SavedWindow { pages: pages(count), was_huge, heat, ..SavedWindow::default() }
        };
        assert!(wants_huge(&window(1, true, 0)), "as it was, even if most of it is zero");
        assert!(wants_huge(&window(512, false, 5_000)) && wants_huge(&window(448, false, 10_000)));
        assert!(!wants_huge(&window(512, false, 4_999)), "full, and rarely used");
        assert!(!wants_huge(&window(447, false, 10_000)), "hot, with many holes");
    }
}
