//! Disk: writes predictable words to a disk, erases them in memory, reads them back and checks every one, while
//! other vCPUs keep checking RAM.
//!
//! ```text
//!   vCPU 0   │ write words of pass k │ ─▶ disk │ zeroes over them │ ◀─ disk │ check every word │  pass after pass,
//!                                                                                                 then random 4 KiB
//!   others   │ check and rewrite words of their own, as `pattern` does                         │  until vCPU 0 is done
//! ```
//!
//! A host that moves, merges or drops pages beneath a running guest must not lose device writes either. A page
//! copied before the device wrote into it reads as zeroes here. A page that the device read from its old place puts
//! an old pass on the disk.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name, VCPUS_MAX};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::platform::ticks_to_seconds;
use crate::report::{self, Figure};
use crate::rounds::{Until, part};
use crate::team::Slot;
use crate::test_pattern::{Checked, FIRST_GENERATION, Findings, LAST_GENERATION, Written, word};
use crate::virtio::{Fault, device_error};
use crate::virtio_disk::{Disk, Kind, QUEUE_WORDS, Request, SECTOR_BYTES};
use crate::{Arena, KernelError, Platform};

/// Disk in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("disk"),
    summary: "writes a disk and reads it back while RAM is under test: no byte may be lost; needs a guest with --disk",
    classes: &[],
    parameters: PARAMETERS,
    quick: "bytes=1M requests=64",
    figure: FIGURE,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("sequential_read", "MiB/s");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "bytes",
        default: "16M",
        unit: "bytes (K, M, G, T)",
        meaning: "bytes written on the disk and in memory, rounded down to whole blocks",
    },
    Parameter {
        name: "block",
        default: "64K",
        unit: "bytes (K, M, G, T)",
        meaning: "bytes of a sequential request, a multiple of 4K",
    },
    Parameter { name: "passes", default: "3", unit: "count", meaning: "how often all bytes are written and read back" },
    Parameter {
        name: "seconds",
        default: "not used",
        unit: "s",
        meaning: "repeat whole passes for at least this time (instead of passes=)",
    },
    Parameter {
        name: "requests",
        default: "2000",
        unit: "count",
        meaning: "number of random 4 KiB reads, and of random writes",
    },
];

const TOO_SMALL: Fault = "the disk is smaller than bytes=";

const RANDOM_BYTES: u64 = 4096;
/// Bytes of a sequential request.
const BLOCK_DEFAULT: u64 = 64 << 10;
const BYTES_MAX: u64 = 1 << 40;
const BLOCK_MAX: u64 = 16 << 20;
const PASSES_MAX: u64 = LAST_GENERATION - FIRST_GENERATION;
const QUEUE_BYTES: u64 = QUEUE_WORDS as u64 * 8;

