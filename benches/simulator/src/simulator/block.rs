//! A block of accesses on its way through the simulator.
//!
//! ```text
//!   accesses   a b c d e f g h
//!   seekers    a   c     f g         page is not the newest of its set in the first level
//!              a         f           page is in no level: they walk
//!   references A3 A2 a b c d e F1 f g h       entries that walks read, and data, in the order of the accesses
//! ```
//!
//! The state of a part of the machine depends only on the accesses that went through it. Therefore a whole block of
//! accesses may go through one part before any of them goes through the next.

use alloc::vec;
use alloc::vec::Vec;

use crate::streams::Access;
use crate::tlb::Seeker;

/// Number of accesses in a block: large enough that the cost per block is small, small enough that a block fits the
/// host CPU's first cache.
pub(crate) const ROOM: usize = 128;

const _: () = assert!(ROOM <= u8::MAX as usize + 1, "a seeker has a byte for its access");

/// Accesses, and the pages that they look up.
pub(crate) struct Block {
    pub(super) addresses: Vec<u64>,
    /// One seeker for each access; those in front still look up their page.
    pub(super) seekers: Vec<Seeker>,
    len: usize,
}

/// Sums over all accesses of a block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) accesses: u64,
    /// Accesses to the same lines, right after the first.
    pub(super) repeats: u64,
    pub(super) writes: u64,
}

impl Block {
    pub(super) fn new() -> Block {
        Block { addresses: vec![0; ROOM], seekers: vec![Seeker::default(); ROOM], len: 0 }
    }

    /// The addresses of the block's accesses.
    pub(super) fn addresses(&self) -> &[u64] {
        &self.addresses[..self.len]
    }

    /// Takes the next accesses. `seek` gets an address and whether it is a store. It returns the seeker, and
    /// whether the page is found already. Returns the number of seekers left, and the sums.
    #[inline(always)]
    pub(super) fn fill(
        &mut self,
        accesses: &mut impl Iterator<Item = Access>,
        mut seek: impl FnMut(u64, bool) -> (Seeker, bool),
    ) -> (usize, Sums) {
        let (mut len, mut seeking, mut sums) = (0, 0, Sums::default());
        let (addresses, seekers) = (&mut self.addresses[..ROOM], &mut self.seekers[..ROOM]);
        for Access { address, is_write, repeats } in accesses {
            if repeats == 0 {
                continue;
            }
            let (seeker, is_found) = seek(address, is_write);
            addresses[len] = address;
            // Written in any case and counted only if it is not found, because hits cannot be predicted.
            seekers[seeking] = seeker;
            seekers[seeking].access = len as u8;
            seeking += usize::from(!is_found);
            sums.repeats += u64::from(repeats - 1);
            sums.writes += if is_write { u64::from(repeats) } else { 0 };
            len += 1;
            if len == ROOM {
                break;
            }
        }
        self.len = len;
        sums.accesses = len as u64;
        (seeking, sums)
    }
}
