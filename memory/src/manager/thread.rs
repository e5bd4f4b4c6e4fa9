//! The loop in a thread of its own: it waits, ticks, and ends when it is told to or when all its VMs have.
//!
//! ```text
//!   spawn ─▶ Waiting ── activate, pause ─▶ Called ─▶ tick ─▶ Active ── time, or urgent at a pulse ─▶ tick …
//!                                                              └── stop, dropped ─▶ Stopping ─▶ the report
//! ```
//!
//! Another policy takes over between two ticks, whichever of these it is, and who asked for it is answered. So is who wants the loop to rest: it
//! does nothing until they let it go on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use wideleaf_policies::{BudgetLimits, Policy};

use super::live::{self, Live, LiveSlot};
use super::managed_vm::ManagedVm;
use super::pacing::Pacing;
use super::report::ManagerReport;
use super::sampling::SharedAccess;
use super::steering::Steering;
use super::switching::SwitchError;
use super::{ManagerConfig, ManagerLoop};
use crate::first_touch::{FirstTouch, FirstTouchError};
use crate::host::Host;
use crate::reserved_frames::{ReservedFrames, ReservedFramesError};
use crate::sandboxed::{ThreadWork, thread_starts};

/// The loop in its thread.
pub struct Manager {
    shared: Arc<Shared>,
    should_stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<ManagerReport>>,
    first_touch: Option<FirstTouch>,
    reserved_frames: Option<ReservedFrames>,
    host: Arc<dyn Host>,
    access: Arc<Mutex<Vec<SharedAccess>>>,
    steering: Arc<Steering>,
    live: LiveSlot,
}

/// What will have become of a policy that was asked for.
#[derive(Debug)]
pub struct PolicyAnswer(Receiver<Result<(), SwitchError>>);

impl PolicyAnswer {
    /// Waits for it: until the end of a tick, and of a giant that is being moved.
    ///
    /// # Errors
    /// [`SwitchError`], with the policy before at work.
    pub fn wait(self) -> Result<(), SwitchError> {
        self.0.recv().unwrap_or(Err(SwitchError::Ended))
    }
}

/// A loop that will rest.
#[derive(Debug)]
pub struct RestAnswer(Resting, Receiver<()>);

/// A loop that rests until this is dropped, or lets it begin anew: nothing of it looks at guest RAM, moves, copies or splits any of it, or has a
/// part of it aside, and none of its sensors is at work. One that has ended rests for ever.
#[derive(Debug)]
pub struct Resting(Sender<Box<dyn Policy>>);

impl RestAnswer {
    /// Waits for it: until the end of a tick, and of a giant that is being moved.
    pub fn wait(self) -> Resting {
        let RestAnswer(resting, rests) = self;
        // Who does not answer has ended.
        let _ = rests.recv();
        resting
    }
}

impl Resting {
    /// Lets the loop go on, with `policy`, and without anything it knew of the guest: it is another one.
    pub fn begin_anew(self, policy: Box<dyn Policy>) {
        // Where it has ended there is nothing to go on.
        let _ = self.0.send(policy);
    }
}

/// Why a manager does not start.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// No thread to be had.
    #[error("cannot start the manager's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The policy decides at the fault, and it can not be asked there.
    #[error("the policy {policy} decides at the first touch, which it can not here: {source}")]
    FirstTouch {
        /// The policy's name.
        policy: &'static str,
        /// Why not.
        source: FirstTouchError,
    },
    /// The policy reserves frames, and none can be reserved.
    #[error("the policy {policy} reserves frames, which it can not here: {source}")]
    ReservedFrames {
        /// The policy's name.
        policy: &'static str,
        /// Why not.
        source: ReservedFramesError,
    },
}

#[derive(Default)]
struct Shared {
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Default)]
struct Wanted {
    run: RunState,
    wishes: VecDeque<Wish>,
}

/// What is done between two ticks.
enum Wish {
    /// A policy takes over, and who wants to hear whether it did.
    Policy { policy: Box<dyn Policy>, answer: Sender<Result<(), SwitchError>> },
    /// The loop rests, says so, and waits for a policy to begin anew with, or for nobody to want it to rest.
    Rest { rests: Sender<()>, goes_on: Receiver<Box<dyn Policy>> },
}

