//! IS: the rank of each of 2^n integers, computed ten times by counting.
//!
//! ```text
//!   buckets=0   keys ─▶ counts[key] += 1                      random increments all over the counts
//!   buckets=1   keys ─▶ by the high bits into buckets ─▶ counts[key] += 1 within a bucket's part
//!               counts ─▶ running sum: cum[k] = number of keys ≤ k, so cum[k−1] is the rank of k
//! ```
//!
//! Before each ranking two keys change, so that no ranking can be skipped. After each, five ranks are compared with
//! published ones; after the last one the ranks must sort the keys.
//!
//! With several vCPUs each counts its keys in its own table (without buckets) or counts the buckets assigned to it
//! (with).

use core::sync::atomic::Ordering;

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::random::{Random, SEED};
use crate::arena::{Layout, Place, Typed, as_atomics};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{cut, deal, ranges, split};
use crate::report::{self, COMPUTE, INIT, VERIFY};
use crate::{Arena, KernelError, Platform};

/// IS in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.is"),
    summary: "NPB IS: ranking integers by counting, random increments of a table",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[
    Class::PARAMETER,
    Parameter {
        name: "buckets",
        default: "0",
        unit: "0 or 1",
        meaning: "1 sorts the keys into buckets first (the NPB's USE_BUCKETS), 0 counts them directly",
    },
];

/// Number of timed rankings, as in the NPB.
const ITERATIONS: u32 = 10;
/// Ranks that are compared after each ranking.
const TESTS: usize = 5;
/// Number of checks: all compared ranks, and whether they sort the keys.
const CHECKS: u64 = ITERATIONS as u64 * TESTS as u64 + 1;
/// Operations per key in the NPB's rate: one for each ranking.
const OPERATIONS_PER_KEY: u64 = ITERATIONS as u64;

/// A key with a known rank: `rank + slope · iteration`.
#[derive(Clone, Copy)]
struct KnownRank {
    index: usize,
    rank: i64,
    slope: i64,
}

/// Sizes and reference values of a class.
#[derive(Clone, Copy)]
struct Problem {
    log2_keys: u32,
    log2_max_key: u32,
    log2_buckets: u32,
    known: [KnownRank; TESTS],
}

const fn known(index: usize, rank: i64, slope: i64) -> KnownRank {
    KnownRank { index, rank, slope }
}

/// The references are the NPB's, with the constant part of their change from iteration to iteration written out.
const fn problem(class: Class) -> Problem {
    let (log2_keys, log2_max_key, log2_buckets, known) = match class {
        Class::S => (
            16,
            11,
            9,
            [
                known(48427, 0, 1),
                known(17148, 18, 1),
                known(23627, 346, 1),
                known(62548, 64917, -1),
                known(4431, 65463, -1),
            ],
        ),
        Class::W => (
            20,
            16,
            10,
            [
                known(357773, 1249 - 2, 1),
                known(934767, 11698 - 2, 1),
                known(875723, 1039987, -1),
                known(898999, 1043896, -1),
                known(404505, 1048018, -1),
            ],
        ),
        Class::A => (
            23,
            19,
            10,
            [
                known(2112377, 104 - 1, 1),
                known(662041, 17523 - 1, 1),
                known(5336171, 123928 - 1, 1),
                known(3642833, 8288932 + 1, -1),
                known(4250760, 8388264 + 1, -1),
            ],
        ),
        Class::B => (
            25,
            21,
            10,
            [
                known(41869, 33422937, -1),
                known(812306, 10244, 1),
                known(5102857, 59149, 1),
                known(18232239, 33135281, -1),
                known(26860214, 99, 1),
            ],
        ),
        Class::C => (
            27,
            23,
            10,
            [
                known(44172927, 61147, 1),
                known(72999161, 882988, 1),
                known(74326391, 266290, 1),
                known(129606274, 133997595, -1),
                known(21736814, 133525895, -1),
            ],
        ),
    };
    Problem { log2_keys, log2_max_key, log2_buckets, known }
}

impl Problem {
    const fn keys(&self) -> usize {
        1 << self.log2_keys
    }

    const fn max_key(&self) -> usize {
        1 << self.log2_max_key
    }

    const fn buckets(&self) -> usize {
        1 << self.log2_buckets
    }

    /// Low bits of a key that do not affect its bucket.
    const fn bucket_shift(&self) -> u32 {
        self.log2_max_key - self.log2_buckets
    }
}

