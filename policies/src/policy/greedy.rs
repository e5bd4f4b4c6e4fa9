//! Every resident window becomes large, in address order, as fast as the budget allows: the behaviour of
//! `enabled=always` if khugepaged had no limits (Linux, admin-guide/mm/transhuge). The upper bound for speed
//! and for bloat.

use core::ops::ControlFlow;

use super::Policy;
use crate::action::Plan;
use crate::budget::Budget;
use crate::candidates::{Turns, is_promotable};
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::snapshot::Snapshot;
use crate::units::Moment;

/// Promotes all windows on base pages. VMs take turns window by window, so that a large VM does not starve
/// a small one.
#[derive(Clone, Debug, Default)]
pub struct Greedy {
    expectations: Expectations,
    turns: Turns,
}

impl Policy for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let expectations = &self.expectations;
        self.turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            if !is_promotable(vm, row, now) {
                return ControlFlow::Continue(());
            }
            expectations.request_huge(vm, row, budget, plan)
        });
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
    }
}
