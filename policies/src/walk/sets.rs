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

use self::tree::Use;
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
    /// Set after set. Under LRU newest first.
    tags: Vec<u32>,
    ways: usize,
    set_bits: u32,
    slices: u32,
    rule: Rule,
    random: u64,
}

/// Replacement, and what it remembers.
#[derive(Clone, Debug)]
enum Rule {
    Lru,
    TreePlru { trees: Vec<u64>, uses: Vec<Use> },
    Random,
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
        let rule = match array.replacement.value {
            Replacement::Lru => Rule::Lru,
            Replacement::TreePlru => Rule::TreePlru { trees: vec![0; sets], uses: tree::uses(ways) },
            Replacement::Random => Rule::Random,
        };
        let slices = (sets >> set_bits) as u32;
        Sets { tags: vec![NO_TAG; entries], ways, set_bits, slices, rule, random: seed | 1 }
    }

    /// Whether a set was last asked for this key: an access would hit and change nothing. It may say no to what was.
    #[inline]
    pub(crate) fn is_newest(&self, key: u64) -> bool {
        let (set, tag) = self.locate(key);
        matches!(self.rule, Rule::Lru) && self.tags[set * self.ways] == tag
    }

    /// Looks a key up and puts it in where it was missing.
    #[inline]
    pub(crate) fn access(&mut self, key: u64) -> Found {
        let (set, tag) = self.locate(key);
        let start = set * self.ways;
        let tags = &mut self.tags[start..start + self.ways];
        let evicted = match &mut self.rule {
            Rule::Lru => match lru::access(tags, tag) {
                Some(evicted) => evicted,
                None => return Found::Hit,
            },
            Rule::TreePlru { trees, uses } => {
                let tree = &mut trees[set];
                if let Some(way) = find(tags, tag) {
                    *tree = uses[way].of(*tree);
                    return Found::Hit;
                }
                let way = find(tags, NO_TAG).unwrap_or_else(|| tree::oldest(*tree, tags.len()));
                *tree = uses[way].of(*tree);
                core::mem::replace(&mut tags[way], tag)
            }
            Rule::Random => {
                if find(tags, tag).is_some() {
                    return Found::Hit;
                }
                let way = find(tags, NO_TAG).unwrap_or_else(|| {
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
        let Some(way) = find(tags, tag) else {
            return false;
        };
        if matches!(self.rule, Rule::Lru) {
            tags.copy_within(way + 1.., way);
            tags[tags.len() - 1] = NO_TAG;
        } else {
            tags[way] = NO_TAG;
        }
        true
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.tags.fill(NO_TAG);
        if let Rule::TreePlru { trees, .. } = &mut self.rule {
            trees.fill(0);
        }
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

    #[inline]
    fn key(&self, tag: u32, set: usize) -> Option<u64> {
        let low = set as u64 & ((1 << self.set_bits) - 1);
        (tag != NO_TAG).then_some((u64::from(tag) << self.set_bits) | low)
    }
}

/// Where a tag is in a set, without a branch for each way: what a set holds is not to be predicted.
#[inline]
fn find(tags: &[u32], tag: u32) -> Option<usize> {
    match tags.len() {
        4 => find_in::<4>(tags.try_into().ok()?, tag),
        8 => find_in::<8>(tags.try_into().ok()?, tag),
        16 => find_in::<16>(tags.try_into().ok()?, tag),
        _ => find_in_many(tags, tag),
    }
}

/// As [`find`], four at a time, which any number of ways but few is a multiple of.
#[inline]
fn find_in_many(tags: &[u32], tag: u32) -> Option<usize> {
    let (chunks, rest) = tags.as_chunks::<4>();
    for (n, chunk) in chunks.iter().enumerate() {
        if let Some(way) = find_in(chunk, tag) {
            return Some(4 * n + way);
        }
    }
    rest.iter().position(|&held| held == tag).map(|way| tags.len() - rest.len() + way)
}

#[inline]
fn find_in<const WAYS: usize>(tags: &[u32; WAYS], tag: u32) -> Option<usize> {
    let mut found = 0u32;
    for (way, held) in tags.iter().enumerate() {
        found |= u32::from(*held == tag) << way;
    }
    (found != 0).then_some(found.trailing_zeros() as usize)
}

/// Marsaglia, "Xorshift RNGs", 2003: period 2^64 - 1, good enough to pick a way.
fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}
