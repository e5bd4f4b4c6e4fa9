//! Brings back what was large before an event ([`wideleaf_policies::recovery`]): the gate's events and the snapshot of
//! a tick in, requests before those of the policy out, within a burst of the budget.
//!
//! A recorded loop has no recoveries: a recording holds the plans of one policy.

use std::time::Duration;

use parking_lot::MutexGuard;
use wideleaf_policies::recovery::{Cause, Events, Progress, Recovered, Recovery};
use wideleaf_policies::{Outcome, Plan, Snapshot};

use super::vm_state::VmState;
use super::{ManagerLoop, NEVER};

/// Longest pulse while an event is under way: its end is noticed within that time.
pub(super) const EVENT_PULSE: Duration = Duration::from_millis(250);

impl VmState {
    fn recovery(&self) -> Option<MutexGuard<'_, Recovery>> {
        self.managed.recovery.as_ref().map(|recovery| recovery.lock())
    }

    /// The recovery under way.
    pub(super) fn recovering(&self) -> Option<Progress> {
        self.recovery()?.running()
    }
}

impl ManagerLoop {
    /// Takes the events of this tick into account, and requests the windows of recoveries before the policy plans. A
    /// requested window is not ready for the policy: it would name it again.
    pub(super) fn recover(&mut self, snapshot: &mut Snapshot, plan: &mut Plan) {
        if self.recorder.is_some() || !self.promotes {
            return;
        }
        let now = self.host.now();
        for (vm, rows) in self.vms.iter().zip(&snapshot.vms) {
            let Some(mut recovery) = vm.recovery() else { continue };
            if !vm.is_there() {
                recovery.end();
                continue;
            }
            let over = recovery.see(&vm.events, rows, now, vm.may_be_disturbed());
            over.into_iter().filter(is_worth_counting).for_each(|over| {
                tracing::debug!("{}: recovery after {}: {over:?}", vm.managed.id, over.cause.name());
                self.report.recoveries.entry(over.cause.name()).or_default().count(over.took);
            });
        }
        self.set_burst();
        for (vm, rows) in self.vms.iter().zip(&mut snapshot.vms).filter(|(vm, _)| vm.may_be_disturbed()) {
            let Some(recovery) = vm.recovery() else { continue };
            let before = plan.actions().len();
            recovery.plan(rows, now, &mut self.budget, plan);
            for planned in &plan.actions()[before..] {
                let row = rows.row(planned.action.window()).expect("it is from these rows");
                rows.ready_at[row] = NEVER;
            }
        }
    }

    /// Multiplies the budget's rates while a recovery has work in a guest that may be acted on, and ends that
    /// afterwards.
    fn set_burst(&mut self) {
        let disturbed = self.vms.iter().filter(|vm| vm.may_be_disturbed());
        let working = disturbed.filter_map(VmState::recovery).filter(|recovery| recovery.has_work());
        let bounds = working.map(|recovery| recovery.limits()).max_by_key(|limits| limits.burst);
        let limits = bounds.map_or(self.limits(), |bounds| bounds.burst_of(self.limits()));
        if self.budget.limits() != limits {
            self.budget.set_limits(limits);
        }
    }

    /// Reads the events of every guest. One that begins or ends makes a scan due: it may have split any window, which
    /// the memory in use does not show.
    pub(super) fn ask_events(&mut self) {
        let now = self.host.now();
        for vm in &mut self.vms {
            let events = vm.managed.gate.as_ref().map_or_else(Events::default, |gate| gate.events(now));
            if begun_and_ended(events) != begun_and_ended(vm.events) {
                self.scan.forget();
            }
            vm.events = events;
        }
    }

    /// Whether an event has begun or ended since the latest tick.
    pub(super) fn has_event(&self) -> bool {
        let now = self.host.now();
        let is_new = |vm: &VmState| {
            let gate = vm.managed.gate.as_ref().filter(|_| vm.managed.recovery.is_some());
            gate.is_some_and(|gate| begun_and_ended(gate.events(now)) != begun_and_ended(vm.events))
        };
        self.vms.iter().any(is_new)
    }

    /// Whether an event is under way in some guest.
    pub(super) fn is_in_event(&self) -> bool {
        self.vms.iter().any(|vm| vm.managed.recovery.is_some() && vm.events.present.is_some())
    }

    /// Whether a recovery has windows to promote now.
    pub(super) fn is_recovering(&self) -> bool {
        let has_work = |vm: &VmState| vm.recovery().is_some_and(|recovery| recovery.has_work());
        self.promotes && self.vms.iter().any(|vm| vm.may_be_disturbed() && has_work(vm))
    }

    /// Tells the recoveries of a VM what an action cost.
    pub(super) fn learn_for_recovery(&self, outcome: &Outcome) {
        let of = self.vms.iter().filter(|vm| vm.managed.id == outcome.action.vm());
        of.filter_map(VmState::recovery).for_each(|mut recovery| recovery.learn(outcome));
    }
}

/// The event under way, and the number of those that are over.
fn begun_and_ended(events: Events) -> (Option<Cause>, u64) {
    (events.present, events.ended)
}

/// Whether it says something: a monitor that did not answer for a moment cost nothing in most cases.
fn is_worth_counting(over: &Recovered) -> bool {
    over.cause != Cause::Unseen || over.lost > 0
}
