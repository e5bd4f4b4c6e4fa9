//! Statistics of a guest's own memory (5.5.6.3): pairs of a tag and a number; the guest chooses which it gives.

use std::collections::BTreeMap;

/// Names by tag (5.5.6.4, and linux/virtio_balloon.h for those from `oom_kills` on).
const NAMES: [&str; 16] = [
    "swap_in_bytes",
    "swap_out_bytes",
    "major_faults",
    "minor_faults",
    "free_bytes",
    "total_bytes",
    "available_bytes",
    "disk_cache_bytes",
    "hugetlb_allocations",
    "hugetlb_failures",
    "oom_kills",
    "allocation_stalls",
    "async_scanned_pages",
    "direct_scanned_pages",
    "async_reclaimed_pages",
    "direct_reclaimed_pages",
];

/// Size of a pair in bytes: a 16-bit tag and a 64-bit number, little-endian, without padding.
const PAIR_BYTES: usize = 10;

/// Number of bytes of a buffer that are read: room for twice as many tags as are known.
pub(super) const BUFFER_BYTES_MAX: usize = 2 * NAMES.len() * PAIR_BYTES;

/// Values by name. Missing values and values without a known name are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(transparent)]
pub struct GuestStatistics(pub BTreeMap<&'static str, u64>);

impl GuestStatistics {
    /// Parses a buffer of the statistics queue.
    pub(super) fn parse(buffer: &[u8]) -> GuestStatistics {
        let pair = |pair: &[u8; PAIR_BYTES]| {
            let [low, high, number @ ..] = *pair;
            let name = NAMES.get(usize::from(u16::from_le_bytes([low, high])))?;
            Some((*name, u64::from_le_bytes(number)))
        };
        GuestStatistics(buffer.as_chunks().0.iter().filter_map(pair).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_with_a_known_name_are_kept_and_a_truncated_pair_is_not() {
        let mut buffer = Vec::new();
        for (tag, number) in [(4_u16, 7_u64), (99, 1), (15, u64::MAX), (4, 8)] {
            buffer.extend(tag.to_le_bytes());
            buffer.extend(number.to_le_bytes());
        }
        buffer.extend([5, 0, 1]);
        let expected = BTreeMap::from([("free_bytes", 8), ("direct_reclaimed_pages", u64::MAX)]);
        assert_eq!(GuestStatistics::parse(&buffer).0, expected);
    }
}