/// Reads the class, and whether the keys are sorted into buckets first.
fn read<'a>(parameters: &Parameters<'a>) -> Result<(Class, bool), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let is_bucketed = parameters.count("buckets", 0, 1)? == Some(1);
    Ok((class, is_bucketed))
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let (class, is_bucketed) = read(parameters)?;
    Ok(MemoryNeed::of_layout(|layout| Places::new(layout, &problem(class), vcpus, is_bucketed)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let (class, is_bucketed) = read(parameters)?;
    let problem = problem(class);
    report::problem(platform, class, &[1 << problem.log2_keys], ITERATIONS);
    solve(platform, arena, problem, is_bucketed)
}

fn solve<'a>(
    platform: &dyn Platform,
    arena: &Arena<'_>,
    problem: Problem,
    is_bucketed: bool,
) -> Result<(), KernelError<'a>> {
    let mut layout = Layout::at(arena.address());
    let places = Places::new(&mut layout, &problem, platform.vcpus(), is_bucketed);
    let mut typed = report::claim(platform, arena, &layout, Name::literal("keys"))?;
    let (mut sort, _) = report::phase(platform, INIT, || {
        let mut sort = Sort::new(platform, problem, is_bucketed, places, &mut typed);
        sort.create_keys();
        sort.rank(1);
        sort
    });
    let (wrong_ranks, ticks) =
        report::phase(platform, COMPUTE, || report::steps(platform, ITERATIONS).map(|n| sort.rank(n)).sum::<u64>());
    report::rate(platform, (OPERATIONS_PER_KEY << problem.log2_keys) as f64, ticks);
    let (is_sorted, _) = report::phase(platform, VERIFY, || sort.is_sorted_by_rank());
    report::verdict(platform, wrong_ranks + u64::from(!is_sorted), CHECKS)
}

/// Places of the slices of a [`Sort`].
struct Places {
    keys: Place<u32>,
    sorted: Place<u32>,
    cumulative: Place<u32>,
    others: Place<u32>,
    positions: Place<u32>,
}

impl Places {
    fn new(layout: &mut Layout, problem: &Problem, members: usize, is_bucketed: bool) -> Self {
        let (others, positions) = if is_bucketed { (0, members) } else { (members - 1, 0) };
        Self {
            keys: layout.place(problem.keys() as u64),
            sorted: layout.place(problem.keys() as u64),
            cumulative: layout.place(problem.max_key() as u64),
            others: layout.place((others * problem.max_key()) as u64),
            positions: layout.place((positions * problem.buckets()) as u64),
        }
    }
}

/// The keys and their counts.
struct Sort<'p, 'm> {
    platform: &'p dyn Platform,
    problem: Problem,
    is_bucketed: bool,
    keys: &'m mut [u32],
    /// The keys by bucket; after the last ranking, the keys in order.
    sorted: &'m mut [u32],
    /// For each index, the number of keys that are at most that large.
    cumulative: &'m mut [u32],
    /// Without buckets: counts of all vCPUs except the first, one table after the other.
    others: &'m mut [u32],
    /// With buckets: for each vCPU, the place of its next key of each bucket.
    positions: &'m mut [u32],
}

impl<'p, 'm> Sort<'p, 'm> {
    fn new(
        platform: &'p dyn Platform,
        problem: Problem,
        is_bucketed: bool,
        places: Places,
        typed: &mut Typed<'m>,
    ) -> Self {
        Self {
            platform,
            problem,
            is_bucketed,
            keys: typed.take(places.keys),
            sorted: typed.take(places.sorted),
            cumulative: typed.take(places.cumulative),
            others: typed.take(places.others),
            positions: typed.take(places.positions),
        }
    }

    /// Creates the keys. A key is a quarter of the largest key times the sum of four random numbers, computed
    /// exactly in integers.
    fn create_keys(&mut self) {
        const NUMBERS_PER_KEY: u64 = 4;
        let members = self.platform.vcpus();
        let shift = 46 + 2 - self.problem.log2_max_key;
        let starts = ranges(self.keys.len(), members).map(|range| range.start as u64);
        deal(self.platform, split(self.keys, members).zip(starts), |_, (keys, start)| {
            let mut random = Random::new(SEED).skip(start * NUMBERS_PER_KEY);
            for key in keys {
                let sum: u64 = (0..NUMBERS_PER_KEY).map(|_| random.next_bits()).sum();
                *key = (sum >> shift) as u32;
            }
        });
    }

