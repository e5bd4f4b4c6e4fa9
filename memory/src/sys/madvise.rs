//! `madvise(2)` on this process's own memory, and `process_madvise(2)` on another's.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use wideleaf_policies::{Bytes, Hva};

use crate::host::Advice;

const fn number(advice: Advice) -> libc::c_int {
    match advice {
        Advice::HugePage => libc::MADV_HUGEPAGE,
        Advice::NoHugePage => libc::MADV_NOHUGEPAGE,
        Advice::Collapse => libc::MADV_COLLAPSE,
        Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
        Advice::PopulateRead => libc::MADV_POPULATE_READ,
        Advice::Cold => libc::MADV_COLD,
    }
}

/// Gives the kernel one advice about `[start, start + bytes)`.
pub(crate) fn madvise(start: Hva, bytes: Bytes, advice: Advice) -> io::Result<()> {
    // SAFETY: none of the six advices changes what the memory holds (unlike MADV_DONTNEED or MADV_FREE, which
    // `Advice` does not have), so it is sound for any range; one that is not mapped is ENOMEM.
    let result = unsafe { libc::madvise(start.get() as *mut libc::c_void, bytes.as_usize(), number(advice)) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives the kernel one advice about `[start, start + bytes)` of the process behind a pidfd. The kernel accepts
/// [`Advice::Collapse`] and [`Advice::Cold`], and answers `EINVAL` to all others here
/// (`process_madvise_remote_valid`, mm/madvise.c).
pub(crate) fn process_madvise(process: BorrowedFd<'_>, start: Hva, bytes: Bytes, advice: Advice) -> io::Result<()> {
    let range = libc::iovec { iov_base: start.get() as *mut libc::c_void, iov_len: bytes.as_usize() };
    // SAFETY: as for `madvise`, and the addresses are not even of this process; the kernel reads one iovec, which lives
    // until the call returns.
    let advised = unsafe {
        libc::syscall(libc::SYS_process_madvise, process.as_raw_fd(), &raw const range, 1_usize, number(advice), 0_u32)
    };
    match advised {
        -1 => Err(io::Error::last_os_error()),
        whole if whole as u64 == bytes.get() => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EAGAIN)), // a part of it counts as busy
    }
}
