//! The queue of references that wait for their lines.
//!
//! ```text
//!   before a level   a b c d e f          it holds b, c and f
//!   after it         a d e                and their victims beside them, where the next level takes victims
//! ```

use alloc::vec;
use alloc::vec::Vec;

use crate::purpose::Purpose;
use crate::sets::{Lane, LruSets, Vectors};
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
    /// Number of references that were added, by purpose.
    added: Tally,
    /// Victim of each reference in the level above; `NONE` if it has no victim, or the next level takes no victims.
    victims: Vec<u64>,
}

/// The references that a level looks up in one turn; those behind the last are of no meaning.
#[inline(always)]
fn of_a_turn(waiting: &[Reference], start: usize) -> [Reference; AHEAD] {
    *waiting[start..].first_chunk().expect("room behind the last reference")
}

/// Puts the references that a turn keeps where all that it has read end or before.
#[inline(always)]
fn put_turn(waiting: &mut [Reference], start: usize, kept: [Reference; AHEAD]) {
    *waiting[start..].first_chunk_mut().expect("room behind the last reference") = kept;
}

impl Queue {
    pub(crate) fn new() -> Queue {
        // A level reads and writes a whole number of them at a time, also at the end.
        let (waiting, next) = (vec![Reference(0); ROOM + AHEAD], vec![Reference(0); ROOM + AHEAD]);
        Queue { waiting, next, len: 0, added: Tally::default(), victims: vec![NONE; ROOM] }
    }

    /// Adds references to the data at some addresses.
    #[inline(always)]
    pub(crate) fn push_data(&mut self, addresses: &[u64]) {
        for (waiting, &address) in self.waiting[self.len..].iter_mut().zip(addresses) {
            *waiting = Reference::to(address, Purpose::Data);
        }
        self.len += addresses.len();
        self.added.0 += (addresses.len() as u64) << (16 * Purpose::Data as usize);
    }

    /// Room for the references of one walk.
    #[inline(always)]
    pub(crate) fn room_for_walk(&mut self) -> &mut [Reference; OF_AN_ACCESS] {
        self.waiting[self.len..].first_chunk_mut().expect("room for an access")
    }

    /// Adds the references that a walk wrote there, by their number: guest, host of tables, host of data.
    #[inline(always)]
    pub(crate) fn push_walk(&mut self, [guest, host_of_tables, host_of_data]: [usize; 3]) {
        self.len += guest + host_of_tables + host_of_data;
        self.added.0 += (guest | host_of_tables << 16 | host_of_data << 32) as u64;
    }

    /// Number of references that were added, by purpose.
    pub(crate) fn added(&self) -> [u64; Purpose::ALL] {
        self.added.by_purpose()
    }

    /// Number of waiting references by purpose, without those that complete pairs.
    #[inline(always)]
    fn waiting_by_purpose(&self) -> [u64; Purpose::ALL] {
        // Sums of bits, which the compiler makes of many references at a time.
        let (mut all, mut odd, mut high, mut both) = (0, 0, 0, 0);
        for reference in &self.waiting[..self.len] {
            let (is_one, bits) = (!reference.0 >> COMPLETES.trailing_zeros() & 1, reference.0);
            let (is_odd, is_high) = (bits & is_one, bits >> 1 & is_one);
            all += is_one;
            odd += is_odd;
            high += is_high;
            both += is_odd & is_high;
        }
        [all + both - odd - high, odd - both, high - both, both]
    }

