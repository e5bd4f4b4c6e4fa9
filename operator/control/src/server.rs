//! Lines over a Unix socket: one thread waits for all connections at once, others answer.
//!
//! ```text
//!              ┌────────────── one thread, poll(2) ──────────────┐   a job     ┌─────────────┐
//!   clients ──▶│ accept · read a line · write a reply · time out │────────────▶│   workers   │
//!              └─────────────────────────────────────────────────┘◀────────────└─────────────┘
//!                                                        a reply, and a byte to wake the thread
//! ```
//!
//! No client can keep the server from serving the others: the length of a line, the time that it may take and
//! the number of connections are bounded. A client has one request under way at a time. Further requests wait in
//! the kernel's buffer.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
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

/// Pause after a connection that could not be accepted, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Identity of one connection while it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

impl ConnectionId {
    /// Identity with that number.
    pub const fn new(number: u64) -> ConnectionId {
        ConnectionId(number)
    }
}

/// Number of connections that may be open, without those of registered clients: the program that answers bounds the
/// registrations. The server refuses more of them in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Connections of all users together.
    pub of_all: usize,
    /// Further connections for root only.
    pub more_for_root: usize,
}

impl Places {
    /// Limit on the connections for this user.
    pub const fn of(self, uid: u32) -> usize {
        self.of_all + if uid == 0 { self.more_for_root } else { 0 }
    }
}

/// Message from the waiting thread to the threads that answer.
#[derive(Debug)]
pub enum Job {
    /// One line from a client.
    Line {
        /// Connection that the line came from.
        connection: ConnectionId,
        /// Process that sent the line.
        peer: Peer,
        /// Content without the line's end.
        line: Vec<u8>,
        /// Open files that came with the line; none where the server takes none.
        files: Vec<OwnedFd>,
    },
    /// A client has gone.
    Closed(ConnectionId),
}

/// Takes replies from the threads that answer.
#[derive(Clone)]
pub struct Replies {
    finish: Sender<Done>,
    shared: Arc<Shared>,
}

impl Replies {
    /// Replies to the line of that connection. After a registration the connection may be silent for a shorter time.
    pub fn send<A: Serialize>(&self, connection: ConnectionId, reply: &Reply<A>, is_registration: bool) {
        let _ = self.finish.send(Done { connection, reply: connection::encode(reply), is_registration });
        self.shared.wake();
    }

    /// Whether all connections are about to end.
    pub fn is_stopping(&self) -> bool {
        self.shared.is_stopping.load(Ordering::Acquire)
    }
}

/// A socket that clients can already connect to. They wait until [`Listening::serve`].
pub struct Listening {
    listener: UnixListener,
    woken: UnixStream,
    wake: UnixStream,
    takes_files: bool,
}

/// A running server.
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
    /// Binds the socket. It replaces a file without a listener. The caller that binds it removes it,
    /// after the server.
    ///
    /// # Errors
    /// [`SocketFileError`], which names the process that listens there already.
    pub fn at(file: &SocketFile<'_>) -> Result<Listening, SocketFileError> {
        let listener = file.bind()?;
        let at = |source| file.failed(source);
        let (wake, woken) = UnixStream::pair().map_err(at)?;
        for stream in [&wake, &woken] {
            stream.set_nonblocking(true).map_err(at)?;
        }
        Ok(Listening { listener, woken, wake, takes_files: false })
    }

    /// The same, with open files that clients pass with their requests ([`crate::passed_files`]).
    #[must_use]
    pub fn taking_files(self) -> Listening {
        Listening { takes_files: true, ..self }
    }

    /// Serves the socket until [`LineServer::stop`], in a thread that calls `begin` first. `answer` starts the
    /// threads that answer. They end when there are no more jobs.
    pub fn serve(
        self,
        places: Places,
        begin: impl FnOnce() + Send + 'static,
        answer: impl FnOnce(Receiver<Job>, Replies) -> Vec<JoinHandle<()>>,
    ) -> LineServer {
        let Listening { listener, woken, wake, takes_files } = self;
        let shared = Arc::new(Shared { is_stopping: AtomicBool::new(false), wake });
        let (jobs, queue) = channel();
        let (finish, done) = channel();
        let mut threads = answer(queue, Replies { finish, shared: shared.clone() });
        let (connections, next, with) = (BTreeMap::new(), 0, shared.clone());
        let events = EventLoop { listener, woken, connections, next, jobs, done, shared: with, places, takes_files };
        threads.push(thread::spawn(move || {
            begin();
            events.run();
        }));
        LineServer { shared, threads }
    }
}

