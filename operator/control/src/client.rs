//! A client of the daemon: one connection, one request, one reply, each a line.
//!
//! ```text
//!   connect ─▶ write the request ─▶ read until the line ends ─▶ Answer
//!      │              │                    │      │
//!      │              └── Silent ──────────┘      └── Closed, TooLong, Malformed, Refused
//!      └── NoDaemon, NotPermitted
//! ```

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::passed_files;
use crate::protocol::{Answer, Envelope, LINE_BYTES_MAX, Reply, Request, VERSION};
use crate::socket_file::connect_within;

/// Time that a question may take. The daemon answers from the survey of its last second, which takes milliseconds.
/// It takes at most three seconds where much of the host hangs or the daemon has just started. The rest is for a
/// host that has many times more work than cores.
pub const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that a change may take. The daemon then inspects the guest, and may send its monitor several questions that
/// take up to a second each.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason for a missing answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens.
    #[error(
        "no wideleafd listens at {}: start it with `wideleafd` or `systemctl start wideleafd`, or name its socket \
         with --socket",
        path.display()
    )]
    NoDaemon {
        /// Path of the socket that the client tried.
        path: PathBuf,
    },
    /// The socket belongs to another user.
    #[error(
        "no permission to connect to {}: run as root or as a member of the group that wideleafd's configuration names",
        path.display()
    )]
    NotPermitted {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The reply did not come in time.
    #[error("wideleafd did not reply within {} s: it is stopped or busy, see its log", timeout.as_secs())]
    Silent {
        /// Time that the client waited.
        timeout: Duration,
    },
    /// The connection ended before the reply did.
    #[error("wideleafd closed the connection after {received} bytes of its reply: see its log")]
    Closed {
        /// Bytes of the reply received until then.
        received: usize,
    },
    /// The reply does not end.
    #[error(
        "cannot read wideleafd's reply: it is longer than {LINE_BYTES_MAX} bytes; install wideleaf and wideleafd of \
         one version, or name its socket with --socket"
    )]
    TooLong,
    /// The reply is malformed.
    #[error(
        "cannot read wideleafd's reply as protocol version {VERSION}: {why}; install wideleaf and wideleafd of one \
         version, or name its socket with --socket"
    )]
    Malformed {
        /// Mistake in the reply.
        why: String,
    },
    /// The daemon refuses, in its own words. It refuses another version of the protocol in this way.
    #[error("wideleafd: {0}")]
    Refused(String),
    /// The daemon has done it but could not save it, in its own words.
    #[error("wideleafd: {0}")]
    Unsaved(String),
    /// Any other error.
    #[error("cannot talk to wideleafd: {0}")]
    Io(#[from] io::Error),
}

/// Sends one request to the daemon at `socket`.
///
/// # Errors
/// [`ClientError`], each a line for people that says what to do.
pub fn ask(socket: &Path, request: Request) -> Result<Answer, ClientError> {
    ask_within(socket, request, None)
}

/// As [`ask`], with a limit on the wait for the reply: `timeout`, or the default for the kind of request.
///
/// # Errors
/// Same errors as [`ask`].
pub fn ask_within(socket: &Path, request: Request, timeout: Option<Duration>) -> Result<Answer, ClientError> {
    let timeout = timeout.unwrap_or_else(|| timeout_of(&request));
    ask_over(connected(socket, timeout)?, request, timeout)
}

/// Connects to the daemon at `socket`, for a client that asks more than once. It waits as long as for a question.
///
/// # Errors
/// [`ClientError`] where the socket does not accept the client.
pub fn connect(socket: &Path) -> Result<UnixStream, ClientError> {
    connected(socket, QUESTION_TIMEOUT)
}

fn connected(socket: &Path, timeout: Duration) -> Result<UnixStream, ClientError> {
    connect_within(socket, Some(timeout)).map_err(|error| not_connected(socket, error, timeout))
}

