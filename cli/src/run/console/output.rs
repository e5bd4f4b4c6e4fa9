//! The guest's output, on its way to standard output through a bounded buffer: a slow reader delays the guest, and
//! never a pause or the end of the VM. Bytes that find no space then are dropped and counted.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use wideleaf_vmm::run_loop::RunControl;

use wideleaf_run::queued::{PIECE, QueuedWriter};

/// Most bytes that wait: more than a screen, and the capacity of a pipe (pipe(7)).
const WAITING_MAX: usize = 64 << 10;

/// Most bytes that wait while vCPUs are paused repeatedly: the output that a paused vCPU holds is accepted, so that
/// the vCPU can leave.
const WAITING_WHILE_PAUSED_MAX: usize = 2 * WAITING_MAX;

/// Interval at which a vCPU that waits for its reader checks for a pause or an end. Shorter than the pause of a
/// giant's exchange.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Time for which the end of a run waits for a reader that takes nothing.
const LAST_WRITE_MAX: Duration = Duration::from_millis(500);

/// The guest's output on its way. A vCPU waits for space, unless it must pause or end.
pub(super) struct ConsoleOutput {
    queue: Arc<QueuedWriter>,
    control: OnceLock<Arc<RunControl>>,
    lost: AtomicU64,
}

/// Standard output without `io::stdout()`, which holds back incomplete lines.
pub(super) fn standard_output() -> io::Result<File> {
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

impl ConsoleOutput {
    /// Output that keeps its bytes until it is served.
    pub(super) fn new() -> Arc<ConsoleOutput> {
        let (queue, control) = (QueuedWriter::new(PIECE), OnceLock::new());
        Arc::new(ConsoleOutput { queue, control, lost: AtomicU64::new(0) })
    }

    /// Writes to `to`, in a thread that does `begin` first. `control` belongs to the printing VM.
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

    /// Takes bytes of the guest. Waits for space until the vCPU must leave the guest, to pause or to end. Bytes
    /// without space are then dropped and counted, as are bytes after the reader has gone.
    pub(super) fn push(&self, bytes: &[u8]) {
        let is_wanted = || self.control.get().is_some_and(|control| control.wants_vcpus_out());
        let taken = self.queue.push_when_there_is_room(bytes, WAITING_MAX, LOOK_EVERY, is_wanted);
        if taken.is_err() && self.queue.push(bytes, WAITING_WHILE_PAUSED_MAX).is_err() {
            self.lost.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }

    /// Number of bytes that were dropped.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until all is written, while its reader reads; the rest is counted as lost.
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

    /// Pauses of a giant's exchange, of sampling the guest's page tables, and of a client: none waits for the
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
        assert!(output.lost() > 0, "they are bounded");
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
