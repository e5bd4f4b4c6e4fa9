//! Pages of one giant that a guest writes during its copy: the dirty logs of all memslots over it, as one set of base
//! pages. Logs that were off are switched on for the copy and off again when the [`DirtyLog`] is dropped; the contents
//! of memory are not touched.

use wideleaf_policies::{Gpa, GpaRange, OutcomeResult, PageSize, Refusal};

use crate::second_level::{SecondLevel, SecondLevelError, Slot, SlotId};
use crate::side_mapping::GIANT;

const WORD_BITS: u64 = u64::BITS as u64;

/// A set of base pages of one giant.
#[derive(Debug)]
pub(super) struct DirtyPages {
    giant: Gpa,
    bits: Vec<u64>,
}

impl DirtyPages {
    /// An empty set of pages.
    pub(super) fn none(giant: Gpa) -> DirtyPages {
        DirtyPages { giant, bits: vec![0; (GIANT.pages(PageSize::Base4K) / WORD_BITS) as usize] }
    }

    /// Number of pages in the set.
    pub(super) fn count(&self) -> u64 {
        self.bits.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Calls `each` for every page, ascending, and empties the set.
    pub(super) fn drain(&mut self, mut each: impl FnMut(Gpa)) {
        for (word, index) in self.bits.iter_mut().zip(0..) {
            set_bits(std::mem::take(word))
                .for_each(|bit| each(self.giant + PageSize::Base4K.bytes() * (index * WORD_BITS + bit)));
        }
    }

    /// Adds the pages of a slot's log that lie in the giant: a slot may be larger.
    fn add_log(&mut self, slot: &Slot, log: &[u64]) {
        for (word, index) in log.iter().zip(0..) {
            for bit in set_bits(*word) {
                let page = slot.range.start() + PageSize::Base4K.bytes() * (index * WORD_BITS + bit);
                if self.giant <= page && page < self.giant + GIANT {
                    let number = (page - self.giant).pages(PageSize::Base4K);
                    self.bits[(number / WORD_BITS) as usize] |= 1 << (number % WORD_BITS);
                }
            }
        }
    }
}

/// Numbers of the set bits, ascending.
fn set_bits(word: u64) -> impl Iterator<Item = u64> {
    let lowest_off = |rest: u64| rest & rest.wrapping_sub(1);
    std::iter::successors(Some(word), move |rest| Some(lowest_off(*rest)))
        .take_while(|rest| *rest != 0)
        .map(|rest| u64::from(rest.trailing_zeros()))
}

/// Dirty logging of all memslots over one giant. Dropped, it switches off what it switched on.
pub(super) struct DirtyLog<'a> {
    second_level: &'a dyn SecondLevel,
    slots: Vec<Slot>,
    switched_on: Vec<SlotId>,
}

impl<'a> DirtyLog<'a> {
    /// Switches the logs on where they are off (a slot that is held at 4K is logged already). From now on every write
    /// of a vCPU into the giant is in one of the logs.
    ///
    /// Fetches and discards what is logged already: it was written before the copy starts. A caller that may not
    /// fetch it gets the error here, before a gibibyte is copied for nothing.
    ///
    /// # Errors
    /// [`SecondLevelError`]; then no log is on that was off, unless switching it off failed too.
    pub(super) fn start(second_level: &'a dyn SecondLevel, giant: GpaRange) -> Result<DirtyLog<'a>, SecondLevelError> {
        let slots: Vec<Slot> = second_level.slots().into_iter().filter(|slot| slot.range.overlaps(giant)).collect();
        let (logged, off): (Vec<Slot>, Vec<Slot>) = slots.iter().partition(|slot| slot.is_dirty_logged);
        let mut log = DirtyLog { second_level, slots, switched_on: Vec::new() };
        for slot in logged {
            second_level.take_dirty_log(slot.id)?;
        }
        for slot in off {
            second_level.set_dirty_log(slot.id, true)?;
            log.switched_on.push(slot.id);
        }
        Ok(log)
    }

    /// Adds the pages that were written since the last call, or since the start.
    pub(super) fn take_into(&self, pages: &mut DirtyPages) -> Result<(), SecondLevelError> {
        for slot in &self.slots {
            pages.add_log(slot, &self.second_level.take_dirty_log(slot.id)?);
        }
        Ok(())
    }

    /// Switches off the logs that `start` switched on. Returns the number of slots that refused: they stay mapped
    /// with 4 KiB leaves until they are recovered.
    pub(super) fn stop(mut self) -> u32 {
        self.switch_off()
    }

    /// One by one, so that after a panic the remaining ones are still in the list.
    fn switch_off(&mut self) -> u32 {
        let mut refused = 0;
        while let Some(slot) = self.switched_on.pop() {
            if let Err(error) = self.second_level.set_dirty_log(slot, false) {
                tracing::warn!(slot = slot.0, %error, "the dirty log stays on");
                refused += 1;
            }
        }
        refused
    }
}

impl Drop for DirtyLog<'_> {
    fn drop(&mut self) {
        self.switch_off();
    }
}

/// Result that a policy learns for a failure of the second level.
pub(super) fn refused(error: &SecondLevelError) -> OutcomeResult {
    OutcomeResult::Refused(match error {
        SecondLevelError::PauseTimedOut { .. }
        | SecondLevelError::DeviceBusy { .. }
        | SecondLevelError::Claimed(_)
        | SecondLevelError::OfOthers(_) => Refusal::Busy,
        SecondLevelError::Ioctl { source, .. } => Refusal::Other(source.raw_os_error().unwrap_or(0)),
        _ => Refusal::Other(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::Bytes;
    use wideleaf_policies::units::{gib, kib, mib};

    fn slot(start: Bytes, bytes: Bytes) -> Slot {
        let range = GpaRange::new(Gpa::new(0) + start, bytes).expect("fits");
        Slot { id: SlotId(0), range, is_dirty_logged: true }
    }

    fn drained(pages: &mut DirtyPages) -> Vec<Bytes> {
        let mut found = Vec::new();
        pages.drain(|page| found.push(page - Gpa::new(0)));
        found
    }

    #[test]
    fn only_the_pages_of_the_giant_are_taken_from_a_larger_slot() {
        // slot [0 ................. 2G)      giant [1G ...... 2G)
        let mut log = vec![0; 8192];
        log[0] = 1; // 0: below the giant
        log[4096] = 1 | 1 << 63; // 1G and 1G + 252K
        let mut pages = DirtyPages::none(Gpa::new(0) + gib(1));
        pages.add_log(&slot(Bytes::ZERO, gib(2)), &log);
        assert_eq!(pages.count(), 2);
        assert_eq!(drained(&mut pages), [gib(1), gib(1) + kib(252)]);
        assert_eq!(pages.count(), 0, "they are forgotten");
    }

    #[test]
    fn logs_of_small_slots_add_up() {
        let mut pages = DirtyPages::none(Gpa::new(0));
        pages.add_log(&slot(mib(64), mib(64)), &[0b10]);
        pages.add_log(&slot(mib(128), mib(64)), &[0b1]);
        pages.add_log(&slot(mib(64), mib(64)), &[0b11]);
        assert_eq!(drained(&mut pages), [mib(64), mib(64) + kib(4), mib(128)]);
    }
}
