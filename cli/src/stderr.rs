//! Standard error, for which no thread of a guest waits: the guest's lines, the program's own lines, the log and
//! the progress bar.
//!
//! ```text
//!                                         a command that runs no guest: written at once
//!   say, log, panic, progress bar ──┬──▶  a guest is about to run:      as far as it fits now; the rest waits
//!   lines of the guest ─────────────┘     it runs:                      all of it waits for a thread (`queued.rs`)
//! ```
//!
//! A guest's process has that thread only inside its sandbox. Lines without space are dropped and counted; the
//! report has their number, and so has the last line on standard error when it is read again. At the end, the wait
//! is limited by [`end`].

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{Debug, Display};
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use console::Term;
use indicatif::TermLike;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use wideleaf_run::queued::{PIECE, QueuedWriter};
use wideleaf_run::text::clean;
use wideleaf_vmm::sandbox::is_entered;

/// Most bytes of the guest that may wait: the boot of a Linux guest with its services, while a person reads the
/// first page.
const GUEST_MAX: usize = 256 << 10;

/// Most bytes that may wait in all, so that a guest that prints without end leaves space for the program's own lines.
const ALL_MAX: usize = GUEST_MAX + (64 << 10);

/// Most bytes that may wait when a progress bar is drawn: the next picture replaces it anyway.
const BAR_MAX: usize = GUEST_MAX / 2;

/// Time for which the end of a run waits for a reader that takes nothing, if the guest ended by itself: for
/// example, a pager at its first page.
const PATIENCE: Duration = Duration::from_secs(5);

/// The same after a signal, a client or a timeout: twice this is less than the second that an end may take.
const PATIENCE_AT_REQUEST: Duration = Duration::from_millis(400);

static QUEUE: OnceLock<Arc<QueuedWriter>> = OnceLock::new();
static LINES_LOST: AtomicU64 = AtomicU64::new(0);

/// From now on no thread waits for standard error's reader. The writing thread does not exist yet: a process enters
/// its sandbox with one thread.
pub(crate) fn queue() {
    QUEUE.get_or_init(|| QueuedWriter::new(PIECE));
    let _ = std::panic::take_hook();
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        let trace = if is_entered() { String::new() } else { backtrace() };
        say(format_args!("thread {name} {panic}\n{trace}"));
    }));
}

/// The calls that led here, if `RUST_BACKTRACE` asks for them.
fn backtrace() -> String {
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured { trace.to_string() } else { String::new() }
}

/// Starts the thread that writes all waiting and future lines; it does `begin` first.
///
/// # Errors
/// That of the kernel, if a thread cannot be started.
pub(crate) fn serve(begin: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let Some(queue) = QUEUE.get() else { return Ok(()) };
    queue.serve("stderr", standard_error()?, begin)
}

/// Does both for a command without a sandbox: no thread waits, and one thread writes.
pub fn start() {
    queue();
    // Without a thread, lines are written as far as they fit.
    let _ = serve(|| {});
}

/// Writes a line to standard error. A reader that has gone is no reason to end a guest.
pub fn say(line: impl Display) {
    write(format!("{line}\n").as_bytes(), ALL_MAX);
}

/// Takes a line of the guest, and never waits. On a terminal its control characters are shown as `?`.
pub(crate) fn guest_line(line: &str) {
    write(&shown(line, is_terminal()), GUEST_MAX);
}

/// Sink of the log: each event is one write.
#[derive(Clone, Copy, Debug, Default)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write(bytes, ALL_MAX);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Number of lines that were not written, because standard error was not read.
pub(crate) fn lines_lost() -> u64 {
    LINES_LOST.load(Ordering::Relaxed)
}

/// Waits for the reader of the guest's output after the run, and drops what it does not take. `is_at_request`:
/// whether something other than the guest has ended the run by now.
pub(crate) fn settle(is_at_request: impl Fn() -> bool) {
    let Some(queue) = QUEUE.get() else { return };
    if !queue.drain(|| if is_at_request() { PATIENCE_AT_REQUEST } else { PATIENCE }) {
        LINES_LOST.fetch_add(queue.give_up().lines, Ordering::Relaxed);
    }
    match lines_lost() {
        0 => {}
        lost => say(format_args!("wideleaf: {lost} lines were not written here, because standard error was not read")),
    }
}

