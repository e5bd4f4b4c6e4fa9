//! Replaces the policy of a running loop. The new one begins without a past, with the snapshot of the next tick.
//! Values of a sensor stay where both policies ask for it.
//!
//! ```text
//!   wish ─▶ recorded? at faults? RAM, memslots? ─▶ giant under way arrives ─▶ missing sensors start ─▶ unused ones end
//!              └───────── SwitchError: the policy before goes on ◀────────────── one is not available
//! ```
//!
//! When the guest begins anew, so does its policy: the loop rests while the RAM is cleared, and forgets
//! the previous guest.
//!
//! The policy that a run began with can always come back under the conditions of the start: without a sensor that
//! was missing then.

use std::sync::Arc;

use wideleaf_policies::policy::{Needs, RamStart};
use wideleaf_policies::{Gpa, PageSize, Policy};

use super::sampling::Unanswered;
use super::swaps::Swaps;
use super::vm_state::VmState;
use super::{ManagedVm, ManagerLoop};
use crate::second_level::Slot;
use crate::side_mapping::GIANT;

/// Why a policy does not take over. The previous one continues.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// The recording names one policy, and a replay compares all plans with that one.
    #[error("the run is recorded, and a recording holds one policy; start it without --record")]
    Recorded,
    /// The present policy answers faults, or has RAM that no other policy can use.
    #[error("{0} answers the guest's faults and cannot be replaced at run time; start it with another --policy")]
    AnswersFaults(&'static str),
    /// The wanted policy answers faults, and some were answered before.
    #[error("{0} must answer the guest's faults from the first one on; start it with --policy {0}")]
    BeginsAtFirstFault(&'static str),
    /// The RAM did not start as the policy needs it.
    #[error(
        "{policy} needs all RAM on large pages before the guest runs, and {windows} windows are not; start it with \
         --policy {policy}"
    )]
    NotHuge {
        /// Name of the policy.
        policy: &'static str,
        /// Number of windows that are not on large pages.
        windows: usize,
    },
    /// No memslot contains a whole giant.
    #[error(
        "{0} makes pages of 1 GiB, which need memslots of at least that size, and here they are smaller; start it \
         with --policy {0}"
    )]
    SmallSlots(&'static str),
    /// A sensor that the policy asks is not available now.
    #[error("{policy} needs to know {question}, and no sensor can tell: {why}")]
    Unanswered {
        /// Name of the policy.
        policy: &'static str,
        /// What the policy needs to know.
        question: &'static str,
        /// Why no sensor can tell.
        why: String,
    },
    /// The loop has ended.
    #[error("this VM has ended")]
    Ended,
}

