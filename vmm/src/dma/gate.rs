//! A gate that many devices pass at once, and that who pauses the VM closes behind the last of them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct State {
    inside: usize,
    /// Closings that were not undone.
    closings: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// Somebody is inside until this is dropped.
#[derive(Debug)]
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// Waits while it is closed.
    pub fn enter(&self) -> Inside<'_> {
        let mut state = self.lock();
        while state.closings > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.inside += 1;
        Inside(self)
    }

    /// Lets nobody in any more and waits until nobody is inside, for so long at most; whether that came about. If not, it is as open as
    /// before. Nests.
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
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Undoes one [`Gate::close`].
    pub fn open(&self) {
        let mut state = self.lock();
        debug_assert!(state.closings > 0, "nobody closed the gate");
        state.closings = state.closings.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Waits while it is closed, for so long at most; whether it is open now.
    pub fn is_open_within(&self, at_most: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), at_most, |state| state.closings > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.closings == 0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two counters, each changed in one step: a panic elsewhere leaves them true.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn a_closing_waits_for_who_is_inside_and_gives_up_in_time() {
        let gate = Gate::default();
        let inside = gate.enter();
        assert!(!gate.close(Duration::from_millis(1)));
        // It is open again: another may come in beside.
        drop(gate.enter());
        drop(inside);
        assert!(gate.close(Duration::from_millis(1)));
        gate.open();
    }

    #[test]
    fn nobody_comes_in_until_the_last_closing_is_undone() {
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
