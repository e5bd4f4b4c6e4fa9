//! The time between a daemon's start and its first complete scan of the host. The guests of the daemon before it
//! are not taken up yet, so that an answer would call them unmanaged.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Time that a request waits for the first scan. After that the answer has what is known and says what is missing.
/// A scan takes some ten milliseconds a guest.
const WAIT: Duration = Duration::from_secs(1);

/// Gate for requests during the start; see the module.
#[derive(Default)]
pub(super) struct Starting {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Starting {
    /// Marks the first scan as complete.
    pub(super) fn end(&self) {
        *self.is_over.lock() = true;
        self.changed.notify_all();
    }

    /// Returns when the first scan is complete, or [`WAIT`] has passed.
    pub(super) fn wait(&self) {
        self.changed.wait_while_for(&mut self.is_over.lock(), |is_over| !*is_over, WAIT);
    }
}
