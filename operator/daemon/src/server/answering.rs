//! The threads that answer: a desk hands on requests that may take long, so that quick ones do not wait behind them.
//!
//! ```text
//!   lines ─▶ desk ─┬─ a status, the daemon itself ─▶ answered there, from what is known
//!                  ├─ list ───────────────────────▶ 2 threads  each waits a second at most
//!                  ├─ one guest: info, explain … ─▶ 2 threads  seconds for a guest of a terabyte, or a hanging monitor
//!                  └─ changes: attach, prepare … ─▶ 2 threads  seconds for a monitor or a pool
//! ```
//!
//! A registered VM without an answer for five seconds considers its daemon dead. And a client that lists the guests
//! of a host often does so because something hangs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use wideleaf_control::protocol::{Reply, Request};

use wideleaf_control::server::{Job, Replies};

use super::{Answers, ConnectionId, decode};
use crate::permissions::Peer;

/// Threads of each lane. One that waits delays only its own kind; each more costs the daemon a stack.
const THREADS_PER_LANE: usize = 2;

/// A request that is handed on.
struct Task {
    connection: ConnectionId,
    peer: Peer,
    request: Request,
}

/// Requests that wait only for others of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    /// Requests answered at the desk.
    Desk,
    /// Requests about all guests.
    List,
    /// Requests about one guest.
    Look,
    /// Requests that change something.
    Change,
}

/// Lanes with their own threads.
const LANES: [Lane; 3] = [Lane::List, Lane::Look, Lane::Change];

fn lane(request: &Request) -> Lane {
    match request {
        Request::Daemon | Request::Rooms | Request::Register { .. } | Request::Status { .. } => Lane::Desk,
        Request::List => Lane::List,
        Request::Info { .. } | Request::Explain { .. } | Request::Windows { .. } => Lane::Look,
        Request::Set { .. }
        | Request::Attach { .. }
        | Request::Detach { .. }
        | Request::LeaveAlone { .. }
        | Request::Reload
        | Request::Prepare { .. }
        | Request::Started { .. }
        | Request::Release { .. } => Lane::Change,
    }
}

/// Starts the threads. They end once no sender of jobs is left.
pub(super) fn start(jobs: Receiver<Job>, replies: &Replies, answers: &Arc<dyn Answers>) -> Vec<JoinHandle<()>> {
    let clerk = || Clerk { replies: replies.clone(), answers: answers.clone() };
    let mut threads = Vec::new();
    let queues = LANES.map(|_| {
        let (tasks, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..THREADS_PER_LANE {
            let (clerk, queue) = (clerk(), Arc::clone(&queue));
            threads.push(thread::spawn(move || clerk.serve(&queue)));
        }
        tasks
    });
    let desk = clerk();
    threads.push(thread::spawn(move || desk.receive(&jobs, &queues)));
    threads
}

/// One thread that answers.
struct Clerk {
    replies: Replies,
    answers: Arc<dyn Answers>,
}

impl Clerk {
    /// Loop of the desk.
    fn receive(&self, jobs: &Receiver<Job>, queues: &[Sender<Task>; LANES.len()]) {
        for job in jobs {
            match job {
                Job::Closed(connection) => self.answers.closed(connection),
                Job::Line { connection, peer, line, .. } => match decode(&line) {
                    Ok(request) => self.hand_on(Task { connection, peer, request }, queues),
                    Err(why) => self.replies.send(connection, &Reply::<()>::Error(why), false),
                },
            }
        }
    }

    fn hand_on(&self, task: Task, queues: &[Sender<Task>; LANES.len()]) {
        let lane = lane(&task.request);
        match LANES.iter().position(|other| *other == lane) {
            Some(number) => drop(queues[number].send(task)), // its threads live as long as the desk
            None => self.answer(task),
        }
    }

    /// Loop of a lane's thread.
    fn serve(&self, queue: &Mutex<Receiver<Task>>) {
        loop {
            let task = queue.lock().recv();
            let Ok(task) = task else { return };
            if self.replies.is_stopping() {
                return; // waiting tasks no longer have a connection
            }
            self.answer(task);
        }
    }

    /// A bug in one answer must not end all further answers.
    fn answer(&self, Task { connection, peer, request }: Task) {
        let is_registration = matches!(request, Request::Register { .. });
        let answered = catch_unwind(AssertUnwindSafe(|| self.answers.answer(connection, peer, request)));
        let reply = answered.unwrap_or_else(|_| {
            tracing::error!("a request made wideleafd panic: its message is above");
            Reply::Error("wideleafd panicked on this request: please report it with the message in its log".to_owned())
        });
        let is_registration = is_registration && matches!(reply, Reply::Ok(_));
        self.replies.send(connection, &reply, is_registration);
    }
}
