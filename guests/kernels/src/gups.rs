//! GUPS: the RandomAccess benchmark of the HPC Challenge (HPCC), random updates all over a table.
//!
//! ```text
//!   a₁, a₂, …, a₄ₙ            a pseudo-random sequence of 64-bit words, N = 2^k the table's length
//!      │  128 streams per vCPU, each its own stretch of the sequence
//!      ▼
//!   T[a mod N] ^= a           T[i] = i at first
//! ```
//!
//! An update is a read and a write at an unpredictable address, so nearly every update misses the TLB: its rate is
//! the price of the walk. Exclusive-or is its own inverse, so running the same sequence again must restore
//! `T[i] = i`. That is the verification, and it detects every word that the memory beneath lost.
//!
//! The definition is HPCC's: generator x⁶³ + x² + x + 1 over GF(2) ([`step`], [`starts`]), 4·N updates a round, 128
//! streams, wall time of the updates only. With one vCPU and one round the table is, bit by bit, the one of HPCC's
//! single-CPU RandomAccess. Two differences, both only on request:
//! - several vCPUs share one table, each with 1/n of the sequence; two that update one word at once may lose an
//!   update, which HPCC allows for up to 1 % of the words. Such words are spread over the table; more in one
//!   place than lost updates explain are lost memory and fail the run;
//! - several rounds repeat the same sequence, so after an odd number the table is the one of a single round, and
//!   after an even number `T[i] = i`. The verification stays exact and as short as one round.
//!
//! Sparse memory may follow the table (`sparse=`), to show how a policy treats it beside a hot table: one page of
//! each window is filled before the updates and checked after them, and the rest of it is never touched.

use core::array;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name, Status, VCPUS_MAX};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::phases::{Density, SET_BYTES_MAX, Set, WINDOW_BYTES, WINDOW_WORDS};
use crate::platform::ticks_to_seconds;
use crate::report::{self, Figure};
use crate::rounds::{Batches, Progress, Tally, Until, part, progress_ms, run_rounds};
use crate::test_pattern::{FIRST_GENERATION, PAGE_WORDS, word, write_first};
use crate::{Arena, KernelError, Platform};

/// GUPS in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("gups"),
    summary: "HPCC RandomAccess: random updates all over a table, in giga-updates per second",
    classes: &[],
    parameters: PARAMETERS,
    quick: "log2_words=16",
    figure: FIGURE,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("gups", "GUP/s");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "log2_words",
        default: "25",
        unit: "log2 of a count",
        meaning: "length of the table in 64-bit words: 25 is 256 MiB, 26 is 512 MiB",
    },
    Parameter {
        name: "rounds",
        default: "1",
        unit: "count",
        meaning: "how often the 4 x 2^log2_words updates are run; once in HPCC",
    },
    Parameter {
        name: "seconds",
        default: "not used",
        unit: "s",
        meaning: "repeat whole rounds for at least this time (instead of rounds=)",
    },
    Parameter {
        name: "sparse",
        default: "0",
        unit: "bytes (K, M, G, T)",
        meaning: "memory behind the table; one page of each 2 MiB is filled before the updates and checked after them",
    },
    Parameter {
        name: "progress_ms",
        default: "100",
        unit: "ms",
        meaning: "minimum time between two progress lines, 10 or more; 0 prints none",
    },
];

