//! The expected cost of actions on this machine: first a measured guess, then their actual cost.

use core::ops::ControlFlow;
use core::time::Duration;

use crate::action::{Action, Plan};
use crate::budget::{Budget, Cost};
use crate::node::NodeId;
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::VmSnapshot;
use crate::units::{Bytes, PageSize};

/// CPU time up to which an outcome counts whatever was expected: otherwise what once cost nothing would do so for ever.
const COUNTED_LEAST: Duration = Duration::from_micros(50);

/// CPU time by mechanism, as far as a policy can distinguish the mechanisms.
#[derive(Clone, Debug)]
pub struct Expectations {
    copy_2m: Duration,
    copy_1g: Duration,
    /// Time to move a giant back from its page.
    copy_back_1g: Duration,
    /// Time to change a mapping without copying: hold, recovery, split.
    remap: Duration,
    release: Duration,
    vacate: Duration,
    /// Time to move a window to another NUMA node.
    move_2m: Duration,
}

impl Default for Expectations {
    /// Before the first outcome: a copy at the 3.5 GiB/s measured for `MADV_COLLAPSE`, the split of one huge
    /// page (0.18 ms measured), and reading 2 MiB for zeroes at 10 GiB/s, plus the same time again for
    /// giving pages back. To vacate a window takes a copy, and base pages that are mostly made before the guest waits.
    /// To move a window to another node takes a copy too.
    fn default() -> Expectations {
        Expectations {
            copy_2m: Duration::from_micros(560),
            copy_1g: Duration::from_millis(286),
            copy_back_1g: Duration::from_millis(286),
            remap: Duration::from_micros(180),
            release: Duration::from_micros(400),
            vacate: Duration::from_micros(500),
            move_2m: Duration::from_micros(560),
        }
    }
}

impl Expectations {
    /// Expected cost of an action. `is_held` says that only a hold keeps the window from being large already.
    pub fn cost(&self, action: Action, is_held: bool) -> Cost {
        match action {
            Action::Promote { .. } if is_held => Cost { copied: Bytes::ZERO, cpu: self.remap },
            Action::Promote { to: PageSize::Giant1G, .. } => {
                Cost { copied: PageSize::Giant1G.bytes(), cpu: self.copy_1g }
            }
            Action::Promote { .. } => Cost { copied: PageSize::Huge2M.bytes(), cpu: self.copy_2m },
            // Only a giant page is demoted to 2 MiB, and by a copy.
            Action::Demote { to: PageSize::Huge2M, .. } => {
                Cost { copied: PageSize::Giant1G.bytes(), cpu: self.copy_back_1g }
            }
            Action::Demote { .. } => Cost { copied: Bytes::ZERO, cpu: self.remap },
            Action::Release { .. } => Cost { copied: Bytes::ZERO, cpu: self.release },
            Action::Vacate { .. } => Cost { copied: PageSize::Huge2M.bytes(), cpu: self.vacate },
            Action::Move { .. } => Cost { copied: PageSize::Huge2M.bytes(), cpu: self.move_2m },
        }
    }

    /// Puts the action into the plan if the plan has room and the budget allows it. `Break` says that the plan is
    /// full or the budget is spent.
    pub fn request(&self, action: Action, is_held: bool, budget: &mut Budget, plan: &mut Plan) -> ControlFlow<()> {
        self.request_all(&[(None, action, is_held)], budget, plan)
    }

    /// As [`Expectations::request`], for all of these actions together or none of them. Each has the NUMA node of the
    /// page that it wants, if any, and `is_held`.
    pub fn request_all(
        &self,
        actions: &[(Option<NodeId>, Action, bool)],
        budget: &mut Budget,
        plan: &mut Plan,
    ) -> ControlFlow<()> {
        let costs = || actions.iter().map(|(_, action, is_held)| self.cost(*action, *is_held));
        let cost = Cost { copied: costs().map(|cost| cost.copied).sum(), cpu: costs().map(|cost| cost.cpu).sum() };
        // A cost above a burst is borrowed. An action that is never done teaches nothing: after one copy that had
        // to wait for memory or for a busy processor, the policy would never request another.
        if plan.room() < actions.len() || budget.try_borrow(cost).is_err() {
            return ControlFlow::Break(());
        }
        actions.iter().zip(costs()).for_each(|((node, action, _), cost)| plan.push_on(*node, *action, cost));
        ControlFlow::Continue(())
    }

    /// Requests that the window of a row becomes 2 MiB, as [`Expectations::request`] does.
    pub fn request_huge(&self, vm: &VmSnapshot, row: usize, budget: &mut Budget, plan: &mut Plan) -> ControlFlow<()> {
        let promote = Action::Promote { vm: vm.vm, window: vm.windows[row], to: PageSize::Huge2M };
        self.request(promote, vm.is_held[row], budget, plan)
    }

