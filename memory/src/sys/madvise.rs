//! `madvise(2)` on this process's own memory.

use std::io;

use wideleaf_policies::{Bytes, Hva};

use crate::host::Advice;

/// Gives the kernel one advice about `[start, start + bytes)`.
pub(crate) fn madvise(start: Hva, bytes: Bytes, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::HugePage => libc::MADV_HUGEPAGE,
        Advice::NoHugePage => libc::MADV_NOHUGEPAGE,
        Advice::Collapse => libc::MADV_COLLAPSE,
        Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
        Advice::PopulateRead => libc::MADV_POPULATE_READ,
        Advice::Cold => libc::MADV_COLD,
    };
    // SAFETY: none of the six advices changes what the memory holds (unlike MADV_DONTNEED or MADV_FREE, which
    // `Advice` does not have), so it is sound for any range; one that is not mapped is ENOMEM.
    let result = unsafe { libc::madvise(start.get() as *mut libc::c_void, bytes.as_usize(), advice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
