//! QEMU's monitor protocol over a Unix socket (docs/interop/qmp-spec in QEMU's sources): one line of JSON each way.
//!
//! ```text
//!   connect ─▶ {"QMP": …} greeting ─▶ {"execute":"qmp_capabilities"} ─▶ {"return":{}} ─▶ questions
//!                                     events between the answers are skipped
//! ```
//!
//! This client can send only [`Question`]s, none of which changes the guest. A monitor that does not answer in
//! time, or that answers nonsense, is an error and never a hang. The connection is then unusable. A QMP socket
//! serves one client at a time: from a busy one, no greeting comes.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket, sockopt};
use nix::sys::time::TimeVal;
use serde_json::{Value, json};
use wideleaf_policies::Gpa;

/// Time that a monitor may take. QEMU answers in a millisecond. Its main loop may be busy for some hundred when a
/// disk is slow.
pub const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// Upper bound on a line, in bytes: the memory tree of a guest with a thousand devices is 2 MiB. Parsed, a line may
/// be thirty times as large.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Number of events that are skipped for one answer. A guest can cause events, but not 10,000 in half a second.
const EVENTS_MAX: usize = 10_000;

/// Questions to the monitor. None of them changes the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// State of the VM: `query-status`.
    Status,
    /// Name of the guest: `query-name`.
    Name,
    /// UUID of the guest: `query-uuid`.
    Uuid,
    /// KVM's mappings by size: `query-stats` of the VM.
    Mappings,
    /// State of a migration: `query-migrate`.
    Migrate,
    /// Measurement of the dirty rate: `query-dirty-rate`.
    DirtyRate,
    /// Background jobs: `query-jobs`.
    Jobs,
    /// State of a dump: `query-dump`.
    Dump,
    /// Memory backends: `query-memdev`.
    Memdevs,
    /// Plugged memory: `query-memory-devices`.
    MemoryDevices,
    /// Size of the balloon: `query-balloon`.
    Balloon,
    /// Memory in total: `query-memory-size-summary`.
    MemorySize,
    /// All devices with their properties, plugged ones included: `info qtree`.
    DeviceTree,
    /// Guest-physical memory map: `info mtree -f`.
    MemoryTree,
    /// Address in QEMU's process: `gpa2hva`.
    HostAddress(Gpa),
    /// List of the vCPUs: `query-cpus-fast`, which does not disturb a vCPU.
    Cpus,
    /// Registers of one vCPU by its index, `info registers`: QEMU's main loop waits until it has left the guest.
    Registers(u64),
}

impl Question {
    fn line(self) -> String {
        let execute = |command: &str| json!({ "execute": command });
        let human = |line: String| json!({ "execute": "human-monitor-command", "arguments": { "command-line": line } });
        let message = match self {
            Question::Status => execute("query-status"),
            Question::Name => execute("query-name"),
            Question::Uuid => execute("query-uuid"),
            Question::Mappings => json!({ "execute": "query-stats", "arguments": {
                "target": "vm",
                "providers": [{ "provider": "kvm", "names": ["pages_4k", "pages_2m", "pages_1g"] }],
            } }),
            Question::Migrate => execute("query-migrate"),
            Question::DirtyRate => execute("query-dirty-rate"),
            Question::Jobs => execute("query-jobs"),
            Question::Dump => execute("query-dump"),
            Question::Memdevs => execute("query-memdev"),
            Question::MemoryDevices => execute("query-memory-devices"),
            Question::Balloon => execute("query-balloon"),
            Question::MemorySize => execute("query-memory-size-summary"),
            Question::DeviceTree => human("info qtree".into()),
            Question::MemoryTree => human("info mtree -f".into()),
            Question::HostAddress(gpa) => human(format!("gpa2hva {:#x}", gpa.get())),
            Question::Cpus => execute("query-cpus-fast"),
            Question::Registers(index) => json!({ "execute": "human-monitor-command", "arguments": {
                "command-line": "info registers", "cpu-index": index,
            } }),
        };
        format!("{message}\n")
    }
}

