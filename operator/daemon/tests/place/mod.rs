//! The program as these tests run it: in a folder of its own, with its configuration, sockets, state and log.
#![allow(clippy::unwrap_used, dead_code, reason = "a test may panic, and does not need all of it")]

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wideleaf_control::client::ask;
use wideleaf_control::protocol::{Answer, Request};
use wideleaf_control::view::{Care, DaemonView, VmView};

/// Time limit for a machine that compiles on all cores at the same time.
pub const WITHIN: Duration = Duration::from_secs(60);

pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WITHIN, "{what}: not within {WITHIN:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A folder with a configuration, and daemons that run on it.
pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap() };
        place.configure("");
        place
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.file("control.sock")
    }

    pub fn configure(&self, more: &str) {
        let metrics = format!("unix:{}", self.file("metrics.sock").display());
        self.configure_with(&metrics, more);
    }

    pub fn configure_with(&self, metrics: &str, more: &str) {
        let (socket, state) = (self.socket(), self.file("state.json"));
        let text = format!(
            "[socket]\npath = {socket:?}\n[state]\npath = {state:?}\n[metrics]\nlisten = {metrics:?}\n{more}\n"
        );
        std::fs::write(self.file("wideleafd.toml"), text).unwrap();
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wideleafd"));
        command.arg("--config").arg(self.file("wideleafd.toml")).env_remove("NOTIFY_SOCKET");
        command
    }

    /// Starts a daemon and waits until it answers.
    pub fn start(&self) -> Daemon<'_> {
        let log = std::fs::File::options().create(true).append(true).open(self.file("log")).unwrap();
        let child = self.command().stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let daemon = Daemon { place: self, child };
        eventually("the daemon answers", || ask(&self.socket(), Request::Daemon).is_ok());
        daemon
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.file("log")).unwrap()
    }
}

pub struct Daemon<'a> {
    pub place: &'a Place,
    pub child: Child,
}

impl Daemon<'_> {
    pub fn ask(&self, request: Request) -> Answer {
        ask(&self.place.socket(), request).unwrap()
    }

    pub fn view(&self) -> DaemonView {
        let Answer::Daemon(view) = self.ask(Request::Daemon) else { panic!("that is no answer") };
        view
    }

    /// The managed VMs.
    pub fn managed(&self) -> Vec<VmView> {
        let Answer::Vms(mut vms) = self.ask(Request::List) else { panic!("that is no answer") };
        vms.retain(|vm| vm.care != Care::Unmanaged);
        vms
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    pub fn end(mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.child.wait().unwrap()
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The text that a scraper receives.
pub fn scrape(mut stream: impl Read + Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
    let mut scraped = String::new();
    stream.read_to_string(&mut scraped).unwrap();
    scraped
}
