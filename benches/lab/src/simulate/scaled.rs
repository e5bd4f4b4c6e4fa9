//! Steady-state samples of kernels over memory of any size. A recording of CG over 64 GiB would take days; a sample
//! follows the kernel's own loops from their middle for some million accesses.
//!
//! ```text
//!   program, footprint ─▶ sizes of its arrays ─▶ parts: loops of an iteration of its timed part
//!                                                 │
//!                         from the middle: ├─ accesses that warm caches and TLBs ─┼─ accesses that count ─┤
//!                                                 │
//!   counts of each part × words of that part in an iteration ─▶ counts per access of the whole iteration
//! ```
//!
//! The loops are those of the kernels in `guests/kernels`, with one thread. An access is a word of 8 bytes, or a
//! column of 4. Loops over rows are followed by cache line, all arrays of a loop in step: a TLB sees no difference
//! as long as its first level holds the pages of one loop. Left out are the set-up, the stack, and loops with less
//! than a hundredth of an iteration's words. `tests/it/scaled.rs` compares each program with its recording.

use wideleaf_policies::Bytes;
use wideleaf_simulator::streams::{Access, gups};

mod cg;
mod mg;
mod stream;
mod sweep3d;

pub use cg::Cg;
pub use mg::Mg;
pub use stream::Stream;
pub use sweep3d::Sweep;

/// A loop of an iteration.
pub struct Part {
    /// Name of the loop.
    pub name: &'static str,
    /// Number of words that all such loops of an iteration load and store.
    pub words: f64,
    /// Number of lines that count; as many are accessed before them, to warm the caches.
    pub lines: usize,
    /// The lines, from the middle of the loop on, without an end.
    pub accesses: Box<dyn Iterator<Item = Access> + Send>,
}

/// A program over memory of some size.
pub struct Scaled {
    /// Memory that it accesses.
    pub bytes: Bytes,
    /// Loops of an iteration.
    pub parts: Vec<Part>,
}

/// Names of the programs, in the order of tables.
pub const PROGRAMS: [&str; 5] = ["gups", "cg", "mg", "stream", "sweep3d"];

/// Seed of GUPS's updates and of CG's columns.
const SEED: u64 = 1;
/// Number of updates that count: enough to fill the largest last cache with lines of tables and data first.
const UPDATES: usize = 1 << 20;

impl Scaled {
    /// A program of [`PROGRAMS`]; its arrays take at most `footprint`, and nearly all of it.
    pub fn of(program: &str, footprint: Bytes) -> Option<Scaled> {
        match program {
            "gups" => Some(Scaled::gups(footprint.get() / WORD)),
            "cg" => Some(Cg::within(footprint).scaled()),
            "mg" => Some(Mg::within(footprint).scaled()),
            "stream" => Some(Stream::within(footprint).scaled()),
            "sweep3d" => Some(Sweep::within(footprint).scaled()),
            _ => None,
        }
    }

    /// HPCC RandomAccess over a table of `words`: an update loads a word and stores it.
    pub fn gups(words: u64) -> Scaled {
        let update = |access: Access| Access { repeats: 2, ..access };
        let accesses = Box::new(gups(words, SEED).map(update));
        let updates = Part { name: "update", words: 8.0 * words as f64, lines: UPDATES, accesses };
        Scaled { bytes: Bytes::new(words * WORD), parts: vec![updates] }
    }
}

const WORD: u64 = 8;
const LINE: u64 = 64;
const WINDOW: u64 = 2 << 20;
const WORDS_PER_LINE: u64 = LINE / WORD;

/// The largest number in steps of `step` with `bytes` within `limit`; `step` if no multiple of it is within.
fn largest(step: u64, limit: Bytes, bytes: impl Fn(u64) -> u64) -> u64 {
    let is_within = |steps: u64| bytes(steps * step) <= limit.get();
    let (mut fits, mut too_large) = (1, 2);
    // By doubling: the bytes of a cube of any larger edge are beyond 64 bits.
    while is_within(too_large) {
        (fits, too_large) = (too_large, 2 * too_large);
    }
    while too_large - fits > 1 {
        let middle = u64::midpoint(fits, too_large);
        if is_within(middle) { fits = middle } else { too_large = middle }
    }
    fits * step
}

/// Places arrays as the kernels' arena does: one of a window or more begins at a window, others at a line.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    end: u64,
}

