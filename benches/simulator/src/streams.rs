//! Streams of accesses, deterministic by their seed: the memory accesses of kernels, without the kernels.
//!
//! ```text
//!   gups      ·    ·  ·        ·     ·   ·      anywhere, one store each
//!   strided   ·  ·  ·  ·  ·  ·  ·  ·  ·  ·      the same distance each time
//!   triad     a·b·c· a·b·c·                     three arrays in step
//!   stencil   a point and its six neighbours    x is adjacent, y a row away, z a plane away
//!   sparse    row · values ·· columns ·· p(column) anywhere ··
//!   sort      keys in order, counters or buckets anywhere
//! ```
//!
//! Addresses are bytes from the arena's start. Words have 8 bytes, the sort's keys and the sparse matrix's columns
//! 4. Each stream is a finite or endless [`Iterator`]. None stores more than a few words, whatever the size of the
//! memory that it accesses.

/// Accesses to one 64-byte line, and the number of them before another line: the entry of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Offset from the start of the arena, in bytes.
    pub address: u64,
    /// Whether it is a store.
    pub is_write: bool,
    /// Number of accesses in total, at least 1.
    pub repeats: u32,
}

impl Access {
    /// Makes one load.
    pub const fn load(address: u64) -> Access {
        Access { address, is_write: false, repeats: 1 }
    }

    /// Makes one store.
    pub const fn store(address: u64) -> Access {
        Access { address, is_write: true, repeats: 1 }
    }
}

const WORD: u64 = 8;
const SHORT: u64 = 4;

/// Pseudorandom numbers, each from the previous one (Marsaglia, "Xorshift RNGs", 2003, with the multiplication of
/// Vigna's xorshift64*, 2016; the upper half is used).
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins at `seed`, which may be any number.
    pub const fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D);
        ((u128::from(number) * u128::from(bound)) >> 64) as u64
    }
}

/// HPCC RandomAccess: updates of random words among `words` words, one store each. (The load before it finds
/// the same line.)
pub fn gups(words: u64, seed: u64) -> impl Iterator<Item = Access> {
    let mut random = Random::new(seed);
    core::iter::repeat_with(move || Access::store(random.below(words) * WORD))
}

/// Loads `stride` bytes apart, round and round over `bytes` bytes.
pub fn strided(bytes: u64, stride: u64) -> impl Iterator<Item = Access> {
    let mut at = 0;
    core::iter::repeat_with(move || {
        let access = Access::load(at);
        at = (at + stride) % bytes;
        access
    })
}

/// STREAM's four kernels (McCalpin): the arrays among a, b, c that are read, and the one that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKernel {
    /// Copies: `c = a`.
    Copy,
    /// Scales: `b = s c`.
    Scale,
    /// Adds: `c = a + b`.
    Add,
    /// Scales and adds: `a = b + s c`.
    Triad,
}

impl StreamKernel {
    /// Arrays (a is 0) in the order of access; the last one is written, the others are read.
    const fn arrays(self) -> &'static [u64] {
        match self {
            StreamKernel::Copy => &[0, 2],
            StreamKernel::Scale => &[2, 1],
            StreamKernel::Add => &[0, 1, 2],
            StreamKernel::Triad => &[1, 2, 0],
        }
    }
}

/// One pass of a STREAM kernel over consecutive arrays of `words` words.
pub fn stream(kernel: StreamKernel, words: u64) -> impl Iterator<Item = Access> {
    let arrays = kernel.arrays();
    (0..words).flat_map(move |i| {
        arrays.iter().enumerate().map(move |(n, array)| Access {
            address: (array * words + i) * WORD,
            is_write: n + 1 == arrays.len(),
            repeats: 1,
        })
    })
}

/// A cube of `n` words a side.
#[derive(Clone, Copy, Debug)]
pub struct Cube {
    /// Number of words a side.
    pub n: u64,
}

impl Cube {
    /// Size of one array, in bytes.
    pub const fn bytes(self) -> u64 {
        self.n * self.n * self.n * WORD
    }

    const fn at(self, x: u64, y: u64, z: u64) -> u64 {
        ((z * self.n + y) * self.n + x) * WORD
    }

    /// A Jacobi sweep with seven points: reads a point and its six neighbours in one array, and writes the point in
    /// a second array behind it (NPB MG's smoother reads 27; its lines are the same).
    pub fn jacobi(self) -> impl Iterator<Item = Access> {
        let inner = 1..self.n.saturating_sub(1);
        let points = (inner.clone()).flat_map({
            let inner = inner.clone();
            move |z| {
                inner.clone().flat_map({
                    let inner = inner.clone();
                    move |y| inner.clone().map(move |x| (x, y, z))
                })
            }
        });
        points.flat_map(move |(x, y, z)| {
            [
                Access::load(self.at(x, y, z - 1)),
                Access::load(self.at(x, y - 1, z)),
                Access { repeats: 3, ..Access::load(self.at(x, y, z)) },
                Access::load(self.at(x, y + 1, z)),
                Access::load(self.at(x, y, z + 1)),
                Access::store(self.bytes() + self.at(x, y, z)),
            ]
        })
    }

