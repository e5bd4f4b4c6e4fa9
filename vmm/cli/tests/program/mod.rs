//! The program as these tests run it: in its own folder, which is also its folder for temporary files, so that files
//! left behind are visible.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread::yield_now;

use assert_cmd::Command;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A folder for one test.
pub struct Scratch(TempDir);

impl Scratch {
    pub fn new() -> Scratch {
        Scratch(tempfile::tempdir().unwrap())
    }

    /// The program under test: the one in `WIDELEAF_BIN`, or the one built together with this test.
    pub fn program(&self) -> PathBuf {
        std::env::var_os("WIDELEAF_BIN").map_or_else(|| env!("CARGO_BIN_EXE_wideleaf").into(), PathBuf::from)
    }

    /// The program in this folder, with these arguments.
    pub fn wideleaf(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program());
        command.args(arguments).current_dir(&self.0).env("TMPDIR", self.0.path()).env_remove("WIDELEAF_LOG");
        command
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and returns its path as an argument.
    pub fn file(&self, name: &str, content: &[u8]) -> String {
        fs::write(self.path(name), content).unwrap();
        self.path(name).into_os_string().into_string().unwrap()
    }

    /// Names of all entries in the folder.
    pub fn names(&self) -> Vec<String> {
        fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// The command must fail with this exit code, empty standard output, and one line on standard error that begins
    /// with the program's name and contains each of `words`. It must not add a file to the folder.
    pub fn refuses(&self, arguments: &[&str], code: i32, words: &[&str]) {
        let before = self.names();
        let output = self.wideleaf(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: one line, not {stderr}");
        assert!(stderr.starts_with("wideleaf: "), "{arguments:?}: {stderr}");
        words.iter().for_each(|word| assert!(stderr.contains(word), "{arguments:?}: no {word:?} in {stderr}"));
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert_eq!(self.names(), before, "{arguments:?} leaves nothing behind");
    }
}

/// A program that does not outlive its test.
pub struct Running(pub Child);

impl Running {
    pub fn start(scratch: &Scratch, arguments: &[&str]) -> Running {
        let mut command = std::process::Command::new(scratch.program());
        command.args(arguments).current_dir(scratch.path(".")).env("TMPDIR", scratch.path("."));
        Running(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Waits until `found` holds for a file of `/proc/PID/task/*/`.
    pub fn wait_for(&mut self, file: &str, found: impl Fn(&str) -> bool) -> String {
        loop {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
            let texts = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join(file)).ok());
            if let Some(text) = texts.into_iter().find(|text| found(text)) {
                return text.trim().to_owned();
            }
            assert_eq!(self.0.try_wait().unwrap(), None, "it ended before that");
            yield_now();
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// The exit code and standard error.
    pub fn end(mut self) -> (Option<i32>, String) {
        let stderr = std::io::read_to_string(self.0.stderr.take().unwrap()).unwrap();
        (self.0.wait().unwrap().code(), stderr)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
