//! The programs of the lab as tests start them, and requests to the API server.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use wideleaf_testing::{Need, is_there};

/// Time limit for a machine that compiles on all cores at the same time.
pub const WITHIN: Duration = Duration::from_secs(120);
/// Interval between two looks.
const PACE: Duration = Duration::from_millis(50);

/// Waits until a value is there.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < WITHIN, "{what}: not within {WITHIN:?}");
        std::thread::sleep(PACE);
    }
}

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The lab's program; `None` if the test is to be skipped.
pub fn program() -> Option<PathBuf> {
    let build = root().join("fleet/build");
    let output = Command::new(build).arg("--cached").stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let found = if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) };
    is_there(Need::Fleet, found).then(|| PathBuf::from(text(&output.stdout)))
}

/// A child process that does not outlive its test.
#[derive(Debug)]
pub struct Process(pub Child);

impl Process {
    /// Starts a command that prints one line of JSON when it is ready, and waits for that line.
    pub fn start<T: DeserializeOwned>(command: &mut Command) -> (Process, T) {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut process = Process(child);
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let why = std::io::read_to_string(process.0.stderr.take().unwrap()).unwrap();
            panic!("{command:?} is not ready: {why}");
        }
        (process, serde_json::from_str(&line).unwrap())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }
}

impl Drop for Process {
    /// By SIGTERM, so that it removes its files; by SIGKILL if that does not end it.
    fn drop(&mut self) {
        const ENDS_WITHIN: Duration = Duration::from_secs(30);
        // The id of a process that was waited for may be another one's by now.
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        let began = Instant::now();
        let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGTERM);
        while began.elapsed() < ENDS_WITHIN {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(PACE);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a server says about itself.
#[derive(Clone, Debug, Deserialize)]
pub struct Ready {
    /// Address of the API server.
    pub server: String,
    /// Path of the administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// Path of the scheduler's kubeconfig.
    pub scheduler_kubeconfig: PathBuf,
    /// Path of the socket for requests of tests.
    pub admin_socket: PathBuf,
    /// Path of the log with a line for each request that may change something.
    pub audit_log: PathBuf,
    /// Time from the start to here, in milliseconds.
    pub ready_after_ms: u64,
}

/// A running API server with its store and controllers.
#[derive(Debug)]
pub struct Server {
    program: PathBuf,
    folder: PathBuf,
    options: Vec<String>,
    process: Option<Process>,
    /// What it said when it was ready.
    pub ready: Ready,
}

impl Server {
    /// A server of its own; `None` if the test is to be skipped.
    pub fn start(options: &[&str]) -> Option<Server> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let program = program()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // It makes the folder and removes it, also when this process is killed.
        let folder = std::env::temp_dir().join(format!("wideleaf-fleet-{}-{number}", std::process::id()));
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        let (process, ready) = Process::start(&mut serve(&program, &folder, &options));
        Some(Server { program, folder, options, process: Some(process), ready })
    }

    /// One server for all tests that run at the same time and disturb no other one.
    pub fn shared() -> Option<Arc<Server>> {
        static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock();
        if let Some(server) = shared.upgrade() {
            return Some(server);
        }
        let server = Arc::new(Server::start(&[])?);
        *shared = Arc::downgrade(&server);
        Some(server)
    }

    /// A command of the lab's program.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(name).stdin(Stdio::null());
        command
    }

    /// Helm's client; its output if it succeeds.
    pub fn helm(&self, arguments: &[&str]) -> Output {
        let mut command = self.command("helm");
        // Helm keeps files in these folders of a user.
        for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(name, self.folder.join("helm"));
        }
        command.arg("--kubeconfig").arg(&self.ready.kubeconfig).args(arguments).output().unwrap()
    }

    /// Starts the scheduler of Kubernetes.
    pub fn schedule(&self) -> Process {
        let mut command = self.command("schedule");
        command.arg("--kubeconfig").arg(&self.ready.scheduler_kubeconfig);
        Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Nodes that exist on paper, and what was made with them.
    pub fn nodes(&self, arguments: &[&str]) -> (Process, Value) {
        let mut command = self.command("nodes");
        Process::start(command.arg("--kubeconfig").arg(&self.ready.kubeconfig).args(arguments))
    }

    /// Id of its process.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().0.id()
    }

    /// Kills it outright; its files stay.
    pub fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.0.kill().unwrap();
        process.0.wait().unwrap();
    }

    /// Starts it again with the files that a killed one left.
    pub fn restart(&mut self) {
        let (process, ready) = Process::start(&mut serve(&self.program, &self.folder, &self.options));
        (self.process, self.ready) = (Some(process), ready);
    }

    /// The store forgets all revisions but the newest.
    pub fn compact(&self) {
        self.admin().post("/fleet-lab/compact", &json!({})).done();
    }

    /// Requests of the administrator.
    pub fn admin(&self) -> Client<'_> {
        Client { socket: &self.ready.admin_socket, user: String::new() }
    }

    /// Requests of another user.
    pub fn user(&self, name: &str, groups: &[&str]) -> Client<'_> {
        let mut user = format!("Impersonate-User: {name}\r\n");
        groups.iter().for_each(|group| user.push_str(&format!("Impersonate-Group: {group}\r\n")));
        Client { socket: &self.ready.admin_socket, user }
    }

    /// Number of successful writes of a user since the server's first start, by the audit log, after byte `from` of
    /// the log.
    pub fn writes_of(&self, user: &str, from: u64) -> usize {
        let text = fs::read(&self.ready.audit_log).unwrap();
        let text = String::from_utf8_lossy(&text[from as usize..]).into_owned();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter(|line| line["user"]["username"] == user && line["responseStatus"]["code"].as_u64() < Some(300))
            .count()
    }

    /// Size of the audit log, in bytes.
    pub fn audited(&self) -> u64 {
        fs::metadata(&self.ready.audit_log).unwrap().len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process.take().is_none() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn serve(program: &Path, folder: &Path, options: &[String]) -> Command {
    let mut command = Command::new(program);
    command.arg("serve").arg("--dir").arg(folder).args(options);
    command
}

/// Kinds of patches, by their media types.
pub const MERGE: &str = "application/merge-patch+json";
/// A patch by server-side apply.
pub const APPLY: &str = "application/apply-patch+yaml";

/// A user that makes requests.
#[derive(Clone, Debug)]
pub struct Client<'a> {
    socket: &'a Path,
    user: String,
}

