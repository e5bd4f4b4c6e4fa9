//! Protects dirty logs from the manager: a [`SecondLevel`] that switches and fetches only the logs that were switched
//! on through it.
//!
//! It refuses the log that another part of the program switched on: a migration, or another holder of memslots, needs
//! the log's contents and needs it to stay on. It also refuses the log under a giant that is being moved (see
//! [`crate::claims`]), except for the mover of giants. The manager's own logs are recorded with the claims on guest
//! RAM, so that the next manager knows them too. All other calls go to the inner second level unchanged.
//!
//! ```text
//!   off ── on, by the manager ───▶ own     ── off ──▶ off       a hold, a sample of writes, the copy of a giant
//!    └──── on, by another part ──▶ foreign ── off, fetch: refused, OfOthers
//!
//!   own, in a slot with a giant on the move ── on, off, fetch: refused, Claimed, except for the mover
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::MappingStats;

use super::{FaultCounters, Paging, PagingMode, SecondLevel, SecondLevelError, Slot, SlotId};
use crate::claims::{Claims, PartClaim};

/// A [`SecondLevel`] that touches only the dirty logs that were switched on through it.
pub struct SecondLevelGuard {
    inner: Arc<dyn SecondLevel>,
    claims: Arc<Claims>,
    /// Whether it claims a slot before it touches the slot's dirty log.
    is_claiming: bool,
}

impl SecondLevelGuard {
    /// Guards the second level of the RAM that has these claims. For the mover of giants, which has claimed the giant
    /// already.
    pub fn new(inner: Arc<dyn SecondLevel>, claims: Arc<Claims>) -> SecondLevelGuard {
        SecondLevelGuard { inner, claims, is_claiming: false }
    }

    /// The same guard for all parts but the mover of giants.
    #[must_use]
    pub fn claiming(&self) -> SecondLevelGuard {
        SecondLevelGuard { inner: self.inner.clone(), claims: self.claims.clone(), is_claiming: true }
    }

    /// The memslots with a dirty log that another part switched on, ascending by address. A log that is off belongs to
    /// the part that switches it on next.
    pub fn foreign_logs(&self) -> Vec<Slot> {
        let mut ours = self.claims.own_logs();
        let slots = self.inner.slots();
        ours.retain(|own| slots.iter().any(|slot| slot.id == *own && slot.is_dirty_logged));
        slots.into_iter().filter(|slot| is_foreign(&ours, slot)).collect()
    }

    /// Claims the slot. `None` if no claim is needed, or if the slot does not exist, which the inner second level
    /// reports.
    fn claim(&self, id: SlotId) -> Result<Option<PartClaim>, SecondLevelError> {
        if !self.is_claiming {
            return Ok(None);
        }
        let slot = self.inner.slots().into_iter().find(|slot| slot.id == id);
        let claim = slot.map(|slot| self.claims.dirty_log(slot.range)).transpose();
        claim.map_err(|_| SecondLevelError::Claimed(id))
    }

    /// Refuses the log of a slot that another part switched on. A missing slot is refused by the inner second level.
    ///
    /// # Errors
    /// [`SecondLevelError::OfOthers`].
    fn check(&self, ours: &BTreeSet<SlotId>, id: SlotId) -> Result<(), SecondLevelError> {
        let slots = self.inner.slots();
        match slots.iter().find(|slot| slot.id == id) {
            Some(slot) if is_foreign(ours, slot) => Err(SecondLevelError::OfOthers(id)),
            _ => Ok(()),
        }
    }
}

fn is_foreign(ours: &BTreeSet<SlotId>, slot: &Slot) -> bool {
    slot.is_dirty_logged && !ours.contains(&slot.id)
}

impl SecondLevel for SecondLevelGuard {
    fn paging(&self) -> Paging {
        self.inner.paging()
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.inner.mapping_stats()
    }

    fn fault_counters(&self) -> Result<FaultCounters, SecondLevelError> {
        self.inner.fault_counters()
    }

    fn vcpu_time(&self) -> Result<Duration, SecondLevelError> {
        self.inner.vcpu_time()
    }