impl Wish {
    fn come_true(self, work: &mut ManagerLoop) {
        match self {
            // Who asked may have gone meanwhile.
            Wish::Policy { policy, answer } => drop(answer.send(work.switch_policy(policy))),
            Wish::Rest { rests, goes_on } => {
                work.rest();
                let _ = rests.send(());
                if let Ok(policy) = goes_on.recv() {
                    work.begin_anew(policy);
                }
            }
        }
    }
}

/// What the thread does next.
enum Next {
    Tick,
    Do(Wish),
    End,
}

/// What the thread is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RunState {
    /// Nothing yet.
    #[default]
    Waiting,
    /// Ticks, the next one at once.
    Called,
    /// Ticks when it is time.
    Active,
    Stopping,
}

impl Manager {
    /// Starts the loop's thread. It waits until [`Manager::activate`]. A policy that decides at the first touch is asked, and
    /// one that reserves frames is served, from now on: what is touched before could not be asked about later.
    ///
    /// # Errors
    /// [`ManagerError`] where no thread can be had, or first touches can not be decided, or no frames reserved.
    pub fn spawn(
        host: Arc<dyn Host>,
        vms: Vec<ManagedVm>,
        policy: Box<dyn Policy>,
        config: ManagerConfig,
    ) -> Result<Manager, ManagerError> {
        Manager::spawn_loop(ManagerLoop::new(host, vms, policy, config))
    }

