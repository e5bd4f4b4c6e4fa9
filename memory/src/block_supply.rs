//! Makes free blocks of 2 MiB while windows wait for huge pages, within a budget of CPU time. Where its user asks for
//! it, some are kept ready for windows that wait later.
//!
//! ```text
//!   windows wait ── want ──▶ thread `block-supply`, nice 19 ──▶ asks for huge pages, one at a time, and holds them
//!                              ▲        │        │                  │ enough, refused, credit spent, or pressure
//!     free blocks are noticed ─┘        │        └─ credit: a share of a core, by the thread's own clock and by the
//!                                       │           pages that the kernel moved for a refused request
//!                                       └─ PSI: not while others wait for memory or for a CPU
//!                                                                   ▼
//!                                                        all of them are given back at once
//! ```
//!
//! On memory in pieces, each of these requests makes the kernel compact (`try_to_compact_pages`, mm/compaction.c) until
//! one block is free, which this thread then holds. Otherwise that work is part of a promotion, and its window waits.
//! Blocks are held until there are enough of them, because a request after a page was given back would get that one
//! again.
//!
//! The request is `MADV_COLLAPSE` of a window with one page: it allocates as a promotion does, and unlike a fault it
//! does not depend on the THP settings. Free blocks of the host are counted by [`free_blocks`], which does not see
//! pages on the lists of each CPU. The kernel keeps freed huge pages there too (`pcp_allowed_order`, mm/page_alloc.c),
//! so not every block that was given back is counted at once.
//!
//! [`free_blocks`]: crate::sensors::free_blocks

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_policies::{NodeSet, PerTenThousand};

use crate::host::Host;
use crate::sys;

mod held_blocks;
mod pressure;
mod supplier;

pub use held_blocks::HELD_MAX;
use held_blocks::HeldBlocks;
use supplier::Supplier;

/// Bounds on the work of a supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupplyRules {
    /// Share of a core. None: no block is made.
    pub cpu: PerTenThousand,
    /// Time of a core that may be saved up while no block is needed.
    pub cpu_burst: Duration,
    /// Number of free blocks below which more are made, if that many windows wait; also the size of a reserve.
    pub low: u64,
    /// Number of free blocks up to which they are made; also the largest number held at once.
    pub high: u64,
    /// Share of time in which threads of other work may wait for memory (PSI `some`).
    pub memory_stalls_max: PerTenThousand,
    /// Share of time in which some thread may wait for a CPU (PSI `some`).
    pub cpu_stalls_max: PerTenThousand,
}

impl Default for SupplyRules {
    /// One per cent of a core, or ten blocks a second: one takes about a millisecond. 32 blocks are 64 MiB, which a
    /// loop copies in some ticks. A tenth of the time is more than the compactions of the loops themselves, which the
    /// kernel counts as well.
    fn default() -> SupplyRules {
        SupplyRules {
            cpu: PerTenThousand::new(100),
            cpu_burst: Duration::from_millis(500),
            low: 8,
            high: 32,
            memory_stalls_max: PerTenThousand::new(1_000),
            cpu_stalls_max: PerTenThousand::new(5_000),
        }
    }
}

/// What the windows lack, as their managers found it at their latest ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SupplyDemand {
    /// Number of windows that wait for a huge page.
    pub windows: u64,
    /// Number of free blocks that their managers have found since the kernel refused one.
    pub free: u64,
    /// Whether the host is short of memory: then no block is made.
    pub is_host_short: bool,
    /// Whether [`SupplyRules::low`] blocks are kept ready for windows that wait later.
    pub keeps_reserve: bool,
    /// NUMA nodes of the windows that wait; empty: blocks of any node serve them, or those of
    /// [`BlockSupply::on_nodes`].
    pub nodes: NodeSet,
}

impl SupplyDemand {
    /// Number of blocks that are wanted.
    fn blocks(self, rules: &SupplyRules) -> u64 {
        self.windows.max(if self.keeps_reserve { rules.low } else { 0 })
    }

    fn has_work(self) -> bool {
        self.windows > 0 || self.keeps_reserve
    }
}

/// Counters of a supply since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SupplyReport {
    /// Number of blocks that compaction made.
    pub made: u64,
    /// Number of blocks that were free before: held together with those that were made.
    pub found: u64,
    /// Number of requests for which the kernel had no block.
    pub refused: u64,
    /// Number of blocks that `/proc/buddyinfo` did not count after they were given back: they are on the list of a CPU.
    pub unseen: u64,
    /// Number of pages that the host's kernel moved during the requests.
    pub moved_pages: u64,
    /// CPU time of its thread.
    pub cpu: Duration,
    /// Number of times that it was stopped while there was work, by reason.
    pub stopped: BTreeMap<&'static str, u64>,
}

