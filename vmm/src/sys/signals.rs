//! Signals that end the process in their handler, whatever its threads wait for. The handler only reads a clock and
//! exits, as signal-safety(7) allows.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use signal_hook::SigId;

/// Time within which several signals count as one: `timeout(1)` sends one to its child and one to the child's
/// process group, microseconds apart. A person takes longer between two.
const TOGETHER: Duration = Duration::from_millis(100);

/// Lets a second one of `signals`, which comes later than the first and not together with it, end the process with
/// `exit_code`, without any destructor. The first one does nothing here. The returned values remove the handlers.
///
/// # Errors
/// The kernel's error, where it refuses a handler.
pub fn end_at_the_second_of(signals: &[i32], exit_code: i32) -> io::Result<Vec<SigId>> {
    let (began, first_at) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let register = |signal: &i32| {
        let first_at = Arc::clone(&first_at);
        let handler = move || {
            // One more than the time, because zero means that none has come.
            let now_ms = began.elapsed().as_millis() as u64 + 1;
            let first = first_at.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed);
            if first.is_err_and(|first_ms| now_ms.saturating_sub(first_ms) >= TOGETHER.as_millis() as u64) {
                signal_hook::low_level::exit(exit_code);
            }
        };
        // SAFETY: the handler calls what may be called in one (signal-safety(7)): clock_gettime(2), by `Instant`, and
        // _exit(2). It takes no lock, allocates nothing and cannot panic.
        unsafe { signal_hook::low_level::register(*signal, handler) }
    };
    signals.iter().map(register).collect()
}
