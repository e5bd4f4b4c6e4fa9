//! Fujitsu A64FX: the machine of the astrophysics measurements, where fewer misses saved no time.

use super::{FILLED_BY_MISSES, LRU, REMEMBERED, array, cache, first_level, fully_associative};
use crate::machine::{Machine, TlbArray, TlbLevel, WalkCache, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Giant1G, Huge2M};

const MANUAL: &str = "from memory of Fujitsu's A64FX microarchitecture manual";
const TABLE_CACHE: &str =
    "the manual's translation table cache; the authors of the measurements do not give its size: a guess";

/// The machine of this file. Its lines have 256 bytes (here 64); its 64 KiB granule is not simulated.
pub(super) const A64FX: Machine = Machine {
    name: "a64fx",
    title: "Fujitsu A64FX",
    source: "from memory, all unverified",
    data_tlb: TLB,
    instruction_tlb: TLB,
    second_level_is_shared: unverified(false, MANUAL),
    walk_caches: &[WalkCache {
        levels: &[2, 3, 4, 5],
        array: array(unverified(64, TABLE_CACHE), unverified(4, TABLE_CACHE), LRU),
    }],
    walk_caches_are_combined: unverified(false, MANUAL),
    second_level_holds_pdes: unverified(false, MANUAL),
    host_walk_caches: &[WalkCache {
        levels: &[2, 3, 4, 5],
        array: array(unverified(64, TABLE_CACHE), unverified(4, TABLE_CACHE), LRU),
    }],
    nested_tlb: None,
    caches: &[
        cache(unverified(64, MANUAL), unverified(4, MANUAL), super::L1_FILL, unverified(5, MANUAL)),
        cache(unverified(8192, MANUAL), unverified(16, MANUAL), FILLED_BY_MISSES, unverified(40, MANUAL)),
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::NO_WALK_CYCLES,
    memory_cycles: unverified(286, REMEMBERED),
    levels_max: high(5, "4 in hardware at the 4 KiB granule; 5 are simulated for comparison"),
    threads: high(1, "a core of the A64FX has one"),
};

const TLB: &[TlbLevel] = &[
    first_level(&[TlbArray { pages: &[Base4K, Huge2M, Giant1G], array: fully_associative(unverified(16, MANUAL)) }]),
    super::second_level(
        &[TlbArray {
            pages: &[Base4K, Huge2M, Giant1G],
            array: array(unverified(1024, MANUAL), unverified(4, MANUAL), LRU),
        }],
        unverified(7, MANUAL),
    ),
];
