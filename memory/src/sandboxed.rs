//! What this crate needs in a process that gives its rights away: a userfaultfd without the right to open one, and a word when
//! one of its threads begins.
//!
//! ```text
//!   keep_userfaultfd ─▶ /dev/userfaultfd stays open ─▶ the process drops its capabilities ─▶ userfaultfds are still to be had
//!   on_thread_start ──▶ every thread of this crate calls it first, with what it is for, before it does anything else
//! ```
//!
//! Both are of the process, as a sandbox is, and are set once: hence the two statics.

use std::io;
use std::sync::OnceLock;

use crate::sys::userfaultfd;

/// What a thread of this crate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadWork {
    /// The manager's loop. The threads in which it copies windows and moves giants begin as it does and are not told of.
    Loop,
    /// Answers the guest's faults: first touches, reserved frames, minor faults, windows that are aside. Started before the loop's
    /// thread, or by it where another policy takes over.
    Faults,
}

type Hook = Box<dyn Fn(ThreadWork) + Send + Sync>;

static ON_START: OnceLock<Hook> = OnceLock::new();

/// Has every thread that this crate starts from now on call `hook` before anything else. What it panics with ends the thread.
///
/// Gives back `false`, and changes nothing, where one was set before.
pub fn on_thread_start(hook: impl Fn(ThreadWork) + Send + Sync + 'static) -> bool {
    ON_START.set(Box::new(hook)).is_ok()
}

/// Opens `/dev/userfaultfd` (Linux 6.1) for good: userfaultfds come from there from now on, for which the kernel asks neither a
/// capability nor a path (Documentation/admin-guide/mm/userfaultfd.rst, "Creating a userfaultfd").
///
/// # Errors
/// The kernel's, where there is no such device or this user may not open it. Nothing has changed then.
pub fn keep_userfaultfd() -> io::Result<()> {
    userfaultfd::keep_device()
}

/// The first thing a thread does.
pub(crate) fn thread_starts(work: ThreadWork) {
    if let Some(hook) = ON_START.get() {
        hook(work);
    }
}
