//! Every argument that is a path, with something other than a regular file behind it: a FIFO, a folder, an endless
//! device, a socket, nothing. The command refuses it in one line that says what it is, does not wait, and leaves no
//! files behind. A signal also ends a command that waits.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use crate::program::new_scratch;
use clap::{Command, CommandFactory as _};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use wideleaf::args::Cli;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;

/// Time limit for a command that ends, also on a host with a load of 40.
const LONG: Duration = Duration::from_secs(120);

/// Placeholder for the path in the arguments.
const HERE: &str = "@";

const NATIVE: [&str; 5] = ["run", "--native", "gups", "--cmdline=log2_words=16", "--memory=64M"];

/// Commands that read the file, by the name of the argument.
const READ: [(&str, &[&str]); 16] = [
    ("run workload", &["run", "--no-daemon", HERE]),
    ("run config", &["run", "--config", HERE]),
    ("run initrd", &["run", "gups", "--no-daemon", "--initrd", HERE]),
    ("run disk", &["run", "gups", "--no-daemon", "--disk", HERE]),
    ("run policy", &["run", "--native", "gups", "--policy", "schemes:rules=@@"]),
    ("simulate recording", &["simulate", "--recording", HERE]),
    ("simulate trace", &["simulate", "--machine=k8", "--trace", HERE]),
    ("simulate policy", &["simulate", "--trace", "gups", "--policy", "schemes:rules=@@"]),
    ("set policy", &["set", "web", "policy=schemes:rules=@@"]),
    ("trace info file", &["trace", "info", HERE]),
    ("image results log", &["image", "results", HERE]),
    ("image linux exec", &["image", "linux", "--output", "made", "--exec", HERE]),
    ("experiment run resume", &["experiment", "run", "quick", "--resume", HERE]),
    ("experiment report file", &["experiment", "report", HERE]),
    ("experiment compare a", &["experiment", "compare", HERE, "b.json"]),
    ("experiment compare b", &["experiment", "compare", "results.json", HERE]),
];

/// Commands that write the file, by the name of the argument.
const WRITTEN: [(&str, &[&str]); 20] = [
    ("run output", &[NATIVE[0], NATIVE[1], NATIVE[2], NATIVE[3], NATIVE[4], "--output", HERE]),
    ("run record", &[NATIVE[0], NATIVE[1], NATIVE[2], NATIVE[3], NATIVE[4], "--record", HERE]),
    ("demo output", &["demo", "--native", "--output", HERE]),
    ("simulate output", &["simulate", "--machine=k8", "--trace", "gups:log2_words=10", "--output", HERE]),
    ("simulate plot", &["simulate", "--machine=k8", "--trace", "gups:log2_words=10", "--plot", HERE]),
    ("trace record output", &["trace", "record", "gups", "--cmdline=log2_words=10", "--output", HERE]),
    ("trace info output", &["trace", "info", "missing", "--output", HERE]),
    ("image linux output", &["image", "linux", "--bench=cg.S", "--output", HERE]),
    ("image results output", &["image", "results", "missing", "--output", HERE]),
    ("tlbcost output", &["tlbcost", "--native", "--output", HERE]),
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
    ("run jail", &["run", "gups", "--no-daemon", "--jail", HERE]),
];

/// Paths that are not opened as files, with the reason.
const NOT_FILES: [(&str, &str); 14] = [
    ("* socket", "connect(2) answers at once for what is no socket; answers have a deadline"),
    ("* root", "the folder of a made-up host, for tests"),
    ("attach qmp", "the daemon connects to it"),
    ("run daemon", "connect(2), as of --socket"),
    ("run control_socket", "bind(2) makes it, and refuses what is there"),
    ("run cgroup", "a folder of the kernel's file system of cgroups"),
    ("vm socket", "connect(2), as of --socket"),
    ("experiment run against", "a program that is started"),
    ("tlbcost save", "as --output; it takes a guest first"),
    ("man folder", "files of its own names; nothing has taken over the signals there"),
    ("hold-path path", "removed, never opened"),
    ("hold-khugepaged root", "as * root"),
    ("hold-fragments root", "as * root"),
    ("hook run more", "words of libvirt's that are not looked at"),
];

