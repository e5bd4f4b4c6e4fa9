//! Intel Xeon Scalable of the first and second generation (Skylake-SP, Cascade Lake).

use super::{CPUID, INTEL_TREE, INTEL_WALK_CACHES, REMEMBERED, array, cache, first_level};
use crate::machine::{Fill, Machine, TlbArray, doubtful, high, low, medium, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const MANUAL: &str =
    "Intel's optimisation manual, table of Skylake's TLBs: 128 entries of 8 ways, 8 per thread for 2 MiB";

/// The machine of this file. The last cache is that of a part with 28 cores.
pub(super) const SKYLAKE_SP: Machine = Machine {
    name: "skylake-sp",
    title: "Intel Xeon Scalable (Skylake-SP)",
    source: "CPUID dump, which lacks walk caches and latencies",
    data_tlb: &[
        first_level(&[
            TlbArray { pages: &[Base4K], array: array(high(64, CPUID), high(4, CPUID), INTEL_TREE) },
            TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(4, CPUID), INTEL_TREE) },
            TlbArray { pages: &[Giant1G], array: array(high(4, CPUID), high(4, CPUID), INTEL_TREE) },
        ]),
        super::second_level(
            &[
                TlbArray {
                    pages: &[Base4K, Huge2M],
                    array: array(
                        high(1536, CPUID),
                        doubtful(12, "12 in Intel's optimisation manual, 6 in CPUID descriptor C3h"),
                        INTEL_TREE,
                    ),
                },
                TlbArray { pages: &[Giant1G], array: array(high(16, CPUID), high(4, CPUID), INTEL_TREE) },
            ],
            unverified(9, REMEMBERED),
        ),
    ],
    instruction_tlb: &[first_level(&[
        TlbArray { pages: &[Base4K], array: array(medium(128, MANUAL), medium(8, MANUAL), INTEL_TREE) },
        TlbArray { pages: &[Huge2M], array: super::fully_associative(medium(8, MANUAL)) },
    ])],
    second_level_is_shared: low(true, "Intel's optimisation manual lists one second level for both"),
    walk_caches: INTEL_WALK_CACHES,
    walk_caches_are_combined: super::COMBINED,
    second_level_holds_pdes: super::NO_PDES_IN_TLB,
    host_walk_caches: INTEL_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        cache(unverified(32, REMEMBERED), unverified(8, REMEMBERED), super::L1_FILL, unverified(4, REMEMBERED)),
        cache(
            unverified(1024, REMEMBERED),
            unverified(16, REMEMBERED),
            super::FILLED_BY_MISSES,
            unverified(14, REMEMBERED),
        ),
        cache(
            unverified(39_424, REMEMBERED),
            unverified(11, REMEMBERED),
            unverified(Fill::Victims, REMEMBERED),
            unverified(70, REMEMBERED),
        ),
    ],
    second_cache_completes_pairs: super::SPATIAL_PREFETCHER,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: unverified(220, REMEMBERED),
    levels_max: high(5, "4 in hardware (SDM vol. 3, 4.5); 5 are simulated for comparison"),
    threads: high(2, CPUID),
};
