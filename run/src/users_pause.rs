//! The pause of a VM that its users share: any of them can end it, so that the pause of a client that died can be
//! undone.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wideleaf_memory::second_level::SecondLevelError;
use wideleaf_vmm::run_loop::RunControl;

/// The users' pause. It is one of those that [`RunControl::pause`] counts; the manager has its own.
#[derive(Debug)]
pub struct UsersPause {
    control: Arc<RunControl>,
    is_held: Mutex<bool>,
}

impl UsersPause {
    /// A VM that runs.
    pub fn new(control: Arc<RunControl>) -> UsersPause {
        UsersPause { control, is_held: Mutex::new(false) }
    }

    /// Whether the VM is paused for its users.
    pub fn is_held(&self) -> bool {
        *self.lock()
    }

    /// Pauses the VM, if it is not paused for its users already.
    ///
    /// # Errors
    /// [`SecondLevelError`] of a vCPU that does not leave the guest.
    pub fn hold(&self) -> Result<(), SecondLevelError> {
        let mut is_held = self.lock();
        if !*is_held {
            self.control.pause()?;
            *is_held = true;
        }
        Ok(())
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
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
