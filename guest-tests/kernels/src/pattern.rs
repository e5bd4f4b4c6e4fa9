//! Pattern: fills RAM with predictable words, then checks and rewrites every one of them, pass after pass.
//!
//! ```text
//!   window (2 MiB) = 512 pages          page p, pass k: vCPU (p + k) mod n
//!   ┌────┬────┬────┬────┬────┬───       every vCPU works in every window, and each
//!   │ 0  │ 1  │ 0  │ 1  │ 0  │ …         page goes from vCPU to vCPU between passes
//!   └────┴────┴────┴────┴────┴───
//!   word i in generation g:  scramble(g·2^40 + i)     never 0, never the same for two (i, g)
//! ```
//!
//! Whoever moves, splits or merges the pages beneath a running guest must not lose a byte. A page that was dropped reads as
//! zeros, one that was copied too early as the previous generation, one put at the wrong place as another word's value, and a
//! window put together from both as a mixture: each word is checked against exactly one value, so all are found, at the latest
//! one pass after they happened. Between passes the pages change hands, so a vCPU with a stale TLB entry is found too.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::message::MismatchKind;
use wideleaf_protocol::{Message, Mismatch, Name, Status};

use crate::parameters::{Parameter, Parameters};
use crate::platform::ticks_to_seconds;
use crate::registry::{Kernel, KernelError};
use crate::rounds::{Batches, Progress, Tally, run_rounds};
use crate::{Arena, Platform};

/// Pattern in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("pattern"),
    summary: "fills RAM with predictable words and keeps checking and rewriting them: no byte may be lost",
    parameters: PARAMETERS,
    run,
};

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "bytes",
        default: "the whole arena",
        unit: "bytes (K, M, G, T)",
        meaning: "how much memory is used, rounded down to whole 4 KiB pages",
    },
    Parameter { name: "passes", default: "3", unit: "count", meaning: "how often every word is checked and rewritten" },
    Parameter {
        name: "seconds",
        default: "not used",
        unit: "s",
        meaning: "repeat whole passes until that much time has passed (instead of passes=)",
    },
];

/// Words of a 4 KiB page, the grain in which the vCPUs share the memory.
pub const PAGE_WORDS: u64 = 512;
/// Bits of a word's index in its value; the generation has the rest.
const INDEX_BITS: u32 = 40;
/// Generation of the fill. Not 0, so that no word of any generation is zero.
pub const FIRST_GENERATION: u64 = 1;
/// Most passes: the last generation still fits above the index.
const PASSES_MAX: u64 = (1 << (64 - INDEX_BITS)) - 1 - FIRST_GENERATION;
/// Least time between two progress lines of one kind. Passes that end sooner go without; the last one has a line.
const PASS_LINE_MS: u64 = 50;
/// Least time between two lines about pages within a pass.
const PAGE_LINE_MS: u64 = 250;

/// An odd factor with its bits spread evenly (2^64 divided by the golden ratio), so that multiplying by it is reversible.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// The factor's inverse modulo 2^64, by Newton's iteration: every step doubles the number of right bits, 3 at first.
const FACTOR_INVERSE: u64 = {
    let mut inverse = FACTOR;
    let mut right_bits = 3;
    while right_bits < 64 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(FACTOR.wrapping_mul(inverse)));
        right_bits *= 2;
    }
    inverse
};
const _: () = assert!(FACTOR.wrapping_mul(FACTOR_INVERSE) == 1, "the scrambling must be reversible");

/// The value of word `index` in `generation`. One to one: two words, or two generations of one, never have the same value,
/// and none is 0.
#[inline]
pub const fn word(index: u64, generation: u64) -> u64 {
    let product = (generation << INDEX_BITS | index).wrapping_mul(FACTOR);
    // Without the shift the low bits of a value would only depend on the low bits of the index.
    product ^ product >> 32
}

/// Index and generation that have this value.
pub const fn origin(value: u64) -> (u64, u64) {
    let plain = (value ^ value >> 32).wrapping_mul(FACTOR_INVERSE);
    (plain & ((1 << INDEX_BITS) - 1), plain >> INDEX_BITS)
}

