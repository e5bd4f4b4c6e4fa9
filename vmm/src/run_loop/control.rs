//! The requests to the vCPUs of a VM, their states, and the one lock that guards both.
//!
//! A guest that resets its machine, where that leads to another boot, has all vCPUs paused until another thread
//! has reset the rest of the machine. Then each vCPU's thread restores its own vCPU, and when the last one is
//! done, all continue:
//!
//! ```text
//!   Reset::No ── a vCPU's write, [`RunControl::ask_for_reset`] ─▶ Wanted
//!      ▲                                                            │ all paused: [`RunControl::wait`] says so
//!      │                                                            ▼
//!      │                                                   the machine is put back
//!      │                                                            │
//!      └── each vCPU is put back, paused still ◀── PuttingBack ◀────┘
//! ```
//!
//! A snapshot takes the state of paused vCPUs, each by its own thread as well ([`RunControl::save_vcpus`]).

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_memory::second_level::{PagingMode, SecondLevelError};

use super::GuestExit;
use crate::kvm::saved::{SavedTsc, SavedVcpu};
use crate::kvm::{Kicker, KvmError, TickedTime};

/// Time limit of [`RunControl::pause`]. A vCPU leaves the guest within microseconds of the signal. Longer delays
/// come from a page fault of the host (a giant page is zeroed in 0.1 to 0.3 s) or a slow serial sink.
pub const PAUSE_WAIT_MAX: Duration = Duration::from_secs(2);

/// Time after which a kick without effect is repeated. On hardware one is enough. In the NPT lab with its
/// emulated processors, about one in ten thousand had no effect, and the vCPU stayed in the guest.
const KICK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// The state of a vCPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VcpuState {
    /// In the guest, or handling an exit, or about to enter.
    Running,
    /// Waiting to be resumed, outside the guest.
    Paused,
    /// Ended: it will never enter the guest again.
    Finished,
}

/// The requests to the vCPUs of one VM, and their states.
#[derive(Debug)]
pub struct RunControl {
    inner: Mutex<Inner>,
    /// Signalled when something in `inner` changed.
    pub(super) changed: Condvar,
    pub(super) kickers: Vec<Kicker>,
    on_reset: OnReset,
    /// When the first vCPU was about to enter the guest.
    first_entry: OnceLock<Instant>,
}

/// The effect of a machine reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReset {
    /// End of the VM.
    #[default]
    Stop,
    /// Another boot from the same image, in the same RAM, with the same devices.
    Restart,
}

/// The progress of a machine reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reset {
    No,
    /// The vCPUs have to be paused.
    Wanted,
    /// This number of vCPUs still has to be restored.
    PuttingBack {
        left: usize,
    },
}

#[derive(Debug)]
pub(super) struct Inner {
    /// Number of pauses not yet undone.
    pauses: u32,
    pub(super) reset: Reset,
    /// Number of resets for which vCPUs were restored, or began to be.
    pub(super) resets: u64,
    /// Whether all vCPUs have to finish; `exit` has the reason.
    is_stopping: bool,
    exit: Option<GuestExit>,
    /// Number of vCPUs that will never write to a device again.
    pub(super) silent: usize,
    pub(super) vcpus: Vec<VcpuRecord>,
    /// What each vCPU's thread took of its vCPU, while a snapshot waits for it.
    pub(super) saving: Option<Vec<Option<Result<PausedVcpu, KvmError>>>>,
}

/// A paused vCPU and its time stamp counter.
pub(crate) type PausedVcpu = (SavedVcpu, SavedTsc);

/// The reasons why the state of the vCPUs cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum SaveVcpusError {
    /// A vCPU may run the guest, or is about to.
    #[error("its vCPUs are not paused; pause the VM first, and do not resume it meanwhile")]
    NotPaused,
    /// The VM has ended, or ends now.
    #[error("the VM has ended")]
    Ended,
    /// The guest resets its machine.
    #[error("the guest resets its machine; try again")]
    Resetting,
    /// Another thread takes the state.
    #[error("another thread saves it; wait for its end")]
    Busy,
    /// KVM did not give the state.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct VcpuRecord {
    pub(super) state: VcpuState,
    /// Paging mode when the vCPU was last paused or finished.
    pub(super) paging: Option<PagingMode>,
}