impl SupplyReport {
    /// Counters by name, without those that are zero.
    pub fn by_name(&self) -> impl Iterator<Item = (String, u64)> {
        let cpu_us = u64::try_from(self.cpu.as_micros()).unwrap_or(u64::MAX);
        let counters = [
            ("made", self.made),
            ("found", self.found),
            ("refused", self.refused),
            ("unseen", self.unseen),
            ("moved_pages", self.moved_pages),
            ("cpu_us", cpu_us),
        ];
        let counters = counters.map(|(name, count)| (name.to_owned(), count));
        let stopped = self.stopped.iter().map(|(why, times)| (format!("stopped.{why}"), *times));
        counters.into_iter().chain(stopped).filter(|(_, count)| *count > 0)
    }
}

/// A supply of free blocks. Its thread starts when windows first wait, and sleeps while none does and no reserve is
/// kept.
pub struct BlockSupply {
    host: Arc<dyn Host>,
    nodes: NodeSet,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    wanted: Mutex<Orders>,
    changed: Condvar,
    report: Mutex<SupplyReport>,
}

/// What the thread is to do.
#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    demand: SupplyDemand,
    rules: SupplyRules,
    is_over: bool,
}

impl std::fmt::Debug for BlockSupply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockSupply").field("report", &self.report()).finish_non_exhaustive()
    }
}

impl BlockSupply {
    /// A supply without a thread yet. `host`: this process's own address space.
    pub fn new(host: Arc<dyn Host>, rules: SupplyRules) -> BlockSupply {
        let wanted = Mutex::new(Orders { rules, ..Orders::default() });
        let shared = Arc::new(Shared { wanted, ..Shared::default() });
        BlockSupply { host, nodes: NodeSet::EMPTY, shared, thread: Mutex::default() }
    }

    /// The same, with blocks of these NUMA nodes alone, unless a demand names others: those on which guest RAM is
    /// placed. Empty: of any.
    #[must_use]
    pub fn on_nodes(mut self, nodes: NodeSet) -> BlockSupply {
        self.nodes = nodes;
        self
    }

    /// Says what windows lack now. It holds until the next call.
    ///
    /// # Errors
    /// There is work, and no thread could be started. The next call tries again.
    pub fn want(&self, demand: SupplyDemand) -> io::Result<()> {
        let nodes = if demand.nodes.is_empty() { self.nodes } else { demand.nodes };
        let demand = SupplyDemand { nodes, ..demand };
        let before = std::mem::replace(&mut self.shared.lock().demand, demand);
        if !before.has_work() && demand.has_work() {
            self.shared.changed.notify_all();
        }
        if demand.has_work() { self.start() } else { Ok(()) }
    }

    /// Changes the bounds from the next request on.
    pub fn set_rules(&self, rules: SupplyRules) {
        self.shared.lock().rules = rules;
    }

    /// Counters so far.
    pub fn report(&self) -> SupplyReport {
        self.shared.report.lock().clone()
    }

    /// Ends the thread, after its request under way, and returns its counters. All blocks are given back.
    pub fn stop(self) -> SupplyReport {
        let shared = self.shared.clone();
        drop(self);
        shared.report.lock().clone()
    }

    fn start(&self) -> io::Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (host, shared) = (self.host.clone(), self.shared.clone());
            *thread = Some(thread::Builder::new().name("block-supply".into()).spawn(move || shared.work(host))?);
        }
        Ok(())
    }
}

/// As [`BlockSupply::stop`].
impl Drop for BlockSupply {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        let thread = self.thread.get_mut().take();
        // A panic has left a message; the blocks went with its stack.
        let _ = thread.map(JoinHandle::join);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        // Replaced field by field, each of which is consistent alone.
        self.wanted.lock()
    }

    /// The thread, from start to end.
    fn work(&self, host: Arc<dyn Host>) {
        if let Err(error) = sys::priority::yield_to_all_others() {
            tracing::warn!("free blocks are made at the usual priority: {error}");
        }
        let mut supplier = Supplier::new(host.clone(), HeldBlocks::new(host));
        while let Some(wanted) = self.next(supplier.pause(), supplier.is_holding()) {
            supplier.step(wanted.demand, wanted.rules);
            self.report.lock().clone_from(supplier.report());
        }
    }

    /// Waits for this time, and while there is no work, unless blocks are still held. `None` once it is over.
    fn next(&self, pause: Duration, is_holding: bool) -> Option<Orders> {
        let mut wanted = self.lock();
        self.changed.wait_while_for(&mut wanted, |wanted| !wanted.is_over, pause);
        let has_nothing_to_do = |wanted: &mut Orders| !wanted.is_over && !wanted.demand.has_work() && !is_holding;
        self.changed.wait_while(&mut wanted, has_nothing_to_do);
        (!wanted.is_over).then_some(*wanted)
    }
}

#[cfg(test)]
mod tests;
