//! Lines over a Unix socket: one thread that waits for all connections at once, and whoever answers.
//!
//! ```text
//!              ┌────────────── one thread, poll(2) ──────────────┐   a job     ┌─────────────┐
//!   clients ──▶│ accept · read a line · write a reply · time out │────────────▶│ who answers │
//!              └─────────────────────────────────────────────────┘◀────────────└─────────────┘
//!                                                        a reply, and a byte to wake the thread
//! ```
//!
//! Whatever a client sends or does not send, the others are served: a line has a bound, so has the time it may take, so has the number
//! of connections. A client has one request under way at a time; what it sends meanwhile waits in the kernel's buffer.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use crate::peer::Peer;
use crate::protocol::Reply;
use crate::socket_file::{SocketFile, SocketFileError};

mod connection;

use connection::{Connection, Progress};
pub use connection::{Dialect, REQUEST_BYTES_MAX, decode};

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

/// How many connections there may be; more are refused, in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Of all users.
    pub of_all: usize,
    /// So many more for root.
    pub more_for_root: usize,
}

impl Places {
    /// When this user's is taken.
    pub const fn of(self, uid: u32) -> usize {
        self.of_all + if uid == 0 { self.more_for_root } else { 0 }
    }
}

/// What the thread that waits has for who answers.
#[derive(Debug)]
pub enum Job {
    /// A line of a client's.
    Line {
        /// Whose.
        connection: ConnectionId,
        /// Who that is.
        peer: Peer,
        /// Without its end.
        line: Vec<u8>,
    },
    /// A client has gone.
    Closed(ConnectionId),
}

/// Takes replies from who answers.
#[derive(Clone)]
pub struct Replies {
    finish: Sender<Done>,
    shared: Arc<Shared>,
}

impl Replies {
    /// To the line of that connection. From a registration on it may be silent for a shorter time.
    pub fn send<A: Serialize>(&self, connection: ConnectionId, reply: &Reply<A>, is_registration: bool) {
        let _ = self.finish.send(Done { connection, reply: connection::encode(reply), is_registration });
        self.shared.wake();
    }

    /// Whether all connections are about to end.
    pub fn is_stopping(&self) -> bool {
        self.shared.is_stopping.load(Ordering::Acquire)
    }
}

/// A socket that clients can connect to already, and that nobody serves yet: they wait.
pub struct Listening {
    listener: UnixListener,
    woken: UnixStream,
    wake: UnixStream,
}

/// A server that runs.
pub struct LineServer {
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

impl Listening {
    /// Binds the socket. A file that nobody listens at any more is replaced; who binds it removes it, after the server.
    ///
    /// # Errors
    /// [`SocketFileError`], with who listens there if somebody does.
    pub fn at(file: &SocketFile<'_>) -> Result<Listening, SocketFileError> {
        let listener = file.bind()?;
        let at = |source| file.failed(source);
        let (wake, woken) = UnixStream::pair().map_err(at)?;
        for stream in [&wake, &woken] {
            stream.set_nonblocking(true).map_err(at)?;
        }
        Ok(Listening { listener, woken, wake })
    }

    /// Serves it until [`LineServer::stop`], in a thread that does `begin` first. `answer` starts the threads that answer; they end when there
    /// are no more jobs.
    pub fn serve(
        self,
        places: Places,
        begin: impl FnOnce() + Send + 'static,
        answer: impl FnOnce(Receiver<Job>, Replies) -> Vec<JoinHandle<()>>,
    ) -> LineServer {
        let Listening { listener, woken, wake } = self;
        let shared = Arc::new(Shared { is_stopping: AtomicBool::new(false), wake });
        let (jobs, queue) = channel();
        let (finish, done) = channel();
        let mut threads = answer(queue, Replies { finish, shared: shared.clone() });
        let (connections, next, with) = (BTreeMap::new(), 0, shared.clone());
        let shop = Shop { listener, woken, connections, next, jobs, done, shared: with, places };
        threads.push(thread::spawn(move || {
            begin();
            shop.run();
        }));
        LineServer { shared, threads }
    }
}

impl LineServer {
    /// Ends all connections. A request that is under way is waited for, and answered. What could not be done is said, in lines.
    pub fn stop(self) -> Vec<String> {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake();
        let ended = self.threads.into_iter().map(JoinHandle::join);
        ended.filter_map(|ended| ended.err().map(|_| "a thread of the control socket panicked".to_owned())).collect()
    }

    /// As [`LineServer::stop`]; a request that is still under way at `until` is left behind, and its connection ends
    /// without an answer when this process does.
    pub fn stop_by(self, until: Instant) -> Vec<String> {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake();
        let mut problems: Vec<String> =
            self.threads.into_iter().filter_map(|thread| ended_by("a request", thread, until)).collect();
        problems.dedup();
        problems
    }
}

/// How often it is looked whether a thread has ended.
const JOIN_STEP: Duration = Duration::from_millis(2);

/// Waits for the end of a thread, until `until`; a line where it panicked, or goes on.
pub fn ended_by(what: &str, thread: JoinHandle<()>, until: Instant) -> Option<String> {
    while !thread.is_finished() {
        if Instant::now() >= until {
            return Some(format!("{what} is still under way, and ends with this process"));
        }
        thread::sleep(JOIN_STEP);
    }
    thread.join().err().map(|_| format!("{what} panicked"))
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
    places: Places,
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
        self.end();
    }

    /// Ends all connections, one whose request is being answered with its answer: it may be about what ends us.
    fn end(self) {
        let Shop { jobs, done, mut connections, .. } = self;
        for id in connections.keys() {
            // Nobody hears it who has ended.
            let _ = jobs.send(Job::Closed(*id));
        }
        connections.retain(|_, connection| connection.interest().is_none());
        // Whoever answers ends when there is nothing more to answer, and with the last of them nothing more is to come.
        drop(jobs);
        for Done { connection: id, reply, .. } in done {
            if let Some(mut connection) = connections.remove(&id) {
                connection.reply(reply, false);
                let _ = connection.advance();
            }
        }
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
        let places = self.places.of(peer.uid);
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

/// What can be done without waiting.
struct Ready {
    listener: bool,
    connections: Vec<ConnectionId>,
}
