//! Memory in which one thread makes the contents of windows ready: huge pages populated in advance, and a buffer for
//! windows that are copied.

use std::time::Duration;

use wideleaf_policies::{Moment, PageSet, PageSize};

use super::door::Door;
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
}

/// Slots of one thread.
#[derive(Debug, Default)]
pub(super) struct Slots {
    ready: Vec<FillSlot>,
    /// Slots from which the page was moved.
    empty: Vec<FillSlot>,
    buffer: Option<FillSlot>,
    no_huge_page_before: Moment,
}

impl Slots {
    /// A huge page if there is one and it is wanted, or else the buffer, which holds what was read before.
    pub(super) fn take(&mut self, wants_huge: bool, door: &dyn Door, now: Moment) -> Result<Prepared, MapError> {
        if wants_huge {
            if self.ready.is_empty() {
                self.make_ready(door, now)?;
            }
            if let Some(slot) = self.ready.pop() {
                return Ok(Prepared { slot, is_huge: true });
            }
        }
        let buffer = self.buffer.take().map_or_else(FillSlot::map, Ok)?;
        Ok(Prepared { slot: buffer, is_huge: false })
    }

    /// Takes a slot back that was used.
    pub(super) fn give_back(&mut self, prepared: Prepared) {
        let Prepared { mut slot, is_huge } = prepared;
        if !is_huge {
            self.buffer = Some(slot);
        } else if self.empty.len() < READY_MAX && slot.discard().is_ok() {
            self.empty.push(slot);
        }
    }

    /// Makes one more huge page ready, if one is missing. Returns whether one was made.
    pub(super) fn refill(&mut self, door: &dyn Door, now: Moment) -> bool {
        let before = self.ready.len();
        before < READY_MAX && self.make_ready(door, now).is_ok() && self.ready.len() > before
    }

    fn make_ready(&mut self, door: &dyn Door, now: Moment) -> Result<(), MapError> {
        if now < self.no_huge_page_before {
            return Ok(());
        }
        let slot = self.empty.pop().map_or_else(FillSlot::map, Ok)?;
        slot.populate();
        if door.is_huge(slot.piece().start()).unwrap_or(false) {
            self.ready.push(slot);
        } else {
            // The slot goes too: on an older kernel its page table would stay, and it would never be huge again.
            self.no_huge_page_before = now + NO_HUGE_PAGE_FOR;
        }
        Ok(())
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
