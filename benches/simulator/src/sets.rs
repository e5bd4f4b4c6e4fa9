//! A set-associative array of tags, used for every TLB, walk cache and cache of the simulator.
//!
//! ```text
//!   key  [ tag          | set ]        set 5, LRU: [ newest │ … │ oldest ] ──▶ evicted
//!                           └──▶ 5                  ▲ checked first
//! ```
//!
//! The number of sets need not be a power of two (11 ways of 38.5 MiB). The odd factor counts *slices*, chosen by a
//! hash of the tag, as in the last-level caches of such processors.

use alloc::vec;
use alloc::vec::Vec;

pub(crate) use self::lru::LruSets;
use self::lru::WAYS_MAX;
use self::tree::{Tree, TreeSets};
use self::vector::Baseline;
pub(crate) use self::vector::{Avx2, Lane, Vectors, Work, run};
use super::machine::{Array, Replacement};

mod lru;
mod tree;
mod vector;

/// A tag that no key has: page numbers are below 2^30 and lines below 2^36, of which sixteen or more sets
/// take four bits.
const NO_TAG: u32 = u32::MAX;

/// Result of an access.
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

/// Rule that maps a key to its set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    set_bits: u32,
    slices: u32,
}

/// Replacement rule, and the tags, set after set.
#[derive(Clone, Debug)]
enum Rule {
    /// LRU with `lanes` lanes of 32 bits a set, whatever its ways.
    Wide {
        tags: Vec<u32>,
        lanes: usize,
    },
    /// LRU with `lanes` lanes of 16 bits a set, if all tags fit.
    Narrow {
        tags: Vec<u16>,
        lanes: usize,
    },
    /// LRU of more ways than lanes support.
    LruOfMany {
        tags: Vec<u32>,
    },
    TreePlru {
        tags: Vec<u32>,
        trees: Vec<u64>,
        tree: Tree,
        /// Whether a key was removed.
        has_holes: bool,
    },
    Random {
        tags: Vec<u32>,
        state: u64,
    },
}

/// Layout of sets under LRU, with the number of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Lanes of 32 bits.
    Wide(usize),
    /// Lanes of 16 bits.
    Narrow(usize),
    /// No lanes: many ways, or another replacement rule.
    Other,
}

/// Runs code on sets under LRU by their shape, so that the shape is known at compile time.
macro_rules! by_shape {
    ($sets:expr, $vectors:expr, $lru:ident => $known:expr, _ => $other:expr) => {{
        use $crate::sets::Shape;
        match $sets.shape() {
            Shape::Wide(4) => by_shape!(@ wide, 4, $sets, $vectors, $lru, $known),
            Shape::Wide(8) => by_shape!(@ wide, 8, $sets, $vectors, $lru, $known),
            Shape::Wide(12) => by_shape!(@ wide, 12, $sets, $vectors, $lru, $known),
            Shape::Wide(16) => by_shape!(@ wide, 16, $sets, $vectors, $lru, $known),
            Shape::Wide(20) => by_shape!(@ wide, 20, $sets, $vectors, $lru, $known),
            Shape::Narrow(8) => by_shape!(@ narrow, 8, $sets, $vectors, $lru, $known),
            Shape::Narrow(16) => by_shape!(@ narrow, 16, $sets, $vectors, $lru, $known),
            Shape::Narrow(24) => by_shape!(@ narrow, 24, $sets, $vectors, $lru, $known),
            _ => $other,
        }
    }};
    (@ $width:ident, $lanes:literal, $sets:expr, $vectors:expr, $lru:ident, $known:expr) => {{
        let mut $lru = $sets.$width::<$lanes, _>($vectors);
        $known
    }};
}
pub(crate) use by_shape;

impl Sets {
    /// Makes an array of the size of `array`, or half of it if two threads share it, for keys below `keys`. `seed`
    /// is for random replacement.
    ///
    /// # Panics
    /// If the number of entries is not a multiple of the ways, which is a mistake in the machine's file.
    pub(crate) fn new(array: &Array, is_halved: bool, keys: u64, seed: u64) -> Sets {
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
        let rule = match array.replacement.value {
            Replacement::Lru if ways <= WAYS_MAX => Rule::lru(sets, ways, (keys - 1) >> set_bits),
            Replacement::Lru => Rule::LruOfMany { tags: tags() },
            Replacement::TreePlru => {
                let tree = Tree::new(ways);
                Rule::TreePlru { tags: tags(), trees: vec![0; sets], tree, has_holes: false }
            }
            Replacement::Random => Rule::Random { tags: tags(), state: seed | 1 },
        };
        Sets { ways, place: Place { set_bits, slices: (sets >> set_bits) as u32 }, rule }
    }

