//! The lock of a pool: a process that changes the pool, daemon or command, holds it during the change.
//!
//! ```text
//!   /run/wideleaf          root's, 0755: only root can put a file there
//!   ├── pool-2m.lock       root's, 0600: only root can open it, and so only root can hold it
//!   ├── pool-1g.making     the same: held while a page is made because it is wanted, over several changes
//!   └── pool-1g.unfinished the record of such changes (`making.rs`)
//! ```
//!
//! The kernel's own `nr_hugepages` is not used: any user may read that file, and flock(2) asks for no more than an
//! open file. So any user could keep all others from changing the pool.

use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use wideleaf_policies::PageSize;

use super::{HugetlbPools, PoolError};

/// Maximum number of attempts to take the lock: its holder may be making giant pages, some seconds each.
const TRIES_MAX: u32 = 3_000;
/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Mode that lets every user read the folder: it also holds the daemon's socket.
const FOLDER_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o600;

impl HugetlbPools {
    /// Takes the lock. Other wideleaf processes that change the pool of that size wait until it is dropped.
    pub(super) fn lock(&self, size: PageSize) -> Result<Flock<File>, PoolError> {
        self.lock_named(size, "lock")
    }

    /// Takes the turn to make pages of that size when they are wanted (`making.rs`).
    pub(super) fn turn_to_make(&self, size: PageSize) -> Result<Flock<File>, PoolError> {
        self.lock_named(size, "making")
    }

    /// Path of a file about the pool of that size in the folder of the locks.
    pub(super) fn file_beside_locks(&self, size: PageSize, kind: &str) -> PathBuf {
        self.lock_folder().join(format!("pool-{}.{kind}", size.name()))
    }

    fn lock_folder(&self) -> PathBuf {
        self.root.join("run/wideleaf")
    }

    fn lock_named(&self, size: PageSize, kind: &str) -> Result<Flock<File>, PoolError> {
        let pool = self.folder(size, None);
        if !pool.is_dir() {
            return Err(PoolError::NoPool(size, pool));
        }
        // Owner of the lock file: root for the pools of this machine, the present user for a captured tree.
        let owner = if self.root == Path::new("/") { 0 } else { nix::unistd::geteuid().as_raw() };
        wait_for(&self.lock_folder(), &format!("pool-{}.{kind}", size.name()), owner)
    }
}

/// Waits for the lock on a file in a folder, both owned by `owner`; makes what is missing.
fn wait_for(folder: &Path, name: &str, owner: u32) -> Result<Flock<File>, PoolError> {
    make(folder).map_err(|source| PoolError::Write { path: folder.to_owned(), source })?;
    let path = folder.join(name);
    for _ in 0..TRIES_MAX {
        match Flock::lock(open(folder, &path, owner)?, FlockArg::LockExclusiveNonblock) {
            // If another process removed the file during the wait, this lock is on a file that no process
            // opens any more.
            Ok(lock) if is_at(&lock, &path) => return Ok(lock),
            Ok(_) | Err((_, Errno::EAGAIN)) => {}
            Err((_, errno)) => return Err(PoolError::File { path, source: errno.into() }),
        }
        std::thread::sleep(PAUSE);
    }
    Err(PoolError::Locked { path, waited_s: (PAUSE * TRIES_MAX).as_secs() })
}