impl RunControl {
    /// Creates the control for one vCPU per kicker; all of them are about to run.
    pub fn new(kickers: Vec<Kicker>, on_reset: OnReset) -> Arc<RunControl> {
        let vcpus = vec![VcpuRecord { state: VcpuState::Running, paging: None }; kickers.len()];
        let inner = Inner {
            pauses: 0,
            reset: Reset::No,
            resets: 0,
            is_stopping: false,
            exit: None,
            silent: 0,
            vcpus,
            saving: None,
        };
        let (inner, changed, first_entry) = (Mutex::new(inner), Condvar::new(), OnceLock::new());
        Arc::new(RunControl { inner, changed, kickers, on_reset, first_entry })
    }

    /// Requests a reset of the machine, which the thread in [`RunControl::wait`] performs. Returns `false` where a
    /// reset ends this machine, or it is ending already.
    pub fn ask_for_reset(&self) -> bool {
        let mut inner = self.lock();
        if self.on_reset == OnReset::Stop || inner.is_stopping {
            return false;
        }
        // A request during another reset is covered by that one.
        if inner.reset == Reset::No {
            inner.reset = Reset::Wanted;
            self.kick_running(&inner);
            self.changed.notify_all();
        }
        true
    }

    /// Effect of a machine reset.
    pub fn on_reset(&self) -> OnReset {
        self.on_reset
    }

    /// Number of resets after which the machine continued.
    pub fn resets(&self) -> u64 {
        self.lock().resets
    }

    /// Lets each vCPU's thread restore its vCPU, after which all continue unless another pause holds them. They
    /// were paused by [`RunControl::ask_for_reset`]. The VM ends where a vCPU cannot be restored, or another thread
    /// stops the VM in the meantime.
    pub(crate) fn put_back(&self) {
        let mut inner = self.lock();
        assert_eq!(inner.reset, Reset::Wanted, "vCPUs are put back while a reset is under way");
        inner.reset = Reset::PuttingBack { left: inner.vcpus.len() };
        inner.resets += 1;
        self.changed.notify_all();
        while !inner.is_stopping && inner.reset != (Reset::PuttingBack { left: 0 }) {
            self.changed.wait(&mut inner);
        }
        inner.reset = Reset::No;
        self.changed.notify_all();
    }

    /// Takes all vCPUs out of the guest; see [`wideleaf_memory::SecondLevel::pause`].
    ///
    /// Called from a serial sink, which runs in a vCPU's thread, that vCPU counts as paused: it is out of the guest
    /// and reads the requests before it enters again.
    ///
    /// # Errors
    /// [`SecondLevelError::PauseTimedOut`] after [`PAUSE_WAIT_MAX`]; then none is paused.
    pub fn pause(&self) -> Result<(), SecondLevelError> {
        self.pause_within(PAUSE_WAIT_MAX)
    }

    /// Pauses like [`RunControl::pause`], and waits for at most `at_most`.
    ///
    /// # Errors
    /// The errors of [`RunControl::pause`].
    pub(crate) fn pause_within(&self, at_most: Duration) -> Result<(), SecondLevelError> {
        let started = Instant::now();
        let mut inner = self.lock();
        inner.pauses += 1;
        self.kick_running(&inner);
        loop {
            let Some(vcpu) = self.first_in_guest(&inner) else { return Ok(()) };
            let waited = started.elapsed();
            let Some(left) = at_most.checked_sub(waited) else {
                inner.pauses -= 1;
                self.changed.notify_all();
                return Err(SecondLevelError::PauseTimedOut { vcpu, waited_ms: waited.as_millis() as u64 });
            };
            self.wait_after_kick(&mut inner, left);
        }
    }

