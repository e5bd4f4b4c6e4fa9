//! Takes a guest apart while a part of its RAM may still be lost: a device's thread that touches that part sleeps until
//! the process ends, and a join would wait for it for ever.
//!
//! ```text
//!   main thread   hand over ──▶ look: dropped, or RAM is lost? ──▶ go on
//!   this thread    └─▶ drop ─────┘            └── left asleep with the guest until the process ends
//! ```
//!
//! The thread is started before the main thread enters its sandbox, which lets it start none. It has the same calls.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval between two looks for lost RAM.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A thread that waits for a value to drop.
#[derive(Debug)]
pub(crate) struct Teardown<T> {
    values: Sender<T>,
    dropped: Receiver<()>,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Teardown<T> {
    /// Starts the thread, which calls `begin` first. Without a value to drop it ends with this.
    ///
    /// # Errors
    /// Error of the kernel if it cannot start a thread.
    pub(crate) fn start(begin: impl FnOnce() + Send + 'static) -> io::Result<Teardown<T>> {
        let ((values, handed), (done, dropped)) = (channel::<T>(), channel());
        let work = move || {
            begin();
            if let Ok(value) = handed.recv() {
                drop(value);
                let _ = done.send(());
            }
        };
        let thread = std::thread::Builder::new().name("teardown".into()).spawn(work)?;
        Ok(Teardown { values, dropped, thread })
    }

    /// Drops the value, and waits for that unless RAM is lost: the value then stays until the process ends. Returns
    /// whether it is dropped.
    ///
    /// # Panics
    /// As the drop of the value does.
    pub(crate) fn tear_down(self, value: T, has_lost_ram: impl Fn() -> bool) -> bool {
        if has_lost_ram() {
            std::mem::forget(value);
            return false;
        }
        if let Err(refused) = self.values.send(value) {
            // The thread has panicked at its begin. Without it no loss can be awaited.
            drop(refused);
            return true;
        }
        while self.dropped.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
            if has_lost_ram() {
                tracing::warn!("devices of the guest are left as they are: a part of its RAM is lost");
                return false;
            }
        }
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A value of which the drop waits for a message, as a guest's does for a device that sleeps.
    struct Waits(Receiver<()>, Arc<AtomicBool>);

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.recv();
            self.1.store(true, Ordering::SeqCst);
        }
    }

    fn start() -> (Teardown<Waits>, Sender<()>, Waits, Arc<AtomicBool>) {
        let (wake, sleep) = channel();
        let is_dropped = Arc::new(AtomicBool::new(false));
        (Teardown::start(|| ()).expect("a thread"), wake, Waits(sleep, is_dropped.clone()), is_dropped)
    }

    #[test]
    fn a_guest_is_gone_before_the_run_goes_on() {
        let (teardown, wake, guest, is_dropped) = start();
        drop(wake);
        assert!(teardown.tear_down(guest, || false));
        assert!(is_dropped.load(Ordering::SeqCst));
    }

    #[test]
    fn ram_that_is_lost_while_a_device_sleeps_in_it_ends_the_wait_and_wakes_nothing() {
        let (teardown, wake, guest, is_dropped) = start();
        let looks = AtomicBool::new(false);
        // Not at the first look, which comes before the drop.
        assert!(!teardown.tear_down(guest, || looks.swap(true, Ordering::SeqCst)));
        assert!(!is_dropped.load(Ordering::SeqCst), "the device still sleeps");
        drop(wake);
    }

    #[test]
    fn with_ram_that_is_lost_already_nothing_is_taken_apart() {
        let (teardown, wake, guest, is_dropped) = start();
        drop(wake);
        assert!(!teardown.tear_down(guest, || true));
        assert!(!is_dropped.load(Ordering::SeqCst));
    }

    #[test]
    #[should_panic(expected = "this panic is part of the test")]
    fn a_panic_of_the_drop_is_that_of_the_run() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("this panic is part of the test")
            }
        }
        Teardown::start(|| ()).expect("a thread").tear_down(Panics, || false);
    }
}
