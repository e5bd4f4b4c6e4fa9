//! A set under true LRU: its tags in the order of their use.
//!
//! ```text
//!   before  a b c d e · · ·     access c:  c a b d e · · ·     access x:  x a b c d · · · ──▶ e
//! ```
//!
//! Sets of up to twenty ways have a whole number of vectors for lanes, some of which no way has and which stay empty. What is done to
//! such a set is the same whatever is found and wherever, for nothing of it can be predicted; and it is the same for each lane, written
//! so that the compiler makes vectors of them. (Intrinsics would say it more plainly, and are unsafe.)

use super::vector::{Lane, bring_near};
use super::{NO_TAG, Place};

/// Sets of so many bytes are more than this computer has at hand anyway: 64 KiB.
const FAR: usize = 64 * 1024;

/// Ways of the largest set that is kept so.
pub(super) const WAYS_MAX: usize = 20;

/// Sets of up to `LANES` ways, all of them.
pub(crate) struct LruSets<'a, T, const LANES: usize> {
    pub(super) sets: &'a mut [[T; LANES]],
    pub(super) place: Place,
    /// The last way.
    pub(super) last: usize,
}

impl<T: Lane, const LANES: usize> LruSets<'_, T, LANES> {
    /// Looks a key up and brings it to the front; whether it was missing, and what fell out then.
    #[inline(always)]
    pub(crate) fn access(&mut self, key: u64) -> (bool, Option<u64>) {
        let (set, tag) = self.place.of(key);
        let (tags, tag) = (&mut self.sets[set], T::new(tag));
        // This can be predicted: a line that is gone through word by word.
        if tags[0] == tag {
            return (false, None);
        }
        let oldest = tags[self.last % LANES];
        let is_missing = access(tags, tag, self.last);
        let is_evicted = is_missing && oldest != T::EMPTY;
        (is_missing, if is_evicted { Some(self.place.key(oldest.tag(), set)) } else { None })
    }

    /// Takes a key out; whether it was there.
    #[inline(always)]
    pub(crate) fn take(&mut self, key: u64) -> bool {
        let (set, tag) = self.place.of(key);
        take(&mut self.sets[set], T::new(tag))
    }

    /// Brings a tag to the front of its set; whether it was missing. `is_near` says that many are there already, and that which of them
    /// can be predicted: those of a line that is gone through word by word.
    #[inline(always)]
    pub(crate) fn access_at(&mut self, (set, tag): (u32, T), is_near: bool) -> bool {
        let tags = &mut self.sets[set as usize];
        if is_near && tags[0] == tag {
            return false;
        }
        access(tags, tag, self.last)
    }

    /// The key that falls out of a set if something comes in.
    #[inline(always)]
    pub(crate) fn oldest(&self, (set, _): (u32, T)) -> Option<u64> {
        let oldest = self.sets[set as usize][self.last % LANES];
        if oldest == T::EMPTY { None } else { Some(self.place.key(oldest.tag(), set as usize)) }
    }

    /// The sets of some keys, and the tags that they have in there; how many. This computer brings the sets near until they are
    /// asked for: far more of them are on their way at once than if each were waited for.
    #[inline(always)]
    pub(crate) fn places(&self, keys: impl Iterator<Item = u64>, places: &mut [(u32, T)]) -> usize {
        let (is_far, mut len) = (size_of_val(self.sets) >= FAR, 0);
        for (key, place) in keys.zip(places) {
            let (set, tag) = self.place.of(key);
            *place = (set as u32, T::new(tag));
            if is_far {
                bring_near(&self.sets[set][0]);
                bring_near(&self.sets[set][LANES - 1]);
            }
            len += 1;
        }
        len
    }
}

/// Brings a tag to the front; whether it was missing.
#[inline(always)]
fn access<T: Lane, const LANES: usize>(tags: &mut [T; LANES], tag: T, last: usize) -> bool {
    let found = T::found(tags, tag);
    // All before it move back by one; where it is missing, all do.
    T::push(tags, tag, (found | 1 << last).trailing_zeros());
    found == 0
}

/// Takes a tag out, and moves those behind it one to the front; whether it was there.
#[inline(always)]
fn take<T: Lane, const LANES: usize>(tags: &mut [T; LANES], tag: T) -> bool {
    let found = T::found(tags, tag);
    if found != 0 {
        tags.copy_within(found.trailing_zeros() as usize + 1.., found.trailing_zeros() as usize);
        tags[LANES - 1] = T::EMPTY;
    }
    found != 0
}

/// As [`access`], for sets of any size: what is used again soon is near the front. What fell out at the end, or `None`.
pub(super) fn access_many(tags: &mut [u32], tag: u32) -> Option<u32> {
    match super::find(tags, tag) {
        None => {
            let evicted = tags[tags.len() - 1];
            tags.copy_within(..tags.len() - 1, 1);
            tags[0] = tag;
            Some(evicted)
        }
        Some(way) => {
            tags.copy_within(..way, 1);
            tags[0] = tag;
            None
        }
    }
}

/// As [`take`], likewise.
pub(super) fn take_many(tags: &mut [u32], tag: u32) -> bool {
    let Some(way) = super::find(tags, tag) else {
        return false;
    };
    tags.copy_within(way + 1.., way);
    tags[tags.len() - 1] = NO_TAG;
    true
}
