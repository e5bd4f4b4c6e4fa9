//! Intel Xeon 5100 (Woodcrest): two levels of TLB, both split by page size.

use super::{
    CPUID, FILLED_BY_MISSES, INTEL_WALK_CACHES, LRU, REMEMBERED, array, cache, first_level, fully_associative,
};
use crate::machine::{Machine, TlbArray, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Huge2M};

/// The machine of this file.
pub(super) const WOODCREST: Machine = Machine {
    name: "woodcrest",
    title: "Intel Xeon 5100 (Woodcrest)",
    source: "CPUID dump; its DTLB0 serves loads only, which is not modelled; no 1 GiB pages, no EPT: both are \
             simulated",
    data_tlb: &[
        first_level(&[
            TlbArray { pages: &[Base4K], array: fully_associative(high(16, CPUID)) },
            TlbArray { pages: &[Huge2M], array: fully_associative(high(16, CPUID)) },
        ]),
        super::second_level(
            &[
                TlbArray { pages: &[Base4K], array: array(high(256, CPUID), high(4, CPUID), LRU) },
                TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(4, CPUID), LRU) },
            ],
            unverified(2, REMEMBERED),
        ),
    ],
    instruction_tlb: &[first_level(&[
        TlbArray { pages: &[Base4K], array: array(unverified(128, REMEMBERED), unverified(4, REMEMBERED), LRU) },
        TlbArray { pages: &[Huge2M], array: array(unverified(8, REMEMBERED), unverified(4, REMEMBERED), LRU) },
    ])],
    second_level_is_shared: unverified(false, REMEMBERED),
    walk_caches: INTEL_WALK_CACHES,
    walk_caches_are_combined: super::COMBINED_BEFORE_EPT,
    second_level_holds_pdes: super::NO_PDES_IN_TLB,
    host_walk_caches: INTEL_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        cache(unverified(32, REMEMBERED), unverified(8, REMEMBERED), super::L1_FILL, unverified(3, REMEMBERED)),
        cache(unverified(4096, REMEMBERED), unverified(16, REMEMBERED), FILLED_BY_MISSES, unverified(14, REMEMBERED)),
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: unverified(300, REMEMBERED),
    levels_max: high(5, "4 in hardware (SDM vol. 3, 4.5); 5 are simulated for comparison"),
    threads: high(1, CPUID),
};
