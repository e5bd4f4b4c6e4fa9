//! The pause of a VM that its users share: any of them can end it, so that the pause of a client that died can be
//! undone.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_memory::second_level::SecondLevelError;
use wideleaf_vmm::devices::virtio::block::DiskLocks;
use wideleaf_vmm::machine::Machine;
use wideleaf_vmm::run_loop::RunControl;

/// The users' pause of the vCPUs. It is one of those that [`RunControl::pause`] counts; the manager has its own.
/// Devices complete what the guest has asked for, except disks at an instant that is saved.
pub struct UsersPause {
    control: Arc<RunControl>,
    disks: DiskLocks,
    /// Makes the devices look at their rings.
    look: Box<dyn Fn() + Send + Sync>,
    is_held: Mutex<bool>,
}

impl std::fmt::Debug for UsersPause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UsersPause {{ is_held: {} }}", self.is_held())
    }
}

impl UsersPause {
    /// A VM that runs.
    pub fn new(machine: &Machine, disks: DiskLocks) -> UsersPause {
        let look = Box::new(machine.looks());
        UsersPause { control: machine.control(), disks, look, is_held: Mutex::new(false) }
    }

    /// Whether the VM is paused for its users.
    pub fn is_held(&self) -> bool {
        *self.lock()
    }

    /// Pauses the VM, if it is not paused for its users already. Returns whether this pause is the caller's.
    ///
    /// # Errors
    /// [`SecondLevelError`] of a vCPU that does not leave the guest.
    pub fn hold(&self) -> Result<bool, SecondLevelError> {
        let mut is_held = self.lock();
        if *is_held {
            return Ok(false);
        }
        self.control.pause()?;
        *is_held = true;
        Ok(true)
    }

    /// Leaves what the guest asks of its disks in the rings, until the end of the pause or [`UsersPause::use_disks`].
    pub fn rest_disks(&self) {
        self.disks.rest();
    }

    /// Undoes [`UsersPause::rest_disks`].
    pub fn use_disks(&self) {
        self.disks.go_on();
        (self.look)();
    }

    /// Ends the users' pause, if there is one.
    ///
    /// # Errors
    /// [`SecondLevelError`] where nothing was paused.
    pub fn end(&self) -> Result<(), SecondLevelError> {
        let mut is_held = self.lock();
        if *is_held {
            self.control.resume()?;
            *is_held = false;
            self.use_disks();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_held.lock()
    }
}
