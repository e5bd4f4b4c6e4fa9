//! Order of the arms within a round. Arms alternate, so that changes of the machine affect all of them.
//!
//! ```text
//!   round 1   base      promoted  hugetlb
//!   round 2   promoted  hugetlb   base
//!   round 3   hugetlb   base      promoted
//! ```

/// Indices of the arms in a round, which is counted from one. Each round begins one arm further than the round
/// before, so that no arm always runs right after the warming or after the same neighbour.
pub fn arms_of_round(arms: usize, round: u32) -> impl Iterator<Item = usize> {
    let first = (round as usize).saturating_sub(1);
    (0..arms).map(move |step| (first + step) % arms)
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

    #[test]
    fn each_round_begins_one_arm_further() {
        let order = |round| arms_of_round(3, round).collect::<Vec<_>>();
        assert_eq!([order(1), order(2), order(3), order(4)], [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }

    #[test]
    fn values_of_a_round_are_by_arm_and_an_error_ends_it() {
        let mut began = Vec::new();
        let values = round(3, 2, |arm| {
            began.push(arm);
            Ok::<_, ()>(arm * 10)
        });
        assert_eq!((values, began), (Ok(vec![0, 10, 20]), vec![1, 2, 0]));
        assert_eq!(round(3, 1, |arm| if arm == 1 { Err(arm) } else { Ok(arm) }), Err(1));
    }
}
