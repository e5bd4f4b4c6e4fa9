//! Where a result goes. Tried before anything runs, so that a result is never lost to a typo; put in place whole at
//! the end, so that a failure leaves nothing behind, nor does a run that is killed outright.
//!
//! ```text
//!   nothing there, or a file   at the end a new file beside it ──▶ renamed over it, complete
//!   a device, a FIFO           written to as it is: a rename would put a file where /dev/null was
//! ```
//!
//! A recording is put in place when it begins, since it is worth something also where the run fails or is killed. What is written bit by bit
//! and worth nothing before its end ([`NewFile`]) is put in place then.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use serde::Serialize;
use tempfile::NamedTempFile;

use crate::args::FormatArg;
use crate::failure::Failure;
use crate::interrupts::Interrupts;
use crate::queued::PIECE;

pub use crate::stderr::say;

/// What a new result file may be used for, before the user's umask: what every other program's output is.
const FILE_MODE: u32 = 0o666;

/// An open place for one result.
pub struct Output {
    format: FormatArg,
    place: Place,
}

enum Place {
    StandardOutput,
    Named(NamedPlace),
}

/// An open place that an option named.
pub struct NamedPlace {
    option: &'static str,
    path: PathBuf,
    file: PlaceFile,
}

enum PlaceFile {
    /// A new file in this folder becomes the file of that name.
    In(PathBuf),
    /// A device or a FIFO.
    AsItIs(File),
}

impl Output {
    /// Opens the place, or tries it, or takes standard output.
    ///
    /// # Errors
    /// [`Failure::Output`] where it can not be written to.
    pub fn open(format: FormatArg, path: Option<&Path>) -> Result<Output, Failure> {
        let place = match path {
            None => Place::StandardOutput,
            Some(path) => Place::Named(NamedPlace::open("--output", path)?),
        };
        Ok(Output { format, place })
    }

    /// The folder in which the result's file is made; `None` where it is none.
    pub fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Named(NamedPlace { file: PlaceFile::In(folder), .. }) => Some(folder),
            Place::Named(_) | Place::StandardOutput => None,
        }
    }

    /// Writes the result in the form asked for. A reader of standard output that has gone away is not an error.
    ///
    /// # Errors
    /// [`Failure::Output`]; a file is then as it was.
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
    fn put(self, text: &str) -> Result<(), Failure> {
        match self {
            Place::StandardOutput => print(text),
            Place::Named(place) => place.put(text.as_bytes()),
        }
    }
}

