//! Orders to the loop's thread, and its wait for them, for its next pulse or for its next tick.
//!
//! ```text
//!   set, wish, look ─▶ Wanted ─▶ next: Tick, Do(wish) or End
//!                                └── at a pulse, or told to look: is a tick urgent? ── the lock is free meanwhile
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_policies::Policy;

use super::ManagerLoop;
use super::huge_page_backoff::SHORTAGE_PULSE;
use super::pacing::Pacing;
use super::quiet::Quiet;
use super::recovering::EVENT_PULSE;
use super::switching::SwitchError;

/// Orders that the loop's thread and its users share.
#[derive(Default)]
pub(super) struct Orders {
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Default)]
struct Wanted {
    run: RunState,
    wishes: VecDeque<Wish>,
    /// Whether the loop is to look again before it waits: what it saw may be older than the order.
    should_look: bool,
}

/// A request that the loop serves between two ticks.
pub(super) enum Wish {
    /// A new policy takes over; `answer` receives the result.
    Policy { policy: Box<dyn Policy>, answer: Sender<Result<(), SwitchError>> },
    /// The loop rests and says so, then waits for a policy to begin anew with, or for the end of the request.
    Rest { rests: Sender<()>, goes_on: Receiver<Box<dyn Policy>> },
}

impl Wish {
    pub fn come_true(self, work: &mut ManagerLoop) {
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
pub(super) enum Next {
    Tick,
    Do(Wish),
    End,
}

/// State that the thread is to be in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RunState {
    /// Waits for the first call.
    #[default]
    Waiting,
    /// Ticks, the next one at once.
    Called,
    /// Ticks at their time.
    Active,
    Stopping,
}

impl Orders {
    pub fn set(&self, state: RunState) {
        let mut wanted = self.wanted.lock();
        if wanted.run != RunState::Stopping {
            wanted.run = state;
        }
        self.changed.notify_all();
    }

    /// Queues the wish. A loop that ends drops it, which answers the requester.
    pub fn wish(&self, wish: Wish) {
        let mut wanted = self.wanted.lock();
        if wanted.run != RunState::Stopping {
            wanted.wishes.push_back(wish);
        }
        self.changed.notify_all();
    }

    /// Has the loop look whether a tick is urgent, now or once it waits.
    pub fn look(&self) {
        self.wanted.lock().should_look = true;
        self.changed.notify_all();
    }

    /// Waits for the next tick, a wish, or the order to stop. At each pulse and each notification the loop says whether
    /// a tick is urgent. While not active, waits for any order.
    pub fn next(&self, work: &mut ManagerLoop, pacing: &Pacing, quiet: &mut Quiet) -> Next {
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
                    if !wanted.should_look {
                        let pulse = work.next_pulse(quiet).map_or(until, |pulse| until.min(Instant::now() + pulse));
                        self.changed.wait_until(&mut wanted, pulse);
                    }
                    wanted.should_look = false;
                    // A look reads files: no order waits for that.
                    has_paused = Instant::now() >= until
                        || (wanted.run == RunState::Active
                            && MutexGuard::unlocked(&mut wanted, || work.is_tick_urgent(pacing)));
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
pub(super) struct Closing<'a>(pub &'a Orders);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut wanted = self.0.wanted.lock();
        wanted.run = RunState::Stopping;
        wanted.wishes.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize, PolicyChoice, VmId};

    use super::*;
    use crate::gate::{Gate, GateState, KeptHoles, LeftAlone};
    use crate::manager::{ManagedVm, Manager, ManagerConfig};
    use crate::testing::fake_host::FakeHost;
    use crate::{BackingConfig, BackingKind, GuestRam};

    const NEVER: Duration = Duration::from_secs(3600);
    const GIVES_UP_AFTER: Duration = Duration::from_secs(20);

    /// A gate of which one look takes as long as the test wants.
    struct SlowGate {
        state: Mutex<GateState>,
        slow: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    }

    impl SlowGate {
        /// Makes the next look slow. It says when it has read the state, and ends when it is told to.
        fn slow_down(&self) -> (Receiver<()>, Sender<()>) {
            let ((began, begins), (end, ends)) = (channel(), channel());
            *self.slow.lock() = Some((began, ends));
            (begins, end)
        }
    }

    impl Gate for SlowGate {
        fn state(&self) -> GateState {
            let state = *self.state.lock();
            let slow = self.slow.lock().take();
            if let Some((began, ends)) = slow {
                began.send(()).expect("the test waits");
                ends.recv().expect("the test ends it");
            }
            state
        }

        fn keeps_holes(&self) -> Option<KeptHoles> {
            None
        }
    }

    #[test]
    fn what_changes_during_a_slow_look_is_looked_at_again() {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("small");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[range], backing).expect("memory");
        let gate = Arc::new(SlowGate { state: Mutex::new(GateState::Open), slow: Mutex::default() });
        let vm = ManagedVm { gate: Some(gate.clone()), ..ManagedVm::new(VmId(0), ram, None) };
        let config =
            ManagerConfig { tick_shortest: NEVER, tick_longest: NEVER, pulse: Some(NEVER), ..ManagerConfig::default() };
        let never = PolicyChoice::parse("never").expect("it exists").make();
        let manager = Manager::spawn(Arc::new(FakeHost::default()), vec![vm], never, config).expect("a thread");
        manager.activate();
        let until = |what: &str, is_so: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !is_so() {
                assert!(began.elapsed() < GIVES_UP_AFTER, "{what}: not after {GIVES_UP_AFTER:?}");
                thread::sleep(Duration::from_millis(1));
            }
        };
        until("the first tick", &|| manager.live().ticks > 0);
        let (begins, end) = gate.slow_down();
        manager.look();
        begins.recv_timeout(GIVES_UP_AFTER).expect("it looks");
        let closed = GateState::Closed(LeftAlone::Asked);
        *gate.state.lock() = closed;
        manager.look();
        end.send(()).expect("it looks");
        until("a tick for the gate that closed", &|| manager.live().vms[0].gate == closed);
    }
}
