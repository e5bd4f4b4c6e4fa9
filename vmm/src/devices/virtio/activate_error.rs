//! The error of a device that cannot begin to serve its queues. Threads, registers and a restore return it.

/// The reasons why a device cannot start its work.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver did not set up a queue that the device needs.
    #[error("the driver did not set up queue {0}")]
    NoQueue(usize),
    /// The host did not give a thread, an event or a file descriptor.
    #[error("{what}: {source}")]
    Host {
        /// Name of the failed request.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
}
