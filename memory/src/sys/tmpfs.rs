//! A file of huge folios, on a tmpfs of its own that is mounted nowhere and supplies them whatever the host's setting
//! for memfds is (`fsopen(2)`, `fsconfig(2)`, `fsmount(2)`, Linux 5.2; Documentation/filesystems/tmpfs, `huge=`).
//!
//! `shmem_enabled` governs the kernel's internal tmpfs, which holds memfds; another mount has an option instead. The
//! mount ends with the file. Needs `CAP_SYS_ADMIN`.

use std::ffi::{CStr, CString, c_long};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use wideleaf_policies::Bytes;

use super::mapping::MapError;

/// Constants of include/uapi/linux/mount.h.
const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const FSCONFIG_SET_STRING: libc::c_uint = 1;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;

/// Makes a file of that size, on a tmpfs with room for no more.
pub(crate) fn create_file(bytes: Bytes) -> Result<File, MapError> {
    let context = open(c"tmpfs").map_err(call("fsopen of a tmpfs"))?;
    let size = CString::new(bytes.get().to_string()).expect("digits are no zero byte");
    set(context.as_fd(), c"huge", c"always").map_err(call("fsconfig(huge=always) of a tmpfs"))?;
    set(context.as_fd(), c"size", &size).map_err(call("fsconfig(size) of a tmpfs"))?;
    create(context.as_fd()).map_err(call("fsconfig of a tmpfs"))?;
    let mount = mount(context.as_fd()).map_err(call("fsmount of a tmpfs"))?;
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    let file = openat(&mount, ".", flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let file = File::from(file.map_err(|errno| call("open of a file on a tmpfs")(errno.into()))?);
    file.set_len(bytes.get()).map_err(call("ftruncate of a file on a tmpfs"))?;
    Ok(file)
}

fn call(call: &'static str) -> impl Fn(io::Error) -> MapError {
    move |source| MapError::Call { call, source }
}

fn open(filesystem: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the name is NUL-terminated and lives until the call returns, which makes a new descriptor.
    let answer = unsafe { libc::syscall(libc::SYS_fsopen, filesystem.as_ptr(), FSOPEN_CLOEXEC) };
    descriptor(answer)
}

fn set(context: BorrowedFd<'_>, key: &CStr, value: &CStr) -> io::Result<()> {
    let (fd, none) = (context.as_raw_fd(), 0);
    // SAFETY: key and value are NUL-terminated and live until the call returns.
    let answer =
        unsafe { libc::syscall(libc::SYS_fsconfig, fd, FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr(), none) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn create(context: BorrowedFd<'_>) -> io::Result<()> {
    let (fd, none) = (context.as_raw_fd(), std::ptr::null::<libc::c_char>());
    // SAFETY: this command takes neither a key nor a value.
    let answer = unsafe { libc::syscall(libc::SYS_fsconfig, fd, FSCONFIG_CMD_CREATE, none, none, 0) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn mount(context: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let (fd, no_attributes) = (context.as_raw_fd(), 0);
    // SAFETY: the call takes numbers only and makes a new descriptor.
    let answer = unsafe { libc::syscall(libc::SYS_fsmount, fd, FSMOUNT_CLOEXEC, no_attributes) };
    descriptor(answer)
}

fn descriptor(answer: c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(answer).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor is new and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
