//! Places where the two sides of a migration meet: `unix:PATH`, `tcp:HOST:PORT`, or `stdio` for a pair of pipes.

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_control::socket_file::SocketFile;

use crate::failure::Failure;
use crate::interrupts::Interrupts;

/// Time limit of a connection to one address of a host.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(10);
/// Mode of a socket file: only the user of the target may connect.
const MODE: u32 = 0o600;

/// A place where the two sides meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket, at which the target listens.
    Unix(PathBuf),
    /// Host and port, at which the target listens.
    Tcp(String),
    /// Standard input and output of both programs, joined from outside.
    Stdio,
}

/// No such address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no address of a migration: write unix:PATH, tcp:HOST:PORT or stdio")]
pub struct AddressError;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        match text.split_once(':') {
            None if text == "stdio" => Ok(Address::Stdio),
            Some(("unix", path)) if !path.is_empty() => Ok(Address::Unix(path.into())),
            Some(("tcp", place)) => {
                let port = place.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
                let is_port = port.is_some_and(|port| port.parse::<u16>().is_ok());
                if is_port { Ok(Address::Tcp(place.to_owned())) } else { Err(AddressError) }
            }
            _ => Err(AddressError),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(place) => write!(f, "tcp:{place}"),
            Address::Stdio => f.write_str("stdio"),
        }
    }
}

/// The two directions of a connection; of a socket, two descriptors of the same.
#[derive(Debug)]
pub struct ConnectionEnds {
    /// Descriptor to read from.
    pub reader: OwnedFd,
    /// Descriptor to write to.
    pub writer: OwnedFd,
}

impl ConnectionEnds {
    fn of(socket: impl Into<OwnedFd>) -> io::Result<ConnectionEnds> {
        let reader = socket.into();
        Ok(ConnectionEnds { writer: reader.try_clone()?, reader })
    }

    fn of_this_program() -> io::Result<ConnectionEnds> {
        let (input, output) = (io::stdin(), io::stdout());
        Ok(ConnectionEnds { reader: input.as_fd().try_clone_to_owned()?, writer: output.as_fd().try_clone_to_owned()? })
    }

    /// Lets no read and no write wait: the VM's process looks at a request to cancel in between.
    fn without_waits(self) -> io::Result<ConnectionEnds> {
        for end in [&self.reader, &self.writer] {
            let flags = OFlag::from_bits_retain(fcntl(end, FcntlArg::F_GETFL)?);
            fcntl(end, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        Ok(self)
    }
}

/// Files that a client passes beside its request.
pub struct PassedConnection {
    /// Connection to the other side.
    pub ends: ConnectionEnds,
    /// Reading end of a pipe that tells when the client has gone.
    pub client: File,
}

impl PassedConnection {
    /// Of these files: reading end, writing end, and a pipe's reading end.
    ///
    /// # Errors
    /// One line without its beginning.
    pub fn of(files: Vec<OwnedFd>) -> Result<PassedConnection, &'static str> {
        let [reader, writer, client] =
            <[OwnedFd; 3]>::try_from(files).map_err(|_| "its connection is missing beside the request")?;
        Ok(PassedConnection { ends: ConnectionEnds { reader, writer }, client: File::from(client) })
    }
}

impl Address {
    /// Whether it takes standard output, so that no result may be written there.
    pub fn takes_standard_output(&self) -> bool {
        *self == Address::Stdio
    }

    /// Connects to the target that waits there; `remedy` is what to do if none does.
    ///
    /// # Errors
    /// [`Failure::Host`] if none waits there, [`Failure::Usage`] for a terminal.
    pub fn connect(&self, remedy: &str) -> Result<ConnectionEnds, Failure> {
        let cannot = |error: io::Error| Failure::Host(format!("cannot connect to {self}: {error}; {remedy}"));
        let ends = match self {
            Address::Unix(path) => UnixStream::connect(path).and_then(ConnectionEnds::of),
            Address::Tcp(place) => connect_tcp(place).and_then(ConnectionEnds::of),
            Address::Stdio => {
                self.refuse_terminal()?;
                ConnectionEnds::of_this_program()
            }
        };
        ends.and_then(ConnectionEnds::without_waits).map_err(cannot)
    }

    /// Waits for the source, and takes one connection. `on_wait` is told where it waits. The socket's file is removed
    /// afterwards.
    ///
    /// # Errors
    /// [`Failure`] if it cannot listen there, or a signal comes.
    pub fn accept(&self, interrupts: &Interrupts, on_wait: &dyn Fn(&str)) -> Result<(ConnectionEnds, String), Failure> {
        self.listen(on_wait)?.accept(interrupts)
    }

