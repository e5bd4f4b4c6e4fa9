//! A set under true LRU: its tags in the order of their use.
//!
//! ```text
//!   before  a b c d e · · ·     access c:  c a b d e · · ·     access x:  x a b c d · · · ──▶ e
//! ```
//!
//! Sets of up to twenty ways use a whole number of vectors; lanes beyond the ways stay empty. An access runs the
//! same instructions whatever it finds, because the result cannot be predicted ([`super::vector`]).

use super::vector::{Lane, Vectors, bring_near};
use super::{NO_TAG, Place};

/// Size from which on sets are prefetched, 64 KiB: more than the host CPU's first cache holds.
const FAR: usize = 64 * 1024;

/// Number of ways of the largest set with this layout.
pub(super) const WAYS_MAX: usize = 20;

/// All sets of an array, with up to `LANES` ways each.
pub(crate) struct LruSets<'a, T, V, const LANES: usize> {
    pub(super) vectors: V,
    pub(super) sets: &'a mut [[T; LANES]],
    pub(super) place: Place,
    /// Index of the last way.
    pub(super) last: usize,
}

impl<T: Lane, V: Vectors, const LANES: usize> LruSets<'_, T, V, LANES> {
    /// Looks up a key and moves it to the front. Returns whether it was missing, and the evicted key.
    #[inline(always)]
    pub(crate) fn access(&mut self, key: u64) -> (bool, Option<u64>) {
        let (set, tag) = self.place.of(key);
        let (tags, tag) = (&mut self.sets[set], T::new(tag));
        // Predictable: successive words of one line.
        if tags[0] == tag {
            return (false, None);
        }
        let oldest = tags[self.last % LANES];
        let is_missing = self.vectors.access(tags, tag, self.last);
        let is_evicted = is_missing && oldest != T::EMPTY;
        (is_missing, if is_evicted { Some(self.place.key(oldest.tag(), set)) } else { None })
    }

    /// Removes a key. Returns whether it was present.
    #[inline(always)]
    pub(crate) fn take(&mut self, key: u64) -> bool {
        self.take_at(self.place(key), true)
    }

    /// Removes a tag if that is wanted. Returns whether it did.
    #[inline(always)]
    pub(crate) fn take_at(&mut self, (set, tag): (u32, T), is_wanted: bool) -> bool {
        self.vectors.take(&mut self.sets[set as usize], tag, is_wanted)
    }

    /// Moves a tag to the front of its set. Returns whether it was missing. `is_near` says that many tags are
    /// already in front, and predictably so: successive words of one line.
    #[inline(always)]
    pub(crate) fn access_at(&mut self, (set, tag): (u32, T), is_near: bool) -> bool {
        let tags = &mut self.sets[set as usize];
        if is_near && tags[0] == tag {
            return false;
        }
        self.vectors.access(tags, tag, self.last)
    }

    /// Inserts a tag if it is wanted and missing, and leaves the order as it is otherwise. Returns whether it did.
    #[inline(always)]
    pub(crate) fn complete_at(&mut self, (set, tag): (u32, T), is_wanted: bool) -> bool {
        self.vectors.complete(&mut self.sets[set as usize], tag, self.last, is_wanted)
    }

    /// The set of a key, and its tag in that set.
    #[inline(always)]
    pub(crate) fn place(&self, key: u64) -> (u32, T) {
        let (set, tag) = self.place.of(key);
        (set as u32, T::new(tag))
    }

    /// The place of the other line of a pair. The lowest bit of a line chooses the set, and there are two sets or more.
    #[inline(always)]
    pub(crate) fn other_of_pair((set, tag): (u32, T)) -> (u32, T) {
        (set ^ 1, tag)
    }

    /// The key that the next insertion into the set evicts.
    #[inline(always)]
    pub(crate) fn oldest(&self, (set, _): (u32, T)) -> Option<u64> {
        let oldest = self.sets[set as usize][self.last % LANES];
        if oldest == T::EMPTY { None } else { Some(self.place.key(oldest.tag(), set as usize)) }
    }

    /// Does the same as [`LruSets::places`], and prefetches the sets of the other lines of their pairs too.
    #[inline(always)]
    pub(crate) fn places_of_pairs(&self, keys: impl Iterator<Item = u64>, places: &mut [(u32, T)]) -> usize {
        let (is_far, mut len) = (size_of_val(self.sets) >= FAR, 0);
        for (key, place) in keys.zip(places) {
            let (set, tag) = self.place.of(key);
            *place = (set as u32, T::new(tag));
            if is_far {
                let (even, odd) = (&self.sets[set & !1], &self.sets[set | 1]);
                bring_near(&even[0]);
                bring_near(&odd[0]);
                bring_near(&odd[LANES - 1]);
            }
            len += 1;
        }
        len
    }

    /// The sets of some keys, and their tags in these sets. Returns their number. The sets are prefetched, so far
    /// more loads are in flight at once than if each access waited for its own.
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

/// Does the same as [`LruSets::access_at`], for sets of any size: recently used tags are near the front. Returns the
/// tag that left the end, or `None`.
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

/// Does the same as [`LruSets::take`], for a set of any size.
pub(super) fn take_many(tags: &mut [u32], tag: u32) -> bool {
    let Some(way) = super::find(tags, tag) else {
        return false;
    };
    tags.copy_within(way + 1.., way);
    tags[tags.len() - 1] = NO_TAG;
    true
}
