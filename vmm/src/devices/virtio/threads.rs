//! Where devices are activated and reset, and their threads started, for a vCPU's thread, on which a driver asks for it, may do none of this
//! in a sandbox: its filter has KVM's calls, and whatever it started would inherit that filter.
//!
//! ```text
//!   vCPU ── DRIVER_OK ─▶ call ─▶ "devices": started before the first vCPU ─ activate ─▶ spawn ─▶ the device's thread, filtered
//!     └──── waits for the answer ───────┘
//! ```

use std::fmt;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};

use super::ActivateError;
use crate::sandbox::{Sandbox, ThreadKind};

type Work = Box<dyn FnOnce() + Send>;

/// See the module. Without a sandbox all is done on the thread that asks.
#[derive(Default)]
pub struct DeviceThreads {
    inside: OnceLock<Inside>,
}

struct Inside {
    sandbox: Arc<Sandbox>,
    calls: Sender<Work>,
}

impl DeviceThreads {
    /// Does all in that sandbox from now on. Before the first vCPU runs, and once.
    pub(crate) fn begin_in(&self, sandbox: Arc<Sandbox>) -> std::io::Result<()> {
        let (calls, waiting) = mpsc::channel::<Work>();
        // It ends with the last owner of the other end.
        Builder::new().name("devices".into()).spawn(move || waiting.into_iter().for_each(|work| work()))?;
        let is_first = self.inside.set(Inside { sandbox, calls }).is_ok();
        assert!(is_first, "a machine's devices are in one sandbox");
        Ok(())
    }

    /// Does `work` where devices are activated and reset, and waits for its result.
    ///
    /// # Panics
    /// Where a device's code panicked there: nothing can be done for any device any more.
    pub(super) fn call<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let Some(Inside { calls, .. }) = self.inside.get() else { return work() };
        let (done, result) = mpsc::channel();
        // Who asked waits below, so the result is heard.
        let work = Box::new(move || drop(done.send(work())));
        let is_there = calls.send(work).is_ok();
        result.recv().ok().filter(|_| is_there).expect("the thread that activates devices has not panicked")
    }

    /// Starts a thread that does `work`; where devices are activated.
    ///
    /// # Errors
    /// [`ActivateError::Host`] where the kernel gives none.
    pub fn spawn(
        &self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, ActivateError> {
        let sandbox = self.inside.get().map(|inside| Arc::clone(&inside.sandbox));
        let restricted = move || match sandbox.map_or(Ok(()), |sandbox| sandbox.enter_thread(ThreadKind::Io)) {
            Ok(()) => work(),
            Err(error) => tracing::error!("{name}: its thread cannot be restricted, and does nothing: {error}"),
        };
        let started = Builder::new().name(name.into()).spawn(restricted);
        started.map_err(|source| ActivateError::Host { what: "cannot start a device's thread", source })
    }
}

impl fmt::Debug for DeviceThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceThreads").field("are_in_a_sandbox", &self.inside.get().is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_sandbox_all_is_done_where_it_is_asked_for() {
        let threads = DeviceThreads::default();
        assert_eq!(threads.call(|| std::thread::current().id()), std::thread::current().id());
        let (said, heard) = mpsc::channel();
        let thread = threads.spawn("disk", move || {
            let name = std::thread::current().name().map(str::to_owned);
            said.send(name).unwrap();
        });
        thread.unwrap().join().unwrap();
        assert_eq!(heard.recv().unwrap().as_deref(), Some("disk"));
    }
}
