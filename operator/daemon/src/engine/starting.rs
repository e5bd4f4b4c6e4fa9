//! The time between a daemon's first line and its first whole look at the host: the guests of the daemon before it are
//! not taken up yet, so that an answer would call them unmanaged.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A request waits this long for the first look, and is then answered with what is known, which says what is missing. A
/// look takes some ten milliseconds a guest.
const WAIT: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Default)]
pub(super) struct Starting {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Starting {
    /// The first look is whole.
    pub(super) fn end(&self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Returns when the first look is whole, or [`WAIT`] has passed.
    pub(super) fn wait(&self) {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(is_over, WAIT, |is_over| !*is_over));
    }
}
