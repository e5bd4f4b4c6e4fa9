//! Memory in which one thread makes the contents of windows ready: huge pages populated in advance, and a buffer for
//! windows that are copied.

use std::time::Duration;

use wideleaf_policies::{Moment, PageSet, PageSize, WindowIndex};

use super::kernel_calls::KernelCalls;
use crate::numa::placement::Source;
use crate::sys::fill_slot::FillSlot;
use crate::sys::mapping::MapError;

/// Maximum number of huge pages that a thread holds ready: 8 MiB. A burst of touches takes them; between two bursts
/// the thread makes new ones, 0.1 to 0.2 ms each.
const READY_MAX: usize = 4;

/// Time for which a thread asks for no huge page after the host had none. Searching for one compacts memory, for which
/// a waiting guest would pay.
const NO_HUGE_PAGE_FOR: Duration = Duration::from_millis(20);

/// A place for the contents of a window.
pub(super) struct Prepared {
    pub slot: FillSlot,
    /// Whether it is one huge page, and reads zero.
    pub is_huge: bool,
    /// Source of that page.
    source: Source,
}

/// Slots of one thread.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Slots with a huge page, and the sources of the pages.
    ready: Vec<(FillSlot, Source)>,
    /// Slots from which the page was moved, and the sources by which they are placed.
    empty: Vec<(FillSlot, Source)>,
    /// Source of the latest window, for pages that are made ready in advance.
    latest: Source,
    buffer: Option<FillSlot>,
    no_huge_page_before: Moment,
}

impl Slots {
    /// A huge page for the window if there is one and it is wanted, or else the buffer, which holds what was read
    /// before.
    pub(super) fn take(
        &mut self,
        wants_huge: bool,
        window: WindowIndex,
        kernel: &dyn KernelCalls,
        now: Moment,
    ) -> Result<Prepared, MapError> {
        let source = kernel.source_of(window);
        self.latest = source;
        if wants_huge {
            if self.ready_of(source).is_none() {
                self.make_ready(source, kernel, now)?;
            }
            if let Some(at) = self.ready_of(source) {
                let (slot, _) = self.ready.remove(at);
                return Ok(Prepared { slot, is_huge: true, source });
            }
        }
        let buffer = self.buffer.take().map_or_else(FillSlot::map, Ok)?;
        Ok(Prepared { slot: buffer, is_huge: false, source })
    }

    /// Place in the list of the latest ready page of this source.
    fn ready_of(&self, source: Source) -> Option<usize> {
        self.ready.iter().rposition(|(_, of)| *of == source)
    }

    /// Takes a slot back that was used.
    pub(super) fn give_back(&mut self, prepared: Prepared) {
        let Prepared { mut slot, is_huge, source } = prepared;
        if !is_huge {
            self.buffer = Some(slot);
        } else if self.empty.len() < READY_MAX && slot.discard().is_ok() {
            self.empty.push((slot, source));
        }
    }

    /// Makes one more huge page ready, if one is missing. Returns whether one was made.
    pub(super) fn refill(&mut self, kernel: &dyn KernelCalls, now: Moment) -> bool {
        let before = self.ready.len();
        before < READY_MAX && self.make_ready(self.latest, kernel, now).is_ok() && self.ready.len() > before
    }

    fn make_ready(&mut self, source: Source, kernel: &dyn KernelCalls, now: Moment) -> Result<(), MapError> {
        if now < self.no_huge_page_before {
            return Ok(());
        }
        if self.ready.len() >= READY_MAX {
            self.ready.remove(0); // all are of other nodes
        }
        let slot = self.placed_slot(source, kernel)?;
        slot.populate();
        if kernel.is_huge(slot.piece().start()).unwrap_or(false) {
            self.ready.push((slot, source));
        } else {
            // The slot goes too: on an older kernel its page table would stay, and it would never be huge again.
            self.no_huge_page_before = now + NO_HUGE_PAGE_FOR;
        }
        Ok(())
    }

    /// An empty slot that gets its pages from this source.
    fn placed_slot(&mut self, source: Source, kernel: &dyn KernelCalls) -> Result<FillSlot, MapError> {
        let (slot, placed_by) = match self.empty.pop() {
            Some((slot, placed_by)) => (slot, Some(placed_by)),
            None => (FillSlot::map()?, None),
        };
        if placed_by != Some(source) {
            let placed = kernel.place(&slot, source);
            placed.map_err(|source| MapError::Call { call: "mbind of memory for a window", source })?;
        }
        Ok(slot)
    }
}

/// Clears the pages of a slot that are not in the set.
pub(super) fn clear_others(slot: &mut FillSlot, pages: PageSet) {
    let page = PageSize::Base4K.bytes().as_usize();
    let bytes = slot.bytes();
    for run in PageSet::ALL.without(pages).runs() {
        bytes[usize::from(run.start) * page..usize::from(run.end) * page].fill(0);
    }
}
