//! The second level for all but the mover of giants: the dirty log under a giant that is being moved cannot be
//! switched or fetched by others (see [`crate::claims`]).

use std::sync::Arc;

use wideleaf_policies::MappingStats;

use super::{Paging, SecondLevel, SecondLevelError, Slot, SlotId};
use crate::claims::{Claims, PartClaim};

/// A [`SecondLevel`] that claims a slot before it touches its dirty log.
pub struct ClaimedSecondLevel {
    inner: Arc<dyn SecondLevel>,
    claims: Arc<Claims>,
}

impl ClaimedSecondLevel {
    /// Wraps the second level of the RAM that has these claims.
    pub fn new(inner: Arc<dyn SecondLevel>, claims: Arc<Claims>) -> ClaimedSecondLevel {
        ClaimedSecondLevel { inner, claims }
    }

    /// Claims the slot. `None` if it does not exist: the inner one then reports that.
    fn claim(&self, id: SlotId) -> Result<Option<PartClaim>, SecondLevelError> {
        let slot = self.inner.slots().into_iter().find(|slot| slot.id == id);
        let claim = slot.map(|slot| self.claims.dirty_log(slot.range)).transpose();
        claim.map_err(|_| SecondLevelError::Claimed(id))
    }
}

impl SecondLevel for ClaimedSecondLevel {
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
        let _claim = self.claim(slot)?;
        self.inner.set_dirty_log(slot, is_on)
    }

    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let _claim = self.claim(slot)?;
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
    use wideleaf_policies::units::gib;
    use wideleaf_policies::{Gpa, GpaRange};

    #[test]
    fn the_dirty_log_of_a_giant_on_the_move_is_refused_to_others() {
        let [first, second] = [0, 1].map(|number| GpaRange::new(Gpa::new(0) + gib(number), gib(1)).expect("fits"));
        let fake = Arc::new(FakeSecondLevel::new(&[first, second]));
        let claims = Arc::<Claims>::default();
        let claimed = ClaimedSecondLevel::new(fake.clone(), claims.clone());
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
