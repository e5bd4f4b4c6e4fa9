//! Pages that the guest writes, window by window, from KVM's dirty log: exact, but costly. While a slot is logged,
//! KVM maps it with 4 KiB leaves and each first write to a page is a fault, so slots take turns, a bounded share
//! at a time.
//!
//! ```text
//!   slots      0   1   2   3   4   5        two at a time
//!   interval  [██████]                      begin: log on … the guest runs … end: count, log off
//!   next              [██████]
//!   next                      [██████]      then from the first again
//! ```
//!
//! A slot with its log already on belongs to another part (held at 4 KiB, or being copied to a giant page) and is
//! skipped: fetching its log would take data that the other part needs. A claimed slot is skipped too; that is not a
//! failure, and is counted separately.

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Gpa, PageSize, WindowIndex};

use crate::second_level::{SecondLevel, SecondLevelError, Slot, SlotId};

/// Writes to one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowWrites {
    /// Index of the window.
    pub window: WindowIndex,
    /// Number of base pages written at least once during the interval.
    pub pages: u16,
}

/// Counts writes, and remembers the next slot in turn. Between [`WriteSensor::begin`] and [`WriteSensor::end`] no
/// other part may switch the dirty log of a slot that it watches.
#[derive(Debug, Default)]
pub struct WriteSensor {
    sampled: Vec<SlotId>,
    /// Slots that the sensor switched on and could not switch off again; the next call retries them.
    owed: Vec<SlotId>,
    next: usize,
    claimed: u64,
}

impl WriteSensor {
    /// Whether the running interval watches this address.
    pub fn watches(&self, second_level: &dyn SecondLevel, gpa: Gpa) -> bool {
        let slots = second_level.slots();
        slots.iter().any(|slot| slot.range.contains(gpa) && self.sampled.contains(&slot.id))
    }

    /// Number of times since the last call that a slot was skipped because its log was claimed.
    pub fn take_claimed(&mut self) -> u64 {
        std::mem::take(&mut self.claimed)
    }

    /// Begins an interval for the next slots in turn, at most `count`. Returns their number. An interval that still
    /// runs is ended, and its counts are lost.
    ///
    /// # Errors
    /// [`SecondLevelError`]; then each slot is as it was. The next call switches back a slot that refuses this too.
    pub fn begin(&mut self, second_level: &dyn SecondLevel, count: usize) -> Result<usize, SecondLevelError> {
        self.switch_back(second_level)?;
        let slots = second_level.slots();
        let first = self.next;
        for turn in (0..slots.len()).map(|turn| (first + turn) % slots.len()) {
            if self.sampled.len() == count {
                break;
            }
            if slots[turn].is_dirty_logged {
                continue;
            }
            match second_level.set_dirty_log(slots[turn].id, true) {
                Ok(()) => {
                    self.sampled.push(slots[turn].id);
                    self.next = turn + 1;
                }
                Err(SecondLevelError::Claimed(_)) => self.claimed += 1,
                Err(error) => {
                    // The first error says more than one of switching back; slots that this leaves on are owed.
                    let _ = self.switch_back(second_level);
                    return Err(error);
                }
            }
        }
        Ok(self.sampled.len())
    }

    /// Ends the interval. Returns the counts of every window of its slots, ascending by slot in the order
    /// of their turns.
    ///
    /// # Errors
    /// [`SecondLevelError`] of the first call that failed; then each slot is as it was. The next call switches back a
    /// slot that refuses this too.
    pub fn end(&mut self, second_level: &dyn SecondLevel) -> Result<Vec<WindowWrites>, SecondLevelError> {
        let counted = self.count(second_level);
        let restored = self.switch_back(second_level);
        let counted = counted?;
        restored.map(|()| counted)
    }

    fn count(&mut self, second_level: &dyn SecondLevel) -> Result<Vec<WindowWrites>, SecondLevelError> {
        let slots = second_level.slots();
        let mut rows = Vec::new();
        for sampled in &self.sampled {
            let slot = slots.iter().find(|slot| slot.id == *sampled).ok_or(SecondLevelError::NoSuchSlot(*sampled))?;
            let bits = match second_level.take_dirty_log(slot.id) {
                Err(SecondLevelError::Claimed(_)) => {
                    self.claimed += 1;
                    continue;
                }
                bits => bits?,
            };
            rows.extend(slot.range.windows().map(|window| WindowWrites { window, pages: count(&bits, *slot, window) }));
        }
        Ok(rows)
    }

    /// Switches off what the sensor switched on; continues after an error.
    fn switch_back(&mut self, second_level: &dyn SecondLevel) -> Result<(), SecondLevelError> {
        self.owed.append(&mut self.sampled);
        let mut first_error = Ok(());
        self.owed.retain(|slot| match second_level.set_dirty_log(*slot, false) {
            Ok(()) | Err(SecondLevelError::NoSuchSlot(_)) => false,
            Err(SecondLevelError::Claimed(_)) => {
                self.claimed += 1;
                true
            }
            Err(error) => {
                if first_error.is_ok() {
                    first_error = Err(error);
                }
                true
            }
        });
        first_error
    }
}

