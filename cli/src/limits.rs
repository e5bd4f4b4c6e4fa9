//! The limits that a shell may have set on this process (`setrlimit(2)`): each ends in a message, not in a signal.
//!
//! | limit | without this | with it |
//! |---|---|---|
//! | `ulimit -s`, the stack | aborted in the parser of the command line | raised where that is allowed, else refused |
//! | `ulimit -f`, the size of a file | killed by `SIGXFSZ`, a temporary file is left | writing fails with `EFBIG`, and nothing is left |

use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use signal_hook::consts::SIGXFSZ;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::{kib, mib};

use crate::failure::Failure;

/// The least stack that everything ran on was 128 KiB; twice that is asked for.
const STACK_MIN: Bytes = kib(256);

/// The kernel's own default.
const STACK_USUAL: Bytes = mib(8);

/// Raises what is too low, and takes over the signal of what is not.
///
/// # Errors
/// [`Failure::Host`] where the stack is too small and may not grow.
pub fn prepare() -> Result<(), Failure> {
    // A handler, and not `SIG_IGN`, which programs that are started from here would inherit. Where the kernel refuses
    // it, all is as it was.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    // Of the first thread alone, and it holds at its next page (`getrlimit(2)`).
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_STACK) else { return Ok(()) };
    if soft >= STACK_MIN.get() {
        return Ok(());
    }
    // Root may raise both.
    let wanted = STACK_USUAL.get();
    if setrlimit(Resource::RLIMIT_STACK, wanted.min(hard).max(soft), hard).is_ok()
        && wanted.min(hard) >= STACK_MIN.get()
        || setrlimit(Resource::RLIMIT_STACK, wanted, hard.max(wanted)).is_ok()
    {
        return Ok(());
    }
    Err(Failure::Host(format!(
        "cannot run on a stack of {}: it needs {STACK_MIN}; do `ulimit -s 8192` first",
        Bytes::new(soft)
    )))
}
