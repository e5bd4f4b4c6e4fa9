//! All `unsafe` of the crate: one family of system calls in each file, each call in a block of its own.

#![expect(
    unsafe_code,
    reason = "mmap, madvise, mbind, pidfds, the pagemap ioctl, userfaultfd, fsopen, move_pages, cachestat, setpriority \
              and mallopt have no safe form for what is done here"
)]

pub mod allocator;
pub(crate) mod cached_pages;
pub(crate) mod clock;
pub(crate) mod fill_slot;
pub(crate) mod madvise;
pub(crate) mod mapping;
pub(crate) mod memcpy;
pub(crate) mod mempolicy;
pub(crate) mod page_nodes;
pub(crate) mod pagemap;
pub(crate) mod pidfd;
pub(crate) mod priority;
pub(crate) mod tmpfs;
pub(crate) mod userfaultfd;
