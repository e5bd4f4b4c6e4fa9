//! Opens the services over userfaultfd(2) for RAM that this process has mapped: the mover, and minor faults. Test
//! doubles put their wrapper here; opening watches nothing yet.

use std::sync::Arc;

use crate::host::linux::LinuxHost;
use crate::host::process::ProcessHost;
use crate::mover::linux::{MoverError, OpenMover};
use crate::region::GuestRam;
use crate::sensors::minor_faults::{MinorFaultsError, OpenMinorFaults};

/// Opens services over userfaultfd(2). The real ones, unless a test double wraps their calls.
pub trait Userfaultfds: Send + Sync {
    /// Opens the mover of the RAM's windows.
    ///
    /// # Errors
    /// [`MoverError`]: only anonymous RAM can be moved, by a kernel that has `UFFDIO_MOVE` and permits it.
    fn open_mover(&self, ram: Arc<GuestRam>) -> Result<OpenMover, MoverError> {
        OpenMover::of(ram)
    }

    /// Opens the minor faults of the RAM.
    ///
    /// # Errors
    /// [`MinorFaultsError`]: only memfd RAM and hugetlb RAM of 2 MiB pages has such faults, on a kernel
    /// that reports them.
    fn open_minor_faults(&self, ram: Arc<GuestRam>) -> Result<OpenMinorFaults, MinorFaultsError> {
        OpenMinorFaults::of(ram)
    }
}

impl Userfaultfds for LinuxHost {}

impl Userfaultfds for ProcessHost {}
