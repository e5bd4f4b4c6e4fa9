//! Intel Xeon E5 v3 (Haswell-EP).

use super::{CPUID, INTEL_TREE, INTEL_WALK_CACHES, REMEMBERED, array, cache, first_level};
use crate::machine::{Fill, Machine, TlbArray, high, low, medium, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const REVIEW: &str = "a review of the E5-2600 v3: 15 to 20 ns for 30 MB, 60 cycles";

/// The machine of this file. The last cache is that of a part with twelve cores.
pub(super) const HASWELL_EP: Machine = Machine {
    name: "haswell-ep",
    title: "Intel Xeon E5 v3 (Haswell-EP)",
    source: "CPUID dump, which lacks walk caches and latencies",
    data_tlb: &[
        first_level(&[
            TlbArray { pages: &[Base4K], array: array(high(64, CPUID), high(4, CPUID), INTEL_TREE) },
            TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(4, CPUID), INTEL_TREE) },
            TlbArray { pages: &[Giant1G], array: array(high(4, CPUID), high(4, CPUID), INTEL_TREE) },
        ]),
        super::second_level(
            &[TlbArray { pages: &[Base4K, Huge2M], array: array(high(1024, CPUID), high(8, CPUID), INTEL_TREE) }],
            low(12, "a review"),
        ),
    ],
    instruction_tlb: &[first_level(&[
        TlbArray { pages: &[Base4K], array: array(unverified(128, REMEMBERED), unverified(4, REMEMBERED), INTEL_TREE) },
        TlbArray { pages: &[Huge2M], array: super::fully_associative(unverified(8, REMEMBERED)) },
    ])],
    second_level_is_shared: medium(true, "CPUID leaf 2, descriptor C1h: shared by data and instructions"),
    walk_caches: INTEL_WALK_CACHES,
    walk_caches_are_combined: super::COMBINED,
    second_level_holds_pdes: super::NO_PDES_IN_TLB,
    host_walk_caches: INTEL_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        cache(unverified(32, REMEMBERED), unverified(8, REMEMBERED), super::L1_FILL, unverified(4, REMEMBERED)),
        cache(
            unverified(256, REMEMBERED),
            unverified(8, REMEMBERED),
            super::FILLED_BY_MISSES,
            unverified(12, REMEMBERED),
        ),
        cache(
            low(30 * 1024, REVIEW),
            unverified(20, REMEMBERED),
            unverified(Fill::OnMiss, REMEMBERED),
            low(60, REVIEW),
        ),
    ],
    second_cache_completes_pairs: super::SPATIAL_PREFETCHER,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: unverified(230, REMEMBERED),
    levels_max: high(5, "4 in hardware (SDM vol. 3, 4.5); 5 are simulated for comparison"),
    threads: high(2, CPUID),
};