/// As [`ask_within`] over an existing connection, which serves one request. A client with several requests sends
/// them one at a time, each over a copy of the connection.
///
/// # Errors
/// Same errors as [`ask`].
pub fn ask_over(stream: UnixStream, request: Request, timeout: Duration) -> Result<Answer, ClientError> {
    let line = serde_json::to_vec(&Envelope::from(request)).map_err(io::Error::from)?;
    match parse(&exchange(&stream, line, timeout)?)? {
        Reply::Ok(answer) => Ok(*answer),
        Reply::Error(text) => Err(ClientError::Refused(one_line(&text))),
        Reply::Unsaved(text) => Err(ClientError::Unsaved(one_line(&text))),
    }
}

/// Writes a line and reads one.
pub(crate) fn exchange(stream: &UnixStream, line: Vec<u8>, timeout: Duration) -> Result<Vec<u8>, ClientError> {
    exchange_with(stream, line, &[], timeout)
}

/// Writes a line with open files, and reads one.
pub(crate) fn exchange_with(
    mut stream: &UnixStream,
    mut line: Vec<u8>,
    files: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<Vec<u8>, ClientError> {
    line.push(b'\n');
    stream.set_write_timeout(Some(timeout))?;
    // Without files by a plain write: a sandbox need not allow a client of the daemon more.
    let sent = if files.is_empty() { Ok(0) } else { passed_files::send(stream, &line, files) };
    match sent.and_then(|sent| stream.write_all(&line[sent..])) {
        // A peer that has already closed may have said why.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(silent_or_broken(error, timeout)),
        _ => {}
    }
    read_line(stream, timeout)
}

/// Parses a line of the daemon.
///
/// # Errors
/// [`ClientError::Malformed`] for any other line.
pub fn parse(line: &[u8]) -> Result<Reply, ClientError> {
    serde_json::from_slice(line).map_err(|error| ClientError::Malformed { why: one_line(&error.to_string()) })
}

fn timeout_of(request: &Request) -> Duration {
    match request {
        Request::Set { .. }
        | Request::Attach { .. }
        | Request::Detach { .. }
        | Request::LeaveAlone { .. }
        | Request::Reload
        | Request::Started { .. } => CHANGE_TIMEOUT,
        // The kernel may have to move memory for it, or to take pages out of a pool.
        Request::Prepare { .. } | Request::Release { .. } => CHANGE_TIMEOUT,
        Request::Daemon
        | Request::List
        | Request::Rooms
        | Request::Info { .. }
        | Request::Explain { .. }
        | Request::Windows { .. } => QUESTION_TIMEOUT,
        // A registered VM does without a daemon that is silent.
        Request::Register { .. } | Request::Status { .. } => QUESTION_TIMEOUT,
    }
}

fn not_connected(socket: &Path, error: io::Error, timeout: Duration) -> ClientError {
    let path = socket.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NoDaemon { path },
        io::ErrorKind::PermissionDenied => ClientError::NotPermitted { path },
        _ => silent_or_broken(error, timeout),
    }
}

/// Reads until the end of the line, the deadline or [`LINE_BYTES_MAX`]. The deadline holds also against a peer that
/// sends a byte now and then.
fn read_line(stream: &UnixStream, timeout: Duration) -> Result<Vec<u8>, ClientError> {
    let deadline = Instant::now() + timeout;
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while line.len() <= LINE_BYTES_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Silent { timeout });
        }
        stream.set_read_timeout(Some(left))?;
        let bytes = match reader.fill_buf() {
            Ok([]) => return Err(ClientError::Closed { received: line.len() }),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(ClientError::Closed { received: line.len() });
            }
            Err(error) => return Err(silent_or_broken(error, timeout)),
        };
        let end = bytes.iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&bytes[..end.unwrap_or(bytes.len())]);
        let taken = end.map_or(bytes.len(), |end| end + 1);
        reader.consume(taken);
        if end.is_some() {
            return Ok(line);
        }
    }
    Err(ClientError::TooLong)
}

fn silent_or_broken(error: io::Error, timeout: Duration) -> ClientError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Silent { timeout },
        _ => ClientError::Io(error),
    }
}

