//! Phases: memory of four kinds at once, one of which moves, so that policies differ by their treatment of each.
//!
//! ```text
//!   hot_range                      sparse             cold               constant
//!   ┌──────┬──────┬──────┬──────┬────────────────┬────────────────┬────────────────┐
//!   │ hot  │  ─▶  │  ─▶  │  ─▶  │ ▪     ▪     ▪  │ ██████████████ │ ▒▒▒▒▒▒▒▒▒▒▒▒▒▒ │ each set is whole windows (2 MiB)
//!   └──────┴──────┴──────┴──────┴────────────────┴────────────────┴────────────────┘
//!   all words of one span          one page of        filled once,       one word of
//!   each pass, scattered;          each window,       never touched      every page
//!   the next phase the next span   one word a pass    until the end      each pass
//! ```
//!
//! A policy should find that promoting the hot span pays until it moves on; promoting the sparse set gains nothing
//! and costs 511 pages a window (bloat); promoting the cold set is wasted work; and the constant set is written
//! everywhere although it is hardly used. Only the hot span's updates are counted as work.
//!
//! On request the cold set was hot once: it is filled before all others (`first=cold`) and read in scattered order for
//! a while (`cold_ms=`). Where huge pages are few, it then has them when the hot span begins to need them.
//!
//! No byte may be lost during a run. The words are those of [`crate::test_pattern`]: each is checked whenever it is
//! touched, and all words ever written are checked at the end. A pass touches no word twice and the vCPUs meet
//! after it, so several vCPUs lose no update. The shares change their vCPU after every pass, so that a stale TLB
//! entry is found.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name, VCPUS_MAX};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::platform::ticks_to_seconds;
use crate::report::{self, Figure};
use crate::rounds::{Batches, Meeting, Progress, Tally, part, progress_ms, run_rounds};
use crate::test_pattern::{
    FACTOR, FIRST_GENERATION, Findings, LAST_GENERATION, PAGE_WORDS, WORDS_MAX, Written, word, write_first,
};
use crate::text::FixedText;
use crate::{Arena, KernelError, Platform};

/// Phases in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("phases"),
    summary: "a moving hot set beside a sparse, a cold and a constantly written one: shows how policies differ",
    classes: &[],
    parameters: PARAMETERS,
    quick: "hot=2M range=4M sparse=2M cold=2M constant=2M passes=4",
    figure: FIGURE,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

/// Hot updates of all phases; each phase also has its own result in the same unit.
const FIGURE: Figure = Figure::literal("hot", "updates/s");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "hot",
        default: "16M",
        unit: "bytes (K, M, G, T)",
        meaning: "span with all words updated in each pass; this size and the next four are whole 2 MiB windows",
    },
    Parameter {
        name: "range",
        default: "4 x hot",
        unit: "bytes (K, M, G, T)",
        meaning: "range in which the hot span moves by its size after each phase, cyclically; at most 64 whole spans",
    },
    Parameter {
        name: "sparse",
        default: "64M",
        unit: "bytes (K, M, G, T)",
        meaning: "windows of which only one 4 KiB page is ever touched; 0 for none",
    },
    Parameter {
        name: "cold",
        default: "64M",
        unit: "bytes (K, M, G, T)",
        meaning: "memory that is written once at the start; 0 for none",
    },
    Parameter {
        name: "constant",
        default: "32M",
        unit: "bytes (K, M, G, T)",
        meaning: "memory of which every 4 KiB page is written in each pass; 0 for none",
    },
    Parameter {
        name: "phases",
        default: "range / hot",
        unit: "count",
        meaning: "number of phases, named hot0, hot1, and so on: the span moves between them",
    },
    Parameter {
        name: "phase_ms",
        default: "1000",
        unit: "ms",
        meaning: "minimum duration of a phase, rounded up to whole passes",
    },
    Parameter {
        name: "passes",
        default: "not used",
        unit: "count",
        meaning: "number of passes in each phase (instead of phase_ms=)",
    },
    Parameter {
        name: "cold_ms",
        default: "0",
        unit: "ms",
        meaning: "time for which the cold set is read in scattered order before the first phase, as if it were hot",
    },
    Parameter {
        name: "first",
        default: "hot",
        unit: "hot or cold",
        meaning: "set that is filled first; after cold, the other sets are filled when the cold set has been read",
    },
    Parameter {
        name: "progress_ms",
        default: "50",
        unit: "ms",
        meaning: "minimum time between two progress lines, 10 or more; 0 prints only that of a phase's end",
    },
];

