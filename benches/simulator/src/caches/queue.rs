//! The queue of references that wait for their lines.
//!
//! ```text
//!   before a level   a b c d e f          it holds b, c and f
//!   after it         a d e                and their victims beside them, where the next level takes victims
//! ```

use alloc::vec;
use alloc::vec::Vec;

use crate::sets::{Lane, LruSets};
use crate::simulator::block;

/// Largest number of references of one access: a walk through five levels in both dimensions makes 35, and the
/// data are one.
pub(crate) const OF_AN_ACCESS: usize = 36;

/// Capacity for the references of a block, each with the other line of its pair.
const ROOM: usize = 2 * block::ROOM * OF_AN_ACCESS;

/// Number of sets that a level prefetches at a time: at most the number of loads that the host CPU can
/// have in flight.
const AHEAD: usize = 32;

/// Reason for reading a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An entry of the guest's tables, or of the native ones.
    Guest,
    /// An entry of the host's tables, to find the guest's.
    HostOfTables,
    /// An entry of the host's tables, to find the page.
    HostOfData,
    /// A load or a store.
    Data,
}

impl Purpose {
    /// Number of purposes.
    pub(crate) const ALL: usize = 4;
}

/// A line number, above a bit that says that it completes a pair, and two bits of purpose.
#[derive(Clone, Copy)]
pub(crate) struct Reference(u64);

const LINE_SHIFT: u32 = 3;

const COMPLETES: u64 = 4;

/// Line number that stands for none.
const NONE: u64 = u64::MAX >> LINE_SHIFT;

impl Reference {
    #[inline(always)]
    pub(crate) fn to(address: u64, purpose: Purpose) -> Reference {
        Reference(address >> 6 << LINE_SHIFT | purpose as u64)
    }

    /// The other line of its 128 aligned bytes. It is fetched, but not counted.
    fn other_of_pair(self) -> Reference {
        Reference((self.0 ^ 1 << LINE_SHIFT) | COMPLETES)
    }

    pub(crate) fn line(self) -> u64 {
        self.0 >> LINE_SHIFT
    }

    pub(crate) fn purpose(self) -> Purpose {
        [Purpose::Guest, Purpose::HostOfTables, Purpose::HostOfData, Purpose::Data][(self.0 & 3) as usize]
    }

    /// Whether the line is still sought. Found references stay in the queue while their victim waits for its place.
    pub(crate) fn is_sought(self) -> bool {
        self.line() != NONE
    }

    fn as_found(self) -> Reference {
        Reference(NONE << LINE_SHIFT | self.0 & (COMPLETES | 3))
    }
}

/// Number of references by purpose, 16 bits each, without those that complete pairs.
#[derive(Clone, Copy, Default)]
struct Tally(u64);

const _: () = assert!(ROOM <= u16::MAX as usize, "a field of the tally holds all that may wait");

impl Tally {
    #[inline(always)]
    fn add(&mut self, reference: Reference, is_one: bool) {
        let is_counted = u64::from(is_one) & !(reference.0 / COMPLETES) & 1;
        self.0 += is_counted << (16 * (reference.0 & 3));
    }

    fn by_purpose(self) -> [u64; Purpose::ALL] {
        core::array::from_fn(|purpose| self.0 >> (16 * purpose) & 0xFFFF)
    }
}

pub(crate) struct Queue {
    waiting: Vec<Reference>,
    /// Room for those that go on, where there may be more of them than came.
    next: Vec<Reference>,
    /// Number of waiting references.
    len: usize,
    /// Victim of each reference in the level above; `NONE` if it has no victim, or the next level takes no victims.
    victims: Vec<u64>,
}

impl Queue {
    pub(crate) fn new() -> Queue {
        Queue { waiting: vec![Reference(0); ROOM], next: vec![Reference(0); ROOM], len: 0, victims: vec![NONE; ROOM] }
    }

    #[inline]
    pub(crate) fn push(&mut self, reference: Reference) {
        self.waiting[self.len] = reference;
        self.len += 1;
    }

    /// Adds the references of one access; `write` returns their number.
    #[inline(always)]
    pub(crate) fn push_walk(&mut self, write: impl FnOnce(&mut [Reference; OF_AN_ACCESS]) -> usize) {
        self.len += write(self.waiting[self.len..].first_chunk_mut().expect("room for an access"));
    }

    /// Number of sought references, by purpose.
    pub(crate) fn begin(&self) -> [u64; Purpose::ALL] {
        let mut tally = Tally::default();
        self.waiting[..self.len].iter().for_each(|&reference| tally.add(reference, true));
        tally.by_purpose()
    }

    /// Lines of loads and stores that are still sought.
    pub(crate) fn data_lines(&self) -> impl Iterator<Item = u64> + '_ {
        let is_data = |of: &&Reference| of.is_sought() && of.0 & COMPLETES == 0 && of.purpose() == Purpose::Data;
        self.waiting[..self.len].iter().filter(is_data).map(|reference| reference.line())
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Keeps the references with a missing line. Returns their number, by purpose.
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
                // Written in any case, and counted only on a miss, because misses cannot be predicted.
                waiting[kept] = waiting[start + n];
                kept += usize::from(is_missing);
            }
        }
        self.len = kept;
        self.begin()
    }

    /// Does the same as [`Queue::keep_missing`], and stores the victim of each reference.
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

    /// Does the same as [`Queue::keep_missing`], and stores the victim of each reference if `gives_victims`. After
    /// each missing line, the other line of its pair comes into the sets too. If it is missing, it waits behind.
    #[inline(always)]
    pub(crate) fn keep_missing_with_pairs<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
        gives_victims: bool,
    ) -> [u64; Purpose::ALL] {
        let (waiting, next, mut kept) = (&self.waiting[..self.len], &mut self.next[..2 * self.len], 0);
        let victims = &mut self.victims[..2 * self.len];
        let (mut places, mut tally) = ([(0, T::EMPTY); AHEAD], Tally::default());
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                let reference = waiting[start + n];
                if gives_victims {
                    victims[kept] = sets.oldest(place).unwrap_or(NONE);
                }
                if !sets.access_at(place, false) {
                    continue;
                }
                next[kept] = reference;
                kept += 1;
                tally.add(reference, true);
                let other = reference.other_of_pair();
                let place = sets.place(other.line());
                if gives_victims {
                    victims[kept] = sets.oldest(place).unwrap_or(NONE);
                }
                next[kept] = other;
                kept += usize::from(sets.complete_at(place));
            }
        }
        core::mem::swap(&mut self.waiting, &mut self.next);
        self.len = kept;
        tally.by_purpose()
    }

    /// Keeps the references with a missing line or a victim. `access` gets a reference with its previous victim,
    /// and returns whether the line is missing, and the new victim.
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
