//! Accesses on their way through the simulator, many at a time.
//!
//! ```text
//!   accesses   a b c d e f g h
//!   seekers    a   c     f g         those whose page the first level was not just asked for
//!              a         f           those that no level holds: they walk
//!   references A3 A2 a b c d e F1 f g h       entries that walks read, and data, in the order of the accesses
//! ```
//!
//! A part of the machine learns from what went through it before and from nothing else, so that many accesses may go through one part
//! before any of them goes through the next.

use alloc::vec;
use alloc::vec::Vec;

use crate::streams::Access;
use crate::tlb::Seeker;

/// Accesses of a block: enough that what is done once a block costs little, few enough that a block lies in this computer's first cache.
pub(crate) const ROOM: usize = 128;

const _: () = assert!(ROOM <= u8::MAX as usize + 1, "a seeker has a byte for its access");

/// Accesses and what they are looking for.
pub(crate) struct Block {
    pub(super) addresses: Vec<u64>,
    /// One each, of which the first so many still look for their page.
    pub(super) seekers: Vec<Seeker>,
    len: usize,
}

/// What is counted of every access.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) accesses: u64,
    /// Of the same lines, right after the accesses.
    pub(super) repeats: u64,
    pub(super) writes: u64,
}

impl Block {
    pub(super) fn new() -> Block {
        Block { addresses: vec![0; ROOM], seekers: vec![Seeker::default(); ROOM], len: 0 }
    }

    /// The addresses of its accesses.
    pub(super) fn addresses(&self) -> &[u64] {
        &self.addresses[..self.len]
    }

    /// Takes the next accesses. `seek` says of an address and whether it is stored to what it looks for, and whether it need not.
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
            // Written in any case and counted or not: what is found cannot be predicted.
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
