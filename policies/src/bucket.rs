//! Buckets of scores: 8 for each doubling. They order candidates (`rank.rs`), count bids (`market.rs`), and store
//! touches per second in a byte (`snapshot.rs`).

/// Number of buckets: 8 for each doubling of a 64-bit score.
pub const BUCKETS: usize = 64 * STEPS_PER_DOUBLING;

/// Scores within 12.5 % of each other count as equal, because no sensor is more precise.
const STEPS_PER_DOUBLING: usize = 8;

/// The bucket of a score: 8 for each doubling, so that neighbours differ by at most 12.5 %.
pub const fn bucket_of(score: u64) -> u16 {
    let doublings = match score.checked_ilog2() {
        None | Some(0..3) => return score as u16,
        Some(doublings) => doublings,
    };
    let steps = (score >> (doublings - 3)) as usize % STEPS_PER_DOUBLING;
    ((doublings as usize - 2) * STEPS_PER_DOUBLING + steps) as u16
}

/// The lowest score of a bucket.
pub const fn lowest_of(bucket: u16) -> u64 {
    let (doublings, step) = (bucket as usize / STEPS_PER_DOUBLING, bucket as usize % STEPS_PER_DOUBLING);
    match doublings.checked_sub(1) {
        None => step as u64,
        Some(shift) => ((STEPS_PER_DOUBLING + step) as u64) << shift,
    }
}

const _: () = assert!(STEPS_PER_DOUBLING == 1 << 3, "bucket_of shifts by the logarithm of it");
const _: () = assert!((bucket_of(u64::MAX) as usize) < BUCKETS, "every score has a bucket");

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn a_larger_score_never_has_a_lower_bucket() {
        let scores = (0..64).flat_map(|shift| [1_u64 << shift, (1 << shift) | (1 << shift >> 1)]);
        let buckets: Vec<u16> = scores.map(bucket_of).collect();
        assert!(buckets.is_sorted(), "{buckets:?}");
        assert_eq!((bucket_of(0), bucket_of(8), bucket_of(9), bucket_of(16)), (0, 8, 9, 16));
        assert!((0..BUCKETS as u16 - 16).all(|bucket| bucket_of(lowest_of(bucket)) == bucket));
    }
}
