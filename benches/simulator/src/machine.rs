//! A processor in the simulator: its TLBs, the caches of its page walks, and the caches that table and data lines
//! share. Every number carries its source and its confidence.
//!
//! ```text
//!   address ─▶ TLB, level 1 ─miss─▶ level 2 ─miss─▶ walk ─▶ walk caches ─▶ tables' lines ─▶ L1 ─▶ L2 ─▶ L3 ─▶ memory
//!                                                     └─▶ nested TLB (host)                 ▲
//!   data line ────────────────────────────────────────────────────────────────────────────┘
//! ```

use wideleaf_policies::units::PageSize;

/// Confidence in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Confidence {
    /// The processor reports it (CPUID), or its maker's manual and a measurement agree.
    High,
    /// One good source: a manual, or a published measurement.
    Medium,
    /// A measurement of a related processor, or a source that mentions it in passing.
    Low,
    /// Sources contradict each other, or this one contradicts other knowledge of the part.
    Doubtful,
    /// No source was read; a placeholder that completes the model.
    Unverified,
}

impl Confidence {
    /// The word that tables print.
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
    /// The value itself.
    pub value: T,
    /// Confidence in the value.
    pub confidence: Confidence,
    /// Source of the value.
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

/// A doubtful value, and the reason.
pub const fn doubtful<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::Doubtful, source }
}

/// A value without a verified source, and the origin of the idea.
pub const fn unverified<T: Copy>(value: T, source: &'static str) -> Known<T> {
    Known { value, confidence: Confidence::Unverified, source }
}

/// Rule that selects the entry of a set to replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// The entry used longest ago.
    Lru,
    /// A binary tree of bits points away from the used entry. If the number of ways is not a power of two, the odd
    /// factor counts groups, which are taken in turn after the one used last.
    TreePlru,
    /// A random entry, by a generator that is seeded for the whole simulator.
    Random,
}

/// Events that fill a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Each miss that passes through it. Copies above and below are independent: no copy above is invalidated.
    OnMiss,
    /// Only entries that the level above evicts; a hit moves the entry up (an exclusive level).
    Victims,
}

/// An associative array: a TLB, a walk cache, or a cache of lines.
#[derive(Clone, Copy, Debug)]
pub struct Array {
    /// Number of all entries.
    pub entries: Number,
    /// Number of entries in a set; equal to `entries` if the array is fully associative.
    pub ways: Number,
    /// Rule that selects the entry to replace.
    pub replacement: Known<Replacement>,
}

/// An array of a TLB and the page sizes it holds. A 4 KiB page that two arrays of a level hold goes to one of them,
/// by one bit of its number.
#[derive(Clone, Copy, Debug)]
pub struct TlbArray {
    /// Page sizes of its entries.
    pub pages: &'static [PageSize],
    /// Shape of the array.
    pub array: Array,
}

/// A level of a TLB.
#[derive(Clone, Copy, Debug)]
pub struct TlbLevel {
    /// Arrays for loads and fetches.
    pub arrays: &'static [TlbArray],
    /// Arrays for stores; empty if the same arrays serve both.
    pub store_arrays: &'static [TlbArray],
    /// Page sizes it stores in pieces of the next smaller size ("smashed"). The first level always does so for
    /// sizes that no array holds. A second level that holds the whole page gets it whole.
    pub smashed: &'static [PageSize],
    /// Events that fill it.
    pub fill: Known<Fill>,
    /// Cycles that a hit costs beyond one in the first level.
    pub cycles: Number,
}

/// A page-walk cache (paging-structure cache): non-leaf entries, found by the address that they translate.
#[derive(Clone, Copy, Debug)]
pub struct WalkCache {
    /// Table levels of the entries that it holds: 2 for the PDE that points to a table of PTEs, up to 5.
    pub levels: &'static [u8],
    /// Shape of the array.
    pub array: Array,
}

/// A level of the caches that table and data lines (64 bytes) share.
#[derive(Clone, Copy, Debug)]
pub struct CacheLevel {
    /// Number of lines, ways, replacement.
    pub array: Array,
    /// Events that fill it.
    pub fill: Known<Fill>,
    /// Cycles from load to use of a hit.
    pub cycles: Number,
}

/// A processor, as one of its threads sees it.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Name to select it by: `skylake-sp`.
    pub name: &'static str,
    /// Description in words.
    pub title: &'static str,
    /// Source of most of its numbers, and its peculiarities.
    pub source: &'static str,
    /// TLB of loads and stores, first level first. At least one level, at most two.
    pub data_tlb: &'static [TlbLevel],
    /// TLB of instruction fetches.
    pub instruction_tlb: &'static [TlbLevel],
    /// Whether fetches that miss their first level look into the second level of `data_tlb`.
    pub second_level_is_shared: Known<bool>,
    /// Page-walk caches of the guest's tables, or of the native ones.
    pub walk_caches: &'static [WalkCache],
    /// Whether these store the host-physical addresses of the guest's tables, so that the host need not find the
    /// table that a walk reads first. Otherwise they store guest-physical addresses.
    pub walk_caches_are_combined: Known<bool>,
    /// Whether the second level of the TLB holds the PDEs that point to tables of PTEs, among its 4 KiB pages.
    pub second_level_holds_pdes: Known<bool>,
    /// Page-walk caches of the host's tables.
    pub host_walk_caches: &'static [WalkCache],
    /// The nested TLB: translations of whole guest-physical pages to host-physical ones.
    pub nested_tlb: Option<Array>,
    /// Caches of lines, first level first. At most three.
    pub caches: &'static [CacheLevel],
    /// Whether a line that comes into the second cache brings the other line of its 128 aligned bytes with it.
    pub second_cache_completes_pairs: Known<bool>,
    /// First cache that walks read: 1 or 2.
    pub walks_read_from: Number,
    /// Cycles that a walk keeps its handler busy besides its reads: from the miss to the first read, and from the
    /// last read to the entry in the TLB.
    pub walk_cycles: Number,
    /// Cycles from load to use if no cache has the line.
    pub memory_cycles: Number,
    /// Number of paging levels that it can walk.
    pub levels_max: Number,
    /// Number of threads of a core, which share all of the above except the last cache.
    pub threads: Number,
}
