//! Sorts candidates, best first, in time linear in their number: one list per score.
//!
//! ```text
//!   push(bucket, place) …          lists                  read, highest bucket first
//!   2:a 0:b 2:c 7:d          ▶   0: b   2: a ─▶ c   7: d   ▶   d a c b
//! ```
//!
//! Within a bucket the order is that of [`Ranking::push`], so equal candidates keep their turns and plans
//! repeat exactly. A plan that ends early has read only the best. HawkEye (ASPLOS '19) ranks by buckets because exact
//! order is not worth sorting for; so does this module.

use alloc::vec;
use alloc::vec::Vec;

use crate::bucket::BUCKETS;
use crate::candidates::Place;

/// Candidates, kept from plan to plan, so that ranking allocates only while it grows.
#[derive(Clone, Debug)]
pub struct Ranking {
    candidates: Vec<Candidate>,
    /// First and last candidate of each bucket, as indices.
    buckets: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    place: Place,
    /// Index of the next candidate of its bucket.
    next: u32,
}

/// Index of no candidate.
const NONE: u32 = u32::MAX;

impl Default for Ranking {
    fn default() -> Ranking {
        Ranking { candidates: Vec::new(), buckets: vec![(NONE, NONE); BUCKETS] }
    }
}

impl Ranking {
    /// Removes all candidates and keeps the capacity.
    pub fn clear(&mut self) {
        self.candidates.clear();
        self.buckets.fill((NONE, NONE));
    }

    /// Adds a candidate; higher buckets come first.
    pub fn push(&mut self, bucket: u16, place: Place) {
        let index = self.candidates.len() as u32;
        let (first, last) = &mut self.buckets[usize::from(bucket)];
        match self.candidates.get_mut(*last as usize) {
            Some(before) => before.next = index,
            None => *first = index,
        }
        *last = index;
        self.candidates.push(Candidate { place, next: NONE });
    }

    /// The candidates, best first.
    pub fn best_first(&self) -> impl Iterator<Item = Place> + '_ {
        let after = |candidate: &&Candidate| self.candidates.get(candidate.next as usize);
        let from = move |first: u32| core::iter::successors(self.candidates.get(first as usize), after);
        self.buckets.iter().rev().flat_map(move |(first, _)| from(*first)).map(|candidate| candidate.place)
    }
}

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
            let rows: Vec<u32> = ranking.best_first().map(|place| place.row).collect();
            assert_eq!(rows, [3, 0, 2, 1]);
        }
    }
}
