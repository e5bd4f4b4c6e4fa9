//! Balloon: gives pages to the host and takes them back, while the pages that it kept stay unchanged.
//!
//! ```text
//!   the words, pass after pass:
//!
//!   │ kept, every other window │ given: inflate ─▶ the host has the pages ─▶ deflate ─▶ written and checked anew │
//! ```
//!
//! The driver tells the device before it uses a page again (`MUST_TELL_HOST`), as Linux does (Virtual I/O Device
//! 1.2, 5.5). The contents of a page that comes back are unspecified. The kernel checks word by word what it writes
//! there afterwards, and all memory that it never gave.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::report::{self, Figure};
use crate::test_pattern::{Checked, FIRST_GENERATION, Findings, PAGE_WORDS, Written, word};
use crate::virtio::{Buffer, Device, Fault, Kind, Queue, device_error, queue_words};
use crate::{Arena, KernelError, Platform};

/// The balloon in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("balloon"),
    summary: "gives pages to the host, takes them back and checks all others; needs a guest with --balloon",
    classes: &[],
    parameters: PARAMETERS,
    quick: "bytes=4M passes=1",
    figure: FIGURE,
    vcpus_max: 1,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("given", "pages");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "bytes",
        default: "16M",
        unit: "bytes (K, M, G, T)",
        meaning: "memory in use, rounded down to 2 MiB windows; every other window is given to the host",
    },
    Parameter {
        name: "passes",
        default: "2",
        unit: "count",
        meaning: "how often the windows are given and taken back",
    },
];

/// Feature bit `VIRTIO_BALLOON_F_MUST_TELL_HOST`.
const FEATURES: u32 = 1;
/// Offset of `actual` in the configuration: the number of pages in the balloon.
const ACTUAL: u64 = 4;
/// Page numbers in a buffer: the number that Linux uses.
const NUMBERS: usize = 256;
const ENTRIES: u64 = 16;
const QUEUE_WORDS: usize = queue_words(ENTRIES);
const WINDOW_BYTES: u64 = 2 << 20;
const WINDOW_WORDS: usize = WINDOW_BYTES as usize / 8;
const PAGES_PER_WINDOW: u64 = WINDOW_WORDS as u64 / PAGE_WORDS;
const BYTES_MAX: u64 = 1 << 36;
const PASSES_MAX: u64 = 1 << 20;

struct Plan {
    windows: u64,
    passes: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let bytes = parameters.size("bytes", 2 * WINDOW_BYTES, BYTES_MAX)?.unwrap_or(16 << 20);
        let passes = parameters.count("passes", 1, PASSES_MAX)?.unwrap_or(2);
        Ok(Self { windows: bytes / WINDOW_BYTES, passes })
    }

    /// Bytes of the windows, and of one more behind them for queues and page numbers, so that the windows begin at
    /// a border.
    fn needed(&self) -> u64 {
        (self.windows + 1) * WINDOW_BYTES
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(Plan::read(parameters)?.needed()))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    if arena.bytes() < plan.needed() {
        return Err(KernelError::ArenaTooSmall { needed: plan.needed(), bytes: arena.bytes() });
    }
    let (words, rest) = arena.words().split_at(plan.windows as usize * WINDOW_WORDS);
    let rest_address = arena.address() + plan.windows * WINDOW_BYTES;
    let mut balloon = Balloon::start(platform, rest, rest_address).map_err(device_error)?;
    platform.emit(&Message::Region { name: Name::literal("balloon"), address: arena.address(), bytes: plan.needed() });
    let findings = Findings::default();
    let mut checked = 0;
    write(words, FIRST_GENERATION, |_| true);
    let given = report::phase(platform, report::COMPUTE, || {
        for generation in FIRST_GENERATION..FIRST_GENERATION + plan.passes {
            checked += balloon.pass(words, arena.address(), &plan, generation, &findings)?;
        }
        Ok(plan.passes * (plan.windows / 2) * PAGES_PER_WINDOW)
    });
    FIGURE.emit(platform, given.0.map_err(device_error)? as f64);
    let written = Written { words: words.len() as u64, newest_generation: FIRST_GENERATION + plan.passes - 1 };
    findings.report(platform, arena.address(), written, checked)
}

/// Gives every other window of these words to the host and takes it back until `is_over`, at least once. The last
/// window is for the queues. Returns the number of pages that were given.
///
/// # Errors
/// [`Fault`] of the balloon.
pub(crate) fn give_until(
    platform: &dyn Platform,
    words: &[AtomicU64],
    address: u64,
    is_over: &AtomicBool,
) -> Result<(u64, Checked), Fault> {
    let plan = Plan { windows: (words.len() / WINDOW_WORDS - 1) as u64, passes: PASSES_MAX };
    let (words, rest) = words.split_at(plan.windows as usize * WINDOW_WORDS);
    let mut balloon = Balloon::start(platform, rest, address + plan.windows * WINDOW_BYTES)?;
    write(words, FIRST_GENERATION, |_| true);
    let (findings, mut checked, mut passes) = (Findings::default(), 0, 0);
    while passes == 0 || passes < plan.passes && findings.errors() == 0 && !is_over.load(Ordering::Acquire) {
        checked += balloon.pass(words, address, &plan, FIRST_GENERATION + passes, &findings)?;
        passes += 1;
    }
    let written = Written { words: words.len() as u64, newest_generation: FIRST_GENERATION + passes - 1 };
    Ok((passes * (plan.windows / 2) * PAGES_PER_WINDOW, Checked { address, written, checked, findings }))
}

