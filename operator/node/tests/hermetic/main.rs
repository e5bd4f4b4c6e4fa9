//! The programs as a person starts them, without an API server.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod clock;

use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longest wait for another process. A test that waits so long has failed.
const PATIENCE: Duration = Duration::from_secs(120);

fn agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wideleaf-node"));
    command.env_remove("KUBECONFIG").env("HOME", "/nowhere");
    command
}

fn plugin() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-wideleaf"));
    command.env_remove("KUBECONFIG").env("HOME", "/nowhere");
    command
}

/// Exit code, and standard error without its line's end, which must be one line.
fn failed(output: &Output) -> (Option<i32>, String) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    (output.status.code(), text.trim_end().to_owned())
}

#[test]
fn a_file_that_names_no_api_server_is_one_line_and_an_exit_code() {
    let (code, line) = failed(&agent().args(["--node", "n1", "--kubeconfig", "/nowhere"]).output().unwrap());
    assert_eq!(code, Some(3));
    assert!(line.starts_with("wideleaf-node: cannot use /nowhere: "), "{line}");
    let (code, line) = failed(&agent().args(["--node", "n1"]).output().unwrap());
    assert_eq!(code, Some(3));
    assert!(line.starts_with("wideleaf-node: cannot find the API server: "), "{line}");
    let (code, line) = failed(&plugin().args(["list", "--kubeconfig", "/nowhere"]).output().unwrap());
    assert_eq!(code, Some(4));
    assert!(line.starts_with("kubectl-wideleaf: cannot find the API server: "), "{line}");
}

#[test]
fn help_needs_no_cluster() {
    for mut command in [agent(), plugin()] {
        let output = command.arg("--help").output().unwrap();
        assert!(output.status.success() && String::from_utf8(output.stdout).unwrap().contains("Examples:"));
    }
}

/// A running agent; it is killed where the test does not end it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "not seen: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Path of a file that names an API server, by the fields of its cluster.
fn kubeconfig(folder: &Path, cluster: &str) -> String {
    let path = folder.join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters:\n- name: c\n  cluster: {{{cluster}}}\n\
         contexts:\n- name: c\n  context: {{cluster: c, user: u}}\nusers:\n- name: u\n  user: {{}}\n"
    );
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn an_agent_without_api_server_or_daemon_serves_hooks_and_ends_at_sigterm_with_nothing_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let [hooks, daemon] = ["hooks.sock", "control.sock"].map(|name| folder.path().join(name));
    let mut command = agent();
    // It does not listen.
    let config = kubeconfig(folder.path(), "server: 'http://127.0.0.1:1'");
    command.args(["--node", "n1", "--kubeconfig", &config, "--hooks", hooks.to_str().unwrap()]);
    command.args(["--daemon", daemon.to_str().unwrap()]).stderr(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    until("the socket", || hooks.exists() || running.0.try_wait().unwrap().is_some());
    kill(Pid::from_raw(running.0.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    let mut status = None;
    until("its end", || {
        status = running.0.try_wait().unwrap();
        status.is_some()
    });
    let mut log = String::new();
    running.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(status.and_then(|status| status.code()), Some(0), "{log}");
    assert!(!hooks.exists());
    assert!(log.contains("no wideleafd listens at") && log.contains("what it has published stays"), "{log}");
}
