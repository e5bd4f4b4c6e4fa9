//! A program of this workspace as tests run it: in its own folder, which is also its folder for temporary files, so
//! that files left behind are visible. Folder and processes end with the test, also where it fails.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test may panic")]

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use assert_cmd::Command;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// The levels of the log that a program has by itself, without the warning that this host is too busy for an answer in
/// time: standard error is to be as on one that is not.
const LOG: &str = "warn,virtio_queue=off,wideleaf_memory::deadline=error";

/// A folder for one test of a program.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
    program: PathBuf,
}

impl Scratch {
    /// A folder for this program.
    ///
    /// # Panics
    /// Panics if no temporary folder can be made. All of these panic if the program or its files are not as they
    /// should be.
    pub fn of(program: impl Into<PathBuf>) -> Scratch {
        Scratch { folder: tempfile::tempdir().unwrap(), program: program.into() }
    }

    /// The program under test.
    pub fn program(&self) -> PathBuf {
        self.program.clone()
    }

    /// The program in this folder, with these arguments.
    pub fn wideleaf(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program());
        command.args(arguments).current_dir(&self.folder).env("TMPDIR", self.folder.path()).env("WIDELEAF_LOG", LOG);
        command
    }

    /// A name in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file and returns its path as an argument.
    pub fn file(&self, name: &str, content: &[u8]) -> String {
        fs::write(self.path(name), content).unwrap();
        self.path(name).into_os_string().into_string().unwrap()
    }

    /// Names of all entries in the folder.
    pub fn names(&self) -> Vec<String> {
        fs::read_dir(&self.folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// The command must fail with this exit code, empty standard output, and one line on standard error that begins
    /// with the program's name and contains each of `words`. It must not add a file to the folder.
    pub fn refuses(&self, arguments: &[&str], code: i32, words: &[&str]) {
        let before = self.names();
        let output = self.wideleaf(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: one line, not {stderr}");
        let name = self.program.file_name().unwrap().to_str().unwrap();
        assert!(stderr.starts_with(&format!("{name}: ")), "{arguments:?}: {stderr}");
        words.iter().for_each(|word| assert!(stderr.contains(word), "{arguments:?}: no {word:?} in {stderr}"));
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert_eq!(self.names(), before, "{arguments:?} leaves nothing behind");
    }
}

/// A program that does not outlive its test.
#[derive(Debug)]
pub struct Running(pub Child);

impl Running {
    /// Starts it with these arguments, its outputs in pipes.
    pub fn start(scratch: &Scratch, arguments: &[&str]) -> Running {
        let mut command = std::process::Command::new(scratch.program());
        command.args(arguments).current_dir(scratch.path("."));
        command.env("TMPDIR", scratch.path(".")).env("WIDELEAF_LOG", LOG);
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
            sleep(Duration::from_millis(1));
        }
    }

    /// Sends it a signal.
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
