//! The file of `--record`. Its own thread writes it, so that a disk that hangs, or a pipe without a reader, holds
//! up neither the manager nor the vCPUs, which wait for the manager with their lines.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use wideleaf_memory::recorder::RecordFile;

use crate::queued::{NotTaken, QueuedWriter};

/// Size of one write, in bytes.
const PIECE: usize = 1 << 20;

/// Most bytes that wait for the file: some ticks of a guest of a tebibyte; the first snapshot is the largest.
const WAITING_MAX: usize = 64 << 20;

/// Longest recording. A day of a busy guest is shorter. The guest decides how much of it changes, so it must not
/// decide how much disk space it gets.
const BYTES_MAX: u64 = 64 << 30;

/// Time for which the end of a run waits for a file that takes nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// File of a recording, with its queue.
pub struct QueuedFile {
    queue: Arc<QueuedWriter>,
    taken: u64,
}

impl QueuedFile {
    /// Writes to `file`, in a thread that does `begin` first.
    ///
    /// # Errors
    /// That of the kernel, if a thread cannot be started.
    pub fn start(file: impl Write + Send + 'static, begin: impl FnOnce() + Send + 'static) -> io::Result<QueuedFile> {
        let queue = QueuedWriter::new(PIECE);
        queue.serve("recording", file, begin)?;
        Ok(QueuedFile { queue, taken: 0 })
    }

    fn fails(&self) -> io::Error {
        self.queue.take_error().unwrap_or_else(|| io::Error::other("it accepts no more data"))
    }
}

impl RecordFile for QueuedFile {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.taken += bytes.len() as u64;
        if self.taken > BYTES_MAX {
            return Err(io::Error::other(format!("a recording has at most {} GiB", BYTES_MAX >> 30)));
        }
        match self.queue.push(bytes, WAITING_MAX) {
            Ok(()) => Ok(()),
            Err(NotTaken::Closed) => Err(self.fails()),
            Err(NotTaken::Full) => {
                Err(io::Error::other(format!("its file is too slow: {} MiB wait for it", WAITING_MAX >> 20)))
            }
        }
    }

    fn written(&self) -> u64 {
        self.queue.written()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.queue.drain(|| PATIENCE);
        match self.queue.finish(|| Duration::ZERO) {
            Some(error) => Err(error),
            None if self.queue.is_written() => Ok(()),
            None => Err(io::Error::other(format!("its file took nothing for {} s", PATIENCE.as_secs()))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::fs::File;
    use std::io::{Read, pipe};

    use super::*;

    #[test]
    fn a_file_that_takes_nothing_is_not_waited_for_and_the_loss_is_reported() {
        let (_from, to) = pipe().unwrap();
        let mut file = QueuedFile::start(to, || {}).unwrap();
        let megabyte = vec![0; 1 << 20];
        let taken = (0..1000).take_while(|_| file.put(&megabyte).is_ok()).count();
        assert_eq!(taken, WAITING_MAX >> 20);
        assert!(file.put(&megabyte).unwrap_err().to_string().contains("too slow"));
        assert_eq!(file.written(), 0);
        assert!(file.finish().unwrap_err().to_string().contains("took nothing"));
    }

    #[test]
    fn a_full_disk_is_reported_once_it_is_known() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut file = QueuedFile::start(full, || {}).unwrap();
        file.put(b"a tick").unwrap();
        assert_eq!(file.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.written(), 0);
    }

    #[test]
    fn all_that_was_taken_is_in_the_file_at_the_end() {
        let (mut from, to) = pipe().unwrap();
        let mut file = QueuedFile::start(to, || {}).unwrap();
        file.put(&[7; 10_000]).unwrap();
        file.finish().unwrap();
        assert_eq!(file.written(), 10_000);
        let mut read = vec![0; 10_000];
        from.read_exact(&mut read).unwrap();
        assert_eq!(read, [7; 10_000]);
    }
}