struct Plan {
    bytes: u64,
    block: u64,
    until: Until,
    requests: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let block =
            parameters.size("block", RANDOM_BYTES, BLOCK_MAX)?.unwrap_or(BLOCK_DEFAULT) / RANDOM_BYTES * RANDOM_BYTES;
        let bytes = parameters.size("bytes", block, BYTES_MAX)?.unwrap_or(block.max(16 << 20)) / block * block;
        let requests = parameters.count("requests", 0, 1 << 32)?.unwrap_or(2000);
        Ok(Self { bytes, block, until: Until::read(parameters, "passes", PASSES_MAX, 3)?, requests })
    }

    /// Bytes of the queue, the data, and as much again for the vCPUs that only check memory.
    fn needed(&self, vcpus: usize) -> u64 {
        QUEUE_BYTES + self.bytes * if vcpus > 1 { 2 } else { 1 }
    }
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(Plan::read(parameters)?.needed(vcpus)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    plan.until.prepare(platform)?;
    let needed = plan.needed(platform.vcpus());
    if arena.bytes() < needed {
        return Err(KernelError::ArenaTooSmall { needed, bytes: arena.bytes() });
    }
    let (queue, rest) = arena.words().split_at(QUEUE_WORDS);
    let (data, rest) = rest.split_at((plan.bytes / 8) as usize);
    let others = &rest[..if platform.vcpus() > 1 { data.len() } else { 0 }];
    let disk = Disk::start(platform, queue, arena.address()).map_err(device_error)?;
    if disk.sectors() < plan.bytes / SECTOR_BYTES {
        return Err(device_error(TOO_SMALL));
    }
    platform.emit(&Message::Region { name: Name::literal("disk"), address: arena.address(), bytes: needed });

    let memory = Memory { words: data, address: arena.address() + QUEUE_BYTES, findings: Findings::default() };
    let beside = Findings::default();
    let (is_over, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    let (disk, outcome) = (Slot::new(Some(disk)), Slot::new(None));
    report::phase(platform, report::COMPUTE, || {
        platform.run_on_all(&|vcpu| {
            if vcpu == 0 {
                if let Some(mut disk) = disk.take() {
                    outcome.put(write_and_read(platform, &mut disk, &memory, &plan));
                }
                is_over.store(true, Ordering::Release);
            } else {
                let mine = part(others.len() as u64, vcpu - 1, platform.vcpus() - 1);
                let words = &others[mine.start as usize..mine.end as usize];
                fill(words, FIRST_GENERATION);
                checked.fetch_add(check_until(words, &beside, &is_over), Ordering::Relaxed);
            }
        });
    });
    let done = outcome.take().unwrap_or(Err("the disk was not used")).map_err(device_error)?;
    done.report(platform, &plan);
    if beside.errors() > 0 {
        let address = memory.address + plan.bytes;
        let written = Written { words: others.len() as u64, newest_generation: LAST_GENERATION };
        return beside.report(platform, address, written, checked.into_inner());
    }
    let words = data.len() as u64;
    let written = Written { words, newest_generation: FIRST_GENERATION + done.passes - 1 };
    memory.findings.report(platform, memory.address, written, words * done.passes + checked.into_inner())
}

/// Number of words that [`write_and_check`] needs for this many bytes of the disk, whole blocks of 64 KiB.
pub(crate) const fn words_for(bytes: u64) -> usize {
    QUEUE_WORDS + bytes as usize / 8
}

/// Writes the first bytes of the disk and reads them back, pass after pass.
///
/// # Errors
/// [`Fault`] of the disk.
pub(crate) fn write_and_check(
    platform: &dyn Platform,
    words: &[AtomicU64],
    address: u64,
    passes: u64,
) -> Result<Checked, Fault> {
    let (queue, words) = words.split_at(QUEUE_WORDS);
    let plan = Plan {
        bytes: 8 * words.len() as u64 / BLOCK_DEFAULT * BLOCK_DEFAULT,
        block: BLOCK_DEFAULT,
        until: Until::Rounds(passes),
        requests: 0,
    };
    let mut disk = Disk::start(platform, queue, address)?;
    if disk.sectors() < plan.bytes / SECTOR_BYTES {
        return Err(TOO_SMALL);
    }
    let words = &words[..(plan.bytes / 8) as usize];
    let memory = Memory { words, address: address + QUEUE_BYTES, findings: Findings::default() };
    let done = write_and_read(platform, &mut disk, &memory, &plan)?;
    let written = Written { words: words.len() as u64, newest_generation: FIRST_GENERATION + done.passes - 1 };
    let checked = written.words * done.passes;
    Ok(Checked { address: memory.address, written, checked, findings: memory.findings })
}

/// The words that go to the disk and come back.
struct Memory<'m> {
    words: &'m [AtomicU64],
    address: u64,
    findings: Findings,
}

/// Findings of vCPU 0, and how long its work took.
#[derive(Default)]
struct Done {
    passes: u64,
    write_ticks: u64,
    read_ticks: u64,
    random_write_ticks: u64,
    random_read_ticks: u64,
}

fn write_and_read(
    platform: &dyn Platform,
    disk: &mut Disk<'_>,
    memory: &Memory<'_>,
    plan: &Plan,
) -> Result<Done, Fault> {
    let mut done = Done::default();
    let progress = report::progress(platform, plan.until.planned());
    let start = platform.now();
    while done.passes < PASSES_MAX {
        let generation = FIRST_GENERATION + done.passes;
        fill(memory.words, generation);
        let flush = [Request { kind: Kind::Flush, sector: 0, address: 0, bytes: 0 }];
        done.write_ticks += timed(platform, || {
            disk.carry_out(sequence(memory, plan, Kind::Write))?;
            disk.carry_out(flush)
        })?;
        // The data is erased: what comes back can only be from the disk. The host may take back pages of zeroes at
        // this point.
        memory.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        done.read_ticks += timed(platform, || disk.carry_out(sequence(memory, plan, Kind::Read)))?;
        check(memory.words, &memory.findings, generation);
        done.passes += 1;
        progress.note(done.passes);
        let ticks = platform.now().saturating_sub(start);
        if plan.until.is_reached(platform, done.passes, ticks) || memory.findings.errors() > 0 {
            break;
        }
    }
    // Writes repeat the data of the last pass, so that it stays valid; the words that are read are checked once
    // more.
    done.random_write_ticks = timed(platform, || disk.carry_out(scattered(memory, plan, Kind::Write)))?;
    done.random_read_ticks = timed(platform, || disk.carry_out(scattered(memory, plan, Kind::Read)))?;
    check(memory.words, &memory.findings, FIRST_GENERATION + done.passes - 1);
    Ok(done)
}

