//! What a program of the host says first: `CONNECT PORT` and the end of the line. It is answered with `OK PORT`, its own, when the guest has
//! taken the connection; where nothing comes of it, the socket is closed.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;

/// Bytes of the longest line: `CONNECT 4294967295` and its end.
const LINE_BYTES_MAX: usize = 19;

/// A program that has not said all of it yet.
#[derive(Debug)]
pub(super) struct Greeting {
    stream: UnixStream,
    line: Vec<u8>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeted {
    /// More is to come.
    NotYet,
    /// It wants a connection to this port of the guest.
    Port(u32),
    /// It has gone, or speaks something else.
    Never,
}

impl Greeting {
    pub(super) fn new(stream: UnixStream) -> Greeting {
        Greeting { stream, line: Vec::with_capacity(LINE_BYTES_MAX) }
    }

    /// Reads on, and not a byte behind the end of the line: that is the guest's.
    pub(super) fn go_on(&mut self) -> Greeted {
        while self.line.len() < LINE_BYTES_MAX {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(1) if byte == *b"\n" => return port_in(&self.line).map_or(Greeted::Never, Greeted::Port),
                Ok(1) => self.line.push(byte[0]),
                Ok(_) => return Greeted::Never,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Greeted::NotYet,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Greeted::Never,
            }
        }
        Greeted::Never
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }
}

fn port_in(line: &[u8]) -> Option<u32> {
    let line = std::str::from_utf8(line).ok()?;
    let line = line.strip_suffix('\r').unwrap_or(line);
    let port = line.strip_prefix("CONNECT ")?;
    port.bytes().all(|digit| digit.is_ascii_digit()).then(|| port.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_a_port_or_nothing() {
        assert_eq!(port_in(b"CONNECT 1024"), Some(1024));
        assert_eq!(port_in(b"CONNECT 4294967295\r"), Some(u32::MAX));
        for line in ["CONNECT", "CONNECT ", "connect 1", "CONNECT 4294967296", "CONNECT +1", "CONNECT 1 2", "\u{ff}"] {
            assert_eq!(port_in(line.as_bytes()), None, "{line}");
        }
    }
}
