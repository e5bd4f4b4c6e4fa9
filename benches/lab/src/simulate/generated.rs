//! Generated streams, named with parameters, as in `gups:log2_words=25,updates=1000000`.
//!
//! ```text
//!   "gups:log2_words=25"  ──parse──▶  Generated { gups, [25, 2^24, 1] }  ──▶ arena, accesses ──▶ the same every time
//! ```

use std::fmt;

use wideleaf_policies::Bytes;
use wideleaf_simulator::streams::{self, Access, Axis, Cube, Sort, Sparse, StreamKernel};

use super::sweep3d::Sweep3d;
use wideleaf::output::print;
use wideleaf::table::prose_table;
use wideleaf_run::failure::Failure;

/// Accesses, in order.
pub type Accesses = Box<dyn Iterator<Item = Access> + Send>;

/// A number that may be set.
struct Parameter {
    name: &'static str,
    default: u64,
    range: (u64, u64),
    meaning: &'static str,
}

const fn parameter(name: &'static str, default: u64, range: (u64, u64), meaning: &'static str) -> Parameter {
    Parameter { name, default, range, meaning }
}

/// A kind of stream: a line of the table for listing, parsing and making streams.
struct Kind {
    name: &'static str,
    summary: &'static str,
    parameters: &'static [Parameter],
    /// Length of the arena, and number of accesses. Gets the parameters in the order of the table.
    extent: fn(&[u64]) -> (u64, u64),
    make: fn(&[u64]) -> Accesses,
}

const SEED: Parameter = parameter("seed", 1, (0, u64::MAX), "seed of the random numbers");

