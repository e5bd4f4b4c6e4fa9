//! A set-associative array of tags: every TLB, walk cache and cache of the simulator is one.
//!
//! ```text
//!   key  [ tag          | set ]        set 5, LRU: [ newest │ … │ oldest ] ──▶ evicted
//!                           └──▶ 5                  ▲ looked at first
//! ```
//!
//! Sets need not be a power of two in number (11 ways of 38.5 MiB): the odd factor counts *slices*, chosen by a hash of the
//! tag, as the last level caches of such processors choose theirs.

use alloc::vec;
use alloc::vec::Vec;

use self::lru::LANES_MAX;
pub(crate) use self::lru::LruSets;
use self::tree::Tree;
use super::machine::{Array, Replacement};

mod lru;
mod tree;

/// No key has this tag: page numbers are below 2^30 and lines below 2^36, of which sixteen sets or more take four bits.
const NO_TAG: u32 = u32::MAX;

/// What an access found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Hit,
    Miss { evicted: Option<u64> },
}

#[derive(Clone, Debug)]
pub(crate) struct Sets {
    ways: usize,
    place: Place,
    rule: Rule,
}

/// Which set a key belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    set_bits: u32,
    slices: u32,
}

/// Replacement, and the tags, set after set.
#[derive(Clone, Debug)]
enum Rule {
    /// So many a set, whatever its ways.
    Lru {
        tags: Vec<u32>,
        lanes: usize,
    },
    /// Of more ways than that is done for.
    LruOfMany {
        tags: Vec<u32>,
    },
    TreePlru {
        tags: Vec<u32>,
        trees: Vec<u64>,
        tree: Tree,
        newest: Vec<u32>,
    },
    Random {
        tags: Vec<u32>,
        state: u64,
    },
}

/// What to do with sets under LRU by their lanes, so that their number is known when this is compiled.
macro_rules! by_lanes {
    ($sets:expr, $lru:ident => $known:expr, _ => $other:expr) => {
        match $sets.lanes() {
            4 => by_lanes!(@ 4, $sets, $lru, $known),
            8 => by_lanes!(@ 8, $sets, $lru, $known),
            12 => by_lanes!(@ 12, $sets, $lru, $known),
            16 => by_lanes!(@ 16, $sets, $lru, $known),
            20 => by_lanes!(@ 20, $sets, $lru, $known),
            _ => $other,
        }
    };
    (@ $lanes:literal, $sets:expr, $lru:ident, $known:expr) => {{
        let mut $lru = $sets.lru::<$lanes>();
        $known
    }};
}
pub(crate) use by_lanes;

impl Sets {
    /// Room for what `array` says, half of it where two threads share it. `seed` is for random replacement.
    ///
    /// # Panics
    /// Entries that are no multiple of the ways are a mistake in the machine's file.
    pub(crate) fn new(array: &Array, is_halved: bool, seed: u64) -> Sets {
        let (mut entries, mut ways) = (array.entries.value as usize, array.ways.value as usize);
        assert!(ways > 0 && entries.is_multiple_of(ways), "{entries} entries do not make sets of {ways}");
        if is_halved && entries > 1 {
            if ways.is_multiple_of(2) {
                (entries, ways) = (entries / 2, ways / 2);
            } else {
                entries = (entries / ways).div_ceil(2) * ways;
            }
        }
        let sets = entries / ways;
        let set_bits = sets.trailing_zeros();
        let tags = || vec![NO_TAG; entries];
        let lanes = ways.next_multiple_of(4);
        let rule = match array.replacement.value {
            Replacement::Lru if lanes <= LANES_MAX => Rule::Lru { tags: vec![NO_TAG; sets * lanes], lanes },
            Replacement::Lru => Rule::LruOfMany { tags: tags() },
            Replacement::TreePlru => {
                let tree = Tree::new(ways);
                Rule::TreePlru { tags: tags(), trees: vec![0; sets], tree, newest: vec![NO_TAG; sets] }
            }
            Replacement::Random => Rule::Random { tags: tags(), state: seed | 1 },
        };
        Sets { ways, place: Place { set_bits, slices: (sets >> set_bits) as u32 }, rule }
    }

    /// Lanes of a set under LRU; none of any other.
    #[inline(always)]
    pub(crate) fn lanes(&self) -> usize {
        if let Rule::Lru { lanes, .. } = self.rule { lanes } else { 0 }
    }

