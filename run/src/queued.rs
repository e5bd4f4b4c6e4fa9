//! Bytes for a file, a pipe or a terminal that may accept none for any length of time. A separate thread writes
//! them, and no other thread waits for it.
//!
//! ```text
//!   vCPU, manager, devices, main ──▶ a bounded queue ──▶ one thread ──▶ standard error, the console, a recording
//!                                      └─ full: the caller learns so, and drops, counts or waits
//! ```
//!
//! A write to a pipe ends when its reader reads, a write to a terminal when the user has typed Ctrl-Q, a write to a
//! file when its server answers. A thread that other threads wait for never makes such a write: it puts its bytes
//! here. That holds above all for a vCPU: every pause and the VM's end wait for it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Size of one write for bytes that come in lines or singly: a pipe takes it whole or not at all (`PIPE_BUF`, pipe(7)).
pub const PIECE: usize = 4096;

/// A bounded queue of bytes with its writing thread.
pub struct QueuedWriter {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Size of one write, in bytes.
    piece: usize,
}

/// Reason why bytes were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// The queue is full.
    Full,
    /// Nothing is written any more: the reader has gone, the file refused, or the queue has ended.
    Closed,
}

/// Bytes that were taken but not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Number of bytes.
    pub bytes: u64,
    /// Number of line ends among them.
    pub lines: u64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<u8>,
    /// Bytes and lines that the thread is writing.
    in_flight: usize,
    lines_in_flight: u64,
    /// Number of bytes written so far.
    written: u64,
    /// Whether a thread writes them.
    is_served: bool,
    /// Whether no more bytes will come.
    is_over: bool,
    /// Whether the thread has ended: all is written, or the reader has gone.
    is_closed: bool,
    error: Option<io::Error>,
}

impl QueuedWriter {
    /// A queue that keeps its bytes; they are written in pieces of this size.
    pub fn new(piece: usize) -> Arc<QueuedWriter> {
        Arc::new(QueuedWriter { queue: Mutex::default(), changed: Condvar::new(), piece })
    }