/// What a value looks like that was found where word `index` of `generation` belongs, among `words` words.
pub fn classify(found: u64, index: u64, generation: u64, words: u64) -> MismatchKind {
    let (found_index, found_generation) = origin(found);
    // While a pass runs, other words may already be one generation ahead.
    let is_written = (FIRST_GENERATION..=generation + 1).contains(&found_generation) && found_index < words;
    match (found, is_written) {
        (0, _) => MismatchKind::Zero,
        (_, true) if found_index == index && found_generation < generation => MismatchKind::Stale,
        (_, true) if found_index != index => MismatchKind::Elsewhere,
        _ => MismatchKind::Foreign,
    }
}

/// When to stop repeating passes.
enum Until {
    Passes(u64),
    Seconds(u64),
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    const PAGE_BYTES: u64 = PAGE_WORDS * 8;
    let bytes = parameters.size("bytes", PAGE_BYTES, 8 << INDEX_BITS)?.unwrap_or(arena.bytes().min(8 << INDEX_BITS));
    let passes = parameters.count("passes", 1, PASSES_MAX)?;
    let seconds = parameters.count("seconds", 1, 1 << 32)?;
    let until = match (passes, seconds) {
        (Some(_), Some(_)) => return Err(KernelError::Conflict { one: "passes", other: "seconds" }),
        (_, Some(_)) if platform.tsc_hz() == 0 => return Err(KernelError::NeedsClock { name: "seconds" }),
        (_, Some(seconds)) => Until::Seconds(seconds),
        (passes, None) => Until::Passes(passes.unwrap_or(3)),
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
    let generation = passes_until(platform, &memory, until);
    check(platform, &memory, generation)
}

/// The words under test and what is wrong with them.
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

    /// The pages of `vcpu` in `pass`, each as its first word's index and its words.
    fn pages_of(&self, vcpu: usize, pass: u64) -> impl Iterator<Item = (u64, &[AtomicU64])> {
        // p with (p + pass) mod n = vcpu.
        let first = (vcpu as u64 + self.vcpus - pass % self.vcpus) % self.vcpus;
        let pages = self.words.chunks_exact(PAGE_WORDS as usize).enumerate();
        let mine = pages.skip(first as usize).step_by(self.vcpus as usize);
        mine.map(|(page, words)| (page as u64 * PAGE_WORDS, words))
    }
}

/// Words found wrong so far, and the first of them.
#[derive(Default)]
struct Findings {
    errors: AtomicU64,
    has_first: AtomicBool,
    first_index: AtomicU64,
    first_generation: AtomicU64,
    first_found: AtomicU64,
}

impl Findings {
    #[cold]
    fn record(&self, index: u64, generation: u64, found: u64) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        if !self.has_first.swap(true, Ordering::Relaxed) {
            self.first_index.store(index, Ordering::Relaxed);
            self.first_generation.store(generation, Ordering::Relaxed);
            self.first_found.store(found, Ordering::Relaxed);
        }
    }

    fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// The first mismatch; asked by the leader while nobody records.
    fn first(&self, memory: &Memory<'_>) -> Option<Mismatch> {
        let [index, generation, found] =
            [&self.first_index, &self.first_generation, &self.first_found].map(|value| value.load(Ordering::Relaxed));
        self.has_first.load(Ordering::Relaxed).then(|| Mismatch {
            address: memory.address + index * 8,
            expected: word(index, generation),
            found,
            kind: classify(found, index, generation, memory.words.len() as u64),
        })
    }
}

/// Writes the first generation.
fn fill(platform: &dyn Platform, memory: &Memory<'_>) {
    const PHASE: Name<'static> = Name::literal("fill");
    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    platform.run_on_all(&|vcpu| {
        for (first, page) in memory.pages_of(vcpu, 0) {
            for (index, slot) in (first..).zip(page) {
                slot.store(word(index, FIRST_GENERATION), Ordering::Relaxed);
            }
        }
    });
    platform.emit(&Message::End { phase: PHASE, tsc: platform.now() });
}