    /// The sets, which have so many lanes.
    #[inline(always)]
    pub(crate) fn lru<const LANES: usize>(&mut self) -> LruSets<'_, LANES> {
        let sets = if let Rule::Lru { tags, .. } = &mut self.rule { tags.as_chunks_mut().0 } else { &mut [] };
        LruSets { sets, place: self.place, last: self.ways as u32 - 1 }
    }

    /// Whether a set was last asked for this key: an access would hit and change nothing. It may say no to what was.
    #[inline]
    pub(crate) fn is_newest(&self, key: u64) -> bool {
        let (set, tag) = self.place.of(key);
        match &self.rule {
            Rule::Lru { tags, lanes } => tags[set * lanes] == tag,
            Rule::LruOfMany { tags } => tags[set * self.ways] == tag,
            Rule::TreePlru { newest, .. } => newest[set] == tag,
            Rule::Random { .. } => false,
        }
    }

    /// Looks a key up and puts it in where it was missing.
    #[inline]
    pub(crate) fn access(&mut self, key: u64) -> Found {
        by_lanes!(self, lru => match lru.access(key) {
            (true, evicted) => Found::Miss { evicted },
            (false, _) => Found::Hit,
        }, _ => self.access_others(key))
    }

    /// As [`Sets::access`], for sets that have no lanes.
    fn access_others(&mut self, key: u64) -> Found {
        let (set, tag) = self.place.of(key);
        let range = set * self.ways..(set + 1) * self.ways;
        let evicted = match &mut self.rule {
            Rule::Lru { .. } => unreachable!("sets of lanes"),
            Rule::LruOfMany { tags } => match lru::access_many(&mut tags[range], tag) {
                Some(evicted) => evicted,
                None => return Found::Hit,
            },
            Rule::TreePlru { tags, trees, tree, newest } => {
                newest[set] = tag;
                match tree.access(&mut tags[range], &mut trees[set], tag) {
                    Some(evicted) => evicted,
                    None => return Found::Hit,
                }
            }
            Rule::Random { tags, state } => {
                let tags = &mut tags[range];
                if find(tags, tag).is_some() {
                    return Found::Hit;
                }
                let way = find(tags, NO_TAG).unwrap_or_else(|| {
                    *state = xorshift(*state);
                    (((*state >> 32) * tags.len() as u64) >> 32) as usize
                });
                core::mem::replace(&mut tags[way], tag)
            }
        };
        Found::Miss { evicted: self.place.key(evicted, set) }
    }

    /// Takes a key out; whether it was there.
    pub(crate) fn take(&mut self, key: u64) -> bool {
        by_lanes!(self, lru => lru.take(key), _ => self.take_others(key))
    }

    fn take_others(&mut self, key: u64) -> bool {
        let (set, tag) = self.place.of(key);
        let range = set * self.ways..(set + 1) * self.ways;
        match &mut self.rule {
            Rule::Lru { .. } => unreachable!("sets of lanes"),
            Rule::LruOfMany { tags } => lru::take_many(&mut tags[range], tag),
            Rule::Random { tags, .. } => empty(&mut tags[range], tag),
            Rule::TreePlru { tags, newest, .. } => {
                let was_there = empty(&mut tags[range], tag);
                if was_there {
                    newest[set] = NO_TAG;
                }
                was_there
            }
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        match &mut self.rule {
            Rule::Lru { tags, .. } | Rule::LruOfMany { tags } | Rule::Random { tags, .. } => tags.fill(NO_TAG),
            Rule::TreePlru { tags, trees, newest, .. } => {
                tags.fill(NO_TAG);
                trees.fill(0);
                newest.fill(NO_TAG);
            }
        }
    }
}

impl Place {
    /// The set of a key, and the tag that it has in there.
    #[inline(always)]
    fn of(self, key: u64) -> (usize, u32) {
        let tag = (key >> self.set_bits) as u32;
        let low = (key & ((1 << self.set_bits) - 1)) as usize;
        if self.slices == 1 {
            return (low, tag);
        }
        let hash = tag.wrapping_mul(0x9E37_79B1);
        let slice = (u64::from(hash) * u64::from(self.slices)) >> 32;
        (((slice as usize) << self.set_bits) | low, tag)
    }

    #[inline(always)]
    fn key(self, tag: u32, set: usize) -> Option<u64> {
        let low = set as u64 & ((1 << self.set_bits) - 1);
        (tag != NO_TAG).then_some((u64::from(tag) << self.set_bits) | low)
    }
}

/// Where a tag is in a set, four at a time: what is used again soon is near the front.
#[inline]
fn find(tags: &[u32], tag: u32) -> Option<usize> {
    let (chunks, rest) = tags.as_chunks::<4>();
    for (n, chunk) in chunks.iter().enumerate() {
        let found = matches(chunk, tag);
        if found != 0 {
            return Some(4 * n + found.trailing_zeros() as usize);
        }
    }
    rest.iter().position(|&held| held == tag).map(|way| tags.len() - rest.len() + way)
}

/// Takes a tag out; whether it was there.
fn empty(tags: &mut [u32], tag: u32) -> bool {
    let way = find(tags, tag);
    way.is_some_and(|way| core::mem::replace(&mut tags[way], NO_TAG) == tag)
}

/// A bit for each way that holds a tag.
#[inline(always)]
fn matches<const WAYS: usize>(tags: &[u32; WAYS], tag: u32) -> u32 {
    let mut found = 0;
    for (way, held) in tags.iter().enumerate() {
        found |= u32::from(*held == tag) << way;
    }
    found
}

/// Marsaglia, "Xorshift RNGs", 2003: period 2^64 - 1, good enough to pick a way.
fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}
