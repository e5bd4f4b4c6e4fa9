//! The dirty logs of all memslots during a save.
//!
//! ```text
//!   log was        during the save                          afterwards
//!   off            on, for the manager a log of others      off
//!   on, manager's  borrowed: for the manager one of others  the manager's again, still on
//!   on, others'    refused: OfOthers
//! ```
//!
//! The manager's guard leaves logs of others alone ([`crate::second_level::guard`]), so a manager that does not rest
//! takes nothing out of these.

use std::sync::Arc;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, GpaRange, PageSet, PageSize, WindowIndex};

use super::used::{self, add};
use super::{PagesByWindow, SaveError};
use crate::claims::{Claims, PartClaim};
use crate::region::GuestRam;
use crate::second_level::{SecondLevel, SecondLevelError, Slot, SlotId};

/// Words of a log for one window.
const WORDS: usize = BASE_PAGES_PER_WINDOW as usize / u64::BITS as usize;

/// Logs that are on. Dropped, those that were off are off again.
pub(super) struct Logs<'a> {
    second_level: &'a dyn SecondLevel,
    claims: &'a Arc<Claims>,
    slots: Vec<Slot>,
    switched_on: Vec<SlotId>,
    borrowed: Vec<SlotId>,
    /// Claims on the logs: no giant is moved, since its mover would need them.
    _claimed: Vec<PartClaim>,
}

impl<'a> Logs<'a> {
    /// Switches all logs on that are off, and empties the others: from now on they have every write.
    ///
    /// # Errors
    /// [`SaveError`]; then each log is as it was.
    pub fn start(second_level: &'a dyn SecondLevel, ram: &'a GuestRam) -> Result<Logs<'a>, SaveError> {
        let slots = second_level.slots();
        check_coverage(ram, &slots)?;
        let claims = ram.claims();
        let claim = |slot: &Slot| claims.dirty_log(slot.range).map_err(|_| SecondLevelError::Claimed(slot.id));
        let claimed = slots.iter().map(claim).collect::<Result<_, _>>()?;
        let (switched_on, borrowed) = Default::default();
        let mut logs = Logs { second_level, claims, slots, switched_on, borrowed, _claimed: claimed };
        for slot in logs.slots.clone() {
            logs.start_one(slot)?;
        }
        Ok(logs)
    }

    fn start_one(&mut self, slot: Slot) -> Result<(), SecondLevelError> {
        if !slot.is_dirty_logged {
            self.second_level.set_dirty_log(slot.id, true)?;
            self.switched_on.push(slot.id);
            return Ok(());
        }
        if !self.claims.own_logs().remove(&slot.id) {
            return Err(SecondLevelError::OfOthers(slot.id));
        }
        self.borrowed.push(slot.id);
        self.second_level.take_dirty_log(slot.id).map(drop)
    }

    /// Pages written since the last call, or since the start.
    ///
    /// # Errors
    /// [`SecondLevelError`]; what was written is then not known any more.
    pub fn take(&self) -> Result<PagesByWindow, SecondLevelError> {
        let mut pages = PagesByWindow::new();
        for slot in &self.slots {
            add_log(&mut pages, slot, &self.second_level.take_dirty_log(slot.id)?);
        }
        Ok(pages)
    }

    /// Switches off what `start` switched on. Returns the number of logs that stay on because KVM refuses.
    pub fn stop(mut self) -> u32 {
        self.switch_off()
    }

    fn switch_off(&mut self) -> u32 {
        let mut refused = 0;
        while let Some(slot) = self.switched_on.pop() {
            let off = || self.second_level.set_dirty_log(slot, false);
            if let Err(error) = off().or_else(|_| off()) {
                tracing::warn!(slot = slot.0, %error, "the dirty log stays on");
                // The manager may fetch it and switch it off.
                self.claims.own_logs().insert(slot);
                refused += 1;
            }
        }
        self.claims.own_logs().extend(self.borrowed.drain(..));
        refused
    }
}

impl Drop for Logs<'_> {
    fn drop(&mut self) {
        self.switch_off();
    }
}

/// # Errors
/// [`SaveError::NoSlot`] with the first window that has a page without a memslot.
fn check_coverage(ram: &GuestRam, slots: &[Slot]) -> Result<(), SaveError> {
    let (mut logged, mut needed) = (PagesByWindow::new(), PagesByWindow::new());
    slots.iter().for_each(|slot| add(&mut logged, slot.range));
    ram.ranges().iter().for_each(|range| add(&mut needed, range.gpa));
    let has_all = |window: &WindowIndex| {
        let of = |pages: &PagesByWindow| pages.get(window).copied().unwrap_or_default();
        of(&needed).without(of(&logged)).is_empty()
    };
    match used::windows(ram).find(|window| !has_all(window)) {
        Some(window) => Err(SaveError::NoSlot { window }),
        None => Ok(()),
    }
}

/// Adds the pages of a slot's log.
fn add_log(pages: &mut PagesByWindow, slot: &Slot, log: &[u64]) {
    if slot.range.start().is_aligned_to(PageSize::Huge2M) {
        let first = WindowIndex::containing(slot.range.start()).get();
        for (words, window) in log.chunks(WORDS).zip(first..) {
            let set = PageSet::from(std::array::from_fn(|word| words.get(word).copied().unwrap_or(0)));
            if !set.is_empty() {
                let of_window = pages.entry(WindowIndex::new(window)).or_default();
                *of_window = of_window.with(set);
            }
        }
        return;
    }
    let page = PageSize::Base4K.bytes();
    for (word, index) in log.iter().zip(0_u64..) {
        for bit in (0..u64::from(u64::BITS)).filter(|bit| word >> bit & 1 == 1) {
            let offset: Bytes = page * (index * u64::from(u64::BITS) + bit);
            GpaRange::new(slot.range.start() + offset, page).into_iter().for_each(|page| add(pages, page));
        }
    }
}