/// Reason for a missing answer.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket does not exist, or permission is missing.
    #[error("cannot connect to the QMP socket {path}: {source}")]
    Connect {
        /// Path of the socket.
        path: String,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The monitor took too long.
    #[error(
        "the monitor did not answer within {} ms: QEMU is stuck, or another client is connected to this socket; end \
         that client, or give QEMU another -qmp socket",
        .0.as_millis()
    )]
    TimedOut(Duration),
    /// The connection broke.
    #[error("the connection to the monitor broke: {0}")]
    Broken(#[source] io::Error),
    /// The monitor closed the connection.
    #[error("the monitor closed the connection: QEMU has ended, or the socket is not a QMP socket")]
    Closed,
    /// A line longer than any of QEMU's.
    #[error("the monitor sent a line of more than {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// The peer does not speak QMP.
    #[error("cannot talk to the monitor: it does not speak QMP, but sent {0:?}; name a socket of -qmp")]
    NotQmp(String),
    /// The socket belongs to another process.
    #[error("the QMP socket {path} belongs to process {other} and not to {pid}; name the socket of {pid}")]
    OfAnother {
        /// Path of the socket.
        path: String,
        /// Expected owner of the socket.
        pid: u32,
        /// Actual owner of the socket.
        other: u32,
    },
    /// The monitor sent only events.
    #[error("the monitor sent {EVENTS_MAX} events and no answer")]
    EventsOnly,
}

impl QmpError {
    /// Whether the same monitor may answer later.
    pub fn may_pass(&self) -> bool {
        match self {
            QmpError::TimedOut(_) | QmpError::Broken(_) | QmpError::Closed | QmpError::EventsOnly => true,
            QmpError::Connect { source, .. } => source.kind() == io::ErrorKind::ConnectionRefused,
            QmpError::TooLong | QmpError::NotQmp(_) | QmpError::OfAnother { .. } => false,
        }
    }
}

/// Refusal of the monitor: an unknown command, or a missing device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("QEMU says: {description}")]
pub struct Refused {
    /// Class of the error: `CommandNotFound`, `GenericError`, …
    pub class: String,
    /// Description in words.
    pub description: String,
}

/// A connection that is ready for questions.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    received: Vec<u8>,
    within: Duration,
    /// Whether a question has no answer, which would be taken for that to a later one.
    is_broken: bool,
}

impl Qmp {
    /// Connects and waits for the greeting, at most `within`, which is also the limit for each later answer.
    ///
    /// # Errors
    /// [`QmpError`] without a greeting in time.
    pub fn connect(path: &Path, within: Duration) -> Result<Qmp, QmpError> {
        Qmp::connect_to(path, within, |_| Ok(()))
    }

    /// As [`Qmp::connect`], where `is_meant` allows the process that listens there. Before that not a byte is read
    /// or written: a client of a daemon that runs as root may name any socket of the host, and must learn nothing
    /// of what another service says to root.
    ///
    /// # Errors
    /// [`QmpError`], or the reason of `is_meant`.
    pub fn connect_to<E: From<QmpError>>(
        path: &Path,
        within: Duration,
        is_meant: impl FnOnce(u32) -> Result<(), E>,
    ) -> Result<Qmp, E> {
        let stream = stream(path, within).map_err(|errno| match errno {
            Errno::EAGAIN => QmpError::TimedOut(within),
            errno => QmpError::Connect { path: path.display().to_string(), source: errno.into() },
        })?;
        is_meant(peer_pid(&stream)?)?;
        Ok(Qmp::over(stream, within)?)
    }

    /// As [`Qmp::connect`] over an open connection with its own time limits for each read and write.
    ///
    /// # Errors
    /// [`QmpError`] without a greeting in time.
    pub fn over(stream: UnixStream, within: Duration) -> Result<Qmp, QmpError> {
        let mut qmp = Qmp { stream, received: Vec::new(), within, is_broken: false };
        let until = Instant::now() + within;
        match message(&qmp.line(until)?)? {
            Message::Greeting => {}
            other => return Err(QmpError::NotQmp(format!("{other:?}"))),
        }
        qmp.send("{\"execute\":\"qmp_capabilities\"}\n")?;
        qmp.answer(until)?.map_err(|refused| QmpError::NotQmp(refused.to_string()))?;
        Ok(qmp)
    }

    /// Asks one question.
    ///
    /// # Errors
    /// [`QmpError`]; the connection is then unusable.
    pub fn ask(&mut self, question: Question) -> Result<Result<Value, Refused>, QmpError> {
        let mut answers = self.ask_all(&[question])?;
        answers.pop().ok_or(QmpError::Closed)
    }

    /// Asks several questions at once, which takes one turn of QEMU's main loop instead of one each. The answers
    /// come in the same order.
    ///
    /// # Errors
    /// [`QmpError`]; the connection is then unusable.
    pub fn ask_all(&mut self, questions: &[Question]) -> Result<Vec<Result<Value, Refused>>, QmpError> {
        if self.is_broken {
            return Err(QmpError::TimedOut(self.within));
        }
        self.is_broken = true;
        self.send(&questions.iter().map(|question| question.line()).collect::<String>())?;
        let until = Instant::now() + self.within;
        let answers = questions.iter().map(|_| self.answer(until)).collect::<Result<_, _>>()?;
        self.is_broken = false;
        Ok(answers)
    }

