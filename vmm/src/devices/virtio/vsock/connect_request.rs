//! The first message of a program of the host: `CONNECT PORT` and a line end. The answer is `OK PORT`, with the
//! host's port, when the guest has accepted the connection. If it does not, the socket is closed.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;

/// Length of the longest line in bytes: `CONNECT 4294967295` and its end, a line feed or a carriage return before one.
const LINE_BYTES_MAX: usize = 20;

/// A program that has not yet completed its line.
#[derive(Debug)]
pub(super) struct ConnectRequest {
    stream: UnixStream,
    line: Vec<u8>,
}

/// The state of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestState {
    /// More bytes have to come.
    NotYet,
    /// It asks for a connection to this port of the guest.
    Port(u32),
    /// It has closed the socket, or sent something else.
    Never,
}

impl ConnectRequest {
    pub(super) fn new(stream: UnixStream) -> ConnectRequest {
        ConnectRequest { stream, line: Vec::with_capacity(LINE_BYTES_MAX) }
    }

    /// Reads on, but no byte behind the line's end: those belong to the guest.
    pub(super) fn go_on(&mut self) -> RequestState {
        while self.line.len() < LINE_BYTES_MAX {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(1) if byte == *b"\n" => return port_in(&self.line).map_or(RequestState::Never, RequestState::Port),
                Ok(1) => self.line.push(byte[0]),
                Ok(_) => return RequestState::Never,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return RequestState::NotYet,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return RequestState::Never,
            }
        }
        RequestState::Never
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
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_line_names_a_port_or_nothing() {
        assert_eq!(port_in(b"CONNECT 1024"), Some(1024));
        assert_eq!(port_in(b"CONNECT 4294967295\r"), Some(u32::MAX));
        for line in ["CONNECT", "CONNECT ", "connect 1", "CONNECT 4294967296", "CONNECT +1", "CONNECT 1 2", "\u{ff}"] {
            assert_eq!(port_in(line.as_bytes()), None, "{line}");
        }
    }
    #[test]
    fn the_longest_line_is_read_whole_and_a_longer_one_never_ends() {
        let state_after = |line: &str| {
            let (mut program, ours) = UnixStream::pair().unwrap();
            program.write_all(line.as_bytes()).unwrap();
            ConnectRequest::new(ours).go_on()
        };
        for end in ["\n", "\r\n"] {
            assert_eq!(state_after(&format!("CONNECT 4294967295{end}")), RequestState::Port(u32::MAX), "{end:?}");
        }
        assert_eq!(state_after("CONNECT 42949672950\r\n"), RequestState::Never);
    }
}
