//! What actions are expected to cost on this machine: a measured guess first, then what they did cost.

use core::ops::ControlFlow;
use core::time::Duration;

use crate::action::{Action, Plan};
use crate::budget::{Budget, Cost};
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::VmSnapshot;
use crate::units::{Bytes, PageSize};

/// CPU time by mechanism, as far as a policy can tell them apart.
#[derive(Clone, Debug)]
pub struct Expectations {
    copy_2m: Duration,
    copy_1g: Duration,
    /// Changes a mapping and copies nothing: hold, recovery, split.
    remap: Duration,
    release: Duration,
}

impl Default for Expectations {
    /// Before the first outcome: a copy at the 3.5 GiB/s that `MADV_COLLAPSE` was measured at, the split of one huge page
    /// (0.18 ms measured), and the reading of 2 MiB for zeroes at 10 GiB/s with as much again for giving pages back.
    fn default() -> Expectations {
        Expectations {
            copy_2m: Duration::from_micros(560),
            copy_1g: Duration::from_millis(286),
            remap: Duration::from_micros(180),
            release: Duration::from_micros(400),
        }
    }
}

impl Expectations {
    /// What an action should cost; `is_held` says that only a hold keeps the window from being large already.
    pub fn cost(&self, action: Action, is_held: bool) -> Cost {
        match action {
            Action::Promote { .. } if is_held => Cost { copied: Bytes::ZERO, cpu: self.remap },
            Action::Promote { to: PageSize::Giant1G, .. } => {
                Cost { copied: PageSize::Giant1G.bytes(), cpu: self.copy_1g }
            }
            Action::Promote { .. } => Cost { copied: PageSize::Huge2M.bytes(), cpu: self.copy_2m },
            Action::Demote { .. } => Cost { copied: Bytes::ZERO, cpu: self.remap },
            Action::Release { .. } => Cost { copied: Bytes::ZERO, cpu: self.release },
        }
    }

    /// Puts the action into the plan if the plan has room and the budget allows it; `Break` says that one of them is
    /// at its end.
    pub fn request(&self, action: Action, is_held: bool, budget: &mut Budget, plan: &mut Plan) -> ControlFlow<()> {
        let cost = self.cost(action, is_held);
        // Borrowed where it is more than a burst. What is never done teaches nothing, so after one copy that had to wait for memory, or
        // for a processor that somebody else has, nothing would be asked for again.
        if plan.is_full() || budget.try_borrow(cost).is_err() {
            return ControlFlow::Break(());
        }
        plan.push(action, cost);
        ControlFlow::Continue(())
    }

    /// Requests that the window of a row becomes 2 MiB; as [`Expectations::request`].
    pub fn request_huge(&self, vm: &VmSnapshot, row: usize, budget: &mut Budget, plan: &mut Plan) -> ControlFlow<()> {
        let promote = Action::Promote { vm: vm.vm, window: vm.windows[row], to: PageSize::Huge2M };
        self.request(promote, vm.is_held[row], budget, plan)
    }

    /// Follows what was done.
    pub fn learn(&mut self, outcome: &Outcome) {
        if outcome.result != OutcomeResult::Done {
            return;
        }
        let was_copied = outcome.cost.copied > Bytes::ZERO;
        let expected = match outcome.action {
            Action::Promote { to: PageSize::Giant1G, .. } if was_copied => &mut self.copy_1g,
            Action::Promote { .. } if was_copied => &mut self.copy_2m,
            Action::Promote { .. } | Action::Demote { .. } => &mut self.remap,
            Action::Release { .. } => &mut self.release,
        };
        // An exponential mean over about eight outcomes: follows the machine within a tick, ignores one outlier.
        *expected = (*expected * 7 + outcome.cost.cpu) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::BudgetLimits;
    use crate::snapshot::VmId;
    use crate::units::{Moment, WindowIndex};

    const PROMOTE: Action = Action::Promote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Huge2M };

    fn done(copied: Bytes, cpu: Duration) -> Outcome {
        let cost = Cost { copied, cpu };
        Outcome { action: PROMOTE, at: Moment::START, cost, unavailable: cpu, result: OutcomeResult::Done }
    }

    #[test]
    fn a_copy_and_a_change_of_mapping_are_learnt_apart() {
        let mut expectations = Expectations::default();
        for _ in 0..200 {
            expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::from_micros(800)));
            expectations.learn(&done(Bytes::ZERO, Duration::from_micros(20)));
        }
        let micros = [false, true].map(|is_held| expectations.cost(PROMOTE, is_held).cpu.as_micros());
        assert!((799..=800).contains(&micros[0]) && (20..=21).contains(&micros[1]), "{micros:?}");
    }

    #[test]
    fn what_once_took_longer_than_a_burst_allows_is_tried_again_and_learnt_anew() {
        let mut expectations = Expectations::default();
        let mut budget = Budget::new(BudgetLimits::default(), Moment::START);
        expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::from_secs(2)));
        let mut asked = 0;
        // An hour, second by second: the debt is paid before the next one, and a burst of 125 ms is again more than a copy needs.
        for second in 1..3600 {
            let mut plan = Plan::with_bound(1);
            budget.refill(Moment::after_start(Duration::from_secs(second)));
            if expectations.request(PROMOTE, false, &mut budget, &mut plan).is_continue() {
                let estimate = expectations.cost(PROMOTE, false);
                let outcome = done(PageSize::Huge2M.bytes(), Duration::from_millis(1));
                budget.settle(estimate, outcome.cost);
                expectations.learn(&outcome);
                asked += 1;
            }
        }
        assert!(asked > 3590, "{asked}");
        assert!(expectations.cost(PROMOTE, false).cpu < Duration::from_millis(2));
    }

    #[test]
    fn a_refusal_teaches_nothing_about_the_cost() {
        let mut expectations = Expectations::default();
        let refused = OutcomeResult::Refused(crate::outcome::Refusal::Busy);
        expectations.learn(&Outcome { result: refused, ..done(PageSize::Huge2M.bytes(), Duration::from_secs(9)) });
        assert_eq!(expectations.cost(PROMOTE, false), Expectations::default().cost(PROMOTE, false));
    }
}
