//! Every resident window becomes large, in address order, as fast as the budget allows. What `enabled=always` would
//! do if khugepaged had no limits (Linux, admin-guide/mm/transhuge): the upper line for speed, and for bloat.

use core::time::Duration;

use super::Policy;
use crate::action::{Action, Plan};
use crate::budget::{Budget, Cost};
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::{Backing, Snapshot, VmSnapshot};
use crate::units::{Bytes, Moment, PageSize};

/// Promotes whatever is backed by base pages. VMs take turns window by window, so that a small VM is not starved by
/// a large one.
#[derive(Clone, Debug)]
pub struct Greedy {
    /// What a promotion costs here: starts at a guess, then follows what promotions did cost.
    expected_cpu: Duration,
}

impl Greedy {
    /// Before the first outcome: 2 MiB at the 3.5 GiB/s that `MADV_COLLAPSE` was measured at.
    const EXPECTED_CPU_AT_FIRST: Duration = Duration::from_micros(560);

    /// A policy that has learnt nothing yet.
    pub const fn new() -> Greedy {
        Greedy { expected_cpu: Self::EXPECTED_CPU_AT_FIRST }
    }

    fn cost(&self) -> Cost {
        Cost { copied: PageSize::Huge2M.bytes(), cpu: self.expected_cpu }
    }
}

impl Default for Greedy {
    fn default() -> Greedy {
        Greedy::new()
    }
}

fn is_candidate(vm: &VmSnapshot, row: usize, now: Moment) -> bool {
    vm.backing[row] == Backing::Base4K && vm.ready_at[row] <= now
}

impl Policy for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let mut queues: alloc::vec::Vec<_> =
            snapshot.vms.iter().map(|vm| (vm, (0..vm.len()).filter(move |row| is_candidate(vm, *row, now)))).collect();
        while !queues.is_empty() {
            let mut stop = false;
            queues.retain_mut(|(vm, rows)| {
                if stop || plan.is_full() {
                    stop = true;
                    return false;
                }
                let Some(row) = rows.next() else {
                    return false;
                };
                if budget.try_take(self.cost()).is_err() {
                    stop = true;
                    return false;
                }
                plan.push(Action::Promote { vm: vm.vm, window: vm.windows[row], to: PageSize::Huge2M }, self.cost());
                true
            });
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        let was_copied = outcome.result == OutcomeResult::Done && outcome.cost.copied > Bytes::ZERO;
        if was_copied {
            // An exponential mean over about eight outcomes: follows the machine within a tick, ignores one outlier.
            self.expected_cpu = (self.expected_cpu * 7 + outcome.cost.cpu) / 8;
        }
    }
}