/// Checks and rewrites every word, pass after pass, until it is time or something is wrong. Returns the generation that
/// every word has now.
fn passes_until(platform: &dyn Platform, memory: &Memory<'_>, until: Until) -> u64 {
    const PHASE: Name<'static> = Name::literal("pass");
    let planned = match until {
        Until::Passes(passes) => passes,
        Until::Seconds(_) => 0,
    };
    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    let passes_run = AtomicU64::new(0);
    let end = AtomicU64::new(0);
    let pass_lines = Progress::new(platform, PHASE, planned, PASS_LINE_MS);
    let page_lines = Progress::new(platform, Name::literal("pages"), memory.pages(), PAGE_LINE_MS);
    let tally = Tally::default();
    let start = platform.now();

    let work = |vcpu: usize, pass: u64, clock: &mut Batches<'_>| {
        let generation = FIRST_GENERATION + pass;
        clock.restart();
        // The fill was the work of round 0, so pass 0 already has the pages in other hands.
        for (done, (first, page)) in (1..).zip(memory.pages_of(vcpu, pass + 1)) {
            for (index, slot) in (first..).zip(page) {
                let found = slot.load(Ordering::Relaxed);
                if found != word(index, generation) {
                    memory.findings.record(index, generation, found);
                }
                slot.store(word(index, generation + 1), Ordering::Relaxed);
            }
            let now = clock.end_batch();
            tally.set(vcpu, done);
            if vcpu == 0 && page_lines.is_due(now) {
                page_lines.emit(now, tally.sum());
                clock.restart();
            }
        }
    };
    let again = |pass: u64| {
        let now = platform.now();
        let passes = pass + 1;
        end.store(now, Ordering::Relaxed);
        passes_run.store(passes, Ordering::Relaxed);
        let is_time = match until {
            Until::Passes(planned) => passes >= planned,
            Until::Seconds(seconds) => now.saturating_sub(start) >= seconds.saturating_mul(platform.tsc_hz()),
        };
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
    let hz = platform.tsc_hz();
    let result = |name, value, unit| platform.emit(&Message::Result { name, value, unit });
    result(Name::literal("passes"), passes as f64, Name::literal("passes"));
    if hz != 0 {
        let seconds = ticks_to_seconds(end.into_inner().saturating_sub(start), hz);
        let gib = (memory.words.len() * 8) as f64 * passes as f64 / (1u64 << 30) as f64;
        result(Name::literal("seconds"), seconds, Name::literal("s"));
        result(Name::literal("rewritten"), gib / seconds, Name::literal("GiB/s"));
    }
    for (vcpu, summary) in gaps.iter().enumerate().take(platform.vcpus()) {
        if let Some(message) = summary.message(vcpu, hz) {
            platform.emit(&message);
        }
    }
    FIRST_GENERATION + passes
}

/// Checks every word once more, by another vCPU than wrote it, and says what was found over the whole run.
fn check<'a>(platform: &dyn Platform, memory: &Memory<'_>, generation: u64) -> Result<(), KernelError<'a>> {
    const PHASE: Name<'static> = Name::literal("verify");
    platform.emit(&Message::Begin { phase: PHASE, tsc: platform.now() });
    platform.run_on_all(&|vcpu| {
        for (first, page) in memory.pages_of(vcpu, generation) {
            for (index, slot) in (first..).zip(page) {
                let found = slot.load(Ordering::Relaxed);
                if found != word(index, generation) {
                    memory.findings.record(index, generation, found);
                }
            }
        }
    });
    platform.emit(&Message::End { phase: PHASE, tsc: platform.now() });

    if let Some(mismatch) = memory.findings.first(memory) {
        platform.emit(&Message::Mismatch(mismatch));
    }
    let errors = memory.findings.errors();
    let checked = memory.words.len() as u64 * (generation - FIRST_GENERATION + 1);
    let status = if errors == 0 { Status::Pass } else { Status::Fail };
    platform.emit(&Message::Verify { status, errors, checked });
    if errors == 0 { Ok(()) } else { Err(KernelError::VerificationFailed { errors, checked }) }
}
