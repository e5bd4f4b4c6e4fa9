//! EP: pairs of Gaussian deviates by the polar method, counted by square annuli. It is pure arithmetic: the control
//! beside kernels that depend on memory.
//!
//! ```text
//!   batch k: 2¹⁷ numbers from seed·a^(k·2¹⁷) ─▶ 2¹⁶ points of (−1, 1)² ─▶ those in the circle ─▶ X, Y
//!            ─▶ Σ X, Σ Y, counts
//! ```

use wideleaf_protocol::{Name, VCPUS_MAX};

use super::classes::Class;
use super::logarithm::ln;
use super::random::Random;
use crate::arena::{Layout, Place};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{deal, ranges, split};
use crate::report::{self, COMPUTE, Compared, INIT, VERIFY};
use crate::{Arena, KernelError, Platform};

/// EP in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("npb.ep"),
    summary: "NPB EP: Gaussian deviates, arithmetic with hardly any memory",
    classes: &Class::ALL,
    parameters: PARAMETERS,
    quick: "class=S",
    figure: report::MOPS,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const PARAMETERS: &[Parameter] = &[Class::PARAMETER];

/// Seed of EP, different from the other kernels'.
const SEED: u64 = 271_828_183;
/// log2 of the pairs in a batch: the NPB's 2^16. Its numbers fill 1 MiB.
const LOG2_BATCH: u32 = 16;
const BATCH_NUMBERS: usize = 2 << LOG2_BATCH;
/// Points of a block: its columns stay in the first-level cache.
const BLOCK: usize = 128;
const _: () = assert!((1_usize << LOG2_BATCH).is_multiple_of(BLOCK), "a batch is whole blocks");
/// Largest relative error of a sum that the NPB passes.
const TOLERANCE: f64 = 1e-8;
/// Number of annuli: a deviate is less than 12, since its square is at most −2·ln 2⁻⁹⁰. A power of two, so that the
/// bounds check of the table costs nothing.
const ANNULI: usize = 16;

/// Sizes and reference values of a class.
#[derive(Clone, Copy)]
struct Problem {
    log2_pairs: u32,
    sum_x: f64,
    sum_y: f64,
    accepted: u64,
}

const fn problem(class: Class) -> Problem {
    let (log2_pairs, sum_x, sum_y, accepted) = match class {
        Class::S => (24, -3.24783465203474e+3, -6.958407078382297e+3, 13_176_389),
        Class::W => (25, -2.863319731645753e+3, -6.320053679109499e+3, 26_354_769),
        Class::A => (28, -4.295875165629892e+3, -1.580732573678431e+4, 210_832_767),
        Class::B => (30, 4.033815542441498e+4, -2.660669192809235e+4, 843_345_606),
        Class::C => (32, 4.764367927995374e+4, -8.084072988043731e+4, 3_373_275_903),
    };
    Problem { log2_pairs, sum_x, sum_y, accepted }
}

/// Sums and counts that a vCPU found in its batches.
#[derive(Clone, Copy, Default)]
struct Found {
    sum_x: f64,
    sum_y: f64,
    annuli: [u64; ANNULI],
}

impl Found {
    fn plus(mut self, other: &Self) -> Self {
        self.sum_x += other.sum_x;
        self.sum_y += other.sum_y;
        self.annuli.iter_mut().zip(other.annuli).for_each(|(count, more)| *count += more);
        self
    }
}

/// Places of the numbers of each vCPU's batch.
fn place_numbers(layout: &mut Layout, members: usize) -> Place<f64> {
    layout.place((members * BATCH_NUMBERS) as u64)
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    // The size is the same for every class, but the classes must exist.
    Class::from_parameters(parameters)?;
    Ok(MemoryNeed::of_layout(|layout| place_numbers(layout, vcpus)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let class = Class::from_parameters(parameters)?;
    let problem = problem(class);
    // The NPB repeats nothing here either, and says so.
    report::problem(platform, class, &[2 << problem.log2_pairs], 0);
    solve(platform, arena, problem)
}

fn solve<'a>(platform: &dyn Platform, arena: &Arena<'_>, problem: Problem) -> Result<(), KernelError<'a>> {
    let members = platform.vcpus();
    let mut layout = Layout::at(arena.address());
    let numbers = place_numbers(&mut layout, members);
    let mut typed = report::claim(platform, arena, &layout, Name::literal("numbers"))?;
    // Taking the slices writes them, which the NPB calls touching the arrays before the clock runs.
    let (numbers, _) = report::phase(platform, INIT, || typed.take(numbers));

    let batches = 1 << (problem.log2_pairs - LOG2_BATCH);
    let (found, ticks) = report::phase(platform, COMPUTE, || {
        let parts = split(numbers, members).zip(ranges(batches, members));
        let progress = report::progress(platform, batches as u64);
        let results = deal(platform, parts, |member, (numbers, batches)| {
            batches.enumerate().fold(Found::default(), |found, (done, batch)| {
                if member == 0 {
                    // The other vCPUs have as many batches of the same length.
                    progress.note((done * members) as u64);
                }
                found.plus(&run_batch(batch as u64, numbers))
            })
        });
        results.iter().flatten().fold(Found::default(), Found::plus)
    });
    report::rate(platform, (2_u64 << problem.log2_pairs) as f64, ticks);
    verify(platform, &problem, &found)
}

