//! Common parts of the benches.
//!
//! | module | contents |
//! |---|---|
//! | this one | memory in a known state |
//! | [`scenario`] | starting, waiting, ending and printing |
//! | [`guest`] | a guest, and guests that take turns |
//! | [`managed`] | a manager for one guest, and a policy that can be paused |
//! | [`beside_qemu`] | our VMM and QEMU with the same guest, in turns |
//! | [`coverage`] | share of a guest's memory that is backed and mapped large |
//! | [`cpu`] | CPU time of threads |
//! | [`spread_median`] | medians with their interval or range, and the targets that they are judged by |
//! | [`times_to_event`] | times of runs that may end at a limit |
//! | [`moved`] | speed of a guest before, during and after its move to another process |

pub mod beside_qemu;
pub mod coverage;
pub mod cpu;
pub mod guest;
pub mod managed;
pub mod moved;
pub mod scenario;
pub mod spread_median;
pub mod times_to_event;

use std::ops::ControlFlow;
use std::sync::Arc;

use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

/// Anonymous RAM of this size, fully present in base pages.
///
/// # Panics
/// If the machine has too little memory.
pub fn populated_ram(bytes: Bytes) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), bytes).expect("a bench's RAM fits 64 bits");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let ram = GuestRam::map(&[range], backing).expect("memory for a bench");
    let host = LinuxHost::open().expect("/proc is mounted");
    prefault(&host, ram.ranges(), 1, &|_| ControlFlow::Continue(())).expect("memory for a bench");
    ram
}
