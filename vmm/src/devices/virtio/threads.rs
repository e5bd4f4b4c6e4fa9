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
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::activate_error::ActivateError;
use crate::run_loop::RunControl;
use crate::sandbox::{Sandbox, SandboxError, ThreadKind};

type Work = Box<dyn FnOnce() + Send>;

/// Interval in which a thread that waits for a device looks whether its VM ends.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The service: see the module. Without a sandbox the calling thread does the work, unless it must not wait for it.
#[derive(Default)]
pub struct DeviceThreads {
    inside: OnceLock<Inside>,
}

struct Inside {
    sandbox: Arc<Sandbox>,
    control: Arc<RunControl>,
    calls: Sender<Work>,
}

impl DeviceThreads {
    /// Moves all later work into that sandbox, until the VM of `control` ends. Called once, before the first vCPU runs.
    pub(crate) fn begin_in(&self, sandbox: Arc<Sandbox>, control: Arc<RunControl>) -> std::io::Result<()> {
        let (calls, waiting) = mpsc::channel::<Work>();
        // The thread ends with the last owner of the channel's other end.
        Builder::new().name("devices".into()).spawn(move || waiting.into_iter().for_each(|work| work()))?;
        let is_first = self.inside.set(Inside { sandbox, control, calls }).is_ok();
        assert!(is_first, "a machine's devices are in one sandbox");
        Ok(())
    }

    /// Runs `work` on the thread that activates and resets devices, and waits for its result; `None` where the VM ends
    /// before there is one. A disk of which the file hangs keeps that thread for good. Without a sandbox the calling
    /// thread does the work, however long that takes.
    ///
    /// # Panics
    /// If a device's code panicked there: no device can be served any more.
    pub(super) fn call<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let Some(Inside { calls, control, .. }) = self.inside.get() else { return Some(work()) };
        let (done, result) = mpsc::channel();
        // A thread that has gone drops `done`.
        let _ = calls.send(Box::new(move || drop(done.send(work()))));
        loop {
            match result.recv_timeout(LOOK_EVERY) {
                Err(RecvTimeoutError::Timeout) if control.is_stopping() => return None,
                Err(RecvTimeoutError::Timeout) => {}
                result => return Some(result.expect("the thread that activates devices has not panicked")),
            }
        }
    }

    /// Runs `work` like [`DeviceThreads::call`]; `None` where it has no result by `until`. It then continues, and its
    /// result is dropped. Without a sandbox a thread of its own does the work, which may wait for a disk.
    pub(super) fn call_within<T: Send + 'static>(
        &self,
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (done, result) = mpsc::channel();
        let work = move || drop(done.send(work()));
        match self.inside.get() {
            Some(Inside { calls, .. }) => calls.send(Box::new(work)).ok()?,
            None => drop(Builder::new().name("devices".into()).spawn(work).ok()?),
        }
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
    use crate::run_loop::GuestExit;
    use crate::run_loop::control::threadless::control;
    use crate::sandbox::SandboxConfig;

    #[test]
    fn without_a_sandbox_the_calling_thread_does_the_work() {
        let threads = DeviceThreads::default();
        assert_eq!(threads.call(|| std::thread::current().id()), Some(std::thread::current().id()));
        let (said, heard) = mpsc::channel();
        let thread = threads.spawn("disk", move || {
            let name = std::thread::current().name().map(str::to_owned);
            said.send(name).unwrap();
        });
        thread.unwrap().join().unwrap();
        assert_eq!(heard.recv().unwrap().as_deref(), Some("disk"));
    }

    #[test]
    fn at_the_end_of_its_vm_no_thread_waits_for_a_device_that_hangs() {
        let (threads, control) = (DeviceThreads::default(), control(1));
        let sandbox = Arc::new(Sandbox::plan(SandboxConfig::default()).unwrap());
        threads.begin_in(sandbox, Arc::clone(&control)).unwrap();
        let ((begins, begun), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel::<()>());
        let (said, heard) = mpsc::channel();
        std::thread::spawn(move || {
            let hangs = move || {
                begins.send(()).unwrap();
                goes_on.recv().unwrap();
            };
            said.send(threads.call(hangs)).unwrap();
        });
        begun.recv().unwrap();
        control.stop(GuestExit::TimedOut);
        assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok(None));
        go_on.send(()).unwrap();
    }
}