    /// Holds the vCPUs from before their threads exist: each begins paused, until one [`RunControl::resume`].
    pub(crate) fn begin_paused(&self) {
        self.lock().pauses += 1;
    }

    /// Undoes one [`RunControl::pause`].
    ///
    /// # Errors
    /// [`SecondLevelError::WrongState`] where nothing was paused.
    pub fn resume(&self) -> Result<(), SecondLevelError> {
        let mut inner = self.lock();
        inner.pauses = inner.pauses.checked_sub(1).ok_or(SecondLevelError::WrongState("the vcpus are not paused"))?;
        if inner.pauses == 0 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Whether all vCPUs are paused or finished, and stay so until a pause is undone.
    pub fn is_paused(&self) -> bool {
        let inner = self.lock();
        inner.pauses > 0 && inner.vcpus.iter().all(|vcpu| vcpu.state != VcpuState::Running)
    }

    /// Takes the state of all vCPUs, which the caller has paused, in their order.
    ///
    /// # Errors
    /// [`SaveVcpusError`]; the vCPUs are as before.
    pub(crate) fn save_vcpus(&self) -> Result<Vec<PausedVcpu>, SaveVcpusError> {
        let mut inner = self.lock();
        inner.may_be_saved()?;
        if inner.saving.is_some() {
            return Err(SaveVcpusError::Busy);
        }
        inner.saving = Some(inner.vcpus.iter().map(|_| None).collect());
        self.changed.notify_all();
        while inner.may_be_saved().is_ok() && inner.saving.iter().flatten().any(Option::is_none) {
            self.changed.wait(&mut inner);
        }
        let saved = inner.saving.take().unwrap_or_default();
        inner.may_be_saved()?;
        let each = saved.into_iter().map(|vcpu| vcpu.ok_or(SaveVcpusError::NotPaused)?.map_err(SaveVcpusError::Kvm));
        each.collect()
    }

    /// Whether all vCPUs are paused, and stay so until a pause is undone.
    ///
    /// # Errors
    /// [`SaveVcpusError`] with the reason why not.
    pub(crate) fn may_be_saved(&self) -> Result<(), SaveVcpusError> {
        self.lock().may_be_saved()
    }

    /// Paging mode of each vCPU.
    ///
    /// # Errors
    /// [`SecondLevelError::WrongState`] unless all are paused or finished.
    pub fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        let inner = self.lock();
        // A vCPU that was resumed and has not yet reacted is still `Paused`, and may run before the caller
        // uses the answer.
        let is_still = inner.vcpus.iter().all(|vcpu| match vcpu.state {
            VcpuState::Running => false,
            VcpuState::Paused => inner.pauses > 0,
            VcpuState::Finished => true,
        });
        let modes = inner.vcpus.iter().map(|vcpu| vcpu.paging).collect::<Option<Vec<PagingMode>>>();
        modes.filter(|_| is_still).ok_or(SecondLevelError::WrongState("pause the vcpus before their CR3 is asked for"))
    }

    /// State of each vCPU.
    pub fn states(&self) -> Vec<VcpuState> {
        self.lock().vcpus.iter().map(|vcpu| vcpu.state).collect()
    }

    /// Reason of the end, once there is one.
    pub fn exit(&self) -> Option<GuestExit> {
        self.lock().exit.clone()
    }

    /// Whether all vCPUs have to finish.
    pub fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Whether vCPUs have to leave the guest, to end or to pause. Anything that a vCPU's thread waits for outside
    /// the guest must then wait too.
    pub fn wants_vcpus_out(&self) -> bool {
        let inner = self.lock();
        inner.is_stopping || inner.pauses > 0 || inner.reset != Reset::No
    }

    /// A vCPU is about to enter the guest.
    pub(super) fn enters(&self) {
        self.first_entry.get_or_init(Instant::now);
    }