/// The text as one line without control characters, so that no text of another program controls the terminal.
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// The client's result with a peer that reads the request, writes `bytes` and closes.
    fn reply_of(bytes: Vec<u8>) -> Result<Answer, ClientError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            let mut request = String::new();
            BufReader::new(&theirs).read_line(&mut request).unwrap();
            // A client that has read enough may be gone before all is written.
            let _ = (&theirs).write_all(&bytes);
            request
        });
        let answer = ask_over(ours, Request::List, QUESTION_TIMEOUT);
        assert_eq!(peer.join().unwrap(), format!("{{\"version\":{VERSION},\"request\":\"list\"}}\n"));
        answer
    }

    fn text_of(answer: Result<Answer, ClientError>) -> String {
        answer.unwrap_err().to_string()
    }

    #[test]
    fn an_answer_ends_with_its_line() {
        assert_eq!(reply_of(b"{\"ok\":{\"vms\":[]}}\n{\"ok\":\"done\"}\n".to_vec()).unwrap(), Answer::Vms(Vec::new()));
    }

    #[test]
    fn a_refusal_is_one_line_in_the_daemons_words() {
        let refused = reply_of(b"{\"error\":\"version 7 is spoken here,\\nnot 1\"}\n".to_vec());
        assert_eq!(text_of(refused), "wideleafd: version 7 is spoken here, not 1");
    }

    #[test]
    fn a_change_that_is_done_but_not_saved_is_neither_an_answer_nor_a_refusal() {
        let unsaved = reply_of(b"{\"unsaved\":\"it is in force, and\\nlost\"}\n".to_vec());
        assert!(matches!(unsaved, Err(ClientError::Unsaved(text)) if text == "it is in force, and lost"));
    }

    #[test]
    fn a_peer_that_closes_in_the_middle_of_a_reply_is_named() {
        assert!(text_of(reply_of(b"{\"ok\"".to_vec())).contains("closed the connection after 5 bytes"));
        assert!(text_of(reply_of(Vec::new())).contains("after 0 bytes"));
    }

    #[test]
    fn the_error_for_a_malformed_reply_asks_for_one_version_of_both_programs() {
        for line in [&b"hello\n"[..], b"{\"ok\":{\"cake\":1}}\n", b"\n", b"{\"version\":2}\n"] {
            let text = text_of(reply_of(line.to_vec()));
            assert!(text.contains("wideleafd of one version") && text.lines().count() == 1, "{text}");
        }
    }

    #[test]
    fn a_client_gives_up_on_a_line_without_end() {
        assert!(text_of(reply_of(vec![b'x'; LINE_BYTES_MAX + (1 << 20)])).contains("longer than"));
    }

    #[test]
    fn a_client_gives_up_on_a_silent_peer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answer = ask_over(ours, Request::List, Duration::from_millis(20));
        assert!(matches!(answer, Err(ClientError::Silent { .. })), "{answer:?}");
        drop(theirs);
    }

    #[test]
    fn a_client_gives_up_on_a_daemon_that_accepts_no_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (_listener, _waiting) = crate::socket_file::full_listener(&path);
        let answer = ask_within(&path, Request::List, Some(Duration::from_millis(20)));
        assert!(matches!(answer, Err(ClientError::Silent { .. })), "{answer:?}");
    }

    #[test]
    fn a_change_may_take_longer_than_a_question() {
        let release = Request::Release { domain: "web".into(), uuid: "u".into() };
        for change in [Request::Reload, release] {
            assert_eq!(timeout_of(&change), CHANGE_TIMEOUT, "{change:?}");
        }
        assert_eq!(timeout_of(&Request::List), QUESTION_TIMEOUT);
    }

    #[test]
    fn the_error_for_a_missing_daemon_says_how_to_start_one() {
        let text = text_of(ask(Path::new("/nowhere/control.sock"), Request::List));
        assert!(text.starts_with("no wideleafd listens at /nowhere/control.sock: start it"), "{text}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_client_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            // Random bytes are not a reply.
            prop_assert!(reply_of(bytes).is_err());
        }
    }
}
