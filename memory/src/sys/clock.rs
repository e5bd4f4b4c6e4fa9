//! CPU time of the calling thread. `clock_gettime(2)`.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// CPU time the calling thread has used so far.
pub(crate) fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
