//! The folder of a snapshot while it is written: made beside its place, and put there whole.
//!
//! ```text
//!   create   .DIR.saving-0123456789abcdef/   locked (flock); three empty files, mode 0600
//!            … the VM's process writes …
//!   finish   fsync of files and folder ─▶ DIR is free: rename               ─▶ fsync of parent
//!                                      └▶ DIR is a snapshot: exchange both  ─▶ fsync of parent ─▶ remove the old one
//!            if that last fsync fails, rename or exchange are taken back
//!   dropped  everything is removed
//!   killed   the temporary folder stays; the next save of DIR removes it, since no process holds its lock
//! ```
//!
//! A reader that opened the old snapshot before keeps its files: they are removed, and not written over.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, Flock, FlockArg, OFlag, RenameFlags, renameat2};

pub use crate::files::{Caching, Files, Layer};

use crate::error::{SaveError, SaveProblem};
use crate::files::{open_file, open_folder, relative, shown};
use crate::index::MAGIC;
use crate::opened::Opened;
use crate::{FILE_NAMES, MACHINE_FILE, MEMORY_FILE, TOUCHES_FILE, WINDOWS_FILE};

/// Part of a temporary folder's name between the name of its snapshot and the random digits.
const INFIX: &str = ".saving-";
/// Number of random hexadecimal digits in a temporary folder's name.
const DIGITS: usize = 16;
/// Maximum number of temporary folders that are tried: another save may remove one before it is locked.
const TRIES_MAX: u32 = 8;
/// Rights of the folder and of its files: RAM holds the secrets of a guest.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// The empty files of a new snapshot, open for reading and writing.
#[derive(Debug)]
pub struct NewFiles {
    /// State of the machine.
    pub machine: File,
    /// Index of the windows.
    pub windows: File,
    /// Bytes of the pages.
    pub memory: File,
}

/// A snapshot that is being written. Dropped without [`Writing::finish`], it removes everything it made.
#[derive(Debug)]
pub struct Writing {
    folder: PathBuf,
    temporary: PathBuf,
    /// Descriptor of the temporary folder.
    lock: Flock<File>,
    /// Whether the temporary folder stays when this is dropped: it is in its place, or may be there after a crash.
    is_kept: bool,
}

/// What a finished save did.
#[derive(Debug, Default)]
pub struct Finished {
    /// Whether an older snapshot was replaced.
    pub has_replaced: bool,
    /// Folder with rests of the older snapshot that could not be removed, and the reason. The next save of the same
    /// folder tries again.
    pub not_removed: Option<(PathBuf, io::Error)>,
}

impl Writing {
    /// Makes the temporary folder with its files, and removes those that killed saves of this folder left.
    ///
    /// # Errors
    /// [`SaveError`]; nothing is left behind. An existing folder must be empty or a snapshot without other files, and
    /// not a base in `base`'s chain.
    pub fn create(folder: &Path, base: Option<&Files>) -> Result<Writing, SaveError> {
        // Without a slash at the end, which would follow a symbolic link.
        let whole: PathBuf = folder.components().collect();
        Writing::create_in(&whole, base).map_err(|problem| SaveError { snapshot: shown(folder), problem })
    }

    fn create_in(folder: &Path, base: Option<&Files>) -> Result<Writing, SaveProblem> {
        let name = folder.file_name().ok_or(SaveProblem::NoName)?;
        occupant(folder)?;
        if base.is_some_and(|base| is_in_chain(folder, base)) {
            return Err(SaveProblem::IsBase);
        }
        let parent = parent_of(folder);
        remove_leftovers(parent, name);
        let (temporary, lock) = make_locked(parent, name)?;
        let writing = Writing { folder: folder.to_owned(), temporary, lock, is_kept: false };
        for file in FILE_NAMES {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(FILE_MODE);
            options.open(writing.temporary.join(file)).map_err(io_of("cannot make its files"))?;
        }
        Ok(writing)
    }

    /// Folder that the snapshot will be in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Opens the three files for the process that writes them.
    ///
    /// # Errors
    /// [`SaveError`] with the kernel's error.
    pub fn files(&self) -> Result<NewFiles, SaveError> {
        let open = |file| OpenOptions::new().read(true).write(true).open(self.temporary.join(file));
        let all =
            || Ok(NewFiles { machine: open(MACHINE_FILE)?, windows: open(WINDOWS_FILE)?, memory: open(MEMORY_FILE)? });
        all().map_err(|source| self.error(io_of("cannot open its files")(source)))
    }

