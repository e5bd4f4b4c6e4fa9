//! A set under tree-PLRU: one bit for each inner node of a binary tree says which half was used longer ago.
//!
//! ```text
//!            1                 node n has the children 2n and 2n + 1; a set bit says: the right half is older
//!        2       3             12 ways are three such groups of four; the next group in turn after the one used last
//!      0   1   2   3           makes room
//! ```

use alloc::vec::Vec;

use super::vector::Lane;
use super::{NO_TAG, Place, find};

/// Position in a word of the group that was used last; the bits of the trees are below it.
const GROUP_SHIFT: u32 = 56;

/// Effect of using one way on the bits of its set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    cleared: u64,
    set: u64,
}

impl Use {
    /// Returns the bits after the use.
    #[inline]
    pub(super) fn of(self, tree: u64) -> u64 {
        (tree & !self.cleared) | self.set
    }
}

/// Sets of `WAYS` ways from which no key was ever removed.
pub(super) struct TreeSets<'a, const WAYS: usize> {
    tags: &'a mut [[u32; WAYS]],
    trees: &'a mut [u64],
    uses: &'a [Use; WAYS],
    place: Place,
}

impl<'a, const WAYS: usize> TreeSets<'a, WAYS> {
    const SIZE: usize = 1 << WAYS.trailing_zeros();
    /// The way within a group that its bits point to, for all values of them.
    const OLDEST: &'static [u8; 256] = &oldest_of_all(Self::SIZE);

    pub(super) fn new(tags: &'a mut [u32], trees: &'a mut [u64], tree: &'a Tree, place: Place) -> TreeSets<'a, WAYS> {
        let uses = tree.uses.first_chunk().expect("as many uses as ways");
        TreeSets { tags: tags.as_chunks_mut().0, trees, uses, place }
    }

    /// Does the same as [`Tree::access`], but returns whether the key was missing. The position is unpredictable;
    /// whether the set is full is predictable.
    #[inline(always)]
    pub(super) fn access(&mut self, key: u64) -> bool {
        let (set, tag) = self.place.of(key);
        let (tags, bits) = (&mut self.tags[set], &mut self.trees[set]);
        let found = u32::found(tags, tag);
        let chosen = if tags[WAYS - 1] == NO_TAG { u32::found(tags, NO_TAG) } else { 1 << Self::oldest(*bits) };
        let way = (if found == 0 { chosen } else { found }).trailing_zeros() as usize % WAYS;
        *bits = self.uses[way].of(*bits);
        tags[way] = tag;
        found == 0
    }

    /// Does the same as [`super::Sets::keep_missing`].
    #[inline(always)]
    pub(super) fn keep_missing<T: Copy>(mut self, list: &mut [T], mut key: impl FnMut(&mut T) -> Option<u64>) -> usize {
        // A loop here, as a closure would not be compiled for the vectors of this one.
        let mut kept = 0;
        for n in 0..list.len() {
            let mut item = list[n];
            let is_missing = match key(&mut item) {
                Some(key) => self.access(key),
                None => true,
            };
            list[kept] = item;
            kept += usize::from(is_missing);
        }
        kept
    }

    /// Does the same as [`Tree::oldest`].
    #[inline(always)]
    fn oldest(bits: u64) -> usize {
        let next = (bits >> GROUP_SHIFT) as usize + 1;
        let group = if next >= WAYS / Self::SIZE { 0 } else { next };
        let bits = bits >> (group * Self::SIZE) & ((1 << Self::SIZE) - 1);
        group * Self::SIZE + usize::from(Self::OLDEST[bits as usize % 256])
    }
}

/// The leaf of a tree of up to eight leaves that its bits point to, for all values of them.
const fn oldest_of_all(size: usize) -> [u8; 256] {
    assert!(size <= 8, "eight bits for the tree of a group");
    let (mut oldest, mut bits) = ([0; 256], 0);
    while bits < 256 {
        oldest[bits] = (oldest_leaf(size, bits as u64) - size) as u8;
        bits += 1;
    }
    oldest
}

/// The node of the leaf that the bits of a tree of `size` leaves point to.
const fn oldest_leaf(size: usize, bits: u64) -> usize {
    let mut node = 1;
    while node < size {
        node = 2 * node + (bits >> node & 1) as usize;
    }
    node
}

/// The tree of a set with a fixed number of ways.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    uses: Vec<Use>,
    groups: usize,
    /// Number of ways in a group: the largest power of two that divides the ways.
    size: usize,
}

impl Tree {
    /// # Panics
    /// If a word has too few bits for the ways, which is a mistake in the machine's file.
    pub(super) fn new(ways: usize) -> Tree {
        assert!(ways as u32 <= GROUP_SHIFT, "{ways} ways have no tree of {GROUP_SHIFT} bits");
        let size = 1 << ways.trailing_zeros();
        let mut tree = Tree { uses: Vec::new(), groups: ways / size, size };
        tree.uses = (0..ways).map(|way| tree.use_of(way)).collect();
        tree
    }

    /// Looks up a tag, and inserts it if it is missing. Returns the tag that it replaced, or `None` if
    /// it was present.
    #[inline]
    pub(super) fn access(&self, tags: &mut [u32], bits: &mut u64, tag: u32) -> Option<u32> {
        if let Some(way) = find(tags, tag) {
            *bits = self.uses[way].of(*bits);
            return None;
        }
        let way = find(tags, NO_TAG).unwrap_or_else(|| self.oldest(*bits));
        *bits = self.uses[way].of(*bits);
        Some(core::mem::replace(&mut tags[way], tag))
    }

    /// Makes all nodes on the path of a way point to the other half.
    fn use_of(&self, way: usize) -> Use {
        let (group, mut node) = (way / self.size, self.size + way % self.size);
        let mut used = Use { cleared: 0, set: 0 };
        while node > 1 {
            let bit = 1 << (group * self.size + node / 2);
            if node.is_multiple_of(2) {
                used.set |= bit
            } else {
                used.cleared |= bit
            }
            node /= 2;
        }
        if self.groups > 1 {
            used.cleared |= 0xFF << GROUP_SHIFT;
            used.set |= (group as u64) << GROUP_SHIFT;
        }
        used
    }

    /// The way that the bits point to.
    #[inline]
    fn oldest(&self, bits: u64) -> usize {
        let next = (bits >> GROUP_SHIFT) as usize + 1;
        let group = if next >= self.groups { 0 } else { next };
        group * self.size + oldest_leaf(self.size, bits >> (group * self.size)) - self.size
    }
}