/// Pages of a window.
const WINDOW_PAGES: u64 = 512;
/// Words of a window.
pub const WINDOW_WORDS: u64 = WINDOW_PAGES * PAGE_WORDS;
/// Bytes of a window.
pub(crate) const WINDOW_BYTES: u64 = WINDOW_WORDS * 8;
/// Largest set in bytes, so that the words of all four can be numbered.
pub(crate) const SET_BYTES_MAX: u64 = 1 << 40;
const _: () = assert!(4 * SET_BYTES_MAX <= 8 * WORDS_MAX, "every word has an index");
/// Largest number of places of the hot span: the generation of each is kept on the stack, of which a vCPU of the
/// image has 64 KiB.
const SPANS_MAX: u64 = 64;
/// Largest number of phases: each prints some lines, and has its share of the passes.
const PHASES_MAX: u64 = 1000;
/// Largest number of passes of a run: the last generation still fits above the index.
const PASSES_MAX: u64 = LAST_GENERATION - FIRST_GENERATION;
const _: () = assert!(PASSES_MAX / PHASES_MAX > 10_000, "a phase has room for many passes");
/// Words touched between two readings of the clock: as in gups, so that their gaps compare.
const BATCH: usize = 128;
/// Minimum time between two progress lines in milliseconds, unless given: 20 a second cost at most a few per mille of
/// the run.
const PROGRESS_MS: u64 = 50;

/// The part of a set's windows that is ever touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Density {
    /// Every page of each window.
    Full,
    /// One page of each window.
    OnePage,
}

/// One of the four sets: consecutive windows of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// Name in the `region` line.
    pub name: Name<'static>,
    /// Index of the first window, counted from the arena's start.
    pub first_window: u64,
    /// Number of windows.
    pub windows: u64,
    /// Part of the windows that is touched.
    pub density: Density,
}

impl Set {
    /// Number of pages that are ever touched.
    pub const fn pages(&self) -> u64 {
        match self.density {
            Density::Full => self.windows * WINDOW_PAGES,
            Density::OnePage => self.windows,
        }
    }

    /// Index of the first word of touched page `page`.
    pub const fn page(&self, page: u64) -> u64 {
        let page_of_set = match self.density {
            Density::Full => page,
            // A different one in each window, so that the pages do not all meet in the same cache sets.
            Density::OnePage => page * WINDOW_PAGES + page % WINDOW_PAGES,
        };
        (self.first_window * WINDOW_PAGES + page_of_set) * PAGE_WORDS
    }
}

/// Sizes of the sets, in windows.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Size of the hot span.
    pub hot: u64,
    /// Range in which it moves, a multiple of it.
    pub range: u64,
    /// Size of the sparse set.
    pub sparse: u64,
    /// Size of the cold set.
    pub cold: u64,
    /// Size of the constant set.
    pub constant: u64,
}

/// Places of the four sets.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Number of windows of the hot span.
    pub hot: u64,
    /// Range in which the hot span moves.
    pub hot_range: Set,
    /// Set with one touched page in each window.
    pub sparse: Set,
    /// Set that is written once.
    pub cold: Set,
    /// Set that is written in each pass.
    pub constant: Set,
}

impl Layout {
    /// Creates the four sets one after the other from the arena's start.
    pub fn new(sizes: Sizes) -> Self {
        let Sizes { hot, range, sparse, cold, constant } = sizes;
        let full = |name, first_window, windows| Set { name, first_window, windows, density: Density::Full };
        Self {
            hot,
            hot_range: full(Name::literal("hot_range"), 0, range),
            sparse: Set { density: Density::OnePage, ..full(Name::literal("sparse"), range, sparse) },
            cold: full(COLD, range + sparse, cold),
            constant: full(Name::literal("constant"), range + sparse + cold, constant),
        }
    }

    /// All sets, in the order of their addresses.
    pub const fn sets(&self) -> [Set; 4] {
        [self.hot_range, self.sparse, self.cold, self.constant]
    }

    /// Words of the arena that belong to a set, touched or not.
    pub const fn words(&self) -> u64 {
        (self.constant.first_window + self.constant.windows) * WINDOW_WORDS
    }

