//! The result of a command: a table or JSON, in a named place or on standard output. The place is opened before the
//! command changes anything, and a file appears under its name only with its whole content.

use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::output_file::{OutputFile, is_standard_output};
use wideleaf_run::queued::PIECE;

use crate::options::FormatArg;

pub use crate::stderr::say;

/// An open place for one result.
pub struct Output {
    format: FormatArg,
    place: Place,
}

/// An open place for one text.
pub enum Place {
    /// Standard output: a reader that has gone away is not an error.
    StandardOutput,
    /// A place that an option named.
    Named(OutputFile),
}

impl Output {
    /// Opens the place, or tries it, or uses standard output.
    ///
    /// # Errors
    /// [`Failure::Output`] if it cannot be written to.
    pub fn open(format: FormatArg, path: Option<&Path>) -> Result<Output, Failure> {
        let place = path.map_or(Ok(Place::StandardOutput), |path| Place::open("--output", path))?;
        Ok(Output { format, place })
    }

    /// The folder in which the result's file is made; `None` if no file is made.
    pub fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Named(place) => place.folder(),
            Place::StandardOutput => None,
        }
    }

    /// Writes the result in the requested format. A reader of standard output that has gone away is not an error.
    ///
    /// # Errors
    /// [`Failure::Output`]; a file is then unchanged.
    pub fn write<R: Serialize>(self, report: &R, to_table: impl FnOnce(&R) -> String) -> Result<(), Failure> {
        let text = match self.format {
            FormatArg::Table => to_table(report),
            FormatArg::Json => {
                let json = serde_json::to_string_pretty(report);
                json.map_err(|error| Failure::Output(format!("cannot write JSON: {error}")))? + "\n"
            }
        };
        self.place.put(&text)
    }
}

impl Place {
    /// Opens the place that `option` names, or tries it, or uses standard output.
    ///
    /// # Errors
    /// [`Failure::Output`] if it cannot be written to.
    pub fn open(option: &'static str, path: &Path) -> Result<Place, Failure> {
        if is_standard_output(path) {
            return Ok(Place::StandardOutput);
        }
        OutputFile::open(option, path).map(Place::Named)
    }

    /// Writes the whole text.
    ///
    /// # Errors
    /// [`Failure::Output`]; a file is then unchanged.
    pub fn put(self, text: &str) -> Result<(), Failure> {
        match self {
            Place::StandardOutput => print(text),
            Place::Named(place) => place.put(text.as_bytes()),
        }
    }
}

/// The end of a command, from the ends of its work and of the writing of its result. If both failed, the exit code is
/// that of the work, and the loss of the result is reported as well, in a line of this program.
///
/// # Errors
/// Those of the work, else those of the writing.
pub fn end_of_both(program: &str, work: Result<(), Failure>, written: Result<(), Failure>) -> Result<(), Failure> {
    if let (Err(_), Err(lost)) = (&work, &written) {
        say(format_args!("{program}: {lost}"));
    }
    work.and(written)
}

/// Time for which a program that a signal has ended waits for a reader of standard output that takes nothing.
const PATIENCE_WHEN_INTERRUPTED: Duration = Duration::from_secs(1);

/// Writes to standard output, and waits for its reader, because the result was requested there. Ctrl-C and
/// `SIGTERM` end the wait, within a second if the program handles them. A reader that has gone away is not an
/// error.
///
/// # Errors
/// [`Failure::Output`], for example if the disk behind it is full.
pub fn print(text: &str) -> Result<(), Failure> {
    match write_to_standard_output(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Output(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn write_to_standard_output(mut bytes: &[u8]) -> io::Result<()> {
    let Some(interrupts) = Interrupts::of_this_program() else {
        let mut stdout = io::stdout().lock();
        return stdout.write_all(bytes).and_then(|()| stdout.flush());
    };
    io::stdout().flush()?;
    while !bytes.is_empty() {
        wait_for_reader(interrupts)?;
        // The amount that a pipe with space takes without waiting.
        match nix::unistd::write(io::stdout(), &bytes[..bytes.len().min(PIECE)]) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn wait_for_reader(interrupts: &Interrupts) -> io::Result<()> {
    const LOOK_EVERY: u16 = 50;
    let mut interrupted_at = None;
    loop {
        let stdout = io::stdout();
        let mut files = [PollFd::new(stdout.as_fd(), PollFlags::POLLOUT)];
        match poll(&mut files, PollTimeout::from(LOOK_EVERY)) {
            Ok(ready) if ready > 0 => return Ok(()),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let now = Instant::now();
        if interrupts.is_set() && now - *interrupted_at.get_or_insert(now) >= PATIENCE_WHEN_INTERRUPTED {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "its reader takes nothing, and a signal ended this program",
            ));
        }
    }
}
