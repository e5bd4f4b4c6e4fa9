//! The thread that activates and resets devices, and starts their threads. In a sandbox a vCPU's thread, on which a
//! driver asks for it, may do none of this: its filter allows only KVM's calls, and a thread that it started would
//! inherit that filter.
//!
//! ```text
//!   vCPU ── DRIVER_OK ─▶ call ─▶ "devices" ── activate ─▶ spawn ─▶ the device's thread, filtered
//!     └──── waits for the answer ───┘ started before the first vCPU
//! ```

use std::fmt;
use std::io;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use super::ActivateError;
use crate::sandbox::{Sandbox, SandboxError, ThreadKind};

type Work = Box<dyn FnOnce() + Send>;

/// The service: see the module. Without a sandbox the calling thread does all work.
#[derive(Default)]
pub struct DeviceThreads {
    inside: OnceLock<Inside>,
}

struct Inside {
    sandbox: Arc<Sandbox>,
    calls: Sender<Work>,
}

impl DeviceThreads {
    /// Moves all later work into that sandbox. Called once, before the first vCPU runs.
    pub(crate) fn begin_in(&self, sandbox: Arc<Sandbox>) -> std::io::Result<()> {
        let (calls, waiting) = mpsc::channel::<Work>();
        // The thread ends with the last owner of the channel's other end.
        Builder::new().name("devices".into()).spawn(move || waiting.into_iter().for_each(|work| work()))?;
        let is_first = self.inside.set(Inside { sandbox, calls }).is_ok();
        assert!(is_first, "a machine's devices are in one sandbox");
        Ok(())
    }

    /// Runs `work` on the thread that activates and resets devices, and waits for its result.
    ///
    /// # Panics
    /// If a device's code panicked there: no device can be served any more.
    pub(super) fn call<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let Some(Inside { calls, .. }) = self.inside.get() else { return work() };
        let (done, result) = mpsc::channel();
        // The caller waits below, so the result is received.
        let work = Box::new(move || drop(done.send(work())));
        let is_there = calls.send(work).is_ok();
        result.recv().ok().filter(|_| is_there).expect("the thread that activates devices has not panicked")
    }

    /// Runs `work` like [`DeviceThreads::call`]; `None` where it has no result by `until`. It then continues, and its
    /// result is dropped. Without a sandbox the calling thread does the work, however long that takes.
    pub(super) fn call_within<T: Send + 'static>(
        &self,
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let Some(Inside { calls, .. }) = self.inside.get() else { return Some(work()) };
        let (done, result) = mpsc::channel();
        calls.send(Box::new(move || drop(done.send(work())))).ok()?;
        result.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// Starts a thread that runs `work`. Called on the thread that activates devices.
    ///
    /// # Errors
    /// [`ActivateError::Host`] where the kernel gives no thread.
    pub fn spawn(
        &self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, ActivateError> {
        self.spawn_restricted(name, move |is_restricted| match is_restricted {
            Ok(()) => work(),
            Err(error) => tracing::error!("{name}: cannot restrict the thread, so it does nothing: {error}"),
        })
    }

    /// Like [`DeviceThreads::spawn`], for work that can fail.
    ///
    /// # Errors
    /// [`ActivateError::Host`] where the kernel gives no thread.
    pub(super) fn spawn_fallible(
        &self,
        name: &'static str,
        work: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<JoinHandle<io::Result<()>>, ActivateError> {
        self.spawn_restricted(name, move |is_restricted| is_restricted.map_err(io::Error::other).and_then(|()| work()))
    }

    fn spawn_restricted<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce(Result<(), SandboxError>) -> T + Send + 'static,
    ) -> Result<JoinHandle<T>, ActivateError> {
        let sandbox = self.inside.get().map(|inside| Arc::clone(&inside.sandbox));
        let restricted = move || work(sandbox.map_or(Ok(()), |sandbox| sandbox.enter_thread(ThreadKind::Io)));
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
    fn without_a_sandbox_the_calling_thread_does_the_work() {
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