    /// Removes what this has made, for a process that ends without dropping this. Not for one that has begun
    /// [`Writing::finish`]: the older snapshot may be in the temporary folder's place then.
    pub fn remover(&self) -> impl FnOnce() + Send + use<> {
        let temporary = self.temporary.clone();
        move || drop(remove(&temporary))
    }

    /// Path from the new snapshot's folder to its base, for [`Base::path`](crate::Base::path).
    ///
    /// # Errors
    /// [`SaveError`] if the base's folder cannot be found.
    pub fn path_to(&self, base: &Path) -> Result<PathBuf, SaveError> {
        // The temporary folder is beside the final one, so the path is the same from both.
        relative(&self.temporary, base).map_err(|source| self.error(io_of("cannot find the base")(source)))
    }

    /// Checks that the files are a whole snapshot, writes them to the disk, and puts the folder in its place.
    ///
    /// # Errors
    /// [`SaveError`]; nothing is left behind, and the snapshot that was there is still there. Where the disk does not
    /// take the parent folder, both snapshots stay, one of them in the temporary folder until the next save.
    pub fn finish(mut self) -> Result<Finished, SaveError> {
        self.put(&File::sync_all).map_err(|problem| self.error(problem))
    }

    /// `sync` writes the parent folder to the disk.
    fn put(&mut self, sync: &dyn Fn(&File) -> io::Result<()>) -> Result<Finished, SaveProblem> {
        Opened::open(&self.temporary, Caching::PageCache).map_err(|error| SaveProblem::Incomplete(error.problem))?;
        let to_disk = |file| File::open(self.temporary.join(file))?.sync_all();
        FILE_NAMES.iter().try_for_each(to_disk).map_err(io_of("cannot write its files to the disk"))?;
        self.lock.sync_all().map_err(io_of("cannot write its folder to the disk"))?;
        let parent = File::open(parent_of(&self.folder)).map_err(io_of("cannot open the parent folder"))?;
        // Held until it is removed: in the temporary folder's place another save would take it for a leftover.
        let older = lock_older(&self.folder)?;
        let is_replaced = older.is_some();
        if is_replaced {
            self.exchange().map_err(io_of("cannot exchange it with the older snapshot"))?;
        } else {
            // Replaces an empty folder, and nothing else (rename(2)).
            fs::rename(&self.temporary, &self.folder).map_err(io_of("cannot put the folder in its place"))?;
        }
        self.is_kept = true;
        if let Err(error) = sync(&parent) {
            let taken_back = if is_replaced { self.exchange() } else { fs::rename(&self.folder, &self.temporary) };
            taken_back.map_err(io_of("it is in its place, but perhaps not after a crash: cannot take it back"))?;
            // Until that is on the disk, a crash may still leave the new one in the place of the old one.
            self.is_kept = sync(&parent).is_err();
            return Err(io_of("cannot write the parent folder to the disk")(error));
        }
        let not_removed = if is_replaced { remove(&self.temporary).err() } else { None };
        let not_removed = not_removed.map(|error| (self.temporary.clone(), error));
        Ok(Finished { has_replaced: is_replaced, not_removed })
    }

    /// Exchanges the temporary folder with what is in the place of the snapshot.
    fn exchange(&self) -> io::Result<()> {
        renameat2(AT_FDCWD, &self.temporary, AT_FDCWD, &self.folder, RenameFlags::RENAME_EXCHANGE)?;
        Ok(())
    }

    fn error(&self, problem: SaveProblem) -> SaveError {
        SaveError { snapshot: shown(&self.folder), problem }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.is_kept {
            // The next save of this folder tries again.
            let _ = remove(&self.temporary);
        }
    }
}

/// What is in the place of a new snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Occupant {
    /// Nothing, or an empty folder.
    Nothing,
    /// A snapshot, of any version.
    Snapshot,
}