    /// Bytes of the arena that belong to a set, touched or not.
    pub const fn bytes(&self) -> u64 {
        self.words() * 8
    }

    /// Number of places of the hot span.
    pub const fn spans(&self) -> u64 {
        self.hot_range.windows / self.hot
    }

    /// Words of the hot span.
    pub const fn hot_words(&self) -> u64 {
        self.hot * WINDOW_WORDS
    }

    /// Indices of the hot words in a phase.
    pub const fn hot_in(&self, phase: u64) -> Range<u64> {
        let first = phase % self.spans() * self.hot_words();
        first..first + self.hot_words()
    }
}

/// The words of some windows in a pseudo-random order, each once: the windows take turns, and each has its words in
/// a scattered order of its own. No prefetcher follows it, and a page returns at no fixed distance. At a fixed
/// distance, as with any stride, a page would always have left the TLB, while a random order sometimes finds it
/// there.
#[derive(Clone, Debug)]
pub struct Scattered {
    windows: u64,
    /// Window that is next in turn.
    window: u64,
    /// Number of words that each window before it has given.
    row: u64,
    left: u64,
}

impl Scattered {
    /// Creates the steps `steps` of the order over `windows` windows.
    pub const fn new(windows: u64, steps: Range<u64>) -> Self {
        Self { windows, window: steps.start % windows, row: steps.start / windows, left: steps.end - steps.start }
    }
}

impl Iterator for Scattered {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        let word = self.window * WINDOW_WORDS + scatter(self.row, self.window);
        self.window += 1;
        if self.window == self.windows {
            self.window = 0;
            self.row += 1;
        }
        Some(word)
    }
}

/// The word of a window in its turn `row`: a permutation, different for each window. Random order returns to a page
/// after a given number of rows in 1 of 512 cases; with three rounds of [`mix`] it is at most 1 of 260, with two it
/// was 1 of 13.
#[inline]
const fn scatter(row: u64, window: u64) -> u64 {
    mix(mix(mix(row.wrapping_add(window.wrapping_mul(FACTOR)))))
}

/// Permutes the numbers below [`WINDOW_WORDS`]: an odd factor modulo a power of two and an exclusive-or with higher
/// bits are both invertible.
#[inline]
const fn mix(number: u64) -> u64 {
    let product = number.wrapping_mul(FACTOR) % WINDOW_WORDS;
    product ^ product >> (WINDOW_WORDS.ilog2() / 2)
}

/// Generation of word `word` of a page after `passes` passes: pass p rewrites the word p mod 512.
pub const fn generation_of_touched(word: u64, passes: u64) -> u64 {
    FIRST_GENERATION + (passes + PAGE_WORDS - 1 - word) / PAGE_WORDS
}

/// Criterion for the end of a phase.
#[derive(Clone, Copy)]
enum Until {
    Passes(u64),
    Milliseconds(u64),
}

impl Until {
    /// Whether the time decides. Then the machine's user can end the run early.
    fn is_time(self) -> bool {
        matches!(self, Self::Milliseconds(_))
    }
}

/// The validated parameters of a run.
struct Plan {
    layout: Layout,
    phases: u64,
    until: Until,
    /// Maximum number of passes of a phase, whatever the time.
    passes_max: u64,
    /// Time for which the cold set is read before the first phase, in milliseconds.
    cold_ms: u64,
    /// Whether the cold set is filled and read before the other sets are filled.
    is_cold_first: bool,
    /// Minimum time between two progress lines in milliseconds; 0 for none.
    progress_ms: u64,
}

/// Words of the parameter `first=`.
const FIRST: &[&str] = &["hot", "cold"];
/// Name of the cold set, and of the part of the run in which it is read.
const COLD: Name<'static> = Name::literal("cold");

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(Plan::read(parameters)?.layout.bytes()))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    let layout = &plan.layout;
    if plan.until.is_time() && platform.tsc_hz() == 0 {
        return Err(KernelError::NeedsClock { name: "phase_ms" });
    }
    if plan.until.is_time() {
        platform.accept_end();
    }
    if plan.cold_ms > 0 && platform.tsc_hz() == 0 {
        return Err(KernelError::NeedsClock { name: "cold_ms" });
    }
    if arena.bytes() < layout.bytes() {
        return Err(KernelError::ArenaTooSmall { needed: layout.bytes(), bytes: arena.bytes() });
    }
    for Set { name, first_window, windows, .. } in layout.sets().into_iter().filter(|set| set.windows > 0) {
        let address = arena.address() + first_window * WINDOW_BYTES;
        platform.emit(&Message::Region { name, address, bytes: windows * WINDOW_BYTES });
    }
    let run = Run::new(platform, arena, plan);
    run.prepare();
    run.all_phases();
    run.check()
}

