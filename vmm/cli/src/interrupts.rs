//! Ctrl-C and `SIGTERM` set a flag that everything that waits looks at; a second one ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::Failure;

/// The flag.
#[derive(Clone, Debug)]
pub struct Interrupts {
    flag: Arc<AtomicBool>,
    /// What ends the process at the second signal.
    at_once: Arc<Mutex<Vec<SigId>>>,
}

static OF_THIS_PROGRAM: OnceLock<Interrupts> = OnceLock::new();

impl Interrupts {
    /// Takes over both signals.
    ///
    /// # Errors
    /// [`Failure::Host`] where the kernel refuses a handler.
    pub fn install() -> Result<Interrupts, Failure> {
        let interrupts = Interrupts { flag: Arc::new(AtomicBool::new(false)), at_once: Arc::default() };
        // The order matters: the first signal finds the flag unset, and sets it; the second finds it set.
        interrupts.register_second().map_err(|error| Failure::Host(format!("cannot handle signals: {error}")))?;
        for signal in [SIGINT, SIGTERM] {
            let registered = signal_hook::flag::register(signal, interrupts.flag.clone());
            registered.map_err(|error| Failure::Host(format!("cannot handle signal {signal}: {error}")))?;
        }
        // The first stays: a program takes them over once.
        let _ = OF_THIS_PROGRAM.set(interrupts.clone());
        Ok(interrupts)
    }

    /// Those that this program has taken over; `None` while a signal ends it at once.
    pub(crate) fn of_this_program() -> Option<&'static Interrupts> {
        OF_THIS_PROGRAM.get()
    }

    fn register_second(&self) -> std::io::Result<()> {
        let mut at_once = self.at_once.lock().unwrap_or_else(PoisonError::into_inner);
        for signal in [SIGINT, SIGTERM] {
            at_once.push(signal_hook::flag::register_conditional_shutdown(signal, 130, self.flag.clone())?);
        }
        Ok(())
    }

    /// The second signal no longer ends the process: somebody else does, who has something to put right before.
    pub(crate) fn leave_the_second_to_others(&self) {
        for id in self.at_once.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }

    /// Whether somebody wants us to end.
    pub fn is_set(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// The flag itself, for who waits on it.
    pub fn flag(&self) -> &AtomicBool {
        &self.flag
    }

    /// An error if so.
    ///
    /// # Errors
    /// [`Failure::Interrupted`].
    pub fn check(&self) -> Result<(), Failure> {
        if self.is_set() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}
