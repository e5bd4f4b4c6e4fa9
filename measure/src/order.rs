//! Order of the arms within a round. Arms alternate, so that changes of the machine affect all of them, and change
//! neighbours, because a run can leave memory in a state that the next one meets.
//!
//! ```text
//!   round 1   base      promoted  hugetlb
//!   round 2   hugetlb   promoted  base
//!   round 3   promoted  hugetlb   base
//!   round 4   base      hugetlb   promoted
//!   round 5   hugetlb   base      promoted
//!   round 6   promoted  base      hugetlb      each arm right after each other one: twice
//! ```

/// Indices of the arms in a round, which is counted from one: a Williams square (Williams, Aust. J. Sci. Res. A 2,
/// 1949). Over as many rounds as arms, or twice as many of an odd number, each arm is in each place equally often, and
/// runs right after each other arm equally often.
pub fn arms_of_round(arms: usize, round: u32) -> impl Iterator<Item = usize> {
    let before = (round as usize).saturating_sub(1);
    // Of an odd number, each row and its mirror image.
    let (row, is_mirrored) = if arms.is_multiple_of(2) { (before, false) } else { (before / 2, before % 2 == 1) };
    (0..arms).map(move |place| {
        let step = if is_mirrored { arms - 1 - place } else { place };
        // 0, 1, -1, 2, -2, …: each difference between neighbours once.
        let zigzag = if step % 2 == 1 { step.div_ceil(2) } else { arms - step / 2 };
        (zigzag + row) % arms
    })
}

/// Order of pairs of arms: pairs alternate as single arms do, and the two of a pair run next to each other, each of
/// them first in every second round. Arms 0 and 1 are a pair, 2 and 3 the next.
pub fn pairs_of_round(pairs: usize, round: u32) -> impl Iterator<Item = usize> {
    arms_of_round(pairs, round).flat_map(move |pair| arms_of_round(2, round).map(move |arm| 2 * pair + arm))
}

/// Values of one round, by arm. `run` makes the run of an arm; the arms run in the order of the round.
///
/// # Errors
/// The first error of a run; the other arms of the round do not run then.
pub fn round<T, E>(arms: usize, round: u32, mut run: impl FnMut(usize) -> Result<T, E>) -> Result<Vec<T>, E> {
    let mut values: Vec<(usize, T)> =
        arms_of_round(arms, round).map(|arm| Ok((arm, run(arm)?))).collect::<Result<_, E>>()?;
    values.sort_by_key(|(arm, _)| *arm);
    Ok(values.into_iter().map(|(_, value)| value).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each arm runs in each place, and right after each other arm.
    fn counted(arms: usize, rounds: u32) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        let (mut places, mut after) = (vec![vec![0; arms]; arms], vec![vec![0; arms]; arms]);
        for round in 1..=rounds {
            let order: Vec<usize> = arms_of_round(arms, round).collect();
            order.iter().enumerate().for_each(|(place, arm)| places[*arm][place] += 1);
            order.windows(2).for_each(|pair| after[pair[1]][pair[0]] += 1);
        }
        (places, after)
    }

    #[test]
    fn each_arm_is_in_each_place_and_after_each_other_arm_equally_often() {
        for (arms, rounds) in [(2, 2), (3, 6), (4, 4), (5, 10), (6, 6), (7, 14), (8, 8)] {
            let (places, after) = counted(arms, rounds);
            let each = rounds / arms as u32;
            assert_eq!(places, vec![vec![each; arms]; arms]);
            for (arm, row) in after.iter().enumerate() {
                let others: Vec<u32> = row.iter().enumerate().filter(|(of, _)| *of != arm).map(|(_, n)| *n).collect();
                assert_eq!(others, vec![each; arms - 1], "{arms} arms, arm {arm}");
            }
        }
        let order = |round| arms_of_round(3, round).collect::<Vec<_>>();
        assert_eq!([order(1), order(2), order(3)], [[0, 1, 2], [2, 1, 0], [1, 2, 0]]);
        assert_eq!((arms_of_round(1, 9).collect::<Vec<_>>(), arms_of_round(0, 1).count()), (vec![0], 0));
    }

    #[test]
    fn the_two_of_a_pair_run_next_to_each_other_and_take_turns_to_be_first() {
        let order = |round| pairs_of_round(3, round).collect::<Vec<_>>();
        assert_eq!([order(1), order(2)], [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]);
    }

    #[test]
    fn values_of_a_round_are_by_arm_and_an_error_ends_it() {
        let mut began = Vec::new();
        let values = round(3, 2, |arm| {
            began.push(arm);
            Ok::<_, ()>(arm * 10)
        });
        assert_eq!((values, began), (Ok(vec![0, 10, 20]), vec![2, 1, 0]));
        assert_eq!(round(3, 1, |arm| if arm == 1 { Err(arm) } else { Ok(arm) }), Err(1));
    }
}