fn read_layout<'a>(parameters: &Parameters<'a>) -> Result<Layout, KernelError<'a>> {
    const MIB: u64 = 1 << 20;
    let read = |name, least, most, default| {
        parameters.size(name, least, most).map(|bytes| bytes.unwrap_or(default) / WINDOW_BYTES)
    };
    let hot = read("hot", WINDOW_BYTES, SET_BYTES_MAX, 16 * MIB)?;
    let hot_bytes = hot * WINDOW_BYTES;
    let range_max = SET_BYTES_MAX.min(SPANS_MAX * hot_bytes);
    let range = read("range", hot_bytes, range_max, range_max.min(4 * hot_bytes))?;
    Ok(Layout::new(Sizes {
        hot,
        range: range - range % hot,
        sparse: read("sparse", 0, SET_BYTES_MAX, 64 * MIB)?,
        cold: read("cold", 0, SET_BYTES_MAX, 64 * MIB)?,
        constant: read("constant", 0, SET_BYTES_MAX, 32 * MIB)?,
    }))
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let layout = read_layout(parameters)?;
        let phases = parameters.count("phases", 1, PHASES_MAX)?.unwrap_or(layout.spans());
        let passes_max = PASSES_MAX / phases;
        let phase_ms = parameters.count("phase_ms", 1, 1 << 32)?;
        let passes = parameters.count("passes", 1, passes_max)?;
        let until = match (passes, phase_ms) {
            (Some(_), Some(_)) => return Err(KernelError::Conflict { one: "passes", other: "phase_ms" }),
            (Some(passes), None) => Until::Passes(passes),
            (None, phase_ms) => Until::Milliseconds(phase_ms.unwrap_or(1000)),
        };
        let cold_ms = parameters.count("cold_ms", 0, 1 << 32)?.unwrap_or(0);
        let is_cold_first = parameters.choice("first", FIRST)?.is_some_and(|index| FIRST[index] == "cold");
        let progress_ms = progress_ms(parameters, PROGRESS_MS)?;
        Ok(Self { layout, phases, until, passes_max, cold_ms, is_cold_first, progress_ms })
    }
}

/// A run: its memory, and its progress so far.
struct Run<'r> {
    platform: &'r dyn Platform,
    words: &'r [AtomicU64],
    address: u64,
    plan: Plan,
    findings: Findings,
    meeting: Meeting,
    /// Updates of the current phase, per vCPU.
    tally: Tally,
    /// Generation of the words of each place of the hot span, at the last phase's end.
    generations: [AtomicU64; SPANS_MAX as usize],
    /// Ticks at which the current phase began.
    began: AtomicU64,
    /// Work of the current phase as vCPU 0 ended it.
    phase: Work,
    /// Work of all phases that have ended.
    total: Work,
    /// Number of words of the cold set that were read before the first phase, each as often as it was read.
    cold_reads: AtomicU64,
}

/// An amount of work, and its duration.
#[derive(Default)]
struct Work {
    passes: AtomicU64,
    ticks: AtomicU64,
}

impl Work {
    fn passes(&self) -> u64 {
        self.passes.load(Ordering::Relaxed)
    }

    fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }
}

/// Name of a phase: `hot0`, `hot1`, ….
struct PhaseName(FixedText);

impl PhaseName {
    fn new(phase: u64) -> Self {
        Self(FixedText::new(format_args!("hot{phase}")))
    }

    fn get(&self) -> Name<'_> {
        Name::new(self.0.as_str()).expect("letters and digits are a name")
    }
}

impl<'r> Run<'r> {
    fn new(platform: &'r dyn Platform, arena: &Arena<'r>, plan: Plan) -> Self {
        Self {
            platform,
            words: &arena.words()[..plan.layout.words() as usize],
            address: arena.address(),
            plan,
            findings: Findings::default(),
            meeting: Meeting::default(),
            tally: Tally::default(),
            generations: core::array::from_fn(|_| AtomicU64::new(FIRST_GENERATION)),
            began: AtomicU64::new(0),
            phase: Work::default(),
            total: Work::default(),
            cold_reads: AtomicU64::new(0),
        }
    }

