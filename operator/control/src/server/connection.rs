//! One client: bytes in, a line, bytes out.
//!
//! ```text
//!              a whole line              a reply               all written
//!   Reading ────────────────▶ Working ────────────▶ Writing ────────────────▶ Reading
//!      │ end, error, too slow                          │ the last one: too long, refused
//!      ▼                                               ▼
//!   closed                                           closed
//! ```

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::client::one_line;
use crate::passed_files;
use crate::peer::Peer;
use crate::protocol::{Envelope, LINE_BYTES_MAX, Reply};

/// Upper bound on a request, in bytes. The longest is a VM's view, some 100 KiB for a VM of a thousand pieces of
/// RAM. (A reply may be longer, for example a map of windows.)
pub const REQUEST_BYTES_MAX: usize = 1 << 20;

const _: () = assert!(REQUEST_BYTES_MAX <= LINE_BYTES_MAX, "a request is a line");

/// Time that a line, once begun, and a reply may take: both are a few packets within one host.
const LINE_TIME_MAX: Duration = Duration::from_secs(5);

/// Time that a client may be silent between two requests: `top` refreshes more often than once a minute.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Time that a registered VM may be silent. It reports every second: one that misses five reports hangs,
/// or is stopped.
const REGISTERED_SILENCE_MAX: Duration = Duration::from_secs(5);

/// Bytes read at once, more than in nearly every request.
const READ_BYTES: usize = 16 << 10;

/// One connection to a client.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    peer: Peer,
    phase: Phase,
    input: Vec<u8>,
    /// Bytes at the start of `input` that have no end of a line among them.
    searched: usize,
    /// Files that came with `input`; `None` if the server takes none.
    files: Option<Vec<OwnedFd>>,
    since: Instant,
    is_registered: bool,
}

#[derive(Debug)]
enum Phase {
    Reading,
    Working,
    Writing { reply: Vec<u8>, written: usize, is_last: bool },
}

