//! Intel Itanium 2 (Madison): no radix tables, but a hashed table that a walk reads once.

use super::{FILLED_BY_MISSES, LRU, REMEMBERED, cache, first_level, fully_associative};
use crate::machine::{Fill, Machine, TlbArray, TlbLevel, WalkCache, high, low, medium, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const SEVEN_CPU: &str = "7-cpu.com, Itanium 2 at 1300 MHz";
const HASHED: &str = "replaces the hashed table (VHPT): with all upper levels cached, a walk reads one entry";

/// The machine of this file. It has no 2 MiB pages (but 1 MiB and 4 MiB), and lines of its L2 and L3 have 128
/// bytes (here 64).
pub(super) const MADISON: Machine = Machine {
    name: "madison",
    title: "Intel Itanium 2 (Madison)",
    source: "7-cpu.com; it has no radix tables, 2 MiB pages or second dimension: all three are simulated",
    data_tlb: TLB,
    instruction_tlb: TLB,
    second_level_is_shared: medium(false, SEVEN_CPU),
    walk_caches: &[WalkCache {
        levels: &[2, 3, 4, 5],
        array: super::array(unverified(65536, HASHED), unverified(4, HASHED), LRU),
    }],
    walk_caches_are_combined: high(false, "no EPT; its walker reads one table, in virtual memory"),
    second_level_holds_pdes: high(false, "there are no PDEs"),
    host_walk_caches: &[],
    nested_tlb: None,
    caches: &[
        cache(medium(16, SEVEN_CPU), medium(4, SEVEN_CPU), super::L1_FILL, medium(2, SEVEN_CPU)),
        cache(medium(256, SEVEN_CPU), medium(8, SEVEN_CPU), FILLED_BY_MISSES, medium(6, SEVEN_CPU)),
        cache(medium(3072, SEVEN_CPU), unverified(12, REMEMBERED), FILLED_BY_MISSES, medium(16, SEVEN_CPU)),
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: medium(2, SEVEN_CPU),
    walk_cycles: medium(15, "7-cpu.com: a miss that the VHPT walker serves costs 15 cycles more"),
    memory_cycles: medium(224, "7-cpu.com: L3 + 160 ns at 1.3 GHz"),
    levels_max: high(5, "simulated"),
    threads: high(1, "a core of Madison has one"),
};

const TLB: &[TlbLevel] = &[
    // It holds pages larger than 4 KiB in pieces of 4 KiB; the second level holds them whole.
    TlbLevel { smashed: &[Huge2M, Giant1G], ..first_level(FIRST) },
    TlbLevel {
        fill: low(Fill::OnMiss, SEVEN_CPU),
        ..super::second_level(
            &[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(medium(128, SEVEN_CPU)) }],
            medium(4, SEVEN_CPU),
        )
    },
];

const FIRST: &[TlbArray] = &[TlbArray { pages: &[Base4K], array: fully_associative(medium(32, SEVEN_CPU)) }];
