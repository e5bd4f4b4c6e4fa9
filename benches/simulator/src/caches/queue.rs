//! References that wait for their lines.
//!
//! ```text
//!   before a level   a b c d e f          it holds b, c and f
//!   after it         a d e                and their victims beside them, where the next level takes victims
//! ```

use alloc::vec;
use alloc::vec::Vec;

use crate::sets::{Lane, LruSets};
use crate::simulator::block;

/// References that one access makes at most: a walk through five levels in both dimensions makes 35, and the data are one.
pub(crate) const OF_AN_ACCESS: usize = 36;

/// Room for those of a block.
const ROOM: usize = block::ROOM * OF_AN_ACCESS;

/// How many sets a level brings near at a time: no more than the loads that this computer can have on their way.
const AHEAD: usize = 32;

/// What a line is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An entry of the guest's tables, or of the only ones.
    Guest,
    /// An entry of the host's tables, to find the guest's.
    HostOfTables,
    /// An entry of the host's tables, to find the page.
    HostOfData,
    /// A load or a store.
    Data,
}

impl Purpose {
    /// How many there are.
    pub(crate) const ALL: usize = 4;
}

/// A line, above two bits of purpose.
#[derive(Clone, Copy)]
pub(crate) struct Reference(u64);

/// No line.
const NONE: u64 = u64::MAX >> 2;

impl Reference {
    #[inline(always)]
    pub(crate) fn to(address: u64, purpose: Purpose) -> Reference {
        Reference(address >> 6 << 2 | purpose as u64)
    }

    pub(crate) fn line(self) -> u64 {
        self.0 >> 2
    }

    pub(crate) fn purpose(self) -> Purpose {
        [Purpose::Guest, Purpose::HostOfTables, Purpose::HostOfData, Purpose::Data][(self.0 & 3) as usize]
    }

    /// Found references stay in the queue where the line that they pushed out is not yet in its place.
    pub(crate) fn is_sought(self) -> bool {
        self.line() != NONE
    }

    fn as_found(self) -> Reference {
        Reference(NONE << 2 | self.0 & 3)
    }
}

/// How many references by purpose, 16 bits each.
#[derive(Clone, Copy, Default)]
struct Tally(u64);

const _: () = assert!(ROOM <= u16::MAX as usize, "a field of the tally holds all that may wait");

impl Tally {
    #[inline(always)]
    fn add(&mut self, reference: Reference, is_one: bool) {
        self.0 += u64::from(is_one) << (16 * (reference.0 & 3));
    }

    fn by_purpose(self) -> [u64; Purpose::ALL] {
        core::array::from_fn(|purpose| self.0 >> (16 * purpose) & 0xFFFF)
    }
}

pub(crate) struct Queue {
    waiting: Vec<Reference>,
    /// So many of them.
    len: usize,
    /// What each of them pushed out of the level above; `NONE` where it did not, or nobody asks.
    victims: Vec<u64>,
}

impl Queue {
    pub(crate) fn new() -> Queue {
        Queue { waiting: vec![Reference(0); ROOM], len: 0, victims: vec![NONE; ROOM] }
    }

    #[inline]
    pub(crate) fn push(&mut self, reference: Reference) {
        self.waiting[self.len] = reference;
        self.len += 1;
    }

    /// Adds as many references of one access as `write` writes.
    #[inline(always)]
    pub(crate) fn push_walk(&mut self, write: impl FnOnce(&mut [Reference; OF_AN_ACCESS]) -> usize) {
        self.len += write(self.waiting[self.len..].first_chunk_mut().expect("room for an access"));
    }

    /// How many are sought, by purpose.
    pub(crate) fn begin(&self) -> [u64; Purpose::ALL] {
        let mut tally = Tally::default();
        self.waiting[..self.len].iter().for_each(|&reference| tally.add(reference, true));
        tally.by_purpose()
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Keeps the references whose line is missing; how many, by purpose.
    #[inline(always)]
    pub(crate) fn keep_missing<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
        is_first: bool,
    ) -> [u64; Purpose::ALL] {
        let (waiting, mut kept) = (&mut self.waiting[..self.len], 0);
        let mut places = [(0, T::EMPTY); AHEAD];
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                let is_missing = sets.access_at(place, is_first);
                // Written in any case and counted or not: what is missing cannot be predicted.
                waiting[kept] = waiting[start + n];
                kept += usize::from(is_missing);
            }
        }
        self.len = kept;
        self.begin()
    }

    /// As [`Queue::keep_missing`], with what each of them pushed out.
    #[inline(always)]
    pub(crate) fn keep_missing_with_victims<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
    ) -> [u64; Purpose::ALL] {
        let (waiting, victims, mut kept) = (&mut self.waiting[..self.len], &mut self.victims[..self.len], 0);
        let mut places = [(0, T::EMPTY); AHEAD];
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                victims[kept] = sets.oldest(place).unwrap_or(NONE);
                let is_missing = sets.access_at(place, false);
                waiting[kept] = waiting[start + n];
                kept += usize::from(is_missing);
            }
        }
        self.len = kept;
        self.begin()
    }

    /// Keeps the references whose line is missing or that have a victim, as `access` says of a reference and the victim that it has.
    #[inline(always)]
    pub(crate) fn keep(
        &mut self,
        mut access: impl FnMut(Reference, Option<u64>) -> (bool, Option<u64>),
    ) -> [u64; Purpose::ALL] {
        let (mut kept, mut tally) = (0, Tally::default());
        for n in 0..self.len {
            let (reference, victim) = (self.waiting[n], self.victims[n]);
            let (is_missing, victim) = access(reference, (victim != NONE).then_some(victim));
            self.waiting[kept] = if is_missing { reference } else { reference.as_found() };
            self.victims[kept] = victim.unwrap_or(NONE);
            kept += usize::from(is_missing || victim.is_some());
            tally.add(reference, is_missing);
        }
        self.len = kept;
        tally.by_purpose()
    }
}
