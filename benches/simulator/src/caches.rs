//! The caches that table and data lines share, down to memory.
//!
//! ```text
//!   data ──▶ L1 ──miss──▶ L2 ──miss──▶ L3 ──miss──▶ memory      a level that is filled by victims takes what the level
//!             └─evicted──▶ └─evicted──▶                         above evicts, and gives up the lines that hit
//!   walk ──▶ L1, or L2 if the walker does not read through L1
//! ```
//!
//! No level depends on the one below it, so references need not go down one after another. They wait in a queue,
//! which passes through a level as a whole, in its order, and keeps the references that miss. So one level at a
//! time uses the host CPU's caches, and independent lookups overlap.

use alloc::vec::Vec;

use self::queue::Queue;
pub(crate) use self::queue::{OF_AN_ACCESS, Reference};
use super::counts::Counts;
use super::machine::{Fill, Machine};
use super::options::{Distances, Lines, Options};
use super::purpose::Purpose;
use super::sets::{Avx2, Found, Sets, Shape, Vectors, Work, by_shape, run};
use wideleaf_policies::units::{PageSize, WindowIndex};

mod queue;

/// Number of lines of 64 bytes in a window.
const LINES_PER_WINDOW: u64 = PageSize::Huge2M.bytes().get() / 64;

/// Largest number of caches that a machine may have.
const LEVELS_MAX: usize = 3;

pub(crate) struct Caches {
    levels: Vec<Level>,
    queue: Queue,
    /// Whether references are looked up, and not only counted.
    are_followed: bool,
    /// Cycles by level.
    cycles: [u64; LEVELS_MAX],
    memory: Memory,
    /// Whether the data of each window lie on another node; empty where all lie where the distances say.
    is_remote: Vec<bool>,
}

/// Memory behind the caches, by the purpose of a reference.
struct Memory {
    cycles: [u64; Purpose::ALL],
    is_remote: [bool; Purpose::ALL],
}

impl Memory {
    fn new(local: u64, distances: Distances) -> Memory {
        let Distances { guest_tables, host_tables, data } = distances;
        let by_purpose = [guest_tables, host_tables, host_tables, data];
        let scaled = |distance: u32| local * u64::from(distance) / u64::from(Distances::LOCAL);
        Memory { cycles: by_purpose.map(scaled), is_remote: by_purpose.map(|distance| distance > Distances::LOCAL) }
    }
}

struct Level {
    sets: Sets,
    takes_victims: bool,
    /// Whether this level's evicted lines go to the next level.
    gives_victims: bool,
    /// Whether each line that comes into this level brings the other one of its pair with it.
    completes_pairs: bool,
    /// Whether a line that the level above completed comes with the line that it completed.
    takes_pairs: bool,
    /// Path of walks to this level: they begin at the first level that they read.
    walks: Walks,
}

/// Ways in which the references of walks reach a level.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Walks {
    PassBy,
    BeginHere,
    ComeFromAbove,
}

impl Caches {
    pub(crate) fn new(machine: &Machine, lines: u64, options: Options, seed: u64) -> Caches {
        assert!(machine.caches.len() <= LEVELS_MAX, "{} has {} caches", machine.name, machine.caches.len());
        let (last, is_shared) = (machine.caches.len() - 1, options.is_core_shared);
        let takes_victims = |n: usize| machine.caches.get(n).is_some_and(|cache| cache.fill.value == Fill::Victims);
        let completes_pairs = machine.second_cache_completes_pairs.value;
        let levels: Vec<Level> = (machine.caches.iter().enumerate())
            .map(|(n, cache)| Level {
                sets: Sets::new(&cache.array, is_shared && (n < last || last == 0), lines, seed + n as u64),
                takes_victims: takes_victims(n),
                gives_victims: takes_victims(n + 1),
                completes_pairs: n == 1 && completes_pairs,
                takes_pairs: n == 2 && completes_pairs && !takes_victims(n),
                walks: match (n + 1).cmp(&(machine.walks_read_from.value as usize)) {
                    core::cmp::Ordering::Less => Walks::PassBy,
                    core::cmp::Ordering::Equal => Walks::BeginHere,
                    core::cmp::Ordering::Greater => Walks::ComeFromAbove,
                },
            })
            .collect();
        // The lines of a pair are in two sets side by side.
        let is_simple =
            |level: &Level| !level.takes_victims && level.sets.shape() != Shape::Other && level.sets.mask() > 0;
        assert!(
            levels.iter().all(|level| !(level.completes_pairs || level.takes_pairs) || is_simple(level)),
            "{}: a cache that completes pairs, or gets them from one, has LRU replacement in an even number of sets",
            machine.name
        );
        let mut cycles = [0; LEVELS_MAX];
        for (cycles, cache) in cycles.iter_mut().zip(machine.caches) {
            *cycles = u64::from(cache.cycles.value);
        }
        let memory = Memory::new(machine.memory_cycles.value.into(), options.distances);
        let (are_followed, is_remote) = (options.lines != Lines::None, Vec::new());
        Caches { levels, queue: Queue::new(), cycles, memory, are_followed, is_remote }
    }

