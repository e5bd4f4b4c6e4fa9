//! All `unsafe` of the crate: one family of system calls per file, each call in a block of its own.

#![expect(
    unsafe_code,
    reason = "mmap, madvise, the pagemap ioctl and userfaultfd have no safe form for memory a guest writes"
)]

pub(crate) mod clock;
pub(crate) mod madvise;
pub(crate) mod mapping;
pub(crate) mod memcpy;
pub(crate) mod pagemap;
pub(crate) mod userfaultfd;
pub(crate) mod write_protect;
