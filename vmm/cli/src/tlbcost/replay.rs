//! The accesses of a program without the program: on base and on 2 MiB pages, with ever more of them under way at once; and the most that a
//! page size can save of a program that makes them at a pace of its own.
//!
//! ```text
//!   1 chain   a ─▶ b ─▶ c ─▶ d ─▶ e ─▶ f      each waits for the one before: what translation costs, costs all of it
//!   2 chains  a ──▶ c ──▶ e                   half of it is hidden
//!             b ──▶ d ──▶ f
//!   free      a b c d e f                     none waits: as fast as the core can
//!
//!   saved of a visit                  ╭────── 1         The program is some mix of these. A mix takes the mean of their times and saves
//!          │                ╭─ 2 ─────╯                 the mean of their savings, so no mix that is as fast as the program saves
//!          │      ╭─ 4 ─────╯                           more than the hull over them at the program's own time a visit.
//!          │ free ╯
//!          └──────────────▲──────────▶ time of a visit on base pages
//!                         pace of the program
//! ```

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;
use wideleaf_memory::GuestRam;
use wideleaf_policies::PageSize;

use super::sample::{STORE, Sample};
use super::work::Work;
use crate::failure::Failure;
use crate::interrupts::Interrupts;

/// Times that each burst is replayed, and the shortest counts: what interrupts one only ever adds to it.
pub const TRIES: usize = 5;

/// Words of a line.
const LINE_WORDS: usize = 8;

/// What a visit of a line costs where so many of them are under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pace {
    /// Chains; `None`: no visit waits for another.
    pub chains: Option<u32>,
    /// Nanoseconds of a visit on base pages.
    pub base_ns: f64,
    /// And on 2 MiB pages.
    pub huge_ns: f64,
}

impl Pace {
    fn saved(&self) -> f64 {
        (self.base_ns - self.huge_ns).max(0.0)
    }
}

/// One way to replay a burst.
type Lap = fn(&[AtomicU64], &[u32]);

/// All of them, by their chains.
const LAPS: [(Option<u32>, Lap); 6] = [
    (Some(1), chained::<1>),
    (Some(2), chained::<2>),
    (Some(4), chained::<4>),
    (Some(8), chained::<8>),
    (Some(16), chained::<16>),
    (None, free),
];

/// Replays what was sampled of `work` in memory of its own on both page sizes.
///
/// # Errors
/// [`Failure`]: there is not so much memory, or somebody wants no more of it.
pub fn replay(work: &Work, sample: &Sample, interrupts: &Interrupts) -> Result<Vec<Pace>, Failure> {
    let base = work.map(PageSize::Base4K, interrupts)?;
    let huge = work.map(PageSize::Huge2M, interrupts)?;
    let visits = sample.kept().max(1) as f64;
    let mut paces = Vec::new();
    for (chains, lap) in LAPS {
        let mut sums = (0.0, 0.0);
        for burst in &sample.bursts {
            let mut least = (f64::INFINITY, f64::INFINITY);
            for _ in 0..TRIES {
                least = (least.0.min(nanoseconds(lap, &base, burst)), least.1.min(nanoseconds(lap, &huge, burst)));
                interrupts.check()?;
            }
            sums = (sums.0 + least.0, sums.1 + least.1);
        }
        paces.push(Pace { chains, base_ns: sums.0 / visits, huge_ns: sums.1 / visits });
    }
    Ok(paces)
}

fn nanoseconds(lap: Lap, ram: &GuestRam, burst: &[u32]) -> f64 {
    let words = ram.words(ram.ranges()[0]);
    let start = Instant::now();
    lap(words, burst);
    start.elapsed().as_secs_f64() * 1e9
}

/// Each visit waits for that so many before it: its address has a part that was loaded there. All of the memory is zero, which only we
/// know, so the part changes nothing.
fn chained<const CHAINS: usize>(words: &[AtomicU64], burst: &[u32]) {
    let mut chains = [0; CHAINS];
    for lines in burst.chunks(CHAINS) {
        for (chain, line) in chains.iter_mut().zip(lines) {
            *chain = visit(words, *line, *chain);
        }
    }
    black_box(chains);
}