impl NamedPlace {
    /// Opens what `option` names, or tries whether there can be a new file beside it.
    ///
    /// # Errors
    /// [`Failure::Output`] where it can not be written to.
    pub fn open(option: &'static str, path: &Path) -> Result<NamedPlace, Failure> {
        // Through a symbolic link: what it points to is written, and the link stays.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let cannot = |why: &dyn std::fmt::Display| cannot_write(option, &path, why);
        match fs::metadata(&path) {
            Ok(is) if is.is_dir() => return Err(cannot(&"it is a folder")),
            Ok(is) if !is.is_file() => {
                let file = File::options().write(true).open(&path).map_err(|error| cannot(&error))?;
                return Ok(NamedPlace { option, path, file: PlaceFile::AsItIs(file) });
            }
            _ => {}
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if !folder.is_dir() {
            return Err(cannot(&format_args!("there is no folder {}", folder.display())));
        }
        // Also where the process has gone somewhere else meanwhile.
        let folder = std::path::absolute(folder).map_err(|error| cannot(&error))?;
        new_file_in(&folder).map_err(|error| cannot(&error))?;
        Ok(NamedPlace { option, path, file: PlaceFile::In(folder) })
    }

    /// Writes the whole result and puts it in place.
    ///
    /// # Errors
    /// [`Failure::Output`]; a file is then as it was.
    pub fn put(self, bytes: &[u8]) -> Result<(), Failure> {
        let cannot = |error: io::Error| cannot_write(self.option, &self.path, error);
        match self.file {
            PlaceFile::AsItIs(mut file) => file.write_all(bytes).map_err(cannot),
            PlaceFile::In(folder) => {
                let mut file = new_file_in(&folder).map_err(cannot)?;
                file.write_all(bytes).map_err(cannot)?;
                file.persist(folder.join(self.path.file_name().unwrap_or_default()))
                    .map_err(|error| cannot(error.error))?;
                Ok(())
            }
        }
    }

    /// Begins what is written bit by bit and put in place at its end.
    ///
    /// # Errors
    /// [`Failure::Output`]; what was there is as it was.
    pub fn begin_new(self) -> Result<NewFile, Failure> {
        let file = match self.file {
            PlaceFile::AsItIs(file) => NewFileIn::AsItIs(file),
            PlaceFile::In(folder) => {
                let file = new_file_in(&folder);
                NewFileIn::Folder(file.map_err(|error| cannot_write(self.option, &self.path, error))?)
            }
        };
        Ok(NewFile { option: self.option, path: self.path, file, written: 0 })
    }

    /// Puts the file in place, still empty, for what is written bit by bit.
    ///
    /// # Errors
    /// [`Failure::Output`]; what was there is as it was.
    pub fn begin(self) -> Result<File, Failure> {
        match self.file {
            PlaceFile::AsItIs(file) => Ok(file),
            PlaceFile::In(folder) => {
                let cannot = |error: io::Error| cannot_write(self.option, &self.path, error);
                let file = new_file_in(&folder).map_err(cannot)?;
                file.persist(&self.path).map_err(|error| cannot(error.error))
            }
        }
    }
}

/// A result that is written bit by bit and put in place when it is whole. Dropped before, it leaves nothing; killed outright, the
/// program leaves a hidden file beside the place.
pub struct NewFile {
    option: &'static str,
    path: PathBuf,
    file: NewFileIn,
    written: u64,
}

enum NewFileIn {
    Folder(NamedTempFile),
    AsItIs(File),
}

impl NewFile {
    /// Bytes so far.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Puts it in place.
    ///
    /// # Errors
    /// [`Failure::Output`]; what was there is as it was.
    pub fn put(self) -> Result<(), Failure> {
        match self.file {
            NewFileIn::AsItIs(_) => Ok(()),
            NewFileIn::Folder(file) => match file.persist(&self.path) {
                Ok(_) => Ok(()),
                Err(error) => Err(cannot_write(self.option, &self.path, error.error)),
            },
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut self.file {
            // Not through `NamedTempFile`, whose errors name the temporary file.
            NewFileIn::Folder(file) => file.as_file_mut().write(bytes)?,
            NewFileIn::AsItIs(file) => file.write(bytes)?,
        };
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that is removed unless it gets its name.
pub(crate) fn new_file_in(folder: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".wideleaf-")
        .permissions(Permissions::from_mode(FILE_MODE))
        .tempfile_in(folder)
        .map_err(|error| io::Error::new(error.kind(), without_temporary_name(&error)))
}

/// How long a program that a signal has ended waits for a reader of standard output that takes nothing.
const PATIENCE_WHEN_INTERRUPTED: Duration = Duration::from_secs(1);

/// Writes to standard output, and waits for its reader: the result was asked for there. Ctrl-C and `SIGTERM` end that,
/// within a second where the program handles them. A reader that has gone away has seen enough.
///
/// # Errors
/// [`Failure::Output`], for instance where the disk behind it is full.
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
        // What a pipe with room takes without waiting.
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
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it is not read, and a signal ended this program"));
        }
    }
}

fn cannot_write(option: &str, path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::Output(format!("cannot write {option} {}: {why}", path.display()))
}

/// The kernel's answer alone: the name that `tempfile` tried, and appends, tells a person nothing.
fn without_temporary_name(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" at path ").map_or(text.as_str(), |(answer, _)| answer).to_owned()
}
