//! Replays the accesses of a program without the program, on base and on 2 MiB pages, in every [way](super::laps)
//! to make them.
//!
//! ```text
//!   round 1   1 chain: base, all bursts │ huge, all bursts    2 chains: huge │ base    4 chains: base │ huge   …
//!   round 2   1 chain: huge │ base                            2 chains: base │ huge    …
//!                 ▼
//!             median of the rounds: time of a visit on base and on 2 MiB pages
//! ```
//!
//! The shortest of several tries would be wrong: a burst of milliseconds finds an undisturbed moment, a program's
//! run of seconds never does, and the two are compared. The program runs in the same rounds, so that the machine's
//! other work affects all of them. Base and huge are not alternated burst by burst, because data that the program
//! finds in the last-level cache from one burst to another would be evicted by the other half.

use std::hint::black_box;
use std::sync::atomic::AtomicU64;

use serde::Serialize;
use wideleaf_measure::statistics::median;
use wideleaf_memory::{GuestRam, Host, LinuxHost};
use wideleaf_policies::PageSize;

use super::laps::{LAPS, Lap, LapOrder};
use super::sample::Sample;
use super::work::Work;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

/// The first eighth of a burst is not timed: it fills caches and TLBs as the program has them at that moment. 64
/// thousand visits of the longest bursts exceed the entries of a second-level TLB, and the lines of 4 MiB of cache.
const WARMED_PART: usize = 8;

/// Visits between two readings of the clock. Their list, 128 KiB, is first brought into the second-level cache: the
/// program reads no list, and from memory it would take a third more than the matrix of CG does. A reading, some
/// 300 ns, is a hundredth of the fastest 32 thousand visits.
const PIECE: usize = 1 << 15;

/// Cost of a visit of a line in one way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pace {
    /// Order of the visits, as far as they wait for each other.
    pub way: LapOrder,
    /// Time of a visit on base pages, in nanoseconds.
    pub base_ns: f64,
    /// Time of a visit on 2 MiB pages, in nanoseconds.
    pub huge_ns: f64,
}

impl Pace {
    /// Saving by 2 MiB pages per visit, in nanoseconds; 0 if they cost more.
    pub fn saved(&self) -> f64 {
        (self.base_ns - self.huge_ns).max(0.0)
    }
}

/// Replays the sample of `work` once on both page sizes. Each round uses other memory, because the place of base
/// pages decides how they share the caches.
///
/// # Errors
/// [`Failure`]: the memory does not suffice, or an interrupt came.
pub fn replay(work: &Work, sample: &Sample, round: usize, interrupts: &Interrupts) -> Result<Vec<Pace>, Failure> {
    let base = work.map(PageSize::Base4K, interrupts)?;
    let huge = work.map(PageSize::Huge2M, interrupts)?;
    let host = LinuxHost::open().map_err(|error| Failure::Host(error.to_string()))?;
    let mut paces = Vec::new();
    for (number, (way, lap)) in LAPS.into_iter().enumerate() {
        let sweep = |ram: &GuestRam| sweep_ns(&host, lap, ram, sample, interrupts);
        let (base_ns, huge_ns) = in_turn((round + number).is_multiple_of(2), || sweep(&base), || sweep(&huge));
        paces.push(Pace { way, base_ns: base_ns?, huge_ns: huge_ns? });
    }
    Ok(paces)
}

/// Nanoseconds per visit, over all bursts.
fn sweep_ns(
    host: &impl Host,
    lap: Lap,
    ram: &GuestRam,
    sample: &Sample,
    interrupts: &Interrupts,
) -> Result<f64, Failure> {
    let words = ram.words(ram.ranges()[0]);
    let (mut seconds, mut visits) = (0.0, 0);
    for burst in &sample.bursts {
        let (warming, timed) = burst.split_at(burst.len() / WARMED_PART);
        seconds += timed_lap(host, lap, words, warming, timed);
        visits += timed.len();
        interrupts.check()?;
    }
    Ok(seconds * 1e9 / visits.max(1) as f64)
}

/// Runs both, the first one first or second.
fn in_turn<T>(is_first_first: bool, first: impl FnOnce() -> T, second: impl FnOnce() -> T) -> (T, T) {
    if is_first_first {
        let one = first();
        (one, second())
    } else {
        let other = second();
        (first(), other)
    }
}

/// Seconds of this thread, without those in which another thread had its CPU.
fn timed_lap(host: &impl Host, lap: Lap, words: &[AtomicU64], warming: &[u32], timed: &[u32]) -> f64 {
    lap(words, warming);
    let piece_seconds = |piece: &[u32]| {
        black_box(piece.iter().fold(0, |all, visit| all | visit));
        let start = host.thread_cpu_time();
        lap(words, piece);
        (host.thread_cpu_time() - start).as_secs_f64()
    };
    timed.chunks(PIECE).map(piece_seconds).sum()
}

/// The median of each way's rounds.
///
/// # Panics
/// If there is no round.
pub fn medians(rounds: &[Vec<Pace>]) -> Vec<Pace> {
    let of_way = |way: usize| {
        let of = |part: fn(&Pace) -> f64| median(rounds.iter().map(|paces| part(&paces[way])).collect());
        Pace { way: rounds[0][way].way, base_ns: of(|pace| pace.base_ns), huge_ns: of(|pace| pace.huge_ns) }
    };
    (0..rounds[0].len()).map(of_way).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_the_median_of_its_rounds() {
        let round = |free: f64, asked: f64| {
            vec![
                Pace { way: LapOrder::Free, base_ns: free, huge_ns: free / 2.0 },
                Pace { way: LapOrder::Asked, base_ns: asked, huge_ns: 1.0 },
            ]
        };
        // One round on a busy machine does not count.
        let paces = medians(&[round(8.0, 4.0), round(900.0, 5.0), round(10.0, 3.0)]);
        assert_eq!(paces[0], Pace { way: LapOrder::Free, base_ns: 10.0, huge_ns: 5.0 });
        assert_eq!(paces[1], Pace { way: LapOrder::Asked, base_ns: 4.0, huge_ns: 1.0 });
    }

    #[test]
    fn base_pages_come_first_in_one_half_of_all_laps() {
        let order = |is_first_first| {
            let order = std::cell::RefCell::new(String::new());
            let both = in_turn(is_first_first, || order.borrow_mut().push('b'), || order.borrow_mut().push('h'));
            assert_eq!(both, ((), ()));
            order.into_inner()
        };
        assert_eq!((order(true), order(false)), ("bh".to_owned(), "hb".to_owned()));
    }

    #[test]
    fn all_visits_are_made_the_first_for_warming_and_the_others_in_pieces() {
        static SEEN: parking_lot::Mutex<Vec<Vec<u32>>> = parking_lot::Mutex::new(Vec::new());
        let (host, words) = (LinuxHost::open().expect("/proc is there"), [AtomicU64::new(0)]);
        let timed: Vec<u32> = (0..PIECE as u32 + 2).collect();
        let lap: Lap = |_, list| SEEN.lock().push(list.to_vec());
        assert!(timed_lap(&host, lap, &words, &[8], &timed) >= 0.0);
        assert_eq!(*SEEN.lock(), [vec![8], timed[..PIECE].to_vec(), timed[PIECE..].to_vec()]);
    }
}