    /// The layout of the sets.
    #[inline(always)]
    pub(crate) fn shape(&self) -> Shape {
        match self.rule {
            Rule::Wide { lanes, .. } => Shape::Wide(lanes),
            Rule::Narrow { lanes, .. } => Shape::Narrow(lanes),
            _ => Shape::Other,
        }
    }

    /// The sets, which have `LANES` lanes of 32 bits.
    #[inline(always)]
    pub(crate) fn wide<const LANES: usize, V: Vectors>(&mut self, vectors: V) -> LruSets<'_, u32, V, LANES> {
        let sets = if let Rule::Wide { tags, .. } = &mut self.rule { tags.as_chunks_mut().0 } else { &mut [] };
        LruSets { vectors, sets, place: self.place, last: self.ways - 1 }
    }

    /// The sets, which have `LANES` lanes of 16 bits.
    #[inline(always)]
    pub(crate) fn narrow<const LANES: usize, V: Vectors>(&mut self, vectors: V) -> LruSets<'_, u16, V, LANES> {
        let sets = if let Rule::Narrow { tags, .. } = &mut self.rule { tags.as_chunks_mut().0 } else { &mut [] };
        LruSets { vectors, sets, place: self.place, last: self.ways - 1 }
    }

    /// Converts sets of few ways; returns other sets unchanged.
    pub(crate) fn into_few_ways(self) -> Result<FewWays, Sets> {
        let Place { set_bits, slices } = self.place;
        match self.rule {
            Rule::Wide { tags, lanes: FewWays::LANES } if slices == 1 => {
                Ok(FewWays { sets: tags.as_chunks().0.to_vec(), set_bits, last: 1 << (self.ways - 1) })
            }
            rule => Err(Sets { rule, ..self }),
        }
    }

    /// The bits of a key that choose its set, without those of its slice.
    pub(crate) fn mask(&self) -> u32 {
        (1 << self.place.set_bits) - 1
    }

    /// Looks up a key, and inserts it if it is missing.
    #[inline(never)]
    pub(crate) fn access(&mut self, key: u64) -> Found {
        by_shape!(self, Baseline, lru => match lru.access(key) {
            (true, evicted) => Found::Miss { evicted },
            (false, _) => Found::Hit,
        }, _ => self.access_others(key))
    }

    /// Does the same as [`Sets::access`], for sets without lanes.
    fn access_others(&mut self, key: u64) -> Found {
        let (set, tag) = self.place.of(key);
        let range = set * self.ways..(set + 1) * self.ways;
        let evicted = match &mut self.rule {
            Rule::Wide { .. } | Rule::Narrow { .. } => unreachable!("sets of lanes"),
            Rule::LruOfMany { tags } => match lru::access_many(&mut tags[range], tag) {
                Some(evicted) => evicted,
                None => return Found::Hit,
            },
            Rule::TreePlru { tags, trees, tree, .. } => match tree.access(&mut tags[range], &mut trees[set], tag) {
                Some(evicted) => evicted,
                None => return Found::Hit,
            },
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
        Found::Miss { evicted: (evicted != NO_TAG).then(|| self.place.key(evicted, set)) }
    }

    /// Looks up the keys of a list, in its order, and moves the missing ones to its front. `key` returns the key of an
    /// item, or `None` if these sets cannot hold it. Returns their number.
    #[inline]
    pub(crate) fn keep_missing<T: Copy>(
        &mut self,
        list: &mut [T],
        avx2: Option<Avx2>,
        key: impl FnMut(&mut T) -> Option<u64>,
    ) -> usize {
        run(KeepMissing { sets: self, list, key }, avx2)
    }

    /// Removes a key. Returns whether it was present.
    pub(crate) fn take(&mut self, key: u64) -> bool {
        by_shape!(self, Baseline, lru => lru.take(key), _ => self.take_others(key))
    }

    fn take_others(&mut self, key: u64) -> bool {
        let (set, tag) = self.place.of(key);
        let range = set * self.ways..(set + 1) * self.ways;
        match &mut self.rule {
            Rule::Wide { .. } | Rule::Narrow { .. } => unreachable!("sets of lanes"),
            Rule::LruOfMany { tags } => lru::take_many(&mut tags[range], tag),
            Rule::Random { tags, .. } => empty(&mut tags[range], tag),
            Rule::TreePlru { tags, has_holes, .. } => {
                *has_holes = true;
                empty(&mut tags[range], tag)
            }
        }
    }

    /// Removes all keys.
    pub(crate) fn clear(&mut self) {
        match &mut self.rule {
            Rule::Narrow { tags, .. } => tags.fill(u16::EMPTY),
            Rule::Wide { tags, .. } | Rule::LruOfMany { tags } | Rule::Random { tags, .. } => tags.fill(NO_TAG),
            Rule::TreePlru { tags, trees, .. } => {
                tags.fill(NO_TAG);
                trees.fill(0);
            }
        }
    }
}

