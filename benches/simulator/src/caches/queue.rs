//! The queue of references that wait for their lines.
//!
//! ```text
//!   before a level   a b c d e f          it holds b, c and f
//!   after it         a d e                and their victims beside them, where the next level takes victims
//! ```

use alloc::vec;
use alloc::vec::Vec;

use crate::purpose::Purpose;
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

/// A line number, above a bit that says that the other line of its pair goes with it, one that says that it completes
/// a pair, and two bits of purpose.
#[derive(Clone, Copy)]
pub(crate) struct Reference(u64);

const LINE_SHIFT: u32 = 4;

const COMPLETES: u64 = 4;

const WITH_PAIR: u64 = 8;

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

    /// The same reference; the other line of its pair goes with it, if that is wanted.
    fn with_pair(self, is_wanted: bool) -> Reference {
        Reference(self.0 | u64::from(is_wanted) << WITH_PAIR.trailing_zeros())
    }

    fn as_found(self) -> Reference {
        Reference(NONE << LINE_SHIFT | self.0 & (COMPLETES | 3))
    }
}

/// Number of references by purpose, 16 bits each, without those that complete pairs.
#[derive(Clone, Copy, Default)]
struct Tally(u64);

const _: () = assert!(ROOM <= u16::MAX as usize, "a field of the tally holds all that may wait");

/// What a reference adds to a tally, by its lowest three bits.
const ONE: [u64; 8] = [1, 1 << 16, 1 << 32, 1 << 48, 0, 0, 0, 0];

impl Tally {
    #[inline(always)]
    fn add(&mut self, reference: Reference, is_one: bool) {
        self.0 += ONE[(reference.0 & (COMPLETES | 3)) as usize] & u64::from(is_one).wrapping_neg();
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

    /// Keeps the references with a missing line. Returns their number, by purpose. `is_near` is that of
    /// [`LruSets::access_at`].
    #[inline(always)]
    pub(crate) fn keep_missing<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
        is_near: bool,
    ) -> [u64; Purpose::ALL] {
        let (waiting, mut kept) = (&mut self.waiting[..self.len], 0);
        let mut places = [(0, T::EMPTY); AHEAD];
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                let is_missing = sets.access_at(place, is_near);
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

    /// Does the same as [`Queue::keep_missing_with_victims`]. After each missing line, the other line of its pair comes
    /// into the sets too. If it is missing, it waits behind, with a victim of its own.
    #[inline(always)]
    pub(crate) fn keep_missing_with_pairs_and_victims<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
    ) -> [u64; Purpose::ALL] {
        let (waiting, next, mut kept) = (&self.waiting[..self.len], &mut self.next[..2 * self.len], 0);
        let victims = &mut self.victims[..2 * self.len];
        let (mut places, mut tally) = ([(0, T::EMPTY); AHEAD], Tally::default());
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                // All of it in any case, as misses cannot be predicted.
                let reference = waiting[start + n];
                victims[kept] = sets.oldest(place).unwrap_or(NONE);
                let is_missing = sets.access_at(place, false);
                next[kept] = reference;
                kept += usize::from(is_missing);
                tally.add(reference, is_missing);
                let place = LruSets::<T, LANES>::other_of_pair(place);
                victims[kept] = sets.oldest(place).unwrap_or(NONE);
                next[kept] = reference.other_of_pair();
                kept += usize::from(sets.complete_at(place, is_missing));
            }
        }
        core::mem::swap(&mut self.waiting, &mut self.next);
        self.len = kept;
        tally.by_purpose()
    }

    /// Does the same as [`Queue::keep_missing`]. After each missing line, the other line of its pair comes into the
    /// sets too. If it is missing, it goes with the reference to [`Queue::keep_missing_of_pairs`].
    #[inline(always)]
    pub(crate) fn keep_missing_and_complete_pairs<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
    ) -> [u64; Purpose::ALL] {
        let (waiting, mut kept) = (&mut self.waiting[..self.len], 0);
        let mut places = [(0, T::EMPTY); AHEAD];
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                // All of it in any case, as misses cannot be predicted.
                let is_missing = sets.access_at(place, false);
                let is_completed = sets.complete_at(LruSets::<T, LANES>::other_of_pair(place), is_missing);
                waiting[kept] = waiting[start + n].with_pair(is_completed);
                kept += usize::from(is_missing);
            }
        }
        self.len = kept;
        self.begin()
    }

    /// Does the same as [`Queue::keep_missing`], and after each line that has the other one of its pair with it, looks
    /// that up too.
    #[inline(always)]
    pub(crate) fn keep_missing_of_pairs<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
    ) -> [u64; Purpose::ALL] {
        let (waiting, mut kept) = (&mut self.waiting[..self.len], 0);
        let mut places = [(0, T::EMPTY); AHEAD];
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places_of_pairs(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            for (n, &place) in places[..sought].iter().enumerate() {
                let reference = waiting[start + n];
                let is_missing = sets.access_at(place, false);
                // Predictable: a pair that is not used for long has neither line.
                if reference.0 & WITH_PAIR != 0 {
                    sets.access_at(LruSets::<T, LANES>::other_of_pair(place), false);
                }
                waiting[kept] = reference;
                kept += usize::from(is_missing);
            }
        }
        self.len = kept;
        self.begin()
    }

    /// Keeps the references with a missing line, or with a victim of this level if it gives them to the next. Each line
    /// that is present leaves the sets, and each victim of the level above comes into them.
    #[inline(always)]
    pub(crate) fn keep_missing_and_take_victims<T: Lane, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, LANES>,
        gives_victims: bool,
    ) -> [u64; Purpose::ALL] {
        let (waiting, victims) = (&mut self.waiting[..self.len], &mut self.victims[..self.len]);
        let (mut kept, mut tally) = (0, Tally::default());
        let (mut places, mut of_victims) = ([(0, T::EMPTY); AHEAD], [(0, T::EMPTY); AHEAD]);
        for start in (0..waiting.len()).step_by(AHEAD) {
            let sought = sets.places(waiting[start..].iter().map(|reference| reference.line()), &mut places);
            sets.places(victims[start..].iter().copied(), &mut of_victims);
            for (n, (&place, &of_victim)) in places[..sought].iter().zip(&of_victims).enumerate() {
                let (reference, victim) = (waiting[start + n], victims[start + n]);
                let is_missing = reference.is_sought() & !sets.take_at(place, reference.is_sought());
                let mut evicted = NONE;
                if victim != NONE {
                    let oldest = sets.oldest(of_victim).unwrap_or(NONE);
                    evicted = if sets.access_at(of_victim, false) & gives_victims { oldest } else { NONE };
                }
                waiting[kept] = if is_missing { reference } else { reference.as_found() };
                victims[kept] = evicted;
                kept += usize::from(is_missing | (evicted != NONE));
                tally.add(reference, is_missing);
            }
        }
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