    fn slot(&self, index: u64) -> &AtomicU64 {
        &self.words[index as usize]
    }

    /// Generation of the span that is hot in a phase, at the last phase's end.
    fn generation(&self, phase: u64) -> &AtomicU64 {
        &self.generations[(phase % self.plan.layout.spans()) as usize]
    }

    /// Fills all sets, and reads the cold one for its time: before the other sets are filled, or after.
    fn prepare(&self) {
        const FILL: Name<'static> = Name::literal("fill");
        let Layout { hot_range, sparse, cold, constant, .. } = self.plan.layout;
        if self.plan.is_cold_first {
            self.timed(COLD, || {
                self.fill(&[cold]);
                self.read_cold();
            });
            self.timed(FILL, || self.fill(&[hot_range, sparse, constant]));
        } else {
            self.timed(FILL, || self.fill(&self.plan.layout.sets()));
            if self.plan.cold_ms > 0 {
                self.timed(COLD, || self.read_cold());
            }
        }
    }

    fn timed(&self, phase: Name<'static>, body: impl FnOnce()) {
        self.platform.emit(&Message::Begin { phase, tsc: self.platform.now() });
        body();
        self.platform.emit(&Message::End { phase, tsc: self.platform.now() });
    }

    /// Writes the first generation of every word of these sets that is ever touched.
    fn fill(&self, sets: &[Set]) {
        let vcpus = self.platform.vcpus();
        self.platform.run_on_all(&|vcpu| {
            for set in sets {
                let pages = part(set.pages(), vcpu, vcpus).map(|page| set.page(page));
                let indices = pages.flat_map(|first| first..first + PAGE_WORDS);
                indices.for_each(|index| write_first(self.slot(index), index));
            }
        });
    }

    /// Reads and checks the words of the cold set in scattered order, again and again for the time of the plan. It
    /// only reads: so vCPUs need not meet, and every word keeps its first generation.
    fn read_cold(&self) {
        let cold = &self.plan.layout.cold;
        let ticks = (self.platform.tsc_hz() / 1000).saturating_mul(self.plan.cold_ms);
        if ticks == 0 || cold.windows == 0 {
            return;
        }
        let (vcpus, first) = (self.platform.vcpus(), cold.page(0));
        self.platform.run_on_all(&|vcpu| {
            let steps = part(cold.windows * WINDOW_WORDS, vcpu, vcpus);
            let order = || Scattered::new(cold.windows, steps.clone()).map(move |word| first + word);
            let (began, mut words, mut reads) = (self.platform.now(), order(), 0);
            loop {
                let count = self.check_batch(&mut words, FIRST_GENERATION);
                reads += count as u64;
                if self.platform.now().saturating_sub(began) >= ticks {
                    break;
                }
                if count < BATCH {
                    words = order();
                }
            }
            self.cold_reads.fetch_add(reads, Ordering::Relaxed);
        });
    }

    /// Runs all phases and reports their measurements.
    fn all_phases(&self) {
        self.begin(0);
        let work = |vcpu: usize, phase: u64, clock: &mut Batches<'_>| self.run_phase(vcpu, phase, clock);
        let gaps = run_rounds(self.platform, work, |phase| self.end(phase));

        self.emit_rate(FIGURE.name, &self.total);
        let updates = self.total.passes() * self.plan.layout.hot_words();
        let result = |name, value, unit| report::result(self.platform, name, value, unit);
        result(Name::literal("updates"), updates as f64, Name::literal("updates"));
        let hz = self.platform.tsc_hz();
        if hz == 0 {
            result(Name::literal("ticks"), self.total.ticks() as f64, Name::literal("ticks"));
        } else {
            result(Name::literal("seconds"), ticks_to_seconds(self.total.ticks(), hz), Name::literal("s"));
        }
        for (vcpu, summary) in gaps.iter().enumerate().take(self.platform.vcpus()) {
            if let Some(message) = summary.message(vcpu, hz) {
                self.platform.emit(&message);
            }
        }
    }