    /// Listens there; `on_wait` is told where that is.
    ///
    /// # Errors
    /// [`Failure`] if it cannot listen there.
    pub(super) fn listen(&self, on_wait: &dyn Fn(&str)) -> Result<Listening<'_>, Failure> {
        let listener = match self {
            Address::Unix(path) => {
                let (owner, remedy) = ("another process", "name another path");
                let file = SocketFile { path, mode: MODE, gid: None, makes_folder: false, owner, remedy };
                let listener = file.bind().map_err(|error| Failure::Host(error.to_string()))?;
                on_wait(&self.to_string());
                Listener::Unix(listener)
            }
            Address::Tcp(place) => {
                let bound = TcpListener::bind(place).and_then(|listener| Ok((listener.local_addr()?, listener)));
                let (place, listener) = bound.map_err(|error| self.cannot_wait(&error))?;
                on_wait(&format!("tcp:{place}"));
                Listener::Tcp(listener)
            }
            Address::Stdio => {
                self.refuse_terminal()?;
                on_wait("stdio");
                Listener::Stdio
            }
        };
        Ok(Listening { address: self, listener })
    }

    fn cannot_wait(&self, error: &io::Error) -> Failure {
        Failure::Host(format!("cannot wait for a VM at {self}: {error}"))
    }

    fn refuse_terminal(&self) -> Result<(), Failure> {
        if io::stdin().is_terminal() || io::stdout().is_terminal() {
            return Err(Failure::Usage(
                "cannot migrate over stdio: standard input or output is a terminal; join them to the other side's by \
                 two pipes"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

/// Where a target waits. Dropped, the socket's file is removed.
#[derive(Debug)]
pub(super) struct Listening<'a> {
    address: &'a Address,
    listener: Listener,
}

#[derive(Debug)]
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
    Stdio,
}

impl Listening<'_> {
    /// Waits for a connection. Returns it with the name of the other side.
    ///
    /// # Errors
    /// [`Failure`] of the kernel, or if a signal comes.
    pub fn accept(&self, interrupts: &Interrupts) -> Result<(ConnectionEnds, String), Failure> {
        let cannot = |error: io::Error| self.address.cannot_wait(&error);
        match &self.listener {
            Listener::Unix(listener) => {
                wait(listener.as_fd(), interrupts)?;
                let (stream, _) = listener.accept().map_err(cannot)?;
                Ok((ConnectionEnds::of(stream).map_err(cannot)?, self.address.to_string()))
            }
            Listener::Tcp(listener) => {
                wait(listener.as_fd(), interrupts)?;
                let (stream, peer) = listener.accept().map_err(cannot)?;
                stream.set_nodelay(true).map_err(cannot)?;
                Ok((ConnectionEnds::of(stream).map_err(cannot)?, format!("tcp:{peer}")))
            }
            Listener::Stdio => Ok((ConnectionEnds::of_this_program().map_err(cannot)?, "stdio".to_owned())),
        }
    }

    /// Whether another connection can follow one that is from no source.
    pub fn has_others(&self) -> bool {
        !matches!(self.listener, Listener::Stdio)
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        if let Address::Unix(path) = self.address {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn connect_tcp(place: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in place.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_WAIT_MAX) {
            Ok(stream) => {
                // The last messages are short, and the guest stands still until they arrive.
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Waits for a connection, or a signal.
fn wait(listener: BorrowedFd<'_>, interrupts: &Interrupts) -> Result<(), Failure> {
    loop {
        interrupts.check()?;
        let mut ends = [PollFd::new(listener, PollFlags::POLLIN)];
        if poll(&mut ends, PollTimeout::from(50_u8)).is_ok_and(|ready| ready > 0) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_read_and_shown_is_the_same() {
        for text in ["unix:/run/a:b.sock", "unix:vm.sock", "tcp:host:4444", "tcp:[::1]:1", "stdio"] {
            assert_eq!(text.parse::<Address>().map(|address| address.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in
            ["", "unix:", "tcp:", "tcp:host", "tcp::1", "tcp:host:port", "tcp:host:65536", "stdio:", "/a", "fd:3"]
        {
            assert_eq!(text.parse::<Address>(), Err(AddressError), "{text:?}");
        }
    }
}