/// Requests for all of memory and disk, block after block.
fn sequence(memory: &Memory<'_>, plan: &Plan, kind: Kind) -> impl Iterator<Item = Request> {
    let (address, block) = (memory.address, plan.block);
    let blocks = plan.bytes / block;
    (0..blocks).map(move |number| {
        let offset = number * block;
        Request { kind, sector: offset / SECTOR_BYTES, address: address + offset, bytes: block as u32 }
    })
}

/// Requests of 4 KiB in a pseudo-random order that is the same in each run.
fn scattered(memory: &Memory<'_>, plan: &Plan, kind: Kind) -> impl Iterator<Item = Request> {
    let (address, pieces) = (memory.address, plan.bytes / RANDOM_BYTES);
    (0..plan.requests).map(move |number| {
        let offset = word(number, FIRST_GENERATION) % pieces * RANDOM_BYTES;
        Request { kind, sector: offset / SECTOR_BYTES, address: address + offset, bytes: RANDOM_BYTES as u32 }
    })
}

fn timed(platform: &dyn Platform, work: impl FnOnce() -> Result<(), Fault>) -> Result<u64, Fault> {
    let start = platform.now();
    work()?;
    Ok(platform.now().saturating_sub(start))
}

pub(crate) fn fill(words: &[AtomicU64], generation: u64) {
    for (index, slot) in (0..).zip(words) {
        slot.store(word(index, generation), Ordering::Relaxed);
    }
}

fn check(words: &[AtomicU64], findings: &Findings, generation: u64) {
    for (index, slot) in (0..).zip(words) {
        findings.check(slot, index, generation);
    }
}

/// Checks and rewrites words of the first generation until `is_over`, and checks at the end what was written last.
/// Returns the number of words checked.
pub(crate) fn check_until(words: &[AtomicU64], findings: &Findings, is_over: &AtomicBool) -> u64 {
    let mut generation = FIRST_GENERATION;
    while generation < LAST_GENERATION && !is_over.load(Ordering::Acquire) {
        for (index, slot) in (0..).zip(words) {
            findings.check_and_rewrite(slot, index, generation);
        }
        generation += 1;
    }
    check(words, findings, generation);
    (generation - FIRST_GENERATION + 1) * words.len() as u64
}

impl Done {
    fn report(&self, platform: &dyn Platform, plan: &Plan) {
        report::result(platform, Name::literal("passes"), self.passes as f64, Name::literal("passes"));
        if platform.tsc_hz() == 0 {
            return;
        }
        let per_second = |work: u64, ticks: u64| work as f64 / ticks_to_seconds(ticks.max(1), platform.tsc_hz());
        let mib = (plan.bytes * self.passes) as f64 / f64::from(1 << 20);
        let rate = |ticks| mib * per_second(1, ticks);
        report::result(platform, Name::literal("sequential_write"), rate(self.write_ticks), Name::literal("MiB/s"));
        FIGURE.emit(platform, rate(self.read_ticks));
        if plan.requests > 0 {
            let unit = Name::literal("requests/s");
            let writes = per_second(plan.requests, self.random_write_ticks);
            let reads = per_second(plan.requests, self.random_read_ticks);
            report::result(platform, Name::literal("random_write"), writes, unit);
            report::result(platform, Name::literal("random_read"), reads, unit);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn a_word_that_is_lost_after_the_last_rewriting_is_found() {
        let words: Vec<AtomicU64> = (0..1000).map(|_| AtomicU64::new(0)).collect();
        fill(&words, FIRST_GENERATION);
        words[7].store(0, Ordering::Relaxed);
        let findings = Findings::default();
        assert_eq!(check_until(&words, &findings, &AtomicBool::new(true)), 1000);
        assert_eq!(findings.errors(), 1);
    }
}
