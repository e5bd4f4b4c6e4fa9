//! Sorts candidates, best first, in time linear in their number: one bucket per score, filled by counting.
//!
//! ```text
//!   push(bucket, place) …          count        place them, highest bucket first
//!   2:a 0:b 2:c 7:d          ▶   0:1 2:2 7:1   ▶   d a c b
//! ```
//!
//! Within a bucket the order is that of [`Ranking::push`], so equal candidates keep their turns and plans
//! repeat exactly. HawkEye (ASPLOS '19) ranks by buckets because exact order is not worth sorting for; so
//! does this module.

use alloc::vec;
use alloc::vec::Vec;

use crate::candidates::Place;

/// Number of buckets: 8 for each doubling of a 64-bit score.
pub const BUCKETS: usize = 64 * STEPS_PER_DOUBLING;

/// Scores within 12.5 % of each other count as equal, because no sensor is more precise.
const STEPS_PER_DOUBLING: usize = 8;

/// Candidates and the space to order them, kept from plan to plan, so that ranking allocates only while it grows.
#[derive(Clone, Debug)]
pub struct Ranking {
    pushed: Vec<(u16, Place)>,
    ordered: Vec<Place>,
    counts: Vec<u32>,
}

impl Default for Ranking {
    fn default() -> Ranking {
        Ranking { pushed: Vec::new(), ordered: Vec::new(), counts: vec![0; BUCKETS] }
    }
}

impl Ranking {
    /// Removes all candidates and keeps the capacity.
    pub fn clear(&mut self) {
        self.pushed.clear();
        self.counts.fill(0);
    }

    /// Adds a candidate; higher buckets come first.
    pub fn push(&mut self, bucket: u16, place: Place) {
        self.counts[usize::from(bucket)] += 1;
        self.pushed.push((bucket, place));
    }

    /// The candidates, best first.
    pub fn best_first(&mut self) -> &[Place] {
        let mut next = 0;
        for count in self.counts.iter_mut().rev() {
            (next, *count) = (next + *count, next);
        }
        self.ordered.resize(self.pushed.len(), Place::new(0, 0));
        for (bucket, place) in &self.pushed {
            let at = &mut self.counts[usize::from(*bucket)];
            self.ordered[*at as usize] = *place;
            *at += 1;
        }
        &self.ordered
    }
}

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

    #[test]
    fn the_highest_bucket_comes_first_and_equals_keep_their_order() {
        let mut ranking = Ranking::default();
        for _ in 0..2 {
            ranking.clear();
            for (bucket, row) in [(2, 0), (0, 1), (2, 2), (7, 3)] {
                ranking.push(bucket, Place::new(0, row));
            }
            let rows: Vec<u32> = ranking.best_first().iter().map(|place| place.row).collect();
            assert_eq!(rows, [3, 0, 2, 1]);
        }
    }

    #[test]
    fn a_larger_score_never_has_a_lower_bucket() {
        let scores = (0..64).flat_map(|shift| [1_u64 << shift, (1 << shift) | (1 << shift >> 1)]);
        let buckets: Vec<u16> = scores.map(bucket_of).collect();
        assert!(buckets.is_sorted(), "{buckets:?}");
        assert_eq!((bucket_of(0), bucket_of(8), bucket_of(9), bucket_of(16)), (0, 8, 9, 16));
        assert!((0..BUCKETS as u16 - 16).all(|bucket| bucket_of(lowest_of(bucket)) == bucket));
    }
}
