//! Another policy for a loop that is at work. It begins without a past, upon the snapshot of the next tick; what a sensor has found out
//! stays where both policies ask for it.
//!
//! ```text
//!   a wish ─▶ recorded? at faults? RAM, memslots? ─▶ the giant under way arrives ─▶ sensors that are missing start ─▶ those that nobody
//!                └───────── SwitchError: the policy before goes on ◀────────────────── one can not be had             asks any more end
//! ```
//!
//! A guest that begins anew has its policy anew: the loop rests while its RAM is cleared, and forgets the guest that was there.
//!
//! A policy that a run began with is taken back as it was taken then: without a sensor that it had to do without.

use std::sync::{Arc, PoisonError};

use wideleaf_policies::policy::{Needs, RamStart};
use wideleaf_policies::window::WindowState;
use wideleaf_policies::{Gpa, PageSize, Policy, WindowIndex};

use super::acting::Swaps;
use super::sampling::{Sampling, Unanswered};
use super::{ManagedVm, ManagerLoop, lock};
use crate::second_level::Slot;
use crate::side_mapping::GIANT;

/// Why a policy does not take over. The one before goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// The recording names one policy, and whoever replays it holds all plans against that one.
    #[error("it is recorded, and a recording is of one policy: start it without --record")]
    Recorded,
    /// The present one answers faults, or has RAM that nobody else can use.
    #[error("{0} answers the guest's faults, which can not wait for another: start it with another --policy")]
    AnswersFaults(&'static str),
    /// The wanted one answers faults, and some have been answered.
    #[error("{0} answers the guest's faults from the first on: start it with --policy {0}")]
    BeginsAtFirstFault(&'static str),
    /// RAM did not start as the policy takes it.
    #[error(
        "{policy} has all RAM on large pages before the guest runs, and here {windows} windows are not: start it with --policy {policy}"
    )]
    NotHuge {
        /// The policy.
        policy: &'static str,
        /// Windows that are not on large pages.
        windows: usize,
    },
    /// No memslot holds a giant.
    #[error(
        "{0} makes pages of 1 GiB, which KVM maps in memslots as large, and here they are smaller: start it with --policy {0}"
    )]
    SmallSlots(&'static str),
    /// A sensor that it asks can not be had now.
    #[error("{policy} asks {question}, and that can not be seen: {why}")]
    Unanswered {
        /// The policy.
        policy: &'static str,
        /// What it wants to know.
        question: &'static str,
        /// Why nothing can tell.
        why: String,
    },
    /// The loop has ended.
    #[error("this VM has ended")]
    Ended,
}

impl ManagerLoop {
    /// Has `policy` decide from the next tick on. A giant that is being moved arrives first, which takes as long as its copy.
    ///
    /// # Errors
    /// [`SwitchError`]: what the policy needs and a run has from its start alone. Nothing has changed then.
    pub fn switch_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), SwitchError> {
        self.may_switch_to(policy.as_ref())?;
        // The outcome of a giant is for the policy that planned it.
        self.rest();
        let unanswered = self.change_sensors(policy.as_ref())?;
        self.report.unanswered = unanswered;
        if policy.largest_page() == PageSize::Giant1G {
            self.report.unanswered.extend(self.giants.why_no_page());
        }
        self.promotes = policy.promotes();
        self.report.policy = policy.name();
        self.report.policy_changes.push((self.host.now(), policy.name()));
        *lock(&self.policy) = policy;
        Ok(())
    }

    /// Ends what is under way: a giant arrives, windows come back from where they were looked at.
    pub(super) fn rest(&mut self) {
        self.finish_last_giant();
        self.finish_samples();
    }

    /// Begins anew with `policy`, of the same kind as the one before: the guest is another one, in the same RAM. What was counted stays, but for
    /// when memory was promoted, which is of the guest there is; who was left alone because something panicked still is.
    pub(super) fn begin_anew(&mut self, policy: Box<dyn Policy>) {
        *lock(&self.policy) = policy;
        for (states, vm) in self.states.iter_mut().zip(&mut self.sampling) {
            states.fill(WindowState::Ready);
            vm.forget();
        }
        self.given_back_from.fill(WindowIndex::new(0));
        (self.report.first_done_at, self.report.last_done_at) = (None, None);
    }

    fn may_switch_to(&mut self, policy: &dyn Policy) -> Result<(), SwitchError> {
        let (name, present) = (policy.name(), self.report.policy);
        if self.recorder.is_some() {
            return Err(SwitchError::Recorded);
        }
        if lock(&self.policy).answers_faults() {
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
        self.vms.iter().any(has_small)
    }

    fn windows_not_large(&mut self) -> usize {
        // What is aside looks unbacked.
        self.finish_samples();
        let snapshot = self.sense();
        snapshot.vms.iter().flat_map(|vm| &vm.backing).filter(|backing| !backing.is_large()).count()
    }

    /// Starts the sensors that are missing and then ends those that nobody asks any more. Lines for the questions that stay open.
    fn change_sensors(&mut self, policy: &dyn Policy) -> Result<Vec<String>, SwitchError> {
        let needs = policy.needs();
        let had_access: Vec<bool> = self.sampling.iter().map(|sampling| sampling.access().is_some()).collect();
        let budget = (self.config.sampling, self.config.sampling_burst);
        let mut lines = Vec::new();
        for index in 0..self.vms.len() {
            let vm = &self.vms[index];
            let missing = self.sampling[index].start_sensors(&self.host, vm, needs, budget);
            lines.extend(missing.iter().map(|missing| missing.line(vm.id)));
            let first = missing.into_iter().next().filter(|_| policy.name() != self.began_with);
            if let Some(Unanswered { question, why }) = first {
                self.keep_sensors(self.needs);
                return Err(SwitchError::Unanswered { policy: policy.name(), question, why });
            }
        }
        self.needs = needs;
        self.keep_sensors(needs);
        for (index, had_access) in had_access.into_iter().enumerate() {
            let access = self.sampling[index].access().filter(|_| !had_access && !self.is_left_alone[index]);
            if let Some(access) = access {
                self.swaps[index] = Swaps::new(access, self.config.copy_threads);
            }
        }
        Ok(lines)
    }

    /// Ends the sensors that `needs` does not name. No sample is under way, so that no window is aside.
    fn keep_sensors(&mut self, needs: Needs) {
        let access = Arc::clone(&self.access);
        let mut shared = access.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever has a share of a sensor keeps it from ending.
        shared.clear();
        if !needs.access {
            self.swaps.fill_with(|| None);
        }
        self.sampling.iter_mut().for_each(|sampling| sampling.keep_sensors(needs, self.config.sampling));
        shared.extend(self.sampling.iter().filter_map(Sampling::access));
    }
}