/// A list that keeps its missing items.
struct KeepMissing<'a, T, K> {
    sets: &'a mut Sets,
    list: &'a mut [T],
    key: K,
}

impl<T: Copy, K: FnMut(&mut T) -> Option<u64>> Work for KeepMissing<'_, T, K> {
    /// Number of missing items.
    type Output = usize;

    #[inline(always)]
    fn run(self, vectors: impl Vectors) -> usize {
        let KeepMissing { sets, list, mut key } = self;
        by_shape!(sets, vectors, lru => keep(list, |item| key(item).is_none_or(|key| lru.access(key).0)), _ => {
            if let Rule::TreePlru { tags, trees, tree, has_holes: false } = &mut sets.rule {
                let place = sets.place;
                match sets.ways {
                    4 => return TreeSets::<4>::new(tags, trees, tree, place).keep_missing(list, key),
                    8 => return TreeSets::<8>::new(tags, trees, tree, place).keep_missing(list, key),
                    12 => return TreeSets::<12>::new(tags, trees, tree, place).keep_missing(list, key),
                    _ => {}
                }
            }
            keep(list, |item| key(item).is_none_or(|key| sets.access_others(key) != Found::Hit))
        })
    }
}

/// Sets of up to four ways under LRU, for callers that look up one key after another. Their number is a power of two.
pub(crate) struct FewWays {
    sets: Vec<[u32; FewWays::LANES]>,
    /// Number of bits of a key that choose its set.
    set_bits: u32,
    /// One bit, at the position of the last way.
    last: u32,
}

impl FewWays {
    const LANES: usize = 4;

    /// Looks up a key, and inserts it if it is missing. Returns whether it was missing.
    #[inline(always)]
    pub(crate) fn access(&mut self, key: u64) -> bool {
        let (set, tag) = (key as usize & (self.sets.len() - 1), (key >> self.set_bits) as u32);
        let tags = &mut self.sets[set];
        // Predictable: walks near each other use the same upper entries.
        if tags[0] == tag {
            return false;
        }
        let found = u32::found(tags, tag);
        u32::push(tags, tag, (found | self.last).trailing_zeros());
        found == 0
    }

    /// Removes all keys.
    pub(crate) fn clear(&mut self) {
        self.sets.fill([NO_TAG; FewWays::LANES]);
    }
}

/// Moves the kept items of a list to its front. Returns their number. Each item is written in any case and counted
/// only if kept, because the branch could not be predicted.
#[inline(always)]
pub(crate) fn keep<T: Copy>(list: &mut [T], mut is_kept: impl FnMut(&mut T) -> bool) -> usize {
    let mut kept = 0;
    for n in 0..list.len() {
        let mut item = list[n];
        let is_kept = is_kept(&mut item);
        list[kept] = item;
        kept += usize::from(is_kept);
    }
    kept
}

impl Rule {
    /// Makes empty sets under LRU, for tags up to `tag_max`.
    fn lru(sets: usize, ways: usize, tag_max: u64) -> Rule {
        if tag_max < u64::from(u16::EMPTY) && ways > u32::OF_A_VECTOR {
            let lanes = ways.next_multiple_of(u16::OF_A_VECTOR);
            return Rule::Narrow { tags: vec![u16::EMPTY; sets * lanes], lanes };
        }
        let lanes = ways.next_multiple_of(u32::OF_A_VECTOR);
        Rule::Wide { tags: vec![u32::EMPTY; sets * lanes], lanes }
    }
}

impl Place {
    /// The set of a key, and its tag in that set.
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
    fn key(self, tag: u32, set: usize) -> u64 {
        let low = set as u64 & ((1 << self.set_bits) - 1);
        (u64::from(tag) << self.set_bits) | low
    }
}

/// Position of a tag in a set, comparing four at a time: recently used tags are near the front.
#[inline]
fn find(tags: &[u32], tag: u32) -> Option<usize> {
    let (chunks, rest) = tags.as_chunks::<4>();
    for (n, chunk) in chunks.iter().enumerate() {
        let found = u32::found(chunk, tag);
        if found != 0 {
            return Some(4 * n + found.trailing_zeros() as usize);
        }
    }
    rest.iter().position(|&held| held == tag).map(|way| tags.len() - rest.len() + way)
}

/// Removes a tag. Returns whether it was present.
fn empty(tags: &mut [u32], tag: u32) -> bool {
    let way = find(tags, tag);
    way.is_some_and(|way| core::mem::replace(&mut tags[way], NO_TAG) == tag)
}

/// Marsaglia, "Xorshift RNGs", 2003: period 2^64 - 1, sufficient to pick a way.
fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}
