//! A mapping of a process, as the kernel describes it (proc_pid_smaps(5)).

use wideleaf_policies::{Bytes, Hva};

/// One mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address of the mapping.
    pub start: Hva,
    /// Length in bytes.
    pub bytes: Bytes,
    /// Offset in the file.
    pub offset: Bytes,
    /// Whether the process may write it.
    pub is_writable: bool,
    /// Whether writes stay private to this process.
    pub is_private: bool,
    /// Path of the file; `None` for anonymous memory.
    pub path: Option<String>,
    /// Type of the file's file system, where a mount of the process shows it.
    pub file_system: Option<String>,
    /// Size of the kernel's pages, more than 4 KiB only for hugetlb.
    pub kernel_page: Bytes,
    /// Whether it is marked `MADV_NOHUGEPAGE`.
    pub is_kept_small: bool,
    /// Whether its faults or writes are reported to a userfaultfd, which may be open in another process.
    pub is_watched: bool,
}

impl Mapping {
    /// First address after the mapping.
    pub fn end(&self) -> Hva {
        self.start + self.bytes
    }
}
