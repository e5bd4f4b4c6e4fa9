//! What is to be undone where the process is ended while a call of its does not return. What has a `Drop` of its own
//! is in here only for that case: temporary files and folders, the modes of a terminal.
//!
//! ```text
//!   Undo::at_the_end(work) ── dropped: forgotten, the owner has done it
//!                           └ undo::all(): done now, in a thread of its own that is left behind where it does not return either
//! ```

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use tempfile::{NamedTempFile, TempDir};

/// How long all of it may take: a file on a file system that hangs cannot be removed.
const UNDONE_WITHIN: Duration = Duration::from_secs(1);

type Work = Box<dyn FnOnce() + Send>;

static ALL: Mutex<Vec<(u64, Work)>> = Mutex::new(Vec::new());

fn list() -> MutexGuard<'static, Vec<(u64, Work)>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A place in the list.
#[derive(Debug)]
pub struct Undo(u64);

impl Undo {
    /// Puts work into the list, until this is dropped.
    pub fn at_the_end(work: impl FnOnce() + Send + 'static) -> Undo {
        let mut list = list();
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

/// Does all that is in the list, the latest first, within [`UNDONE_WITHIN`].
pub fn all() {
    let works = std::mem::take(&mut *list());
    let undoing = std::thread::Builder::new().spawn(move || works.into_iter().rev().for_each(|(_, work)| work()));
    let began = Instant::now();
    while undoing.as_ref().is_ok_and(|undoing| !undoing.is_finished()) && began.elapsed() < UNDONE_WITHIN {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A file with a hidden name, gone at the end unless it got a name that stays.
#[derive(Debug)]
pub struct TemporaryFile {
    // First, for it is dropped first: what is removed twice is removed.
    file: NamedTempFile,
    _undo: Undo,
}

impl TemporaryFile {
    /// Of a new file.
    pub fn of(file: NamedTempFile) -> TemporaryFile {
        let path = file.path().to_owned();
        TemporaryFile { file, _undo: Undo::at_the_end(move || drop(fs::remove_file(path))) }
    }

    /// Gives it that name, in the place of a file that has it.
    ///
    /// # Errors
    /// The kernel's; the file is gone then.
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

/// A folder that is gone at the end, with all that is in it.
#[derive(Debug)]
pub struct TemporaryFolder {
    folder: TempDir,
    _undo: Undo,
}

impl TemporaryFolder {
    /// A new one where temporary files belong.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> io::Result<TemporaryFolder> {
        let folder = tempfile::tempdir()?;
        let path: PathBuf = folder.path().to_owned();
        Ok(TemporaryFolder { folder, _undo: Undo::at_the_end(move || drop(fs::remove_dir_all(path))) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_list_at_the_end_is_undone_and_what_was_dropped_before_is_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let new = || TemporaryFile::of(NamedTempFile::new_in(folder.path()).expect("a file"));
        let (stays, kept) = (new(), folder.path().join("kept"));
        new().persist(&kept).expect("it gets its name");
        let held = TemporaryFolder::new().expect("a folder");
        let named = stays.file.path().to_owned();
        all();
        assert!(!named.exists() && !held.path().exists() && kept.exists());
    }
}
