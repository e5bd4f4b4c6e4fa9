//! A set under tree-PLRU: a bit for each inner node of a binary tree says which half was used longer ago.
//!
//! ```text
//!            1                 node n has the children 2n and 2n + 1; a set bit says: the right half is older
//!        2       3             12 ways are three such groups of four; the next group in turn after the one used last
//!      0   1   2   3           makes room
//! ```

use alloc::vec::Vec;

/// Where a word has the group that was used last; the bits of the trees are below it.
const GROUP_SHIFT: u32 = 56;

/// What a use of one way does to the bits of its set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    cleared: u64,
    set: u64,
}

impl Use {
    /// The bits afterwards.
    #[inline]
    pub(super) fn of(self, tree: u64) -> u64 {
        (tree & !self.cleared) | self.set
    }
}

/// Groups, and the ways of each: the largest power of two that divides the ways.
const fn groups(ways: usize) -> (usize, usize) {
    let size = 1 << ways.trailing_zeros();
    (ways / size, size)
}

/// What a use of each way does: all nodes on its path point to the other half.
///
/// # Panics
/// More ways than a word has bits for are a mistake in the machine's file.
pub(super) fn uses(ways: usize) -> Vec<Use> {
    assert!(ways as u32 <= GROUP_SHIFT, "{ways} ways have no tree of {GROUP_SHIFT} bits");
    let (groups, size) = groups(ways);
    let of_way = |way: usize| {
        let (group, mut node) = (way / size, size + way % size);
        let mut used = Use { cleared: 0, set: 0 };
        while node > 1 {
            let bit = 1 << (group * size + node / 2);
            if node.is_multiple_of(2) {
                used.set |= bit
            } else {
                used.cleared |= bit
            }
            node /= 2;
        }
        if groups > 1 {
            used.cleared |= 0xFF << GROUP_SHIFT;
            used.set |= (group as u64) << GROUP_SHIFT;
        }
        used
    };
    (0..ways).map(of_way).collect()
}

/// The way the bits point to.
#[inline]
pub(super) fn oldest(tree: u64, ways: usize) -> usize {
    let (groups, size) = groups(ways);
    let group = if groups == 1 { 0 } else { ((tree >> GROUP_SHIFT) as usize + 1) % groups };
    let bits = tree >> (group * size);
    let mut node = 1;
    while node < size {
        node = 2 * node + (bits >> node & 1) as usize;
    }
    group * size + node - size
}
