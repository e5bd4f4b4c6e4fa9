//! Intel Core Duo T2600 (Yonah): the machine of LWN's superpage articles, 32-bit.

use super::{
    CPUID, FILLED_BY_MISSES, INTEL_WALK_CACHES, LRU, REMEMBERED, array, cache, first_level, fully_associative,
};
use crate::machine::{Machine, TlbArray, high, unverified};
use wideleaf_policies::units::PageSize::{Base4K, Huge2M};

const X86INFO: &str = "x86info output in the LWN articles, which agrees with a CPUID dump";

/// The machine of this file. Without PAE its large pages have 4 MiB; here they have 2 MiB.
pub(super) const YONAH: Machine = Machine {
    name: "yonah",
    title: "Intel Core Duo T2600 (Yonah)",
    source: "x86info output and CPUID dump; without PAE its large pages have 4 MiB, here 2 MiB; no 1 GiB pages, no \
             EPT: both are simulated",
    data_tlb: &[first_level(&[
        TlbArray { pages: &[Base4K], array: array(high(128, X86INFO), high(4, X86INFO), LRU) },
        TlbArray { pages: &[Huge2M], array: array(high(8, X86INFO), high(4, X86INFO), LRU) },
    ])],
    instruction_tlb: &[first_level(&[
        TlbArray { pages: &[Base4K], array: array(high(128, X86INFO), high(4, X86INFO), LRU) },
        TlbArray { pages: &[Huge2M], array: fully_associative(high(2, X86INFO)) },
    ])],
    second_level_is_shared: high(false, "there is no second level"),
    walk_caches: INTEL_WALK_CACHES,
    walk_caches_are_combined: super::COMBINED_BEFORE_EPT,
    second_level_holds_pdes: super::NO_PDES_IN_TLB,
    host_walk_caches: INTEL_WALK_CACHES,
    nested_tlb: None,
    caches: &[
        cache(unverified(32, REMEMBERED), unverified(8, REMEMBERED), super::L1_FILL, unverified(3, REMEMBERED)),
        cache(unverified(2048, REMEMBERED), unverified(8, REMEMBERED), FILLED_BY_MISSES, unverified(14, REMEMBERED)),
    ],
    second_cache_completes_pairs: super::NO_PAIRS_KNOWN,
    walks_read_from: super::WALKS_READ_L1,
    walk_cycles: super::INTEL_WALK_CYCLES,
    memory_cycles: unverified(184, REMEMBERED),
    levels_max: high(5, "3 in hardware (PAE, SDM vol. 3, 4.4); 4 and 5 are simulated for comparison"),
    threads: high(1, CPUID),
};