    /// Writes to `to` from now on, in a thread of that name which does `begin` first. If a thread exists already,
    /// nothing changes.
    ///
    /// # Errors
    /// That of the kernel, if a thread cannot be started.
    pub fn serve(
        self: &Arc<Self>,
        name: &str,
        mut to: impl Write + Send + 'static,
        begin: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let mut queue = self.lock();
        if queue.is_served {
            return Ok(());
        }
        let writer = Arc::clone(self);
        let work = move || {
            begin();
            writer.write_to(&mut to);
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(work)?;
        queue.is_served = true;
        Ok(())
    }

    /// Takes all of these bytes if at most `most` then wait, or none. Never waits for a reader.
    ///
    /// # Errors
    /// [`NotTaken`] with the reason.
    pub fn push(&self, bytes: &[u8], most: usize) -> Result<(), NotTaken> {
        Self::take(&mut self.lock(), bytes, most)?;
        self.changed.notify_all();
        Ok(())
    }

    /// Takes all of these bytes, and waits for space until `has_to_go` returns true; it is called every `look_every`.
    ///
    /// # Errors
    /// [`NotTaken`] with the reason.
    pub fn push_when_there_is_room(
        &self,
        bytes: &[u8],
        most: usize,
        look_every: Duration,
        has_to_go: impl Fn() -> bool,
    ) -> Result<(), NotTaken> {
        let mut queue = self.lock();
        loop {
            match Self::take(&mut queue, bytes, most) {
                Err(NotTaken::Full) if !has_to_go() => {}
                taken => {
                    self.changed.notify_all();
                    return taken;
                }
            }
            self.changed.wait_for(&mut queue, look_every);
        }
    }

    /// Whether a thread writes the waiting bytes.
    pub fn is_served(&self) -> bool {
        self.lock().is_served
    }

    /// The next bytes for a caller that writes them itself, because no thread exists yet; `None` if one exists.
    pub fn next_unserved(&self) -> Option<Vec<u8>> {
        let mut queue = self.lock();
        let count = queue.waiting.len().min(self.piece);
        let bytes = (!queue.is_served && count > 0).then(|| queue.waiting.drain(..count).collect::<Vec<u8>>())?;
        queue.written += bytes.len() as u64;
        Some(bytes)
    }

    /// Waits until all is written, or the reader has taken nothing for the time of `patience`, which is called
    /// repeatedly because it may become shorter. Returns `true` if all is written.
    pub fn drain(&self, patience: impl Fn() -> Duration) -> bool {
        /// Interval at which `patience` is called.
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let mut queue = self.lock();
        let (mut written, mut since) = (queue.written, Instant::now());
        while queue.is_served && !queue.is_closed && !queue.is_empty() {
            if queue.written != written {
                (written, since) = (queue.written, Instant::now());
            } else if since.elapsed() >= patience() {
                return false;
            }
            self.changed.wait_for(&mut queue, LOOK_EVERY);
        }
        queue.is_empty()
    }

    /// Drops the waiting bytes. Returns them together with those being written, because it is unknown whether those
    /// will be read.
    pub fn give_up(&self) -> Left {
        let mut queue = self.lock();
        let lines = lines_in(queue.waiting.iter().copied()) + std::mem::take(&mut queue.lines_in_flight);
        let bytes = (queue.waiting.len() + queue.in_flight) as u64;
        queue.waiting.clear();
        Left { bytes, lines }
    }

    /// Ends the thread after all is written, and waits for that as [`QueuedWriter::drain`] does. Returns the first
    /// error of a write, if any.
    pub fn finish(&self, patience: impl Fn() -> Duration) -> Option<io::Error> {
        self.drain(patience);
        let mut queue = self.lock();
        queue.is_over = true;
        self.changed.notify_all();
        queue.error.take()
    }

    /// The first error of a write, returned only once.
    pub fn take_error(&self) -> Option<io::Error> {
        self.lock().error.take()
    }

    /// Number of bytes that are written.
    pub fn written(&self) -> u64 {
        self.lock().written
    }

    /// Whether all taken bytes are written.
    pub fn is_written(&self) -> bool {
        self.lock().is_empty()
    }

    /// Whether all taken bytes are written, or never will be.
    pub fn is_idle(&self) -> bool {
        let queue = self.lock();
        queue.is_closed || queue.is_empty()
    }

    fn take(queue: &mut Queue, bytes: &[u8], most: usize) -> Result<(), NotTaken> {
        if queue.is_closed || queue.is_over {
            return Err(NotTaken::Closed);
        }
        if queue.waiting.len() + queue.in_flight + bytes.len() > most {
            return Err(NotTaken::Full);
        }
        queue.waiting.extend(bytes);
        Ok(())
    }

    fn write_to(&self, to: &mut impl Write) {
        let mut piece = Vec::new();
        let error = loop {
            if !self.next(&mut piece) {
                break to.flush().err();
            }
            if let Err(error) = to.write_all(&piece) {
                break Some(error);
            }
            let mut queue = self.lock();
            queue.written += piece.len() as u64;
            (queue.in_flight, queue.lines_in_flight) = (0, 0);
            drop(queue);
            self.changed.notify_all();
        };
        let mut queue = self.lock();
        (queue.is_closed, queue.error) = (true, error);
        drop(queue);
        self.changed.notify_all();
    }

    /// Waits for the next piece; `false` if no more will come.
    fn next(&self, piece: &mut Vec<u8>) -> bool {
        let mut queue = self.lock();
        self.changed.wait_while(&mut queue, |queue| queue.waiting.is_empty() && !queue.is_over);
        let count = queue.waiting.len().min(self.piece);
        piece.clear();
        piece.extend(queue.waiting.drain(..count));
        (queue.in_flight, queue.lines_in_flight) = (count, lines_in(piece.iter().copied()));
        count > 0
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }
}

fn lines_in(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.filter(|byte| *byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::io::{Read, pipe};

    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    use super::*;

    /// Longer than the tests wait for anything that happens.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn all_bytes_come_in_order() {
        let (mut from, to) = pipe().unwrap();
        let queue = QueuedWriter::new(PIECE);
        queue.serve("writer", to, || {}).unwrap();
        let all: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
        let read = std::thread::spawn(move || {
            let mut read = Vec::new();
            from.read_to_end(&mut read).map(|_| read)
        });
        for bytes in all.chunks(7) {
            queue.push_when_there_is_room(bytes, 1 << 16, LONG, || false).unwrap();
        }
        assert!(queue.finish(|| LONG).is_none());
        assert_eq!(read.join().unwrap().unwrap(), all);
    }

    #[test]
    fn without_a_reader_bytes_are_refused_and_the_queue_ends() {
        let (_from, mut to) = pipe().unwrap();
        // A full pipe: the writer can write nothing, whenever it runs.
        fcntl(&to, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        while to.write(&[0; PIECE]).is_ok() {}
        fcntl(&to, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        let queue = QueuedWriter::new(PIECE);
        queue.serve("writer", to, || {}).unwrap();
        let line = [&[b'x'; 99][..], b"\n"].concat();
        let taken = (0..10_000).filter(|_| queue.push(&line, 10_000).is_ok()).count();
        assert!((60..=150).contains(&taken), "{taken} lines of 100 bytes in a queue of 10,000 and a piece");
        assert!(!queue.drain(|| Duration::ZERO));
        assert_eq!(queue.give_up().lines, taken as u64);
        assert_eq!(queue.push(&line, 10_000), Ok(()), "there is room again");
    }

    #[test]
    fn a_reader_that_has_gone_closes_the_queue() {
        let (from, to) = pipe().unwrap();
        drop(from);
        let queue = QueuedWriter::new(PIECE);
        queue.serve("writer", to, || {}).unwrap();
        queue.push(b"x", PIECE).unwrap();
        assert!(!queue.drain(|| LONG), "it was not written, and is not waited for");
        assert_eq!(queue.push(b"x", PIECE), Err(NotTaken::Closed));
        assert_eq!(queue.take_error().unwrap().kind(), io::ErrorKind::BrokenPipe);
    }
}
