//! Ctrl-C and `SIGTERM` set a flag that everything that waits looks at; a second one ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::Failure;

/// The flag.
#[derive(Clone, Debug)]
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// Takes over both signals.
    ///
    /// # Errors
    /// [`Failure::Host`] where the kernel refuses a handler.
    pub fn install() -> Result<Interrupts, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the first signal finds the flag unset, and sets it; the second finds it set.
            let at_once = signal_hook::flag::register_conditional_shutdown(signal, 130, flag.clone());
            at_once
                .and_then(|_| signal_hook::flag::register(signal, flag.clone()))
                .map_err(|error| Failure::Host(format!("cannot handle signal {signal}: {error}")))?;
        }
        Ok(Interrupts(flag))
    }

    /// Whether somebody wants us to end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for who waits on it.
    pub fn flag(&self) -> &AtomicBool {
        &self.0
    }

    /// An error if so.
    ///
    /// # Errors
    /// [`Failure::Interrupted`].
    pub fn check(&self) -> Result<(), Failure> {
        if self.is_set() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}
