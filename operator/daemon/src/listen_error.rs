//! Why the daemon does not listen.

use std::io;
use std::net::SocketAddr;

use wideleaf_control::socket_file::SocketFileError;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon has it, there is something else, or the kernel refused.
    #[error(transparent)]
    File(#[from] SocketFileError),
    /// The group does not exist.
    #[error("{0}")]
    NoGroup(String),
    /// The kernel refused.
    #[error("cannot serve metrics at {address}: {source}; give metrics.listen another address, or \"off\"")]
    Metrics {
        /// Where.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
}
