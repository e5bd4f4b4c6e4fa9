//! `setpriority(2)` of the calling thread: on Linux, the nice value belongs to a thread.

use std::io;

/// The weakest nice value, as khugepaged has it (mm/khugepaged.c).
///
/// `SCHED_IDLE` would be weaker still, and is not used: a thread that moves pages holds them up for their users until
/// it gets a CPU again (migration entries, mm/migrate.c).
const WEAKEST: libc::c_int = 19;

/// Lets every other thread run first, for the rest of this thread's life.
pub(crate) fn yield_to_all_others() -> io::Result<()> {
    // SAFETY: takes numbers, and changes nothing but the calling thread's share of CPU time.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, WEAKEST) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