impl LineServer {
    /// Ends all connections, after the answer to each request under way. Returns the problems, a line each.
    pub fn stop(self) -> Vec<String> {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake();
        let ended = self.threads.into_iter().map(JoinHandle::join);
        ended.filter_map(|ended| ended.err().map(|_| "a thread of the control socket panicked".to_owned())).collect()
    }

    /// As [`LineServer::stop`], until `until`. A request that is still under way then is abandoned: its connection
    /// ends without an answer when this process does.
    pub fn stop_by(self, until: Instant) -> Vec<String> {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake();
        let mut problems: Vec<String> =
            self.threads.into_iter().filter_map(|thread| ended_by("a request", thread, until)).collect();
        problems.dedup();
        problems
    }
}

/// Interval between checks that a thread has ended.
const JOIN_STEP: Duration = Duration::from_millis(2);

/// Waits for the end of a thread, until `until`. Returns a line if it panicked or still runs.
pub fn ended_by(what: &str, thread: JoinHandle<()>, until: Instant) -> Option<String> {
    while !thread.is_finished() {
        if Instant::now() >= until {
            return Some(format!("{what} is still under way, and ends with this process"));
        }
        thread::sleep(JOIN_STEP);
    }
    thread.join().err().map(|_| format!("{what} panicked"))
}

/// The loop of the thread that waits for connections.
struct EventLoop {
    listener: UnixListener,
    woken: UnixStream,
    connections: BTreeMap<ConnectionId, Connection>,
    next: u64,
    jobs: Sender<Job>,
    done: Receiver<Done>,
    shared: Arc<Shared>,
    places: Places,
    takes_files: bool,
}

impl EventLoop {
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

    /// Ends all connections. A connection with a request under way gets its answer first, which may be
    /// about this end.
    fn end(self) {
        let EventLoop { jobs, done, mut connections, .. } = self;
        for id in connections.keys() {
            // The workers may have ended.
            let _ = jobs.send(Job::Closed(*id));
        }
        connections.retain(|_, connection| connection.interest().is_none());
        // The workers end when there is nothing more to answer. After the last of them no more replies come.
        drop(jobs);
        for Done { connection: id, reply, .. } in done {
            if let Some(mut connection) = connections.remove(&id) {
                connection.reply(reply, false);
                let _ = connection.advance();
            }
        }
    }

    /// Sleeps until something can be done. A connection with a request under way is not polled: the write of the
    /// reply will find it closed, and until then it would wake this thread for nothing.
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
            // The connection stays in the queue and poll(2) returns at once: without a pause this would take all
            // of a core.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return thread::sleep(ACCEPT_PAUSE),
            Err(_) => return,
        };
        let Ok(peer) = Peer::of(&stream).and_then(|peer| stream.set_nonblocking(true).map(|()| peer)) else { return };
        let mut connection = Connection::new(stream, peer, self.takes_files);
        let places = self.places.of(peer.uid);
        if self.connections.values().filter(|connection| !connection.is_registered()).count() >= places {
            connection.refuse(&format!("all {places} connections are in use: try again later"));
            let _ = connection.advance();
            return;
        }
        let id = ConnectionId(self.next);
        self.next += 1;
        self.connections.insert(id, connection);
    }

    /// Reads or writes as much as is possible without waiting.
    fn serve(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match connection.advance() {
            Progress::Waiting => {}
            Progress::Line(line, files) => {
                let job = Job::Line { connection: id, peer: connection.peer(), line, files };
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
            // The workers may have ended.
            let _ = self.jobs.send(Job::Closed(id));
        }
    }
}

/// Sockets that are ready.
struct Ready {
    listener: bool,
    connections: Vec<ConnectionId>,
}
