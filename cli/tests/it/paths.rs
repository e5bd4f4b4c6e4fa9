//! Every argument that is a path, with something other than a regular file behind it. The command refuses it in one
//! line that says what it is, does not wait, and leaves no files behind.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use crate::program::new_scratch;
use clap::CommandFactory as _;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use wideleaf::args::Cli;
use wideleaf_testing::paths::{HERE, LONG, Row, missing_in, refuses_to_read, refuses_to_write};

const NATIVE: [&str; 5] = ["run", "--native", "gups", "--cmdline=log2_words=16", "--memory=64M"];

/// Commands that read the file, by the name of the argument.
const READ: [Row<'static>; 6] = [
    ("run workload", &["run", "--no-daemon", HERE]),
    ("run config", &["run", "--config", HERE]),
    ("run initrd", &["run", "gups", "--no-daemon", "--initrd", HERE]),
    ("run disk", &["run", "gups", "--no-daemon", "--disk", HERE]),
    ("run policy", &["run", "--native", "gups", "--policy", "schemes:rules=@@"]),
    ("set policy", &["set", "web", "policy=schemes:rules=@@"]),
];

/// Commands that write the file, by the name of the argument.
const WRITTEN: [Row<'static>; 5] = [
    ("run output", &[NATIVE[0], NATIVE[1], NATIVE[2], NATIVE[3], NATIVE[4], "--output", HERE]),
    ("run record", &[NATIVE[0], NATIVE[1], NATIVE[2], NATIVE[3], NATIVE[4], "--record", HERE]),
    ("demo output", &["demo", "--native", "--output", HERE]),
    ("tlbcost output", &["tlbcost", "--native", "--output", HERE]),
    ("run jail", &["run", "gups", "--no-daemon", "--jail", HERE]),
];

/// Paths that are not opened as files, with the reason.
const NOT_FILES: [(&str, &str); 15] = [
    ("* socket", "connect(2) answers at once for what is no socket; answers have a deadline"),
    ("* root", "the folder of a made-up host, for tests"),
    ("attach qmp", "the daemon connects to it"),
    ("run daemon", "connect(2), as of --socket"),
    ("run control_socket", "bind(2) makes it, and refuses what is there"),
    ("run cgroup", "a folder of the kernel's file system of cgroups"),
    ("vm socket", "connect(2), as of --socket"),
    ("run restore", "a folder of which the files are opened without waiting, and must be regular ones"),
    ("vm snapshot folder", "a folder of its own is made beside it, and takes its place"),
    ("vm snapshot base", "opened as a snapshot, with the VM that it is of"),
    ("tlbcost save", "as --output; it takes a guest first"),
    ("info html", "as --output; it takes a guest first"),
    ("man folder", "files of its own names; nothing has taken over the signals there"),
    ("hold-path path", "removed, never opened"),
    ("hook run more", "words of libvirt's that are not looked at"),
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
    assert_eq!(missing_in(&Cli::command(), &[&READ, &WRITTEN], &NOT_FILES), [""; 0], "in no table");
}

#[test]
fn a_fifo_with_a_reader_and_standard_output_accept_a_result() {
    let scratch = new_scratch();
    mkfifo(&scratch.path("fifo"), Mode::S_IRWXU).unwrap();
    let mut reader = OpenOptions::new();
    let reader = reader.read(true).custom_flags(nix::libc::O_NONBLOCK).open(scratch.path("fifo")).unwrap();
    let arguments = [&NATIVE[..], &["--format=json", "--output", "fifo"]].concat();
    scratch.wideleaf(&arguments).timeout(LONG).assert().success().stdout("");
    let report: serde_json::Value = serde_json::from_reader(reader).unwrap();
    assert_eq!(report["setup"]["workload"], "gups");
    for output in ["-", "/dev/stdout"] {
        let arguments = [&NATIVE[..], &["--format=json", "--output", output]].concat();
        let assert = scratch.wideleaf(&arguments).timeout(LONG).assert().success();
        let report: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
        assert_eq!(report["setup"]["workload"], "gups", "{output}");
    }
    assert_eq!(scratch.names(), ["fifo"]);
    scratch.refuses(
        &[&NATIVE[..], &["--record", "-"]].concat(),
        2,
        &["cannot use --record -: standard output has the report"],
    );
}

#[test]
fn a_shell_pipe_is_read_and_written() {
    let scratch = new_scratch();
    let shell = |line: &str| {
        let mut bash = assert_cmd::Command::new("bash");
        bash.args(["-c", line]).current_dir(scratch.path(".")).env("W", scratch.program()).timeout(LONG).assert()
    };
    shell("\"$W\" run --native gups --cmdline log2_words=16 --memory 64M --output >(cat >written); sleep 1").success();
    let deadline = std::time::Instant::now() + LONG;
    while fs::read_to_string(scratch.path("written")).unwrap_or_default().is_empty() {
        assert!(std::time::Instant::now() < deadline, "the report comes through the pipe");
        std::thread::sleep(Duration::from_millis(20));
    }
}
