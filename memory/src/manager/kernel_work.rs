//! Changes of a window's page size that the manager did not make: large at the first touch, or made large by
//! khugepaged, or split by reclaim. They are counted apart from the manager's own.
//!
//! ```text
//!   tick     nothing ── 4K ── 4K ──── 2M ──── 2M ── 4K          the backing at each tick
//!                                 ▲        ▲         ▲
//!            the manager collapsed it      │         └ split: not the manager's
//!            else: collapsed by the kernel ┘
//! ```
//!
//! Only windows of external guests are compared: the manager of our own VMM learns of each change by its own sensors.

use wideleaf_policies::{Action, Backing, OutcomeResult, PageSize};

/// Numbers of windows that changed without the manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelWork {
    /// Windows that were large when they were first seen in use: the kernel gave a huge page at the first touch.
    pub at_fault: u64,
    /// Windows that went from base pages to a huge page, by khugepaged or by a call of the VMM.
    pub collapsed: u64,
    /// Windows that went from a huge page to base pages.
    pub split: u64,
}

impl KernelWork {
    /// Each number with its name in reports and metrics.
    pub const fn named(self) -> [(&'static str, u64); 3] {
        [("at_fault", self.at_fault), ("collapsed", self.collapsed), ("split", self.split)]
    }
}

/// Backing of each window at the latest tick, brought up to date with the manager's own actions.
#[derive(Debug, Default)]
pub(super) struct KernelWorkCounter {
    seen: Vec<Backing>,
    /// Counts so far.
    pub work: KernelWork,
}

impl KernelWorkCounter {
    /// Compares the windows of a tick with those of the one before.
    pub fn see(&mut self, now: &[Backing]) {
        if self.seen.len() == now.len() {
            for (before, now) in self.seen.iter().zip(now) {
                match (before, now.is_large()) {
                    (Backing::Unbacked, true) => self.work.at_fault += 1,
                    (Backing::Base4K, true) => self.work.collapsed += 1,
                    (before, false) if before.is_large() && *now == Backing::Base4K => self.work.split += 1,
                    _ => {}
                }
            }
        }
        self.seen.clear();
        self.seen.extend_from_slice(now);
    }

    /// Takes note of an action of the manager's.
    pub fn acted(&mut self, row: usize, action: Action, result: OutcomeResult) {
        let (OutcomeResult::Done, Some(seen)) = (result, self.seen.get_mut(row)) else { return };
        match action {
            Action::Promote { to: PageSize::Huge2M, .. } => *seen = Backing::Huge2M,
            Action::Demote { .. } | Action::Vacate { .. } => *seen = Backing::Base4K,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::{Skip, VmId, WindowIndex};

    #[test]
    fn only_changes_without_an_action_of_the_manager_are_the_kernels() {
        use Backing::{Base4K, Huge2M, Unbacked};
        let (vm, window) = (VmId(0), WindowIndex::new(0));
        let promote = Action::Promote { vm, window, to: PageSize::Huge2M };
        let demote = Action::Demote { vm, window, to: PageSize::Base4K };
        let mut counter = KernelWorkCounter::default();
        counter.see(&[Huge2M, Base4K, Base4K, Unbacked, Huge2M]);
        assert_eq!(counter.work, KernelWork::default(), "the first tick has nothing to compare");
        counter.acted(1, promote, OutcomeResult::Done);
        counter.acted(2, promote, OutcomeResult::Skipped(Skip::NoHugePage));
        counter.acted(4, demote, OutcomeResult::Done);
        counter.see(&[Base4K, Huge2M, Huge2M, Huge2M, Base4K]);
        assert_eq!(counter.work.named(), [("at_fault", 1), ("collapsed", 1), ("split", 1)]);
        counter.see(&[Unbacked, Huge2M, Huge2M, Huge2M, Base4K]);
        assert_eq!(counter.work.named(), [("at_fault", 1), ("collapsed", 1), ("split", 1)], "freed memory is no work");
    }
}
