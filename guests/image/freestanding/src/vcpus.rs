//! The other vCPUs: their number, starting them after a PVH start, and joining the team. It writes the local APIC's
//! registers and one page below 1 MiB; a vCPU that does not arrive ends the program.
#![expect(unsafe_code, reason = "writes the local APIC and the real-mode code, and is called from boot.s")]

use core::hint::spin_loop;
use core::sync::atomic::{AtomicUsize, Ordering};

use wideleaf_kernels::team::Team;
use wideleaf_protocol::arguments::KEY_VCPUS;
use wideleaf_protocol::{ExitCode, VCPUS_MAX};

use crate::clock::wait_until;
use crate::console::fail;
use crate::machine::{copy_physical, in8, out16, read_u32, trampoline_code, vcpu_cr3, vcpu_index, write_u32};

/// The team of all vCPUs that take part.
pub static TEAM: Team = Team::new();
/// Number of vCPUs in the team; 0 until the leader has set it.
static MEMBERS: AtomicUsize = AtomicUsize::new(0);
/// Index of the vCPU that arrived last.
static ARRIVED: AtomicUsize = AtomicUsize::new(0);

/// Sets the number of vCPUs that take part. Called before the first job.
pub fn assemble(members: usize) {
    TEAM.set_members(members);
    MEMBERS.store(members, Ordering::Release);
}

/// Main function of every vCPU except the first. One outside the team waits for the end.
pub fn follow(vcpu: usize) -> ! {
    while MEMBERS.load(Ordering::Acquire) == 0 {
        spin_loop();
    }
    if vcpu < MEMBERS.load(Ordering::Relaxed) {
        TEAM.follow(vcpu);
    }
    loop {
        spin_loop();
    }
}

/// First Rust code of a vCPU that [`start_others`] has started: ring 3, the final tables.
#[unsafe(no_mangle)]
extern "C" fn vcpu_main(vcpu: usize) -> ! {
    ARRIVED.store(vcpu, Ordering::Release);
    follow(vcpu)
}

/// Number of vCPUs that take part: the requested one, else all that QEMU reports, else one.
pub fn count(asked: Option<usize>) -> usize {
    match (asked, count_from_qemu()) {
        (Some(asked), Some(there_are)) if asked > there_are => {
            fail(ExitCode::Unsupported, format_args!("{KEY_VCPUS}={asked}, but the machine has {there_are}"))
        }
        (Some(asked), _) => asked,
        (None, Some(there_are)) => there_are.min(VCPUS_MAX),
        (None, None) => 1,
    }
}

/// QEMU's firmware configuration device (QEMU: docs/specs/fw_cfg.rst): item 0 is its signature, item 5 the number
/// of vCPUs.
fn count_from_qemu() -> Option<usize> {
    const SELECTOR: u16 = 0x510;
    const DATA: u16 = 0x511;
    const SIGNATURE: u16 = 0;
    const VCPUS: u16 = 5;
    out16(SELECTOR, SIGNATURE);
    let is_qemu = *b"QEMU" == [in8(DATA), in8(DATA), in8(DATA), in8(DATA)];
    is_qemu.then(|| {
        out16(SELECTOR, VCPUS);
        usize::from(u16::from_le_bytes([in8(DATA), in8(DATA)]))
    })
}

/// Address of the local APIC's registers after a reset (SDM volume 3, 11.4.4).
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// Register with the local APIC's identifier, in its top byte.
const APIC_ID: u64 = LOCAL_APIC + 0x20;
/// Interrupt command: destination in the high register's top byte; writing the low register sends.
const APIC_COMMAND_LOW: u64 = LOCAL_APIC + 0x300;
const APIC_COMMAND_HIGH: u64 = LOCAL_APIC + 0x310;
/// INIT, asserted (SDM volume 3, 11.6.1).
const INIT: u32 = 0x4500;
/// Start-up command; its low byte is the page in which execution starts.
const START_UP: u32 = 0x4600;
/// The page of the real-mode code, below 1 MiB and above everything a BIOS keeps there. boot.s has the same address
/// in its first instructions.
const TRAMPOLINE: u64 = 0x8000;
const TRAMPOLINE_PAGE: u32 = (TRAMPOLINE >> 12) as u32;
/// Number of identifiers that are tried. They may have holes: QEMU gives each level of the topology whole bits.
const APIC_IDS: u32 = 64;
/// Longest time in which a vCPU may arrive. A busy host that emulates ring 0 needs some ten milliseconds.
const ARRIVAL_US_MAX: u64 = 1_000_000;

/// Starts vCPUs 1 to `count` − 1, one at a time, by the protocol of SDM volume 3, 9.4.4.1: INIT, 10 ms, start-up,
/// 200 µs, start-up. Ends the program if one does not arrive.
pub fn start_others(count: usize, tables: u64, tsc_hz: u64) {
    if count == 1 {
        return;
    }
    let (code, bytes) = trampoline_code();
    // SAFETY: the page is RAM on every PC, mapped one to one, and the boot data that the loader may have left there
    // are read.
    unsafe { copy_physical(code, TRAMPOLINE, bytes) };
    vcpu_cr3.store(tables, Ordering::Release);

    // SAFETY: the final tables map the local APIC; reading its identifier changes nothing.
    let own_id = unsafe { read_u32(APIC_ID) } >> 24;
    let mut ids = (0..APIC_IDS).filter(|id| *id != own_id);
    for vcpu in 1..count {
        if !ids.any(|id| start(vcpu, id, tsc_hz)) {
            fail(ExitCode::Unsupported, format_args!("vCPU {vcpu} of {count} did not start"));
        }
    }
}

/// Starts the vCPU with that identifier as vCPU `vcpu`. Returns whether it arrived.
fn start(vcpu: usize, apic_id: u32, tsc_hz: u64) -> bool {
    let has_arrived = || ARRIVED.load(Ordering::Acquire) == vcpu;
    vcpu_index.store(vcpu as u32, Ordering::Release);
    send(apic_id, INIT);
    wait_until(tsc_hz, 10_000, || false);
    send(apic_id, START_UP | TRAMPOLINE_PAGE);
    if !wait_until(tsc_hz, 200, has_arrived) {
        send(apic_id, START_UP | TRAMPOLINE_PAGE);
    }
    if wait_until(tsc_hz, ARRIVAL_US_MAX, has_arrived) {
        return true;
    }
    // Withdraws the offer. If it is gone already, the vCPU is on its way and will arrive.
    vcpu_index.swap(0, Ordering::AcqRel) == 0 && wait_until(tsc_hz, ARRIVAL_US_MAX, has_arrived)
}

fn send(apic_id: u32, command: u32) {
    // SAFETY: the final tables map the local APIC; a command register changes no memory.
    unsafe { write_u32(APIC_COMMAND_HIGH, apic_id << 24) };
    // SAFETY: likewise; the vCPU that starts runs boot.s only, with its own stack.
    unsafe { write_u32(APIC_COMMAND_LOW, command) };
}
