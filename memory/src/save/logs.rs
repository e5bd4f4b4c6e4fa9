//! The dirty logs of all memslots during a save.
//!
//! ```text
//!   log was        during the save                          afterwards
//!   off            on, for the manager a foreign log        off
//!   on, manager's  borrowed: for the manager a foreign log  the manager's again, still on
//!   on, others'    refused: OfOthers
//! ```
//!
//! Where KVM can ([`SecondLevel::start_dirty_log_set`]), a log begins with all pages set, and switching it on changes
//! no mapping. A bit is cleared at two places only, so that no write is lost:
//! - right before its page is copied: a write after that is in the log again;
//! - at the start, of pages that were not in use, before RAM is scanned for the pages in use.
//!
//! So KVM splits a large mapping when the save comes to its window, not before.
//!
//! The manager's guard leaves foreign logs alone ([`crate::second_level::guard`]), so a manager that does not rest
//! takes nothing out of these.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Gfn, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

use super::used::{self, add};
use super::{PagesByWindow, SaveError};
use crate::claims::{Claims, PartClaim};
use crate::region::GuestRam;
use crate::second_level::{SecondLevel, SecondLevelError, Slot, SlotId};

/// Words of a log for one window.
const WORDS: usize = BASE_PAGES_PER_WINDOW as usize / BITS;
const BITS: usize = u64::BITS as usize;

/// Logs that are on. Dropped, those that were off are off again.
pub(super) struct Logs<'a> {
    second_level: &'a dyn SecondLevel,
    claims: &'a Arc<Claims>,
    slots: Vec<Slot>,
    switched_on: Vec<SlotId>,
    borrowed: Vec<SlotId>,
    /// Those of `switched_on` that began with all pages set.
    began_set: BTreeSet<SlotId>,
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
        let (switched_on, borrowed, began_set) = Default::default();
        let mut logs = Logs { second_level, claims, slots, switched_on, borrowed, began_set, _claimed: claimed };
        for slot in logs.slots.clone() {
            logs.start_one(slot)?;
        }
        Ok(logs)
    }

    fn start_one(&mut self, slot: Slot) -> Result<(), SecondLevelError> {
        if !slot.is_dirty_logged {
            if self.second_level.start_dirty_log_set(slot.id)? {
                self.began_set.insert(slot.id);
            } else {
                self.second_level.set_dirty_log(slot.id, true)?;
            }
            self.switched_on.push(slot.id);
            return Ok(());
        }
        if !self.claims.own_logs().remove(&slot.id) {
            return Err(SecondLevelError::OfOthers(slot.id));
        }
        self.borrowed.push(slot.id);
        self.second_level.take_dirty_log(slot.id).map(drop)
    }

    /// Pages written since the last call, or since the start; of logs that began set, pages that were not cleared since
    /// they were written.
    ///
    /// # Errors
    /// [`SecondLevelError`]; what was written is then not known any more.
    pub fn take(&self) -> Result<PagesByWindow, SecondLevelError> {
        let mut pages = PagesByWindow::new();
        for slot in &self.slots {
            let log = match self.began_set.contains(&slot.id) {
                true => self.second_level.read_dirty_log(slot.id)?,
                false => self.second_level.take_dirty_log(slot.id)?,
            };
            add_log(&mut pages, slot, &log);
        }
        Ok(pages)
    }

    /// Number of logs that began with all pages set.
    pub fn began_set(&self) -> u32 {
        self.began_set.len() as u32
    }

    /// Clears the bits of all pages that are not in `used`, in logs that began set. The caller looks for pages in use
    /// again afterwards.
    ///
    /// # Errors
    /// [`SecondLevelError`].
    pub fn clear_unused(&self, used: &PagesByWindow) -> Result<(), SecondLevelError> {
        for slot in self.slots.iter().filter(|slot| self.began_set.contains(&slot.id)) {
            let mut unused = vec![u64::MAX; words_in(slot)];
            for (window, pages) in used.range(windows_of(slot)) {
                pages_in(slot, *window, *pages).for_each(|page| unused[page / BITS] &= !(1 << (page % BITS)));
            }
            self.second_level.clear_dirty_log(slot.id, 0, &unused)?;
        }
        Ok(())
    }

    /// Clears the bits of pages that are about to be copied, in logs that began set.
    ///
    /// # Errors
    /// [`SecondLevelError`].
    pub fn clear(&self, window: WindowIndex, pages: PageSet) -> Result<(), SecondLevelError> {
        let end = window.start() + PageSize::Huge2M.bytes();
        let first = self.slots.partition_point(|slot| slot.range.end() <= window.start());
        let in_window = self.slots[first..].iter().take_while(|slot| slot.range.start() < end);
        for slot in in_window.filter(|slot| self.began_set.contains(&slot.id)) {
            let Some(first) = pages_in(slot, window, pages).next().map(|page| page / BITS) else { continue };
            let mut words = vec![0_u64; WORDS + 1];
            pages_in(slot, window, pages).for_each(|page| words[page / BITS - first] |= 1 << (page % BITS));
            words.truncate(words_in(slot) - first);
            self.second_level.clear_dirty_log(slot.id, (first * BITS) as u64, &words)?;
        }
        Ok(())
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

/// Number of words in a slot's log.
fn words_in(slot: &Slot) -> usize {
    slot.range.bytes().pages(PageSize::Base4K).div_ceil(u64::BITS.into()) as usize
}

/// Windows with a page in the slot.
fn windows_of(slot: &Slot) -> RangeInclusive<WindowIndex> {
    WindowIndex::containing(slot.range.start())..=WindowIndex::containing(Gpa::new(slot.range.end().get() - 1))
}

/// Numbers in the slot of a window's pages that are in it, ascending.
fn pages_in(slot: &Slot, window: WindowIndex, pages: PageSet) -> impl Iterator<Item = usize> {
    let first = Gfn::containing(slot.range.start()).get();
    let count = slot.range.bytes().pages(PageSize::Base4K);
    let start = Gfn::containing(window.start()).get();
    let in_slot = move |page: u16| (start + u64::from(page)).checked_sub(first).filter(|page| *page < count);
    (0..BASE_PAGES_PER_WINDOW).filter(move |page| pages.contains(*page)).filter_map(in_slot).map(|page| page as usize)
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
