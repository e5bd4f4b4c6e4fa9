//! AMD EPYC 9004 (Zen 4, Genoa).

use super::zen3::ZEN3;
use super::{CPUID, LRU, REMEMBERED, array, cache, first_level, fully_associative};
use crate::machine::{Fill, Machine, TlbArray, doubtful, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const SYSFS: &str = "CPUID leaf 8000_001Dh as shown by Linux on a part of this family";

/// The machine of this file. The last cache is that of one core complex.
pub(super) const ZEN4: Machine = Machine {
    name: "zen4",
    title: "AMD EPYC 9004 (Zen 4, Genoa)",
    source: "CPUID dump for entries; all other numbers are Zen 2's",
    data_tlb: &[
        first_level(&[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(high(72, CPUID)) }]),
        super::second_level(
            &[
                TlbArray {
                    pages: &[Base4K, Huge2M],
                    array: array(high(3072, CPUID), doubtful(12, "sources differ, as for Zen 2"), LRU),
                },
                TlbArray { pages: &[Giant1G], array: fully_associative(high(64, CPUID)) },
            ],
            unverified(7, REMEMBERED),
        ),
    ],
    caches: &[
        cache(high(32, SYSFS), high(8, SYSFS), super::L1_FILL, unverified(4, REMEMBERED)),
        cache(high(1024, SYSFS), high(8, SYSFS), super::FILLED_BY_MISSES, unverified(14, REMEMBERED)),
        cache(
            high(32 * 1024, SYSFS),
            high(16, SYSFS),
            unverified(Fill::Victims, REMEMBERED),
            unverified(50, REMEMBERED),
        ),
    ],
    levels_max: high(5, "APM vol. 2, 5.3: 5-level paging"),
    ..ZEN3
};
