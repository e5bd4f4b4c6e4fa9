//! The real host behind the daemon's interfaces.

use std::sync::Arc;

use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::sensors::host_memory::host_memory;
use wideleaf_memory::{LinuxHost, deadline};
use wideleaf_policies::Bytes;

use crate::engine::Doors;
use crate::guests::real::RealGuests;

/// Guests, pools and memory of this machine.
pub fn doors() -> Doors {
    Doors {
        guests: Arc::new(RealGuests::of_this_machine()),
        pools: Box::new(HugetlbPools::of_this_machine()),
        available: Box::new(available),
        questions: deadline::questions(),
    }
}

/// Available memory according to the kernel's estimate (proc_meminfo(5), `MemAvailable`).
fn available() -> Option<Bytes> {
    let host = LinuxHost::open().ok()?;
    host_memory(&host).ok().map(|memory| memory.available)
}
