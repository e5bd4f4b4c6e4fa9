//! Size of this CPU's last cache, for kernels with arrays that must not fit into it.

use core::arch::x86_64::{__cpuid, __cpuid_count};

/// Leaf 4, in which Intel lists a CPU's caches (SDM volume 2, CPUID, "deterministic cache parameters").
const LEAF_INTEL: u32 = 4;
/// The same list on AMD (APM volume 3, appendix E.4.17).
const LEAF_AMD: u32 = 0x8000_001d;
/// The first extended leaf; its EAX gives the highest extended leaf.
const LEAF_EXTENDED: u32 = 0x8000_0000;
/// More caches than any CPU lists: two of the first level, a second, a third, perhaps a fourth.
const CACHES_MAX: u32 = 8;

/// Bytes of the largest cache that this CPU reports; `None` if it lists none. A VMM usually shows the host's cache
/// here, of which its guest may have only a part.
pub fn last_level_bytes() -> Option<u64> {
    let listed = |leaf| (0..CACHES_MAX).filter_map(move |index| cache_bytes(leaf, index)).max();
    let has = |first, leaf| __cpuid(first).eax >= leaf;
    let intel = has(0, LEAF_INTEL).then(|| listed(LEAF_INTEL)).flatten();
    intel.or_else(|| has(LEAF_EXTENDED, LEAF_AMD).then(|| listed(LEAF_AMD)).flatten())
}

/// Size of one cache of the list; `None` behind the end of the list.
fn cache_bytes(leaf: u32, index: u32) -> Option<u64> {
    let entry = __cpuid_count(leaf, index);
    let is_cache = entry.eax & 0x1f != 0;
    is_cache.then(|| bytes_of(entry.ebx, entry.ecx))
}

/// Ways, partitions and line length (EBX, each less one) times sets (ECX, less one).
const fn bytes_of(ebx: u32, ecx: u32) -> u64 {
    let (ways, partitions, line) = (ebx >> 22, ebx >> 12 & 0x3ff, ebx & 0xfff);
    (ways as u64 + 1) * (partitions as u64 + 1) * (line as u64 + 1) * (ecx as u64 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_as_large_as_its_fields_say() {
        // A Zen 4 core's caches: 32 KiB in 8 ways, 1 MiB in 8 ways, 32 MiB in 16 ways, all of lines of 64 bytes.
        let cases = [(7, 63, 32 << 10), (7, 2047, 1 << 20), (15, 32767, 32 << 20)];
        for (ways, sets, bytes) in cases {
            assert_eq!(bytes_of(ways << 22 | 63, sets), bytes);
        }
        assert_eq!(bytes_of(1 << 22 | 1 << 12 | 31, 9), 2 * 2 * 32 * 10);
    }
}