/// An answer of the API server.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status of HTTP.
    pub status: u16,
    /// The object, or why it is missing.
    pub body: Value,
}

impl Answer {
    /// The object.
    ///
    /// # Panics
    /// Panics if the request was refused.
    pub fn done(self) -> Value {
        assert!(self.status < 300, "{}: {}", self.status, self.body);
        self.body
    }

    /// The reason of a refusal with this status.
    ///
    /// # Panics
    /// Panics if it was not refused, or with another status.
    pub fn refused(self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.body);
        self.body["message"].as_str().unwrap_or_default().to_owned()
    }
}

impl Client<'_> {
    /// The same user with a token of a pod on this node.
    pub fn of_node(mut self, node: &str) -> Self {
        self.user.push_str(&format!("Impersonate-Extra-authentication.kubernetes.io%2Fnode-name: {node}\r\n"));
        self
    }

    /// Reads an object.
    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, None)
    }

    /// Makes an object.
    pub fn post(&self, path: &str, object: &Value) -> Answer {
        self.request("POST", path, Some(("application/json", object)))
    }

    /// Changes an object by a patch of this kind.
    pub fn patch(&self, path: &str, kind: &str, patch: &Value) -> Answer {
        self.request("PATCH", path, Some((kind, patch)))
    }

    /// Removes an object.
    pub fn delete(&self, path: &str) -> Answer {
        self.request("DELETE", path, None)
    }

    /// A path's text, for answers that are not JSON.
    pub fn text(&self, path: &str) -> String {
        String::from_utf8(self.exchange("GET", path, None).1).unwrap()
    }

    /// The first event of a watch.
    pub fn first_event(&self, path: &str) -> Value {
        let mut stream = BufReader::new(self.send("GET", path, None));
        let mut line = String::new();
        while !line.starts_with('{') {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0, "{path} has no event");
        }
        serde_json::from_str(&line).unwrap()
    }

    fn request(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Answer {
        let (status, bytes) = self.exchange(method, path, body);
        let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| json!(String::from_utf8_lossy(&bytes)));
        Answer { status, body }
    }

    /// A request of HTTP 1.0: its answer has no chunks, and ends with the connection.
    fn send(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> UnixStream {
        let (kind, body) = body.map_or(("", String::new()), |(kind, body)| (kind, body.to_string()));
        let kind = if kind.is_empty() { String::new() } else { format!("Content-Type: {kind}\r\n") };
        let length = body.len();
        let mut stream = UnixStream::connect(self.socket).unwrap();
        let user = &self.user;
        // In one piece: the server may answer, and end the connection, before it has read all of a request.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: lab\r\nAccept: application/json\r\n{user}{kind}Content-Length: \
             {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn exchange(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> (u16, Vec<u8>) {
        let mut text = Vec::new();
        self.send(method, path, body).read_to_end(&mut text).unwrap();
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        match response.parse(&text) {
            Ok(httparse::Status::Complete(head)) => (response.code.unwrap(), text[head..].to_vec()),
            other => panic!("{method} {path}: {other:?}: {}", String::from_utf8_lossy(&text)),
        }
    }
}

/// Path of the core group's objects of a kind in a namespace.
pub fn core(namespace: &str, kind: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/{kind}")
}

/// Path of the VMIs of a namespace.
pub fn vmis(namespace: &str) -> String {
    format!("/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances")
}

/// Makes a namespace with a name of its own, and waits for its account.
pub fn namespace(server: &Server, name: &str) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("{name}-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    server.admin().post("/api/v1/namespaces", &json!({"metadata": {"name": name}})).done();
    let account = format!("{}/default", core(&name, "serviceaccounts"));
    eventually("the namespace has an account", || (server.admin().get(&account).status == 200).then_some(()));
    name
}
