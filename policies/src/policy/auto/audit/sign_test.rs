//! A sequential sign test: decides whether one side of many pairs is usually the larger one, with a bounded error,
//! after as few pairs as the data allow, and without any assumption on the size of the noise.
//!
//! ```text
//!   win  +1 ┐                                    7 ─ ─ ─ ─ ─ ─ ─ ─ ╭─ decided
//!   loss −2 ┘ score, from 0      3 wins, 1 loss, 6 wins:  1 2 3 1 2 3 4 5 6 7
//! ```
//!
//! It is Wald's sequential probability ratio test (Ann. Math. Stat. 16, 1945) on the signs of the pairs, of *a win is
//! as likely as a loss* against *a win has the probability φ/2 = 0.81*. φ is the golden ratio, for which a loss
//! weighs exactly as much as two wins: (φ + φ⁻²)/2 = 1. So φ^score is a supermartingale as long as a win is at most as
//! likely as a loss, and by Ville's inequality (1939) its score ever reaches 7 with a probability of at most φ⁻⁷ =
//! 3.4 %, however many pairs follow and whenever the caller looks. The pairs have to be independent, and their noise
//! symmetric, as the difference of two values with the same noise is.

/// Score that decides: one wrong decision in 29, and seven pairs if all agree.
const DECIDED_AT: i32 = 7;

/// Smallest number of pairs that can decide.
pub(super) const PAIRS_MIN: usize = DECIDED_AT as usize;

/// The claim that wins are more likely than losses, and what the pairs so far say of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SignTest {
    score: i32,
}

impl SignTest {
    /// Counts a pair. After a decision nothing changes any more.
    pub fn add(&mut self, is_win: bool) {
        if !self.is_decided() {
            self.score += if is_win { 1 } else { -2 };
        }
    }

    /// Whether the claim holds.
    pub fn is_decided(self) -> bool {
        self.score >= DECIDED_AT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided_after(signs: impl Iterator<Item = bool>) -> Option<usize> {
        let mut test = SignTest::default();
        signs.take(1000).position(|is_win| {
            test.add(is_win);
            test.is_decided()
        })
    }

    #[test]
    fn seven_pairs_decide_if_all_agree_and_a_loss_costs_two_wins() {
        assert_eq!(decided_after(core::iter::repeat(true)), Some(6));
        assert_eq!(decided_after((0..).map(|pair| pair != 3)), Some(9));
        assert_eq!(decided_after((0..).map(|pair| pair % 3 > 0)), None);
        assert_eq!(decided_after(core::iter::repeat(false)), None);
    }

    /// By the recursion over the states, without chance: the probability that a fair coin ever decides within 400
    /// pairs lies just below the bound of φ⁻⁷ = 0.03444.
    #[test]
    fn a_fair_coin_decides_with_the_stated_probability_at_most() {
        const LOWEST: i32 = -900;
        let mut states = alloc::vec![0.0_f64; (DECIDED_AT - LOWEST) as usize];
        states[-LOWEST as usize] = 1.0;
        let mut decided = 0.0;
        for _ in 0..400 {
            let mut next = alloc::vec![0.0; states.len()];
            for (at, share) in states.iter().enumerate().filter(|(_, share)| **share > 0.0) {
                match next.get_mut(at + 1) {
                    Some(state) => *state += share / 2.0,
                    None => decided += share / 2.0,
                }
                next[at - 2] += share / 2.0;
            }
            states = next;
        }
        assert!((0.033..0.034_45).contains(&decided), "{decided}");
    }
}