/// The generator's polynomial: x² + x + 1 below x⁶³ (HPCC calls it POLY).
const POLYNOMIAL: u64 = 7;
/// Length of the generator's cycle, (2⁶³ − 1) / 7.
const PERIOD: u64 = 1_317_624_576_693_539_401;
const _: () = assert!(PERIOD == ((1 << 63) - 1) / 7, "the cycle is a seventh of the field's");
/// Streams of updates that one vCPU interleaves: at most this many memory accesses are in flight.
const STREAMS: usize = 128;
/// Updates per word of the table in one round.
const UPDATES_PER_WORD: u64 = 4;
/// Allowed table lengths: each of 16 vCPUs must get a batch of 128 updates, and the region must be an address
/// range.
const LOG2_WORDS: Range<u64> = 10..41;
const _: () = assert!(UPDATES_PER_WORD << LOG2_WORDS.start >= (VCPUS_MAX * STREAMS) as u64);
/// Minimum time between progress lines in milliseconds, unless given: their exits cost less than a thousandth of the
/// run.
const PROGRESS_MS: u64 = 100;
/// HPCC passes a run with up to 1 % wrong words.
const PASSING_ERRORS_DIVISOR: u64 = 100;
/// This number of wrong words side by side, a quarter of a page, are lost memory. Lost updates gather a little, since
/// parts of the sequence repeat each other: simulated with 16 vCPUs in step and 16 updates each in flight, up to 33
/// side by side, in a table of 2^26 words.
const LOST_IN_A_ROW: u64 = PAGE_WORDS / 4;
/// More wrong words of one window are lost memory, such as a copy that was taken too early, if they are also more
/// than [`LOST_PER_MEAN`] times the mean of all windows. Lost updates were up to 3848 of a window.
const LOST_IN_WINDOW: u64 = WINDOW_WORDS / 64;
/// See [`LOST_IN_WINDOW`]. Lost updates were up to nine times the mean.
const LOST_PER_MEAN: u64 = 16;

/// The element after `a` in the sequence.
#[inline]
pub const fn step(a: u64) -> u64 {
    (a << 1) ^ if a >> 63 == 1 { POLYNOMIAL } else { 0 }
}

/// Element `n` of the sequence a₀ = 1, a₁ = 2, …, in about 64 steps instead of n.
pub const fn starts(n: u64) -> u64 {
    let n = n % PERIOD;
    if n == 0 {
        return 1;
    }
    // n's bits from the second highest down: square, and one step for a set bit. a₁ stands for the highest.
    let mut a = 2;
    let mut bit = n.ilog2();
    while bit > 0 {
        bit -= 1;
        a = square(a);
        if n >> bit & 1 == 1 {
            a = step(a);
        }
    }
    a
}

/// Computes a₂ₙ from aₙ: squaring in GF(2)[x] maps x^i to x^2i.
const fn square(a: u64) -> u64 {
    let mut sum = 0;
    let mut i = 0;
    while i < 64 {
        if a >> i & 1 == 1 {
            sum ^= EVEN_ELEMENTS[i];
        }
        i += 1;
    }
    sum
}

/// The elements a₀, a₂, a₄, …, a₁₂₆.
const EVEN_ELEMENTS: [u64; 64] = {
    let mut elements = [0; 64];
    let mut a = 1;
    let mut i = 0;
    while i < 64 {
        elements[i] = a;
        a = step(step(a));
        i += 1;
    }
    elements
};

/// Sets `T[i] = i` for `range`.
pub fn fill(table: &[AtomicU64], range: Range<u64>) {
    for index in range {
        table[index as usize].store(index, Ordering::Relaxed);
    }
}

/// A part of the sequence, distributed to 128 streams.
pub struct Streams {
    elements: [u64; STREAMS],
    batches: u64,
}

impl Streams {
    /// Creates the streams of `batches`. A batch is one update of each stream; batches 0 to 4·N/128 are a whole
    /// round.
    pub fn new(batches: Range<u64>) -> Self {
        let stretch = batches.end - batches.start;
        let first = |stream: usize| starts(batches.start * STREAMS as u64 + stream as u64 * stretch);
        Self { elements: array::from_fn(first), batches: stretch }
    }

    /// Runs all updates on the whole table and calls `after_batch(n)` when n batches are done. Returns the last
    /// element of each stream. The table's length is a power of two.
    #[inline]
    pub fn run(mut self, table: &[AtomicU64], mut after_batch: impl FnMut(u64)) -> [u64; STREAMS] {
        let mask = mask_of(table);
        for done in 1..=self.batches {
            for element in &mut self.elements {
                *element = step(*element);
                apply(table, mask, *element);
            }
            after_batch(done);
        }
        self.elements
    }

