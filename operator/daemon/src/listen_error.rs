//! Reasons why the daemon does not listen.

use std::io;
use std::net::SocketAddr;

use wideleaf_control::socket_file::SocketFileError;

/// Reason for a missing socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon listens there, another kind of file is there, or the kernel refused.
    #[error(transparent)]
    File(#[from] SocketFileError),
    /// The group does not exist.
    #[error("{0}")]
    NoGroup(String),
    /// The kernel refused the metrics' address.
    #[error("cannot serve metrics at {address}: {source}; set metrics.listen to another address, or \"off\"")]
    Metrics {
        /// Address of the endpoint.
        address: SocketAddr,
        /// Error from the kernel.
        source: io::Error,
    },
}
