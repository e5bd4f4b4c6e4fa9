//! The file of a result, which an option names. It is tried before anything runs, so that a typo does not lose a
//! result. It is put in place whole at the end, so that a failure leaves nothing behind, and neither does a killed run.
//!
//! ```text
//!   no file, or a file         at the end a new file beside it ──▶ renamed over it, complete
//!   a character device, a FIFO that a program reads
//!                              written to as it is: a rename would put a file where /dev/null was
//!   -                          standard output
//!   a folder, a block device, a socket, a FIFO that no program reads
//!                              refused, and named; nothing waits for a reader
//! ```
//!
//! A recording is put in place when it begins, since it is useful even if the run fails or is killed. A file that
//! is written bit by bit and is useless before its end ([`NewFile`]) is put in place at its end.

use std::fs::{self, File, FileType, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use wideleaf_memory::input_file::kind_name;

use crate::failure::Failure;
use crate::undo::TemporaryFile;

/// Mode of a new result file before the user's umask: that of every other program's output.
const FILE_MODE: u32 = 0o666;

/// Name of standard output for options that take a file; a file of that name is `./-`.
const STANDARD_OUTPUT: &str = "-";

/// File, device or standard output that an option named, open for a result.
pub struct OutputFile {
    option: &'static str,
    path: PathBuf,
    file: Destination,
}

enum Destination {
    /// A new file in this folder becomes the file of that name.
    In(PathBuf),
    /// A device or a FIFO, or standard output.
    AsItIs(File),
}

impl OutputFile {
    /// Opens the place that `option` names, or tries whether a new file can be made beside it.
    ///
    /// # Errors
    /// [`Failure::Output`] if it cannot be written to.
    pub fn open(option: &'static str, path: &Path) -> Result<OutputFile, Failure> {
        if is_standard_output(path) {
            let file = io::stdout().as_fd().try_clone_to_owned();
            let file = file.map_err(|error| cannot_write(option, path, error))?.into();
            return Ok(OutputFile { option, path: path.to_owned(), file: Destination::AsItIs(file) });
        }
        // Through a symbolic link: its target is written, and the link stays.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(&path) {
            Ok(is) if !is.is_file() => {
                let file = open_as_it_is(&path, is.file_type()).map_err(|why| cannot_write(option, &path, why))?;
                Ok(OutputFile { option, path, file: Destination::AsItIs(file) })
            }
            _ => OutputFile::in_its_folder(option, path),
        }
    }

    /// Tries whether a new file of that name can be made.
    fn in_its_folder(option: &'static str, path: PathBuf) -> Result<OutputFile, Failure> {
        let cannot = |why: &dyn std::fmt::Display| cannot_write(option, &path, why);
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if !folder.is_dir() {
            return Err(cannot(&format_args!("there is no folder {}", folder.display())));
        }
        // Absolute, in case the process changes its folder later.
        let folder = std::path::absolute(folder).map_err(|error| cannot(&error))?;
        new_file_in(&folder).map_err(|error| cannot(&error))?;
        Ok(OutputFile { option, path, file: Destination::In(folder) })
    }

    /// As [`OutputFile::open`], for a file that must be replaced by a rename.
    ///
    /// # Errors
    /// [`Failure::Output`] if the name is not that of a file, or no file can be made.
    pub fn open_file(option: &'static str, path: &Path) -> Result<OutputFile, Failure> {
        refuse_standard_output(option, path)?;
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(&path) {
            Ok(is) if !is.is_file() => {
                let why = format!("it is {}: name a file", kind_name(is.file_type()));
                Err(cannot_write(option, &path, why))
            }
            _ => OutputFile::in_its_folder(option, path),
        }
    }

    /// The folder in which the result's file is made; `None` if no file is made.
    pub fn folder(&self) -> Option<&Path> {
        match &self.file {
            Destination::In(folder) => Some(folder),
            Destination::AsItIs(_) => None,
        }
    }

    /// Path of the written file, with no symbolic link in it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the whole result and puts it in place.
    ///
    /// # Errors
    /// [`Failure::Output`]; a file is then unchanged.
    pub fn put(self, bytes: &[u8]) -> Result<(), Failure> {
        let cannot = |error: io::Error| cannot_write(self.option, &self.path, error);
        match self.file {
            Destination::AsItIs(mut file) => file.write_all(bytes).map_err(cannot),
            Destination::In(folder) => {
                let mut file = new_file_in(&folder).map_err(cannot)?;
                file.write_all(bytes).map_err(cannot)?;
                file.persist(&folder.join(self.path.file_name().unwrap_or_default())).map(drop).map_err(cannot)
            }
        }
    }

    /// Begins a file that is written bit by bit and put in place at its end.
    ///
    /// # Errors
    /// [`Failure::Output`]; an existing file is then unchanged.
    pub fn begin_new(self) -> Result<NewFile, Failure> {
        let file = match self.file {
            Destination::AsItIs(file) => NewFileIn::AsItIs(file),
            Destination::In(folder) => {
                let file = new_file_in(&folder);
                NewFileIn::Folder(file.map_err(|error| cannot_write(self.option, &self.path, error))?)
            }
        };
        Ok(NewFile { option: self.option, path: self.path, file, written: 0 })
    }

    /// Puts the file in place, still empty, to be written bit by bit.
    ///
    /// # Errors
    /// [`Failure::Output`]; an existing file is then unchanged.
    pub fn begin(self) -> Result<File, Failure> {
        match self.file {
            Destination::AsItIs(file) => Ok(file),
            Destination::In(folder) => {
                let cannot = |error: io::Error| cannot_write(self.option, &self.path, error);
                let file = new_file_in(&folder).map_err(cannot)?;
                file.persist(&self.path).map_err(cannot)
            }
        }
    }
}