/// All streams. The bounds keep an arena within 2 TiB, the limit of a simulator.
const KINDS: &[Kind] = &[
    Kind {
        name: "gups",
        summary: "HPCC RandomAccess: updates of any word of a table",
        parameters: &[
            parameter("log2_words", 25, (9, 37), "words of the table, 8 bytes each, as a power of two"),
            parameter("updates", 1 << 24, (1, 1 << 40), "number of updates (HPCC makes 4 for each word)"),
            SEED,
        ],
        extent: |p| (8 << p[0], p[1]),
        make: |p| Box::new(streams::gups(1 << p[0], p[2]).take(p[1] as usize)),
    },
    Kind {
        name: "stride",
        summary: "loads at a constant distance, repeatedly over the memory",
        parameters: &[
            parameter("log2_bytes", 28, (12, 40), "size of the memory in bytes, as a power of two"),
            parameter("stride", 4096, (1, 1 << 30), "bytes from one load to the next"),
            parameter("loads", 1 << 24, (1, 1 << 40), "number of loads"),
        ],
        extent: |p| (1 << p[0], p[2]),
        make: |p| Box::new(streams::strided(1 << p[0], p[1]).take(p[2] as usize)),
    },
    Kind {
        name: "stream",
        summary: "STREAM: copy, scale, add and triad over three arrays",
        parameters: &[
            parameter("log2_words", 21, (3, 36), "words of an array, 8 bytes each, as a power of two"),
            parameter("passes", 2, (1, 1 << 20), "number of passes over all four loops"),
        ],
        extent: |p| (3 * (8 << p[0]), p[1] * (10 << p[0])),
        make: |p| {
            let [words, passes] = [1 << p[0], p[1]];
            let kernels = [StreamKernel::Copy, StreamKernel::Scale, StreamKernel::Add, StreamKernel::Triad];
            Box::new((0..passes).flat_map(move |_| kernels.into_iter().flat_map(move |k| streams::stream(k, words))))
        },
    },
    Kind {
        name: "stencil",
        summary: "Jacobi sweeps with seven points over a cube, into a second one",
        parameters: &[
            parameter("side", 128, (3, 4096), "words a side, 8 bytes each"),
            parameter("sweeps", 2, (1, 1 << 20), "number of sweeps"),
        ],
        extent: |p| (2 * Cube { n: p[0] }.bytes(), p[1] * 8 * (p[0] - 2).pow(3)),
        make: |p| {
            let [n, sweeps] = [p[0], p[1]];
            Box::new((0..sweeps).flat_map(move |_| Cube { n }.jacobi()))
        },
    },
    Kind {
        name: "lines",
        summary: "lines of a cube solved forward and backward along x, then y, then z, as in NPB's SP and BT",
        parameters: &[
            parameter("side", 128, (1, 4096), "words a side, 8 bytes each"),
            parameter("sweeps", 1, (1, 1 << 20), "number of sweeps over all three directions"),
        ],
        extent: |p| (Cube { n: p[0] }.bytes(), p[1] * 12 * p[0].pow(3)),
        make: |p| {
            let [n, sweeps] = [p[0], p[1]];
            let axes = [Axis::X, Axis::Y, Axis::Z];
            Box::new((0..sweeps).flat_map(move |_| axes.into_iter().flat_map(move |axis| Cube { n }.line_sweep(axis))))
        },
    },
    Kind {
        name: "cg",
        summary: "products of a sparse matrix and a vector, as in NPB's CG",
        parameters: &[
            parameter("rows", 14_000, (1, 1 << 28), "rows and columns (CG A: 14000, B: 75000, C: 150000)"),
            parameter("row_entries", 132, (1, 4096), "entries a row that are not zero (CG A: 132, B: 183, C: 241)"),
            parameter("products", 4, (1, 1 << 20), "number of products"),
            SEED,
        ],
        extent: |p| {
            (Sparse { rows: p[0], row_entries: p[1] }.bytes().next_multiple_of(64), p[2] * p[0] * (3 * p[1] + 2))
        },
        make: |p| {
            let ([rows, row_entries, products], seed) = ([p[0], p[1], p[2]], p[3]);
            Box::new((0..products).flat_map(move |_| Sparse { rows, row_entries }.multiply(seed)))
        },
    },
    Kind {
        name: "is",
        summary: "NPB's IS: keys ranked by counting, with or without buckets",
        parameters: &[
            parameter("log2_keys", 23, (4, 36), "keys, 4 bytes each, as a power of two (IS A: 23, B: 25)"),
            parameter("log2_bound", 19, (4, 32), "counters, as a power of two (IS A: 19, B: 21)"),
            parameter("log2_buckets", 10, (0, 16), "buckets, as a power of two; 0: no buckets"),
            SEED,
        ],
        extent: |p| (Sort { keys: 1 << p[0], bound: 1 << p[1] }.bytes(), if p[2] == 0 { 2 << p[0] } else { 4 << p[0] }),
        make: |p| {
            let sort = Sort { keys: 1 << p[0], bound: 1 << p[1] };
            match p[2].min(p[0]).min(p[1]) {
                0 => Box::new(sort.unbucketed(p[3])),
                log2_buckets => Box::new(sort.bucketed(1 << log2_buckets, p[3])),
            }
        },
    },
    Kind {
        name: "half-sparse",
        summary: "passes over windows: every second one is used completely, few pages of the others",
        parameters: &[
            parameter("windows", 64, (1, 1 << 20), "number of windows of 2 MiB"),
            parameter("pages", 8, (0, 512), "pages that are used in each odd window"),
            parameter("passes", 100, (1, 1 << 30), "number of passes"),
        ],
        extent: |p| (p[0] << 21, p[2] * (p[0].div_ceil(2) * 512 + p[0] / 2 * p[1])),
        make: |p| {
            let [windows, sparse, passes] = [p[0], p[1], p[2]];
            let pages = move |window| if window % 2 == 0 { 512 } else { sparse };
            let of_window =
                move |window: u64| (0..pages(window)).map(move |page| Access::store(window << 21 | page << 12));
            Box::new((0..passes).flat_map(move |_| (0..windows).flat_map(of_window)))
        },
    },
    Kind {
        name: "sweep3d",
        summary: "an iteration of ASCI Sweep3D in the order of its own loops, one angle after another",
        parameters: &[
            parameter("n", 150, (16, 400), "cells along an edge"),
            parameter("border", 64, (64, 1 << 30), "alignment of each array, rounded up to lines of 64 bytes"),
            parameter("iterations", 1, (1, 1 << 20), "number of iterations (the reference makes 12)"),
        ],
        extent: |p| {
            let sweep = Sweep3d { n: p[0], border: p[1].next_multiple_of(64) };
            (sweep.bytes(), p[2] * sweep.length())
        },
        make: |p| {
            let (sweep, iterations) = (Sweep3d { n: p[0], border: p[1].next_multiple_of(64) }, p[2]);
            Box::new((0..iterations).flat_map(move |_| sweep.iteration()))
        },
    },
];

/// A stream with its parameters, checked.
#[derive(Clone)]
pub struct Generated {
    kind: &'static Kind,
    values: Vec<u64>,
}

