//! Limits that a shell may have set on this process (`setrlimit(2)`). Each of them causes a message instead of a
//! signal.
//!
//! | limit | without this | with it |
//! |---|---|---|
//! | `ulimit -s`, the stack | aborted in the parser of the command line | raised if that is allowed, else refused |
//! | `ulimit -f`, the size of a file | killed by `SIGXFSZ`, a temporary file is left | writing fails with `EFBIG`, and nothing is left |

use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use signal_hook::consts::SIGXFSZ;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::{kib, mib};

use wideleaf_run::failure::Failure;

/// Twice the smallest stack on which everything ran, 128 KiB.
const STACK_MIN: Bytes = kib(256);

/// The kernel's own default.
const STACK_USUAL: Bytes = mib(8);

/// Raises limits that are too low, and handles the signal of those that cannot be raised.
///
/// # Errors
/// [`Failure::Host`] if the stack is too small and must not grow.
pub fn prepare() -> Result<(), Failure> {
    // A handler, not `SIG_IGN`, which child processes would inherit. If the kernel refuses it, nothing changes.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    // This limit applies to the first thread only, from its next page on (`getrlimit(2)`).
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_STACK) else { return Ok(()) };
    if soft >= STACK_MIN.get() {
        return Ok(());
    }
    // Root may raise both the soft and the hard limit.
    let wanted = STACK_USUAL.get();
    if setrlimit(Resource::RLIMIT_STACK, wanted.min(hard).max(soft), hard).is_ok()
        && wanted.min(hard) >= STACK_MIN.get()
        || setrlimit(Resource::RLIMIT_STACK, wanted, hard.max(wanted)).is_ok()
    {
        return Ok(());
    }
    Err(Failure::Host(format!(
        "cannot run on a stack of {}: it needs {STACK_MIN}; run `ulimit -s 8192` first",
        Bytes::new(soft)
    )))
}
