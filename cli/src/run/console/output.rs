//! What the guest prints, on its way to standard output.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use wideleaf_vmm::run_loop::RunControl;

use crate::queued::{PIECE, QueuedWriter};

/// More than a screen, and as much as a pipe holds (pipe(7)).
const WAITING_MAX: usize = 64 << 10;

/// Bytes that wait at most while vCPUs are taken out of the guest again and again: what one of them has in hand then
/// is taken, and it goes.
const WAITING_WHILE_PAUSED_MAX: usize = 2 * WAITING_MAX;

/// How often a vCPU that waits for its reader looks whether it is to be paused, which is less than the pause of a
/// giant's exchange, or to end.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How long the end of a run waits for a reader that takes nothing.
const LAST_WRITE_MAX: Duration = Duration::from_millis(500);

/// What the guest prints, on its way: a vCPU waits for room, but only while nothing else is wanted of it.
pub(super) struct ConsoleOutput {
    queue: Arc<QueuedWriter>,
    control: OnceLock<Arc<RunControl>>,
    lost: AtomicU64,
}

/// Standard output, not through `io::stdout()`, which keeps back what is no whole line.
pub(super) fn standard_output() -> io::Result<File> {
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

impl ConsoleOutput {
    /// One whose bytes wait.
    pub(super) fn new() -> Arc<ConsoleOutput> {
        let (queue, control) = (QueuedWriter::new(PIECE), OnceLock::new());
        Arc::new(ConsoleOutput { queue, control, lost: AtomicU64::new(0) })
    }

    /// Writes to `to`, in a thread that does `begin` first. `control` is of the VM whose vCPUs print.
    pub(super) fn serve(
        self: &Arc<Self>,
        to: impl Write + Send + 'static,
        control: Arc<RunControl>,
        begin: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        // The first stays: there is one machine.
        let _ = self.control.set(control);
        self.queue.serve("console-out", to, begin)
    }

    /// Takes bytes of the guest. Waits where there is no room, until there is or the vCPU is wanted out of the guest,
    /// to pause or to end. What finds no room then is dropped and counted, as is what comes when the reader has gone.
    pub(super) fn push(&self, bytes: &[u8]) {
        let is_wanted = || self.control.get().is_some_and(|control| control.wants_vcpus_out());
        let taken = self.queue.push_when_there_is_room(bytes, WAITING_MAX, LOOK_EVERY, is_wanted);
        if taken.is_err() && self.queue.push(bytes, WAITING_WHILE_PAUSED_MAX).is_err() {
            self.lost.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }

    /// Bytes that were dropped.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until all is written, while its reader reads; what is left is counted as lost.
    pub(super) fn finish(&self) {
        self.queue.finish(|| LAST_WRITE_MAX);
        self.lost.fetch_add(self.queue.give_up().bytes, Ordering::Relaxed);
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
    fn a_reader_that_has_gone_holds_up_no_vcpu() {
        let (from, to) = pipe().unwrap();
        drop(from);
        let (output, _control) = served(to);
        for _ in 0..10 {
            output.push(&[0; WAITING_MAX]);
        }
        output.finish();
        assert!(output.lost() > 0);
    }

    /// The pauses of a giant's exchange, of a look at the guest's page tables, of a client: none waits for the
    /// console's reader.
    #[test]
    fn a_vcpu_that_is_to_pause_does_not_wait_for_a_reader_and_its_bytes_are_kept() {
        let (mut from, to) = pipe().unwrap();
        let (output, control) = served(to);
        control.pause().unwrap();
        let all: Vec<u8> = (0..WAITING_WHILE_PAUSED_MAX).map(|number| number as u8).collect();
        all.chunks(100).for_each(|bytes| output.push(bytes));
        assert_eq!(output.lost(), 0);
        (0..10).for_each(|_| output.push(&[0; WAITING_MAX]));
        assert!(output.lost() > 0, "they are bounded all the same");
        let mut read = vec![0; all.len()];
        from.read_exact(&mut read).unwrap();
        assert_eq!(read, all);
    }

    #[test]
    fn a_vm_that_is_to_end_does_not_wait_for_its_reader() {
        let (_from, to) = pipe().unwrap();
        let (output, control) = served(to);
        control.stop(wideleaf_vmm::GuestExit::Stopped);
        for _ in 0..10 {
            output.push(&[0; WAITING_MAX]);
        }
    }
}