impl Generated {
    /// Parses `name` or `name:key=value,key=value`; `None` if no stream has that name.
    ///
    /// # Errors
    /// Message about the invalid part, with the valid forms.
    pub fn parse(text: &str) -> Option<Result<Generated, String>> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let kind = KINDS.iter().find(|kind| kind.name == name)?;
        let mut stream =
            Generated { kind, values: kind.parameters.iter().map(|parameter| parameter.default).collect() };
        let mut settings = settings.split(',').filter(|setting| !setting.is_empty());
        Some(settings.try_for_each(|setting| stream.set(setting)).map(|()| stream))
    }

    fn set(&mut self, setting: &str) -> Result<(), String> {
        let (key, value) =
            setting.split_once('=').ok_or_else(|| format!("{setting:?} has no value; write key=value"))?;
        let Some(at) = self.kind.parameters.iter().position(|parameter| parameter.name == key) else {
            let known: Vec<_> = self.kind.parameters.iter().map(|parameter| parameter.name).collect();
            return Err(format!("{} has no parameter {key:?}; it has {}", self.kind.name, known.join(", ")));
        };
        let (min, max) = self.kind.parameters[at].range;
        let number = value.parse().ok().filter(|number| (min..=max).contains(number));
        self.values[at] = number.ok_or_else(|| format!("{key}={value} is not a whole number from {min} to {max}"))?;
        Ok(())
    }

    /// Name of the stream.
    pub fn name(&self) -> &'static str {
        self.kind.name
    }

    /// Memory that it accesses.
    pub fn arena(&self) -> Bytes {
        Bytes::new((self.kind.extent)(&self.values).0)
    }

    /// Number of accesses.
    pub fn length(&self) -> u64 {
        (self.kind.extent)(&self.values).1
    }

    /// The accesses, from the first on.
    pub fn accesses(&self) -> Accesses {
        (self.kind.make)(&self.values)
    }
}

/// All parameters, so that the output shows what was simulated.
impl fmt::Display for Generated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.kind.parameters.iter().zip(&self.values).map(|(p, value)| format!("{}={value}", p.name));
        f.write_str(&settings.collect::<Vec<_>>().join(","))
    }
}

/// The names, for messages.
pub fn names() -> String {
    KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

/// Prints all streams: `--trace help`.
///
/// # Errors
/// [`Failure::Output`] if they could not be written.
pub fn list() -> Result<(), Failure> {
    let mut kinds = prose_table(&["stream", "what it does"]);
    let mut parameters = prose_table(&["stream", "parameter", "default", "from", "to", "meaning"]);
    for kind in KINDS {
        kinds.add_row([kind.name, kind.summary]);
        for Parameter { name, default, range: (min, max), meaning } in kind.parameters {
            let numbers = [default, min, max].map(u64::to_string);
            let [default, min, max] = numbers.each_ref().map(String::as_str);
            parameters.add_row([kind.name, name, default, min, max, meaning]);
        }
    }
    print(&format!("{kinds}\n\nTo set parameters: --trace gups:log2_words=27,updates=1000000\n{parameters}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Generated, String> {
        Generated::parse(text).expect("there is a stream of that name")
    }

    #[test]
    fn every_stream_stays_in_its_arena_and_has_the_announced_length() {
        let small = [
            "gups:log2_words=10,updates=5000",
            "stride:log2_bytes=16,stride=4160,loads=5000",
            "stream:log2_words=7,passes=2",
            "stencil:side=9,sweeps=2",
            "lines:side=7,sweeps=2",
            "cg:rows=60,row_entries=7,products=3",
            "is:log2_keys=10,log2_bound=8,log2_buckets=3",
            "is:log2_keys=10,log2_bound=8,log2_buckets=0",
            "half-sparse:windows=5,pages=3,passes=2",
            "sweep3d:n=16,border=4096,iterations=1",
        ];
        for text in small {
            let stream = parse(text).expect("it makes sense");
            let mut length = 0;
            for Access { address, repeats, .. } in stream.accesses() {
                assert!(address < stream.arena().get(), "{text}: {address}");
                length += u64::from(repeats);
            }
            assert_eq!(length, stream.length(), "{text}");
        }
        assert!(KINDS.iter().all(|kind| small.iter().any(|text| text.starts_with(kind.name))), "each kind is here");
        // One iteration is long enough for a test.
        let [one, two] = [1, 2].map(|iterations| format!("sweep3d:n=16,border=4096,iterations={iterations}"));
        let [one, two] = [one, two].map(|text| parse(&text).expect("it makes sense").length());
        assert_eq!(two, 2 * one);
    }

    #[test]
    fn an_invalid_stream_is_refused_with_the_valid_forms() {
        assert!(Generated::parse("cg.A.trace").is_none());
        let error = |text| parse(text).err().expect("it makes no sense");
        assert_eq!(error("gups:words=3"), "gups has no parameter \"words\"; it has log2_words, updates, seed");
        assert_eq!(error("gups:log2_words"), "\"log2_words\" has no value; write key=value");
        assert_eq!(error("gups:log2_words=50"), "log2_words=50 is not a whole number from 9 to 37");
        assert_eq!(parse("gups").expect("defaults").to_string(), "log2_words=25,updates=16777216,seed=1");
    }
}
