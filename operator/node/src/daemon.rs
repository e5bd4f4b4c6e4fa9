//! Client of wideleafd's control socket for asynchronous tasks. It has the protocol of [`wideleaf_control::client`],
//! which blocks its thread.
//!
//! Each request has a connection of its own and is sent once. The caller gives a time limit, which holds whatever the
//! daemon does.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use wideleaf_control::client::{self, ClientError, one_line};
use wideleaf_control::protocol::{ASK_AGAIN, Answer, Envelope, LINE_BYTES_MAX, Reply, Request, Settings, Target};
use wideleaf_control::view::{DaemonView, Explanation, VmView};

/// Whether the daemon refuses a request only for the moment: a guest is being attached, a search for guests is under
/// way, or the daemon starts or ends.
pub(crate) fn is_for_now(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused(why) if why.contains(ASK_AGAIN))
}

/// The daemon at a socket.
#[derive(Clone, Debug)]
pub struct Daemon {
    socket: PathBuf,
}

impl Daemon {
    /// The daemon that listens on this socket, now or later.
    pub fn at(socket: &Path) -> Daemon {
        Daemon { socket: socket.to_owned() }
    }

    /// Sends one request and waits for its answer, at most `within`.
    ///
    /// # Errors
    /// [`ClientError`], of which the line says what to do.
    pub async fn ask(&self, request: Request, within: Duration) -> Result<Answer, ClientError> {
        let asked = tokio::time::timeout(within, self.exchange(request)).await;
        let line = asked.unwrap_or(Err(ClientError::Silent { timeout: within }))?;
        match client::parse(&line)? {
            Reply::Ok(answer) => Ok(*answer),
            Reply::Error(text) => Err(ClientError::Refused(one_line(&text))),
            // The change is in force, and the daemon tries every ten seconds to write it.
            Reply::Unsaved(text) => Err(ClientError::Unsaved(one_line(&text))),
        }
    }

    async fn exchange(&self, request: Request) -> Result<Vec<u8>, ClientError> {
        let path = || self.socket.clone();
        let mut stream = UnixStream::connect(&self.socket).await.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NoDaemon { path: path() },
            io::ErrorKind::PermissionDenied => ClientError::NotPermitted { path: path() },
            _ => ClientError::Io(error),
        })?;
        let mut line = serde_json::to_vec(&Envelope::from(request)).map_err(io::Error::from)?;
        line.push(b'\n');
        // A daemon that has already closed may have said why.
        match stream.write_all(&line).await {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(ClientError::Io(error)),
            _ => {}
        }
        let mut reply = Vec::new();
        let mut bounded = BufReader::new(stream).take(LINE_BYTES_MAX as u64 + 1);
        match bounded.read_until(b'\n', &mut reply).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            read => drop(read?),
        }
        match reply.pop() {
            Some(b'\n') => Ok(reply),
            Some(_) if reply.len() >= LINE_BYTES_MAX => Err(ClientError::TooLong),
            last => Err(ClientError::Closed { received: reply.len() + usize::from(last.is_some()) }),
        }
    }

    /// View of the daemon itself.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn view(&self, within: Duration) -> Result<DaemonView, ClientError> {
        match self.ask(Request::Daemon, within).await? {
            Answer::Daemon(view) => Ok(view),
            _ => Err(unexpected()),
        }
    }

    /// All guests of the host.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn guests(&self, within: Duration) -> Result<Vec<VmView>, ClientError> {
        match self.ask(Request::List, within).await? {
            Answer::Vms(views) => Ok(views),
            _ => Err(unexpected()),
        }
    }

    /// Reasons why windows of a guest are not huge.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn explain(&self, pid: u32, within: Duration) -> Result<Explanation, ClientError> {
        match self.ask(Request::Explain { vm: pid.to_string() }, within).await? {
            Answer::Explanation(explanation) => Ok(explanation),
            _ => Err(unexpected()),
        }
    }

    /// Takes a guest under management with these settings, or changes the settings of one that is managed. A change
    /// that wideleafd could not save yet is in force.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn settle(&self, guest: &VmView, settings: Settings, within: Duration) -> Result<(), ClientError> {
        let is_managed = guest.work.is_some() || !matches!(guest.care, wideleaf_control::view::Care::Unmanaged);
        let request = if is_managed {
            Request::Set { vm: guest.pid.to_string(), changes: settings }
        } else {
            Request::Attach { target: Target::Pid(guest.pid), settings }
        };
        match self.ask(request, within).await {
            Ok(_) | Err(ClientError::Unsaved(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn unexpected() -> ClientError {
    ClientError::Malformed { why: "the answer is to another request".into() }
}
