//! AMD EPYC 7002 (Zen 2, Rome): a first level for all sizes, a second without 1 GiB pages.

use super::{
    AMD_HOST_WALK_CACHES, AMD_NESTED_TLB, CPUID, LRU, REMEMBERED, ZEN_WALK_CACHES, array, cache, first_level,
    fully_associative,
};
use crate::machine::{Fill, Machine, TlbArray, TlbLevel, doubtful, high, medium, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const SEVEN_CPU: &str = "7-cpu.com, Zen 2";
const GUIDE: &str =
    "AMD's software optimisation guide for family 17h: PDEs are held by the L2 TLB, 1 GiB pages as 2 MiB pages";

/// The machine of this file. The last cache is that of one core complex.
pub(super) const ZEN2: Machine = Machine {
    name: "zen2",
    title: "AMD EPYC 7002 (Zen 2, Rome)",
    source: "CPUID dump and AMD's optimisation guide; sources differ on the second level's ways",
    data_tlb: &[
        first_level(&[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(high(64, CPUID)) }]),
        TlbLevel {
            smashed: &[Giant1G],
            ..super::second_level(
                &[TlbArray {
                    pages: &[Base4K, Huge2M],
                    array: array(
                        high(2048, CPUID),
                        doubtful(8, "12 in WikiChip (which does not divide 2048), 8 and 4 in CPUID"),
                        LRU,
                    ),
                }],
                unverified(7, REMEMBERED),
            )
        },
    ],
    instruction_tlb: INSTRUCTIONS,
    second_level_is_shared: medium(false, SEVEN_CPU),
    walk_caches: ZEN_WALK_CACHES,
    walk_caches_are_combined: super::GUEST_PHYSICAL,
    second_level_holds_pdes: medium(true, GUIDE),
    host_walk_caches: AMD_HOST_WALK_CACHES,
    nested_tlb: AMD_NESTED_TLB,
    caches: &[
        cache(medium(32, SEVEN_CPU), medium(8, SEVEN_CPU), super::L1_FILL, unverified(4, REMEMBERED)),
        cache(medium(512, SEVEN_CPU), medium(8, SEVEN_CPU), super::FILLED_BY_MISSES, unverified(12, REMEMBERED)),
        cache(
            medium(16 * 1024, SEVEN_CPU),
            medium(16, SEVEN_CPU),
            medium(Fill::Victims, SEVEN_CPU),
            unverified(39, REMEMBERED),
        ),
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::NO_WALK_CYCLES,
    memory_cycles: unverified(300, REMEMBERED),
    levels_max: high(5, "4 in hardware; 5 are simulated for comparison"),
    threads: high(2, CPUID),
};

/// 64 entries for all sizes, then 512 of eight ways in which 1 GiB pages are 2 MiB pages.
pub(super) const INSTRUCTIONS: &[TlbLevel] = &[
    first_level(&[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(medium(64, SEVEN_CPU)) }]),
    TlbLevel {
        smashed: &[Giant1G],
        ..super::second_level(
            &[TlbArray { pages: &[Base4K, Huge2M], array: array(medium(512, SEVEN_CPU), medium(8, SEVEN_CPU), LRU) }],
            unverified(7, REMEMBERED),
        )
    },
];