/// Result of one step.
#[derive(Debug)]
pub(super) enum Progress {
    /// Nothing to do until the socket is ready again.
    Waiting,
    /// A line to be answered, and the files that came with it.
    Line(Vec<u8>, Vec<OwnedFd>),
    /// The connection is over.
    Closed,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, peer: Peer, takes_files: bool) -> Connection {
        Connection {
            stream,
            peer,
            phase: Phase::Reading,
            input: Vec::new(),
            searched: 0,
            files: takes_files.then(Vec::new),
            since: Instant::now(),
            is_registered: false,
        }
    }

    pub(super) fn is_registered(&self) -> bool {
        self.is_registered
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Events that the connection waits for; `None` while its request is being answered.
    pub(super) fn interest(&self) -> Option<PollFlags> {
        match self.phase {
            Phase::Reading => Some(PollFlags::POLLIN),
            Phase::Working => None,
            Phase::Writing { .. } => Some(PollFlags::POLLOUT),
        }
    }

    /// Time at which the connection has taken too long.
    pub(super) fn deadline(&self) -> Instant {
        let allowed = match self.phase {
            Phase::Reading if self.input.is_empty() && self.is_registered => REGISTERED_SILENCE_MAX,
            Phase::Reading if self.input.is_empty() => SILENCE_MAX,
            _ => LINE_TIME_MAX,
        };
        self.since + allowed
    }

    /// Starts to write a reply.
    pub(super) fn reply(&mut self, reply: Vec<u8>, is_registration: bool) {
        self.is_registered |= is_registration;
        self.enter(Phase::Writing { reply, written: 0, is_last: false });
    }

    /// Starts to write the last reply of the connection.
    pub(super) fn refuse(&mut self, why: &str) {
        let reply = encode(&Reply::<()>::Error(why.to_owned()));
        self.enter(Phase::Writing { reply, written: 0, is_last: true });
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.since = Instant::now();
    }

    /// Goes as far as possible without waiting. It reads at most once, so that a client that sends much does not
    /// delay the others.
    pub(super) fn advance(&mut self) -> Progress {
        if let Phase::Writing { .. } = self.phase
            && let Some(progress) = self.write()
        {
            return progress;
        }
        match self.phase {
            Phase::Reading => self.read(),
            _ => Progress::Waiting,
        }
    }

    /// `None` once all is written and the next line may be read.
    fn write(&mut self) -> Option<Progress> {
        let Phase::Writing { reply, written, is_last } = &mut self.phase else { return None };
        while *written < reply.len() {
            match (&self.stream).write(&reply[*written..]) {
                Ok(0) => return Some(Progress::Closed),
                Ok(n) => *written += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(Progress::Waiting),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Some(Progress::Closed),
            }
        }
        if *is_last {
            return Some(Progress::Closed);
        }
        self.enter(Phase::Reading);
        None
    }

    fn read(&mut self) -> Progress {
        if let Some(progress) = self.take_line() {
            return progress;
        }
        let mut buffer = [0; READ_BYTES];
        let received = match &mut self.files {
            Some(files) => passed_files::receive(&self.stream, &mut buffer, files),
            None => (&self.stream).read(&mut buffer),
        };
        let n = match received {
            Ok(0) => return Progress::Closed,
            Ok(n) => n,
            Err(error) if is_for_later(&error) => return Progress::Waiting,
            Err(_) => return Progress::Closed,
        };
        if self.input.is_empty() {
            self.since = Instant::now();
        }
        self.input.extend_from_slice(&buffer[..n]);
        if self.files.as_ref().is_some_and(|files| files.len() > passed_files::FILES_MAX) {
            return self.refused(&format!("a request may have at most {} files", passed_files::FILES_MAX));
        }
        match self.take_line() {
            Some(progress) => progress,
            None if self.input.len() > REQUEST_BYTES_MAX => {
                self.refused(&format!("the request is longer than {REQUEST_BYTES_MAX} bytes"))
            }
            None => Progress::Waiting,
        }
    }

    fn refused(&mut self, why: &str) -> Progress {
        self.refuse(why);
        self.write().unwrap_or(Progress::Closed)
    }

    /// First complete line of the input, without its end, and the files that came until then.
    fn take_line(&mut self) -> Option<Progress> {
        // A request in many pieces would otherwise be searched from its start at each of them.
        let searched = std::mem::replace(&mut self.searched, self.input.len());
        let end = searched + self.input[searched..].iter().position(|byte| *byte == b'\n')?;
        self.searched = 0;
        let rest = self.input.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.input, rest);
        line.pop();
        self.enter(Phase::Working);
        Some(Progress::Line(line, self.files.as_mut().map(std::mem::take).unwrap_or_default()))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Takes the bytes that were written to wake this thread. Bytes beyond one read wake it again.
pub(super) fn drain(mut woken: &UnixStream) {
    let _ = woken.read(&mut [0; 64]);
}

/// A reply as its line. A refusal is always one line, whatever words of the client it contains.
pub(super) fn encode<A: Serialize>(reply: &Reply<A>) -> Vec<u8> {
    let line = match reply {
        Reply::Error(why) => serde_json::to_vec(&Reply::<()>::Error(one_line(why))),
        Reply::Unsaved(why) => serde_json::to_vec(&Reply::<()>::Unsaved(one_line(why))),
        reply => serde_json::to_vec(reply),
    };
    let line = line.ok().filter(|line| line.len() < LINE_BYTES_MAX);
    let mut line = line.unwrap_or_else(|| br#"{"error":"the reply is longer than a line may be"}"#.to_vec());
    line.push(b'\n');
    line
}

/// The version alone: its meaning is the same in all versions.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// A protocol of lines: the program that speaks it, and the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// Program that answers, in words.
    pub server: &'static str,
    /// The only version that it answers.
    pub version: u32,
}

/// Decodes the request in a line.
///
/// # Errors
/// One line: the request has another version, or is malformed.
pub fn decode<R: DeserializeOwned>(line: &[u8], dialect: Dialect) -> Result<R, String> {
    let Dialect { server, version: ours } = dialect;
    let Version { version } = serde_json::from_slice(line).map_err(|error| {
        format!("cannot read the request: {}; write a line like {{\"version\":{ours},\"request\":…}}", words(&error))
    })?;
    if version != ours {
        return Err(format!("{server} speaks version {ours}, not {version}: use the wideleaf of its release"));
    }
    let envelope: Envelope<R> = serde_json::from_slice(line)
        .map_err(|error| format!("cannot read the request of version {ours}: {}", words(&error)))?;
    Ok(envelope.request)
}

/// The error may repeat words of the line, in which an escape stands for any character.
fn words(error: &serde_json::Error) -> String {
    one_line(&error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Request, VERSION};
    use proptest::prelude::*;

    const DAEMON: Dialect = Dialect { server: "this wideleafd", version: VERSION };

    #[test]
    fn a_line_in_pieces_is_one_line_and_two_lines_are_two() {
        let (here, there) = UnixStream::pair().expect("a pair of sockets");
        here.set_nonblocking(true).expect("nonblocking");
        let mut connection = Connection::new(here, Peer { pid: 1, uid: 0, gid: 0 }, false);
        (&there).write_all(b"one").expect("written");
        assert!(matches!(connection.advance(), Progress::Waiting));
        assert_eq!(connection.searched, 3, "they are not searched again");
        (&there).write_all(b"\ntwo\n").expect("written");
        assert!(matches!(connection.advance(), Progress::Line(line, _) if line == b"one"));
        assert!(matches!(connection.advance(), Progress::Waiting)); // one at a time
        connection.reply(b"1\n".to_vec(), false);
        assert!(matches!(connection.advance(), Progress::Line(line, _) if line == b"two"));
        drop(there);
        connection.reply(b"2\n".to_vec(), false);
        assert!(matches!(connection.advance(), Progress::Closed));
    }

    #[test]
    fn a_registered_client_may_be_silent_for_a_shorter_time() {
        let (here, _there) = UnixStream::pair().expect("a pair of sockets");
        here.set_nonblocking(true).expect("nonblocking");
        let mut connection = Connection::new(here, Peer { pid: 1, uid: 0, gid: 0 }, false);
        assert_eq!(connection.deadline() - connection.since, SILENCE_MAX);
        connection.reply(b"limits\n".to_vec(), true);
        assert!(matches!(connection.advance(), Progress::Waiting));
        assert_eq!(connection.deadline() - connection.since, REGISTERED_SILENCE_MAX);
    }

    #[test]
    fn a_reason_is_one_line_whatever_it_repeats() {
        let why = decode::<Request>(br#"{"version":1,"request":"a\nb\u001b[2J"}"#, DAEMON)
            .expect_err("there is no such request");
        assert!(why.contains("`a b [2J`") && !why.contains(char::is_control), "{why:?}");
        let reply = encode(&Reply::<()>::Error("there is no VM a\nb".to_owned()));
        assert_eq!(reply, b"{\"error\":\"there is no VM a b\"}\n");
    }

    proptest! {
        #[test]
        fn any_line_is_a_request_or_a_reason(line in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(!decode::<Request>(&line, DAEMON).is_err_and(|why| why.contains('\n')));
        }
    }
}
