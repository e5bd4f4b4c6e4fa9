//! The control socket: [`wideleaf_control::server`] has the connections, and a few threads answer (`answering.rs`).

use std::sync::Arc;
use std::time::Instant;

use wideleaf_control::protocol::{Reply, Request, VERSION};
use wideleaf_control::server::{self, Dialect, LineServer, Listening, Places};
use wideleaf_control::socket_file::{OwnSocket, SocketFile};

use crate::config::SocketConfig;
use crate::permissions::{Access, Peer};

mod answering;

pub use crate::listen_error::ListenError;
pub use wideleaf_control::server::{ConnectionId, REQUEST_BYTES_MAX};

/// Number of clients without a registered VM, beyond which more are refused in a line. An operator's host has one hook
/// at a time, and a dashboard or two.
pub const CONNECTIONS_MAX: usize = 64;

/// Further connections for root: libvirt's hook has to get through, however many other clients are connected.
const CONNECTIONS_OF_ROOT: usize = 8;

/// Number of registered VMs, each with a connection that takes no place of another client. Each report wakes the
/// thread that polls all of them.
pub const REGISTERED_MAX: usize = 512;

const PLACES: Places = Places { of_all: CONNECTIONS_MAX, more_for_root: CONNECTIONS_OF_ROOT };

/// Source of the answers.
pub trait Answers: Send + Sync + 'static {
    /// Carries out the request of `peer`, if that is permitted.
    fn answer(&self, connection: ConnectionId, peer: Peer, request: Request) -> Reply;

    /// Called when a connection has ended.
    fn closed(&self, connection: ConnectionId);
}

/// A running server.
pub struct Server {
    lines: LineServer,
    file: OwnSocket,
}

/// A socket that clients can already connect to. They wait until [`Bound::serve`].
pub struct Bound {
    listening: Listening,
    file: OwnSocket,
}

impl Bound {
    /// Binds the socket. A file without a listener is replaced.
    ///
    /// # Errors
    /// [`ListenError`], which names the process that listens there already.
    pub fn at(config: &SocketConfig, access: &Access) -> Result<Bound, ListenError> {
        let gid = access.gid().map_err(ListenError::NoGroup)?;
        let file = SocketFile {
            path: &config.path,
            mode: config.mode,
            gid,
            makes_folder: true,
            owner: "another wideleafd",
            remedy: "give this daemon another socket.path",
        };
        Ok(Bound { listening: Listening::at(&file)?, file: OwnSocket::at(&config.path) })
    }

    /// Serves the socket until [`Server::stop`].
    pub fn serve(self, answers: Arc<dyn Answers>) -> Server {
        let Bound { listening, file } = self;
        let lines = listening.serve(PLACES, || {}, |jobs, replies| answering::start(jobs, &replies, &answers));
        Server { lines, file }
    }

    /// Removes the socket without serving it.
    pub fn end(self) {
        self.file.remove();
    }
}

impl Server {
    /// Ends all connections and removes the socket. It waits for a request under way, until `until`.
    pub fn stop(self, until: Instant) {
        self.lines.stop_by(until).iter().for_each(|problem| tracing::error!("{problem}"));
        self.file.remove();
    }
}

/// Decodes the request in a line.
///
/// # Errors
/// One line: the request has another version, or is malformed.
pub fn decode(line: &[u8]) -> Result<Request, String> {
    server::decode(line, Dialect { server: "this wideleafd", version: VERSION })
}

#[cfg(test)]
mod tests {
    use std::io::{self, BufRead, BufReader, Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::thread;
    use std::time::Duration;

    use parking_lot::Mutex;
    use proptest::prelude::*;
    use wideleaf_control::protocol::{Answer, Envelope, LiveReport};

    use super::*;

    #[derive(Default)]
    struct Parrot {
        closed: Mutex<Vec<ConnectionId>>,
        /// While the test holds it, requests about one guest and changes wait.
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
            self.closed.lock().push(connection);
        }
    }

    struct Bench {
        _folder: tempfile::TempDir,
        config: SocketConfig,
        parrot: Arc<Parrot>,
        server: Option<Server>,
    }

    fn start(config: &SocketConfig, parrot: Arc<Parrot>) -> Result<Server, ListenError> {
        Bound::at(config, &Access::new(None)).map(|bound| bound.serve(parrot))
    }

    impl Bench {
        fn new() -> Bench {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let config = SocketConfig { path: folder.path().join("control.sock"), ..SocketConfig::default() };
            let parrot = Arc::new(Parrot::default());
            let server = start(&config, parrot.clone()).expect("no other server listens there");
            Bench { _folder: folder, config, parrot, server: Some(server) }
        }

        fn connect(&self) -> UnixStream {
            connect(&self.config.path)
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            self.server.take().into_iter().for_each(stop);
            assert!(!self.config.path.exists(), "the socket is removed");
        }
    }

