//! Guests that listen to their power button: one of a few instructions that switches itself off, and built-in kernels
//! that end early. The tests press the button over the control socket and by keys on the console. Needs KVM
//! (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use crate::migration::{AMONG_QUESTIONS, ask_to_end, status};
use crate::program::new_scratch;
use nix::pty::{OpenptyResult, openpty};
use serde_json::Value;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::tiny_guest::{image, pvh};

/// A guest that enables the event, prints `>`, waits for the event's status, clears it, and switches off
/// once it is clear.
fn listener() -> Vec<u8> {
    // mov dx, 0x602; mov ax, 0x100; out dx, ax
    let enable: &[u8] = &[0x66, 0xba, 0x02, 0x06, 0x66, 0xb8, 0x00, 0x01, 0x66, 0xef];
    let greet: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'>', 0xee]; // mov dx, 0x3f8; mov al, '>'; out dx, al
    // mov dx, 0x600; in ax, dx; test ah, 1; jz to the in
    let wait: &[u8] = &[0x66, 0xba, 0x00, 0x06, 0x66, 0xed, 0xf6, 0xc4, 0x01, 0x74, 0xf9];
    let clear: &[u8] = &[0x66, 0xb8, 0x00, 0x01, 0x66, 0xef]; // mov ax, 0x100; out dx, ax
    let check: &[u8] = &[0x66, 0xed, 0xf6, 0xc4, 0x01, 0x75, 0xfe]; // in ax, dx; test ah, 1; jnz to itself
    // mov dx, 0x604; mov ax, 0x2000; out dx, ax; jmp to itself
    let off: &[u8] = &[0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x20, 0x66, 0xef, 0xeb, 0xfe];
    [enable, greet, wait, clear, check, off].concat()
}

const ARGUMENTS: [&str; 6] =
    ["run", "image", "--memory=64M", "--policy=never", "--no-daemon", "--control-socket=vm.sock"];

/// Capabilities of the VM; empty if there is no VM yet.
fn capabilities(scratch: &Scratch) -> Vec<Value> {
    let Ok(stream) = UnixStream::connect(scratch.path("vm.sock")) else { return Vec::new() };
    (&stream).write_all(b"{\"version\":1,\"request\":\"hello\"}\n").unwrap();
    let mut reply = String::new();
    BufReader::new(&stream).read_line(&mut reply).unwrap();
    let reply: Value = serde_json::from_str(&reply).unwrap();
    reply["ok"]["hello"]["capabilities"].as_array().unwrap().clone()
}

#[test]
fn a_listening_guest_switches_off_on_request_and_its_run_succeeds() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), &listener()));
    let mut run = Running::start(&scratch, &[&ARGUMENTS[..], &["--output=result", "--format=json"]].concat());
    while !capabilities(&scratch).contains(&"stop.ask".into()) {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
    }
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=ask"]).assert().success();
    assert_eq!(run.end(), (Some(0), ">\n".to_owned()), "a line of the guest's, and none of ours");
    let report: Value = serde_json::from_slice(&std::fs::read(scratch.path("result")).unwrap()).unwrap();
    assert_eq!(report["outcome"], "success");
}

#[test]
fn ctrl_a_p_presses_the_power_button() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), &listener()));
    let OpenptyResult { master, slave } = openpty(None, None).unwrap();
    let end = || Stdio::from(slave.try_clone().unwrap());
    let mut command = Command::new(scratch.program());
    command.args(ARGUMENTS).args(["--console", "--output=result"]).current_dir(scratch.path("."));
    let run = Running(command.stdin(end()).stdout(end()).stderr(Stdio::piped()).spawn().unwrap());
    let (mut keys, mut shown) = (File::from(master), [0]);
    keys.read_exact(&mut shown).unwrap();
    assert_eq!(shown, *b">");
    keys.write_all(b"\x01p").unwrap();
    assert_eq!(run.end(), (Some(0), String::new()));
}

#[test]
fn kernels_that_run_for_a_time_end_early_verify_and_report() {
    if !has_kvm() {
        return;
    }
    for [kernel, cmdline] in [
        ["gups", "--cmdline=log2_words=22 seconds=3600"],
        ["pattern", "--cmdline=bytes=8M seconds=3600"],
        ["phases", "--cmdline=hot=2M range=8M constant=0 sparse=0 cold=0 phases=3 phase_ms=3600000"],
    ] {
        let scratch = new_scratch();
        let arguments =
            ["run", kernel, "--memory=64M", "--vcpus=2", "--no-daemon", "--control-socket=vm.sock", cmdline];
        let mut run = Running::start(&scratch, &[&arguments[..], &["--output=result", "--format=json"]].concat());
        while !capabilities(&scratch).contains(&"stop.ask".into()) {
            assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
            std::thread::sleep(AMONG_QUESTIONS);
        }
        ask_to_end(&scratch, "vm.sock");
        assert_eq!(run.end(), (Some(0), String::new()), "{kernel}");
        let report: Value = serde_json::from_slice(&std::fs::read(scratch.path("result")).unwrap()).unwrap();
        // GUPS allows for lost updates among its vCPUs, so not each word need be right.
        assert_eq!((&report["outcome"], &report["verification"]["passed"]), (&"success".into(), &true.into()));
        let seconds = report["results"]["seconds"]["value"].as_f64();
        assert!(seconds > Some(0.0) && seconds < Some(3600.0), "{kernel}: {report}");
    }
}

#[test]
fn a_kernel_that_runs_for_a_number_of_rounds_does_not_listen() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let arguments = ["run", "pattern", "--memory=64M", "--no-daemon", "--control-socket=vm.sock"];
    let mut run = Running::start(&scratch, &[&arguments[..], &["--cmdline=bytes=32M passes=50000"]].concat());
    while capabilities(&scratch).is_empty() {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it answered");
    }
    while status(&scratch)["phase"].is_null() {
        std::thread::sleep(AMONG_QUESTIONS);
    }
    scratch.refuses(&["vm", "vm.sock", "stop", "--how=ask"], 2, &["built-in kernels with `seconds=`"]);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end().0, Some(0));
}

#[test]
fn a_guest_that_does_not_listen_runs_on_and_the_line_gives_the_reason() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    // Code of `jmp` to itself.
    scratch.file("image", &image(&pvh(), &[0xeb, 0xfe]));
    let mut run = Running::start(&scratch, &ARGUMENTS);
    while capabilities(&scratch).is_empty() {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it answered");
    }
    assert!(!capabilities(&scratch).contains(&"stop.ask".into()));
    let words = ["listens to no power button", "stop it with kill"];
    scratch.refuses(&["vm", "vm.sock", "stop", "--how=ask"], 2, &words);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end().0, Some(0));
}