    /// Reports the updates per second of some passes, if the length of a tick is known.
    fn emit_rate(&self, name: Name<'_>, work: &Work) {
        let hz = self.platform.tsc_hz();
        if hz != 0 {
            let updates = (work.passes() * self.plan.layout.hot_words()) as f64;
            let value = updates / ticks_to_seconds(work.ticks().max(1), hz);
            report::result(self.platform, name, value, FIGURE.unit);
        }
    }

    fn begin(&self, phase: u64) {
        let name = PhaseName::new(phase);
        self.platform.emit(&Message::Begin { phase: name.get(), tsc: self.platform.now() });
        self.began.store(self.platform.now(), Ordering::Relaxed);
    }

    /// Runs one vCPU's part of a phase.
    fn run_phase(&self, vcpu: usize, phase: u64, clock: &mut Batches<'_>) {
        let vcpus = self.platform.vcpus();
        let name = PhaseName::new(phase);
        let planned = match self.plan.until {
            Until::Passes(passes) => passes * self.plan.layout.hot_words(),
            Until::Milliseconds(_) => 0,
        };
        let progress = Progress::new(self.platform, name.get(), planned, self.plan.progress_ms);
        let (generation, passes_before) = (self.generation(phase).load(Ordering::Relaxed), self.total.passes());
        let mut done = 0;
        for pass in 0..self.plan.passes_max {
            clock.restart();
            let share = (vcpu + (pass % vcpus as u64) as usize) % vcpus;
            self.update_hot(self.plan.layout.hot_in(phase), generation + pass, share, |updates| {
                let now = clock.end_batch();
                done += updates;
                self.tally.set(vcpu, done);
                if vcpu == 0 && progress.is_due(now) {
                    progress.emit(now, self.tally.sum());
                    clock.restart();
                }
            });
            for set in [&self.plan.layout.sparse, &self.plan.layout.constant] {
                self.touch(set, passes_before + pass, share, |_| {
                    clock.end_batch();
                });
            }
            if !self.meeting.agree(vcpu, vcpus, || self.goes_on(pass + 1, &progress)) {
                break;
            }
        }
    }

    /// Updates a share of the hot words; reports the number after every batch.
    fn update_hot(&self, hot: Range<u64>, generation: u64, share: usize, after_batch: impl FnMut(u64)) {
        let steps = part(self.plan.layout.hot_words(), share, self.platform.vcpus());
        let indices = Scattered::new(self.plan.layout.hot, steps).map(|word| hot.start + word);
        self.rewrite(indices, generation, after_batch);
    }

    /// Rewrites one word, selected by the pass, of each page of a share of `set`; reports the number after every
    /// batch.
    fn touch(&self, set: &Set, pass: u64, share: usize, after_batch: impl FnMut(u64)) {
        let pages = part(set.pages(), share, self.platform.vcpus());
        let indices = pages.map(|page| set.page(page) + pass % PAGE_WORDS);
        self.rewrite(indices, FIRST_GENERATION + pass / PAGE_WORDS, after_batch);
    }

    /// Checks words of a generation and writes the next one; reports the number after every batch.
    #[inline]
    fn rewrite(&self, mut indices: impl Iterator<Item = u64>, generation: u64, mut after_batch: impl FnMut(u64)) {
        let (mut batch, mut found) = ([0; BATCH], [0; BATCH]);
        let mut count = BATCH;
        while count == BATCH {
            count = self.load(&mut indices, &mut batch, &mut found);
            for (value, index) in found.iter().zip(&batch[..count]) {
                self.findings.check_value(*value, *index, generation);
                self.slot(*index).store(word(*index, generation + 1), Ordering::Relaxed);
            }
            if count > 0 {
                after_batch(count as u64);
            }
        }
    }

    /// Checks the next words of an order, and returns their number: a whole batch, or what was left.
    #[inline]
    fn check_batch(&self, indices: &mut impl Iterator<Item = u64>, generation: u64) -> usize {
        let (mut batch, mut found) = ([0; BATCH], [0; BATCH]);
        let count = self.load(indices, &mut batch, &mut found);
        for (value, index) in found.iter().zip(&batch[..count]) {
            self.findings.check_value(*value, *index, generation);
        }
        count
    }

