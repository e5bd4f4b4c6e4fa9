//! `wideleaf run --control-socket` and `wideleaf vm`: a VM is paused, resumed, asked and stopped over its socket, whatever else is written
//! there. Needs KVM (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[expect(dead_code, reason = "other tests use the rest of it")]
mod program;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use program::{Running, Scratch};
use serde_json::{Value, json};
use wideleaf_guest_tests::has_kvm;

const ARGUMENTS: [&str; 8] = [
    "run",
    "pattern",
    "--memory=128M",
    "--policy=greedy",
    "--cmdline=bytes=32M seconds=600",
    "--no-daemon",
    "--control-socket=vm.sock",
    "--output=result.json",
];

/// A guest that rewrites its memory for as long as the test needs.
fn start(scratch: &Scratch) -> Running {
    let mut run = Running::start(scratch, &[&ARGUMENTS[..], &["--format=json"]].concat());
    // An answer, not only the file: until then there is no VM.
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
    }
    run
}

fn vm(scratch: &Scratch, words: &[&str]) -> Value {
    let output = scratch.wideleaf(&[&["vm", "vm.sock"], words, &["--format=json"]].concat()).assert().success();
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// A line of our own, and the reply.
fn say(stream: &UnixStream, line: &str) -> Value {
    (&*stream).write_all(format!("{line}\n").as_bytes()).unwrap();
    reply(stream)
}

fn reply(stream: &UnixStream) -> Value {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).unwrap();
    serde_json::from_str(&reply).unwrap_or_else(|error| panic!("{reply:?}: {error}"))
}

#[test]
fn a_vm_is_paused_resumed_and_stopped_and_its_run_ends_well() {
    if !has_kvm() {
        return;
    }
    let scratch = Scratch::new();
    let run = start(&scratch);
    let mode = std::fs::metadata(scratch.path("vm.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let running = vm(&scratch, &["status"]);
    assert_eq!(
        (&running["state"], &running["workload"], &running["pid"]),
        (&json!("running"), &json!("pattern"), &json!(run.0.id()))
    );
    for _ in 0..2 {
        let paused = vm(&scratch, &["pause"]);
        assert_eq!((&paused["state"], &paused["vcpus"]), (&json!("paused"), &json!(["paused"])));
    }
    for _ in 0..2 {
        assert_eq!(vm(&scratch, &["resume"])["state"], "running", "one resume ends both pauses, and another is none");
    }
    assert_eq!(vm(&scratch, &["pause"])["state"], "paused");
    let ended = vm(&scratch, &["stop", "--how=kill"]);
    assert_eq!((&ended["state"], &ended["exit"]), (&json!("ended"), &json!("stopped")));
    assert_eq!(run.end(), (Some(0), String::new()));
    let report: Value = serde_json::from_slice(&std::fs::read(scratch.path("result.json")).unwrap()).unwrap();
    assert_eq!(report["outcome"], "stopped");
    assert_eq!(scratch.names(), ["result.json"], "the socket is removed");
}

#[test]
fn its_policy_is_switched_off_and_on_and_its_figures_are_told() {
    if !has_kvm() {
        return;
    }
    let scratch = Scratch::new();
    let _run = start(&scratch);
    assert_eq!(vm(&scratch, &["set-policy", "off"])["policy"], "off");
    let statistics = vm(&scratch, &["statistics"]);
    let of_vm = &statistics["vm"];
    assert_eq!((&of_vm["state"], &of_vm["policy"], &of_vm["vmm"]), (&json!("off"), &json!("off"), &json!("wideleaf")));
    let ram = of_vm["ram"].as_array().unwrap().iter().map(|piece| piece["bytes"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(ram, 128 << 20);
    assert!(statistics["devices"]["bus"]["port_reads_unanswered"].is_u64(), "{statistics}");
    scratch.refuses(
        &["vm", "vm.sock", "set-policy", "auto"],
        2,
        &["its policy stays greedy", "off and greedy can be set"],
    );
    assert_eq!(vm(&scratch, &["set-policy", "greedy"])["policy"], "greedy");
    scratch.refuses(&["vm", "vm.sock", "stop", "--how=ask"], 2, &["no power button", "stop it with kill"]);
    for words in ["statistics", "status"] {
        scratch.wideleaf(&["vm", "vm.sock", words]).assert().success();
    }
}

#[test]
fn whatever_is_written_there_the_vm_answers_the_others() {
    if !has_kvm() {
        return;
    }
    let scratch = Scratch::new();
    let _run = start(&scratch);
    let connect = || UnixStream::connect(scratch.path("vm.sock")).unwrap();
    let stream = connect();
    let hello = say(&stream, r#"{"version":1,"request":"hello"}"#);
    assert_eq!(hello["ok"]["hello"]["version"], 1);
    assert!(hello["ok"]["hello"]["capabilities"].as_array().unwrap().contains(&json!("stop.kill")));
    let error = |line: &str| say(&stream, line)["error"].as_str().unwrap_or_else(|| panic!("{line}")).to_owned();
    assert!(error(r#"{"version":2,"request":"pause"}"#).starts_with("this VM speaks version 1, not 2"));
    assert!(error(r#"{"version":1,"request":"explode"}"#).contains("unknown variant `explode`"));
    assert!(error(r#"{"version":1,"request":"stop"}"#).contains("missing field `how`"));
    assert!(error("hello?").starts_with("this is no request"));
    // Longer than a request may be, without an end.
    let endless = connect();
    let chunk = vec![b'x'; 1 << 20];
    while (&endless).write_all(&chunk).is_ok() {}
    drop(endless);
    // Silent ones take all places; one more is told so. Root has two more than others.
    let silent: Vec<UnixStream> = (0..12).map(|_| connect()).collect();
    assert!(reply(&silent[11])["error"].as_str().unwrap().contains("connections are open"));
    drop(silent);
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {}
    assert_eq!(vm(&scratch, &["status"])["state"], "running");
}

#[test]
fn a_place_that_is_taken_is_refused_and_one_that_is_left_over_is_used() {
    if !has_kvm() {
        return;
    }
    let scratch = Scratch::new();
    let pid = std::process::id().to_string();
    let live = UnixListener::bind(scratch.path("vm.sock")).unwrap();
    scratch.refuses(
        &ARGUMENTS,
        4,
        &["another process (pid ", &pid, "is listening at vm.sock", "name another path with --control-socket"],
    );
    drop(live);
    let run = start(&scratch);
    vm(&scratch, &["stop", "--how=kill"]);
    assert_eq!(run.end().0, Some(0));
    std::fs::remove_file(scratch.path("result.json")).unwrap();
    scratch.file("vm.sock", b"a file of somebody's");
    scratch.refuses(&ARGUMENTS, 4, &["vm.sock is no socket: move it away, or name another path"]);
    let nowhere = [&ARGUMENTS[..6], &["--control-socket=none/vm.sock"]].concat();
    scratch.refuses(&nowhere, 4, &["cannot listen at none/vm.sock: No such file"]);
}

#[test]
fn who_asks_a_vm_that_is_not_there_is_told_so() {
    let scratch = Scratch::new();
    scratch.refuses(&["vm", "none.sock", "status"], 4, &["no VM listens at none.sock", "--control-socket"]);
    drop(UnixListener::bind(scratch.path("left.sock")).unwrap());
    scratch.refuses(&["vm", "left.sock", "pause"], 4, &["no VM listens at left.sock"]);
    let native = ["run", "--native", "gups", "--control-socket=vm.sock"];
    scratch.wideleaf(&native).assert().code(2);
}