    /// Whether a question has failed, so that the connection is unusable.
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    fn send(&mut self, lines: &str) -> Result<(), QmpError> {
        self.stream.write_all(lines.as_bytes()).map_err(|error| self.failed(error))
    }

    fn answer(&mut self, until: Instant) -> Result<Result<Value, Refused>, QmpError> {
        for _ in 0..EVENTS_MAX {
            match message(&self.line(until)?)? {
                Message::Event => {}
                Message::Return(value) => return Ok(Ok(value)),
                Message::Error(refused) => return Ok(Err(refused)),
                Message::Greeting => return Err(QmpError::NotQmp("a second greeting".into())),
            }
        }
        Err(QmpError::EventsOnly)
    }

    /// The next line, without its end.
    fn line(&mut self, until: Instant) -> Result<Vec<u8>, QmpError> {
        let mut looked_at = 0;
        let mut chunk = [0; 16 << 10];
        loop {
            if let Some(end) = self.received[looked_at..].iter().position(|byte| *byte == b'\n') {
                let rest = self.received.split_off(looked_at + end + 1);
                return Ok(std::mem::replace(&mut self.received, rest));
            }
            looked_at = self.received.len();
            if looked_at > LINE_BYTES_MAX {
                return Err(QmpError::TooLong);
            }
            // A read waits at most `within`, so an answer in pieces takes at most twice that.
            if Instant::now() > until {
                return Err(QmpError::TimedOut(self.within));
            }
            match self.stream.read(&mut chunk).map_err(|error| self.failed(error))? {
                0 => return Err(QmpError::Closed),
                count => self.received.extend_from_slice(&chunk[..count]),
            }
        }
    }

    fn failed(&self, error: io::Error) -> QmpError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpError::TimedOut(self.within),
            _ => QmpError::Broken(error),
        }
    }
}

/// The process that listens on the socket (`SO_PEERCRED`, unix(7)): QEMU, or the process that opened the socket for it.
fn peer_pid(stream: &UnixStream) -> Result<u32, QmpError> {
    let peer = getsockopt(stream, sockopt::PeerCredentials).map_err(|errno| QmpError::Broken(errno.into()))?;
    u32::try_from(peer.pid()).map_err(|_| QmpError::NotQmp(format!("its peer is process {}", peer.pid())))
}

/// A connection on which no call takes longer than `within`, `connect` included. QEMU lets two clients wait, also
/// those that have given up, and the next one waits for a place (unix(7): `SO_SNDTIMEO` also limits that).
fn stream(path: &Path, within: Duration) -> nix::Result<UnixStream> {
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let within = TimeVal::new(within.as_secs() as i64, i64::from(within.subsec_micros()));
    setsockopt(&fd, sockopt::ReceiveTimeout, &within)?;
    setsockopt(&fd, sockopt::SendTimeout, &within)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(UnixStream::from(fd))
}

/// One line from the monitor.
#[derive(Debug, PartialEq)]
enum Message {
    Greeting,
    Event,
    Return(Value),
    Error(Refused),
}