    /// As [`Manager::spawn`], for a loop that was made before, for instance a recorded one.
    ///
    /// # Errors
    /// As [`Manager::spawn`].
    pub fn spawn_loop(mut work: ManagerLoop) -> Result<Manager, ManagerError> {
        let shared = Arc::<Shared>::default();
        let first_touch =
            work.first_touch().map_err(|source| ManagerError::FirstTouch { policy: work.report.policy, source })?;
        let reserved_frames = work
            .reserved_frames()
            .map_err(|source| ManagerError::ReservedFrames { policy: work.report.policy, source })?;
        let should_stop = work.should_stop.clone();
        let (steering, live) = (work.steering.clone(), work.publisher.slot());
        let (host, access) = (work.host.clone(), work.access.clone());
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new().name("manager".into()).spawn(move || {
                thread_starts(ThreadWork::Loop);
                let _closing = Closing(&shared);
                let mut pacing = Pacing::new(&work.config, work.host.now());
                let pulse = work.config.pulse;
                let is_urgent = |work: &ManagerLoop, pacing: &mut Pacing| {
                    work.has_gate_changed() || pacing.is_urgent(work.host.as_ref(), &work.vms)
                };
                while !work.has_ended() {
                    match shared.next(pacing.pause(), pulse, || is_urgent(&work, &mut pacing)) {
                        Next::Tick => {
                            let done = work.tick();
                            let is_busy = work.is_busy(done);
                            pacing.ticked(work.host.as_ref(), &work.vms, &work.config, work.sensed_in, is_busy);
                        }
                        Next::Do(wish) => wish.come_true(&mut work),
                        Next::End => break,
                    }
                }
                work.finish()
            })?
        };
        let thread = Some(thread);
        Ok(Manager { shared, should_stop, thread, first_touch, reserved_frames, host, access, steering, live })
    }

    /// Calls `look` while every window is where the guest sees it: between its ticks the access sensor has some aside,
    /// which look unbacked.
    pub fn with_all_in_place<T>(&self, look: impl FnOnce() -> T) -> T {
        // Locked as long as that takes: no sensor begins or ends meanwhile.
        let access = self.access.lock().unwrap_or_else(PoisonError::into_inner);
        let _in_place: Vec<_> = access.iter().map(|access| access.in_place(self.host.as_ref())).collect();
        look()
    }

    /// Lets the loop act.
    pub fn activate(&self) {
        self.steering.set_paused(false);
        self.shared.set(RunState::Called);
    }

    /// Lets the loop look and not act, also before it was ever active. An action that it is at is finished, some milliseconds
    /// later at most; a giant that is being moved arrives.
    pub fn pause(&self) {
        self.steering.set_paused(true);
        self.shared.set(RunState::Called);
    }

    /// Changes what actions may cost, from the next tick on. A recording keeps the limits it began with.
    pub fn set_limits(&self, limits: BudgetLimits) {
        self.steering.set_limits(limits);
    }

    /// Has another policy take over, before the next tick; also before it was ever active, and while it is paused. Who waits for the
    /// answer must not be whom a giant that is under way waits for: no vCPU's thread.
    pub fn set_policy(&self, policy: Box<dyn Policy>) -> PolicyAnswer {
        let (answer, heard) = channel();
        self.shared.wish(Wish::Policy { policy, answer });
        PolicyAnswer(heard)
    }

    /// Has the loop rest, before the next tick, while somebody else does to guest RAM what it must not see: a machine that is reset. Not for a
    /// loop with a policy that answers faults: its services go on. Who waits for the answer must not be whom a giant that is under way waits for.
    pub fn ask_to_rest(&self) -> RestAnswer {
        let ((rests, heard), (resting, goes_on)) = (channel(), channel());
        self.shared.wish(Wish::Rest { rests, goes_on });
        RestAnswer(Resting(resting), heard)
    }

    /// How things were at the end of the latest tick.
    pub fn live(&self) -> Arc<Live> {
        live::latest(&self.live)
    }

    /// Whether its loop has ended by itself: all its VMs are gone. [`Manager::stop`] still has the report.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the loop after the action it is at, and returns what it counted.
    pub fn stop(mut self) -> ManagerReport {
        self.end();
        let first_touch = self.first_touch.take().map(FirstTouch::stop);
        let reserved_frames = self.reserved_frames.take().map(ReservedFrames::stop);
        let thread = self.thread.take().expect("a manager is stopped once");
        let report = thread.join().expect("the manager's thread does not panic");
        ManagerReport { first_touch, reserved_frames, ..report }
    }

    fn end(&self) {
        self.should_stop.store(true, Ordering::Relaxed);
        self.shared.set(RunState::Stopping);
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn set(&self, state: RunState) {
        let mut wanted = self.wanted.lock().expect("nothing panics under this lock");
        if wanted.run != RunState::Stopping {
            wanted.run = state;
        }
        self.changed.notify_all();
    }

    /// Dropped where the loop has ended, or is to, which is an answer too.
    fn wish(&self, wish: Wish) {
        let mut wanted = self.wanted.lock().expect("nothing panics under this lock");
        if wanted.run != RunState::Stopping {
            wanted.wishes.push_back(wish);
        }
        self.changed.notify_all();
    }

    /// Waits for the next tick, which comes sooner where `is_urgent` says so at a pulse, for a policy that is to take over, or until told
    /// to stop; while not active, until told anything.
    fn next(&self, pause: Duration, pulse: Option<Duration>, mut is_urgent: impl FnMut() -> bool) -> Next {
        let mut wanted = self.wanted.lock().expect("nothing panics under this lock");
        let (mut has_paused, mut left) = (false, pause);
        loop {
            match wanted.run {
                RunState::Stopping => return Next::End,
                RunState::Waiting | RunState::Called | RunState::Active if !wanted.wishes.is_empty() => {
                    if wanted.run == RunState::Active {
                        wanted.run = RunState::Called;
                    }
                    return Next::Do(wanted.wishes.pop_front().expect("it was looked at under this lock"));
                }
                RunState::Waiting => wanted = self.changed.wait(wanted).expect("nothing panics under this lock"),
                RunState::Called => {
                    wanted.run = RunState::Active;
                    has_paused = true;
                }
                RunState::Active if !has_paused => {
                    let step = left.min(pulse.unwrap_or(left));
                    (wanted, _) = self.changed.wait_timeout(wanted, step).expect("nothing panics under this lock");
                    left -= step;
                    has_paused = left.is_zero() || (wanted.run == RunState::Active && is_urgent());
                }
                RunState::Active => return Next::Tick,
            }
        }
    }
}

/// The thread's hold of what is wanted: once it has ended, in whatever way, nobody waits for an answer.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut wanted = self.0.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.run = RunState::Stopping;
        wanted.wishes.clear();
    }
}
