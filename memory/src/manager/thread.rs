//! The loop in a thread of its own: it waits, ticks, and ends when told to or when all its VMs have ended.
//!
//! ```text
//!   spawn ─▶ Waiting ── activate, pause ─▶ Called ─▶ tick ─▶ Active ── time, or urgent at a pulse ─▶ tick …
//!                                                              └── stop, dropped ─▶ Stopping ─▶ the report
//! ```
//!
//! A new policy takes over between two ticks, in any of these states, and its requester gets a reply. A request to
//! rest works the same way: the loop stays idle until it is released.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use wideleaf_policies::{BudgetLimits, HugePagePrice, Policy};

use super::huge_page_backoff::SHORTAGE_PULSE;
use super::live::{self, Live, LiveSlot};
use super::managed_vm::ManagedVm;
use super::pacing::Pacing;
use super::quiet::Quiet;
use super::recovering::EVENT_PULSE;
use super::report::ManagerReport;
use super::sampling::SharedAccess;
use super::steering::Steering;
use super::switching::SwitchError;
use super::{ManagerConfig, ManagerLoop, OutOfReach};
use crate::first_touch::{FirstTouch, FirstTouchError};
use crate::kernel::Kernel;
use crate::reserved_frames::{ReservedFrames, ReservedFramesError};
use crate::sandboxed::{ThreadWork, thread_starts};

/// Handle of a loop that runs in its thread.
pub struct Manager {
    shared: Arc<Shared>,
    should_stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<ManagerReport>>,
    first_touch: Option<FirstTouch>,
    reserved_frames: Option<ReservedFrames>,
    host: Arc<dyn Kernel>,
    access: Arc<Mutex<Vec<SharedAccess>>>,
    steering: Arc<Steering>,
    live: LiveSlot,
}

/// Pending reply to a request for another policy.
#[derive(Debug)]
pub struct PolicyAnswer(Receiver<Result<(), SwitchError>>);

impl PolicyAnswer {
    /// Waits for the reply: until the end of a tick, and of a giant that is being moved.
    ///
    /// # Errors
    /// [`SwitchError`]; the previous policy continues.
    pub fn wait(self) -> Result<(), SwitchError> {
        self.0.recv().unwrap_or(Err(SwitchError::Ended))
    }
}

/// Pending reply to a request to rest.
#[derive(Debug)]
pub struct RestAnswer(Resting, Receiver<()>);

/// A loop that rests until this is dropped or lets it begin anew. It does not scan, move, copy or split guest RAM, no
/// part of the RAM is aside, and none of its sensors is at work. A loop that has ended rests for ever.
#[derive(Debug)]
pub struct Resting(Sender<Box<dyn Policy>>);

impl RestAnswer {
    /// Waits until the loop rests: until the end of a tick, and of a giant that is being moved.
    pub fn wait(self) -> Resting {
        let RestAnswer(resting, rests) = self;
        // A loop that does not answer has ended.
        let _ = rests.recv();
        resting
    }
}

impl Resting {
    /// Lets the loop continue with `policy` and without any knowledge of the previous guest.
    pub fn begin_anew(self, policy: Box<dyn Policy>) {
        // A loop that has ended does not continue.
        let _ = self.0.send(policy);
    }
}

