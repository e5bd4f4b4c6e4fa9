//! What the guest prints, on its way to standard output.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use wideleaf_vmm::run_loop::RunControl;

/// More than a screen, and as much as a pipe holds (pipe(7)).
const WAITING_MAX: usize = 64 << 10;

/// How often a vCPU that waits for its reader looks whether the VM is to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long the end of a run waits for a reader that takes nothing.
const LAST_WRITE_MAX: Duration = Duration::from_secs(2);

/// Bytes that wait for a thread which writes them.
pub(super) struct ConsoleOutput {
    queue: Mutex<Queue>,
    changed: Condvar,
    control: OnceLock<Arc<RunControl>>,
}

#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    /// There is a thread that writes them.
    is_served: bool,
    /// Nothing more will come.
    is_over: bool,
    /// The thread has ended: all is written, or nobody reads any more.
    is_closed: bool,
}

/// Standard output, not through `io::stdout()`, which keeps back what is no whole line.
pub(super) fn standard_output() -> io::Result<File> {
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

impl ConsoleOutput {
    /// One whose bytes wait.
    pub(super) fn new() -> Arc<ConsoleOutput> {
        let (queue, changed, control) = (Mutex::default(), Condvar::new(), OnceLock::new());
        Arc::new(ConsoleOutput { queue, changed, control })
    }

    /// Writes to `to`, in a thread that does `begin` first. `control` is of the VM whose end is looked for.
    pub(super) fn serve(
        self: &Arc<Self>,
        mut to: impl Write + Send + 'static,
        control: Arc<RunControl>,
        begin: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        // The first stays: there is one machine.
        let _ = self.control.set(control);
        let writer = Arc::clone(self);
        let work = move || {
            begin();
            writer.write_to(&mut to);
        };
        std::thread::Builder::new().name("console-out".into()).spawn(work)?;
        self.lock().is_served = true;
        Ok(())
    }

    /// Takes bytes of the guest. Waits where there is no room, until there is or the VM is to end: they are then dropped, as they are where
    /// nobody reads.
    pub(super) fn push(&self, bytes: &[u8]) {
        let mut queue = self.lock();
        while queue.bytes.len() >= WAITING_MAX && !queue.is_closed {
            if self.control.get().is_some_and(|control| control.is_stopping()) {
                return;
            }
            (queue, _) = self.changed.wait_timeout(queue, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner);
        }
        if !queue.is_closed {
            queue.bytes.extend_from_slice(bytes);
            self.changed.notify_all();
        }
    }

    /// Waits until all is written, for [`LAST_WRITE_MAX`] at most.
    pub(super) fn finish(&self) {
        let mut queue = self.lock();
        queue.is_over = true;
        self.changed.notify_all();
        if !queue.is_served {
            return;
        }
        let waited = self.changed.wait_timeout_while(queue, LAST_WRITE_MAX, |queue| !queue.is_closed);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn write_to(&self, to: &mut impl Write) {
        loop {
            let bytes = {
                let queue = self.lock();
                let queue = self.changed.wait_while(queue, |queue| queue.bytes.is_empty() && !queue.is_over);
                std::mem::take(&mut queue.unwrap_or_else(PoisonError::into_inner).bytes)
            };
            self.changed.notify_all();
            if bytes.is_empty() || to.write_all(&bytes).is_err() {
                break;
            }
        }
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::io::{Read, pipe};

    use wideleaf_vmm::run_loop::OnReset;

    use super::*;

    fn served(to: impl Write + Send + 'static) -> (Arc<ConsoleOutput>, Arc<RunControl>) {
        let (output, control) = (ConsoleOutput::new(), RunControl::new(Vec::new(), OnReset::Stop));
        output.serve(to, Arc::clone(&control), || {}).unwrap();
        (output, control)
    }

    #[test]
    fn all_bytes_come_in_order_and_a_line_need_not_be_whole() {
        let (mut from, to) = pipe().unwrap();
        let (output, _control) = served(to);
        let all: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
        let read = std::thread::spawn(move || {
            let mut read = Vec::new();
            from.read_to_end(&mut read).map(|_| read)
        });
        all.chunks(7).for_each(|bytes| output.push(bytes));
        output.finish();
        assert_eq!(read.join().unwrap().unwrap(), all);
    }

    #[test]
    fn nobody_who_reads_holds_up_nobody() {
        let (from, to) = pipe().unwrap();
        drop(from);
        let (output, _control) = served(to);
        for _ in 0..10 {
            output.push(&[0; WAITING_MAX]);
        }
        output.finish();
        assert!(output.lock().is_closed);
    }

    #[test]
    fn a_vm_that_is_to_end_does_not_wait_for_who_does_not_read() {
        let (_from, to) = pipe().unwrap();
        let (output, control) = served(to);
        control.stop(wideleaf_vmm::GuestExit::Stopped);
        for _ in 0..10 {
            output.push(&[0; WAITING_MAX]);
        }
    }
}