/// Whether a window is kept, by its number.
fn is_kept(window: usize) -> bool {
    window.is_multiple_of(2)
}

fn write(words: &[AtomicU64], generation: u64, is_meant: impl Fn(usize) -> bool) {
    let windows = words.chunks(WINDOW_WORDS).enumerate().filter(|(window, _)| is_meant(*window));
    for (window, words) in windows {
        let first = (window * WINDOW_WORDS) as u64;
        (first..).zip(words).for_each(|(index, slot)| slot.store(word(index, generation), Ordering::Relaxed));
    }
}

/// Checks words. Returns their number.
fn check(words: &[AtomicU64], generation: u64, is_meant: impl Fn(usize) -> bool, findings: &Findings) -> u64 {
    let mut checked = 0;
    for (window, words) in words.chunks(WINDOW_WORDS).enumerate().filter(|(window, _)| is_meant(*window)) {
        let first = (window * WINDOW_WORDS) as u64;
        (first..).zip(words).for_each(|(index, slot)| findings.check(slot, index, generation));
        checked += words.len() as u64;
    }
    checked
}

struct Balloon<'m> {
    device: Device<'m>,
    inflate: Queue<'m>,
    deflate: Queue<'m>,
    numbers: &'m [AtomicU64],
    numbers_address: u64,
}

impl<'m> Balloon<'m> {
    fn start(platform: &'m dyn Platform, words: &'m [AtomicU64], address: u64) -> Result<Self, Fault> {
        let device = Device::begin(platform, Kind::Balloon, FEATURES)?;
        let (of_inflate, rest) = words.split_at(QUEUE_WORDS);
        let (of_deflate, numbers) = rest.split_at(QUEUE_WORDS);
        let second = address + 8 * QUEUE_WORDS as u64;
        let inflate = device.queue(0, ENTRIES, of_inflate, address)?;
        let deflate = device.queue(1, ENTRIES, of_deflate, second)?;
        device.start()?;
        Ok(Self { device, inflate, deflate, numbers, numbers_address: second + 8 * QUEUE_WORDS as u64 })
    }

    /// Gives windows and takes them back, and writes them anew. Returns the number of words that it checked.
    fn pass(
        &mut self,
        words: &[AtomicU64],
        address: u64,
        plan: &Plan,
        generation: u64,
        findings: &Findings,
    ) -> Result<u64, Fault> {
        self.give(address, plan)?;
        let mut checked = check(words, FIRST_GENERATION, is_kept, findings);
        self.take_back(address, plan)?;
        write(words, generation, |window| !is_kept(window));
        checked += check(words, generation, |window| !is_kept(window), findings);
        Ok(checked + check(words, FIRST_GENERATION, is_kept, findings))
    }

    fn give(&mut self, address: u64, plan: &Plan) -> Result<(), Fault> {
        let Self { inflate, numbers, numbers_address, .. } = self;
        tell(inflate, numbers, *numbers_address, address, plan)?;
        self.device.set_configuration(ACTUAL, (plan.windows / 2 * PAGES_PER_WINDOW) as u32);
        Ok(())
    }

    fn take_back(&mut self, address: u64, plan: &Plan) -> Result<(), Fault> {
        let Self { deflate, numbers, numbers_address, .. } = self;
        tell(deflate, numbers, *numbers_address, address, plan)?;
        self.device.set_configuration(ACTUAL, 0);
        Ok(())
    }
}

/// Sends the page numbers of all windows that are not kept, buffer after buffer.
fn tell(
    queue: &mut Queue<'_>,
    numbers: &[AtomicU64],
    numbers_address: u64,
    address: u64,
    plan: &Plan,
) -> Result<(), Fault> {
    let page_bytes = PAGE_WORDS * 8;
    let windows = (0..plan.windows).filter(|window| !is_kept(*window as usize));
    for window in windows {
        let first = (address + window * WINDOW_BYTES) / page_bytes;
        for start in (first..first + PAGES_PER_WINDOW).step_by(NUMBERS) {
            for (pair, slot) in numbers[..NUMBERS / 2].iter().enumerate() {
                let number = start + 2 * pair as u64;
                slot.store(number | (number + 1) << 32, Ordering::Relaxed);
            }
            let buffer = Buffer { address: numbers_address, bytes: NUMBERS as u32 * 4, is_written: false };
            queue.describe(0, buffer, None);
            queue.offer(0);
            queue.wait()?;
        }
    }
    Ok(())
}
