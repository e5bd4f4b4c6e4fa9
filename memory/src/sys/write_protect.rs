//! Write protection by `userfaultfd(2)`: whoever writes to a protected page waits until it is un-protected
//! (`UFFDIO_WRITEPROTECT`, Linux 5.7). Structures and numbers are those of `ioctl_userfaultfd(2)` and
//! include/uapi/linux/userfaultfd.h.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use wideleaf_policies::{Bytes, Hva};

use super::userfaultfd::{Userfaultfd, UserfaultfdError};

/// `struct uffdio_register`; its first two fields are a `struct uffdio_range`.
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`, likewise.
#[repr(C)]
struct WriteProtect {
    start: u64,
    len: u64,
    mode: u64,
}

const UFFD: u8 = 0xAA;
const REGISTER_MODE_WP: u64 = 1 << 1;
const IOCTL_WRITEPROTECT: u64 = 1 << 0x06;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

nix::ioctl_readwrite!(uffdio_register, UFFD, 0x00, Register);
nix::ioctl_readwrite!(uffdio_writeprotect, UFFD, 0x06, WriteProtect);

/// A range of anonymous memory of this process whose present pages can be protected. Dropping it ends the protection
/// and wakes whoever waits, whatever happened before: the kernel does so when the descriptor is closed.
///
/// Pages that are not present are not protected: a write there makes a fresh page and does not wait.
#[derive(Debug)]
pub(crate) struct Protection {
    userfaultfd: Userfaultfd,
    start: Hva,
    bytes: Bytes,
}

impl Protection {
    /// Registers the range; nothing is protected yet. `EBUSY` where another userfaultfd has it.
    pub(crate) fn register(start: Hva, bytes: Bytes) -> io::Result<Protection> {
        let userfaultfd = Userfaultfd::open().map_err(into_io)?;
        let mut argument = Register { start: start.get(), len: bytes.get(), mode: REGISTER_MODE_WP, ioctls: 0 };
        let protection = Protection { userfaultfd, start, bytes };
        // SAFETY: the argument is the kernel's structure and lives until the call returns. What memory holds does not
        // change, and nobody waits before `set`.
        unsafe { uffdio_register(protection.fd(), &mut argument) }?;
        if argument.ioctls & IOCTL_WRITEPROTECT == 0 {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        Ok(protection)
    }

    /// Protects all present pages, or un-protects them and wakes whoever waits.
    pub(crate) fn set(&self, is_protected: bool) -> io::Result<()> {
        let mode = if is_protected { WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = WriteProtect { start: self.start.get(), len: self.bytes.get(), mode };
        // SAFETY: the argument is the kernel's structure and lives until the call returns; what memory holds does not
        // change, a writer waits at most as long as `self` lives.
        unsafe { uffdio_writeprotect(self.fd(), &mut argument) }?;
        Ok(())
    }

    fn fd(&self) -> RawFd {
        self.userfaultfd.as_fd().as_raw_fd()
    }
}

/// The errno behind it, where there is one.
fn into_io(error: UserfaultfdError) -> io::Error {
    match error {
        UserfaultfdError::NotSupported | UserfaultfdError::NoMove => io::Error::from_raw_os_error(libc::ENOSYS),
        UserfaultfdError::NotPermitted { .. } => io::Error::from_raw_os_error(libc::EPERM),
        UserfaultfdError::Call { source, .. } => source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_have_the_numbers_of_the_header() {
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x00, size_of::<Register>()), 0xc020_aa00);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x06, size_of::<WriteProtect>()), 0xc018_aa06);
    }
}