    /// Runs the updates that fall into `words` and skips the others: vCPUs with disjoint words lose no update.
    #[inline]
    pub fn run_within(mut self, table: &[AtomicU64], words: Range<u64>, mut after_batch: impl FnMut(u64)) {
        let mask = mask_of(table);
        let mut mine = [0; STREAMS];
        for done in 1..=self.batches {
            // Updates are selected without a branch first, then applied. An unpredictable branch would cut short
            // the memory accesses in flight and take three times as long.
            let mut count = 0;
            for element in &mut self.elements {
                *element = step(*element);
                mine[count] = *element;
                count += usize::from(words.contains(&(*element & mask)));
            }
            mine[..count].iter().for_each(|element| apply(table, mask, *element));
            after_batch(done);
        }
    }
}

fn mask_of(table: &[AtomicU64]) -> u64 {
    assert!(table.len().is_power_of_two(), "the sequence's words are reduced to the table by a mask");
    table.len() as u64 - 1
}

/// One update. It is a load and a store instead of an atomic exchange, as HPCC measures it, and may lose an update.
#[inline(always)]
fn apply(table: &[AtomicU64], mask: u64, element: u64) {
    let word = &table[(element & mask) as usize];
    word.store(word.load(Ordering::Relaxed) ^ element, Ordering::Relaxed);
}

/// Number of words of `range` that differ from what [`fill`] wrote.
pub fn count_errors(table: &[AtomicU64], range: Range<u64>) -> u64 {
    range.filter(|index| is_wrong(table, *index)).count() as u64
}

fn is_wrong(table: &[AtomicU64], index: u64) -> bool {
    table[index as usize].load(Ordering::Relaxed) != index
}

/// Wrong words of the table, and the most of them in one place.
#[derive(Debug, Default)]
struct WrongWords {
    words: AtomicU64,
    most_in_a_row: AtomicU64,
    most_in_window: AtomicU64,
}

impl WrongWords {
    /// Adds the wrong words of `range`.
    fn count(&self, table: &[AtomicU64], range: Range<u64>) {
        let (mut in_a_row, mut in_window) = (0, 0);
        for index in range.clone() {
            if is_wrong(table, index) {
                in_a_row += 1;
                in_window += 1;
            } else if in_a_row > 0 {
                self.most_in_a_row.fetch_max(in_a_row, Ordering::Relaxed);
                in_a_row = 0;
            }
            if (index + 1).is_multiple_of(WINDOW_WORDS) || index + 1 == range.end {
                self.most_in_window.fetch_max(in_window, Ordering::Relaxed);
                self.words.fetch_add(in_window, Ordering::Relaxed);
                in_window = 0;
            }
        }
        self.most_in_a_row.fetch_max(in_a_row, Ordering::Relaxed);
    }

    /// Whether a table of this length has more wrong words in one place than lost updates leave there.
    fn are_in_one_place(&self, table_words: u64) -> bool {
        let [words, in_a_row, in_window] =
            [&self.words, &self.most_in_a_row, &self.most_in_window].map(|count| count.load(Ordering::Relaxed));
        let mean = words * WINDOW_WORDS / table_words;
        in_a_row >= LOST_IN_A_ROW || in_window > LOST_IN_WINDOW.max(LOST_PER_MEAN * mean)
    }
}

/// Number of batches of one round for a table of that many words.
pub const fn batches_per_round(words: u64) -> u64 {
    UPDATES_PER_WORD * words / STREAMS as u64
}

/// Memory of a run: the table, and behind it whole windows of which one page each is touched.
#[derive(Clone, Copy)]
struct Extent {
    table_words: u64,
    sparse_windows: u64,
}

impl Extent {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let log2_words = parameters.count("log2_words", LOG2_WORDS.start, LOG2_WORDS.end - 1)?.unwrap_or(25);
        let sparse = parameters.size("sparse", 0, SET_BYTES_MAX)?.unwrap_or(0);
        Ok(Self { table_words: 1 << log2_words, sparse_windows: sparse / WINDOW_BYTES })
    }

    /// Words of the arena that form the sparse windows: the first whole ones behind the table.
    const fn sparse(&self) -> Range<u64> {
        let border = if self.sparse_windows == 0 { 1 } else { WINDOW_WORDS };
        let start = self.table_words.next_multiple_of(border);
        start..start + self.sparse_windows * WINDOW_WORDS
    }

    const fn bytes(&self) -> u64 {
        self.sparse().end * 8
    }
}

