//! The process at the other end of a connection, as the kernel knows it. Nothing of that process is read.

use std::io;
use std::os::unix::net::UnixStream;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Identity of a client, as the kernel recorded it when the client connected (unix(7), `SO_PEERCRED`): a client
/// cannot forge it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id of the client.
    pub pid: u32,
    /// User id of the client.
    pub uid: u32,
    /// First group id of the client.
    pub gid: u32,
}

impl Peer {
    /// Peer at the other end of a connection.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn of(stream: &UnixStream) -> io::Result<Peer> {
        let credentials = getsockopt(stream, PeerCredentials)?;
        Ok(Peer { pid: credentials.pid() as u32, uid: credentials.uid(), gid: credentials.gid() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_of_a_pair_of_sockets_is_this_process() {
        let (one, _other) = UnixStream::pair().expect("a pair of sockets");
        assert_eq!(Peer::of(&one).expect("credentials").pid, std::process::id());
    }
}