    /// When the first vCPU was about to enter the guest; `None` before.
    pub fn first_entry(&self) -> Option<Instant> {
        self.first_entry.get().copied()
    }

    /// CPU time of a vCPU's thread by ticks, and exact ([`Kicker::cpu_time`]). `None` if no thread runs the vCPU at
    /// present.
    pub(crate) fn times_of(&self, vcpu: usize) -> Option<(TickedTime, Duration)> {
        // A clock that cannot be read belongs to a thread that has just ended.
        let kicker = self.kickers.get(vcpu)?;
        Some((kicker.ticked_time().ok().flatten()?, kicker.cpu_time().ok().flatten()?))
    }

    /// CPU time of all vCPUs' threads that run at present.
    pub(crate) fn vcpu_time(&self) -> Duration {
        self.kickers.iter().filter_map(|kicker| kicker.cpu_time().ok().flatten()).sum()
    }

    /// Ends the VM, for this reason unless there is one already.
    pub fn stop(&self, reason: GuestExit) {
        let mut inner = self.lock();
        inner.exit.get_or_insert(reason);
        inner.is_stopping = true;
        self.kick_running(&inner);
        self.changed.notify_all();
    }

    /// Waits for at most `at_most` until all vCPUs have finished, or are paused for a reset ([`GuestExit::Reset`]);
    /// `None` where they have not.
    pub fn wait(&self, at_most: Option<Duration>) -> Option<GuestExit> {
        let deadline = at_most.and_then(|time| Instant::now().checked_add(time));
        let mut inner = self.lock();
        loop {
            if inner.vcpus.iter().all(|vcpu| vcpu.state == VcpuState::Finished) {
                return Some(inner.exit.clone().unwrap_or(GuestExit::Stopped));
            }
            let is_out = |vcpu: &VcpuRecord| vcpu.state != VcpuState::Running;
            if inner.is_reset_wanted() && inner.vcpus.iter().all(is_out) {
                return Some(GuestExit::Reset);
            }
            let left = match deadline {
                None => Duration::MAX,
                Some(deadline) => deadline.checked_duration_since(Instant::now())?,
            };
            if inner.wants_all_out() {
                self.wait_after_kick(&mut inner, left);
            } else {
                self.changed.wait_for(&mut inner, left);
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change in here is one assignment, so the state is valid after a panic.
        self.inner.lock()
    }

    /// Waits for a change, for at most `left`. If none comes in time, kicks once more. Not at each change: each vCPU
    /// that leaves the guest makes one, and the signals of the others would queue.
    fn wait_after_kick(&self, inner: &mut MutexGuard<'_, Inner>, left: Duration) {
        if self.changed.wait_for(inner, left.min(KICK_AGAIN_AFTER)).timed_out() {
            self.kick_running(inner);
        }
    }

    /// Kicks the vCPUs that may be in the guest. The caller holds the lock, so no vCPU can enter unseen.
    fn kick_running(&self, inner: &Inner) {
        for (vcpu, kicker) in inner.vcpus.iter().zip(&self.kickers) {
            if vcpu.state == VcpuState::Running {
                kicker.kick();
            }
        }
    }

    fn first_in_guest(&self, inner: &Inner) -> Option<usize> {
        inner
            .vcpus
            .iter()
            .zip(&self.kickers)
            .position(|(vcpu, kicker)| vcpu.state == VcpuState::Running && !kicker.is_this_thread())
    }

    /// Decides the vCPU's next step. Only its own thread calls this; the answer is its new state.
    pub(super) fn next_state(&self, inner: &mut Inner, vcpu: usize) -> VcpuState {
        let state = match (inner.is_stopping, inner.pauses, inner.reset) {
            (true, ..) => VcpuState::Finished,
            (false, 0, Reset::No) => VcpuState::Running,
            (false, ..) => VcpuState::Paused,
        };
        if state == VcpuState::Running {
            self.kickers[vcpu].clear();
        }
        state
    }
}

impl Inner {
    fn is_reset_wanted(&self) -> bool {
        !self.is_stopping && self.reset == Reset::Wanted
    }

    fn may_be_saved(&self) -> Result<(), SaveVcpusError> {
        if self.is_stopping || self.vcpus.iter().any(|vcpu| vcpu.state == VcpuState::Finished) {
            return Err(SaveVcpusError::Ended);
        }
        if self.reset != Reset::No {
            return Err(SaveVcpusError::Resetting);
        }
        let are_paused = self.pauses > 0 && self.vcpus.iter().all(|vcpu| vcpu.state == VcpuState::Paused);
        if are_paused { Ok(()) } else { Err(SaveVcpusError::NotPaused) }
    }

    fn wants_all_out(&self) -> bool {
        self.is_stopping || self.reset == Reset::Wanted
    }
}

/// vCPUs without threads, for tests.
#[cfg(test)]
pub(crate) mod threadless {
    use super::*;
    use std::os::fd::AsRawFd;

    /// A control of `vcpus` vCPUs without threads; memfds stand in for their `kvm_run` pages.
    pub(crate) fn control(vcpus: usize) -> Arc<RunControl> {
        let kicker = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            Kicker::new(file.as_raw_fd()).unwrap()
        };
        RunControl::new((0..vcpus).map(|_| kicker()).collect(), OnReset::Restart)
    }

    /// Paging mode of a vCPU after [`set_state`].
    pub(crate) fn paging(vcpu: usize) -> PagingMode {
        PagingMode::Long { root: 0x1000 * vcpu as u64, levels: wideleaf_memory::second_level::TableLevels::Four }
    }

    pub(crate) fn set_state(control: &RunControl, vcpu: usize, state: VcpuState) {
        control.lock().vcpus[vcpu] = VcpuRecord { state, paging: Some(paging(vcpu)) };
        control.changed.notify_all();
    }

    /// Whether a pause of the vCPUs is requested.
    pub(crate) fn is_pause_wanted(control: &RunControl) -> bool {
        control.lock().pauses > 0
    }
}

#[cfg(test)]
mod tests {
    use super::threadless::{control, paging, set_state};
    use super::*;