/// Bits of the log that belong to a window of the slot.
fn count(bits: &[u64], slot: Slot, window: WindowIndex) -> u16 {
    let first = (window.start() - slot.range.start()).pages(PageSize::Base4K);
    let is_set = |page: u64| bits.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 == 1);
    (first..first + u64::from(BASE_PAGES_PER_WINDOW)).filter(|page| is_set(*page)).count() as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::Claims;
    use crate::second_level::guard::SecondLevelGuard;
    use crate::testing::fake_second_level::FakeSecondLevel;
    use std::sync::Arc;
    use wideleaf_policies::GpaRange;
    use wideleaf_policies::units::{gib, kib, mib};

    /// Six slots of two windows each.
    fn guest() -> FakeSecondLevel {
        let slots: Vec<GpaRange> =
            (0..6).map(|slot| GpaRange::new(Gpa::new(0) + mib(4) * slot, mib(4)).expect("fits")).collect();
        FakeSecondLevel::new(&slots)
    }

    fn logged(guest: &FakeSecondLevel) -> Vec<u32> {
        guest.slots().iter().filter(|slot| slot.is_dirty_logged).map(|slot| slot.id.0).collect()
    }

    #[test]
    fn pages_written_in_the_interval_are_counted_by_window() {
        let guest = guest();
        let mut sensor = WriteSensor::default();
        assert_eq!(sensor.begin(&guest, 2).expect("the fake answers"), 2);
        assert_eq!(logged(&guest), [0, 1]);
        for page in [0, 3, 511, 512] {
            guest.write(Gpa::new(0) + kib(4) * page);
            guest.write(Gpa::new(0) + kib(4) * page);
        }
        assert!(sensor.watches(&guest, Gpa::new(0)) && !sensor.watches(&guest, Gpa::new(0) + mib(8)));
        let counts: Vec<u16> = sensor.end(&guest).expect("the fake answers").iter().map(|row| row.pages).collect();
        assert_eq!(counts, [3, 1, 0, 0]);
        assert_eq!(logged(&guest), [0; 0]);
    }

    #[test]
    fn slots_take_turns_and_no_more_of_them_are_logged_than_asked_for() {
        let guest = guest();
        let mut sensor = WriteSensor::default();
        let mut turns = Vec::new();
        for _ in 0..4 {
            sensor.begin(&guest, 2).expect("the fake answers");
            turns.push(logged(&guest));
            sensor.end(&guest).expect("the fake answers");
        }
        assert_eq!(turns, [[0, 1], [2, 3], [4, 5], [0, 1]]);
        assert_eq!(sensor.begin(&guest, 0).expect("the fake answers"), 0);
        assert_eq!(sensor.begin(&guest, 100).expect("the fake answers"), 6);
    }

    #[test]
    fn a_slot_logged_by_another_part_is_skipped_and_keeps_its_log() {
        let guest = guest();
        guest.set_dirty_log(SlotId(1), true).expect("the fake answers");
        guest.write(Gpa::new(0) + mib(4));
        let mut sensor = WriteSensor::default();
        sensor.begin(&guest, 2).expect("the fake answers");
        assert_eq!(logged(&guest), [0, 1, 2]);
        guest.write(Gpa::new(0) + mib(8));
        let counts: Vec<_> = sensor.end(&guest).expect("the fake answers");
        let counts: Vec<_> = counts.iter().map(|row| (row.window.get(), row.pages)).collect();
        assert_eq!(counts, [(0, 0), (1, 0), (4, 1), (5, 0)]);
        assert_eq!(logged(&guest), [1]);
        let kept: u32 = guest.take_dirty_log(SlotId(1)).expect("it is on").iter().map(|word| word.count_ones()).sum();
        assert_eq!(kept, 1, "the log belongs to the part that switched it on");
    }

    #[test]
    fn a_claimed_slot_is_skipped_and_that_is_not_a_failure() {
        // slot   [0 .. 1G)   [1G .. 2G)
        //        claimed at the begin   claimed at the end
        let slots = [0, 1].map(|slot| GpaRange::new(Gpa::new(0) + gib(slot), gib(1)).expect("fits"));
        let (guest, claims) = (Arc::new(FakeSecondLevel::new(&slots)), Arc::<Claims>::default());
        let claimed = SecondLevelGuard::new(guest.clone(), claims.clone()).claiming();
        let mut sensor = WriteSensor::default();
        let first = claims.giant(slots[0].start()).expect("free");
        assert_eq!(sensor.begin(&claimed, 2).expect("a claim is not a failure"), 1);
        assert_eq!((logged(&guest), sensor.take_claimed()), (vec![1], 1));
        let second = claims.giant(slots[1].start()).expect("free");
        assert_eq!(sensor.end(&claimed).expect("a claim is not a failure"), []);
        assert_eq!((logged(&guest), sensor.take_claimed()), (vec![1], 2), "neither fetched nor switched off");
        drop((first, second));
        assert_eq!(sensor.begin(&claimed, 2).expect("it is free"), 2, "what was owed is off, and on again");
        assert_eq!((sensor.end(&claimed).expect("it is free").len(), sensor.take_claimed()), (1024, 0));
        assert_eq!(logged(&guest), [0; 0]);
    }

    #[test]
    fn after_any_failed_call_the_slots_are_restored_by_the_next_interval_at_the_latest() {
        // begin: 2 calls (on, on); end: take, take, off, off.
        for call in 0..6 {
            let guest = guest();
            let mut sensor = WriteSensor::default();
            guest.fail_call(call, libc::EIO);
            let outcome = sensor.begin(&guest, 2).and_then(|_| sensor.end(&guest));
            assert!(outcome.is_err(), "call {call}");
            let is_way_back = call >= 4;
            assert_eq!(logged(&guest).is_empty(), !is_way_back, "call {call}");
            sensor.begin(&guest, 2).expect("nothing fails any more");
            assert_eq!(logged(&guest).len(), 2, "call {call}: what was owed is off");
            sensor.end(&guest).expect("nothing fails any more");
            assert!(logged(&guest).is_empty());
        }
    }

    #[test]
    fn a_guest_without_slots_has_no_writes() {
        let guest = FakeSecondLevel::new(&[]);
        let mut sensor = WriteSensor::default();
        assert_eq!(sensor.begin(&guest, 2).expect("nothing is asked"), 0);
        assert!(sensor.end(&guest).expect("nothing is asked").is_empty());
    }
}
