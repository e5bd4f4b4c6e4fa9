//! The ways to visit the lines of a list: with more or fewer visits in progress at once, and prefetched or not.
//!
//! ```text
//!   1 chain    a ─▶ b ─▶ c ─▶ d ─▶ e ─▶ f     each waits for the one before: the full cost of translation shows
//!   2 chains   a ──▶ c ──▶ e                  half of it is hidden
//!              b ──▶ d ──▶ f
//!   free       a b c d e f                    none waits: as many at once as the core has instructions in flight
//!   ahead 2    a b c d e f                    and each is prefetched two visits ahead, as by a prefetcher, or a
//!              c d e f                        kernel that prefetches its lines itself
//!   asked      a b c d e f                    prefetched, and not even loaded: no program overlaps more
//! ```
//!
//! A lap that is slower than the program that it models is not a bound of it. So the fast laps have few
//! instructions and no unpredictable branch: a visit is the number of a word, with nothing to mask out, and one
//! test distinguishes eight visits that only load from others.

use std::hint::{black_box, select_unpredictable};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use wideleaf_kernels::arena::prefetch_behind;

use super::sample::STORE;

/// How the visits of a lap wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LapOrder {
    /// Each visit waits for the one this number of visits before it.
    Chains(u32),
    /// No visit waits for another.
    Free,
    /// No visit waits for another, and each is prefetched this number of visits ahead.
    Ahead(u32),
    /// Each is prefetched and none is waited for. A program that needs the data does not do that.
    Asked,
}

/// Amount of prefetching, from that of every program to that of none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Prefetching {
    /// No line: a line is visited when it is needed.
    Never,
    /// All lines, and all are needed.
    Early,
    /// All lines, and none is waited for.
    Only,
}

impl LapOrder {
    /// Amount of prefetching of such a lap.
    pub fn prefetching(self) -> Prefetching {
        match self {
            LapOrder::Chains(_) | LapOrder::Free => Prefetching::Never,
            LapOrder::Ahead(_) => Prefetching::Early,
            LapOrder::Asked => Prefetching::Only,
        }
    }
}

/// Function that visits each line of a list.
pub type Lap = fn(&[AtomicU64], &[u32]);

/// All laps. 128 lines ahead are a quarter of a first-level cache of 32 KiB: a prefetched line is still there when
/// it is visited. More are slower.
pub const LAPS: [(LapOrder, Lap); 10] = [
    (LapOrder::Chains(1), chained::<1>),
    (LapOrder::Chains(2), chained::<2>),
    (LapOrder::Chains(4), chained::<4>),
    (LapOrder::Chains(8), chained::<8>),
    (LapOrder::Chains(16), chained::<16>),
    (LapOrder::Free, ahead::<0>),
    (LapOrder::Ahead(16), ahead::<16>),
    (LapOrder::Ahead(64), ahead::<64>),
    (LapOrder::Ahead(128), ahead::<128>),
    (LapOrder::Asked, asked),
];

/// Number of visits that are tested together.
const STEP: usize = 8;

/// Each visit waits for the one `CHAINS` before it: a part of its address was loaded there. All of the memory is
/// zero, which neither compiler nor CPU can know, so the part changes nothing.
fn chained<const CHAINS: usize>(words: &[AtomicU64], burst: &[u32]) {
    let nowhere = AtomicU64::new(0);
    let mut chains = [0; CHAINS];
    for visits in burst.chunks(CHAINS) {
        for (chain, visit) in chains.iter_mut().zip(visits) {
            *chain = visited(words, *visit, *chain, &nowhere);
        }
    }
    black_box(chains);
}

/// No visit waits for another; if `AHEAD` is not 0, each has been prefetched that number of visits ahead.
fn ahead<const AHEAD: usize>(words: &[AtomicU64], burst: &[u32]) {
    const { assert!(AHEAD.is_multiple_of(STEP), "lists are gone through in steps") };
    let nowhere = AtomicU64::new(0);
    let (steps, rest) = burst.as_chunks::<STEP>();
    let mut sum = 0;
    for (step, later) in steps.iter().zip(steps.iter().skip(AHEAD / STEP)) {
        if AHEAD > 0 {
            asked(words, later);
        }
        sum |= visited_at_once(words, step, &nowhere);
    }
    // These were prefetched on the way; the rest of a list, a few visits of half a million, was not.
    for step in &steps[steps.len().saturating_sub(AHEAD / STEP)..] {
        sum |= visited_at_once(words, step, &nowhere);
    }
    sum |= rest.iter().fold(0, |sum, visit| sum | visited(words, *visit, 0, &nowhere));
    black_box(sum);
}