    /// Reads the next words of an order, at most a batch, and does nothing else: so the CPU has as many memory accesses
    /// in flight as it can, which makes random updates fast. Returns their number.
    #[inline]
    fn load(
        &self,
        indices: &mut impl Iterator<Item = u64>,
        batch: &mut [u64; BATCH],
        found: &mut [u64; BATCH],
    ) -> usize {
        let mut count = 0;
        for (place, index) in batch.iter_mut().zip(indices) {
            *place = index;
            count += 1;
        }
        for (value, index) in found.iter_mut().zip(&batch[..count]) {
            *value = self.slot(*index).load(Ordering::Relaxed);
        }
        count
    }

    /// Decides after each pass whether another one follows in this phase. vCPU 0 calls it while the others wait.
    fn goes_on(&self, passes: u64, progress: &Progress<'_>) -> bool {
        let now = self.platform.now();
        let ticks = now.saturating_sub(self.began.load(Ordering::Relaxed));
        let is_time = match self.plan.until {
            Until::Passes(planned) => passes >= planned,
            Until::Milliseconds(ms) => {
                ticks >= (self.platform.tsc_hz() / 1000).saturating_mul(ms) || self.platform.is_asked_to_end()
            }
        };
        let is_last = is_time || passes == self.plan.passes_max || self.findings.errors() > 0;
        if is_last {
            self.phase.passes.store(passes, Ordering::Relaxed);
            self.phase.ticks.store(ticks, Ordering::Relaxed);
            progress.emit(now, passes * self.plan.layout.hot_words());
        }
        !is_last
    }

    /// Reports the result after each phase and decides whether another one begins. vCPU 0 calls it while the others
    /// wait.
    fn end(&self, phase: u64) -> bool {
        let name = PhaseName::new(phase);
        self.platform.emit(&Message::End { phase: name.get(), tsc: self.platform.now() });
        self.emit_rate(name.get(), &self.phase);
        self.generation(phase).fetch_add(self.phase.passes(), Ordering::Relaxed);
        self.total.passes.fetch_add(self.phase.passes(), Ordering::Relaxed);
        self.total.ticks.fetch_add(self.phase.ticks(), Ordering::Relaxed);
        (0..self.platform.vcpus()).for_each(|vcpu| self.tally.set(vcpu, 0));
        let is_asked_to_end = self.plan.until.is_time() && self.platform.is_asked_to_end();
        let is_last = phase + 1 == self.plan.phases || is_asked_to_end || self.findings.errors() > 0;
        if !is_last {
            self.begin(phase + 1);
        }
        !is_last
    }

    /// Checks every word that was ever written, and reports the errors of the whole run.
    fn check<'a>(&self) -> Result<(), KernelError<'a>> {
        const PHASE: Name<'static> = Name::literal("verify");
        let Layout { hot_range, sparse, cold, constant, .. } = &self.plan.layout;
        let passes = self.total.passes();
        let span_pages = self.plan.layout.hot * WINDOW_PAGES;
        self.platform.emit(&Message::Begin { phase: PHASE, tsc: self.platform.now() });
        self.platform.run_on_all(&|vcpu| {
            self.check_set(hot_range, vcpu, |page, _| self.generation(page / span_pages).load(Ordering::Relaxed));
            self.check_set(cold, vcpu, |_, _| FIRST_GENERATION);
            for touched in [sparse, constant] {
                self.check_set(touched, vcpu, |_, word| generation_of_touched(word, passes));
            }
        });
        self.platform.emit(&Message::End { phase: PHASE, tsc: self.platform.now() });

        let written = Written { words: self.plan.layout.words(), newest_generation: FIRST_GENERATION + passes };
        let in_each_pass = self.plan.layout.hot_words() + sparse.pages() + constant.pages();
        let at_the_end: u64 = self.plan.layout.sets().iter().map(|set| set.pages() * PAGE_WORDS).sum();
        let checked = self.cold_reads.load(Ordering::Relaxed) + passes * in_each_pass + at_the_end;
        self.findings.report(self.platform, self.address, written, checked)
    }

    /// Checks a share of a set against `generation(page, word)`.
    fn check_set(&self, set: &Set, vcpu: usize, generation: impl Fn(u64, u64) -> u64) {
        let vcpus = self.platform.vcpus();
        // If possible, another vCPU than the one that filled it.
        for page in part(set.pages(), (vcpu + 1) % vcpus, vcpus) {
            let first = set.page(page);
            for word in 0..PAGE_WORDS {
                self.findings.check(self.slot(first + word), first + word, generation(page, word));
            }
        }
    }
}
