//! A client of one VM's control socket: one connection, one request, one reply. It waits for a bounded time, and every
//! failure is a line for people.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::client::{ClientError, exchange_with, one_line};
use crate::protocol::{Envelope, Reply};
use crate::socket_file::connect_within;
use crate::vm::{VM_VERSION, VmAnswer, VmRequest};

/// Time that an answer may take. A pause waits up to two seconds for the last vCPU to leave the guest, and one
/// client of several waits for the others.
pub const VM_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time that the answer to a request with files may take: a VM of terabytes is saved at the speed of a disk.
pub const VM_FILES_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Reason for a missing answer.
#[derive(Debug, thiserror::Error)]
pub enum VmClientError {
    /// No VM listens.
    #[error("no VM listens at {}: it has ended, or was started with another --control-socket", path.display())]
    NoVm {
        /// Path of the socket that the client tried.
        path: PathBuf,
    },
    /// The socket belongs to another user.
    #[error("no permission to connect to {}: run as root or as the user that started the VM",
        path.display()
    )]
    NotPermitted {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The reply did not come in time.
    #[error(
        "the VM at {} did not reply within {} s: its process is stopped or busy; continue it, or try again",
        path.display(), timeout.as_secs()
    )]
    Silent {
        /// Path of the socket.
        path: PathBuf,
        /// Time that the client waited.
        timeout: Duration,
    },
    /// The connection ended before the reply did.
    #[error("the VM at {} ended before it replied", path.display())]
    Ended {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The reply is malformed.
    #[error(
        "the program at {} does not speak version {VM_VERSION} of a VM's control socket: {why}; use the wideleaf that \
         started the VM",
        path.display()
    )]
    Malformed {
        /// Path of the socket.
        path: PathBuf,
        /// Mistake in the reply.
        why: String,
    },
    /// The VM refuses, in its own words. It refuses another version of the protocol in this way.
    #[error("{0}")]
    Refused(String),
    /// Any other error.
    #[error("cannot talk to the VM at {}: {source}", path.display())]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// Error from the kernel.
        source: io::Error,
    },
}

/// Sends one request to the VM at `socket`.
///
/// # Errors
/// [`VmClientError`], each a line for people that says what to do.
pub fn ask(socket: &Path, request: VmRequest) -> Result<VmAnswer, VmClientError> {
    ask_with_files(socket, request, &[], VM_ANSWER_TIMEOUT)
}

/// Sends one request with open files, for an answer within `timeout`.
///
/// # Errors
/// Same errors as [`ask`].
pub fn ask_with_files(
    socket: &Path,
    request: VmRequest,
    files: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<VmAnswer, VmClientError> {
    let path = || socket.to_owned();
    let connect_timeout = timeout.min(VM_ANSWER_TIMEOUT);
    let stream = connect_within(socket, Some(connect_timeout)).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => VmClientError::NoVm { path: path() },
        io::ErrorKind::PermissionDenied => VmClientError::NotPermitted { path: path() },
        io::ErrorKind::WouldBlock => VmClientError::Silent { path: path(), timeout: connect_timeout },
        _ => VmClientError::Io { path: path(), source },
    })?;
    let request = serde_json::to_vec(&Envelope::from(request));
    let request = request.map_err(|error| VmClientError::Io { path: path(), source: error.into() })?;
    let reply = exchange_with(&stream, request, files, timeout).map_err(|error| match error {
        ClientError::Silent { timeout } => VmClientError::Silent { path: path(), timeout },
        ClientError::Closed { .. } => VmClientError::Ended { path: path() },
        ClientError::TooLong => VmClientError::Malformed { path: path(), why: "its reply does not end".into() },
        ClientError::Io(source) => VmClientError::Io { path: path(), source },
        other => VmClientError::Malformed { path: path(), why: other.to_string() },
    })?;
    match serde_json::from_slice::<Reply<VmAnswer>>(&reply) {
        Ok(Reply::Ok(answer)) => Ok(*answer),
        Ok(Reply::Error(text) | Reply::Unsaved(text)) => Err(VmClientError::Refused(one_line(&text))),
        Err(error) => Err(VmClientError::Malformed { path: path(), why: one_line(&error.to_string()) }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_client_gives_up_on_a_vm_that_accepts_no_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (_listener, _waiting) = crate::socket_file::full_listener(&path);
        let answer = ask_with_files(&path, VmRequest::Status, &[], Duration::from_millis(20));
        assert!(matches!(answer, Err(VmClientError::Silent { .. })), "{answer:?}");
    }
}
