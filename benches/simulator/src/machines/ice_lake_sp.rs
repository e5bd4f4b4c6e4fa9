//! Intel Xeon Scalable of the third generation (Ice Lake-SP): stores have their own TLB, and the second level
//! is two arrays.

use super::{CPUID, INTEL_TREE, INTEL_WALK_CACHES, REMEMBERED, array, cache, first_level, fully_associative};
use crate::machine::{Fill, Machine, TlbArray, TlbLevel, high, low, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

/// TLB of stores: any page size, one set.
pub(super) const STORES: &[TlbArray] =
    &[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(high(16, CPUID)) }];

/// 1024 entries for 4 KiB and 2 MiB pages, 1024 for 4 KiB and 1 GiB pages: 4 KiB pages may go to either.
pub(super) const SECOND: TlbLevel = super::second_level(
    &[
        TlbArray { pages: &[Base4K, Huge2M], array: array(high(1024, CPUID), high(8, CPUID), INTEL_TREE) },
        TlbArray { pages: &[Base4K, Giant1G], array: array(high(1024, CPUID), high(8, CPUID), INTEL_TREE) },
    ],
    unverified(9, REMEMBERED),
);

/// The machine of this file. The last cache is that of a part with 40 cores.
pub(super) const ICE_LAKE_SP: Machine = Machine {
    name: "ice-lake-sp",
    title: "Intel Xeon Scalable, 3rd generation (Ice Lake-SP)",
    source: "CPUID dump, which lacks walk caches and latencies",
    data_tlb: &[
        TlbLevel {
            store_arrays: STORES,
            ..first_level(&[
                TlbArray { pages: &[Base4K], array: array(high(64, CPUID), high(4, CPUID), INTEL_TREE) },
                TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(4, CPUID), INTEL_TREE) },
                TlbArray { pages: &[Giant1G], array: fully_associative(high(8, CPUID)) },
            ])
        },
        SECOND,
    ],
    instruction_tlb: &[first_level(&[
        TlbArray { pages: &[Base4K], array: array(unverified(128, REMEMBERED), unverified(8, REMEMBERED), INTEL_TREE) },
        TlbArray { pages: &[Huge2M], array: fully_associative(unverified(16, REMEMBERED)) },
    ])],
    second_level_is_shared: low(true, "Intel's optimisation manual lists one second level for both"),
    walk_caches: INTEL_WALK_CACHES,
    walk_caches_are_combined: super::COMBINED,
    second_level_holds_pdes: super::NO_PDES_IN_TLB,
    host_walk_caches: INTEL_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        cache(unverified(48, REMEMBERED), unverified(12, REMEMBERED), super::L1_FILL, unverified(5, REMEMBERED)),
        cache(
            unverified(1280, REMEMBERED),
            unverified(20, REMEMBERED),
            super::FILLED_BY_MISSES,
            unverified(14, REMEMBERED),
        ),
        cache(
            unverified(60 * 1024, REMEMBERED),
            unverified(12, REMEMBERED),
            unverified(Fill::Victims, REMEMBERED),
            unverified(70, REMEMBERED),
        ),
    ],
    second_cache_completes_pairs: super::SPATIAL_PREFETCHER,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: unverified(230, REMEMBERED),
    levels_max: high(5, "LA57: SDM vol. 3, 4.5"),
    threads: high(2, CPUID),
};