    #[test]
    fn a_pause_returns_when_the_last_vcpu_has_left_the_guest() {
        let control = control(2);
        set_state(&control, 0, VcpuState::Finished);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while control.lock().pauses == 0 {
                    std::thread::yield_now();
                }
                set_state(&control, 1, VcpuState::Paused);
            });
            control.pause().unwrap();
        });
        assert_eq!(control.paging_modes().unwrap(), [0, 1].map(paging));
    }

    #[test]
    fn a_pause_that_takes_too_long_is_undone_and_names_the_vcpu_that_did_not_leave() {
        let control = control(2);
        set_state(&control, 0, VcpuState::Paused);
        let error = control.pause().unwrap_err();
        assert!(matches!(error, SecondLevelError::PauseTimedOut { vcpu: 1, .. }), "{error}");
        assert_eq!(control.lock().pauses, 0);
    }

    #[test]
    fn vcpus_that_begin_paused_enter_the_guest_after_the_resume() {
        let control = control(1);
        control.begin_paused();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
    }

    #[test]
    fn pauses_nest() {
        let control = control(1);
        set_state(&control, 0, VcpuState::Paused);
        control.pause().unwrap();
        control.pause().unwrap();
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
        assert!(matches!(control.resume(), Err(SecondLevelError::WrongState(_))));
    }

    #[test]
    fn a_stop_wins_over_a_pause_and_the_first_reason_stays() {
        let control = control(1);
        control.lock().pauses = 1;
        control.stop(GuestExit::ExitPort(3));
        control.stop(GuestExit::TimedOut);
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Finished);
        set_state(&control, 0, VcpuState::Finished);
        assert_eq!(control.wait(None), Some(GuestExit::ExitPort(3)));
    }

    #[test]
    fn a_vcpu_that_leaves_the_guest_causes_no_kick_of_those_that_are_about_to() {
        /// Waits until another thread waits for a change, and lets it look again.
        fn wake(control: &RunControl) {
            while control.changed.notify_all() == 0 {
                std::thread::yield_now();
            }
        }
        /// Whether a change kicks the vCPU that it does not concern. `wait` returns when both have finished.
        fn is_kicked(wait: fn(&RunControl)) -> bool {
            loop {
                let (control, begun) = (control(2), Instant::now());
                let is_kicked = std::thread::scope(|scope| {
                    scope.spawn(|| wait(&control));
                    wake(&control);
                    control.kickers[1].clear();
                    set_state(&control, 0, VcpuState::Finished);
                    // The second time shows that the thread has looked, and waits again.
                    (0..2).for_each(|_| wake(&control));
                    let is_kicked = control.kickers[1].is_kicked();
                    set_state(&control, 1, VcpuState::Finished);
                    is_kicked
                });
                // On a slow machine it was the time for another kick.
                if !is_kicked || begun.elapsed() < KICK_AGAIN_AFTER {
                    return is_kicked;
                }
            }
        }
        assert!(!is_kicked(|control| control.pause().unwrap()));
        assert!(!is_kicked(|control| {
            control.stop(GuestExit::Stopped);
            assert_eq!(control.wait(None), Some(GuestExit::Stopped));
        }));
    }

    #[test]
    fn a_wait_ends_at_its_time_limit() {
        assert_eq!(control(1).wait(Some(Duration::from_millis(1))), None);
    }

    #[test]
    fn a_reset_is_reported_when_the_last_vcpu_is_out_and_none_runs_before_all_are_restored() {
        let control = control(2);
        assert!(control.ask_for_reset() && control.ask_for_reset());
        set_state(&control, 0, VcpuState::Paused);
        assert_eq!(control.wait(Some(Duration::from_millis(1))), None, "vcpu 1 is in the guest");
        set_state(&control, 1, VcpuState::Paused);
        assert_eq!(control.wait(None), Some(GuestExit::Reset));
        std::thread::scope(|scope| {
            scope.spawn(|| control.put_back());
            for left in [2, 1] {
                while control.lock().reset != (Reset::PuttingBack { left }) {
                    std::thread::yield_now();
                }
                assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
                control.lock().reset = Reset::PuttingBack { left: left - 1 };
                control.changed.notify_all();
            }
        });
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
        assert_eq!(control.resets(), 1);
    }

    #[test]
    fn a_paused_vm_stays_paused_over_a_reset() {
        let control = control(1);
        set_state(&control, 0, VcpuState::Paused);
        control.pause().unwrap();
        assert!(control.ask_for_reset());
        control.lock().reset = Reset::No;
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Paused);
        control.resume().unwrap();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Running);
    }

    #[test]
    fn a_stop_wins_over_a_reset_and_no_thread_waits_for_vcpus_that_end() {
        let control = control(1);
        assert!(control.ask_for_reset());
        control.stop(GuestExit::Stopped);
        assert!(!control.ask_for_reset());
        control.put_back();
        assert_eq!(control.next_state(&mut control.lock(), 0), VcpuState::Finished);
        set_state(&control, 0, VcpuState::Finished);
        assert_eq!(control.wait(None), Some(GuestExit::Stopped));
    }

    #[test]
    fn paging_modes_are_available_only_during_a_pause() {
        let control = control(1);
        let is_refused = || matches!(control.paging_modes(), Err(SecondLevelError::WrongState(_)));
        assert!(is_refused(), "running");
        set_state(&control, 0, VcpuState::Paused);
        control.pause().unwrap();
        assert_eq!(control.paging_modes().unwrap(), [paging(0)]);
        control.resume().unwrap();
        assert!(is_refused(), "resumed, and its thread has not reacted yet");
        set_state(&control, 0, VcpuState::Finished);
        assert!(!is_refused(), "finished");
    }
}
