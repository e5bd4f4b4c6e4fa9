//! Intel Xeon Scalable of the first and second generation (Skylake-SP, Cascade Lake).

use super::{CPUID, INTEL_TREE, INTEL_WALK_CACHES, REMEMBERED, array, cache, first_level};
use crate::machine::{Fill, Machine, TlbArray, doubtful, high, low, medium, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const MANUAL: &str =
    "Intel's optimisation manual, table of Skylake's TLBs: 128 entries of 8 ways, 8 per thread for 2 MiB";

const REVIEW: &str = "AnandTech's reviews of Skylake-X and -SP (2017) and of the Xeon 8280 (2019)";

const L1: &str = "WikiChip, Skylake: 4 cycles for a simple address, 5 with an index, which the address of an entry has";

const L3: &str = "46 cycles in AnandTech's Xeon 8280 at 2.7 GHz, 54 to 56 in its Xeon 8176, from 50 in Intel's \
                  optimisation manual, from memory";

const MEMORY: &str = "81 ns on the own node, by Intel's Memory Latency Checker on Cascade Lake (gjbex, \
                      Code-optimization), at 2.1 GHz";

/// The machine of this file. The last cache is that of a part with 28 cores. Cycles are those of a core at 2.1 GHz,
/// the clock of the Xeon Gold 6252 without turbo.
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
        cache(high(32, REVIEW), high(8, REVIEW), super::L1_FILL, medium(5, L1)),
        cache(high(1024, REVIEW), high(16, REVIEW), super::FILLED_BY_MISSES, high(14, REVIEW)),
        cache(high(39_424, REVIEW), high(11, REVIEW), medium(Fill::Victims, REVIEW), low(50, L3)),
    ],
    second_cache_completes_pairs: super::SPATIAL_PREFETCHER,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: medium(170, MEMORY),
    levels_max: high(5, "4 in hardware (SDM vol. 3, 4.5); 5 are simulated for comparison"),
    threads: high(2, CPUID),
};