    /// Lines of loads and stores that are still sought.
    pub(crate) fn data_lines(&self) -> impl Iterator<Item = u64> + '_ {
        let is_data = |of: &&Reference| of.is_sought() && of.0 & COMPLETES == 0 && of.purpose() == Purpose::Data;
        self.waiting[..self.len].iter().filter(is_data).map(|reference| reference.line())
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.added = Tally::default();
    }

    /// Keeps the references with a missing line. Returns their number, by purpose. `is_near` is that of
    /// [`LruSets::access_at`].
    #[inline(always)]
    pub(crate) fn keep_missing<T: Lane, V: Vectors, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
        is_near: bool,
    ) -> [u64; Purpose::ALL] {
        self.len = if is_near { self.sift::<_, _, _, true>(sets) } else { self.sift::<_, _, _, false>(sets) };
        self.waiting_by_purpose()
    }

    /// Does the same, and returns their number.
    #[inline(always)]
    fn sift<T: Lane, V: Vectors, const LANES: usize, const IS_NEAR: bool>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
    ) -> usize {
        let (waiting, mut kept) = (&mut self.waiting, 0);
        let (mut places, mut kept_here) = ([(0, T::EMPTY); AHEAD], [Reference(0); AHEAD]);
        for start in (0..self.len).step_by(AHEAD) {
            let (here, sought) = (of_a_turn(waiting, start), AHEAD.min(self.len - start));
            sets.places(here[..sought].iter().map(|reference| reference.line()), &mut places);
            let mut kept_of_here = 0;
            for n in 0..sought {
                let is_missing = sets.access_at(places[n], IS_NEAR);
                // Written in any case, and counted only on a miss, because misses cannot be predicted.
                kept_here[kept_of_here % AHEAD] = here[n];
                kept_of_here += usize::from(is_missing);
            }
            put_turn(waiting, kept, kept_here);
            kept += kept_of_here;
        }
        kept
    }

    /// Does the same as [`Queue::keep_missing`], and stores the victim of each reference.
    #[inline(always)]
    pub(crate) fn keep_missing_with_victims<T: Lane, V: Vectors, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
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
        self.waiting_by_purpose()
    }

    /// Does the same as [`Queue::keep_missing_with_victims`]. After each missing line, the other line of its pair comes
    /// into the sets too. If it is missing, it waits behind, with a victim of its own.
    #[inline(always)]
    pub(crate) fn keep_missing_with_pairs_and_victims<T: Lane, V: Vectors, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
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
                let place = LruSets::<T, V, LANES>::other_of_pair(place);
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
    pub(crate) fn keep_missing_and_complete_pairs<T: Lane, V: Vectors, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
    ) -> [u64; Purpose::ALL] {
        let (waiting, mut kept) = (&mut self.waiting, 0);
        let (mut places, mut kept_here) = ([(0, T::EMPTY); AHEAD], [Reference(0); AHEAD]);
        for start in (0..self.len).step_by(AHEAD) {
            let (here, sought) = (of_a_turn(waiting, start), AHEAD.min(self.len - start));
            sets.places(here[..sought].iter().map(|reference| reference.line()), &mut places);
            let mut kept_of_here = 0;
            for n in 0..sought {
                // All of it in any case, as misses cannot be predicted.
                let is_missing = sets.access_at(places[n], false);
                let is_completed = sets.complete_at(LruSets::<T, V, LANES>::other_of_pair(places[n]), is_missing);
                kept_here[kept_of_here % AHEAD] = here[n].with_pair(is_completed);
                kept_of_here += usize::from(is_missing);
            }
            put_turn(waiting, kept, kept_here);
            kept += kept_of_here;
        }
        self.len = kept;
        self.waiting_by_purpose()
    }

    /// Does the same as [`Queue::keep_missing`], and after each line that has the other one of its pair with it, looks
    /// that up too.
    #[inline(always)]
    pub(crate) fn keep_missing_of_pairs<T: Lane, V: Vectors, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
    ) -> [u64; Purpose::ALL] {
        let (waiting, mut kept) = (&mut self.waiting, 0);
        let (mut places, mut kept_here) = ([(0, T::EMPTY); AHEAD], [Reference(0); AHEAD]);
        for start in (0..self.len).step_by(AHEAD) {
            let (here, sought) = (of_a_turn(waiting, start), AHEAD.min(self.len - start));
            sets.places_of_pairs(here[..sought].iter().map(|reference| reference.line()), &mut places);
            let mut kept_of_here = 0;
            for n in 0..sought {
                let is_missing = sets.access_at(places[n], false);
                // Predictable: a pair that is not used for long has neither line.
                if here[n].0 & WITH_PAIR != 0 {
                    sets.access_at(LruSets::<T, V, LANES>::other_of_pair(places[n]), false);
                }
                kept_here[kept_of_here % AHEAD] = here[n];
                kept_of_here += usize::from(is_missing);
            }
            put_turn(waiting, kept, kept_here);
            kept += kept_of_here;
        }
        self.len = kept;
        self.waiting_by_purpose()
    }

    /// Keeps the references with a missing line, or with a victim of this level if it gives them to the next. Each line
    /// that is present leaves the sets, and each victim of the level above comes into them.
    #[inline(always)]
    pub(crate) fn keep_missing_and_take_victims<T: Lane, V: Vectors, const LANES: usize>(
        &mut self,
        sets: &mut LruSets<'_, T, V, LANES>,
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