/// The validated parameters of a run.
struct Plan {
    extent: Extent,
    until: Until,
    /// Minimum time between two progress lines in milliseconds; 0 for none.
    progress_ms: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let progress_ms = progress_ms(parameters, PROGRESS_MS)?;
        let until = Until::read(parameters, "rounds", 1 << 32, 1)?;
        Ok(Self { extent: Extent::read(parameters)?, until, progress_ms })
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(Plan::read(parameters)?.extent.bytes()))
}

/// Windows behind the table of which only one page each is ever touched. Its words are those of pattern and phases.
struct Sparse<'m> {
    address: u64,
    words: &'m [AtomicU64],
    set: Set,
}

impl<'m> Sparse<'m> {
    fn new(extent: &Extent, arena: &Arena<'m>) -> Self {
        let Range { start, end } = extent.sparse();
        let windows = extent.sparse_windows;
        Self {
            address: arena.address() + start * 8,
            words: &arena.words()[start as usize..end as usize],
            set: Set { name: Name::literal("sparse"), first_window: 0, windows, density: Density::OnePage },
        }
    }

    /// Indices of the touched words.
    fn touched(&self) -> impl Iterator<Item = u64> {
        let set = self.set;
        (0..set.pages()).flat_map(move |page| set.page(page)..set.page(page) + PAGE_WORDS)
    }

    fn fill(&self) {
        self.touched().for_each(|index| write_first(&self.words[index as usize], index));
    }

    fn count_errors(&self) -> u64 {
        let is_wrong =
            |index: &u64| self.words[*index as usize].load(Ordering::Relaxed) != word(*index, FIRST_GENERATION);
        self.touched().filter(is_wrong).count() as u64
    }
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let Plan { extent, until, progress_ms } = Plan::read(parameters)?;
    until.prepare(platform)?;
    if arena.bytes() < extent.bytes() {
        return Err(KernelError::ArenaTooSmall { needed: extent.bytes(), bytes: arena.bytes() });
    }
    let words = extent.table_words;
    let sparse = Sparse::new(&extent, arena);
    let table = &arena.words()[..words as usize];
    let region = |name, address, bytes| platform.emit(&Message::Region { name, address, bytes });
    region(Name::literal("table"), arena.address(), words * 8);
    if sparse.set.windows > 0 {
        region(sparse.set.name, sparse.address, sparse.set.windows * WINDOW_BYTES);
    }

    let vcpus = platform.vcpus();
    phase(platform, Name::literal("init"), || {
        platform.run_on_all(&|vcpu| fill(table, part(words, vcpu, vcpus)));
        sparse.fill();
    });
    let rounds = updates(platform, table, until, progress_ms);
    verify(platform, table, &sparse, rounds, progress_ms)
}

