//! A set under true LRU: its tags in the order of their use.
//!
//! ```text
//!   before  a b c d e · · ·     access c:  c a b d e · · ·     access x:  x a b c d · · · ──▶ e
//! ```
//!
//! Sets of up to twenty ways have a multiple of four lanes, some of which no way has and which stay empty. What is done to such a set
//! is the same whatever is found and wherever, for nothing of it can be predicted; and it is the same for each lane, written so
//! that the compiler makes vectors of them. (Intrinsics would say it more plainly, and are unsafe.)

use super::{NO_TAG, Place};

/// Tags of so many lanes are more than this computer has at hand anyway: 64 KiB.
const FAR: usize = 16 * 1024;

/// Lanes of the largest set that is kept so.
pub(crate) const LANES_MAX: usize = 20;

/// Sets of up to `LANES` ways, all of them.
pub(crate) struct LruSets<'a, const LANES: usize> {
    pub(super) sets: &'a mut [[u32; LANES]],
    pub(super) place: Place,
    /// The last way.
    pub(super) last: u32,
}

impl<const LANES: usize> LruSets<'_, LANES> {
    /// Looks a key up and brings it to the front; whether it was missing, and what fell out then.
    #[inline(always)]
    pub(crate) fn access(&mut self, key: u64) -> (bool, Option<u64>) {
        let (set, tag) = self.place.of(key);
        let tags = &mut self.sets[set];
        // This can be predicted: a line that is gone through word by word.
        if tags[0] == tag {
            return (false, None);
        }
        let oldest = tags[self.last as usize % LANES];
        let is_missing = access(tags, tag, self.last);
        (is_missing, if is_missing { self.place.key(oldest, set) } else { None })
    }

    /// Takes a key out; whether it was there.
    #[inline(always)]
    pub(crate) fn take(&mut self, key: u64) -> bool {
        let (set, tag) = self.place.of(key);
        take(&mut self.sets[set], tag)
    }

    /// Reads the sets of some keys for nothing, so that this computer has them at hand when they are asked for. Far more of these
    /// loads are on their way at once than of those that something is done with.
    #[inline(always)]
    pub(crate) fn touch(&self, keys: impl Iterator<Item = u64>) {
        if self.sets.len() * LANES < FAR {
            return;
        }
        let mut read = 0;
        for key in keys {
            let tags = &self.sets[self.place.of(key).0];
            read ^= tags[0] ^ tags[LANES - 1];
        }
        core::hint::black_box(read);
    }
}

/// Ones, then zeroes: from `ONES - n` on, a mask of the first `n` lanes.
static ONES_AND_ZEROES: [u32; 2 * (ONES + 1)] = {
    let mut words = [0; 2 * (ONES + 1)];
    let mut n = 0;
    while n < ONES {
        words[n] = u32::MAX;
        n += 1;
    }
    words
};

/// One less than a power of two, so that no bound need be checked.
const ONES: usize = 31;

const _: () = assert!(LANES_MAX <= ONES, "a mask has as many ones, or zeroes, as the largest set has lanes");

/// A mask of the first lanes.
#[inline(always)]
fn first<const LANES: usize>(lanes: u32) -> &'static [u32; LANES] {
    ONES_AND_ZEROES[(ONES - lanes as usize) & ONES..].first_chunk().expect("as many words as lanes")
}

/// Brings a tag to the front; whether it was missing.
#[inline(always)]
fn access<const LANES: usize>(tags: &mut [u32; LANES], tag: u32, last: u32) -> bool {
    let found = matches(tags, tag);
    // All before it move back by one; where it is missing, all do.
    let moves = first::<LANES>((found | 1 << last << 1).trailing_zeros());
    let mut moved = [tag; LANES];
    moved[1..].copy_from_slice(&tags[..LANES - 1]);
    for lane in 0..LANES {
        tags[lane] = (moved[lane] & moves[lane]) | (tags[lane] & !moves[lane]);
    }
    found == 0
}

/// Takes a tag out, and moves those behind it one to the front; whether it was there.
#[inline(always)]
fn take<const LANES: usize>(tags: &mut [u32; LANES], tag: u32) -> bool {
    let found = matches(tags, tag);
    let stays = first::<LANES>((found >> 1 | 1 << LANES).trailing_zeros());
    let mut moved = [NO_TAG; LANES];
    moved[..LANES - 1].copy_from_slice(&tags[1..]);
    for lane in 0..LANES {
        tags[lane] = (tags[lane] & stays[lane]) | (moved[lane] & !stays[lane]);
    }
    found != 0
}

/// A bit for each lane that holds a tag, counted from 1: bit 0 would be made in another way than the rest, and no vector.
#[inline(always)]
fn matches<const LANES: usize>(tags: &[u32; LANES], tag: u32) -> u32 {
    let mut found = 0;
    for (lane, held) in tags.iter().enumerate() {
        found |= if *held == tag { 2 << lane } else { 0 };
    }
    found
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
