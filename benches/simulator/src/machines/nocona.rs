//! Intel Xeon Nocona and Paxville, Pentium 4 Prescott: the first 64-bit Xeons.

use super::{CPUID, FILLED_BY_MISSES, INTEL_WALK_CACHES, REMEMBERED, cache, first_level, fully_associative};
use crate::machine::{Machine, TlbArray, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Huge2M};

const DESCRIPTOR: &str = "CPUID leaf 2, descriptor 5Bh: 64 entries for 4 KiB and 4 MiB (2 MiB) pages together";

/// The machine of this file.
pub(super) const NOCONA: Machine = Machine {
    name: "nocona",
    title: "Intel Xeon Nocona/Paxville, Pentium 4 Prescott",
    source: "CPUID dump; one TLB for both page sizes and no second level; it has no 1 GiB pages and no EPT: both are \
             simulated",
    data_tlb: &[first_level(&[TlbArray { pages: &[Base4K, Huge2M], array: fully_associative(high(64, DESCRIPTOR)) }])],
    instruction_tlb: &[first_level(&[TlbArray {
        pages: &[Base4K, Huge2M],
        array: fully_associative(high(64, CPUID)),
    }])],
    second_level_is_shared: high(false, "there is no second level"),
    walk_caches: INTEL_WALK_CACHES,
    walk_caches_are_combined: super::COMBINED_BEFORE_EPT,
    second_level_holds_pdes: super::NO_PDES_IN_TLB,
    host_walk_caches: INTEL_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        cache(unverified(16, REMEMBERED), unverified(8, REMEMBERED), super::L1_FILL, unverified(4, REMEMBERED)),
        cache(unverified(1024, REMEMBERED), unverified(8, REMEMBERED), FILLED_BY_MISSES, unverified(28, REMEMBERED)),
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: unverified(330, REMEMBERED),
    levels_max: high(5, "4 in hardware (SDM vol. 3, 4.5); 5 are simulated for comparison"),
    threads: high(2, CPUID),
};
