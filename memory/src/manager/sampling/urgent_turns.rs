//! Turns of the windows that a policy hurries for, while huge pages are short.
//!
//! ```text
//!   small   touched: hot, if confirmed ─▶ never sampled ─▶ idle    ┐
//!                                                                  ├─▶ half of each sample
//!   large   idle: cold, if confirmed ───▶ never sampled ─▶ touched ┘
//! ```
//!
//! A large window gives its huge page to a small one, so both have equal parts. The first pair is known soon, and not
//! all of them at the end.

use wideleaf_policies::rotation::Rotation;
use wideleaf_policies::{Backing, VmSnapshot, WindowIndex};

/// Results of a window's latest sample, `None` before the first: small windows in the order of their turns.
const SMALL: [Option<bool>; 3] = [Some(true), None, Some(false)];
/// Large windows in the order of their turns.
const LARGE: [Option<bool>; 3] = [Some(false), None, Some(true)];

/// A rotation for each part of the order.
#[derive(Debug, Default)]
pub(super) struct UrgentTurns {
    small: [Rotation; 3],
    large: [Rotation; 3],
}

impl UrgentTurns {
    /// The next `number` of the windows `urgent`, which ascend.
    pub fn next_share(&mut self, urgent: &[WindowIndex], number: usize, rows: &VmSnapshot) -> Vec<WindowIndex> {
        let of = |is_small: bool, was_touched: Option<bool>| -> Vec<WindowIndex> {
            let is_one = |row: usize| {
                (rows.backing[row] == Backing::Base4K) == is_small && rows.access[row].was_touched() == was_touched
            };
            urgent.iter().copied().filter(|window| rows.row(*window).is_some_and(is_one)).collect()
        };
        let (small, large) = (SMALL.map(|seen| of(true, seen)), LARGE.map(|seen| of(false, seen)));
        let [smalls, larges] = [&small, &large].map(|parts| parts.iter().map(Vec::len).sum::<usize>());
        let of_small = (number / 2).max(number.saturating_sub(larges)).min(smalls);
        let mut share = next_of(&mut self.small, &small, of_small);
        share.extend(next_of(&mut self.large, &large, number - of_small));
        share
    }
}

/// The next windows of these parts, the first part before the second.
fn next_of(turns: &mut [Rotation; 3], parts: &[Vec<WindowIndex>; 3], number: usize) -> Vec<WindowIndex> {
    turns.iter_mut().zip(parts).fold(Vec::new(), |mut share, (turn, part)| {
        share.extend(turn.next_share(part, number - share.len()));
        share
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::{AccessHistory, VmId, WindowRow};

    #[test]
    fn half_of_an_urgent_sample_is_small_windows_and_results_to_be_confirmed_come_first() {
        let windows: Vec<_> = (0..12).map(WindowIndex::new).collect();
        let mut rows = VmSnapshot::with_capacity(VmId(0), windows.len());
        let backing = |window: &WindowIndex| if window.get() < 6 { Backing::Base4K } else { Backing::Huge2M };
        windows.iter().for_each(|window| rows.push(WindowRow::new(*window, 512, backing(window))));
        let touched = AccessHistory::default().with(true);
        let idle = AccessHistory::default().with(false);
        (rows.access[1], rows.access[4]) = (idle, touched);
        (rows.access[6], rows.access[10]) = (touched, idle);
        let mut turns = UrgentTurns::default();
        let mut next = |of: &[WindowIndex], number| -> Vec<u64> {
            turns.next_share(of, number, &rows).into_iter().map(WindowIndex::get).collect()
        };
        assert_eq!(next(&windows, 4), [4, 0, 10, 7]);
        assert_eq!(next(&windows, 6), [4, 2, 3, 10, 8, 9], "those without a sample take turns");
        assert_eq!(next(&windows, 12), [4, 5, 0, 2, 3, 1, 10, 11, 7, 8, 9, 6]);
        assert_eq!(next(&windows[..8], 6), [4, 5, 0, 2, 7, 6], "what large ones do not need is for the others");
        assert_eq!(next(&windows[6..], 3), [10, 8, 9]);
    }
}
