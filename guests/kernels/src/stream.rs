//! STREAM: sustained memory bandwidth of four loops over three arrays.
//!
//! ```text
//!   copy   c = a          16 bytes an element       ┌──────┬──────┬──────┐
//!   scale  b = 3·c        16                        │  a   │  b   │  c   │   each should be four times the last cache
//!   add    c = a + b      24                        └──────┴──────┴──────┘
//!   triad  a = b + 3·c    24                        one behind the other, as static arrays are
//! ```
//!
//! The definition is STREAM 5.10 (McCalpin, "Memory Bandwidth and Machine Balance in Current High Performance
//! Computers", 1995). A rate is the counted bytes over the shortest of all repetitions but the first, in 10⁶ bytes
//! a second. Its rule of sizes asks for arrays of four caches, so that no loop finds data of the one before in a
//! cache.

use core::cmp::Ordering::{Equal, Less};
use core::ops::Range;

use wideleaf_protocol::{Name, VCPUS_MAX};

use crate::arena::{Layout, Place};
use crate::caches;
use crate::copy;
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::parts::{deal, ranges, split, sum};
use crate::platform::ticks_to_seconds;
use crate::report::{self, COMPUTE, Figure, INIT, VERIFY};
use crate::{Arena, KernelError, Platform};

/// STREAM in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("stream"),
    summary: "STREAM: bandwidth of copy, scale, add and triad over three arrays",
    classes: &[],
    parameters: PARAMETERS,
    quick: "words=100000",
    figure: Figure { name: TRIAD.rate, unit: RATE },
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const RATE: Name<'static> = Name::literal("MB/s");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "words",
        default: "16777216",
        unit: "count",
        meaning: "elements of each of the three arrays, 8 bytes each",
    },
    Parameter {
        name: "times",
        default: "10",
        unit: "count",
        meaning: "repetitions, 2 to 250; the first is not counted",
    },
];

/// Default number of elements: arrays of 128 MiB, which are four times the 32 MiB that a group of cores shares in
/// AMD's EPYC, and more than STREAM's default of 10⁷ elements. It does not depend on the CPU: host and guest may
/// see different caches, and the host sizes the guest's RAM for it.
const WORDS_DEFAULT: u64 = 1 << 24;
/// Allowed lengths: each of 16 vCPUs has work, and 2^40 elements are more than any RAM.
const WORDS: Range<u64> = 1 << 10..1 << 40;
/// Allowed repetitions. The elements grow 15-fold in each; after 250 they are 10^294, still finite.
const TIMES: Range<u64> = 2..251;
/// Factor of scale and triad.
const SCALAR: f64 = 3.0;
/// Largest mean relative error of an array that STREAM passes for 64-bit numbers.
const TOLERANCE: f64 = 1e-13;

/// One of the four loops.
#[derive(Clone, Copy)]
struct Loop {
    bytes_per_word: u64,
    names: Names,
    run: fn(&dyn Platform, &mut Arrays<'_>),
}

/// Names of a loop's results: the rate, and the mean, shortest and longest time.
#[derive(Clone, Copy)]
struct Names {
    rate: Name<'static>,
    average: Name<'static>,
    least: Name<'static>,
    most: Name<'static>,
}

macro_rules! names {
    ($name:literal) => {
        Names {
            rate: Name::literal($name),
            average: Name::literal(concat!($name, "_avg")),
            least: Name::literal(concat!($name, "_min")),
            most: Name::literal(concat!($name, "_max")),
        }
    };
}

const TRIAD: Names = names!("triad");

const LOOPS: [Loop; 4] = [
    Loop { bytes_per_word: 16, names: names!("copy"), run: copy },
    Loop { bytes_per_word: 16, names: names!("scale"), run: scale },
    Loop { bytes_per_word: 24, names: names!("add"), run: add },
    Loop { bytes_per_word: 24, names: TRIAD, run: triad },
];

/// The sizes of a run.
struct Plan {
    words: u64,
    times: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let words = parameters.count("words", WORDS.start, WORDS.end - 1)?.unwrap_or(WORDS_DEFAULT);
        let times = parameters.count("times", TIMES.start, TIMES.end - 1)?.unwrap_or(10);
        Ok(Self { words, times })
    }

    /// Appends one slice for all three arrays.
    fn place(&self, layout: &mut Layout) -> Place<f64> {
        layout.place(3 * self.words)
    }