/// # Errors
/// [`SaveProblem`] if something is there that a save must not replace.
fn occupant(folder: &Path) -> Result<Occupant, SaveProblem> {
    let cannot_look = || io_of("cannot look at the folder");
    match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Occupant::Nothing),
        Err(error) => return Err(cannot_look()(error)),
        Ok(metadata) if !metadata.is_dir() => return Err(SaveProblem::NotAFolder),
        Ok(_) => {}
    }
    let mut is_empty = true;
    for entry in fs::read_dir(folder).map_err(cannot_look())? {
        let name = entry.map_err(cannot_look())?.file_name();
        is_empty = false;
        if !of_any_snapshot().any(|file| name == file) {
            return Err(SaveProblem::ForeignFile { file: shown(Path::new(&name)) });
        }
    }
    match (is_empty, has_magic(folder)) {
        (true, _) => Ok(Occupant::Nothing),
        (false, true) => Ok(Occupant::Snapshot),
        (false, false) => Err(SaveProblem::NotASnapshot),
    }
}

fn has_magic(folder: &Path) -> bool {
    let mut bytes = [0; MAGIC.len()];
    let read = |file: File| std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).is_ok();
    let opened = open_folder(folder, WINDOWS_FILE).and_then(|folder| open_file(&folder, WINDOWS_FILE, OFlag::empty()));
    opened.is_ok_and(read) && bytes == MAGIC
}

/// Whether a file of this chain is the index in `folder`.
fn is_in_chain(folder: &Path, chain: &Files) -> bool {
    let Ok(there) = fs::metadata(folder.join(WINDOWS_FILE)) else { return false };
    let is_there = |of: fs::Metadata| (of.dev(), of.ino()) == (there.dev(), there.ino());
    chain.layers.iter().any(|layer| layer.windows.metadata().is_ok_and(is_there))
}

fn parent_of(folder: &Path) -> &Path {
    folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes a temporary folder and locks it.
fn make_locked(parent: &Path, name: &std::ffi::OsStr) -> Result<(PathBuf, Flock<File>), SaveProblem> {
    let cannot_make = || io_of("cannot make a folder beside it");
    let mut last = io::ErrorKind::AlreadyExists.into();
    for _ in 0..TRIES_MAX {
        let mut digits = [0; DIGITS / 2];
        crate::random(&mut digits).map_err(cannot_make())?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!("{INFIX}{:016x}", u64::from_le_bytes(digits)));
        let temporary = parent.join(temporary);
        match DirBuilder::new().mode(FOLDER_MODE).create(&temporary) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(cannot_make()(error)),
            // Another save may have taken it for a leftover before it was locked.
            Ok(()) => match lock(&temporary, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok((temporary, lock)),
                Err(error) => last = error,
            },
        }
    }
    Err(cannot_make()(last))
}

/// Locks the snapshot that is to be replaced, if there is one. Waits for another save that has just put it there.
fn lock_older(folder: &Path) -> Result<Option<Flock<File>>, SaveProblem> {
    while occupant(folder)? == Occupant::Snapshot {
        match lock(folder, FlockArg::LockExclusive) {
            Ok(locked) => return Ok(Some(locked)),
            // The other save has taken it back, or a third one has replaced it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_of("cannot lock the older snapshot")(error)),
        }
    }
    Ok(None)
}

/// Locks a folder, and checks that it is still at its path.
fn lock(folder: &Path, how: FlockArg) -> io::Result<Flock<File>> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(folder)?;
    let locked = Flock::lock(opened, how).map_err(|(_, errno)| errno)?;
    let (own, there) = (locked.metadata()?, fs::symlink_metadata(folder)?);
    if (own.dev(), own.ino()) == (there.dev(), there.ino()) { Ok(locked) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Removes the temporary folders of killed saves of the same name. What cannot be removed stays.
fn remove_leftovers(parent: &Path, name: &std::ffi::OsStr) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten().filter(|entry| is_temporary(&entry.file_name(), name)) {
        if let Ok(_locked) = lock(&entry.path(), FlockArg::LockExclusiveNonblock) {
            let _ = remove(&entry.path());
        }
    }
}

fn is_temporary(found: &std::ffi::OsStr, name: &std::ffi::OsStr) -> bool {
    let digits = || {
        let behind_dot = found.as_bytes().strip_prefix(b".")?;
        behind_dot.strip_prefix(name.as_bytes())?.strip_prefix(INFIX.as_bytes())
    };
    digits().is_some_and(|digits| digits.len() == DIGITS && digits.iter().all(u8::is_ascii_hexdigit))
}