impl Layout {
    fn place(&mut self, bytes: u64) -> u64 {
        let start = self.end.next_multiple_of(if bytes >= WINDOW { WINDOW } else { LINE });
        self.end = start + bytes;
        start
    }
}

/// An array of a loop: the address of its next line, and the accesses to each of its lines.
#[derive(Clone, Copy, Debug)]
struct Array {
    at: u64,
    /// Bytes from one line of it to the next one.
    stride: u64,
    is_write: bool,
    /// Number of accesses to a line.
    repeats: u32,
}

impl Array {
    /// An array that the loop loads, from this address on.
    const fn load(at: u64) -> Array {
        Array { at, stride: LINE, is_write: false, repeats: WORDS_PER_LINE as u32 }
    }

    /// An array that the loop stores.
    const fn store(at: u64) -> Array {
        Array { is_write: true, ..Array::load(at) }
    }

    /// An array of which the loop loads and stores each word.
    const fn update(at: u64) -> Array {
        Array { is_write: true, repeats: 2 * WORDS_PER_LINE as u32, ..Array::load(at) }
    }
}

/// Runs of lines, one run after another; the arrays of a run in step. `next` puts the arrays of the next run into an
/// empty list, and returns the number of their lines.
struct Runs<F> {
    next: F,
    arrays: Vec<Array>,
    lines_left: u64,
    array: usize,
}

impl<F: FnMut(&mut Vec<Array>) -> u64> Runs<F> {
    fn new(next: F) -> Runs<F> {
        Runs { next, arrays: vec![], lines_left: 0, array: 0 }
    }
}

impl<F: FnMut(&mut Vec<Array>) -> u64> Iterator for Runs<F> {
    type Item = Access;

    fn next(&mut self) -> Option<Access> {
        if self.array == self.arrays.len() {
            self.array = 0;
            self.lines_left = self.lines_left.saturating_sub(1);
            if self.lines_left == 0 {
                self.arrays.clear();
                self.lines_left = (self.next)(&mut self.arrays);
            }
        }
        let array = self.arrays.get_mut(self.array)?;
        let access = Access { address: array.at / LINE * LINE, is_write: array.is_write, repeats: array.repeats };
        array.at += array.stride;
        self.array += 1;
        Some(access)
    }
}

/// Number of lines of a run of [`in_step`].
const RUN_LINES: u64 = 4096;

/// One loop over `words` words of whole arrays in step, from its middle, round and round.
fn in_step(words: u64, arrays: Vec<Array>) -> Box<dyn Iterator<Item = Access> + Send> {
    let lines = words.div_ceil(WORDS_PER_LINE);
    let mut line = lines / 2;
    Box::new(Runs::new(move |run: &mut Vec<Array>| {
        let at = |array: &Array| Array { at: array.at + line * array.stride, ..*array };
        run.extend(arrays.iter().map(at));
        let now = RUN_LINES.min(lines - line);
        line = (line + now) % lines;
        now
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{gib, mib};

    #[test]
    fn a_program_takes_nearly_all_of_its_footprint_and_stays_in_it() {
        for program in PROGRAMS {
            for footprint in [mib(64), gib(1), gib(64)] {
                let scaled = Scaled::of(program, footprint).expect("it is in the list");
                let share = scaled.bytes.get() as f64 / footprint.get() as f64;
                assert!((0.8..=1.0).contains(&share), "{program} over {footprint}: {}", scaled.bytes);
                for part in scaled.parts {
                    let beyond = part.accesses.take(200_000).find(|access| access.address >= scaled.bytes.get());
                    assert_eq!(beyond, None, "{program} over {footprint}: {}", part.name);
                }
            }
        }
        assert!(Scaled::of("ft", gib(1)).is_none());
    }

    #[test]
    fn a_loop_begins_in_its_middle_and_goes_on_at_its_begin() {
        let accesses: Vec<u64> =
            in_step(32, vec![Array::load(0), Array::store(4096)]).take(6).map(|access| access.address).collect();
        assert_eq!(accesses, [128, 4096 + 128, 192, 4096 + 192, 0, 4096]);
    }

    #[test]
    fn the_same_program_has_the_same_accesses_each_time() {
        let some = || -> Vec<Access> {
            let parts = Scaled::of("cg", mib(64)).expect("it is in the list").parts;
            parts.into_iter().flat_map(|part| part.accesses.take(5000)).collect()
        };
        assert_eq!(some(), some());
    }
}