/// Last action of the program: waits until the last lines are written, while their reader reads.
pub fn end() {
    let Some(queue) = QUEUE.get() else { return };
    if !queue.is_served() && !queue.is_idle() {
        // The guest never ran. Without a thread there is no other remedy.
        let _ = serve(|| {});
    }
    queue.drain(|| PATIENCE_AT_REQUEST);
}

/// Name of the program that runs, before its lines.
static NAME: OnceLock<&'static str> = OnceLock::new();

/// Sets the program's name.
pub fn set_program(name: &'static str) {
    let _ = NAME.set(name);
}

/// Last words of a program that a signal ends ([`wideleaf_run::interrupts::LastWords`]).
pub fn interrupted(is_second: bool) {
    let why = if is_second { "" } else { " in a call that does not return: a file system or a device does not answer" };
    // After two Ctrl-C the user knows the reason.
    if !(is_second && io::stderr().is_terminal()) {
        say(format_args!("{}: interrupted{why}", NAME.get().unwrap_or(&"wideleaf")));
        end();
    }
}

/// A terminal for a progress bar: its drawings are queued like all lines.
#[derive(Debug, Default)]
pub(crate) struct BarTerminal(Mutex<String>);

impl BarTerminal {
    fn add(&self, text: impl Display) -> io::Result<()> {
        use std::fmt::Write as _;
        let _ = write!(self.0.lock(), "{text}");
        Ok(())
    }
}

impl TermLike for BarTerminal {
    fn width(&self) -> u16 {
        Term::stderr().size().1
    }

    fn height(&self) -> u16 {
        Term::stderr().size().0
    }

    fn move_cursor_up(&self, lines: usize) -> io::Result<()> {
        if lines > 0 { self.add(format_args!("\x1b[{lines}A")) } else { Ok(()) }
    }

    fn move_cursor_down(&self, lines: usize) -> io::Result<()> {
        if lines > 0 { self.add(format_args!("\x1b[{lines}B")) } else { Ok(()) }
    }

    fn move_cursor_right(&self, columns: usize) -> io::Result<()> {
        if columns > 0 { self.add(format_args!("\x1b[{columns}C")) } else { Ok(()) }
    }

    fn move_cursor_left(&self, columns: usize) -> io::Result<()> {
        if columns > 0 { self.add(format_args!("\x1b[{columns}D")) } else { Ok(()) }
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(format_args!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let picture = std::mem::take(&mut *self.0.lock());
        match QUEUE.get() {
            None => io::stderr().write_all(picture.as_bytes()),
            Some(queue) => {
                let _ = queue.push(picture.as_bytes(), BAR_MAX);
                write_what_fits(queue);
                Ok(())
            }
        }
    }
}

fn write(lines: &[u8], most: usize) {
    let Some(queue) = QUEUE.get() else {
        let _ = io::stderr().write_all(lines);
        return;
    };
    if queue.push(lines, most).is_err() {
        LINES_LOST.fetch_add(lines.iter().filter(|byte| **byte == b'\n').count() as u64, Ordering::Relaxed);
    }
    write_what_fits(queue);
}

/// Before the thread exists: writes as much as standard error takes without waiting.
fn write_what_fits(queue: &QueuedWriter) {
    if queue.is_served() {
        return;
    }
    let stderr = io::stderr();
    let takes_more = || {
        let mut files = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        poll(&mut files, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    };
    while takes_more() {
        let Some(bytes) = queue.next_unserved() else { return };
        let _ = (&stderr).write_all(&bytes);
    }
}

/// Standard error without `io::stderr()`: a writing thread would hold its lock.
fn standard_error() -> io::Result<File> {
    Ok(File::from(io::stderr().as_fd().try_clone_to_owned()?))
}

fn is_terminal() -> bool {
    static IS_TERMINAL: OnceLock<bool> = OnceLock::new();
    *IS_TERMINAL.get_or_init(|| io::stderr().is_terminal())
}

/// A line of a guest, as it is written.
fn shown(line: &str, is_terminal: bool) -> Vec<u8> {
    let mut text = if is_terminal { clean(line) } else { line.to_owned() };
    text.push('\n');
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_character_of_a_guest_and_a_file_gets_the_line_as_it_is() {
        let line = "a\x1b]52;c;ZXZpbA==\x07b\u{9b}31m\tc";
        assert_eq!(shown(line, true), b"a?]52;c;ZXZpbA==?b?31m c\n");
        assert_eq!(shown(line, false), format!("{line}\n").as_bytes());
    }
}
