//! The control socket: one thread that waits for all connections at once, and a few that answer (`answering.rs`).
//!
//! ```text
//!              ┌────────────── one thread, poll(2) ──────────────┐   a line    ┌─ desk ─▶ lanes ─┐
//!   clients ──▶│ accept · read a line · write a reply · time out │────────────▶│     answers     │
//!              └─────────────────────────────────────────────────┘◀────────────└─────────────────┘
//!                                                        a reply, and a byte to wake the thread
//! ```
//!
//! Whatever a client sends or does not send, the others are served: a line has a bound, so has the time it may take, so has the number
//! of connections. A client has one request under way at a time; what it sends meanwhile waits in the kernel's buffer.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_control::protocol::{Reply, Request};

use crate::config::SocketConfig;
use crate::peer::{Access, Peer};
use crate::socket_file::SocketFile;

mod answering;
mod connection;

pub use crate::socket_file::ListenError;
use answering::Job;
use connection::{Connection, Progress};
pub use connection::{REQUEST_BYTES_MAX, decode};

/// More clients than this are refused, in a line: an operator's host has one hook at a time, a dashboard or two, and a connection
/// for each VM of ours.
pub const CONNECTIONS_MAX: usize = 64;

/// So many more for root: libvirt's hook has to be heard, however many others are connected.
const CONNECTIONS_OF_ROOT: usize = 8;

/// After a connection that could not be taken, for want of file descriptors say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// One connection, for as long as it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

impl ConnectionId {
    /// The connection of that number.
    pub const fn new(number: u64) -> ConnectionId {
        ConnectionId(number)
    }
}

/// Whoever knows the answers.
pub trait Answers: Send + Sync + 'static {
    /// Does what `peer` wants, if it may.
    fn answer(&self, connection: ConnectionId, peer: Peer, request: Request) -> Reply;

    /// Hears that a connection has ended.
    fn closed(&self, connection: ConnectionId);
}

/// A server that runs.
pub struct Server {
    path: PathBuf,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    is_stopping: AtomicBool,
    wake: UnixStream,
}

impl Shared {
    /// A full buffer is as good as a byte: the thread will wake.
    fn wake(&self) {
        let _ = (&self.wake).write(&[0]);
    }
}

struct Done {
    connection: ConnectionId,
    reply: Vec<u8>,
    is_registration: bool,
}

impl Server {
    /// Binds the socket and serves it until [`Server::stop`]. A file that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// [`ListenError`], with who listens there if somebody does.
    pub fn start(config: &SocketConfig, access: &Access, answers: Arc<dyn Answers>) -> Result<Server, ListenError> {
        let gid = access.gid().map_err(ListenError::NoGroup)?;
        let file = SocketFile { path: &config.path, mode: config.mode, gid, key: "socket.path" };
        let listener = file.bind()?;
        let at = |source| file.failed(source);
        let (wake, woken) = UnixStream::pair().map_err(at)?;
        for stream in [&wake, &woken] {
            stream.set_nonblocking(true).map_err(at)?;
        }
        let shared = Arc::new(Shared { is_stopping: AtomicBool::new(false), wake });
        let (jobs, queue) = channel();
        let (finish, done) = channel();
        let mut threads = answering::start(queue, &finish, &answers, &shared);
        let shop = Shop { listener, woken, connections: BTreeMap::new(), next: 0, jobs, done, shared: shared.clone() };
        threads.push(thread::spawn(move || shop.run()));
        Ok(Server { path: config.path.clone(), shared, threads })
    }

    /// Ends all connections and removes the socket. A request that is under way is waited for.
    pub fn stop(self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake();
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the control socket panicked");
            }
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("{} stays: {error}", self.path.display());
        }
    }
}

/// The thread that waits.
struct Shop {
    listener: UnixListener,
    woken: UnixStream,
    connections: BTreeMap<ConnectionId, Connection>,
    next: u64,
    jobs: Sender<Job>,
    done: Receiver<Done>,
    shared: Arc<Shared>,
}

