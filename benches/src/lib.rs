//! What the benches share.
//!
//! | module | what it is |
//! |---|---|
//! | this one | memory in a known state |
//! | [`experiment`] | starting, waiting, ending and printing |
//! | [`guest`] | a guest, and guests that take turns |
//! | [`managed`] | a manager over one, and a policy that can be held back |
//! | [`beside_qemu`] | our VMM and QEMU with the same guest, in turn |
//! | [`coverage`] | how large its memory is backed and mapped |
//! | [`cpu`] | what threads use |

pub mod beside_qemu;
pub mod coverage;
pub mod cpu;
pub mod experiment;
pub mod guest;
pub mod managed;

use std::ops::ControlFlow;
use std::sync::Arc;

use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

/// Anonymous RAM of this size, all of it present in base pages.
///
/// # Panics
/// Where the machine has not that much memory.
pub fn populated_ram(bytes: Bytes) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), bytes).expect("a bench's RAM fits 64 bits");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let ram = GuestRam::map(&[range], backing).expect("memory for a bench");
    let host = LinuxHost::open().expect("/proc is mounted");
    prefault(&host, ram.ranges(), 1, &|_| ControlFlow::Continue(())).expect("memory for a bench");
    ram
}
