//! Speed of the background, and the order in which it fills windows.

use std::time::Duration;

use wideleaf_policies::{Bytes, Moment, PerTenThousand, WindowIndex};

use super::rows::Rows;

/// Bytes that the background may read in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Background {
    /// As fast as it can. A touched window comes first all the same.
    #[default]
    Unlimited,
    /// At most this much in a second, on average.
    PerSecond(Bytes),
    /// Nothing: windows are filled when they are touched, and the restore ends with the last of them.
    Off,
}

/// When the next window of the background is due.
#[derive(Debug, Default)]
pub(super) struct Pace {
    next_at: Moment,
}

impl Pace {
    /// Time until the next window is due.
    pub(super) fn wait(&self, now: Moment) -> Duration {
        self.next_at.since_start().saturating_sub(now.since_start())
    }

    /// A window of this size was begun. Time that was not used is not saved up.
    pub(super) fn began(&mut self, background: Background, bytes: Bytes, now: Moment) {
        if let Background::PerSecond(budget) = background {
            let takes = Duration::from_secs_f64(bytes.get() as f64 / budget.get().max(1) as f64);
            let from = if self.next_at < now { now } else { self.next_at };
            self.next_at = from + takes;
        }
    }
}

/// Rows in the order of the background: first those of `first`, then the hottest ones, then the others by address.
/// `heats`: by row; windows without contents may be among them.
pub(super) fn order(rows: &Rows, first: &[WindowIndex], heats: &[PerTenThousand]) -> Vec<u32> {
    let mut is_first = vec![false; rows.count()];
    let mut order: Vec<u32> = Vec::with_capacity(rows.count());
    for row in first.iter().filter_map(|window| rows.row(*window)) {
        if !std::mem::replace(&mut is_first[row], true) {
            order.push(row as u32);
        }
    }
    let begun = order.len();
    order.extend((0..rows.count()).filter(|row| !is_first[*row]).map(|row| row as u32));
    order[begun..].sort_by_key(|row| std::cmp::Reverse(heats[*row as usize]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::RamRange;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, Hva};

    #[test]
    fn recorded_windows_come_first_then_hot_ones_then_the_rest() {
        let gpa = GpaRange::new(Gpa::new(0), mib(12)).expect("fits");
        let rows = Rows::of(&[RamRange { gpa, hva: Hva::new(1 << 40) }]);
        let heats = [0, 50, 0, 9000, 50, 0].map(PerTenThousand::new);
        let first = [4, 2, 4, 77].map(WindowIndex::new);
        assert_eq!(order(&rows, &first, &heats), [4, 2, 3, 1, 0, 5]);
        assert_eq!(order(&rows, &[], &heats), [3, 1, 4, 0, 2, 5]);
    }

    #[test]
    fn a_budget_is_kept_on_average_and_nothing_is_saved_up() {
        let at = |ms| Moment::after_start(Duration::from_millis(ms));
        let (mut pace, budget) = (Pace::default(), Background::PerSecond(mib(20)));
        assert_eq!(pace.wait(at(5)), Duration::ZERO);
        pace.began(budget, mib(2), at(5)); // a tenth of a second
        assert_eq!(pace.wait(at(25)), Duration::from_millis(80));
        pace.began(budget, mib(1), at(200));
        assert_eq!(pace.wait(at(200)), Duration::from_millis(50));
        let mut unlimited = Pace::default();
        unlimited.began(Background::Unlimited, mib(2), at(5));
        assert_eq!(unlimited.wait(at(5)), Duration::ZERO);
    }
}