    fn stop(server: Server) {
        server.stop(Instant::now() + Duration::from_secs(60));
    }

    fn connect(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).expect("the server listens");
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
    fn a_request_of_another_version_is_refused_with_ours() {
        let bench = Bench::new();
        let reply = ask(&bench.connect(), r#"{"version":2,"request":"something new"}"#);
        assert!(reply.contains("speaks version 1, not 2"), "{reply}");
    }

    #[test]
    fn silent_clients_do_not_delay_others() {
        let bench = Bench::new();
        let silent: Vec<UnixStream> = (0..10).map(|_| bench.connect()).collect();
        (&silent[0]).write_all(b"{\"version\":1,").expect("written");
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);
    }

    #[test]
    fn long_requests_do_not_delay_a_list_a_status_or_another_kind_of_request() {
        let bench = Bench::new();
        let asked = |line: &str| {
            let stream = bench.connect();
            (&stream).write_all(format!("{line}\n").as_bytes()).expect("written");
            stream
        };
        let busy = bench.parrot.busy.lock();
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
    fn one_connection_too_many_is_refused_with_a_reason() {
        let bench = Bench::new();
        let places = PLACES.of(nix::unistd::geteuid().as_raw());
        let mut streams: Vec<UnixStream> = (0..places).map(|_| bench.connect()).collect();
        assert_eq!(ask(&streams[places - 1], LIST), NO_VMS); // all are accepted by now
        let mut reply = String::new();
        let _ = bench.connect().read_to_string(&mut reply);
        assert!(reply.contains(&format!("all {places} connections are in use")), "{reply:?}");
        streams.clear();
        while bench.parrot.closed.lock().len() < places {
            thread::yield_now();
        }
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);
    }

    #[test]
    fn registered_vms_take_no_place_of_another_client() {
        let bench = Bench::new();
        let places = PLACES.of(nix::unistd::geteuid().as_raw());
        let register = serde_json::to_string(&Envelope::from(Request::Register {
            vm: Box::new(crate::guests::fake::FakeGuests::default().started_view(1)),
            live: LiveReport::default(),
        }));
        let register = register.expect("JSON");
        let registered: Vec<UnixStream> = (0..places)
            .map(|_| {
                let stream = bench.connect();
                assert_eq!(ask(&stream, &register), "{\"ok\":\"done\"}\n");
                stream
            })
            .collect();
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS, "beside {} registered VMs", registered.len());
    }

    #[test]
    fn a_client_that_connects_before_the_server_serves_is_answered_once_it_does() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = SocketConfig { path: folder.path().join("a.sock"), ..SocketConfig::default() };
        let bound = Bound::at(&config, &Access::new(None)).expect("nothing listens there");
        let stream = connect(&config.path);
        let server = bound.serve(Arc::new(Parrot::default()));
        assert_eq!(ask(&stream, LIST), NO_VMS);
        stop(server);
        let bound = Bound::at(&config, &Access::new(None)).expect("nothing listens there");
        bound.end();
        assert!(!config.path.exists());
    }

    #[test]
    fn the_socket_of_a_running_server_is_kept_and_that_of_a_dead_one_is_replaced() {
        let bench = Bench::new();
        let second = start(&bench.config, bench.parrot.clone()).map(stop);
        let error = second.expect_err("one listens already").to_string();
        let holder = format!(": another wideleafd (pid {}) is listening there; ", std::process::id());
        assert!(error.starts_with("cannot listen at ") && error.contains(&holder), "{error}");
        assert_eq!(ask(&bench.connect(), LIST), NO_VMS);

        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = SocketConfig { path: folder.path().join("a.sock"), ..SocketConfig::default() };
        drop(UnixListener::bind(&config.path).expect("bound"));
        assert!(config.path.exists(), "a file without a listener");
        let server = start(&config, bench.parrot.clone()).expect("the file is replaced");
        assert_eq!(ask(&connect(&config.path), LIST), NO_VMS);
        stop(server);
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_left_alone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = SocketConfig { path: folder.path().join("precious"), ..SocketConfig::default() };
        std::fs::write(&config.path, "data").expect("written");
        let parrot = Arc::new(Parrot::default());
        let error = start(&config, parrot).map(stop).expect_err("it is a file");
        assert!(error.to_string().contains("is not a socket"), "{error}");
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
    fn a_server_that_ends_leaves_the_socket_of_another_at_the_same_path() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = SocketConfig { path: folder.path().join("control.sock"), ..SocketConfig::default() };
        let first = start(&config, Arc::default()).expect("no other server listens there");
        std::fs::remove_file(&config.path).expect("it is there");
        let second = start(&config, Arc::default()).expect("there is no file");
        stop(first);
        assert_eq!(ask(&connect(&config.path), LIST), NO_VMS);
        stop(second);
        assert!(!config.path.exists());
    }

    #[test]
    fn the_server_keeps_serving_after_any_bytes() {
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