/// A result that is written bit by bit and put in place when it is complete. If it is dropped before, nothing is
/// left; if the program is killed, a hidden file is left beside the place.
pub struct NewFile {
    option: &'static str,
    path: PathBuf,
    file: NewFileIn,
    written: u64,
}

enum NewFileIn {
    Folder(TemporaryFile),
    AsItIs(File),
}

impl NewFile {
    /// Number of bytes so far.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Puts the file in place.
    ///
    /// # Errors
    /// [`Failure::Output`]; an existing file is then unchanged.
    pub fn put(self) -> Result<(), Failure> {
        match self.file {
            NewFileIn::AsItIs(_) => Ok(()),
            NewFileIn::Folder(file) => match file.persist(&self.path) {
                Ok(_) => Ok(()),
                Err(error) => Err(cannot_write(self.option, &self.path, error)),
            },
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut self.file {
            NewFileIn::Folder(file) => file.write(bytes)?,
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
pub fn new_file_in(folder: &Path) -> io::Result<TemporaryFile> {
    let make = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".wideleaf-").permissions(Permissions::from_mode(FILE_MODE)).tempfile_in(folder)
    };
    TemporaryFile::new(make).map_err(|error| io::Error::new(error.kind(), without_temporary_name(&error)))
}

/// Refuses `-` for an option that needs its own file: standard output has the report.
///
/// # Errors
/// [`Failure::Usage`] for `-`.
pub fn refuse_standard_output(option: &str, path: &Path) -> Result<(), Failure> {
    if !is_standard_output(path) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "cannot use {option} -: standard output has the report; name a file, or ./- for a file of that name"
    )))
}

/// Whether a path means standard output.
pub fn is_standard_output(path: &Path) -> bool {
    path == Path::new(STANDARD_OUTPUT)
}

/// Opens a character device, or a FIFO that a program reads, for writes that wait.
fn open_as_it_is(path: &Path, kind: FileType) -> Result<File, String> {
    if !kind.is_fifo() && !kind.is_char_device() {
        return Err(format!("it is {}: name a file", kind_name(kind)));
    }
    // Without waiting for a FIFO's reader or a modem's carrier (`open(2)`); later writes wait for the reader.
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = File::options().write(true).custom_flags(flags.bits()).open(path).map_err(|error| {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENXIO) if kind.is_fifo() => {
                "it is a FIFO that no program reads: start its reader first, or name a file".to_owned()
            }
            _ => error.to_string(),
        }
    })?;
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty())).map_err(|error| error.to_string())?;
    Ok(file)
}

fn cannot_write(option: &str, path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::Output(format!("cannot write {option} {}: {why}", path.display()))
}

/// The kernel's answer alone, without the temporary name that `tempfile` appends.
fn without_temporary_name(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" at path ").map_or(text.as_str(), |(answer, _)| answer).to_owned()
}