/// Paths that are not regular files, and their names in a refusal.
fn no_files(scratch: &Scratch) -> Vec<(PathBuf, &'static str)> {
    mkfifo(&scratch.path("fifo"), Mode::S_IRWXU).unwrap();
    fs::create_dir(scratch.path("folder")).unwrap();
    drop(UnixListener::bind(scratch.path("socket")).unwrap());
    let kinds = [("fifo", "a FIFO"), ("folder", "a folder"), ("socket", "a socket")];
    kinds.map(|(name, kind)| (scratch.path(name), kind)).into()
}

/// Last line of the output of a command with this path, which must fail by itself.
fn refusal(scratch: &Scratch, arguments: &[&str], path: &str) -> String {
    let arguments: Vec<String> = arguments.iter().map(|argument| with(argument, path)).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let before = scratch.names();
    let output = scratch.wideleaf(&arguments).timeout(LONG).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(2..=7)), "{arguments:?}: {:?} {stderr}", output.status);
    assert_eq!(scratch.names(), before, "{arguments:?} leaves nothing behind");
    stderr
}

/// The argument with the path in place of the placeholder; a value from a file keeps the `@` before it.
fn with(argument: &str, path: &str) -> String {
    match argument.strip_suffix(HERE) {
        Some(before) if before.is_empty() || before.ends_with(HERE) => format!("{before}{path}"),
        _ => argument.to_owned(),
    }
}

#[test]
fn a_command_refuses_to_read_a_path_that_is_not_a_file_and_says_what_it_is() {
    let scratch = new_scratch();
    let mut paths = no_files(&scratch);
    paths.extend([(PathBuf::from("/dev/zero"), "a character device"), (scratch.path("none"), "")]);
    for (name, arguments) in READ {
        for (path, kind) in &paths {
            let said = refusal(&scratch, arguments, path.to_str().unwrap());
            // The second file is not reached if the first does not exist.
            let is_reached = name != "experiment compare b";
            assert!(said.contains(kind) || !is_reached, "{name}: no {kind:?} in {said}");
        }
    }
}

#[test]
fn a_command_refuses_to_write_a_path_that_is_not_a_file_and_says_what_it_is() {
    let scratch = new_scratch();
    for (path, kind) in no_files(&scratch) {
        for (name, arguments) in WRITTEN {
            let is_folder = name.ends_with("svg") || name.ends_with("folder") || name.ends_with("jail");
            if is_folder && kind == "a folder" {
                continue;
            }
            let said = refusal(&scratch, arguments, path.to_str().unwrap());
            assert!(is_folder || said.contains(kind), "{name}: no {kind:?} in {said}");
        }
    }
}

#[test]
fn every_path_argument_is_in_one_of_the_tables() {
    let tables = READ.iter().chain(&WRITTEN).map(|(name, _)| *name);
    let known: BTreeSet<&str> = tables.chain(NOT_FILES.iter().map(|(name, _)| *name)).collect();
    let is_known = |name: &str| {
        let everywhere = format!("* {}", name.rsplit(' ').next().unwrap());
        known.contains(name) || known.contains(everywhere.as_str())
    };
    let mut paths = Vec::new();
    add_paths(&Cli::command(), "", &mut paths);
    assert!(paths.len() > 40, "{paths:?}");
    let unknown: Vec<&String> = paths.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "in no table: {unknown:?}");
}

/// Names of all path arguments of a command and its subcommands.
fn add_paths(command: &Command, before: &str, paths: &mut Vec<String>) {
    let types = [clap::value_parser!(PathBuf).type_id(), clap::value_parser!(std::ffi::OsString).type_id()];
    let is_path = |arg: &&clap::Arg| types.contains(&arg.get_value_parser().type_id());
    paths.extend(command.get_arguments().filter(is_path).map(|arg| format!("{before}{}", arg.get_id())));
    for inner in command.get_subcommands() {
        add_paths(inner, &format!("{before}{} ", inner.get_name()), paths);
    }
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
    shell("\"$W\" trace record gups --cmdline log2_words=10 --output t && \"$W\" trace info <(cat t)").success();
    shell("\"$W\" run --native gups --cmdline log2_words=16 --memory 64M --output >(cat >written); sleep 1").success();
    let deadline = std::time::Instant::now() + LONG;
    while fs::read_to_string(scratch.path("written")).unwrap_or_default().is_empty() {
        assert!(std::time::Instant::now() < deadline, "the report comes through the pipe");
        std::thread::sleep(Duration::from_millis(20));
    }
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
        assert!(stderr.starts_with("wideleaf: interrupted in a call that does not return"), "{stderr}");
        assert_eq!(scratch.names(), [""; 0]);
    }
}
