//! Write protection by `userfaultfd(2)`: whoever writes to a protected page waits until it is un-protected
//! (`UFFDIO_WRITEPROTECT`, Linux 5.7).

use std::io;

use wideleaf_policies::{Bytes, Hva};

use super::userfaultfd::{Mode, Userfaultfd, UserfaultfdError};

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
        userfaultfd.register(start, bytes, Mode::WriteProtect)?;
        Ok(Protection { userfaultfd, start, bytes })
    }

    /// Protects all present pages, or un-protects them and wakes whoever waits.
    pub(crate) fn set(&self, is_protected: bool) -> io::Result<()> {
        self.userfaultfd.write_protect(self.start, self.bytes, is_protected)
    }
}

/// The errno behind it, where there is one.
fn into_io(error: UserfaultfdError) -> io::Error {
    match error {
        UserfaultfdError::NotSupported | UserfaultfdError::NoMove | UserfaultfdError::NoMinor => {
            io::Error::from_raw_os_error(libc::ENOSYS)
        }
        UserfaultfdError::NotPermitted { .. } => io::Error::from_raw_os_error(libc::EPERM),
        UserfaultfdError::Call { source, .. } => source,
    }
}