impl Shop {
    fn run(mut self) {
        while !self.shared.is_stopping.load(Ordering::Acquire) {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!("the control socket is closed: {error}");
                    break;
                }
            };
            connection::drain(&self.woken);
            self.take_replies();
            if ready.listener {
                self.accept();
            }
            for id in ready.connections {
                self.serve(id);
            }
            self.time_out();
        }
        let open: Vec<ConnectionId> = self.connections.keys().copied().collect();
        open.into_iter().for_each(|id| self.close(id));
    }

    /// Sleeps until something can be done. A connection whose request is being answered is not looked at: that it was closed is
    /// found when the reply is written, and until then it would wake us for nothing.
    fn wait(&self) -> io::Result<Ready> {
        let now = Instant::now();
        let watched: Vec<(ConnectionId, &Connection, PollFlags)> = self
            .connections
            .iter()
            .filter_map(|(id, connection)| Some((*id, connection, connection.interest()?)))
            .collect();
        let deadline = watched.iter().map(|(_, connection, _)| connection.deadline()).min();
        let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
            // Rounded up: a thread that wakes just before a deadline would wake again at once, and again.
            let milliseconds = deadline.saturating_duration_since(now).as_millis() + 1;
            PollTimeout::try_from(milliseconds.min(60_000) as i32).unwrap_or(PollTimeout::MAX)
        });
        let mut files = vec![
            PollFd::new(self.woken.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.listener.as_fd(), PollFlags::POLLIN),
        ];
        files.extend(watched.iter().map(|(_, connection, interest)| PollFd::new(connection.as_fd(), *interest)));
        match poll(&mut files, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |file: &PollFd<'_>| file.any().unwrap_or(false);
        let ready =
            watched.iter().zip(&files[2..]).filter(|(_, file)| is_ready(file)).map(|((id, ..), _)| *id).collect();
        Ok(Ready { listener: is_ready(&files[1]), connections: ready })
    }

    fn take_replies(&mut self) {
        while let Ok(Done { connection: id, reply, is_registration }) = self.done.try_recv() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.reply(reply, is_registration);
            self.serve(id);
        }
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            // It stays in the queue, and poll(2) returns at once: without a pause this would take all of a core.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return thread::sleep(ACCEPT_PAUSE),
            Err(_) => return,
        };
        let Ok(peer) = Peer::of(&stream).and_then(|peer| stream.set_nonblocking(true).map(|()| peer)) else { return };
        let mut connection = Connection::new(stream, peer);
        let places = places_for(peer.uid);
        if self.connections.len() >= places {
            connection.refuse(&format!("{places} connections are open, and no more are taken: try again later"));
            let _ = connection.advance();
            return;
        }
        let id = ConnectionId(self.next);
        self.next += 1;
        self.connections.insert(id, connection);
    }

    /// Reads or writes what can be without waiting.
    fn serve(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match connection.advance() {
            Progress::Waiting => {}
            Progress::Line(line) => {
                let job = Job::Line { connection: id, peer: connection.peer(), line };
                if self.jobs.send(job).is_err() {
                    self.close(id);
                }
            }
            Progress::Closed => self.close(id),
        }
    }

    fn time_out(&mut self) {
        let now = Instant::now();
        let is_late = |connection: &Connection| connection.interest().is_some() && connection.deadline() <= now;
        let late: Vec<ConnectionId> =
            self.connections.iter().filter(|(_, connection)| is_late(connection)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.close(id));
    }

    fn close(&mut self, id: ConnectionId) {
        if self.connections.remove(&id).is_some() {
            // Nobody hears it who has ended.
            let _ = self.jobs.send(Job::Closed(id));
        }
    }
}

/// How many connections there may be when this user's is taken.
fn places_for(uid: u32) -> usize {
    if uid == 0 { CONNECTIONS_MAX + CONNECTIONS_OF_ROOT } else { CONNECTIONS_MAX }
}