/// Runs one batch of pairs. `numbers` has room for all of its numbers.
fn run_batch(batch: u64, numbers: &mut [f64]) -> Found {
    let mut random = Random::new(SEED).skip(batch * BATCH_NUMBERS as u64);
    random.fill(numbers);
    let mut found = Found::default();
    let mut block = Block { x: [0.0; BLOCK], y: [0.0; BLOCK], square: [1.0; BLOCK] };
    let points = numbers.as_chunks::<2>().0;
    for points in points.as_chunks::<BLOCK>().0 {
        let count = block.keep_inside(points);
        block.count_deviates(count, &mut found);
    }
    found
}

/// Points that are processed together, in columns, so that the logarithms are computed in lanes.
struct Block {
    x: [f64; BLOCK],
    y: [f64; BLOCK],
    square: [f64; BLOCK],
}

impl Block {
    /// Maps numbers to points of (−1, 1)² and keeps those inside the unit circle. Returns their number. It has no
    /// branch, since it would be unpredictable.
    fn keep_inside(&mut self, points: &[[f64; 2]; BLOCK]) -> usize {
        let mut count = 0;
        for [first, second] in points {
            let (x, y) = (2.0 * first - 1.0, 2.0 * second - 1.0);
            let square = x * x + y * y;
            let place = count % BLOCK;
            (self.x[place], self.y[place], self.square[place]) = (x, y, square);
            count += usize::from(square <= 1.0);
        }
        count
    }

    /// Turns the first `count` points into deviates and counts them.
    fn count_deviates(&mut self, count: usize, found: &mut Found) {
        // All lanes are computed, also the leftovers behind `count`, which are never read: a fixed length
        // vectorises.
        let ratios = &mut self.square;
        ratios.iter_mut().for_each(|square| *square = -2.0 * ln(*square) / *square);
        for ((x, y), ratio) in self.x.iter().zip(&self.y).zip(ratios).take(count) {
            let factor = libm::sqrt(*ratio);
            let (x, y) = (x * factor, y * factor);
            found.annuli[x.abs().max(y.abs()) as usize % ANNULI] += 1;
            found.sum_x += x;
            found.sum_y += y;
        }
    }
}

fn verify<'a>(platform: &dyn Platform, problem: &Problem, found: &Found) -> Result<(), KernelError<'a>> {
    let name = Name::literal;
    let compared = |name, reference_name, value, reference| Compared {
        name,
        reference_name,
        value,
        reference,
        tolerance: TOLERANCE,
    };
    let accepted: u64 = found.annuli.iter().sum();
    let checks = [
        compared(name("sum_x"), name("sum_x_reference"), found.sum_x, problem.sum_x),
        compared(name("sum_y"), name("sum_y_reference"), found.sum_y, problem.sum_y),
        // A count is right or wrong; the NPB checks it since 3.4.2.
        Compared {
            tolerance: 0.0,
            ..compared(name("accepted"), name("accepted_reference"), accepted as f64, problem.accepted as f64)
        },
    ];
    let (errors, _) = report::phase(platform, VERIFY, || {
        checks.iter().for_each(|check| check.emit(platform));
        checks.iter().filter(|check| !check.is_right()).count() as u64
    });
    report::verdict(platform, errors, checks.len() as u64)
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    #[test]
    fn a_wrong_sum_is_found() {
        let mut words = vec![0; 1 << 19];
        let arena = Arena::from_words(&mut words);
        let wrong = Problem { sum_x: -3.247_834_7e3, ..problem(Class::S) };
        let end = native::run(2, 0, Box::new(|_| ()), |platform| solve(platform, &arena, wrong));
        assert!(matches!(end, Err(KernelError::VerificationFailed { errors: 1, checked: 3 })), "{end:?}");
    }
}