/// No visit waits for another.
fn free(words: &[AtomicU64], burst: &[u32]) {
    let sum = burst.iter().fold(0, |sum, line| sum | visit(words, *line, 0));
    black_box(sum);
}

/// One visit behind what gave `after`; gives what the next one may wait for. Who stores has its line loaded first, as the core has it.
#[inline(always)]
fn visit(words: &[AtomicU64], visit: u32, after: u64) -> u64 {
    let word = &words[(visit & !STORE) as usize * LINE_WORDS + after as usize];
    let loaded = word.load(Ordering::Relaxed);
    if visit & STORE != 0 {
        word.store(loaded, Ordering::Relaxed);
    }
    loaded
}

/// The most that 2 MiB pages can save of a visit, in nanoseconds, where the program makes one in `pace_ns` on base pages: the hull over the
/// mixes of [`Pace`]s that are as fast. A program that is faster than all of them saves what the fastest does.
pub fn saved_at_most(paces: &[Pace], pace_ns: f64) -> f64 {
    let fastest = paces.iter().min_by(|one, other| one.base_ns.total_cmp(&other.base_ns));
    let alone = paces.iter().filter(|pace| pace.base_ns <= pace_ns).map(Pace::saved);
    let mixed = paces.iter().flat_map(|slow| {
        let fast = paces.iter().filter(|fast| fast.base_ns <= pace_ns && slow.base_ns > pace_ns);
        fast.map(|fast| {
            let of_slow = (pace_ns - fast.base_ns) / (slow.base_ns - fast.base_ns);
            slow.saved() * of_slow + fast.saved() * (1.0 - of_slow)
        })
    });
    let most = alone.chain(mixed).fold(0.0, f64::max);
    if fastest.is_some_and(|fastest| fastest.base_ns > pace_ns) { fastest.map_or(0.0, Pace::saved) } else { most }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(base_ns: f64, huge_ns: f64) -> Pace {
        Pace { chains: None, base_ns, huge_ns }
    }

    #[test]
    fn a_mix_of_two_paces_saves_the_mean_of_both_at_most() {
        let paces = [pace(100.0, 60.0), pace(10.0, 6.0)];
        assert_eq!(saved_at_most(&paces, 10.0), 4.0);
        // Half of the accesses one after another, half of them at once.
        assert_eq!(saved_at_most(&paces, 55.0), 22.0);
        assert_eq!(saved_at_most(&paces, 100.0), 40.0);
        assert_eq!(saved_at_most(&paces, 1_000.0), 40.0, "no access saves more than one that all wait for");
    }

    #[test]
    fn the_bound_is_the_hull_and_no_dent_in_it() {
        // The one in the middle saves less than the mix of its neighbours: the program may be the mix.
        let paces = [pace(100.0, 60.0), pace(55.0, 54.0), pace(10.0, 6.0)];
        assert_eq!(saved_at_most(&paces, 55.0), 22.0);
        // The one that is fast saves more than all that are slower: a program that waits elsewhere still can.
        assert_eq!(saved_at_most(&[pace(10.0, 2.0), pace(100.0, 99.0)], 50.0), 8.0);
    }

    #[test]
    fn a_program_faster_than_its_replay_saves_what_the_fastest_does() {
        assert_eq!(saved_at_most(&[pace(10.0, 6.0), pace(100.0, 60.0)], 5.0), 4.0);
        assert_eq!(saved_at_most(&[pace(10.0, 11.0)], 20.0), 0.0, "pages that cost more save nothing");
        assert_eq!(saved_at_most(&[], 20.0), 0.0);
    }

    #[test]
    fn every_lap_touches_each_line_and_stores_nothing_but_zero() {
        let words: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        for (_, lap) in LAPS {
            lap(&words, &[0, 1 | STORE, 7, 7 | STORE, 3]);
        }
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn a_line_outside_the_memory_is_no_access() {
        chained::<2>(&[AtomicU64::new(0)], &[1]);
    }
}