/// What can be done without waiting.
struct Ready {
    listener: bool,
    connections: Vec<ConnectionId>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read};
    use std::net::Shutdown;
    use std::path::Path;
    use std::sync::Mutex;

    use proptest::prelude::*;
    use wideleaf_control::protocol::Answer;

    #[derive(Default)]
    struct Parrot {
        closed: Mutex<Vec<ConnectionId>>,
        /// While somebody has it, who asks about one guest or changes something waits.
        busy: Mutex<()>,
    }

    impl Answers for Parrot {
        fn answer(&self, _: ConnectionId, peer: Peer, request: Request) -> Reply {
            assert_eq!(peer.pid, std::process::id());
            match request {
                Request::List => Reply::Ok(Box::new(Answer::Vms(Vec::new()))),
                Request::Info { vm } => Reply::Error(format!("no {vm}")),
                Request::Explain { .. } | Request::Attach { .. } => {
                    drop(self.busy.lock());
                    Reply::Ok(Box::new(Answer::Done))
                }
                _ => Reply::Ok(Box::new(Answer::Done)),
            }
        }

        fn closed(&self, connection: ConnectionId) {
            self.closed.lock().expect("nobody panicked").push(connection);
        }
    }

    struct Bench {
        _folder: tempfile::TempDir,
        config: SocketConfig,
        parrot: Arc<Parrot>,
        server: Option<Server>,
    }

    impl Bench {
        fn new() -> Bench {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let config = SocketConfig { path: folder.path().join("control.sock"), ..SocketConfig::default() };
            let parrot = Arc::new(Parrot::default());
            let server = Server::start(&config, &Access::new(None), parrot.clone()).expect("nobody else listens there");
            Bench { _folder: folder, config, parrot, server: Some(server) }
        }

        fn connect(&self) -> UnixStream {
            connect(&self.config.path)
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            self.server.take().into_iter().for_each(Server::stop);
            assert!(!self.config.path.exists(), "the socket is removed");
        }
    }

    fn connect(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).expect("somebody listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        stream
    }

    fn ask(stream: &UnixStream, line: &str) -> String {
        (&*stream).write_all(format!("{line}\n").as_bytes()).expect("written");
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply).expect("a reply");
        reply
    }

    const LIST: &str = r#"{"version":1,"request":"list"}"#;
    const RELOAD: &str = r#"{"version":1,"request":"reload"}"#;
    const NO_VMS: &str = "{\"ok\":{\"vms\":[]}}\n";

    #[test]
    fn a_connection_takes_one_request_after_another() {
        let bench = Bench::new();
        let stream = bench.connect();
        assert_eq!(ask(&stream, LIST), NO_VMS);
        assert_eq!(ask(&stream, r#"{"version":1,"request":"info","vm":"a"}"#), "{\"error\":\"no a\"}\n");
        assert_eq!(ask(&stream, &format!("{LIST}\n{LIST}")), NO_VMS);
    }

    #[test]
    fn another_version_is_told_ours() {
        let bench = Bench::new();
        let reply = ask(&bench.connect(), r#"{"version":2,"request":"something new"}"#);
        assert!(reply.contains("speaks version 1, not 2"), "{reply}");
    }

    #[test]
    fn who_is_silent_does_not_hold_up_who_is_not() {
        let bench = Bench::new();
        let silent: Vec<UnixStream> = (0..10).map(|_| bench.connect()).collect();
        (&silent[0]).write_all(b"{\"version\":1,").expect("written");
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);
    }

    #[test]
    fn who_asks_what_takes_long_does_not_hold_up_a_list_a_pulse_or_another_kind_of_request() {
        let bench = Bench::new();
        let asked = |line: &str| {
            let stream = bench.connect();
            (&stream).write_all(format!("{line}\n").as_bytes()).expect("written");
            stream
        };
        let busy = bench.parrot.busy.lock().expect("nobody panicked");
        let attach = r#"{"version":1,"request":"attach","target":{"pid":1},"settings":{}}"#;
        for (slow, quick) in [
            (
                r#"{"version":1,"request":"explain","vm":"a"}"#,
                vec![LIST, r#"{"version":1,"request":"daemon"}"#, RELOAD],
            ),
            (attach, vec![LIST, r#"{"version":1,"request":"daemon"}"#]),
        ] {
            let waiting: Vec<UnixStream> = (0..8).map(|_| asked(slow)).collect();
            for line in quick {
                assert!(ask(&bench.connect(), line).starts_with("{\"ok\":"), "{line} behind {slow}");
            }
            waiting.iter().for_each(|stream| stream.set_nonblocking(true).expect("nonblocking"));
            let is_silent = |mut stream: &UnixStream| {
                stream.read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            };
            assert!(waiting.iter().all(is_silent), "{slow} waits");
        }
        drop(busy);
    }

    #[test]
    fn a_line_that_does_not_end_is_refused() {
        let bench = Bench::new();
        let stream = bench.connect();
        // The server answers and closes before all of it is written.
        let _ = (&stream).write_all(&vec![b' '; REQUEST_BYTES_MAX + 1]);
        let mut reply = String::new();
        let _ = (&stream).read_to_string(&mut reply);
        assert!(reply.contains("is longer than"), "{reply:?}");
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);
    }

    #[test]
    fn one_connection_too_many_is_told_so() {
        let bench = Bench::new();
        let places = places_for(nix::unistd::geteuid().as_raw());
        let mut streams: Vec<UnixStream> = (0..places).map(|_| bench.connect()).collect();
        assert_eq!(ask(&streams[places - 1], LIST), NO_VMS); // all are accepted by now
        let mut reply = String::new();
        let _ = bench.connect().read_to_string(&mut reply);
        assert!(reply.contains(&format!("{places} connections are open")), "{reply:?}");
        streams.clear();
        while bench.parrot.closed.lock().expect("nobody panicked").len() < places {
            thread::yield_now();
        }
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);
    }

    #[test]
    fn a_living_servers_socket_is_not_taken_and_a_dead_ones_is() {
        let bench = Bench::new();
        let second = Server::start(&bench.config, &Access::new(None), bench.parrot.clone()).map(Server::stop);
        let error = second.expect_err("one listens already").to_string();
        assert!(error.starts_with(&format!("another wideleafd (pid {}) is listening", std::process::id())), "{error}");
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);

        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = SocketConfig { path: folder.path().join("a.sock"), ..SocketConfig::default() };
        drop(UnixListener::bind(&config.path).expect("bound"));
        assert!(config.path.exists(), "a file that nobody listens at");
        let server = Server::start(&config, &Access::new(None), bench.parrot.clone()).expect("the file is replaced");
        assert_eq!(ask(&connect(&config.path), LIST), NO_VMS);
        server.stop();
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = SocketConfig { path: folder.path().join("precious"), ..SocketConfig::default() };
        std::fs::write(&config.path, "data").expect("written");
        let parrot = Arc::new(Parrot::default());
        let error = Server::start(&config, &Access::new(None), parrot).map(Server::stop).expect_err("it is a file");
        assert!(error.to_string().contains("is no socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&config.path).expect("still there"), "data");
    }

    #[test]
    fn the_mode_of_the_file_is_the_configured_one() {
        use std::os::unix::fs::PermissionsExt;
        let bench = Bench::new();
        let mode = std::fs::metadata(&bench.config.path).expect("a socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
    }

    #[test]
    fn whatever_bytes_come_the_server_serves_on() {
        let bench = Bench::new();
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(64));
        let line = proptest::collection::vec(any::<u8>(), 0..300);
        let nearly = "\\{\"version\":1,\"request\":\"[a-z]{0,8}\"[,:\\{\\}\\[\\]\"a-z0-9]{0,40}\n?";
        let bytes = proptest::prop_oneof![line, nearly.prop_map(String::into_bytes)];
        let result = runner.run(&bytes, |bytes| {
            let stream = bench.connect();
            let _ = (&stream).write_all(&bytes);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = (&stream).read_to_end(&mut Vec::new()); // every connection is ended, with replies or without
            prop_assert_eq!(ask(&bench.connect(), LIST), NO_VMS);
            Ok(())
        });
        assert_eq!(result, Ok(()));
    }
}
