//! CPU time of the calling thread and of its process. `clock_gettime(2)`, `clock_nanosleep(2)`.

use std::time::Duration;

use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, ClockNanosleepFlags, clock_gettime, clock_nanosleep};

/// CPU time the calling thread has used so far.
pub(crate) fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// CPU time that all threads of this process have used so far, ended ones too; `None` if the kernel does not tell.
pub(crate) fn process_cpu_time() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok().map(Duration::from)
}

/// Waits until this process has used that CPU time. Returns `false` if the kernel does not wait for it.
pub(crate) fn sleep_until_process_used(cpu_time: Duration) -> bool {
    let (clock, until) = (ClockId::CLOCK_PROCESS_CPUTIME_ID, TimeSpec::from_duration(cpu_time));
    loop {
        match clock_nanosleep(clock, ClockNanosleepFlags::TIMER_ABSTIME, &until) {
            Ok(_) => return true,
            Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}
