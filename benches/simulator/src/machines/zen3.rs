//! AMD EPYC 7003 (Zen 3, Milan).

use super::zen2::ZEN2;
use super::{CPUID, LRU, REMEMBERED, array, cache, first_level, fully_associative};
use crate::machine::{Fill, Machine, TlbArray, doubtful, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

/// The machine of this file. The last cache is that of one core complex.
pub(super) const ZEN3: Machine = Machine {
    name: "zen3",
    title: "AMD EPYC 7003 (Zen 3, Milan)",
    source: "CPUID dump for entries; all other numbers are Zen 2's",
    data_tlb: &[
        first_level(&[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(high(64, CPUID)) }]),
        super::second_level(
            &[
                TlbArray {
                    pages: &[Base4K, Huge2M],
                    array: array(high(2048, CPUID), doubtful(8, "sources differ, as for Zen 2"), LRU),
                },
                TlbArray { pages: &[Giant1G], array: fully_associative(high(64, CPUID)) },
            ],
            unverified(7, REMEMBERED),
        ),
    ],
    caches: &[
        cache(unverified(32, REMEMBERED), unverified(8, REMEMBERED), super::L1_FILL, unverified(4, REMEMBERED)),
        cache(
            unverified(512, REMEMBERED),
            unverified(8, REMEMBERED),
            super::FILLED_BY_MISSES,
            unverified(12, REMEMBERED),
        ),
        cache(
            unverified(32 * 1024, REMEMBERED),
            unverified(16, REMEMBERED),
            unverified(Fill::Victims, REMEMBERED),
            unverified(46, REMEMBERED),
        ),
    ],
    ..ZEN2
};
