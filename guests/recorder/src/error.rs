//! Reasons why a kernel was not recorded, each as one line.

use std::io;

use wideleaf_trace::TraceError;

/// An error, as one line.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The kernel rejects its parameters.
    #[error("{0}")]
    Parameters(String),
    /// A limit of iterations was given for a kernel without iterations.
    #[error(
        "cannot limit the iterations: the kernel has no iterations; shorten it with its parameters or limit the bytes"
    )]
    NoIterations,
    /// The parameters are in seconds.
    #[error("cannot record a kernel that goes by time; give it a count instead, such as rounds= or passes=")]
    ByTime,
    /// The requested phase never came.
    #[error("the kernel has no phase {0:?}; record all phases and list them with `wideleaf-lab trace info`")]
    NoPhase(String),
    /// The process cannot be started.
    #[error("cannot start the kernel's process: {0}")]
    Start(io::Error),
    /// The host does not have enough memory.
    #[error("cannot allocate the kernel's memory; choose a smaller problem")]
    NoMemory,
    /// The kernel gave up.
    #[error("the kernel ended with status {status}: {message}")]
    KernelFailed {
        /// Exit status of the process.
        status: i32,
        /// Its last message.
        message: String,
    },
    /// The kernel's own verification failed.
    #[error("the kernel's result is wrong: its verification failed")]
    Wrong,
    /// A signal ended the process.
    #[error("the kernel's process was ended by signal {0}")]
    Killed(i32),
    /// The process sends invalid data.
    #[error("the kernel's process sends invalid data instead of its accesses")]
    Garbled,
    /// The connection to the process broke.
    #[error("cannot read from the kernel's process: {0}")]
    Read(io::Error),
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The caller's `watch` ended the recording.
    #[error("interrupted")]
    Interrupted,
}
