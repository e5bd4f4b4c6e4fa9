//! `--vsock`: sockets between the guest and programs of the host.

use wideleaf_vmm::devices::virtio::vsock::{GUEST_CID_MAX, GUEST_CID_MIN, HostSocket, HostSocketError, Vsock};

use crate::failure::Failure;
use crate::guardian::path::HeldPath;
use crate::spec::VsockOptions;

/// Makes the socket. Returns the device, its name, and the guard that removes the socket's file at the end.
pub(super) fn open(options: &VsockOptions) -> Result<(Vsock, String, HeldPath), Failure> {
    let VsockOptions { cid, socket } = options;
    if !(GUEST_CID_MIN..=GUEST_CID_MAX).contains(cid) {
        let range = format!("{GUEST_CID_MIN} to {GUEST_CID_MAX}");
        return Err(Failure::Usage(format!("cannot use --vsock: cid={cid} is not a guest's; use {range}")));
    }
    let host = HostSocket::listen(socket).map_err(from_socket_error)?;
    let cannot = |error| Failure::Host(format!("cannot start the remover of --vsock {}: {error}", socket.display()));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A specification need not come from the command line, which refuses these earlier.
    #[test]
    fn an_address_that_no_guest_may_have_is_refused_before_the_socket_is_made() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("socket");
        for cid in [0, 2, u32::MAX] {
            let refused = open(&VsockOptions { cid, socket: socket.clone() }).err().expect("it is refused");
            assert!(matches!(refused, Failure::Usage(_)), "{refused}");
            assert!(!socket.exists());
        }
    }
}
