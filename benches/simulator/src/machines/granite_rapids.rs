//! Intel Xeon 6 with performance cores (Granite Rapids).

use super::ice_lake_sp::{SECOND, STORES};
use super::sapphire_rapids::SAPPHIRE_RAPIDS;
use super::{CPUID, INTEL_TREE, REMEMBERED, array, cache, first_level, fully_associative};
use crate::machine::{CacheLevel, Fill, Machine, TlbArray, TlbLevel, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

/// The machine of this file. The last cache is that of a part with 128 cores.
pub(super) const GRANITE_RAPIDS: Machine = Machine {
    name: "granite-rapids",
    title: "Intel Xeon 6 (Granite Rapids)",
    source: "CPUID dump, which lacks walk caches and latencies",
    data_tlb: &[
        TlbLevel {
            store_arrays: STORES,
            ..first_level(&[
                TlbArray { pages: &[Base4K], array: array(high(96, CPUID), high(6, CPUID), INTEL_TREE) },
                TlbArray { pages: &[Huge2M], array: array(high(32, CPUID), high(4, CPUID), INTEL_TREE) },
                TlbArray { pages: &[Giant1G], array: fully_associative(high(8, CPUID)) },
            ])
        },
        SECOND,
    ],
    caches: CACHES,
    ..SAPPHIRE_RAPIDS
};

const CACHES: &[CacheLevel] = &[
    cache(unverified(48, REMEMBERED), unverified(12, REMEMBERED), super::L1_FILL, unverified(5, REMEMBERED)),
    cache(
        unverified(2048, REMEMBERED),
        unverified(16, REMEMBERED),
        super::FILLED_BY_MISSES,
        unverified(15, REMEMBERED),
    ),
    cache(
        unverified(504 * 1024, REMEMBERED),
        unverified(16, REMEMBERED),
        unverified(Fill::Victims, REMEMBERED),
        unverified(110, REMEMBERED),
    ),
];
