//! The door to the kernel for one address space, ours or another process's: everything the sensors read and the actuators change on the host's
//! side goes through [`Host`], so that the fake one can fail at each call.

use std::io;
use std::sync::Arc;

use wideleaf_policies::{Bytes, Gpa, Hva, Moment, OutcomeResult, Refusal};

use crate::mover::Mover;
use crate::region::GuestRam;
use crate::sensors::minor_faults::MinorFaults;
use crate::side_mapping::{GiantFile, SideMapping};
use crate::sys::mapping::MapError;

pub mod failing;
pub mod fake;
pub mod linux;
pub mod process;

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
    /// `MADV_POPULATE_READ` (Linux 5.14): map pages without writing; those a file has are mapped as it has them.
    PopulateRead,
    /// `MADV_COLD` (Linux 5.4): not used lately. On a part of a THP the kernel splits that page first.
    Cold,
}

/// What is behind addresses aside.
#[derive(Clone, Copy, Debug)]
pub enum SideContents<'a> {
    /// Nothing: a place to move pages to.
    Nothing,
    /// Anonymous memory that reads zero.
    Anonymous,
    /// A giant page.
    Giant(&'a GiantFile),
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

/// One address space of the host: ours ([`linux::LinuxHost`]), or another process's ([`process::ProcessHost`]).
pub trait Host: Send + Sync {
    /// Whether it is the address space of this process. Only there can ranges be marked ([`Advice::HugePage`],
    /// [`Advice::NoHugePage`]) and memory be mapped and moved; another process's is read, collapsed and split, no more.
    fn is_own(&self) -> bool {
        true
    }

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

    /// Appends the pages of anonymous memory that may hold something: those present and those swapped out. What is not
    /// in a run reads zero.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError>;

    /// Whether one mapping (VMA) covers the whole range: only then does the kernel move it whole or not at all.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn is_one_mapping(&self, start: Hva, bytes: Bytes) -> Result<bool, HostError>;

    /// A file that is to hold one giant page of the hugetlb pool. It takes the page when it is first mapped.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn create_giant(&self) -> Result<GiantFile, HostError>;

    /// Addresses beside guest RAM, with this behind them.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno; nothing stays mapped.
    fn map_aside(&self, contents: SideContents<'_>) -> Result<SideMapping, HostError>;

    /// Moves the anonymous pages behind the giant at `giant` aside. Guest RAM there is empty afterwards.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno; everything is then as it was.
    fn move_aside(&self, ram: &GuestRam, giant: Gpa, to: &SideMapping) -> Result<(), HostError>;

    /// Moves the anonymous pages of `from` behind the giant at `giant`, in the place of what is mapped there. `from` is
    /// empty afterwards.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno. Guest RAM may then be without what was mapped there before.
    fn move_in(&self, from: &SideMapping, ram: &GuestRam, giant: Gpa) -> Result<(), HostError>;

    /// Maps a giant page behind the giant at `giant`, in the place of what is mapped there.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno. Guest RAM may then be without what was mapped there before.
    fn map_over(&self, ram: &GuestRam, giant: Gpa, page: &GiantFile) -> Result<(), HostError>;

    /// The door through which pages of a VM are moved, given the real one: a host that fails puts one that fails before it.
    fn mover_door(&self, real: Arc<dyn Mover>) -> Arc<dyn Mover> {
        real
    }

    /// As [`Host::mover_door`], for minor faults.
    fn minor_faults_door(&self, real: Arc<dyn MinorFaults>) -> Arc<dyn MinorFaults> {
        real
    }

    /// Reads a file of `/proc` or `/sys` whole. `/proc/self` is the process whose address space it is.
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
    /// Whether the process whose address space it is has ended.
    pub fn is_gone(&self) -> bool {
        self.source.raw_os_error() == Some(libc::ESRCH)
    }

    /// The refusal class a policy reacts to. The errno values and their meaning are those of `madvise(2)`,
    /// `MADV_COLLAPSE`.
    pub fn refusal(&self) -> Refusal {
        match self.source.raw_os_error() {
            Some(libc::ENOMEM) => Refusal::NoHugePage,
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

impl From<&HostError> for OutcomeResult {
    fn from(error: &HostError) -> OutcomeResult {
        OutcomeResult::Refused(error.refusal())
    }
}