    fn slots(&self) -> Vec<Slot> {
        self.inner.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        let _claim = self.claim(slot)?;
        let mut ours = self.claims.own_logs();
        self.check(&ours, slot)?;
        self.inner.set_dirty_log(slot, is_on)?;
        if is_on {
            ours.insert(slot);
        } else {
            ours.remove(&slot);
        }
        Ok(())
    }

    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let _claim = self.claim(slot)?;
        let ours = self.claims.own_logs();
        self.check(&ours, slot)?;
        self.inner.take_dirty_log(slot)
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        self.inner.pause()
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        self.inner.resume()
    }

    fn is_paused(&self) -> bool {
        self.inner.is_paused()
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        self.inner.paging_modes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_second_level::FakeSecondLevel;
    use wideleaf_policies::units::{gib, mib};
    use wideleaf_policies::{Gpa, GpaRange};

    #[test]
    fn a_log_that_another_part_switched_on_is_neither_switched_nor_fetched() {
        let [first, second] = [0, 1].map(|slot| GpaRange::new(Gpa::new(0) + mib(2) * slot, mib(2)).expect("fits"));
        let guest = Arc::new(FakeSecondLevel::new(&[first, second]));
        let claims = Arc::<Claims>::default();
        let own = SecondLevelGuard::new(guest.clone(), claims.clone());
        let (held, migrated) = (SlotId(0), SlotId(1));
        own.set_dirty_log(held, true).expect("it is off");
        guest.set_dirty_log(migrated, true).expect("by another part");
        guest.write(second.start());

        assert_eq!(own.foreign_logs().iter().map(|slot| slot.id).collect::<Vec<_>>(), [migrated]);
        for is_on in [false, true] {
            let refused = own.set_dirty_log(migrated, is_on).expect_err("it is not ours");
            assert!(matches!(refused, SecondLevelError::OfOthers(slot) if slot == migrated), "{refused}");
        }
        assert!(matches!(own.take_dirty_log(migrated), Err(SecondLevelError::OfOthers(_))));
        assert_eq!(guest.take_dirty_log(migrated).expect("it is on")[0], 1, "what was written is there for its owner");

        own.take_dirty_log(held).expect("it is ours");
        let next = SecondLevelGuard::new(guest.clone(), claims);
        next.take_dirty_log(held).expect("it is the next manager's as well");
        guest.set_dirty_log(held, false).expect("by any part");
        assert_eq!(own.foreign_logs().len(), 1);
        guest.set_dirty_log(held, true).expect("by another part");
        assert_eq!(own.foreign_logs().len(), 2, "ownership of a log ends with it");
        assert!(matches!(own.set_dirty_log(SlotId(7), true), Err(SecondLevelError::NoSuchSlot(_))));
    }

    #[test]
    fn the_dirty_log_of_a_giant_on_the_move_is_refused_to_others() {
        let [first, second] = [0, 1].map(|number| GpaRange::new(Gpa::new(0) + gib(number), gib(1)).expect("fits"));
        let fake = Arc::new(FakeSecondLevel::new(&[first, second]));
        let claims = Arc::<Claims>::default();
        let claimed = SecondLevelGuard::new(fake.clone(), claims.clone()).claiming();
        claimed.set_dirty_log(SlotId(0), true).expect("no giant is being moved");

        let giant = claims.giant(first.start()).expect("free");
        fake.write(first.start());
        assert!(matches!(claimed.take_dirty_log(SlotId(0)), Err(SecondLevelError::Claimed(SlotId(0)))));
        assert!(matches!(claimed.set_dirty_log(SlotId(0), false), Err(SecondLevelError::Claimed(SlotId(0)))));
        claimed.set_dirty_log(SlotId(1), true).expect("another slot");
        assert_eq!(
            fake.take_dirty_log(SlotId(0)).expect("it is on")[0],
            1,
            "the write is there for the mover of the giant"
        );

        drop(giant);
        claimed.set_dirty_log(SlotId(0), false).expect("it is over");
        assert!(matches!(claimed.set_dirty_log(SlotId(7), true), Err(SecondLevelError::NoSuchSlot(SlotId(7)))));
    }
}
