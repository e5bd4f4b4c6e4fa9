//! A gate that many devices can pass at once. A pause of the VM closes it behind the last of them.
//!
//! ```text
//!   open ── close ─▶ closed ── drain ─▶ devices pass, to finish what they began ── drained ─▶ closed ── open ─▶ open
//!                       └──── end ────▶ ended: the VM is gone, and a device's thread that comes here ends
//! ```

use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

#[derive(Debug, Default)]
struct State {
    inside: usize,
    /// Number of closings that were not undone.
    closings: usize,
    /// Whether devices pass although the gate is closed, once.
    is_drained: bool,
    /// Whether no device passes any more.
    has_ended: bool,
}

impl State {
    fn is_shut(&self) -> bool {
        // A second closing is another thread's, which did not ask for the devices' work.
        self.closings > 1 || self.closings == 1 && !self.is_drained
    }

    fn is_closed(&self) -> bool {
        self.closings > 0 && !self.has_ended
    }
}

/// The gate: see the module.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// A device is inside until this is dropped.
#[derive(Debug)]
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// Enters the gate; waits while it is closed. Where the gate has ended, the calling thread ends instead: it unwinds
    /// without a message, because what its device would do now is another VM's to do.
    pub fn enter(&self) -> Inside<'_> {
        let mut state = self.lock();
        while state.is_shut() && !state.has_ended {
            self.changed.wait(&mut state);
        }
        if state.has_ended {
            drop(state);
            resume_unwind(Box::new("the gate of guest RAM has ended"));
        }
        state.inside += 1;
        Inside(self)
    }

    /// Ends a gate that the caller has closed: the VM is gone, or continues elsewhere. No device passes any more, and
    /// the threads that wait here end.
    pub fn end(&self) {
        let mut state = self.lock();
        debug_assert!(state.closings > 0, "the gate is not closed");
        state.has_ended = true;
        self.changed.notify_all();
    }

    /// Closes the gate and waits, for at most `at_most`, until no device is inside. Returns whether that succeeded;
    /// if not, the gate is as open as before. Closings nest.
    #[must_use]
    pub fn close(&self, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        let mut state = self.lock();
        state.closings += 1;
        while state.inside > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.closings -= 1;
                self.changed.notify_all();
                return false;
            }
            self.changed.wait_for(&mut state, left);
        }
        true
    }

    /// Undoes one [`Gate::close`].
    pub fn open(&self) {
        let mut state = self.lock();
        debug_assert!(state.closings > 0, "the gate is not closed");
        state.closings = state.closings.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Lets devices pass although the caller has closed the gate, so that they finish what they have begun. Returns
    /// whether they may: not where it is open, or another thread has closed it too. Ended by [`Gate::drained`].
    #[must_use]
    pub fn drain(&self) -> bool {
        let mut state = self.lock();
        let may_drain = state.closings == 1 && !state.is_drained;
        state.is_drained |= may_drain;
        self.changed.notify_all();
        may_drain
    }

    /// Ends [`Gate::drain`] and waits, for at most `at_most`, until no device is inside. Returns whether that
    /// succeeded; the gate is closed again in any case.
    #[must_use]
    pub fn drained(&self, at_most: Duration) -> bool {
        let mut state = self.lock();
        state.is_drained = false;
        self.changed.wait_while_for(&mut state, |state| state.inside > 0, at_most);
        state.inside == 0
    }

    /// Waits while it is closed, for at most `at_most`. Returns whether no thread waits in it now: it is open, or has
    /// ended.
    pub fn is_open_within(&self, at_most: Duration) -> bool {
        let mut state = self.lock();
        self.changed.wait_while_for(&mut state, |state| state.is_closed(), at_most);
        !state.is_closed()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two counters, each changed in one step, so they are valid after a panic elsewhere.
        self.state.lock()
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.inside -= 1;
        if state.inside == 0 && state.closings > 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_closing_waits_for_devices_inside_and_gives_up_in_time() {
        let gate = Gate::default();
        let inside = gate.enter();
        assert!(!gate.close(Duration::from_millis(1)));
        // The gate is open again, so another device may enter.
        drop(gate.enter());
        drop(inside);
        assert!(gate.close(Duration::from_millis(1)));
        gate.open();
    }

    #[test]
    fn a_device_passes_a_closed_gate_only_while_it_is_drained() {
        let gate = Gate::default();
        assert!(!gate.drain(), "an open gate needs no draining");
        assert!(gate.close(Duration::ZERO) && gate.drain() && !gate.drain());
        let inside = gate.enter();
        assert!(!gate.drained(Duration::ZERO), "the device is inside");
        drop(inside);
        assert!(gate.drain() && gate.drained(Duration::ZERO));
        std::thread::scope(|scope| {
            let entered = scope.spawn(|| drop(gate.enter()));
            std::thread::sleep(Duration::from_millis(5));
            assert!(!entered.is_finished());
            gate.open();
        });
    }

    #[test]
    fn a_gate_that_two_have_closed_is_not_drained() {
        let gate = Gate::default();
        assert!(gate.close(Duration::ZERO) && gate.close(Duration::ZERO) && !gate.drain());
        gate.open();
        assert!(gate.drain());
        // The second closing comes during the draining, and then no device passes.
        assert!(gate.close(Duration::ZERO));
        std::thread::scope(|scope| {
            let entered = scope.spawn(|| drop(gate.enter()));
            std::thread::sleep(Duration::from_millis(5));
            assert!(!entered.is_finished());
            gate.open();
        });
        assert!(gate.drained(Duration::ZERO));
    }

    #[test]
    fn a_thread_that_waits_at_a_gate_or_comes_to_it_ends_there_once_the_gate_has_ended() {
        let (gate, came_in) = (Gate::default(), AtomicBool::new(false));
        assert!(gate.close(Duration::ZERO) && !gate.is_open_within(Duration::ZERO));
        let pass = || {
            let _inside = gate.enter();
            came_in.store(true, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            let waits = scope.spawn(pass);
            std::thread::sleep(Duration::from_millis(5));
            gate.end();
            assert!(waits.join().is_err());
            assert!(scope.spawn(pass).join().is_err(), "one that comes later");
        });
        assert!(!came_in.load(Ordering::SeqCst) && gate.is_open_within(Duration::ZERO), "no thread waits in it");
        gate.open();
        std::thread::scope(|scope| assert!(scope.spawn(pass).join().is_err(), "it stays so"));
    }

    #[test]
    fn no_device_enters_until_the_last_closing_is_undone() {
        let (gate, came_in) = (Gate::default(), AtomicBool::new(false));
        assert!(gate.close(Duration::ZERO) && gate.close(Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _inside = gate.enter();
                came_in.store(true, Ordering::SeqCst);
            });
            gate.open();
            std::thread::sleep(Duration::from_millis(5));
            assert!(!came_in.load(Ordering::SeqCst));
            gate.open();
        });
        assert!(came_in.load(Ordering::SeqCst));
    }
}