    /// Runs one ranking. Returns the number of wrong known ranks.
    fn rank(&mut self, iteration: u32) -> u64 {
        self.keys[iteration as usize] = iteration;
        self.keys[(iteration + ITERATIONS) as usize] = self.problem.max_key() as u32 - iteration;
        // Read before the counting, as the NPB does: the compiler must not replace it by the known value.
        let tested = self.problem.known.map(|known| self.keys[known.index]);
        if self.is_bucketed {
            self.count_by_bucket();
        } else {
            self.count();
        }
        let is_wrong = |(known, key): &(KnownRank, u32)| {
            let rank = known.rank + known.slope * i64::from(iteration);
            *key == 0 || i64::from(self.cumulative[*key as usize - 1]) != rank
        };
        self.problem.known.into_iter().zip(tested).filter(is_wrong).count() as u64
    }

    /// Counts without buckets: every vCPU counts its part of the keys, then the tables are summed.
    fn count(&mut self) {
        let members = self.platform.vcpus();
        let keys = &*self.keys;
        let tables =
            core::iter::once(&mut *self.cumulative).chain(self.others.chunks_exact_mut(self.problem.max_key()));
        deal(self.platform, tables.zip(ranges(keys.len(), members)), |_, (counts, range)| {
            counts.fill(0);
            count_all_keys(&keys[range], counts);
        });

        let (others, max_key) = (&*self.others, self.problem.max_key());
        let parts = split(self.cumulative, members).zip(ranges(max_key, members));
        let totals = deal(self.platform, parts, |_, (counts, range)| {
            for table in others.chunks_exact(max_key) {
                counts.iter_mut().zip(&table[range.clone()]).for_each(|(count, more)| *count += more);
            }
            accumulate(counts, 0)
        });
        let before = totals.iter().flatten().scan(0, |sum, total| {
            let before = *sum;
            *sum += total;
            Some(before)
        });
        deal(self.platform, split(self.cumulative, members).zip(before), |_, (counts, before)| {
            // Nothing precedes the first part.
            if before > 0 {
                counts.iter_mut().for_each(|count| *count += before);
            }
        });
    }

    /// Counts with buckets: finds the place of each vCPU's keys of each bucket, moves the keys there, and counts
    /// bucket by bucket.
    fn count_by_bucket(&mut self) {
        let members = self.platform.vcpus();
        let (shift, buckets) = (self.problem.bucket_shift(), self.problem.buckets());
        let keys = &*self.keys;
        let parts = self.positions.chunks_exact_mut(buckets).zip(ranges(keys.len(), members));
        deal(self.platform, parts, |_, (sizes, range)| {
            sizes.fill(0);
            keys[range].iter().for_each(|key| sizes[(key >> shift) as usize] += 1);
        });
        turn_sizes_into_positions(self.positions, buckets);
        let borders = BucketRanges::new(&self.positions[..buckets], keys.len(), members);

        let sorted = as_atomics(self.sorted);
        let parts = self.positions.chunks_exact_mut(buckets).zip(ranges(keys.len(), members));
        deal(self.platform, parts, |_, (positions, range)| {
            for key in &keys[range] {
                let position = &mut positions[(key >> shift) as usize];
                sorted[*position as usize].store(*key, Ordering::Relaxed);
                *position += 1;
            }
        });

        let sorted = &*self.sorted;
        let counts = cut(self.cumulative, (0..members).map(|member| borders.buckets(member).len() << shift));
        deal(self.platform, counts, |member, counts| {
            counts.fill(0);
            let keys = borders.keys(member);
            count_keys(&sorted[keys.clone()], counts, (borders.buckets(member).start << shift) as u32);
            accumulate(counts, keys.start as u32);
        });
    }

    /// Whether putting every key at its rank sorts the keys. Overwrites the counts.
    fn is_sorted_by_rank(&mut self) -> bool {
        for key in &*self.keys {
            let count = &mut self.cumulative[*key as usize];
            // Counts of damaged keys may have any value; they do not sort the keys.
            let Some(position) = count.checked_sub(1) else { return false };
            *count = position;
            let Some(place) = self.sorted.get_mut(position as usize) else { return false };
            *place = *key;
        }
        self.sorted.is_sorted()
    }
}

