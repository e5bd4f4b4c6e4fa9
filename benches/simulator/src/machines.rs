//! The machines that the simulator knows, one file each. To add one, add a file and an entry of the list.
//!
//! Counts of TLB entries come from CPUID dumps and are mostly reliable. Page-walk caches and replacement are hardly
//! documented, and mostly unreliable. `Confidence` marks this number by number. `tests/hermetic/walk_machines.rs`
//! compares the entries with `tests/data/tlb_geometry.csv`.

use super::machine::{
    Array, CacheLevel, Fill, Known, Machine, Number, Replacement, TlbArray, TlbLevel, WalkCache, high, low, medium,
    unverified,
};

mod a64fx;
mod granite_rapids;
mod haswell_ep;
mod ice_lake_sp;
mod k8;
mod madison;
mod nocona;
mod openmp_opteron;
mod openmp_xeon;
mod sapphire_rapids;
mod skylake_sp;
mod woodcrest;
mod yonah;
mod zen2;
mod zen3;
mod zen4;

static ALL: &[Machine] = &[
    madison::MADISON,
    k8::K8,
    openmp_opteron::OPENMP_OPTERON,
    nocona::NOCONA,
    openmp_xeon::OPENMP_XEON,
    yonah::YONAH,
    woodcrest::WOODCREST,
    haswell_ep::HASWELL_EP,
    skylake_sp::SKYLAKE_SP,
    zen2::ZEN2,
    a64fx::A64FX,
    zen3::ZEN3,
    ice_lake_sp::ICE_LAKE_SP,
    zen4::ZEN4,
    sapphire_rapids::SAPPHIRE_RAPIDS,
    granite_rapids::GRANITE_RAPIDS,
];

/// The machine with that name.
pub fn machine(name: &str) -> Option<&'static Machine> {
    machines().iter().find(|machine| machine.name == name)
}

/// All machines, oldest first.
pub fn machines() -> &'static [Machine] {
    ALL
}

/// Source of numbers that were not looked up.
const REMEMBERED: &str = "from memory; no document was read for it";

/// Source: a raw CPUID dump of the part, as published by InstLatx64.
const CPUID: &str = "CPUID dump (InstLatx64)";

const LRU: Known<Replacement> = unverified(Replacement::Lru, "not documented; true LRU stands in for it");

/// Replacement in Intel's TLBs since Nehalem: binary trees, and three groups of four in turn for twelve ways.
const INTEL_TREE: Known<Replacement> = low(
    Replacement::TreePlru,
    "Tatar et al., TLB;DR, USENIX Security '22, from memory: trees of bits, (MRU+1)%3 groups of 12 ways",
);

const FILLED_BY_MISSES: Known<Fill> = low(Fill::OnMiss, "assumed: a walk fills both levels");

const fn array(entries: Number, ways: Number, replacement: Known<Replacement>) -> Array {
    Array { entries, ways, replacement }
}

/// An array with one set.
const fn fully_associative(entries: Number) -> Array {
    Array { entries, ways: entries, replacement: LRU }
}

/// A cache of 64-byte lines.
const fn cache(kib: Number, ways: Number, fill: Known<Fill>, cycles: Number) -> CacheLevel {
    let entries = Known { value: kib.value * 16, ..kib };
    CacheLevel { array: array(entries, ways, LRU), fill, cycles }
}

/// A first level that loads and stores share.
const fn first_level(arrays: &'static [TlbArray]) -> TlbLevel {
    TlbLevel {
        arrays,
        store_arrays: &[],
        smashed: &[],
        fill: FILLED_BY_MISSES,
        cycles: high(0, "the cost of a hit in the first level is part of the load"),
    }
}

/// A second level that every walk fills.
const fn second_level(arrays: &'static [TlbArray], cycles: Number) -> TlbLevel {
    TlbLevel { arrays, store_arrays: &[], smashed: &[], fill: FILLED_BY_MISSES, cycles }
}

