//! The real host behind the daemon's interfaces.

use std::sync::Arc;

use wideleaf_memory::block_supply::{BlockSupply, SupplyRules};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::sensors::host_memory::host_memory;
use wideleaf_memory::{LinuxHost, deadline};
use wideleaf_policies::Bytes;

use crate::block_supply::{NoSupply, Supply};
use crate::engine::Doors;
use crate::guests::real::RealGuests;

/// Guests, pools and memory of this machine.
pub fn doors() -> Doors {
    Doors {
        guests: Arc::new(RealGuests::of_this_machine()),
        pools: Box::new(HugetlbPools::of_this_machine()),
        available: Box::new(available),
        supply: supply(),
        questions: deadline::questions(),
    }
}

/// The thread that makes free blocks, in this process. Only a machine without `/proc` has none.
fn supply() -> Arc<dyn Supply> {
    match LinuxHost::open() {
        Ok(host) => Arc::new(BlockSupply::new(Arc::new(host), SupplyRules::default())),
        Err(error) => {
            tracing::warn!("no free block of 2 MiB is made ahead of need: {error}");
            Arc::new(NoSupply)
        }
    }
}

/// Available memory according to the kernel's estimate (proc_meminfo(5), `MemAvailable`).
fn available() -> Option<Bytes> {
    let host = LinuxHost::open().ok()?;
    host_memory(&host).ok().map(|memory| memory.available)
}
