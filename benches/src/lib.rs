//! What the benches share: memory in a known state, and what to skip with a reason.

pub mod ratio;

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