/// Prefetches each line.
fn asked(words: &[AtomicU64], burst: &[u32]) {
    let Some(first) = words.first() else { return };
    burst.iter().for_each(|visit| prefetch_behind(first, *visit as usize * size_of::<AtomicU64>()));
}

/// Makes these visits, which do not wait for each other.
#[inline(always)]
fn visited_at_once(words: &[AtomicU64], visits: &[u32; STEP], nowhere: &AtomicU64) -> u64 {
    if visits.iter().fold(0, |all, visit| all | visit) & STORE == 0 {
        visits.iter().fold(0, |sum, visit| sum | words[*visit as usize].load(Ordering::Relaxed))
    } else {
        visits.iter().fold(0, |sum, visit| sum | visited(words, *visit, 0, nowhere))
    }
}

/// One visit after the one that gave `after`; returns the value that the next one may wait for. A visit that stores
/// first loads its line, as the core does, and a visit that loads stores to `nowhere`: loads and stores alternate
/// in a way that no branch predictor can foresee.
#[inline(always)]
fn visited(words: &[AtomicU64], visit: u32, after: u64, nowhere: &AtomicU64) -> u64 {
    let word = &words[visit as usize + after as usize];
    let loaded = word.load(Ordering::Relaxed);
    select_unpredictable(visit & STORE != 0, word, nowhere).store(loaded, Ordering::Relaxed);
    loaded
}

#[cfg(test)]
mod tests {
    use super::super::sample::LINE_WORDS;
    use super::*;

    fn zeroes(lines: u32) -> Vec<AtomicU64> {
        (0..lines * LINE_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    /// Laps that load the lines that they visit.
    fn loading() -> impl Iterator<Item = (LapOrder, Lap)> {
        LAPS.into_iter().filter(|(way, _)| *way != LapOrder::Asked)
    }

    #[test]
    fn every_lap_takes_lists_of_any_length_and_leaves_the_memory_zero() {
        let words = zeroes(512);
        let list: Vec<u32> = (0..300).map(|n| (n * 5 % 512 * LINE_WORDS) | (n % 3 / 2 * STORE)).collect();
        for (_, lap) in LAPS {
            [0, 1, 7, 8, 9, 128, 136, 300].iter().for_each(|length| lap(&words, &list[..*length]));
        }
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn every_lap_that_loads_visits_each_line_of_the_list() {
        // 299 lines exist, and one line of the list does not: whichever it is, the lap ends there.
        let words = zeroes(299);
        for missing in [0, 100, 291, 299] {
            let mut list: Vec<u32> = (0..300).map(|n| n % 299 * LINE_WORDS).collect();
            list[missing] = 299 * LINE_WORDS;
            for (way, lap) in loading() {
                let lap = std::panic::AssertUnwindSafe(|| lap(&words, &list));
                assert!(std::panic::catch_unwind(lap).is_err(), "{way:?} skipped visit {missing}");
            }
        }
    }

    #[test]
    fn only_a_visit_that_stores_writes_to_its_line() {
        // A word that is not zero is written back unchanged, so the test checks where a visit stores.
        let words = zeroes(2);
        words[0].store(7, Ordering::Relaxed);
        let nowhere = AtomicU64::new(0);
        assert_eq!(visited(&words, 0, 0, &nowhere), 7);
        assert_eq!(nowhere.load(Ordering::Relaxed), 7, "a load stores nowhere");
        words[1].store(9, Ordering::Relaxed);
        assert_eq!(visited(&words, STORE, 0, &nowhere), 9);
        assert_eq!(nowhere.load(Ordering::Relaxed), 7, "a store stores in its line");
    }

    #[test]
    fn a_visit_of_a_chain_is_where_the_previous_one_pointed() {
        let words = zeroes(2);
        words[0].store(8, Ordering::Relaxed);
        words[8].store(3, Ordering::Relaxed);
        let nowhere = AtomicU64::new(0);
        assert_eq!(visited(&words, 0, 8, &nowhere), 3);
    }

    #[test]
    fn a_prefetched_line_need_not_exist() {
        asked(&zeroes(1), &[0, 1 << 20]);
        asked(&[], &[0]);
    }
}
