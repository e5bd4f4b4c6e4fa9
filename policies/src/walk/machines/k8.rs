//! AMD Opteron 270, 275, 875 (K8, revision E): the machine of the FreeBSD and OpenMP measurements.

use crate::units::PageSize::{Base4K, Huge2M};
use crate::walk::machine::{
    Array, CacheLevel, Fill, Machine, Replacement, TlbArray, TlbLevel, WalkCache, high, low, medium,
};

const CPUID: &str =
    "CPUID 8000_0005h/8000_0006h of Opteron 275 (InstLatx64), agrees with the FreeBSD measurements' reach";
const HENNESSY: &str =
    "Hennessy and Patterson, Computer Architecture, 4th ed., 5.6 and appendix C: the Opteron's memory hierarchy";
const TRUE_LRU: &str = "not documented; true LRU, from which random accesses tell no other policy";
const EVENTS: &str = "BKDG 26094, events 7Dh-7Fh: walks are requests to the L2 beside the data cache's, and fill the L2 together with victims of the L1";

/// See the file's head.
pub(super) const K8: Machine = Machine {
    name: "k8",
    title: "AMD Opteron 270/275/875 (K8 rev. E)",
    source: "CPUID dump, FreeBSD and OpenMP superpage papers, Hennessy and Patterson, BKDG 26094",
    data_tlb: FIRST_AND_SECOND,
    instruction_tlb: FIRST_AND_SECOND,
    second_level_is_shared: high(false, CPUID),
    walk_caches: &[WalkCache {
        levels: &[2, 3, 4],
        array: Array {
            entries: medium(
                24,
                "Bhargava et al., ASPLOS '08: the baseline's page walk cache, of a processor of this line",
            ),
            ways: low(24, "taken as fully associative"),
            replacement: low(Replacement::Lru, TRUE_LRU),
        },
    }],
    host_walk_caches: &[],
    nested_tlb: None,
    caches: &[
        CacheLevel {
            array: Array {
                entries: high(64 * 16, "64 KiB of 64-byte lines: CPUID, and Hennessy and Patterson 5.6"),
                ways: high(2, HENNESSY),
                replacement: high(Replacement::Lru, HENNESSY),
            },
            fill: high(Fill::OnMiss, HENNESSY),
            cycles: medium(3, "7-cpu.com"),
        },
        CacheLevel {
            array: Array {
                entries: high(1024 * 16, "1 MiB of 64-byte lines: CPUID, and Hennessy and Patterson 5.6"),
                ways: high(16, HENNESSY),
                replacement: medium(
                    Replacement::Lru,
                    "Hennessy and Patterson 5.6: LRU over eight pairs, then either of the pair; taken as true LRU",
                ),
            },
            fill: high(Fill::Victims, HENNESSY),
            cycles: medium(13, "7-cpu.com"),
        },
    ],
    walks_read_from: medium(2, EVENTS),
    memory_cycles: medium(
        150,
        "FreeBSD measurements: 72 ns an update of GUPS at 2.2 GHz with superpages, which is one miss",
    ),
    levels_max: high(4, "APM vol. 2, 5.3"),
    threads: high(1, CPUID),
};

const FIRST_AND_SECOND: &[TlbLevel] = &[
    TlbLevel {
        arrays: &[
            TlbArray {
                pages: &[Base4K],
                array: Array {
                    entries: high(32, CPUID),
                    ways: high(32, CPUID),
                    replacement: low(Replacement::Lru, TRUE_LRU),
                },
            },
            TlbArray {
                pages: &[Huge2M],
                array: Array {
                    entries: high(8, CPUID),
                    ways: high(8, CPUID),
                    replacement: low(Replacement::Lru, TRUE_LRU),
                },
            },
        ],
        store_arrays: &[],
        smashed: &[],
        fill: high(Fill::OnMiss, CPUID),
        cycles: high(0, "by definition"),
    },
    TlbLevel {
        arrays: &[TlbArray {
            pages: &[Base4K],
            array: Array {
                entries: high(512, CPUID),
                ways: high(4, CPUID),
                replacement: low(Replacement::Lru, TRUE_LRU),
            },
        }],
        store_arrays: &[],
        smashed: &[],
        fill: low(Fill::Victims, "the FreeBSD paper counts 32 + 512 pages of reach, which is exclusive filling"),
        cycles: low(5, "no source read; between an L1 and an L2 hit"),
    },
];
