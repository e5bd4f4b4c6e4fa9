//! What a save into files and a migration have in common: the parts of a run, and the state of the work.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use wideleaf_control::vm::{BeforePauseView, MigratedView, SavingView};
use wideleaf_memory::panicked::{Panicked, caught};
use wideleaf_memory::save::{SaveProgress, SaveReport};
use wideleaf_memory::second_level::FaultCounters;
use wideleaf_memory::{GuestRam, LinuxHost, SecondLevel};
use wideleaf_policies::PageSize;
use wideleaf_vmm::GuestExit;
use wideleaf_vmm::devices::virtio::block::DiskLocks;
use wideleaf_vmm::kvm::KvmSecondLevel;
use wideleaf_vmm::machine::MachineSaver;
use wideleaf_vmm::run_loop::RunControl;

use super::restoring::Restoring;
use crate::migration::doubt::Doubt;
use crate::past_saves::PastSaves;
use crate::policy_switch::PolicySwitch;
use crate::session::Session;
use crate::spec::RunSpec;
use crate::users_pause::UsersPause;

/// Parts of a run that a save is about.
pub struct SavedParts {
    /// RAM of the guest.
    pub ram: Arc<GuestRam>,
    /// Address space of this process.
    pub host: Arc<LinuxHost>,
    /// KVM's side of the VM.
    pub second_level: Arc<KvmSecondLevel>,
    /// Reader of the machine's state.
    pub machine: MachineSaver,
    /// Control of the vCPUs, for the end of a VM that has left.
    pub control: Arc<RunControl>,
    /// Session of the run.
    pub session: Weak<Session>,
    /// Pause that the VM's users share.
    pub pause: Arc<UsersPause>,
    /// Policy of the run, which may have been changed.
    pub policy: Arc<PolicySwitch>,
    /// Snapshot from which the guest continues, if it does.
    pub restoring: Option<Arc<Restoring>>,
    /// Locks of the disks that the guest can write.
    pub disks: DiskLocks,
    /// Whether some RAM of a guest that came from another run is still there.
    pub is_arriving: Box<dyn Fn() -> bool + Send + Sync>,
    /// Count of what is over.
    pub past: PastSaves,
    /// Specification of the run.
    pub spec: RunSpec,
}

impl SavedParts {
    /// Whether some RAM of the guest has not come yet: it cannot be saved.
    pub(crate) fn is_filling(&self) -> bool {
        self.restoring.as_ref().is_some_and(|restoring| !restoring.is_over()) || (self.is_arriving)()
    }

    /// Why a save that was begun cannot succeed any more, if that is so. A guest that has reset its machine waits for
    /// the end of the save, in which the manager rests.
    pub(crate) fn why_over(&self) -> Option<&'static str> {
        if self.control.is_stopping() {
            return Some("it ends");
        }
        self.machine.waits_for_boot().then_some("its guest resets its machine; try again")
    }

    /// Ends a guest that is paused here and has left: no vCPU enters it, whatever is resumed, and what waits in the
    /// rings of its devices is the other side's to do.
    pub(crate) fn end_guest(&self) {
        self.second_level.end_devices();
        self.control.stop(GuestExit::Stopped);
    }

    /// Whether no other connection has replaced the one that serves the pages that follow a guest. Asked again and
    /// again, it ends the devices of a guest that was ended meanwhile.
    pub(crate) fn follows(&self, shared: &Shared) -> bool {
        self.end_devices_if_stopped();
        !shared.is_replaced()
    }

    /// Ends the devices of a guest that was ended while a migration keeps it paused: their threads wait at the gate.
    pub(crate) fn end_devices_if_stopped(&self) {
        if self.control.is_stopping() {
            self.second_level.end_devices();
        }
    }
}

/// State of the save under way, and of a VM that has left.
#[derive(Default)]
pub(crate) struct Shared {
    /// Work that the thread does now.
    pub(crate) under_way: Mutex<Option<UnderWay>>,
    pub(crate) progress: Mutex<Option<SavingView>>,
    pub(crate) is_ending: AtomicBool,
    /// Set where the save is to end early.
    cancel: AtomicBool,
    pub(crate) migrated: Mutex<Option<MigratedView>>,
    /// Why the VM is paused after a migration that was not answered.
    pub(crate) doubt: Mutex<Option<Doubt>>,
    /// Name of the target at which the guest runs while a part of its RAM is still here. Set and looked at under the
    /// lock of the doubt where a guest in doubt could be resumed.
    pub(crate) serves: Mutex<Option<String>>,
    /// Set where another connection takes the place of the one over which pages go.
    is_replaced: AtomicBool,
    /// What the guest paid for the save under way, which is about to fail.
    failed: Mutex<Option<BeforePauseView>>,
}

