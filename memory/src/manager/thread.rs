//! The loop in a thread of its own: it waits, ticks, and ends when told to or when all its VMs have ended.
//!
//! ```text
//!   spawn ─▶ Waiting ── activate, pause ─▶ Called ─▶ tick ─▶ Active ── time, or urgent at a pulse ─▶ tick …
//!                                                              └── stop, dropped ─▶ Stopping ─▶ the report
//! ```
//!
//! A new policy takes over between two ticks, in any of these states, and its requester gets a reply. A request to
//! rest works the same way: the loop stays idle until it is released.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use wideleaf_policies::{BudgetLimits, HugePagePrice, Policy};

use super::live::{self, Live, LiveSlot};
use super::managed_vm::ManagedVm;
use super::orders::{Closing, Next, Orders, RunState, Wish};
use super::pacing::Pacing;
use super::quiet::Quiet;
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
    orders: Arc<Orders>,
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
        let orders = Arc::<Orders>::default();
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
            let orders = orders.clone();
            std::thread::Builder::new().name("manager".into()).spawn(move || {
                thread_starts(ThreadWork::Loop);
                let _closing = Closing(&orders);
                let mut pacing = Pacing::new(&work.config, work.host.now());
                let mut quiet = Quiet::new(work.host.clone(), {
                    let orders = orders.clone();
                    move || orders.look()
                });
                while !work.has_ended() {
                    match orders.next(&mut work, &pacing, &mut quiet) {
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
        Ok(Manager { orders, should_stop, thread, first_touch, reserved_frames, host, access, steering, live })
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
        self.orders.set(RunState::Called);
    }

    /// Lets the loop sense but not act, also before it was ever active. It finishes its present action, within some
    /// milliseconds; a giant that is being moved arrives.
    pub fn pause(&self) {
        self.steering.set_paused(true);
        self.orders.set(RunState::Called);
    }

    /// Has the loop look now whether a tick is urgent, and not at its next pulse: an event of its guest has begun or
    /// ended.
    pub fn look(&self) {
        self.orders.look();
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
        // The daemon sets the price each second: only an allowance is urgent.
        if self.steering.has_new_allowance() {
            self.orders.look();
        }
    }

    /// Whether another process makes free blocks of 2 MiB for the whole host. The loop's own supply
    /// ([`ManagerConfig::supply`]) rests meanwhile.
    pub fn set_supplied(&self, is_supplied: bool) {
        self.steering.set_supplied(is_supplied);
    }

    /// Tells the loop of free huge pages that `/proc/buddyinfo` does not count. If windows wait for huge pages, that
    /// many more requests are made at once.
    pub fn promise_huge_pages(&self, pages: u64) {
        self.steering.promise(pages);
        self.orders.look();
    }

    /// Requests another policy, which takes over before the next tick; also before the loop was ever active, and
    /// while it is paused. A vCPU thread must not wait for the answer: a giant under way waits for the vCPUs.
    pub fn set_policy(&self, policy: Box<dyn Policy>) -> PolicyAnswer {
        let (answer, heard) = channel();
        self.orders.wish(Wish::Policy { policy, answer });
        PolicyAnswer(heard)
    }

    /// Asks the loop to rest before the next tick, while another part changes guest RAM unseen, as at a reset of the
    /// machine. Not for a policy that answers faults: its services continue. A vCPU thread must not wait for the
    /// answer: a giant under way waits for the vCPUs.
    pub fn ask_to_rest(&self) -> RestAnswer {
        let ((rests, heard), (resting, goes_on)) = (channel(), channel());
        self.orders.wish(Wish::Rest { rests, goes_on });
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
        self.orders.set(RunState::Stopping);
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
