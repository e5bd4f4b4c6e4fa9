//! Why a kernel was not recorded.

use std::io;

use wideleaf_trace::TraceError;

/// What went wrong, in one line.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The kernel refuses its parameters.
    #[error("{0}")]
    Parameters(String),
    /// Fewer iterations were asked of a kernel that has none.
    #[error(
        "the kernel has no iterations that could be left out; make it shorter with its parameters, or with a limit"
    )]
    NoIterations,
    /// The parameters are in seconds.
    #[error(
        "with these parameters the kernel goes by time, and a recording has none: give it a count instead, like rounds= or passes="
    )]
    ByTime,
    /// The phase that was asked for never came.
    #[error("the kernel has no phase {0:?}; record all of them, and `wideleaf trace info` names them")]
    NoPhase(String),
    /// The process cannot be started.
    #[error("cannot start the kernel's process: {0}")]
    Start(io::Error),
    /// The host has not so much memory.
    #[error("there is no memory for the kernel; take a smaller problem")]
    NoMemory,
    /// The kernel gave up.
    #[error("the kernel ended with status {status}: {message}")]
    KernelFailed {
        /// The process's exit status.
        status: i32,
        /// What it said last.
        message: String,
    },
    /// The kernel's own verification failed.
    #[error("the kernel's result is wrong: its verification failed")]
    Wrong,
    /// Somebody ended the process.
    #[error("the kernel's process was ended by signal {0}")]
    Killed(i32),
    /// What the process sends is not what its program sends.
    #[error("the kernel's process sends something else than its accesses")]
    Garbled,
    /// The connection to the process broke.
    #[error("cannot read from the kernel's process: {0}")]
    Read(io::Error),
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Whoever watched wanted no more of it.
    #[error("interrupted")]
    Interrupted,
}