fn make(folder: &Path) -> io::Result<()> {
    if fs::symlink_metadata(folder).is_ok() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(FOLDER_MODE).create(folder) {
        // The umask of the process may be narrower than what others need.
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(FOLDER_MODE)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn open(folder: &Path, path: &Path, owner: u32) -> Result<File, PoolError> {
    let at = |path: &Path, source| PoolError::Write { path: path.to_owned(), source };
    let of_folder = fs::symlink_metadata(folder).map_err(|source| at(folder, source))?;
    trusted(folder, &of_folder, of_folder.is_dir(), owner, 0o022)?;
    // O_NONBLOCK: do not wait for the other end of a FIFO.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE).custom_flags(flags);
    let file = options.open(path).map_err(|source| match source.raw_os_error() {
        Some(errno) if errno == Errno::ELOOP as i32 => untrusted(path, "it is a link"),
        _ => at(path, source),
    })?;
    let of_file = file.metadata().map_err(|source| at(path, source))?;
    trusted(path, &of_file, of_file.is_file(), owner, 0o077)?;
    Ok(file)
}

/// Whether only `owner` has the rights in `others`.
fn trusted(path: &Path, file: &Metadata, is_of_kind: bool, owner: u32, others: u32) -> Result<(), PoolError> {
    let (uid, mode) = (file.uid(), file.mode() & 0o7777);
    match () {
        () if !is_of_kind => Err(untrusted(path, "it is of another kind than expected, or a link")),
        () if uid != owner => Err(untrusted(path, &format!("it belongs to user {uid} and not to user {owner}"))),
        () if mode & others != 0 => Err(untrusted(path, &format!("others may use it (mode {mode:o})"))),
        () => Ok(()),
    }
}

fn untrusted(path: &Path, why: &str) -> PoolError {
    PoolError::Untrusted { path: PathBuf::from(path), why: why.to_owned() }
}

/// Whether that file still has that name.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |of: Metadata| (of.dev(), of.ino());
    let (ours, there) = (file.metadata().map(id), fs::symlink_metadata(path).map(id));
    matches!((ours, there), (Ok(ours), Ok(there)) if ours == there)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const NAME: &str = "pool-2m.lock";

    /// A place for the folder, and the user of this test.
    fn place() -> (tempfile::TempDir, PathBuf, u32) {
        let root = tempfile::tempdir().expect("a temporary folder");
        let folder = root.path().join("run/wideleaf");
        (root, folder, nix::unistd::geteuid().as_raw())
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it was made").mode() & 0o7777
    }

    fn why_not(folder: &Path, owner: u32) -> String {
        let error = wait_for(folder, NAME, owner).expect_err("not to be trusted");
        assert!(matches!(error, PoolError::Untrusted { .. }), "{error}");
        error.to_string()
    }

    #[test]
    fn folder_and_file_are_writable_by_their_owner_alone_and_the_lock_is_exclusive() {
        let (_root, folder, owner) = place();
        let lock = wait_for(&folder, NAME, owner).expect("it is free");
        assert_eq!((mode(&folder), mode(&folder.join(NAME))), (0o755, 0o600));
        let second = File::open(folder.join(NAME)).expect("this user owns it");
        assert!(Flock::lock(second, FlockArg::LockExclusiveNonblock).is_err(), "one at a time");
        drop(lock);
        wait_for(&folder, NAME, owner).expect("it was let go");
    }

    #[test]
    fn a_folder_or_a_file_that_others_can_touch_is_refused_with_the_reason() {
        let (_root, folder, owner) = place();
        drop(wait_for(&folder, NAME, owner).expect("it is free"));
        assert!(
            why_not(&folder, owner + 1).contains(&format!("belongs to user {owner} and not to user {}", owner + 1))
        );
        let chmod = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("its owner's");
        chmod(&folder.join(NAME), 0o644);
        assert!(why_not(&folder, owner).contains("pool-2m.lock: others may use it (mode 644)"));
        chmod(&folder, 0o1777);
        assert!(why_not(&folder, owner).contains("others may use it (mode 1777)"));
    }

    #[test]
    fn a_link_is_not_followed() {
        let (root, folder, owner) = place();
        make(&folder).expect("it is new");
        let elsewhere = root.path().join("precious");
        symlink(&elsewhere, folder.join(NAME)).expect("the link is new");
        assert!(why_not(&folder, owner).contains("it is a link"));
        assert!(!elsewhere.exists());
        let linked = root.path().join("linked");
        symlink(&folder, &linked).expect("the link is new");
        assert!(why_not(&linked, owner).contains("or a link"));
    }

    #[test]
    fn a_lock_on_a_removed_file_does_not_count() {
        let (_root, folder, owner) = place();
        let old = wait_for(&folder, NAME, owner).expect("it is free");
        fs::remove_file(folder.join(NAME)).expect("it is there");
        assert!(!is_at(&old, &folder.join(NAME)));
        assert!(is_at(&wait_for(&folder, NAME, owner).expect("a new one"), &folder.join(NAME)));
    }
}