    /// Updates the expected cost from an outcome.
    pub fn learn(&mut self, outcome: &Outcome) {
        if outcome.result != OutcomeResult::Done {
            return;
        }
        let was_copied = outcome.cost.copied > Bytes::ZERO;
        let expected = match outcome.action {
            Action::Promote { to: PageSize::Giant1G, .. } if was_copied => &mut self.copy_1g,
            Action::Promote { .. } if was_copied => &mut self.copy_2m,
            Action::Demote { to: PageSize::Huge2M, .. } => &mut self.copy_back_1g,
            Action::Promote { .. } | Action::Demote { .. } => &mut self.remap,
            Action::Release { .. } => &mut self.release,
            Action::Vacate { .. } => &mut self.vacate,
            Action::Move { .. } => &mut self.move_2m,
        };
        // An exponential mean over about eight outcomes follows the machine within a tick. One of fifty copies takes
        // ten times as long, as where the host lacks its memory for a moment; counted whole, it would make the next
        // plans a tenth as long. The budget pays for what it took all the same.
        let counted = outcome.cost.cpu.min((*expected * 2).max(COUNTED_LEAST));
        *expected = (*expected * 7 + counted) / 8;
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
    fn a_copy_and_a_change_of_mapping_are_learnt_separately() {
        let mut expectations = Expectations::default();
        for _ in 0..200 {
            expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::from_micros(800)));
            expectations.learn(&done(Bytes::ZERO, Duration::from_micros(20)));
        }
        let micros = [false, true].map(|is_held| expectations.cost(PROMOTE, is_held).cpu.as_micros());
        assert!((799..=800).contains(&micros[0]) && (20..=21).contains(&micros[1]), "{micros:?}");
    }

    #[test]
    fn the_cost_of_a_vacated_window_is_learnt_apart_from_that_of_a_promotion() {
        let mut expectations = Expectations::default();
        let promotion = expectations.cost(PROMOTE, false);
        let vacate = Action::Vacate { vm: VmId(0), window: WindowIndex::new(0) };
        let outcome = done(PageSize::Huge2M.bytes(), Duration::from_millis(2));
        (0..200).for_each(|_| expectations.learn(&Outcome { action: vacate, ..outcome }));
        let Cost { copied, cpu } = expectations.cost(vacate, false);
        assert!(copied == PageSize::Huge2M.bytes() && (1999..=2000).contains(&cpu.as_micros()), "{cpu:?}");
        assert_eq!(expectations.cost(PROMOTE, false), promotion);
    }

    #[test]
    fn the_way_back_of_a_giant_is_a_copy_and_teaches_nothing_about_splits() {
        let mut expectations = Expectations::default();
        let demote = |to| Action::Demote { vm: VmId(0), window: WindowIndex::new(0), to };
        let split = expectations.cost(demote(PageSize::Base4K), false);
        let outcome = done(PageSize::Giant1G.bytes(), Duration::from_millis(500));
        (0..200).for_each(|_| expectations.learn(&Outcome { action: demote(PageSize::Huge2M), ..outcome }));
        let Cost { copied, cpu } = expectations.cost(demote(PageSize::Huge2M), false);
        assert!(copied == PageSize::Giant1G.bytes() && (499..=500).contains(&cpu.as_millis()), "{cpu:?}");
        assert_eq!(expectations.cost(demote(PageSize::Base4K), false), split);
    }

    #[test]
    fn an_action_that_once_exceeded_a_burst_is_tried_again_and_learnt_anew() {
        let mut expectations = Expectations::default();
        let mut budget = Budget::new(BudgetLimits::default(), Moment::START);
        (0..100).for_each(|_| expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::from_secs(2))));
        assert!(expectations.cost(PROMOTE, false).cpu > BudgetLimits::default().burst);
        let mut asked = 0;
        // An hour, second by second: the debt is paid before the next action, and a burst of 125 ms is then more
        // than a copy needs.
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
    fn a_copy_that_takes_a_hundred_times_as_long_as_the_others_hardly_changes_what_is_expected() {
        let mut expectations = Expectations::default();
        let mut teach = |micros| {
            expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::from_micros(micros)));
            expectations.cost(PROMOTE, false).cpu.as_micros()
        };
        for number in 0..100 {
            let micros = teach(if number % 50 == 25 { 50_000 } else { 500 });
            assert!((490..=650).contains(&micros), "{micros} after {number}");
        }
    }

    #[test]
    fn what_cost_nothing_for_long_is_learnt_anew() {
        let mut expectations = Expectations::default();
        (0..300).for_each(|_| expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::ZERO)));
        assert_eq!(expectations.cost(PROMOTE, false).cpu, Duration::ZERO);
        (0..100).for_each(|_| expectations.learn(&done(PageSize::Huge2M.bytes(), Duration::from_millis(1))));
        assert!((990..=1000).contains(&expectations.cost(PROMOTE, false).cpu.as_micros()));
    }

    #[test]
    fn a_refusal_teaches_nothing_about_the_cost() {
        let mut expectations = Expectations::default();
        let refused = OutcomeResult::Refused(crate::outcome::Refusal::Busy);
        expectations.learn(&Outcome { result: refused, ..done(PageSize::Huge2M.bytes(), Duration::from_secs(9)) });
        assert_eq!(expectations.cost(PROMOTE, false), Expectations::default().cost(PROMOTE, false));
    }
}
