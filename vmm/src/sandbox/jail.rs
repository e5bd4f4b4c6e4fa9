//! A separate root: the process sees only the files that it was given, in its own namespaces
//! (namespaces(7), pivot_root(2)).
//!
//! ```text
//!   DIR, in this process alone        what is there
//!   ├── proc/self, cpuinfo, …         the files that the manager's sensors read, the host's, read only
//!   ├── sys/kernel/mm, …              the same
//!   └── FOLDER                        the report's folder and the daemon's socket, under their own names
//! ```
//!
//! The root is a tmpfs that is mounted on DIR in the process's own mount namespace: on the host, DIR stays an empty
//! folder, and nothing is left to clean up, however the process ends. Its network namespace has no active
//! interface; its IPC and UTS namespaces are empty. It keeps the host's process numbers, but sees no files of other
//! processes and can signal none.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use caps::{CapSet, Capability};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::pivot_root;

use super::files::READ;
use super::{SandboxConfig, SandboxError, call};

/// The reasons why a jail cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// Only root may create a jail.
    #[error("cannot make a jail: mounts need CAP_SYS_ADMIN; start it as root, or without --jail")]
    NotPermitted,
    /// The path is not a folder.
    #[error("cannot use the jail {0}: it is not a folder; create an empty one")]
    NoFolder(PathBuf),
    /// The folder is not empty.
    #[error("cannot use the jail {0}: it is not empty; name an empty folder, which stays unchanged")]
    NotEmpty(PathBuf),
}

/// Limits of the jail's own tmpfs, which only holds names and mount points.
const SIZE: &str = "size=64k,nr_inodes=256,mode=755";

/// Checks whether `folder` can be a jail.
pub(super) fn check(folder: &Path) -> Result<(), JailError> {
    let may = caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN).unwrap_or(false);
    if !may {
        return Err(JailError::NotPermitted);
    }
    let mut entries = fs::read_dir(folder).map_err(|_| JailError::NoFolder(folder.to_owned()))?;
    if entries.next().is_some() { Err(JailError::NotEmpty(folder.to_owned())) } else { Ok(()) }
}

/// Creates the jail, and enters it.
pub(super) fn enter(folder: &Path, config: &SandboxConfig) -> Result<(), SandboxError> {
    let root = fs::canonicalize(folder).map_err(call(format!("find the jail {}", folder.display())))?;
    let own = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    unshare(own).map_err(|errno| call("create its own namespaces")(errno.into()))?;
    // Later mounts do not reach the host.
    mounted(None, Path::new("/"), None, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None)?;
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mounted(Some(Path::new("tmpfs")), &root, Some("tmpfs"), quiet, Some(SIZE))?;
    let given = READ.iter().map(|path| (PathBuf::from(path), MsFlags::MS_RDONLY));
    // The folder of the daemon's socket: a restarted daemon creates a new socket in it.
    let daemon =
        config.daemon.iter().filter_map(|socket| socket.parent()).map(|folder| (folder.to_owned(), MsFlags::MS_RDONLY));
    let written = config.writable.iter().map(|path| (path.clone(), MsFlags::empty()));
    for (path, flags) in given.chain(daemon).chain(written).filter(|(path, _)| path.exists()) {
        give(&root, &path, quiet | flags)?;
    }
    mounted(None, &root, None, quiet | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, None)?;
    // The old root ends up on top of the new one, and is unmounted (pivot_root(2), "pivot_root(".", ".")").
    std::env::set_current_dir(&root).map_err(call("enter the jail"))?;
    pivot_root(".", ".").map_err(|errno| call("make the jail the root")(errno.into()))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(|errno| call("unmount the host's files")(errno.into()))?;
    std::env::set_current_dir("/").map_err(call("go to the jail's root"))
}

/// Mounts `path` of the host at the same name in the jail. For a link, also creates the link and mounts its target.
fn give(root: &Path, path: &Path, flags: MsFlags) -> Result<(), SandboxError> {
    let cannot = |what: &str| format!("{what} {} in the jail", path.display());
    let inside = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let source = fs::canonicalize(path).map_err(call(cannot("find")))?;
    let place = inside(&source);
    for folder in [&place, &inside(path)].into_iter().filter_map(|place| place.parent()) {
        fs::create_dir_all(folder).map_err(call(cannot("create the folder of")))?;
    }
    let made = if source.is_dir() { fs::create_dir_all(&place) } else { fs::File::create(&place).map(drop) };
    made.map_err(call(cannot("make")))?;
    mounted(Some(&source), &place, None, MsFlags::MS_BIND, None)?;
    mounted(None, &place, None, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND, None)?;
    if source == path {
        return Ok(());
    }
    // For `/proc/self`: this process by its number.
    symlink(&source, inside(path)).map_err(call(cannot("link")))
}

fn mounted(
    source: Option<&Path>,
    place: &Path,
    kind: Option<&str>,
    flags: MsFlags,
    data: Option<&str>,
) -> Result<(), SandboxError> {
    let what = || format!("mount {} in the jail", place.display());
    mount(source, place, kind, flags, data).map_err(|errno| call(what())(errno.into()))
}