/// Names of the files that a snapshot may have.
fn of_any_snapshot() -> impl Iterator<Item = &'static str> {
    FILE_NAMES.into_iter().chain([TOUCHES_FILE])
}

/// Removes the files of a snapshot and their folder; a folder with other files stays.
fn remove(folder: &Path) -> io::Result<()> {
    for file in of_any_snapshot() {
        match fs::remove_file(folder.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    fs::remove_dir(folder)
}

fn io_of(what: &'static str) -> impl Fn(io::Error) -> SaveProblem {
    move |source| SaveProblem::Io { what, source }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Write as _;

    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    use super::*;
    use crate::{SnapshotId, WindowNotes, WindowsWriter};

    /// A snapshot of a VM without a stored page, not yet in its place.
    fn written(folder: &Path) -> Writing {
        let writing = Writing::create(folder, None).expect("a temporary folder");
        let NewFiles { mut machine, windows, memory } = writing.files().expect("its files");
        let ram = [GpaRange::new(Gpa::new(0), mib(2)).expect("fits")];
        let writer = WindowsWriter::new(memory, &ram, None).expect("a layout");
        machine.write_all(b"{}").expect("room");
        let notes = |_| WindowNotes { page: PageSize::Base4K, heat: 0, age_s: 0 };
        writer.finish(&windows, b"{}", notes).expect("room");
        writing
    }

    fn id(folder: &Path) -> SnapshotId {
        Opened::open(folder, Caching::PageCache).expect("a whole snapshot").id()
    }

    fn paths_in(folder: &Path) -> Vec<PathBuf> {
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect()
    }

    /// Puts it in its place, on a disk that refuses the parent folder this number of times.
    fn put_refused(mut writing: Writing, refusals: u32) -> String {
        let left = Cell::new(refusals);
        let sync = |_: &File| match left.get() {
            0 => Ok(()),
            more => {
                left.set(more - 1);
                Err(io::Error::other("the disk is gone"))
            }
        };
        writing.put(&sync).expect_err("refused").to_string()
    }

    #[test]
    fn a_disk_that_refuses_the_parent_folder_leaves_the_older_snapshot_and_nothing_else() {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let folder = scratch.path().join("s");
        let error = put_refused(written(&folder), 1);
        assert!(error.starts_with("cannot write the parent folder to the disk: the disk is gone"), "{error}");
        assert_eq!(paths_in(scratch.path()), [] as [&Path; 0]);
        written(&folder).finish().expect("nothing fails");
        let older = id(&folder);
        put_refused(written(&folder), 1);
        assert_eq!((id(&folder), paths_in(scratch.path())), (older, vec![folder]));
    }

    #[test]
    fn where_a_crash_may_still_leave_either_of_two_snapshots_both_stay_until_the_next_save() {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let folder = scratch.path().join("s");
        written(&folder).finish().expect("nothing fails");
        let older = id(&folder);
        put_refused(written(&folder), 2);
        assert_eq!(id(&folder), older);
        let paths = paths_in(scratch.path());
        let new = paths.iter().find(|path| **path != folder).expect("the new one is beside it");
        assert_ne!(id(new), older);
        written(&folder).finish().expect("nothing fails");
        assert_eq!(paths_in(scratch.path()), [folder]);
    }

    #[test]
    fn another_save_that_begins_meanwhile_does_not_remove_the_older_snapshot() {
        for is_refused in [false, true] {
            let scratch = tempfile::tempdir().expect("a temporary folder");
            let folder = scratch.path().join("s");
            written(&folder).finish().expect("nothing fails");
            let (older, left) = (id(&folder), Cell::new(is_refused));
            let sync = |_: &File| {
                remove_leftovers(scratch.path(), "s".as_ref());
                if left.replace(false) { Err(io::Error::other("the disk is gone")) } else { Ok(()) }
            };
            let put = written(&folder).put(&sync);
            match put {
                Ok(finished) => assert!(finished.has_replaced && finished.not_removed.is_none(), "{finished:?}"),
                Err(error) => assert!(is_refused && error.to_string().contains("the disk is gone"), "{error}"),
            }
            assert_eq!((id(&folder) == older, paths_in(scratch.path())), (is_refused, vec![folder]));
        }
    }
}
