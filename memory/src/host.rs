//! Interface to the kernel for one address space, of this process or another one. All reads by the sensors and changes
//! by the actuators on the host's side go through [`Host`], so that the fake one can fail at each call.
//!
//! No call changes the contents of memory.

use std::io;

use wideleaf_policies::{Bytes, Hva, Moment, NodeId, OutcomeResult, Refusal};

use crate::sys::mapping::MapError;

pub mod linux;
pub mod process;
mod ready_page;

/// Kinds of advice for `madvise(2)`. None of them changes the contents of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advice {
    /// `MADV_HUGEPAGE`: huge pages at the fault and for khugepaged.
    HugePage,
    /// `MADV_NOHUGEPAGE`: base pages only. `MADV_COLLAPSE` then answers `EINVAL`.
    NoHugePage,
    /// `MADV_COLLAPSE` (Linux 6.1): make it huge now, whatever the THP settings say.
    Collapse,
    /// `MADV_POPULATE_WRITE` (Linux 5.14): fault pages in, writable; a shortage is an error, not a SIGBUS.
    PopulateWrite,
    /// `MADV_POPULATE_READ` (Linux 5.14): map pages without writing; those a file has are mapped as it has them.
    PopulateRead,
    /// `MADV_COLD` (Linux 5.4): not used lately. On a part of a THP the kernel splits that page first.
    Cold,
}

/// A run of present pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// First address of the run.
    pub start: Hva,
    /// Length of the run, in bytes.
    pub bytes: Bytes,
    /// Whether a huge page of the kernel (THP or hugetlb) is mapped there as such.
    pub is_huge: bool,
}

/// One address space of the host: of this process ([`linux::LinuxHost`]), or of another one
/// ([`process::ProcessHost`]).
pub trait Host: Send + Sync {
    /// Whether it is the address space of this process. Only there can ranges be marked
    /// ([`Advice::HugePage`], [`Advice::NoHugePage`]) and memory be mapped and moved; that of another process
    /// is only read, collapsed and split.
    fn is_own(&self) -> bool {
        true
    }

    /// Time since the host was opened.
    fn now(&self) -> Moment;

    /// CPU time that the calling thread has used.
    fn thread_cpu_time(&self) -> std::time::Duration;

    /// CPU time that all threads of this process have used; `None` where
    /// [`Host::sleep_until_process_used`] cannot wait for it.
    fn process_cpu_time(&self) -> Option<std::time::Duration> {
        None
    }

    /// Waits until the threads of this process have used that CPU time. Returns `false` where that is not possible.
    fn sleep_until_process_used(&self, _cpu_time: std::time::Duration) -> bool {
        false
    }

    /// Gives advice about a range.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError>;

    /// Appends the present pages of a range to `runs`, ascending; neighbours of one kind may or may not be merged.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError>;

    /// Appends the pages of anonymous memory that may hold data: those present and those swapped out. All memory
    /// outside the runs reads zero.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError>;

    /// Whether one mapping (VMA) covers the whole range: only then does the kernel move it whole or not at all.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn is_one_mapping(&self, start: Hva, bytes: Bytes) -> Result<bool, HostError>;

    /// Reads a whole file of `/proc` or `/sys`. `/proc/self` stands for the process of this address space.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn read_text(&self, path: &str) -> Result<String, HostError>;

    /// Appends the NUMA node of each page; `None` for one that is not present.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno: `EPERM` without the right to read another process's memory, `ENOSYS` on a
    /// kernel without NUMA.
    fn nodes_of(&self, pages: &[Hva], nodes: &mut Vec<Option<NodeId>>) -> Result<(), HostError> {
        let _unused = (pages, nodes);
        Err(HostError { what: "move_pages", source: io::Error::from_raw_os_error(libc::ENOSYS) })
    }

    /// Moves pages to a NUMA node, with their contents; a page of a huge page moves all of it.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno, of the first page that was not moved: `ENOMEM` if the node has no free
    /// page, `EBUSY` for a page in use by a device, `EACCES` for one that another process maps too, `EPERM` for a node
    /// outside of the process's cpuset.
    fn move_to_node(&self, pages: &[Hva], node: NodeId) -> Result<(), HostError> {
        let _unused = (pages, node);
        Err(HostError { what: "move_pages", source: io::Error::from_raw_os_error(libc::ENOSYS) })
    }

    /// Numbers of the threads of this address space's process.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn threads(&self) -> Result<Vec<u32>, HostError> {
        Err(HostError { what: "read the threads", source: io::Error::from_raw_os_error(libc::ENOSYS) })
    }

    /// Makes a free huge page of this machine ready for a collapse of the window at `start` by this thread, while no
    /// thread of the guest waits for it. The page is on the NUMA node of the window's first page; the kernel's collapse
    /// takes one from the node of most pages of the window. Without a free huge page this does nothing, and the
    /// collapse returns the error.
    fn make_huge_page_ready(&self, _start: Hva) {}

    /// Waits for this time; hosts of tests may wait less.
    fn sleep(&self, time: std::time::Duration);
}

/// A request that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct HostError {
    /// Name of the request.
    pub what: &'static str,
    /// Error of the kernel.
    pub source: io::Error,
}

impl HostError {
    /// Whether the process of this address space has ended.
    pub fn is_gone(&self) -> bool {
        self.source.raw_os_error() == Some(libc::ESRCH)
    }

    /// Class of the refusal, for policies. The errno values and their meaning are those of `madvise(2)`,
    /// `MADV_COLLAPSE`; `ENOSPC` is that of `fallocate(2)` on a file of huge pages.
    pub fn refusal(&self) -> Refusal {
        match self.source.raw_os_error() {
            Some(libc::ENOMEM | libc::ENOSPC) => Refusal::NoHugePage,
            Some(libc::EAGAIN | libc::EBUSY) => Refusal::Busy,
            Some(libc::EINVAL) => Refusal::NotEligible,
            Some(libc::EPERM | libc::EACCES) => Refusal::NotPermitted,
            Some(libc::ESRCH) => Refusal::Gone,
            other => Refusal::Other(other.unwrap_or(0)),
        }
    }
}

impl From<MapError> for HostError {
    fn from(error: MapError) -> HostError {
        match error {
            MapError::Call { call, source } => HostError { what: call, source },
            too_large @ MapError::TooLarge(_) => {
                HostError { what: "mmap", source: io::Error::new(io::ErrorKind::OutOfMemory, too_large) }
            }
        }
    }
}

/// Result of a step that needs no huge page. A shortage of memory or mappings in it does not mean that huge pages are
/// short, so it is not reported as one.
pub(crate) fn beside_huge_pages(result: OutcomeResult) -> OutcomeResult {
    match result {
        OutcomeResult::Refused(Refusal::NoHugePage) => OutcomeResult::Refused(Refusal::Other(libc::ENOMEM)),
        other => other,
    }
}

impl From<&HostError> for OutcomeResult {
    fn from(error: &HostError) -> OutcomeResult {
        OutcomeResult::Refused(error.refusal())
    }
}
