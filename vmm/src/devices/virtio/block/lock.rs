//! The lock of a disk's file, by the kernel's calls. It reads and changes locks, and nothing in the file.
//!
//! The lock is of the open file (fcntl(2), "open file description locks"), so it ends with the file's last descriptor,
//! in whatever way that is closed. QEMU's locks of the same file exclude ours, and ours QEMU's.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};

/// Locks the open file: a writable one against all others, a read-only one against writers. Returns whether it is
/// locked now.
pub(super) fn lock(file: &File, is_read_only: bool) -> io::Result<bool> {
    let kind = if is_read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&whole(kind))) {
        Ok(_) => Ok(true),
        Err(nix::Error::EAGAIN | nix::Error::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Ends the lock of the open file.
pub(super) fn unlock(file: &File) -> io::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&whole(libc::F_UNLCK))).map(drop).map_err(io::Error::from)
}

/// Whether another process, of this host or another one, has locked the file.
pub(super) fn is_locked_elsewhere(file: &File) -> io::Result<bool> {
    let mut found = whole(libc::F_WRLCK);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(found.l_type != libc::F_UNLCK as libc::c_short)
}

/// A lock of this kind on the whole file.
fn whole(kind: libc::c_int) -> libc::flock {
    libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: 0, l_len: 0, l_pid: 0 }
}

/// The process that holds a lock on the file. The kernel reports no owner of such locks (the owner is the
/// open file), but `fdinfo` lists them (`proc(5)`). Processes of other users are not readable; then the
/// result is `None`.
pub(super) fn holder_of(file: &File, proc: &Path) -> Option<u32> {
    let ours = file.metadata().ok()?;
    let (own_pid, own_fd) = (std::process::id(), file.as_raw_fd().to_string());
    let processes = std::fs::read_dir(proc).ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).find(|pid| {
        let descriptors = std::fs::read_dir(proc.join(format!("{pid}/fd")));
        descriptors.into_iter().flatten().flatten().any(|descriptor| {
            let is_same = std::fs::metadata(descriptor.path())
                .is_ok_and(|other| (other.dev(), other.ino()) == (ours.dev(), ours.ino()));
            let name = descriptor.file_name();
            let is_ourselves = *pid == own_pid && name.to_str() == Some(own_fd.as_str());
            let info = || std::fs::read_to_string(proc.join(format!("{pid}/fdinfo")).join(&name));
            is_same && !is_ourselves && info().is_ok_and(|info| info.lines().any(|line| line.starts_with("lock:")))
        })
    })
}
