//! `--vsock`: sockets between the guest and programs of the host.

use wideleaf_vmm::devices::virtio::vsock::{HostSocket, HostSocketError, Vsock};

use crate::failure::Failure;
use crate::guardian::path::HeldPath;
use crate::spec::VsockOptions;

/// Makes the socket. Returns the device, its name, and the guard that removes the socket's file at the end.
pub(super) fn open(options: &VsockOptions) -> Result<(Vsock, String, HeldPath), Failure> {
    let VsockOptions { cid, socket } = options;
    let host = HostSocket::listen(socket).map_err(from_socket_error)?;
    let cannot = |error| Failure::Host(format!("--vsock: cannot start the remover of {}: {error}", socket.display()));
    let held = HeldPath::hold(socket).map_err(cannot)?;
    Ok((Vsock::new(*cid, host), format!("vsock {cid} {}", socket.display()), held))
}

fn from_socket_error(error: HostSocketError) -> Failure {
    let text = format!("cannot use --vsock: {error}");
    match error {
        HostSocketError::NoSocket(_) => Failure::Usage(text),
        HostSocketError::Taken(_) | HostSocketError::Host { .. } => Failure::Host(text),
    }
}
