//! Every argument that is a path, with something other than a regular file behind it. The command refuses it in one
//! line that says what it is, does not wait, and leaves no files behind. A signal also ends a command that waits. The
//! commands that this program shares with `wideleaf` are checked there.

use crate::program::new_scratch;
use clap::CommandFactory as _;
use nix::sys::signal::Signal;
use wideleaf_lab::args::Cli;
use wideleaf_testing::paths::{HERE, LONG, Row, missing_in, refuses_to_read, refuses_to_write};
use wideleaf_testing::scratch::Running;

/// Commands of `wideleaf` that this program has as well.
const SHARED: [&str; 2] = ["run", "tlbcost"];

/// Commands that read the file, by the name of the argument.
const READ: [Row<'static>; 10] = [
    ("simulate recording", &["simulate", "--recording", HERE]),
    ("simulate trace", &["simulate", "--machine=k8", "--trace", HERE]),
    ("simulate policy", &["simulate", "--trace", "gups", "--policy", "schemes:rules=@@"]),
    ("trace info file", &["trace", "info", HERE]),
    ("image results log", &["image", "results", HERE]),
    ("image linux exec", &["image", "linux", "--output", "made", "--exec", HERE]),
    ("experiment run resume", &["experiment", "run", "quick", "--resume", HERE]),
    ("experiment report file", &["experiment", "report", HERE]),
    ("experiment compare a", &["experiment", "compare", HERE, "b.json"]),
    ("experiment compare b", &["experiment", "compare", "results.json", HERE]),
];

/// Commands that write the file, by the name of the argument.
const WRITTEN: [Row<'static>; 16] = [
    ("predict output", &["predict", "gups", "--output", HERE]),
    ("simulate output", &["simulate", "--machine=k8", "--trace", "gups:log2_words=10", "--output", HERE]),
    ("simulate plot", &["simulate", "--machine=k8", "--trace", "gups:log2_words=10", "--plot", HERE]),
    ("trace record output", &["trace", "record", "gups", "--cmdline=log2_words=10", "--output", HERE]),
    ("trace info output", &["trace", "info", "missing", "--output", HERE]),
    ("image linux output", &["image", "linux", "--bench=cg.S", "--output", HERE]),
    ("image results output", &["image", "results", "missing", "--output", HERE]),
    ("experiment run output", &["experiment", "run", "quick", "--output", HERE]),
    ("experiment run html", &["experiment", "run", "quick", "--html", HERE]),
    ("experiment report output", &["experiment", "report", "missing", "--output", HERE]),
    ("experiment report html", &["experiment", "report", "missing", "--html", HERE]),
    ("experiment compare output", &["experiment", "compare", "missing", "missing", "--output", HERE]),
    ("experiment compare html", &["experiment", "compare", "missing", "missing", "--html", HERE]),
    // A folder in which the command creates files.
    ("experiment report svg", &["experiment", "report", "missing", "--svg", HERE]),
    ("experiment compare svg", &["experiment", "compare", "missing", "missing", "--svg", HERE]),
    ("experiment evidence folder", &["experiment", "evidence", "--folder", HERE]),
];

/// Paths that are not opened as files, with the reason.
const NOT_FILES: [(&str, &str); 7] = [
    ("experiment run against", "a program that is started"),
    ("hold-khugepaged root", "as * root"),
    ("hold-fragments root", "as * root"),
    ("* socket", "connect(2) answers at once for what is no socket; answers have a deadline"),
    ("* root", "the folder of a made-up host, for tests"),
    ("man folder", "files of its own names; nothing has taken over the signals there"),
    ("hold-path path", "removed, never opened"),
];

#[test]
fn a_command_refuses_to_read_a_path_that_is_not_a_file_and_says_what_it_is() {
    refuses_to_read(&new_scratch(), &READ);
}

#[test]
fn a_command_refuses_to_write_a_path_that_is_not_a_file_and_says_what_it_is() {
    refuses_to_write(&new_scratch(), &WRITTEN);
}

#[test]
fn every_path_argument_is_in_one_of_the_tables() {
    let mut missing = missing_in(&Cli::command(), &[&READ, &WRITTEN], &NOT_FILES);
    missing.retain(|name| !SHARED.iter().any(|shared| name.starts_with(&format!("{shared} "))));
    assert_eq!(missing, [""; 0], "in no table");
}

#[test]
fn a_shell_pipe_is_read() {
    let scratch = new_scratch();
    let line = "\"$W\" trace record gups --cmdline log2_words=10 --output t && \"$W\" trace info <(cat t)";
    let mut bash = assert_cmd::Command::new("bash");
    bash.args(["-c", line]).current_dir(scratch.path(".")).env("W", scratch.program()).timeout(LONG).assert().success();
}

#[test]
fn one_signal_ends_a_command_that_waits_for_a_writer_and_removes_its_files() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let scratch = new_scratch();
        // The test's standard input is open, and nothing is written to it.
        let mut command = std::process::Command::new(scratch.program());
        command.args(["image", "results"]).current_dir(scratch.path(".")).env("TMPDIR", scratch.path("."));
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut waits = Running(command.stderr(std::process::Stdio::piped()).spawn().unwrap());
        let _input = waits.0.stdin.take();
        // The command installs its handlers before this thread starts.
        waits.wait_for("comm", |name| name == "signals\n");
        waits.signal(signal);
        let (code, stderr) = waits.end();
        assert_eq!(code, Some(130), "{stderr}");
        assert!(stderr.starts_with("wideleaf-lab: interrupted in a call that does not return"), "{stderr}");
        assert_eq!(scratch.names(), [""; 0]);
    }
}
