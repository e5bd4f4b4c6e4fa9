//! The counters of the simulator. All of them are sums: two runs may be added, and a rate is a quotient
//! of two fields.

use super::purpose::Purpose;
use wideleaf_policies::units::PageSize;

/// Number of memory references by the level that served them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// By cache level, first level first.
    pub caches: [u64; 3],
    /// Served by memory.
    pub memory: u64,
    /// Served by an unknown level, because no lines are followed ([`Lines::None`](super::simulator::Lines::None)).
    pub unplaced: u64,
}

impl Served {
    /// Number of all references.
    pub fn total(&self) -> u64 {
        self.caches.iter().sum::<u64>() + self.memory + self.unplaced
    }

    /// Number of references that missed cache `level` (1 to 3), of those that looked into it. A level that walks
    /// skip never served them, so the sum is right for them too.
    pub fn missed(&self, level: usize) -> u64 {
        self.caches[level..].iter().sum::<u64>() + self.memory
    }
}

/// References of walks in one dimension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Number of entries that were read, by level.
    pub read: Served,
    /// Number of entries not read because a page-walk cache held a lower one. For the host's tables that find the
    /// guest's tables, also because the guest's walk cache held the table's host-physical address.
    pub skipped_by_walk_cache: u64,
    /// Number of entries not read because the nested TLB held the whole translation.
    pub skipped_by_nested_tlb: u64,
}

impl References {
    /// Number of references of a walk without any cache.
    pub fn cold(&self) -> u64 {
        self.read.total() + self.skipped_by_walk_cache + self.skipped_by_nested_tlb
    }
}

/// All counts since the simulator was made or its counts were reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of loads and stores.
    pub accesses: u64,
    /// Number of stores among them.
    pub writes: u64,
    /// Number of instruction fetches.
    pub fetches: u64,
    /// Number of loads and stores that hit a TLB, by its level.
    pub tlb_hits: [u64; 2],
    /// Number of fetches that hit a TLB, by its level.
    pub fetch_tlb_hits: [u64; 2],
    /// Number of loads and stores that hit no TLB, by the size of the resulting entry, smallest page first. Each
    /// is a walk.
    pub misses: [u64; 3],
    /// Number of fetches that hit no TLB, by the size of the resulting entry.
    pub fetch_misses: [u64; 3],
    /// References to the guest's tables, or to the native ones.
    pub guest: References,
    /// References to the host's tables that find the guest's tables.
    pub host_of_tables: References,
    /// References to the host's tables that find the page.
    pub host_of_data: References,
    /// Data lines of loads and stores, by the level that served them.
    pub data: Served,
    /// Cycles of walks: all their references, one after another, and
    /// [`Machine::walk_cycles`](super::machine::Machine::walk_cycles). Walks do not overlap with other work.
    pub cycles_of_walks: u64,
    /// Cycles of the references to the host's tables among them.
    pub cycles_of_host: u64,
    /// Cycles of hits in the second level of a TLB.
    pub cycles_of_tlb: u64,
    /// Number of entries that walks read from the memory of another node.
    pub remote_references: u64,
    /// Number of data lines of loads and stores from the memory of another node.
    pub remote_data: u64,
    /// Number of times that all entries of the TLBs and walk caches were dropped, by
    /// [`super::simulator::Simulator::remap_host`] or [`super::simulator::Simulator::flush`].
    pub flushes: u64,
}

impl Counts {
    /// Adds references that one cache or memory found, by purpose, and the cycles of each.
    pub(super) fn add_found(
        &mut self,
        found: [u64; Purpose::ALL],
        cycles: [u64; Purpose::ALL],
        at: impl Fn(&mut Served) -> &mut u64,
    ) {
        let [guest, host_of_tables, host_of_data, data] = found;
        *at(&mut self.guest.read) += guest;
        *at(&mut self.host_of_tables.read) += host_of_tables;
        *at(&mut self.host_of_data.read) += host_of_data;
        *at(&mut self.data) += data;
        let of_host = cycles[1] * host_of_tables + cycles[2] * host_of_data;
        self.cycles_of_walks += cycles[0] * guest + of_host;
        self.cycles_of_host += of_host;
    }

    /// Adds references that memory served, to those of another node where they are remote.
    pub(super) fn add_remote(&mut self, served: [u64; Purpose::ALL], is_remote: [bool; Purpose::ALL]) {
        let [guest, host_of_tables, host_of_data, data] =
            core::array::from_fn(|purpose| if is_remote[purpose] { served[purpose] } else { 0 });
        self.remote_references += guest + host_of_tables + host_of_data;
        self.remote_data += data;
    }

    /// Number of walks of loads, stores and fetches.
    pub fn walks(&self) -> u64 {
        self.misses.iter().chain(&self.fetch_misses).sum()
    }

    /// Number of loads and stores that hit no TLB.
    pub fn data_misses(&self) -> u64 {
        self.misses.iter().sum()
    }

    /// Number of loads and stores that hit no TLB and got an entry that covers `size`.
    pub fn misses_of(&self, size: PageSize) -> u64 {
        self.misses[size as usize]
    }

    /// Number of entries that walks read, in all dimensions.
    pub fn references(&self) -> u64 {
        self.guest.read.total() + self.host_of_tables.read.total() + self.host_of_data.read.total()
    }

    /// Share of the host's tables in the cycles of walks; 0 without walks.
    pub fn share_of_host(&self) -> f64 {
        self.cycles_of_host as f64 / self.cycles_of_walks.max(1) as f64
    }

    /// Number of entries that walks read and that missed cache `level` (1 to 3).
    pub fn references_missed(&self, level: usize) -> u64 {
        self.guest.read.missed(level) + self.host_of_tables.read.missed(level) + self.host_of_data.read.missed(level)
    }
}