    /// Solves lines along an axis, like NPB's SP and BT: forth over each line, then back; every word is
    /// read and written.
    pub fn line_sweep(self, axis: Axis) -> impl Iterator<Item = Access> {
        let n = self.n;
        (0..n * n).flat_map(move |line| {
            let (fast, slow) = (line % n, line / n);
            (0..2 * n).flat_map(move |step| {
                let along = if step < n { step } else { 2 * n - 1 - step };
                let address = match axis {
                    Axis::X => self.at(along, fast, slow),
                    Axis::Y => self.at(fast, along, slow),
                    Axis::Z => self.at(fast, slow, along),
                };
                [Access::load(address), Access::store(address)]
            })
        })
    }
}

/// Axis along which lines are solved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Words are neighbours in memory.
    X,
    /// Words are a row apart.
    Y,
    /// Words are a plane apart.
    Z,
}

/// A sparse matrix in rows, as in NPB's CG: row pointers, values, column indices, and two vectors one
/// after the other.
#[derive(Clone, Copy, Debug)]
pub struct Sparse {
    /// Number of rows, and of columns.
    pub rows: u64,
    /// Number of non-zero entries in a row.
    pub row_entries: u64,
}

impl Sparse {
    /// Size of all five arrays, in bytes.
    pub const fn bytes(self) -> u64 {
        self.rows * (2 * SHORT + 2 * WORD) + self.rows * self.row_entries * (SHORT + WORD)
    }

    /// `q = A p`, once: each entry's value and column in order, then the word of `p` for that column. Columns come
    /// from `seed`, evenly spread, and are the same in each product.
    pub fn multiply(self, seed: u64) -> impl Iterator<Item = Access> {
        let entries = self.rows * self.row_entries;
        let values = 0;
        let columns = values + entries * WORD;
        let pointers = columns + entries * SHORT;
        let p = (pointers + self.rows * SHORT).next_multiple_of(WORD);
        let q = p + self.rows * WORD;
        let mut random = Random::new(seed);
        let (mut row, mut entry, mut part) = (0, 0, Part::Pointer);
        core::iter::from_fn(move || {
            let at = row * self.row_entries + entry;
            let access = match part {
                Part::Pointer if row == self.rows => return None,
                Part::Pointer => {
                    part = Part::Value;
                    Access::load(pointers + row * SHORT)
                }
                Part::Value => {
                    part = Part::Column;
                    Access::load(values + at * WORD)
                }
                Part::Column => {
                    part = Part::Gather;
                    Access::load(columns + at * SHORT)
                }
                Part::Gather => {
                    entry += 1;
                    part = if entry < self.row_entries { Part::Value } else { Part::Result };
                    Access::load(p + random.below(self.rows) * WORD)
                }
                Part::Result => {
                    let access = Access::store(q + row * WORD);
                    (row, entry, part) = (row + 1, 0, Part::Pointer);
                    access
                }
            };
            Some(access)
        })
    }
}

/// Next access of a product.
#[derive(Clone, Copy)]
enum Part {
    Pointer,
    Value,
    Column,
    Gather,
    Result,
}

/// NPB's IS: `keys` keys below `bound`, four bytes each, ranked by counting.
#[derive(Clone, Copy, Debug)]
pub struct Sort {
    /// Number of keys.
    pub keys: u64,
    /// Bound of the keys, and number of counters.
    pub bound: u64,
}

impl Sort {
    /// Size of keys, bucketed keys and counters, in bytes.
    pub const fn bytes(self) -> u64 {
        (2 * self.keys + self.bound) * SHORT
    }

    /// Counts the keys in order of arrival; their counters are random.
    pub fn unbucketed(self, seed: u64) -> impl Iterator<Item = Access> {
        let mut random = Random::new(seed);
        (0..self.keys).flat_map(move |i| {
            let key = random.below(self.bound);
            [Access::load(i * SHORT), Access::store((2 * self.keys + key) * SHORT)]
        })
    }

    /// Puts the keys into `buckets` first (all equally full, as random keys nearly are), then counts bucket
    /// by bucket. The first pass writes to one place in each bucket, the second to the counters of one bucket
    /// at a time.
    pub fn bucketed(self, buckets: u64, seed: u64) -> impl Iterator<Item = Access> {
        let (in_bucket, counters) = (self.keys / buckets, self.bound / buckets);
        let mut random = Random::new(seed);
        let scatter = (0..self.keys).flat_map(move |i| {
            let place = random.below(buckets) * in_bucket + i / buckets;
            [Access::load(i * SHORT), Access::store((self.keys + place) * SHORT)]
        });
        let mut random = Random::new(seed.wrapping_add(1));
        let count = (0..in_bucket * buckets).flat_map(move |i| {
            let key = i / in_bucket * counters + random.below(counters);
            [Access::load((self.keys + i) * SHORT), Access::store((2 * self.keys + key) * SHORT)]
        });
        scatter.chain(count)
    }
}
