//! Pattern: fills RAM with predictable words, then checks and rewrites every one of them, pass after pass.
//!
//! ```text
//!   window (2 MiB) = 512 pages          page p, pass k: vCPU (p + k) mod n
//!   ┌────┬────┬────┬────┬────┬───       every vCPU works in every window, and each
//!   │ 0  │ 1  │ 0  │ 1  │ 0  │ …         page goes from vCPU to vCPU between passes
//!   └────┴────┴────┴────┴────┴───
//! ```
//!
//! The words are those of [`crate::test_pattern`]: a lost, stale or misplaced one is found at most one pass later.
//! Between passes the pages change their vCPU, so that a stale TLB entry is found too.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name, VCPUS_MAX};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::platform::ticks_to_seconds;
use crate::report::{self, Figure};
use crate::rounds::{Batches, Progress, Tally, Until, run_rounds};
use crate::test_pattern::{FIRST_GENERATION, Findings, LAST_GENERATION, PAGE_WORDS, WORDS_MAX, Written, write_first};
use crate::{Arena, KernelError, Platform};

/// Pattern in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("pattern"),
    summary: "fills RAM with predictable words and keeps checking and rewriting them: no byte may be lost",
    classes: &[],
    parameters: PARAMETERS,
    quick: "bytes=1M",
    figure: FIGURE,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("rewritten", "GiB/s");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "bytes",
        default: "the whole arena",
        unit: "bytes (K, M, G, T)",
        meaning: "memory in use, rounded down to whole 4 KiB pages",
    },
    Parameter { name: "passes", default: "3", unit: "count", meaning: "how often every word is checked and rewritten" },
    Parameter {
        name: "seconds",
        default: "not used",
        unit: "s",
        meaning: "repeat whole passes for at least this time (instead of passes=)",
    },
    Parameter {
        name: PAGES_PER_SECOND,
        default: "no limit",
        unit: "pages of 4 KiB per s",
        meaning: "upper limit of the pages that all vCPUs together rewrite in a second",
    },
];

/// The parameter that limits the speed.
const PAGES_PER_SECOND: &str = "pages_per_second";

/// Largest number of passes: the last generation still fits above the index.
const PASSES_MAX: u64 = LAST_GENERATION - FIRST_GENERATION;
/// Minimum time between two progress lines of one kind, in milliseconds. Shorter passes go without; the last pass has a
/// line.
const PASS_LINE_MS: u64 = 50;
/// Minimum time between two lines about pages within a pass, in milliseconds.
const PAGE_LINE_MS: u64 = 250;

const PAGE_BYTES: u64 = PAGE_WORDS * 8;

/// Largest limit of pages per second: the time between two pages is still some ticks.
const PAGES_PER_SECOND_MAX: u64 = 100_000_000;

/// The validated parameters of a run.
struct Plan {
    need: MemoryNeed,
    until: Until,
    /// Upper limit of the pages that all vCPUs rewrite in a second.
    pages_per_second: Option<u64>,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let bytes = parameters.size("bytes", PAGE_BYTES, 8 * WORDS_MAX)?;
        let need = bytes.map_or(MemoryNeed::AllThereIs, MemoryNeed::Bytes);
        let pages_per_second = parameters.count(PAGES_PER_SECOND, 1, PAGES_PER_SECOND_MAX)?;
        Ok(Self { need, until: Until::read(parameters, "passes", PASSES_MAX, 3)?, pages_per_second })
    }

    /// Refuses times if the frequency of the counter is unknown; a run of seconds can be ended early from now on.
    fn prepare<'a>(&self, platform: &dyn Platform) -> Result<(), KernelError<'a>> {
        self.until.prepare(platform)?;
        match self.pages_per_second {
            Some(_) if platform.tsc_hz() == 0 => Err(KernelError::NeedsClock { name: PAGES_PER_SECOND }),
            _ => Ok(()),
        }
    }

    /// Ticks between two pages of one vCPU; 0 without a limit.
    fn ticks_per_page(&self, platform: &dyn Platform) -> u64 {
        let ticks = |limit: u64| platform.tsc_hz().saturating_mul(platform.vcpus() as u64) / limit;
        self.pages_per_second.map_or(0, ticks)
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(Plan::read(parameters)?.need)
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    plan.prepare(platform)?;
    let bytes = match plan.need {
        MemoryNeed::Bytes(bytes) => bytes,
        MemoryNeed::AllThereIs => arena.bytes().min(8 * WORDS_MAX),
    };
    if arena.bytes() < bytes.max(PAGE_BYTES) {
        return Err(KernelError::ArenaTooSmall { needed: bytes.max(PAGE_BYTES), bytes: arena.bytes() });
    }
    let bytes = bytes - bytes % PAGE_BYTES;
    platform.emit(&Message::Region { name: Name::literal("pattern"), address: arena.address(), bytes });
    let memory = Memory {
        words: &arena.words()[..(bytes / 8) as usize],
        vcpus: platform.vcpus() as u64,
        address: arena.address(),
        findings: Findings::default(),
    };

    fill(platform, &memory);
    let generation = passes_until(platform, &memory, plan.until, plan.ticks_per_page(platform));
    check(platform, &memory, generation)
}

/// The words under test and the errors found in them.
struct Memory<'m> {
    words: &'m [AtomicU64],
    vcpus: u64,
    address: u64,
    findings: Findings,
}