    /// The data of that window lie on another node, or on the thread's. Where the distances say that all data lie on
    /// another, nothing changes.
    pub(crate) fn put_on_node(&mut self, window: WindowIndex, is_remote: bool) {
        if self.memory.is_remote[Purpose::Data as usize] {
            return;
        }
        let window = window.get() as usize;
        if window >= self.is_remote.len() {
            self.is_remote.resize(window + 1, false);
        }
        self.is_remote[window] = is_remote;
    }

    fn is_remote(&self, line: u64) -> bool {
        self.is_remote.get((line / LINES_PER_WINDOW) as usize).is_some_and(|is_remote| *is_remote)
    }

    /// Room for the references of one walk.
    #[inline(always)]
    pub(crate) fn room_for_walk(&mut self) -> &mut [Reference; OF_AN_ACCESS] {
        self.queue.room_for_walk()
    }

    /// Adds the references that a walk wrote there, which [`Caches::serve`] looks up, by their number: guest, host of
    /// tables, host of data.
    #[inline(always)]
    pub(crate) fn refer_walk(&mut self, written: [usize; 3]) {
        self.queue.push_walk(written);
    }

    /// Adds references to the data at some addresses.
    #[inline(always)]
    pub(crate) fn refer_data(&mut self, addresses: &[u64]) {
        self.queue.push_data(addresses);
    }

    /// Looks up the lines of all waiting references, in their order, and counts where each one is found. `are_near`
    /// says that many are the line before them, and predictably so.
    pub(crate) fn serve(&mut self, are_near: bool, avx2: Option<Avx2>, counts: &mut Counts) {
        let mut sought = self.queue.added();
        if !self.are_followed {
            counts.add_found(sought, [0; Purpose::ALL], |served| &mut served.unplaced);
            return self.queue.clear();
        }
        for (n, level) in self.levels.iter_mut().enumerate() {
            let sift = Sift { level, queue: &mut self.queue, is_first: n == 0, are_near };
            let missed = run(sift, avx2);
            let found = core::array::from_fn(|purpose| sought[purpose] - missed[purpose]);
            counts.add_found(found, [self.cycles[n]; Purpose::ALL], |served| &mut served.caches[n]);
            sought = missed;
        }
        if !self.is_remote.is_empty() {
            counts.remote_data += self.queue.data_lines().filter(|line| self.is_remote(*line)).count() as u64;
        }
        counts.add_found(sought, self.memory.cycles, |served| &mut served.memory);
        counts.add_remote(sought, self.memory.is_remote);
        self.queue.clear();
    }
}

/// A queue that passes through a level. The queue keeps the references that are still sought, or that have a victim for
/// the next level.
struct Sift<'a> {
    level: &'a mut Level,
    queue: &'a mut Queue,
    is_first: bool,
    are_near: bool,
}

impl Work for Sift<'_> {
    /// Number of references that are still sought, by purpose.
    type Output = [u64; Purpose::ALL];

    #[inline(always)]
    fn run(self, vectors: impl Vectors) -> [u64; Purpose::ALL] {
        let Sift { level, queue, is_first, are_near } = self;
        let takes_victims = level.takes_victims && !is_first;
        if level.walks == Walks::PassBy || takes_victims && level.walks == Walks::BeginHere {
            return level.sift_one_by_one(queue, is_first);
        }
        let gives_victims = level.gives_victims;
        by_shape!(level.sets, vectors, sets => match (level.completes_pairs, gives_victims) {
            _ if takes_victims => queue.keep_missing_and_take_victims(&mut sets, gives_victims),
            (true, true) => queue.keep_missing_with_pairs_and_victims(&mut sets),
            (true, false) => queue.keep_missing_and_complete_pairs(&mut sets),
            (false, true) => queue.keep_missing_with_victims(&mut sets),
            (false, false) if level.takes_pairs => queue.keep_missing_of_pairs(&mut sets),
            (false, false) => queue.keep_missing(&mut sets, is_first && are_near),
        }, _ => level.sift_one_by_one(queue, is_first))
    }
}

impl Level {
    /// Does the same as [`Sift`], for any level.
    #[inline(never)]
    fn sift_one_by_one(&mut self, queue: &mut Queue, is_first: bool) -> [u64; Purpose::ALL] {
        queue.keep(|reference, victim| {
            let is_walk = reference.purpose() != Purpose::Data;
            if is_walk && self.walks == Walks::PassBy {
                return (true, None);
            }
            let begins_here = is_first || (is_walk && self.walks == Walks::BeginHere);
            if !self.takes_victims || begins_here {
                return match self.sets.access(reference.line()) {
                    Found::Hit => (false, None),
                    Found::Miss { evicted } => (true, evicted.filter(|_| self.gives_victims)),
                };
            }
            let is_missing = reference.is_sought() && !self.sets.take(reference.line());
            let evicted = victim.and_then(|victim| match self.sets.access(victim) {
                Found::Hit => None,
                Found::Miss { evicted } => evicted,
            });
            (is_missing, evicted.filter(|_| self.gives_victims))
        })
    }
}
