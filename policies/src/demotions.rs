//! Whether a window of a VM can be demoted alone. One window shows it.
//!
//! ```text
//!                      ┌─ on base pages ─▶ alone
//!   first demotion ────┤
//!   of a VM with KVM   └─ huge and held ─▶ whole: its memslot is mapped at 4 KiB, hot windows included, and no memory
//!                                          is freed. It is taken back, and no further window of the VM is demoted
//!   release, vacated window ─ done ──────▶ alone: only windows of anonymous RAM are, and those are split
//! ```

use core::ops::ControlFlow;

use alloc::collections::BTreeMap;

use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::is_promotable;
use crate::expectations::Expectations;
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::{Backing, Snapshot, VmId, VmSnapshot};
use crate::units::{Moment, PageSize, WindowIndex};

/// RAM of a VM, as far as outcomes have shown it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ram {
    /// The next snapshot shows how this window was demoted.
    Tried(WindowIndex),
    /// Each window can be demoted alone.
    Alone,
    /// The demotion of this window held all of its memslot.
    Whole(WindowIndex),
}

/// What is known of the RAM, by VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct Demotions(BTreeMap<VmId, Ram>);

impl Demotions {
    /// Looks at the windows that were demoted first.
    pub fn observe(&mut self, snapshot: &Snapshot) {
        self.0.retain(|id, ram| {
            let Ram::Tried(window) = *ram else { return true };
            let Some(vm) = snapshot.vm(*id) else { return false };
            *ram = match vm.row(window) {
                Some(row) if vm.backing[row] == Backing::Base4K => Ram::Alone,
                Some(row) if vm.is_held[row] => Ram::Whole(window),
                _ => return false,
            };
            true
        });
    }

    /// Whether a window of this VM may be demoted now.
    pub fn may_demote(&self, vm: &VmSnapshot) -> bool {
        !matches!(self.0.get(&vm.vm), Some(Ram::Tried(_) | Ram::Whole(_)))
    }

    /// Notes that the demotion of a window is planned. Only a VM with KVM's counters can be held.
    pub fn planned(&mut self, vm: &VmSnapshot, row: usize) {
        if vm.mapping.is_some() {
            self.0.entry(vm.vm).or_insert(Ram::Tried(vm.windows[row]));
        }
    }

    /// Requests that a window becomes base pages, if a window of its VM may be demoted now. Returns whether it was.
    pub fn request(
        &mut self,
        vm: &VmSnapshot,
        row: usize,
        expectations: &Expectations,
        budget: &mut Budget,
        plan: &mut Plan,
    ) -> ControlFlow<(), bool> {
        if !self.may_demote(vm) {
            return ControlFlow::Continue(false);
        }
        let demote = Action::Demote { vm: vm.vm, window: vm.windows[row], to: PageSize::Base4K };
        expectations.request(demote, false, budget, plan)?;
        self.planned(vm, row);
        ControlFlow::Continue(true)
    }

    /// Row of the window that was demoted and held its memslot.
    pub fn held(&self, vm: &VmSnapshot) -> Option<usize> {
        match self.0.get(&vm.vm) {
            Some(Ram::Whole(window)) => vm.row(*window).filter(|row| vm.is_held[*row]),
            _ => None,
        }
    }

    /// Requests the windows that held their memslots: then each window of those has its own size again.
    pub fn take_back(
        &self,
        snapshot: &Snapshot,
        now: Moment,
        expectations: &Expectations,
        budget: &mut Budget,
        plan: &mut Plan,
    ) -> ControlFlow<()> {
        snapshot.vms.iter().try_for_each(|vm| match self.held(vm).filter(|row| is_promotable(vm, *row, now)) {
            Some(row) => expectations.request_huge(vm, row, budget, plan),
            None => ControlFlow::Continue(()),
        })
    }

    /// Forgets a first demotion that was not done, and learns from what else frees part of a huge page.
    pub fn learn(&mut self, outcome: &Outcome) {
        let vm = outcome.action.vm();
        match (outcome.action, outcome.result) {
            (Action::Release { .. } | Action::Vacate { .. }, OutcomeResult::Done) => {
                self.0.insert(vm, Ram::Alone);
            }
            (Action::Demote { window, to: PageSize::Base4K, .. }, result)
                if result != OutcomeResult::Done && self.0.get(&vm) == Some(&Ram::Tried(window)) =>
            {
                self.0.remove(&vm);
            }
            _ => {}
        }
    }
}
