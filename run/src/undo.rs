//! Actions to undo if the process is ended while one of its calls does not return. Objects with their own `Drop`
//! are here only for that case: temporary files and folders, the modes of a terminal.
//!
//! ```text
//!   Undo::at_the_end(work) ── dropped: removed, because the owner has done it
//!                           └ undo::all(): done now, in a thread that is abandoned if it does not return either
//! ```

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use parking_lot::{Mutex, MutexGuard};
use tempfile::{NamedTempFile, TempDir};

/// Time limit of all of it: a file on a file system that hangs cannot be removed.
const UNDONE_WITHIN: Duration = Duration::from_secs(1);

type Work = Box<dyn FnOnce() + Send>;

static ALL: Mutex<Vec<(u64, Work)>> = Mutex::new(Vec::new());

fn list() -> MutexGuard<'static, Vec<(u64, Work)>> {
    ALL.lock()
}

/// An entry in the list.
#[derive(Debug)]
pub struct Undo(u64);

impl Undo {
    /// Adds work to the list, until this is dropped.
    pub fn at_the_end(work: impl FnOnce() + Send + 'static) -> Undo {
        Undo::listed(&mut list(), work)
    }

    fn listed(list: &mut Vec<(u64, Work)>, work: impl FnOnce() + Send + 'static) -> Undo {
        let number = list.last().map_or(0, |(number, _)| number + 1);
        list.push((number, Box::new(work)));
        Undo(number)
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        list().retain(|(number, _)| *number != self.0);
    }
}

/// Does all work in the list, the latest first, within `UNDONE_WITHIN`. The list stays locked: from then on no thread
/// can make a file that nothing would remove. The caller ends the process.
pub fn all() {
    let began = Instant::now();
    // A thread that makes a file on a file system that hangs keeps the lock.
    let mut locked = loop {
        match ALL.try_lock() {
            Some(list) => break list,
            None if began.elapsed() >= UNDONE_WITHIN => return,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let works = std::mem::take(&mut *locked);
    std::mem::forget(locked);
    let undoing = std::thread::Builder::new().spawn(move || works.into_iter().rev().for_each(|(_, work)| work()));
    while undoing.as_ref().is_ok_and(|undoing| !undoing.is_finished()) && began.elapsed() < UNDONE_WITHIN {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A file with a hidden name, removed at the end unless it gets a permanent name.
#[derive(Debug)]
pub struct TemporaryFile {
    // First, because it is dropped first: removing twice is harmless.
    file: NamedTempFile,
    _undo: Undo,
}

impl TemporaryFile {
    /// Makes a new file. It is in the list as soon as it exists: no signal can end the process in between.
    ///
    /// # Errors
    /// That of `make`.
    pub fn new(make: impl FnOnce() -> io::Result<NamedTempFile>) -> io::Result<TemporaryFile> {
        let mut list = list();
        let file = make()?;
        let path = file.path().to_owned();
        Ok(TemporaryFile { file, _undo: Undo::listed(&mut list, move || drop(fs::remove_file(path))) })
    }

    /// Gives it that name, and replaces an existing file.
    ///
    /// # Errors
    /// That of the kernel; the file is then removed.
    pub fn persist(self, path: &Path) -> io::Result<fs::File> {
        self.file.persist(path).map_err(|error| error.error)
    }
}

impl Deref for TemporaryFile {
    type Target = fs::File;
    fn deref(&self) -> &fs::File {
        self.file.as_file()
    }
}

impl DerefMut for TemporaryFile {
    fn deref_mut(&mut self) -> &mut fs::File {
        self.file.as_file_mut()
    }
}

/// A folder that is removed at the end, with all its contents.
#[derive(Debug)]
pub struct TemporaryFolder {
    folder: TempDir,
    _undo: Undo,
}

impl TemporaryFolder {
    /// Makes a new one in the place for temporary files.
    ///
    /// # Errors
    /// That of the kernel.
    pub fn new() -> io::Result<TemporaryFolder> {
        let mut list = list();
        let folder = tempfile::tempdir()?;
        let path: PathBuf = folder.path().to_owned();
        Ok(TemporaryFolder { folder, _undo: Undo::listed(&mut list, move || drop(fs::remove_dir_all(path))) })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}