/// Counts keys in a table for all keys; their number is a power of two. A mask instead of a check at each key lets
/// the CPU have more increments in flight, and they wait for memory.
fn count_all_keys(keys: &[u32], counts: &mut [u32]) {
    let Some(mask) = counts.len().checked_sub(1) else { return };
    let (fours, rest) = keys.as_chunks::<4>();
    for four in fours {
        for key in four {
            counts[*key as usize & mask] += 1;
        }
    }
    rest.iter().for_each(|key| counts[*key as usize & mask] += 1);
}

/// Counts keys in a table that begins with the key `least`.
fn count_keys(keys: &[u32], counts: &mut [u32], least: u32) {
    keys.iter().for_each(|key| counts[(key - least) as usize] += 1);
}

/// Turns counts into running sums that begin with `sum`. Returns the last.
fn accumulate(counts: &mut [u32], mut sum: u32) -> u32 {
    for count in counts {
        sum += *count;
        *count = sum;
    }
    sum
}

/// Turns the vCPUs' bucket sizes into the position of their first key: by bucket, and within a bucket by vCPU.
fn turn_sizes_into_positions(sizes: &mut [u32], buckets: usize) {
    let mut position = 0;
    for bucket in 0..buckets {
        for size in sizes.iter_mut().skip(bucket).step_by(buckets) {
            position += core::mem::replace(size, position);
        }
    }
}

/// The contiguous buckets that each vCPU counts, with nearly as many keys each, because the middle buckets are the
/// largest.
struct BucketRanges {
    members: usize,
    /// First bucket of each vCPU, and the index of its first key.
    starts: [(usize, usize); wideleaf_protocol::VCPUS_MAX + 1],
}

impl BucketRanges {
    /// Computes them from the position of each bucket's first key.
    fn new(positions: &[u32], keys: usize, members: usize) -> Self {
        let mut starts = [(positions.len(), keys); wideleaf_protocol::VCPUS_MAX + 1];
        for (start, range) in starts.iter_mut().zip(ranges(keys, members)) {
            let bucket = positions.partition_point(|position| (*position as usize) < range.start);
            *start = (bucket, positions.get(bucket).map_or(keys, |position| *position as usize));
        }
        Self { members, starts }
    }

    fn buckets(&self, member: usize) -> core::ops::Range<usize> {
        assert!(member < self.members, "there is no such vCPU");
        self.starts[member].0..self.starts[member + 1].0
    }

    fn keys(&self, member: usize) -> core::ops::Range<usize> {
        assert!(member < self.members, "there is no such vCPU");
        self.starts[member].1..self.starts[member + 1].1
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    /// Runs `body` with class S and its keys on two threads.
    fn with_keys<R>(is_bucketed: bool, body: impl FnOnce(&mut Sort<'_, '_>) -> R) -> R {
        let mut words = vec![u64::MAX; 1 << 18];
        let arena = Arena::from_words(&mut words);
        native::run(2, 0, Box::new(|_| ()), |platform| {
            let mut layout = Layout::at(arena.address());
            let places = Places::new(&mut layout, &problem(Class::S), 2, is_bucketed);
            let mut typed = arena.typed(&layout).expect("2 MiB hold class S");
            let mut sort = Sort::new(platform, problem(Class::S), is_bucketed, places, &mut typed);
            sort.create_keys();
            body(&mut sort)
        })
    }

    #[test]
    fn the_keys_of_class_s_are_those_of_the_npb() {
        with_keys(false, |sort| {
            assert_eq!(sort.keys[..8], [1585, 825, 1060, 1343, 956, 437, 759, 841]);
            assert_eq!(sort.keys.iter().sum::<u32>(), 67_027_849);
            assert_eq!((sort.keys.iter().min(), sort.keys.iter().max()), (Some(&50), Some(&1973)));
        });
    }

    #[test]
    fn both_ways_give_the_same_counts() {
        let counts = |is_bucketed| {
            with_keys(is_bucketed, |sort| {
                assert_eq!(sort.rank(1), 0);
                sort.cumulative.to_vec()
            })
        };
        assert_eq!(counts(false), counts(true));
    }

    #[test]
    fn a_damaged_key_is_found_by_a_rank_and_by_the_order() {
        for is_bucketed in [false, true] {
            with_keys(is_bucketed, |sort| {
                assert_eq!(sort.rank(1), 0);
                // Key 62548 has rank 64917 of 65536, so a key that moves from the largest to 0 moves it.
                sort.keys[100] = 0;
                assert!(!sort.is_sorted_by_rank(), "the counts are those of the undamaged keys");
                assert_ne!(sort.rank(1), 0);
            });
        }
    }
}
