//! Disjoint parts of slices for the members of a team, and their results.
//!
//! ```text
//!   leader          deal(parts) ─┬─▶ member 0: work(0, part 0) ─┬─▶ [result 0, result 1, …]   always in this order
//!                                └─▶ member 1: work(1, part 1) ─┘
//! ```
//!
//! Parts are contiguous and nearly equal, one per member: the static schedule of OpenMP. The job captures data that
//! all members read as an ordinary shared borrow, so the compiler checks that no member writes what another reads.
//! The end of a `deal` is the barrier between two steps.

use wideleaf_protocol::VCPUS_MAX;

use crate::Platform;
use crate::rounds::part;
use crate::team::Slot;

/// The result of each member; `None` for members that do not exist.
pub type Results<R> = [Option<R>; VCPUS_MAX];

/// Runs `work(member, part)` on every member with its element of `parts`, in order.
///
/// # Panics
/// Panics if there are fewer parts than members.
pub fn deal<P: Send, R: Send>(
    platform: &dyn Platform,
    parts: impl IntoIterator<Item = P>,
    work: impl Fn(usize, P) -> R + Sync,
) -> Results<R> {
    // Loops with as many turns as there are members: one of a constant number is unrolled at every call.
    let members = platform.vcpus();
    let mut parts = parts.into_iter();
    let mut dealt: [Slot<P>; VCPUS_MAX] = [const { Slot::new(None) }; VCPUS_MAX];
    dealt.iter_mut().take(members).for_each(|slot| *slot = Slot::new(parts.next()));
    let results: [Slot<R>; VCPUS_MAX] = [const { Slot::new(None) }; VCPUS_MAX];
    platform.run_on_all(&|member| {
        let part = dealt[member].take().expect("there is a part for every member");
        results[member].put(work(member, part));
    });
    let mut taken = [const { None }; VCPUS_MAX];
    taken.iter_mut().zip(&results).take(members).for_each(|(taken, slot)| *taken = slot.take());
    taken
}

/// The sum of the members' results, in their order: the same number whichever member finishes first.
pub fn sum(results: Results<f64>) -> f64 {
    results.into_iter().flatten().sum()
}

/// The ranges of `0..total`, one per member.
pub fn ranges(total: usize, members: usize) -> impl Iterator<Item = core::ops::Range<usize>> {
    (0..members).map(move |member| {
        let range = part(total as u64, member, members);
        range.start as usize..range.end as usize
    })
}

/// A slice cut into the same ranges as [`ranges`] gives, for writing.
pub fn split<T>(slice: &mut [T], members: usize) -> impl Iterator<Item = &mut [T]> {
    let ranges = ranges(slice.len(), members);
    cut(slice, ranges.map(|range| range.len()))
}

/// A slice cut into pieces of these lengths, from the front.
pub fn cut<T>(slice: &mut [T], lengths: impl Iterator<Item = usize>) -> impl Iterator<Item = &mut [T]> {
    let mut rest = slice;
    lengths.map(move |length| {
        let (piece, behind) = core::mem::take(&mut rest).split_at_mut(length);
        rest = behind;
        piece
    })
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;

    use super::*;
    use crate::native;

    #[test]
    fn every_element_has_one_owner_for_any_number_of_members() {
        for members in [1, 2, 3, 16] {
            let mut owners = [usize::MAX; 100];
            let lengths = native::run(members, 0, Box::new(|_| ()), |platform| {
                deal(platform, split(&mut owners, members), |member, mine| {
                    mine.fill(member);
                    mine.len()
                })
            });
            assert_eq!(lengths.iter().flatten().sum::<usize>(), 100);
            assert!(owners.is_sorted() && owners[99] == members - 1);
        }
    }

    #[test]
    fn results_are_summed_in_the_order_of_members() {
        let values = [1e16, 1.0, -1e16, 1.0];
        let total = native::run(4, 0, Box::new(|_| ()), |platform| sum(deal(platform, values, |_, value| value)));
        assert_eq!(total, 1.0, "1 is lost in 1e16 before -1e16 comes, and the last one is not");
    }
}
