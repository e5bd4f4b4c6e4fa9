//! A processor as the simulator sees it: its TLBs, the caches of its page walks, the caches that table and data lines
//! share. Every number carries where it is from and how far to trust it.
//!
//! ```text
//!   address ─▶ TLB, level 1 ─miss─▶ level 2 ─miss─▶ walk ─▶ walk caches ─▶ tables' lines ─▶ L1 ─▶ L2 ─▶ L3 ─▶ memory
//!                                                     └─▶ nested TLB (host)                 ▲
//!   data line ────────────────────────────────────────────────────────────────────────────┘
//! ```

use wideleaf_policies::units::PageSize;

/// How far a number is to be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Confidence {
    /// The processor itself says so (CPUID), or its maker's manual and a measurement agree.
    High,
    /// One good source: a manual, or a published measurement.
    Medium,
    /// A measurement of a relative, or a source that says it in passing.
    Low,
    /// Sources contradict each other, or this one contradicts what is known of the part.
    Doubtful,
    /// No source was read; a placeholder that makes the model whole.
    Unverified,
}

impl Confidence {
    /// The word a table prints.
    pub const fn name(self) -> &'static str {
        match self {
            Confidence::High => "high",
            Confidence::Medium => "medium",
            Confidence::Low => "low",
            Confidence::Doubtful => "doubtful",
            Confidence::Unverified => "unverified",
        }
    }
}

/// A value with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known<T> {
    /// The value.
    pub value: T,
    /// How far to trust it.
    pub confidence: Confidence,
    /// Where it is from.
    pub source: &'static str,
}

/// A count of entries, ways, KiB, levels or cycles, with its source.
pub type Number = Known<u32>;

/// A value and its source, of high confidence.
pub const fn high<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::High, source }
}

/// A value and its source, of medium confidence.
pub const fn medium<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::Medium, source }
}

/// A value and its source, of low confidence.
pub const fn low<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::Low, source }
}

/// A value that is doubtful, and why.
pub const fn doubtful<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::Doubtful, source }
}

/// A value nobody vouches for, and where the idea is from.
pub const fn unverified<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::Unverified, source }
}

/// Which entry of a set makes room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// The one used longest ago.
    Lru,
    /// A binary tree of bits points away from what was used; where the ways are no power of two, the odd factor counts
    /// groups, which are taken in turn after the one used last.
    TreePlru,
    /// Any, by a generator that is seeded for the whole simulator.
    Random,
}

/// What fills a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Each miss that passes through it. Copies above and below are independent: nothing is invalidated upwards.
    OnMiss,
    /// Only what the level above evicts; a hit moves the entry up (an exclusive level).
    Victims,
}

/// An associative array: a TLB, a walk cache, or a cache of lines.
#[derive(Clone, Copy, Debug)]
pub struct Array {
    /// Entries in all.
    pub entries: Number,
    /// Entries a set; as many as `entries` where the array is fully associative.
    pub ways: Number,
    /// Which entry makes room.
    pub replacement: Known<Replacement>,
}

/// An array of a TLB and the page sizes it holds. A 4 KiB page that two arrays of a level hold goes to either, by one bit of
/// its number.
#[derive(Clone, Copy, Debug)]
pub struct TlbArray {
    /// The sizes of its entries.
    pub pages: &'static [PageSize],
    /// Its shape.
    pub array: Array,
}

/// A level of a TLB.
#[derive(Clone, Copy, Debug)]
pub struct TlbLevel {
    /// For loads and fetches.
    pub arrays: &'static [TlbArray],
    /// For stores; empty where the same serve both.
    pub store_arrays: &'static [TlbArray],
    /// Sizes it keeps in pieces of the next smaller size ("smashed"). In the first level that goes without saying for what
    /// no array holds.
    pub smashed: &'static [PageSize],
    /// What fills it.
    pub fill: Known<Fill>,
    /// Cycles that a hit costs beyond one in the first level.
    pub cycles: Number,
}

/// A page-walk cache (paging-structure cache): entries that are not leaves, found by the address they translate.
#[derive(Clone, Copy, Debug)]
pub struct WalkCache {
    /// The levels of table whose entries it holds: 2 for the PDE that points to a table of PTEs, up to 5.
    pub levels: &'static [u8],
    /// Its shape.
    pub array: Array,
}

/// A level of the caches that table and data lines (64 bytes) share.
#[derive(Clone, Copy, Debug)]
pub struct CacheLevel {
    /// Lines in all, ways, replacement.
    pub array: Array,
    /// What fills it.
    pub fill: Known<Fill>,
    /// Cycles from load to use of a hit.
    pub cycles: Number,
}

/// A processor, as one of its threads sees it.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// The name one types: `skylake-sp`.
    pub name: &'static str,
    /// What it is, in words.
    pub title: &'static str,
    /// Where most of its numbers are from, and what is odd about them.
    pub source: &'static str,
    /// The TLB of loads and stores, first level first. At least one level, at most two.
    pub data_tlb: &'static [TlbLevel],
    /// The TLB of fetches.
    pub instruction_tlb: &'static [TlbLevel],
    /// Whether fetches that miss their first level look into the second level of `data_tlb`.
    pub second_level_is_shared: Known<bool>,
    /// Page-walk caches of the guest's tables, or of the only ones.
    pub walk_caches: &'static [WalkCache],
    /// Whether these say where the guest's tables lie in host-physical memory, so that the host need not find the table that a walk
    /// reads first. Else they say it in guest-physical memory.
    pub walk_caches_are_combined: Known<bool>,
    /// Whether the PDEs that point to tables of PTEs are held by the second level of the TLB, among its 4 KiB pages.
    pub second_level_holds_pdes: Known<bool>,
    /// Page-walk caches of the host's tables.
    pub host_walk_caches: &'static [WalkCache],
    /// Guest-physical pages to host-physical ones, whole.
    pub nested_tlb: Option<Array>,
    /// The caches, first level first. At most three.
    pub caches: &'static [CacheLevel],
    /// The cache that walks look into first: 1 or 2.
    pub walks_read_from: Number,
    /// Cycles from load to use where no cache has the line.
    pub memory_cycles: Number,
    /// Levels of paging it can walk.
    pub levels_max: Number,
    /// Threads of a core, which share all of the above but the last cache.
    pub threads: Number,
}

/// The machine of that name.
pub fn machine(name: &str) -> Option<&'static Machine> {
    machines().iter().find(|machine| machine.name == name)
}

/// All machines, oldest first.
pub fn machines() -> &'static [Machine] {
    super::machines::ALL
}
