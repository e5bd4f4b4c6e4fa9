//! Intel Xeon Scalable of the fourth and fifth generation (Sapphire Rapids, Emerald Rapids).

use super::ice_lake_sp::{ICE_LAKE_SP, SECOND, STORES};
use super::{CPUID, INTEL_TREE, REMEMBERED, array, cache, first_level, fully_associative};
use crate::machine::{Fill, Machine, TlbArray, TlbLevel, doubtful, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const CONFLICT: &str = "64 entries of 4 ways in CPUID, 96 in Intel's disclosures of Golden Cove";

/// The machine of this file. The last cache is that of a part with 56 cores.
pub(super) const SAPPHIRE_RAPIDS: Machine = Machine {
    name: "sapphire-rapids",
    title: "Intel Xeon Scalable, 4th and 5th generation (Sapphire, Emerald Rapids)",
    source: "CPUID dump; its 64 entries for 4 KiB loads contradict Intel's own disclosures",
    data_tlb: &[
        TlbLevel {
            store_arrays: STORES,
            ..first_level(&[
                TlbArray { pages: &[Base4K], array: array(doubtful(64, CONFLICT), doubtful(4, CONFLICT), INTEL_TREE) },
                TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(4, CPUID), INTEL_TREE) },
                TlbArray { pages: &[Giant1G], array: fully_associative(high(8, CPUID)) },
            ])
        },
        SECOND,
    ],
    instruction_tlb: INSTRUCTIONS,
    caches: CACHES,
    memory_cycles: unverified(300, REMEMBERED),
    ..ICE_LAKE_SP
};

/// 256 and 32 entries of eight ways.
pub(super) const INSTRUCTIONS: &[TlbLevel] = &[first_level(&[
    TlbArray { pages: &[Base4K], array: array(high(256, CPUID), high(8, CPUID), INTEL_TREE) },
    TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(8, CPUID), INTEL_TREE) },
])];

const CACHES: &[crate::machine::CacheLevel] = &[
    cache(unverified(48, REMEMBERED), unverified(12, REMEMBERED), super::L1_FILL, unverified(5, REMEMBERED)),
    cache(
        unverified(2048, REMEMBERED),
        unverified(16, REMEMBERED),
        super::FILLED_BY_MISSES,
        unverified(15, REMEMBERED),
    ),
    cache(
        unverified(105 * 1024, REMEMBERED),
        unverified(15, REMEMBERED),
        unverified(Fill::Victims, REMEMBERED),
        unverified(100, REMEMBERED),
    ),
];
