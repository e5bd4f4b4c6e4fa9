//! AMD Opteron 270, 275, 875 (K8, revision E): the machine of the FreeBSD and OpenMP superpage measurements.

use super::{AMD_HOST_WALK_CACHES, BHARGAVA, CPUID, array, fully_associative};
use crate::machine::{
    CacheLevel, Fill, Machine, Replacement, TlbArray, TlbLevel, WalkCache, high, low, medium, unverified,
};
use wideleaf_policies::units::PageSize::{Base4K, Huge2M};

const HENNESSY: &str = "Hennessy and Patterson, Computer Architecture, 4th ed., 5.6: the Opteron's memory hierarchy";
const RIGHTMARK: &str =
    "RightMark Memory Analyzer on Opteron 244 (iXBT, 2004): the bend is at L1 + L2, which means exclusive filling";
const EVENTS: &str = "BKDG 26094, events 7Eh and 7Fh, as in pmc.k8(3): the L2 counts TLB reloads and fills of the data \
                      cache separately, and is written by victims of the L1s and by table walks";
const REACH: &str = "the FreeBSD measurements' reach is 32 + 512 pages, which means exclusive filling; it changes \
                     the reach by 6 %, and every result by less than 2 %";

/// The machine of this file.
pub(super) const K8: Machine = Machine {
    name: "k8",
    title: "AMD Opteron 270/275/875 (K8 rev. E)",
    source: "CPUID dump, Hennessy and Patterson, BKDG 26094; it has no 1 GiB pages and no nested paging: both are \
             simulated",
    data_tlb: TLB,
    instruction_tlb: TLB,
    second_level_is_shared: high(false, CPUID),
    walk_caches: &[WalkCache { levels: &[2, 3, 4], array: fully_associative(low(24, BHARGAVA)) }],
    walk_caches_are_combined: super::GUEST_PHYSICAL,
    second_level_holds_pdes: low(false, BHARGAVA),
    host_walk_caches: AMD_HOST_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        CacheLevel {
            array: array(high(64 * 16, CPUID), high(2, HENNESSY), high(Replacement::Lru, HENNESSY)),
            fill: high(Fill::OnMiss, HENNESSY),
            cycles: unverified(3, super::REMEMBERED),
        },
        CacheLevel {
            array: array(
                high(1024 * 16, CPUID),
                high(16, HENNESSY),
                medium(
                    Replacement::Lru,
                    "Hennessy and Patterson 5.6: LRU over eight pairs, either of the pair; true LRU replaces it",
                ),
            ),
            fill: high(Fill::Victims, RIGHTMARK),
            cycles: unverified(13, super::REMEMBERED),
        },
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: medium(2, EVENTS),
    walk_cycles: super::NO_WALK_CYCLES,
    memory_cycles: low(
        124,
        "GUPS with superpages, 2^27: 56.8 ns an update at 2.2 GHz, which is nearly one miss of a data line",
    ),
    levels_max: medium(5, "4 in hardware (APM vol. 2, 5.3); 5 are simulated for comparison"),
    threads: high(1, CPUID),
};

const TLB: &[TlbLevel] = &[
    super::first_level(&[
        TlbArray { pages: &[Base4K], array: fully_associative(high(32, CPUID)) },
        TlbArray { pages: &[Huge2M], array: fully_associative(high(8, CPUID)) },
    ]),
    TlbLevel {
        fill: low(Fill::Victims, REACH),
        ..super::second_level(
            &[TlbArray { pages: &[Base4K], array: array(high(512, CPUID), high(4, CPUID), super::LRU) }],
            unverified(5, super::REMEMBERED),
        )
    },
];
