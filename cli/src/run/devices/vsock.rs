//! `--vsock`: sockets between the guest and programs of the host.

use std::path::PathBuf;

use wideleaf_vmm::devices::virtio::vsock::{GUEST_CID_MAX, GUEST_CID_MIN, HostSocket, HostSocketError, Vsock};

use crate::failure::Failure;
use crate::held_path::HeldPath;

/// Settings of the sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockOptions {
    /// Context id (address) of the guest.
    pub cid: u32,
    /// Socket that programs of the host connect to.
    pub socket: PathBuf,
}

/// Parses `cid=N,socket=PATH`. The path is last, so that it may contain commas.
pub(super) fn parse(text: &str) -> Result<VsockOptions, String> {
    let form = "write cid=N,socket=PATH";
    let (cid, socket) = text.strip_prefix("cid=").and_then(|rest| rest.split_once(",socket=")).ok_or(form)?;
    let number = cid.parse().ok().filter(|cid| (GUEST_CID_MIN..=GUEST_CID_MAX).contains(cid));
    let cid = number.ok_or_else(|| format!("cid={cid} is not a guest's: use {GUEST_CID_MIN} to {GUEST_CID_MAX}"))?;
    if socket.is_empty() {
        return Err(form.to_owned());
    }
    Ok(VsockOptions { cid, socket: socket.into() })
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_an_address_and_a_path() {
        assert_eq!(parse("cid=3,socket=/run/a,b"), Ok(VsockOptions { cid: 3, socket: "/run/a,b".into() }));
        for bad in [
            "",
            "cid=3",
            "cid=3,socket=",
            "socket=/a,cid=3",
            "cid=2,socket=/a",
            "cid=4294967295,socket=/a",
            "cid=x,socket=/a",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