/// Work of the thread that saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnderWay {
    /// It writes a snapshot.
    Snapshot,
    /// It moves the VM, or sends what is missing at the target.
    Migration,
}

impl Shared {
    /// Whether another connection takes the place of this one.
    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    pub(crate) fn set_replaced(&self, is_replaced: bool) {
        self.is_replaced.store(is_replaced, Ordering::Relaxed);
    }

    /// Whether the VM ends.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub(crate) fn show(&self, progress: SaveProgress) {
        let bytes = |pages| PageSize::Base4K.bytes().get() * pages;
        let view =
            SavingView { round: progress.round, done_bytes: bytes(progress.done), total_bytes: bytes(progress.of) };
        *self.progress.lock() = Some(view);
    }

    /// Notes what the guest paid for a save that fails, if that has read RAM.
    pub(crate) fn note_failed(&self, paid: Option<BeforePauseView>) {
        *self.failed.lock() = paid.filter(|_| self.progress.lock().is_some());
    }

    /// Takes what the guest paid for a save that has failed.
    pub(crate) fn take_failed(&self) -> Option<BeforePauseView> {
        self.failed.lock().take()
    }

    pub(crate) fn cancelled(&self) -> &AtomicBool {
        &self.cancel
    }

    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    pub(crate) fn uncancel(&self) {
        self.cancel.store(false, Ordering::Relaxed);
    }
}

/// What KVM did for the guest before the pause, for clients.
pub(crate) fn before_pause(report: &SaveReport) -> Option<BeforePauseView> {
    report.before_pause.map(|before| paid(before.time, before.counters))
}

fn paid(time: Duration, counters: FaultCounters) -> BeforePauseView {
    BeforePauseView {
        seconds: time.as_secs_f64(),
        system_ms: counters.time_in_kernel().as_secs_f64() * 1e3,
        faults: counters.faults,
        exits: counters.exits,
    }
}

/// What KVM does for the guest while it is saved: of a save that fails, no report tells it.
pub(crate) struct Price<'a> {
    second_level: &'a dyn SecondLevel,
    began: Instant,
    /// Counts when the save began; `None` where KVM does not count.
    counted: Option<FaultCounters>,
}

impl Price<'_> {
    /// The price from now on.
    pub(crate) fn from_now(second_level: &dyn SecondLevel) -> Price<'_> {
        Price { second_level, began: Instant::now(), counted: second_level.fault_counters().ok() }
    }

    /// The price until now; `None` where it is not known, or a vCPU has ended.
    pub(crate) fn so_far(&self) -> Option<BeforePauseView> {
        let counters = self.second_level.fault_counters().ok()?.since(self.counted?)?;
        Some(paid(self.began.elapsed(), counters))
    }
}

/// Does a part of a save. A panic in it is an error, so that the caller undoes what was begun.
///
/// # Errors
/// Those of `work`, and one line after a panic.
pub(crate) fn unless_it_panics<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let error = |panicked: Panicked| format!("the thread that saves {panicked}; this is a defect: report it");
    caught(work).unwrap_or_else(|panicked| Err(error(panicked)))
}

/// Whether the other end of the pipe is closed.
pub(crate) fn has_gone(client: &File) -> bool {
    let mut ends = [PollFd::new(client.as_fd(), PollFlags::empty())];
    poll(&mut ends, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_paid_is_told_once_and_only_of_a_save_that_has_read_ram() {
        let shared = Shared::default();
        let paid = Some(BeforePauseView { faults: 7, ..BeforePauseView::default() });
        shared.note_failed(paid);
        assert_eq!(shared.take_failed(), None);
        shared.show(SaveProgress { round: 1, done: 0, of: 9 });
        shared.note_failed(paid);
        assert_eq!((shared.take_failed(), shared.take_failed()), (paid, None));
    }

    #[test]
    fn a_panic_in_a_part_of_a_save_is_an_error_that_its_client_reads() {
        let error = unless_it_panics(|| -> Result<(), String> { panic!("no such row") }).expect_err("it panics");
        assert_eq!(error, "the thread that saves panicked: no such row; this is a defect: report it");
        assert_eq!(unless_it_panics(|| Err::<(), _>("it ends".to_owned())).expect_err("it fails"), "it ends");
        assert_eq!(unless_it_panics(|| Ok(5)), Ok(5));
    }
}