impl ManagerLoop {
    /// Makes `policy` decide from the next tick on. Waits first for a giant that is being moved, for as long as
    /// its copy takes.
    ///
    /// # Errors
    /// [`SwitchError`] if the policy needs something that only the start of a run can provide. Nothing
    /// has changed then.
    pub fn switch_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), SwitchError> {
        self.may_switch_to(policy.as_ref())?;
        // The outcome of a giant belongs to the policy that planned it.
        self.rest();
        let unanswered = self.change_sensors(policy.as_ref())?;
        self.report.unanswered = unanswered;
        if policy.largest_page() == PageSize::Giant1G {
            self.report.unanswered.extend(self.giants.why_no_page());
        }
        self.promotes = policy.promotes();
        self.report.policy = policy.name();
        self.report.policy_changes.push((self.host.now(), policy.name()));
        *self.policy.lock() = policy;
        Ok(())
    }

    /// Ends all moves and samples: a giant arrives, and windows that were aside come back.
    pub(super) fn rest(&mut self) {
        self.finish_last_giant();
        self.finish_samples();
        self.rest_supply();
    }

    /// Begins anew with `policy`, of the same kind as the one before: the RAM now holds another guest. Counts stay,
    /// except for the moments of the first and last promotion, which belong to the guest. A VM that was left alone
    /// after a panic still is.
    pub(super) fn begin_anew(&mut self, policy: Box<dyn Policy>) {
        *self.policy.lock() = policy;
        self.vms.iter_mut().for_each(VmState::forget);
        (self.report.first_done_at, self.report.last_done_at) = (None, None);
    }

    fn may_switch_to(&mut self, policy: &dyn Policy) -> Result<(), SwitchError> {
        let (name, present) = (policy.name(), self.report.policy);
        if self.recorder.is_some() {
            return Err(SwitchError::Recorded);
        }
        if self.policy.lock().answers_faults() {
            return Err(SwitchError::AnswersFaults(present));
        }
        if policy.answers_faults() {
            return Err(SwitchError::BeginsAtFirstFault(name));
        }
        if name == self.began_with {
            return Ok(());
        }
        if policy.largest_page() == PageSize::Giant1G && self.are_slots_small() {
            return Err(SwitchError::SmallSlots(name));
        }
        match policy.ram_start() {
            RamStart::HugeAndPrefaulted => match self.windows_not_large() {
                0 => Ok(()),
                windows => Err(SwitchError::NotHuge { policy: name, windows }),
            },
            RamStart::OnBasePages | RamStart::OnReservableFrames => Ok(()),
        }
    }

    /// Whether a giant of some VM lies in several memslots.
    fn are_slots_small(&self) -> bool {
        let has_small = |vm: &ManagedVm| {
            let slots = vm.second_level.as_ref().map(|kvm| kvm.slots()).unwrap_or_default();
            let is_in = |giant: Gpa, slot: &Slot| slot.range.contains(giant) && giant + GIANT <= slot.range.end();
            let mut giants = vm.ram.iter().flat_map(|ram| ram.giants());
            giants.any(|giant| !slots.iter().any(|slot| is_in(giant, slot)))
        };
        self.managed_vms().any(has_small)
    }

    fn windows_not_large(&mut self) -> usize {
        // A window that is aside looks unbacked.
        self.finish_samples();
        let snapshot = self.sense();
        snapshot.vms.iter().flat_map(|vm| &vm.backing).filter(|backing| !backing.is_large()).count()
    }

    /// Starts the missing sensors, then ends those that no policy needs any more. Returns lines for
    /// the open questions.
    fn change_sensors(&mut self, policy: &dyn Policy) -> Result<Vec<String>, SwitchError> {
        let needs = policy.needs();
        let had_access: Vec<bool> = self.vms.iter().map(|vm| vm.sampling.access().is_some()).collect();
        let budget = (self.config.sampling, self.config.sampling_burst);
        let mut lines = Vec::new();
        for index in 0..self.vms.len() {
            let VmState { managed, sampling, .. } = &mut self.vms[index];
            let missing = sampling.start_sensors(&self.host, managed, needs, budget);
            lines.extend(missing.iter().map(|missing| missing.line(managed.id)));
            lines.extend(managed.why_gains_are_assumed(needs));
            let first = missing.into_iter().next().filter(|_| policy.name() != self.began_with);
            if let Some(Unanswered { question, why }) = first {
                self.keep_sensors(self.needs);
                return Err(SwitchError::Unanswered { policy: policy.name(), question, why });
            }
        }
        self.needs = needs;
        self.keep_sensors(needs);
        for (vm, had_access) in self.vms.iter_mut().zip(had_access) {
            let access = vm.sampling.access().filter(|_| !had_access && !vm.is_left_alone);
            if let Some(access) = access {
                vm.swaps = Swaps::new(access, self.config.copy_threads);
            }
        }
        Ok(lines)
    }

    /// Ends the sensors that `needs` does not name. No sample is under way, so no window is aside.
    fn keep_sensors(&mut self, needs: Needs) {
        let access = Arc::clone(&self.access);
        let mut shared = access.lock();
        // A shared sensor does not end while another part holds it.
        shared.clear();
        for vm in &mut self.vms {
            vm.swaps.take_if(|_| !needs.access);
            vm.sampling.keep_sensors(needs, self.config.sampling);
        }
        shared.extend(self.vms.iter().filter_map(|vm| vm.sampling.access()));
    }
}
