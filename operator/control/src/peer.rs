//! Who is at the other end of a connection.

use std::io;
use std::os::unix::net::UnixStream;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// As the kernel saw them when they connected (unix(7), `SO_PEERCRED`): nobody can claim to be another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// First group.
    pub gid: u32,
}

impl Peer {
    /// Of a connection.
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
