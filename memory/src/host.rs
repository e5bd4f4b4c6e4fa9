//! The door to the kernel for one address space: everything the sensors read and the actuators change on the host's
//! side goes through [`Host`], so that the fake one can fail at each call.

use std::io;

use wideleaf_policies::{Bytes, Hva, Moment, OutcomeResult, Refusal};

pub mod fake;
pub mod linux;

/// What `madvise(2)` is asked for. None of them changes what the memory holds.
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
    /// `MADV_COLD` (Linux 5.4): not used lately. On a part of a THP the kernel splits that page first.
    Cold,
}

/// A run of present pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// First address.
    pub start: Hva,
    /// Length.
    pub bytes: Bytes,
    /// Whether a huge page of the kernel (THP or hugetlb) is mapped there as such.
    pub is_huge: bool,
}

/// One address space of the host: ours.
pub trait Host: Send + Sync {
    /// The time since the host was opened.
    fn now(&self) -> Moment;

    /// CPU time the calling thread has used.
    fn thread_cpu_time(&self) -> std::time::Duration;

    /// Gives advice about a range.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError>;

    /// Appends the present pages of a range to `runs`, ascending, neighbours of one kind merged or not.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError>;

    /// Reads a file of `/proc` or `/sys` whole.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn read_text(&self, path: &str) -> Result<String, HostError>;

    /// Waits, or less if [`Host`] implementations of tests say so.
    fn sleep(&self, time: std::time::Duration);
}

/// The kernel said no.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct HostError {
    /// What was asked.
    pub what: &'static str,
    /// The answer.
    pub source: io::Error,
}

impl HostError {
    /// The refusal class a policy reacts to. The errno values and their meaning are those of `madvise(2)`,
    /// `MADV_COLLAPSE`.
    pub fn refusal(&self) -> Refusal {
        match self.source.raw_os_error() {
            Some(libc::ENOMEM) => Refusal::NoHugePage,
            Some(libc::EAGAIN | libc::EBUSY) => Refusal::Busy,
            Some(libc::EINVAL) => Refusal::NotEligible,
            Some(libc::EPERM | libc::EACCES) => Refusal::NotPermitted,
            other => Refusal::Other(other.unwrap_or(0)),
        }
    }
}

impl From<&HostError> for OutcomeResult {
    fn from(error: &HostError) -> OutcomeResult {
        OutcomeResult::Refused(error.refusal())
    }
}
