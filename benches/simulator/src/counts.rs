//! What the simulator counts. All of it is sums: two runs may be added, and a rate is a quotient of two fields.

use super::caches::Purpose;
use wideleaf_policies::units::PageSize;

/// Where memory references were served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// By cache level, first level first.
    pub caches: [u64; 3],
    /// By memory.
    pub memory: u64,
    /// By nobody knows which: no lines are followed ([`Lines::None`](super::simulator::Lines::None)).
    pub unplaced: u64,
}

impl Served {
    /// References in all.
    pub fn total(&self) -> u64 {
        self.caches.iter().sum::<u64>() + self.memory + self.unplaced
    }

    /// References that missed cache `level` (1 to 3), of those that looked into it. A level that walks skip never served
    /// them, so that the sum is right for them too.
    pub fn missed(&self, level: usize) -> u64 {
        self.caches[level..].iter().sum::<u64>() + self.memory
    }
}

/// References of walks in one dimension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Entries that were read, and where.
    pub read: Served,
    /// Entries that need not be read, because a page-walk cache held a lower one; of the host's, to find the guest's tables, also because
    /// the guest's walk cache said where in host-physical memory the table lies.
    pub skipped_by_walk_cache: u64,
    /// Entries that need not be read, because the nested TLB held the whole translation.
    pub skipped_by_nested_tlb: u64,
}

impl References {
    /// As many as a walk without any cache had made.
    pub fn cold(&self) -> u64 {
        self.read.total() + self.skipped_by_walk_cache + self.skipped_by_nested_tlb
    }
}

/// Everything counted since the simulator was made or its counts were reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Loads and stores.
    pub accesses: u64,
    /// Stores among them.
    pub writes: u64,
    /// Fetches.
    pub fetches: u64,
    /// Loads and stores that hit a TLB, by its level.
    pub tlb_hits: [u64; 2],
    /// Fetches that hit a TLB, by its level.
    pub fetch_tlb_hits: [u64; 2],
    /// Loads and stores that hit no TLB, by the size of the entry that came to be, smallest page first. Each is a walk.
    pub misses: [u64; 3],
    /// Fetches that hit no TLB, likewise.
    pub fetch_misses: [u64; 3],
    /// The guest's tables, or the only ones.
    pub guest: References,
    /// The host's tables, to find the guest's.
    pub host_of_tables: References,
    /// The host's tables, to find the page.
    pub host_of_data: References,
    /// Data lines of loads and stores, by where they were found.
    pub data: Served,
    /// Cycles of all references of walks, one after another: no walk overlaps with anything.
    pub cycles_of_walks: u64,
    /// Cycles of hits in the second level of a TLB.
    pub cycles_of_tlb: u64,
    /// Times that everything a TLB or walk cache held was dropped, by [`super::simulator::Simulator::remap_host`] or
    /// [`super::simulator::Simulator::flush`].
    pub flushes: u64,
}

impl Counts {
    /// Adds references that one cache found, by what they were for, and what each of them took.
    pub(super) fn add_found(&mut self, found: [u64; Purpose::ALL], cycles: u64, at: impl Fn(&mut Served) -> &mut u64) {
        let [guest, host_of_tables, host_of_data, data] = found;
        *at(&mut self.guest.read) += guest;
        *at(&mut self.host_of_tables.read) += host_of_tables;
        *at(&mut self.host_of_data.read) += host_of_data;
        *at(&mut self.data) += data;
        self.cycles_of_walks += cycles * (guest + host_of_tables + host_of_data);
    }

    /// Walks of loads, stores and fetches.
    pub fn walks(&self) -> u64 {
        self.misses.iter().chain(&self.fetch_misses).sum()
    }

    /// Loads and stores that hit no TLB.
    pub fn data_misses(&self) -> u64 {
        self.misses.iter().sum()
    }

    /// Loads and stores that hit no TLB and whose entry came to cover `size`.
    pub fn misses_of(&self, size: PageSize) -> u64 {
        self.misses[size as usize]
    }

    /// Entries that walks read, in all dimensions.
    pub fn references(&self) -> u64 {
        self.guest.read.total() + self.host_of_tables.read.total() + self.host_of_data.read.total()
    }

    /// Entries that walks read and that missed cache `level` (1 to 3).
    pub fn references_missed(&self, level: usize) -> u64 {
        self.guest.read.missed(level) + self.host_of_tables.read.missed(level) + self.host_of_data.read.missed(level)
    }
}
