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

use super::machine::{Array, Replacement};

/// No key has this tag: keys are below `KEYS` and tags are no longer than keys.
const NO_TAG: u32 = u32::MAX;

/// What an access found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Hit,
    Miss { evicted: Option<u64> },
}

#[derive(Clone, Debug)]
pub(crate) struct Sets {
    /// Set after set. Under LRU newest first, so that the newest is found at once.
    tags: Vec<u32>,
    ways: usize,
    set_bits: u32,
    slices: u32,
    replacement: Replacement,
    /// One word a set, under tree-PLRU: bits of the trees, and the group used last in the top byte.
    trees: Vec<u64>,
    random: u64,
}

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
        let trees = if array.replacement.value == Replacement::TreePlru { vec![0; sets] } else { Vec::new() };
        assert!(trees.is_empty() || ways <= 56, "{ways} ways have no tree of 56 bits");
        Sets {
            tags: vec![NO_TAG; entries],
            ways,
            set_bits,
            slices: (sets >> set_bits) as u32,
            replacement: array.replacement.value,
            trees,
            random: seed | 1,
        }
    }

    /// Whether the key is what its set was asked for last: an access would hit and change nothing.
    #[inline]
    pub(crate) fn is_newest(&self, key: u64) -> bool {
        let (set, tag) = self.locate(key);
        self.tags[set * self.ways] == tag && self.replacement == Replacement::Lru
    }

    /// Looks a key up and puts it in where it was missing.
    #[inline]
    pub(crate) fn access(&mut self, key: u64) -> Found {
        let (set, tag) = self.locate(key);
        let start = set * self.ways;
        let tags = &mut self.tags[start..start + self.ways];
        let evicted = match self.replacement {
            Replacement::Lru => {
                // One pass finds and moves: each entry steps back by one until the gap is reached.
                let mut carried = tag;
                for slot in tags {
                    core::mem::swap(slot, &mut carried);
                    if carried == tag {
                        return Found::Hit;
                    }
                }
                carried
            }
            Replacement::TreePlru => {
                let tree = &mut self.trees[set];
                if let Some(way) = tags.iter().position(|&held| held == tag) {
                    *tree = point_away(*tree, way, tags.len());
                    return Found::Hit;
                }
                let way = free_way(tags).unwrap_or_else(|| pointed_to(*tree, tags.len()));
                *tree = point_away(*tree, way, tags.len());
                core::mem::replace(&mut tags[way], tag)
            }
            Replacement::Random => {
                if tags.contains(&tag) {
                    return Found::Hit;
                }
                let way = free_way(tags).unwrap_or_else(|| {
                    self.random = xorshift(self.random);
                    (((self.random >> 32) * tags.len() as u64) >> 32) as usize
                });
                core::mem::replace(&mut tags[way], tag)
            }
        };
        Found::Miss { evicted: self.key(evicted, set) }
    }

    /// Takes a key out; whether it was there.
    pub(crate) fn take(&mut self, key: u64) -> bool {
        let (set, tag) = self.locate(key);
        let tags = &mut self.tags[set * self.ways..(set + 1) * self.ways];
        let Some(way) = tags.iter().position(|&held| held == tag) else {
            return false;
        };
        if self.replacement == Replacement::Lru {
            tags[way..].rotate_left(1);
            tags[tags.len() - 1] = NO_TAG;
        } else {
            tags[way] = NO_TAG;
        }
        true
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.tags.fill(NO_TAG);
        self.trees.fill(0);
    }

    #[inline]
    fn locate(&self, key: u64) -> (usize, u32) {
        let tag = (key >> self.set_bits) as u32;
        let low = (key & ((1 << self.set_bits) - 1)) as usize;
        if self.slices == 1 {
            return (low, tag);
        }
        let hash = tag.wrapping_mul(0x9E37_79B1);
        let slice = (u64::from(hash) * u64::from(self.slices)) >> 32;
        (((slice as usize) << self.set_bits) | low, tag)
    }

    fn key(&self, tag: u32, set: usize) -> Option<u64> {
        let low = set as u64 & ((1 << self.set_bits) - 1);
        (tag != NO_TAG).then_some((u64::from(tag) << self.set_bits) | low)
    }
}

fn free_way(tags: &[u32]) -> Option<usize> {
    tags.iter().position(|&held| held == NO_TAG)
}

/// Groups of a power of two each: 12 ways are three groups of four.
const fn groups(ways: usize) -> (usize, usize) {
    let size = 1 << ways.trailing_zeros();
    (ways / size, size)
}

/// The way that the set's bits point to. Bit 0 of a group is unused, node `n` has the children `2n` and `2n + 1`, and a
/// set bit says that the right half was used longer ago.
fn pointed_to(tree: u64, ways: usize) -> usize {
    let (groups, size) = groups(ways);
    let group = if groups == 1 { 0 } else { ((tree >> 56) as usize + 1) % groups };
    let bits = tree >> (group * size);
    let mut node = 1;
    while node < size {
        node = 2 * node + (bits >> node & 1) as usize;
    }
    group * size + node - size
}

/// The bits after a use of `way`: all on its path point to the other half.
fn point_away(mut tree: u64, way: usize, ways: usize) -> u64 {
    let (groups, size) = groups(ways);
    let group = way / size;
    let mut node = size + way % size;
    while node > 1 {
        let bit = 1 << (group * size + node / 2);
        if node.is_multiple_of(2) {
            tree |= bit
        } else {
            tree &= !bit
        }
        node /= 2;
    }
    if groups > 1 {
        tree = (tree & !(0xFF << 56)) | (group as u64) << 56;
    }
    tree
}

/// Marsaglia, "Xorshift RNGs", 2003: period 2^64 - 1, good enough to pick a way.
fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}