const REVANC: &str = "van Schaik et al., RevAnC, EuroSec '17, from memory: 24 to 32 PDEs, 4 PDPTEs, 1 to 4 PML4Es in \
                      Skylake and its relatives";

/// Intel documents caches of PML4Es, PDPTEs and PDEs (SDM vol. 3, 4.10.3), but not their sizes. For the entries of
/// EPT tables nothing is known, so the same shape is assumed.
const INTEL_WALK_CACHES: &[WalkCache] = &[
    WalkCache { levels: &[2], array: array(unverified(32, REVANC), unverified(4, REVANC), LRU) },
    WalkCache { levels: &[3], array: fully_associative(unverified(4, REVANC)) },
    WalkCache { levels: &[4, 5], array: fully_associative(unverified(2, REVANC)) },
];

const ZEN_WALK_CACHE: &str =
    "AMD's software optimisation guides name a cache of PML4Es and PDPEs; 64 entries from memory";

/// Walk caches of Zen beside the second level of its TLB, which holds the PDEs.
const ZEN_WALK_CACHES: &[WalkCache] =
    &[WalkCache { levels: &[3, 4, 5], array: fully_associative(unverified(64, ZEN_WALK_CACHE)) }];

const BHARGAVA: &str =
    "Bhargava et al., ASPLOS '08, from memory: the baseline's page walk cache of 24 and nested TLB of 16 entries";

/// Host walk caches under nested paging on AMD, from the newest publication.
const AMD_HOST_WALK_CACHES: &[WalkCache] =
    &[WalkCache { levels: &[2, 3, 4, 5], array: fully_associative(low(24, BHARGAVA)) }];

const AMD_NESTED_TLB: Option<Array> = Some(fully_associative(low(16, BHARGAVA)));

/// Whether the TLB holds PDEs: they have their own caches.
const NO_PDES_IN_TLB: Known<bool> = low(false, "SDM vol. 3, 4.10.3 describes them apart from the TLBs");

/// Intel's name is "combined paging-structure-cache entries"; the manual allows them, but does not say which
/// processors have them.
const COMBINED: Known<bool> = medium(
    true,
    "SDM vol. 3, 29.4.1: with EPT they map linear addresses to the physical address of the paging structure",
);

/// These parts predate nested paging by years; it is simulated as Intel built it later.
const COMBINED_BEFORE_EPT: Known<bool> = unverified(true, "it has no EPT; assumed as in its successors");

const GUEST_PHYSICAL: Known<bool> = low(false, BHARGAVA);

const WALKS_READ_L1: Number = low(1, "walks are loads that go through the L1 data cache, as far as known");

/// 7-cpu.com measures misses of independent loads on Sandy Bridge, which has one handler: one of 20 cycles on 2 MiB
/// pages (its second level holds none), of 21 on 4 KiB pages. Each such walk reads one entry from the L1 (4 cycles).
/// On Westmere it is 28 cycles with a read of 4.
const INTEL_WALK_CYCLES: Number = low(
    16,
    "7-cpu.com, Sandy Bridge: misses in parallel take its one handler 20 (2 MiB) and 21 cycles (4 KiB), of which the \
     read from L1 is 4",
);

/// Cycles of reads alone.
const NO_WALK_CYCLES: Number = unverified(0, "no measurement was found: only the reads are counted");

/// It can be switched off (MSR 1A4h, bit 1), which firmware by default does not do.
const SPATIAL_PREFETCHER: Known<bool> = medium(
    true,
    "Intel's optimisation manual, from Sandy Bridge on: the spatial prefetcher completes every line fetched to the L2 \
     to an aligned pair",
);

const NO_PAIRS_KNOWN: Known<bool> = unverified(false, "no document was found that names such a prefetcher");

const L1_FILL: Known<Fill> = high(Fill::OnMiss, "as every first level");