impl Memory<'_> {
    const fn pages(&self) -> u64 {
        self.words.len() as u64 / PAGE_WORDS
    }

    /// The pages of `vcpu` in `pass`, each as the index of its first word and its words.
    fn pages_of(&self, vcpu: usize, pass: u64) -> impl Iterator<Item = (u64, &[AtomicU64])> {
        // The pages p with (p + pass) mod n = vcpu.
        let first = (vcpu as u64 + self.vcpus - pass % self.vcpus) % self.vcpus;
        let pages = self.words.chunks_exact(PAGE_WORDS as usize).enumerate();
        let mine = pages.skip(first as usize).step_by(self.vcpus as usize);
        mine.map(|(page, words)| (page as u64 * PAGE_WORDS, words))
    }
}

/// Writes the first generation.
fn fill(platform: &dyn Platform, memory: &Memory<'_>) {
    const PHASE: Name<'static> = Name::literal("fill");
    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    platform.run_on_all(&|vcpu| {
        for (first, page) in memory.pages_of(vcpu, 0) {
            for (index, slot) in (first..).zip(page) {
                write_first(slot, index);
            }
        }
    });
    platform.emit(&Message::End { phase: PHASE, tsc: platform.now() });
}

/// Checks and rewrites every word, pass after pass, until the time is over or an error is found. Each vCPU begins its
/// pages at least `ticks_per_page` apart. Returns the current generation of every word.
fn passes_until(platform: &dyn Platform, memory: &Memory<'_>, until: Until, ticks_per_page: u64) -> u64 {
    const PHASE: Name<'static> = Name::literal("pass");
    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    let passes_run = AtomicU64::new(0);
    let end = AtomicU64::new(0);
    let pass_lines = Progress::new(platform, PHASE, until.planned(), PASS_LINE_MS);
    let page_lines = Progress::new(platform, Name::literal("pages"), memory.pages(), PAGE_LINE_MS);
    let tally = Tally::default();
    let start = platform.now();

    let work = |vcpu: usize, pass: u64, clock: &mut Batches<'_>| {
        let generation = FIRST_GENERATION + pass;
        clock.restart();
        // The fill was the work of round 0, so in pass 0 the pages already belong to other vCPUs.
        for (done, (first, page)) in (1..).zip(memory.pages_of(vcpu, pass + 1)) {
            let began = platform.now();
            for (index, slot) in (first..).zip(page) {
                memory.findings.check_and_rewrite(slot, index, generation);
            }
            let now = clock.end_batch();
            tally.set(vcpu, done);
            if vcpu == 0 && page_lines.is_due(now) {
                page_lines.emit(now, tally.sum());
                clock.restart();
            }
            if ticks_per_page > 0 {
                wait_until(platform, began.saturating_add(ticks_per_page));
                clock.restart();
            }
        }
    };
    let again = |pass: u64| {
        let now = platform.now();
        let passes = pass + 1;
        end.store(now, Ordering::Relaxed);
        passes_run.store(passes, Ordering::Relaxed);
        let is_time = until.is_reached(platform, passes, now.saturating_sub(start));
        let is_last = is_time || passes == PASSES_MAX || memory.findings.errors() > 0;
        if is_last || pass_lines.is_due(now) {
            pass_lines.emit(now, passes);
        }
        (0..platform.vcpus()).for_each(|vcpu| tally.set(vcpu, 0));
        !is_last
    };
    let gaps = run_rounds(platform, work, again);
    platform.emit(&Message::End { phase: PHASE, tsc: platform.now() });

    let passes = passes_run.into_inner();
    report_passes(platform, memory, passes, end.into_inner().saturating_sub(start));
    for (vcpu, summary) in gaps.iter().enumerate().take(platform.vcpus()) {
        if let Some(message) = summary.message(vcpu, platform.tsc_hz()) {
            platform.emit(&message);
        }
    }
    FIRST_GENERATION + passes
}

/// Prints the number of passes, and the time and rate of them if the counter's frequency is known.
fn report_passes(platform: &dyn Platform, memory: &Memory<'_>, passes: u64, ticks: u64) {
    let hz = platform.tsc_hz();
    let result = |name, value, unit| report::result(platform, name, value, unit);
    result(Name::literal("passes"), passes as f64, Name::literal("passes"));
    if hz != 0 {
        let seconds = ticks_to_seconds(ticks, hz);
        let gib = (memory.words.len() * 8) as f64 * passes as f64 / (1u64 << 30) as f64;
        result(Name::literal("seconds"), seconds, Name::literal("s"));
        FIGURE.emit(platform, gib / seconds);
    }
}

/// Waits until the counter reaches `end`. A guest in ring 3 cannot halt, so it spins.
fn wait_until(platform: &dyn Platform, end: u64) {
    while platform.now() < end {
        spin_loop();
    }
}

/// Checks every word once more, on another vCPU than wrote it, and reports the errors of the whole run.
fn check<'a>(platform: &dyn Platform, memory: &Memory<'_>, generation: u64) -> Result<(), KernelError<'a>> {
    const PHASE: Name<'static> = Name::literal("verify");
    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    platform.run_on_all(&|vcpu| {
        for (first, page) in memory.pages_of(vcpu, generation) {
            for (index, slot) in (first..).zip(page) {
                memory.findings.check(slot, index, generation);
            }
        }
    });
    platform.emit(&Message::End { phase: PHASE, tsc: platform.now() });

    let words = memory.words.len() as u64;
    let checked = words * (generation - FIRST_GENERATION + 1);
    let written = Written { words, newest_generation: generation };
    memory.findings.report(platform, memory.address, written, checked)
}