fn message(line: &[u8]) -> Result<Message, QmpError> {
    let not_qmp = || {
        const SHOWN: usize = 80;
        QmpError::NotQmp(String::from_utf8_lossy(&line[..line.len().min(SHOWN)]).into_owned())
    };
    let Ok(Value::Object(mut object)) = serde_json::from_slice(line) else { return Err(not_qmp()) };
    if object.contains_key("event") {
        return Ok(Message::Event);
    }
    if object.contains_key("QMP") {
        return Ok(Message::Greeting);
    }
    if let Some(value) = object.remove("return") {
        return Ok(Message::Return(value));
    }
    let error = object.get("error").ok_or_else(not_qmp)?;
    let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    Ok(Message::Error(Refused { class: text("class"), description: text("desc") }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{Backlog, bind, listen};
    use proptest::prelude::*;
    use std::os::unix::net::UnixListener;
    use std::thread::{self, JoinHandle};

    const GREETING: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}}, \
        \"capabilities\": [\"oob\"]}}\r\n";

    /// A monitor that sends the first text at once, and each next one after a line from the client.
    fn monitor(texts: Vec<Vec<u8>>) -> (tempfile::TempDir, JoinHandle<()>) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let listener = UnixListener::bind(folder.path().join("qmp")).expect("the socket is new");
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client connects");
            let mut chunk = [0; 4096];
            for text in texts {
                if stream.write_all(&text).is_err() || matches!(stream.read(&mut chunk), Ok(0) | Err(_)) {
                    return;
                }
            }
            // Silent until the client gives up.
            let _ = stream.read(&mut chunk);
        });
        (folder, thread)
    }

    fn ask(texts: &[&str], question: Question) -> Result<Result<Value, Refused>, QmpError> {
        let (folder, thread) = monitor(texts.iter().map(|text| text.as_bytes().to_vec()).collect());
        let answer =
            Qmp::connect(&folder.path().join("qmp"), Duration::from_millis(200)).and_then(|mut qmp| qmp.ask(question));
        thread.join().expect("the monitor ends");
        answer
    }

    #[test]
    fn events_between_question_and_answer_are_skipped() {
        let event = "{\"timestamp\": {\"seconds\": 1, \"microseconds\": 2}, \"event\": \"RESUME\"}\r\n";
        let answer = ask(
            &[
                GREETING,
                &format!("{event}{{\"return\": {{}}}}\r\n"),
                &format!("{event}{event}{{\"return\": {{\"status\": \"running\"}}}}\r\n"),
            ],
            Question::Status,
        );
        assert_eq!(answer.expect("it answers").expect("it knows"), json!({ "status": "running" }));
    }

    #[test]
    fn a_refusal_of_the_monitor_is_distinguished_from_silence() {
        let refusal = "{\"error\": {\"class\": \"CommandNotFound\", \
            \"desc\": \"The command query-stats has not been found\"}}\r\n";
        let answer = ask(&[GREETING, "{\"return\": {}}\r\n", refusal], Question::Mappings).expect("it answers");
        assert_eq!(answer.expect_err("it refuses").class, "CommandNotFound");
        let silent = ask(&[GREETING, "{\"return\": {}}\r\n", ""], Question::Status);
        assert!(matches!(silent, Err(QmpError::TimedOut(_))), "{silent:?}");
    }

    #[test]
    fn a_busy_socket_or_one_without_a_monitor_is_an_error_within_the_deadline() {
        let busy = ask(&[""], Question::Status).expect_err("no greeting");
        assert!(matches!(busy, QmpError::TimedOut(_)), "{busy}");
        let other = ask(&["220 mail.example.org ESMTP\r\n"], Question::Status).expect_err("not QMP");
        assert!(matches!(other, QmpError::NotQmp(_)), "{other}");
        let missing = Qmp::connect(Path::new("/nonexistent/qmp"), ANSWER_WITHIN).expect_err("no socket");
        assert!(missing.to_string().contains("/nonexistent/qmp"), "{missing}");
    }

    #[test]
    fn a_monitor_with_no_place_for_another_client_is_an_error_within_the_deadline() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("qmp");
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
        bind(fd.as_raw_fd(), &UnixAddr::new(&path).expect("a short path")).expect("it is new");
        listen(&fd, Backlog::new(1).expect("as QEMU")).expect("it is bound");
        // The listener never accepts: the first two clients wait for a greeting, and the third for a place.
        for _ in 0..3 {
            let busy = Qmp::connect(&path, Duration::from_millis(50)).expect_err("no answer comes");
            assert!(matches!(busy, QmpError::TimedOut(_)), "{busy}");
        }
    }

    #[test]
    fn the_peer_is_the_process_that_listens() {
        let (folder, thread) = monitor(vec![GREETING.into(), b"{\"return\": {}}\r\n".to_vec()]);
        let is_us = |pid| {
            assert_eq!(pid, std::process::id());
            Ok::<(), QmpError>(())
        };
        let qmp = Qmp::connect_to(&folder.path().join("qmp"), Duration::from_secs(5), is_us).expect("it greets");
        drop(qmp);
        thread.join().expect("the monitor ends");
    }

    #[test]
    fn questions_asked_at_once_are_answered_in_order() {
        let answers =
            "{\"return\": 1}\r\n{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\r\n{\"return\": 3}\r\n";
        let (folder, thread) = monitor(vec![GREETING.into(), b"{\"return\": {}}\r\n".to_vec(), answers.into()]);
        let mut qmp = Qmp::connect(&folder.path().join("qmp"), Duration::from_secs(5)).expect("it greets");
        let answers = qmp.ask_all(&[Question::Status, Question::Balloon, Question::Jobs]).expect("it answers");
        assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
        drop(qmp);
        thread.join().expect("the monitor ends");
    }

    proptest! {
        #[test]
        fn no_line_causes_a_panic(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = message(&line);
        }

        #[test]
        fn objects_that_are_almost_qmp_are_refused_or_understood(
            key in "return|error|event|QMP|id|.{0,5}",
            value in "\\{.{0,20}\\}|[0-9]{1,3}|\"[a-z]{0,5}\"|null|\\[\\]",
        ) {
            let text = format!("{{\"{key}\": {value}}}");
            if let Ok(understood) = message(text.as_bytes()) {
                prop_assert!(["return", "error", "event", "QMP"].contains(&key.as_str()), "{understood:?}");
            }
        }
    }
}