/// Runs the timed part. Returns the number of rounds.
fn updates(platform: &dyn Platform, table: &[AtomicU64], until: Until, progress_ms: u64) -> u64 {
    const PHASE: Name<'static> = Name::literal("update");
    let vcpus = platform.vcpus();
    let batches = batches_per_round(table.len() as u64);
    let updates_per_round = batches * STREAMS as u64;
    let planned = until.planned().saturating_mul(updates_per_round);

    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    let tally = Tally::default();
    let rounds_run = AtomicU64::new(0);
    let end = AtomicU64::new(0);
    let progress = Progress::new(platform, PHASE, planned, progress_ms);
    let start = platform.now();

    let work = |vcpu: usize, round: u64, clock: &mut Batches<'_>| {
        let mine = part(batches, vcpu, vcpus);
        let done_before = round * (mine.end - mine.start);
        let streams = Streams::new(mine);
        clock.restart();
        let after_batch = |done: u64| {
            let now = clock.end_batch();
            tally.set(vcpu, (done_before + done) * STREAMS as u64);
            if vcpu == 0 && progress.is_due(now) {
                progress.emit(now, tally.sum());
                clock.restart();
            }
        };
        streams.run(table, after_batch);
    };
    let again = |round: u64| {
        let now = platform.now();
        end.store(now, Ordering::Relaxed);
        rounds_run.store(round + 1, Ordering::Relaxed);
        !until.is_reached(platform, round + 1, now.saturating_sub(start))
    };
    let gaps = run_rounds(platform, work, again);
    platform.emit(&Message::End { phase: PHASE, tsc: platform.now() });

    let rounds = rounds_run.into_inner();
    let updates = rounds * updates_per_round;
    let ticks = end.into_inner().saturating_sub(start);
    let hz = platform.tsc_hz();
    let result = |name, value, unit| report::result(platform, name, value, unit);
    result(Name::literal("updates"), updates as f64, Name::literal("updates"));
    if hz == 0 {
        result(Name::literal("ticks"), ticks as f64, Name::literal("ticks"));
    } else {
        let seconds = ticks_to_seconds(ticks, hz);
        result(Name::literal("seconds"), seconds, Name::literal("s"));
        FIGURE.emit(platform, updates as f64 / seconds / 1e9);
        // A part of `seconds`, on vCPU 0: the time that progress lines took from the measurement.
        result(Name::literal("console"), ticks_to_seconds(progress.console_ticks(), hz), Name::literal("s"));
    }
    for (vcpu, summary) in gaps.iter().enumerate().take(vcpus) {
        if let Some(message) = summary.message(vcpu, hz) {
            platform.emit(&message);
        }
    }
    rounds
}

/// Undoes an odd number of rounds and counts the words that are not restored, and the sparse words that changed.
///
/// Each vCPU owns a part of the table, generates the whole sequence and applies the updates that fall into its
/// part, so no update can be lost here: the errors are those of the timed part, or the memory's.
fn verify<'a>(
    platform: &dyn Platform,
    table: &[AtomicU64],
    sparse: &Sparse<'_>,
    rounds: u64,
    progress_ms: u64,
) -> Result<(), KernelError<'a>> {
    const PHASE: Name<'static> = Name::literal("verify");
    let vcpus = platform.vcpus();
    let words = table.len() as u64;
    let batches = batches_per_round(words);
    let wrong = WrongWords::default();
    let mut sparse_errors = 0;
    phase(platform, PHASE, || {
        let progress = Progress::new(platform, PHASE, batches * STREAMS as u64, progress_ms);
        platform.run_on_all(&|vcpu| {
            let mine = part(words, vcpu, vcpus);
            let after_batch = |done: u64| {
                let now = platform.now();
                if vcpu == 0 && progress.is_due(now) {
                    progress.emit(now, done * STREAMS as u64);
                }
            };
            if !rounds.is_multiple_of(2) {
                Streams::new(0..batches).run_within(table, mine.clone(), after_batch);
            }
            wrong.count(table, mine);
        });
        sparse_errors = sparse.count_errors();
    });
    // One vCPU cannot lose an update: every wrong word is then the memory's fault, and none is tolerated. In the
    // sparse memory, which is never updated, none is tolerated either.
    let tolerated = if vcpus == 1 { 0 } else { words / PASSING_ERRORS_DIVISOR };
    let are_in_one_place = wrong.are_in_one_place(words);
    let table_errors = wrong.words.into_inner();
    let is_passed = table_errors <= tolerated && !are_in_one_place && sparse_errors == 0;
    let status = if is_passed { Status::Pass } else { Status::Fail };
    let (errors, checked) = (table_errors + sparse_errors, words + sparse.set.pages() * PAGE_WORDS);
    platform.emit(&Message::Verify { status, errors, checked });
    if is_passed { Ok(()) } else { Err(KernelError::VerificationFailed { errors, checked }) }
}

fn phase(platform: &dyn Platform, phase: Name<'static>, body: impl FnOnce()) {
    platform.emit(&Message::Begin { phase, tsc: platform.now() });
    body();
    platform.emit(&Message::End { phase, tsc: platform.now() });
}