/// Why a manager does not start.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// No thread could be started.
    #[error("cannot start the manager's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The policy decides at the fault, which is not possible here.
    #[error("cannot use policy {policy}: it decides at first touch, which is not possible here: {source}")]
    FirstTouch {
        /// Name of the policy.
        policy: &'static str,
        /// Why first touches cannot be decided.
        source: FirstTouchError,
    },
    /// The policy reserves frames, which is not possible here.
    #[error("cannot use policy {policy}: it reserves frames, which is not possible here: {source}")]
    ReservedFrames {
        /// Name of the policy.
        policy: &'static str,
        /// Why frames cannot be reserved.
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

/// A request that the loop serves between two ticks.
enum Wish {
    /// A new policy takes over; `answer` receives the result.
    Policy { policy: Box<dyn Policy>, answer: Sender<Result<(), SwitchError>> },
    /// The loop rests and says so, then waits for a policy to begin anew with, or for the end of the request.
    Rest { rests: Sender<()>, goes_on: Receiver<Box<dyn Policy>> },
}

impl Wish {
    fn come_true(self, work: &mut ManagerLoop) {
        match self {
            // The requester may have gone in the meantime.
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

/// Next step of the thread.
enum Next {
    Tick,
    Do(Wish),
    End,
}

/// State that the thread is to be in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RunState {
    /// Waits for the first call.
    #[default]
    Waiting,
    /// Ticks, the next one at once.
    Called,
    /// Ticks at their time.
    Active,
    Stopping,
}

impl Manager {
    /// Starts the loop's thread, which waits until [`Manager::activate`]. The service of a policy that decides at
    /// first touch or reserves frames starts now: memory touched before could not be decided about later.
    ///
    /// # Errors
    /// [`ManagerError`] if no thread can be started, first touches cannot be decided, or no frames can be reserved.
    pub fn spawn(
        host: Arc<dyn Kernel>,
        vms: Vec<ManagedVm>,
        policy: Box<dyn Policy>,
        config: ManagerConfig,
    ) -> Result<Manager, ManagerError> {
        Manager::spawn_loop(ManagerLoop::new(host, vms, policy, config))
    }

    /// Like [`Manager::spawn`], for a loop that was made before, for instance a recorded one.
    ///
    /// # Errors
    /// The same as for [`Manager::spawn`].
    pub fn spawn_loop(mut work: ManagerLoop) -> Result<Manager, ManagerError> {
        let shared = Arc::<Shared>::default();
        let first_touch =
            work.first_touch().map_err(|source| ManagerError::FirstTouch { policy: work.report.policy, source })?;
        let reserved_frames = work
            .reserved_frames()
            .map_err(|source| ManagerError::ReservedFrames { policy: work.report.policy, source })?;
        work.reservations = reserved_frames.as_ref().map(ReservedFrames::counted);
        let should_stop = work.should_stop.clone();
        let (steering, live) = (work.steering.clone(), work.publisher.slot());
        let (host, access) = (work.host.clone(), work.access.clone());
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new().name("manager".into()).spawn(move || {
                thread_starts(ThreadWork::Loop);
                let _closing = Closing(&shared);
                let mut pacing = Pacing::new(&work.config, work.host.now());
                let mut quiet = Quiet::new(work.host.clone(), {
                    let shared = shared.clone();
                    move || shared.look()
                });
                while !work.has_ended() {
                    match shared.next(&mut work, &pacing, &mut quiet) {
                        Next::Tick => {
                            let done = work.tick();
                            let pace = work.pace(done);
                            pacing.ticked(work.host.as_ref(), &work.config, work.overhead, pace);
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

    /// Calls `look` while every window is where the guest sees it. Between ticks the access sensor has some windows
    /// aside, and a collapse may have unmapped one: these look unbacked.
    pub fn with_all_in_place<T>(&self, look: impl FnOnce() -> T) -> T {
        // Locked until `look` returns: no sensor begins or ends during it.
        let access = self.access.lock();
        let _in_place: Vec<_> = access.iter().map(|access| access.in_place(self.host.as_ref())).collect();
        let _mapped = self.steering.in_place();
        look()
    }

    /// Lets the loop act.
    pub fn activate(&self) {
        self.steering.set_paused(false);
        self.shared.set(RunState::Called);
    }

    /// Lets the loop sense but not act, also before it was ever active. It finishes its present action, within some
    /// milliseconds; a giant that is being moved arrives.
    pub fn pause(&self) {
        self.steering.set_paused(true);
        self.shared.set(RunState::Called);
    }

    /// Has the loop look now whether a tick is urgent, and not at its next pulse: an event of its guest has begun or
    /// ended.
    pub fn look(&self) {
        self.shared.look();
    }

    /// Changes the limits on the cost of actions from the next tick on. A recording keeps the limits it began with.
    pub fn set_limits(&self, limits: BudgetLimits) {
        self.steering.set_limits(limits);
    }

    /// Changes the largest part of the time for which windows of one VM may be out of the guest's reach, from the next
    /// tick on.
    pub fn set_out_of_reach(&self, part: OutOfReach) {
        self.steering.set_out_of_reach(part);
    }

    /// Sets the price of huge pages that clears the bids of all VMs of the host ([`Live::bids`]), and the number of
    /// windows that may give theirs back. It holds until the next one; `None`: the policy finds its own price.
    pub fn set_huge_page_price(&self, price: Option<HugePagePrice>) {
        self.steering.set_price(price);
        self.shared.look();
    }

    /// Whether another process makes free blocks of 2 MiB for the whole host. The loop's own supply
    /// ([`ManagerConfig::supply`]) rests meanwhile.
    pub fn set_supplied(&self, is_supplied: bool) {
        self.steering.set_supplied(is_supplied);
    }

    /// Tells the loop of free huge pages that `/proc/buddyinfo` does not count. If windows wait for huge pages, that
    /// many more requests are made at the next pulse.
    pub fn promise_huge_pages(&self, pages: u64) {
        self.steering.promise(pages);
        self.shared.look();
    }

    /// Requests another policy, which takes over before the next tick; also before the loop was ever active, and
    /// while it is paused. A vCPU thread must not wait for the answer: a giant under way waits for the vCPUs.
    pub fn set_policy(&self, policy: Box<dyn Policy>) -> PolicyAnswer {
        let (answer, heard) = channel();
        self.shared.wish(Wish::Policy { policy, answer });
        PolicyAnswer(heard)
    }

    /// Asks the loop to rest before the next tick, while another part changes guest RAM unseen, as at a reset of the
    /// machine. Not for a policy that answers faults: its services continue. A vCPU thread must not wait for the
    /// answer: a giant under way waits for the vCPUs.
    pub fn ask_to_rest(&self) -> RestAnswer {
        let ((rests, heard), (resting, goes_on)) = (channel(), channel());
        self.shared.wish(Wish::Rest { rests, goes_on });
        RestAnswer(Resting(resting), heard)
    }

    /// State at the end of the latest tick.
    pub fn live(&self) -> Arc<Live> {
        live::latest(&self.live)
    }

    /// Whether the loop has ended by itself, since all its VMs are gone. [`Manager::stop`] still returns the report.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the loop after its present action, and returns its counts.
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
        let mut wanted = self.wanted.lock();
        if wanted.run != RunState::Stopping {
            wanted.run = state;
        }
        self.changed.notify_all();
    }

    /// Queues the wish. A loop that ends drops it, which answers the requester.
    fn wish(&self, wish: Wish) {
        let mut wanted = self.wanted.lock();
        if wanted.run != RunState::Stopping {
            wanted.wishes.push_back(wish);
        }
        self.changed.notify_all();
    }

    /// Has the loop look now whether a tick is urgent, if it waits for its next pulse or tick.
    fn look(&self) {
        /// A look reads small files. One that takes longer is not waited for: the next pulse sees the same.
        const LOOKS_WITHIN: Duration = Duration::from_millis(10);
        // The loop holds this lock from its latest look until it waits, so that it misses no notification.
        let _waiting = self.wanted.try_lock_for(LOOKS_WITHIN);
        self.changed.notify_all();
    }

    /// Waits for the next tick, a wish, or the order to stop. At each pulse and each notification the loop says whether
    /// a tick is urgent. While not active, waits for any order.
    fn next(&self, work: &mut ManagerLoop, pacing: &Pacing, quiet: &mut Quiet) -> Next {
        let mut wanted = self.wanted.lock();
        let (mut has_paused, until) = (false, Instant::now() + pacing.pause());
        loop {
            match wanted.run {
                RunState::Stopping => return Next::End,
                RunState::Waiting | RunState::Called | RunState::Active if !wanted.wishes.is_empty() => {
                    if wanted.run == RunState::Active {
                        wanted.run = RunState::Called;
                    }
                    return Next::Do(wanted.wishes.pop_front().expect("it was looked at under this lock"));
                }
                RunState::Waiting => self.changed.wait(&mut wanted),
                RunState::Called => {
                    wanted.run = RunState::Active;
                    has_paused = true;
                }
                RunState::Active if !has_paused => {
                    let pulse = work.next_pulse(quiet).map_or(until, |pulse| until.min(Instant::now() + pulse));
                    self.changed.wait_until(&mut wanted, pulse);
                    has_paused =
                        Instant::now() >= until || (wanted.run == RunState::Active && work.is_tick_urgent(pacing));
                }
                RunState::Active => return Next::Tick,
            }
        }
    }
}

impl ManagerLoop {
    /// Time until the loop looks again whether a tick is urgent; `None`: at the next tick, or when it is notified.
    fn next_pulse(&self, quiet: &mut Quiet) -> Option<Duration> {
        let pulse = self.config.pulse?;
        match () {
            () if self.is_in_event() => Some(pulse.min(EVENT_PULSE)),
            () if self.huge_pages.is_waited_for() => Some(pulse.min(SHORTAGE_PULSE)),
            // A gate changes without a notification.
            () if self.vms.iter().any(|vm| vm.managed.gate.is_some()) => Some(pulse),
            () => (!quiet.begins()).then_some(pulse),
        }
    }

    fn is_tick_urgent(&mut self, pacing: &Pacing) -> bool {
        let host = Arc::clone(&self.host);
        self.has_gate_changed()
            || self.has_event()
            || self.steering.has_new_allowance()
            || self.is_promised_a_page()
            || (pacing.is_rested(host.as_ref())
                && (self.huge_pages.has_new_block(host.as_ref()) || self.has_urgent_sample()))
            || self.has_new_memory()
    }
}

/// Closes the queue when the thread has ended for any reason, so that no requester waits for an answer.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut wanted = self.0.wanted.lock();
        wanted.run = RunState::Stopping;
        wanted.wishes.clear();
    }
}
