//! Support for a process that gives up its rights: a userfaultfd without the right to open one, and a callback at the
//! start of each thread.
//!
//! ```text
//!   keep_userfaultfd ─▶ /dev/userfaultfd stays open ─▶ capabilities are dropped ─▶ userfaultfds are still available
//!   on_thread_start ──▶ every thread of this crate calls it before all other work, with the kind of its work
//! ```
//!
//! Both belong to the process, as a sandbox does, and are set once: hence the two statics.

use std::io;
use std::sync::OnceLock;

use crate::sys::userfaultfd;

/// Kinds of work of this crate's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadWork {
    /// The manager's loop. The threads that copy windows, move giants and wake it inherit its rights and do not call
    /// the hook.
    Loop,
    /// Answers the guest's faults: first touches, reserved frames, minor faults, windows that are aside, restores.
    /// Started before the loop's thread, or by that thread when another policy takes over.
    Faults,
}

type Hook = Box<dyn Fn(ThreadWork) + Send + Sync>;

static ON_START: OnceLock<Hook> = OnceLock::new();

/// Makes every thread that this crate starts from now on call `hook` first. A panic of the hook ends the thread.
///
/// Returns `false`, and changes nothing, if a hook was set before.
pub fn on_thread_start(hook: impl Fn(ThreadWork) + Send + Sync + 'static) -> bool {
    ON_START.set(Box::new(hook)).is_ok()
}

/// Opens `/dev/userfaultfd` (Linux 6.1) for good: userfaultfds come from it from now on, for which the kernel
/// requires neither a capability nor a path (Documentation/admin-guide/mm/userfaultfd.rst, "Creating a userfaultfd").
///
/// # Errors
/// Error of the kernel if there is no such device or this user may not open it. Nothing has changed then.
pub fn keep_userfaultfd() -> io::Result<()> {
    userfaultfd::keep_device()
}

/// Called first by every thread.
pub(crate) fn thread_starts(work: ThreadWork) {
    if let Some(hook) = ON_START.get() {
        hook(work);
    }
}