    /// Prints the size of an array in multiples of the last cache, if the CPU reports one. If it is less than the
    /// four of the rule, the cache affects the measurement.
    fn report_cache(&self, platform: &dyn Platform) {
        let Some(cache_bytes) = caches::last_level_bytes() else { return };
        report::result(platform, Name::literal("cache"), cache_bytes as f64, Name::literal("B"));
        let caches = (self.words * 8) as f64 / cache_bytes as f64;
        report::result(platform, Name::literal("caches_per_array"), caches, Name::literal("of_4_wanted"));
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    Ok(MemoryNeed::of_layout(|layout| plan.place(layout)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    let mut layout = Layout::at(arena.address());
    let place = plan.place(&mut layout);
    let mut typed = report::claim(platform, arena, &layout, Name::literal("arrays"))?;
    let (mut arrays, _) = report::phase(platform, INIT, || Arrays::new(platform, typed.take(place)));
    let (spreads, _) = report::phase(platform, COMPUTE, || repeat(platform, &mut arrays, plan.times));
    for (kind, spread) in LOOPS.iter().zip(&spreads) {
        spread.report(platform, kind, plan.words, plan.times - 1);
    }
    plan.report_cache(platform);
    let (wrong, _) = report::phase(platform, VERIFY, || arrays.count_wrong(platform, expected(plan.times)));
    report::verdict(platform, wrong, 3)
}

/// Runs the four loops `times` times. Returns the times of each, without the first.
fn repeat(platform: &dyn Platform, arrays: &mut Arrays<'_>, times: u64) -> [Spread; LOOPS.len()] {
    let mut spreads = [Spread::default(); LOOPS.len()];
    for repetition in report::steps(platform, times as u32) {
        for (kind, spread) in LOOPS.iter().zip(&mut spreads) {
            let start = platform.now();
            (kind.run)(platform, arrays);
            let ticks = platform.now().saturating_sub(start);
            if repetition > 1 {
                spread.add(ticks);
            }
        }
    }
    spreads
}

/// Expected element of a, b and c after that many repetitions.
fn expected(times: u64) -> [f64; 3] {
    let (mut a, mut b, mut c) = (2.0, 2.0, 0.0);
    for _ in 0..times {
        c = a;
        b = SCALAR * c;
        c = a + b;
        a = b + SCALAR * c;
    }
    [a, b, c]
}

/// Ticks of a loop.
#[derive(Clone, Copy)]
struct Spread {
    sum: u64,
    least: u64,
    most: u64,
}

impl Default for Spread {
    fn default() -> Self {
        Self { sum: 0, least: u64::MAX, most: 0 }
    }
}

impl Spread {
    fn add(&mut self, ticks: u64) {
        self.sum += ticks;
        self.least = self.least.min(ticks);
        self.most = self.most.max(ticks);
    }

    /// Prints the rate and the times; ticks if the counter's frequency is unknown.
    fn report(&self, platform: &dyn Platform, kind: &Loop, words: u64, times: u64) {
        let hz = platform.tsc_hz();
        let (scale, unit) = if hz == 0 { (1.0, "ticks") } else { (ticks_to_seconds(1, hz), "s") };
        let unit = Name::new(unit).expect("both are names");
        if hz > 0 {
            let rate = (kind.bytes_per_word * words) as f64 / (self.least as f64 * scale) / 1e6;
            report::result(platform, kind.names.rate, rate, RATE);
        }
        let average = self.sum as f64 / times as f64;
        for (name, ticks) in
            [(kind.names.average, average), (kind.names.least, self.least as f64), (kind.names.most, self.most as f64)]
        {
            report::result(platform, name, ticks * scale, unit);
        }
    }
}

/// The three arrays.
struct Arrays<'m> {
    a: &'m mut [f64],
    b: &'m mut [f64],
    c: &'m mut [f64],
}

impl<'m> Arrays<'m> {
    /// Splits `memory` into three equal parts and writes STREAM's first values.
    fn new(platform: &dyn Platform, memory: &'m mut [f64]) -> Self {
        let words = memory.len() / 3;
        let (a, rest) = memory.split_at_mut(words);
        let (b, c) = rest.split_at_mut(words);
        let arrays = Self { a, b, c };
        let members = platform.vcpus();
        let parts = split(arrays.a, members).zip(split(arrays.b, members)).zip(split(arrays.c, members));
        deal(platform, parts, |_, ((a, b), c)| {
            // STREAM writes 1 and doubles it, to have work for calibrating its clock.
            a.fill(2.0);
            b.fill(2.0);
            c.fill(0.0);
        });
        arrays
    }

    /// Number of arrays with a mean distance from these values beyond STREAM's tolerance.
    fn count_wrong(&self, platform: &dyn Platform, expected: [f64; 3]) -> u64 {
        let arrays = [&*self.a, &*self.b, &*self.c];
        let is_wrong = |(array, expected): &(&[f64], f64)| {
            let error = mean_error(platform, array, *expected);
            // A mean that is not a number is wrong too.
            !matches!((error / expected.abs()).partial_cmp(&TOLERANCE), Some(Less | Equal))
        };
        arrays.into_iter().zip(expected).filter(is_wrong).count() as u64
    }
}

fn copy(platform: &dyn Platform, arrays: &mut Arrays<'_>) {
    let Arrays { a, c, .. } = arrays;
    let (a, members) = (&**a, platform.vcpus());
    deal(platform, split(c, members).zip(ranges(a.len(), members)), |_, (c, range)| copy::copy(&a[range], c));
}

fn scale(platform: &dyn Platform, arrays: &mut Arrays<'_>) {
    let Arrays { b, c, .. } = arrays;
    let (c, members) = (&**c, platform.vcpus());
    deal(platform, split(b, members).zip(ranges(c.len(), members)), |_, (b, range)| {
        b.iter_mut().zip(&c[range]).for_each(|(b, c)| *b = SCALAR * c);
    });
}

fn add(platform: &dyn Platform, arrays: &mut Arrays<'_>) {
    let Arrays { a, b, c } = arrays;
    let (a, b, members) = (&**a, &**b, platform.vcpus());
    deal(platform, split(c, members).zip(ranges(a.len(), members)), |_, (c, range)| {
        c.iter_mut().zip(&a[range.clone()]).zip(&b[range]).for_each(|((c, a), b)| *c = a + b);
    });
}

fn triad(platform: &dyn Platform, arrays: &mut Arrays<'_>) {
    let Arrays { a, b, c } = arrays;
    let (b, c, members) = (&**b, &**c, platform.vcpus());
    deal(platform, split(a, members).zip(ranges(b.len(), members)), |_, (a, range)| {
        a.iter_mut().zip(&b[range.clone()]).zip(&c[range]).for_each(|((a, b), c)| *a = b + SCALAR * c);
    });
}

/// Mean distance of the elements from a value.
fn mean_error(platform: &dyn Platform, array: &[f64], expected: f64) -> f64 {
    let parts = ranges(array.len(), platform.vcpus());
    let distances = deal(platform, parts, |_, range| array[range].iter().map(|x| (x - expected).abs()).sum());
    sum(distances) / array.len() as f64
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;
    use crate::native;

    /// Length of arrays that two threads cannot share evenly.
    const FEW: usize = 1001;

    /// Runs `times` repetitions on two threads, then `body` with the arrays.
    fn after(times: u64, body: impl FnOnce(&dyn Platform, Arrays<'_>)) {
        let mut memory = vec![0.0; 3 * FEW];
        native::run(2, 0, Box::new(|_| ()), |platform| {
            let mut arrays = Arrays::new(platform, &mut memory);
            repeat(platform, &mut arrays, times);
            body(platform, arrays);
        });
    }

    #[test]
    fn ten_repetitions_give_the_published_values() {
        let published = [1_153_300_781_250.0, 230_660_156_250.0, 307_546_875_000.0];
        assert_eq!(expected(10), published);
        after(10, |platform, arrays| {
            assert_eq!((arrays.a[0], arrays.b[FEW - 1], arrays.c[FEW / 2]), published.into());
            assert_eq!(arrays.count_wrong(platform, published), 0);
        });
    }

    #[test]
    fn a_wrong_element_and_a_nan_are_found() {
        after(2, |platform, arrays| {
            arrays.c[17] *= 1.0 + 1e-9;
            arrays.a[FEW - 1] = f64::NAN;
            assert_eq!(arrays.count_wrong(platform, expected(2)), 2);
        });
    }

    #[test]
    fn the_most_repetitions_still_give_finite_numbers() {
        assert!(expected(TIMES.end - 1).iter().all(|x| x.is_finite()));
    }
}
