//! The manager's view of the second level: it remembers which dirty logs a manager switched on, and leaves those of
//! others alone. A migration, or another holder of memslots, needs the log's contents and needs it to stay on. The
//! manager's own logs are recorded with the claims on guest RAM, so that the next manager knows them too.
//!
//! ```text
//!   off ── on, by us ─────▶ ours    ── off ──▶ off       a hold, a sample of writes, the copy of a giant
//!    └──── on, by others ─▶ others' ── off, fetch: refused, OfOthers
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use wideleaf_policies::MappingStats;

use super::{Paging, SecondLevel, SecondLevelError, Slot, SlotId};
use crate::claims::Claims;

/// A [`SecondLevel`] that touches only the dirty logs that were switched on through it.
pub struct OwnLogs {
    inner: Arc<dyn SecondLevel>,
    claims: Arc<Claims>,
}

impl OwnLogs {
    /// Wraps the second level of the RAM that has these claims.
    pub fn new(inner: Arc<dyn SecondLevel>, claims: Arc<Claims>) -> OwnLogs {
        OwnLogs { inner, claims }
    }

    /// The memslots with a dirty log that others switched on, ascending by address. A log that is off is free: it
    /// belongs to the part that switches it on next.
    pub fn of_others(&self) -> Vec<Slot> {
        let mut ours = self.claims.own_logs();
        let slots = self.inner.slots();
        ours.retain(|own| slots.iter().any(|slot| slot.id == *own && slot.is_dirty_logged));
        slots.into_iter().filter(|slot| is_of_others(&ours, slot)).collect()
    }

    /// # Errors
    /// [`SecondLevelError::OfOthers`]. A missing slot is for the inner one to refuse.
    fn check(&self, ours: &BTreeSet<SlotId>, id: SlotId) -> Result<(), SecondLevelError> {
        let slots = self.inner.slots();
        match slots.iter().find(|slot| slot.id == id) {
            Some(slot) if is_of_others(ours, slot) => Err(SecondLevelError::OfOthers(id)),
            _ => Ok(()),
        }
    }
}

fn is_of_others(ours: &BTreeSet<SlotId>, slot: &Slot) -> bool {
    slot.is_dirty_logged && !ours.contains(&slot.id)
}

impl SecondLevel for OwnLogs {
    fn paging(&self) -> Paging {
        self.inner.paging()
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.inner.mapping_stats()
    }

    fn slots(&self) -> Vec<Slot> {
        self.inner.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
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

    fn page_table_roots(&self) -> Result<Vec<u64>, SecondLevelError> {
        self.inner.page_table_roots()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_second_level::FakeSecondLevel;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange};

    #[test]
    fn a_log_that_another_part_switched_on_is_neither_switched_nor_fetched() {
        let [first, second] = [0, 1].map(|slot| GpaRange::new(Gpa::new(0) + mib(2) * slot, mib(2)).expect("fits"));
        let guest = Arc::new(FakeSecondLevel::new(&[first, second]));
        let claims = Arc::<Claims>::default();
        let own = OwnLogs::new(guest.clone(), claims.clone());
        let (held, migrated) = (SlotId(0), SlotId(1));
        own.set_dirty_log(held, true).expect("it is off");
        guest.set_dirty_log(migrated, true).expect("by another part");
        guest.write(second.start());

        assert_eq!(own.of_others().iter().map(|slot| slot.id).collect::<Vec<_>>(), [migrated]);
        for is_on in [false, true] {
            let refused = own.set_dirty_log(migrated, is_on).expect_err("it is not ours");
            assert!(matches!(refused, SecondLevelError::OfOthers(slot) if slot == migrated), "{refused}");
        }
        assert!(matches!(own.take_dirty_log(migrated), Err(SecondLevelError::OfOthers(_))));
        assert_eq!(guest.take_dirty_log(migrated).expect("it is on")[0], 1, "what was written is there for its owner");

        own.take_dirty_log(held).expect("it is ours");
        let next = OwnLogs::new(guest.clone(), claims);
        next.take_dirty_log(held).expect("it is the next manager's as well");
        guest.set_dirty_log(held, false).expect("by any part");
        assert_eq!(own.of_others().len(), 1);
        guest.set_dirty_log(held, true).expect("by another part");
        assert_eq!(own.of_others().len(), 2, "ownership of a log ends with it");
        assert!(matches!(own.set_dirty_log(SlotId(7), true), Err(SecondLevelError::NoSuchSlot(_))));
    }
}
