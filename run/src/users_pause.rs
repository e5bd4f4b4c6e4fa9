//! The pause of a VM that its users share: any of them can end it, so that the pause of a client that died can be
//! undone.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_memory::second_level::SecondLevelError;
use wideleaf_vmm::GuestExit;
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
    held: Mutex<Held>,
}

/// Number of a pause, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseNumber(u64);

#[derive(Default)]
struct Held {
    now: Option<PauseNumber>,
    /// Number of pauses so far.
    pauses: u64,
}

impl std::fmt::Debug for UsersPause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UsersPause {{ is_held: {} }}", self.is_held())
    }
}

impl UsersPause {
    /// A VM that runs.
    pub fn new(machine: &Machine, disks: DiskLocks) -> UsersPause {
        let look = Box::new(machine.queue_kicker());
        UsersPause { control: machine.control(), disks, look, held: Mutex::default() }
    }

    /// Whether the VM is paused for its users.
    pub fn is_held(&self) -> bool {
        self.lock().now.is_some()
    }

    /// Pauses the VM, if it is not paused for its users already; returns the number of a pause that is the caller's.
    ///
    /// # Errors
    /// [`SecondLevelError`] of a vCPU that does not leave the guest.
    pub fn hold(&self) -> Result<Option<PauseNumber>, SecondLevelError> {
        let mut held = self.lock();
        if held.now.is_some() {
            return Ok(None);
        }
        self.control.pause()?;
        held.pauses += 1;
        held.now = Some(PauseNumber(held.pauses));
        Ok(held.now)
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
        self.end_if(|_| true)
    }

    /// Ends the pause with this number, unless that has ended, or the VM ends.
    ///
    /// # Errors
    /// Those of [`UsersPause::end`].
    pub fn end_of(&self, number: PauseNumber) -> Result<(), SecondLevelError> {
        self.end_if(|now| now == number && !self.control.is_stopping())
    }

    /// Ends the VM if it is paused for its users, so that its disks stay as they are. Returns whether it is.
    pub fn stop_held(&self) -> bool {
        let held = self.lock();
        if held.now.is_some() {
            self.control.stop(GuestExit::Stopped);
        }
        held.now.is_some()
    }

    fn end_if(&self, ends: impl FnOnce(PauseNumber) -> bool) -> Result<(), SecondLevelError> {
        let mut held = self.lock();
        if held.now.is_some_and(ends) {
            self.control.resume()?;
            held.now = None;
            self.use_disks();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock()
    }
}
