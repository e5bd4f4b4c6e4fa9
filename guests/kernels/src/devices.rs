//! Devices: drives a disk, a network card, a balloon and sockets at once, each from a vCPU of its own, while other
//! vCPUs keep checking RAM.
//!
//! ```text
//!   vCPU 0   disk: passes= times written, erased in memory, read back and checked        │ then the others end
//!   vCPU 1   net: frames without end            vCPU 2   balloon: gives windows, takes them back, checks all words
//!   vCPU 3   vsock: echoes                      vCPU 4…  check and rewrite words of their own
//! ```
//!
//! Whenever the host stops this guest, saves it or moves it, all of its devices have something under way. The work of
//! each vCPU is that of the kernel of that name.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name, VCPUS_MAX};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::report::{self, Figure};
use crate::rounds::part;
use crate::team::Slot;
use crate::test_pattern::{Checked, FIRST_GENERATION, Findings, LAST_GENERATION, Written};
use crate::virtio::{Fault, device_error};
use crate::{Arena, KernelError, Platform, balloon, disk, net, vsock};

/// Devices in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("devices"),
    summary: "drives a disk, a card, a balloon and sockets at once; needs a guest with all of them and --vcpus 4",
    classes: &[],
    parameters: PARAMETERS,
    quick: "bytes=2M passes=1",
    figure: FIGURE,
    vcpus_max: VCPUS_MAX,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("frames", "frames");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "bytes",
        default: "4M",
        unit: "bytes (K, M, G, T)",
        meaning: "bytes on the disk and in memory, in the balloon's windows, and of the others, rounded down to 2 MiB",
    },
    Parameter { name: "passes", default: "3", unit: "count", meaning: "how often the disk is written and read back" },
];

/// Number of vCPUs that drive a device.
const DRIVERS: usize = 4;
const TOO_FEW: Fault = "each device needs a vCPU of its own: run the kernel in a guest with --vcpus 4 or more";
const IDLE: Fault = "a device was not used";

const WINDOW_BYTES: u64 = 2 << 20;
const BYTES_MAX: u64 = 1 << 36;
const PASSES_MAX: u64 = 1 << 20;
/// Each part of memory begins at a page.
const PAGE_WORDS: usize = 512;

struct Plan {
    bytes: u64,
    passes: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let bytes = parameters.size("bytes", WINDOW_BYTES, BYTES_MAX)?.unwrap_or(4 << 20);
        let passes = parameters.count("passes", 1, PASSES_MAX)?.unwrap_or(3);
        Ok(Self { bytes: bytes / WINDOW_BYTES * WINDOW_BYTES, passes })
    }

    /// Words of the balloon, disk, card, sockets and of the vCPUs that only check memory.
    fn words(&self, vcpus: usize) -> [usize; 5] {
        let others = if vcpus > DRIVERS { self.bytes as usize / 8 } else { 0 };
        // A window kept for each window given, and one for the queues; they begin at a border of a window.
        let balloon = (2 * self.bytes + WINDOW_BYTES) as usize / 8;
        [balloon, disk::words_for(self.bytes), net::WORDS, vsock::WORDS, others]
            .map(|words| words.next_multiple_of(PAGE_WORDS))
    }

    fn needed(&self, vcpus: usize) -> u64 {
        8 * self.words(vcpus).iter().sum::<usize>() as u64
    }
}

fn memory<'a>(parameters: &Parameters<'a>, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(Plan::read(parameters)?.needed(vcpus)))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    let vcpus = platform.vcpus();
    if vcpus < DRIVERS {
        return Err(device_error(TOO_FEW));
    }
    let needed = plan.needed(vcpus);
    if arena.bytes() < needed {
        return Err(KernelError::ArenaTooSmall { needed, bytes: arena.bytes() });
    }
    platform.emit(&Message::Region { name: Name::literal("devices"), address: arena.address(), bytes: needed });
    let (mut rest, mut address) = (arena.words(), arena.address());
    let [of_balloon, of_disk, of_card, of_sockets, of_checkers] = plan.words(vcpus).map(|words| {
        let (cut, behind) = rest.split_at(words);
        let at = address;
        (rest, address) = (behind, address + 8 * words as u64);
        (cut, at)
    });

    let is_over = AtomicBool::new(false);
    let (disk, card, balloon, sockets) = (Slot::new(None), Slot::new(None), Slot::new(None), Slot::new(None));
    let (beside, checked) = (Findings::default(), AtomicU64::new(0));
    report::phase(platform, report::COMPUTE, || {
        platform.run_on_all(&|vcpu| match vcpu {
            0 => {
                let words = &of_disk.0[..disk::words_for(plan.bytes)];
                disk.put(disk::write_and_check(platform, words, of_disk.1, plan.passes));
                is_over.store(true, Ordering::Release);
            }
            1 => card.put(net::send_until(platform, of_card.0, of_card.1, &is_over)),
            2 => balloon.put(balloon::give_until(platform, of_balloon.0, of_balloon.1, &is_over)),
            3 => sockets.put(vsock::echo_until(platform, of_sockets.0, of_sockets.1, &is_over)),
            _ => {
                let mine = part(of_checkers.0.len() as u64, vcpu - DRIVERS, vcpus - DRIVERS);
                let words = &of_checkers.0[mine.start as usize..mine.end as usize];
                disk::fill(words, FIRST_GENERATION);
                checked.fetch_add(disk::check_until(words, &beside, &is_over), Ordering::Relaxed);
            }
        });
    });

    let disk = of_driver(&disk)?;
    let frames = of_driver(&card)?;
    let (given, balloon) = of_driver(&balloon)?;
    let echoed = of_driver(&sockets)?;
    FIGURE.emit(platform, frames as f64);
    report::result(platform, Name::literal("given"), given as f64, Name::literal("pages"));
    report::result(platform, Name::literal("echoed"), echoed as f64, Name::literal("bytes"));
    let written = Written { words: of_checkers.0.len() as u64, newest_generation: LAST_GENERATION };
    let others = Checked { address: of_checkers.1, written, checked: checked.into_inner(), findings: beside };
    let all = [disk, balloon, others];
    match all.iter().find(|part| part.findings.errors() > 0) {
        Some(part) => part.findings.report(platform, part.address, part.written, part.checked),
        None => report::verdict(platform, 0, all.iter().map(|part| part.checked).sum()),
    }
}

/// What a vCPU that drives a device has done.
fn of_driver<'a, T>(done: &Slot<Result<T, Fault>>) -> Result<T, KernelError<'a>> {
    done.take().unwrap_or(Err(IDLE)).map_err(device_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_balloons_windows_begin_at_a_border_and_every_part_at_a_page() {
        let plan = Plan { bytes: 4 << 20, passes: 1 };
        assert_eq!(plan.words(4)[0] * 8, 10 << 20);
        assert!(plan.words(5).iter().all(|words| words.is_multiple_of(PAGE_WORDS)));
        assert_eq!(plan.needed(5) - plan.needed(4), 4 << 20);
    }
}
