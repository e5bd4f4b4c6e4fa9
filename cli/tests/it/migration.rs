//! `wideleaf vm SOCKET migrate` and `wideleaf run --incoming`: a guest that checks every word of its memory moves from
//! one run to another while it works, and whatever is lost on the way, one guest goes on. Needs KVM
//! (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::{Running, Scratch};

use crate::program::new_scratch;

/// Kinds of messages (`run/src/migration/frames.rs`).
pub const PAGES: u32 = 2;
pub const MACHINE: u32 = 3;
pub const GO: u32 = 4;
pub const READY: u32 = 17;
pub const RUNNING: u32 = 18;

/// Time between two questions of a test: each starts a program, and the guest needs the processors.
pub const AMONG_QUESTIONS: Duration = Duration::from_millis(20);

/// Two vCPUs that write and check 8 MiB again and again until they are asked to end. On a fast processor that is over a
/// thousand passes a second.
pub const ENDLESS: [&str; 4] = ["pattern", "--vcpus=2", "--memory=128M", "--cmdline=bytes=8M seconds=600"];

pub fn source(scratch: &Scratch) -> Running {
    started(scratch, &ENDLESS)
}

/// Asks the guest at this socket to end, once it listens. It does so after a pass, which checks all its words.
pub fn ask_to_end(scratch: &Scratch, socket: &str) {
    loop {
        let output = scratch.wideleaf(&["vm", socket, "stop", "--how=ask"]).output().unwrap();
        if output.status.success() {
            return;
        }
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(why.contains("the guest listens to no power button"), "{why}");
        sleep(AMONG_QUESTIONS);
    }
}

/// This run, once it listens at `vm.sock`; its report is `source.json`.
pub fn started(scratch: &Scratch, what: &[&str]) -> Running {
    started_under(scratch, "greedy", what)
}

/// The same under a policy.
fn started_under(scratch: &Scratch, policy: &str, what: &[&str]) -> Running {
    let policy = format!("--policy={policy}");
    let more = [&policy, "--no-daemon", "--control-socket=vm.sock", "--format=json", "--output=source.json"];
    let mut run = Running::start(scratch, &[&["run"], what, &more].concat());
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
        sleep(AMONG_QUESTIONS);
    }
    run
}

/// A run that waits at this address, and the address that it says.
fn target(scratch: &Scratch, address: &str) -> (Running, String) {
    target_with(scratch, address, &[])
}

/// The same with more options.
pub fn target_with(scratch: &Scratch, address: &str, more: &[&str]) -> (Running, String) {
    let incoming = format!("--incoming={address}");
    let arguments =
        ["run", &incoming, "--no-daemon", "--control-socket=vm2.sock", "--format=json", "--output=target.json"];
    let mut run = Running::start(scratch, &[&arguments, more].concat());
    let mut line = String::new();
    let mut stderr = BufReader::new(run.0.stderr.take().unwrap());
    stderr.read_line(&mut line).unwrap();
    // Its other lines are read at its end.
    let (mut reader, mut rest) = (stderr, String::new());
    let (read, write) = std::io::pipe().unwrap();
    std::thread::spawn(move || {
        let _ = reader.read_to_string(&mut rest);
        let _ = std::fs::File::from(std::os::fd::OwnedFd::from(write)).write_all(rest.as_bytes());
    });
    run.0.stderr = Some(std::os::fd::OwnedFd::from(read).into());
    let place = line.trim().strip_prefix("wideleaf: waiting for a VM at ").unwrap_or_else(|| panic!("{line:?}"));
    (run, place.to_owned())
}

/// The client of a migration, which may be slow.
pub fn migrate(scratch: &Scratch, to: &str, more: &[&str]) -> Child {
    client(scratch, to, &[&["--pause=60s"], more].concat())
}

/// The client of a migration with these options.
pub fn client(scratch: &Scratch, to: &str, options: &[&str]) -> Child {
    vm_client(scratch, &[&["vm.sock", "migrate", to], options].concat())
}

/// A client of a VM that takes long, with these arguments.
pub fn vm_client(scratch: &Scratch, arguments: &[&str]) -> Child {
    let mut command = Command::new(scratch.program());
    command.args(["vm", "--format=json"]).args(arguments);
    command.current_dir(scratch.path(".")).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Exit code, standard output and standard error.
pub fn end(child: Child) -> (Option<i32>, String, String) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

pub fn report(scratch: &Scratch, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(scratch.path(name)).unwrap()).unwrap()
}

pub fn status(scratch: &Scratch) -> Value {
    status_of(scratch, "vm.sock")
}

/// Status of the run that listens at this socket.
pub fn status_of(scratch: &Scratch, socket: &str) -> Value {
    let output = scratch.wideleaf(&["vm", socket, "status", "--format=json"]).assert().success();
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// The guest found every word as it had written it.
pub fn has_lost_nothing(report: &Value) {
    assert_eq!(report["outcome"], "success");
    assert_eq!((&report["verification"]["passed"], &report["verification"]["errors"]), (&json!(true), &json!(0)));
}

fn moves(address: &str) {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    let (target, place) = target(&scratch, address);
    let (code, said, why) = end(migrate(&scratch, &place, &[]));
    assert_eq!(code, Some(0), "{why}");
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(source.end(), (Some(0), String::new()));
    ask_to_end(&scratch, "vm2.sock");
    assert_eq!(target.end(), (Some(0), String::new()));
    let (before, after) = (report(&scratch, "source.json"), report(&scratch, "target.json"));
    assert_eq!((&before["outcome"], &before["migrated"], &said["to"]), (&json!("migrated"), &said, &json!(place)));
    has_lost_nothing(&after);
    let arrived = &after["arrived"];
    assert_eq!(arrived["source"]["downtime_ms"], said["downtime_ms"]);
    let paid = &said["before_pause"];
    assert!(paid["exits"].is_u64() && paid["seconds"].as_f64() < said["seconds"].as_f64(), "{said}");
    assert_eq!(&arrived["source"]["before_pause"], paid);
    assert_eq!(arrived["source"]["rounds"], said["rounds"]);
    // How many, is up to how far the guest has come.
    assert!(arrived["pages"].as_u64() > Some(0), "{arrived}");
    assert_eq!((&said["huge_bytes_at_target"], &before["arrived"]), (&arrived["huge_bytes"], &Value::Null));
    let mut left = scratch.names();
    left.sort();
    assert_eq!(left, ["source.json", "target.json"], "all sockets are removed");
}

#[test]
fn a_guest_moves_over_a_unix_socket_and_loses_no_word() {
    moves("unix:move.sock");
}

#[test]
fn a_guest_moves_over_tcp_and_loses_no_word() {
    moves("tcp:127.0.0.1:0");
}

#[test]
fn a_guest_moves_over_two_pipes_and_loses_no_word() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    let ((from_target, to_source), (from_source, to_target)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
    let mut target = Command::new(scratch.program());
    target.args(["run", "--incoming=stdio", "--no-daemon", "--control-socket=vm2.sock"]);
    target.args(["--format=json", "--output=target.json"]);
    target.current_dir(scratch.path(".")).stdin(from_source).stdout(to_source).stderr(Stdio::piped());
    let target = Running(target.spawn().unwrap());
    let mut client = Command::new(scratch.program());
    client.args(["vm", "vm.sock", "migrate", "stdio", "--pause=60s"]).current_dir(scratch.path("."));
    let client = client.stdin(from_target).stdout(to_target).stderr(Stdio::piped()).spawn().unwrap();
    let (code, _, said) = end(client);
    assert!(code == Some(0) && said.starts_with("migrated to stdio: "), "{code:?}: {said}");
    assert_eq!(source.end(), (Some(0), String::new()));
    ask_to_end(&scratch, "vm2.sock");
    assert_eq!(target.end().0, Some(0));
    has_lost_nothing(&report(&scratch, "target.json"));
}

/// Waits until some of RAM has left.
fn wait_for_progress(scratch: &Scratch) {
    while status(scratch)["saving"]["done_bytes"].as_u64().is_none_or(|bytes| bytes == 0) {
        sleep(AMONG_QUESTIONS);
    }
}

/// So slow that it is in its first round until the test ends it.
const SLOW: [&str; 1] = ["--bytes-per-second=1M"];

/// A source, a target, and the client of a migration in its first round.
fn under_way(scratch: &Scratch) -> (Running, Running, Child) {
    let source = source(scratch);
    let (target, place) = target(scratch, "unix:move.sock");
    let client = migrate(scratch, &place, &SLOW);
    wait_for_progress(scratch);
    (source, target, client)
}

/// The source is as if nothing had been, to its end.
pub fn goes_on(scratch: &Scratch, source: Running) {
    let state = status(scratch);
    assert_eq!((&state["state"], &state["doubt"], &state["saving"]), (&json!("running"), &Value::Null, &Value::Null));
    ask_to_end(scratch, "vm.sock");
    assert_eq!(source.end(), (Some(0), String::new()));
    has_lost_nothing(&report(scratch, "source.json"));
}

#[test]
fn a_migration_that_is_cancelled_leaves_the_guest_where_it_was() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    // So that a client does not ignore it where these tests run under nohup(1).
    signal_hook::flag::register(Signal::SIGHUP as i32, Arc::default()).unwrap();
    // A window of each migration takes two seconds to leave.
    let source = source(&scratch);
    for signal in [Signal::SIGINT, Signal::SIGHUP] {
        let (target, place) = target(&scratch, "unix:move.sock");
        let client = Running(migrate(&scratch, &place, &SLOW));
        wait_for_progress(&scratch);
        client.signal(signal);
        assert_eq!(client.end().0, Some(130), "{signal}");
        let (code, why) = target.end();
        let said = "the VM stays at the source: it was cancelled; it does not run here";
        assert!(code == Some(4) && why.contains(said), "{code:?}: {why}");
    }
    goes_on(&scratch, source);
}

#[test]
fn what_would_wait_for_a_migration_or_be_lost_by_it_is_refused_meanwhile() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = started(&scratch, &[&ENDLESS[..], &["--on-reset=restart"]].concat());
    let (target, place) = target(&scratch, "unix:move.sock");
    let client = migrate(&scratch, &place, &SLOW);
    wait_for_progress(&scratch);
    let why = "it is being migrated; wait for the end of that, or end its client";
    for (request, what) in
        [(&["pause"][..], "pause"), (&["reset"][..], "reset"), (&["set-policy", "never"][..], "set the policy of")]
    {
        scratch.refuses(&[&["vm", "vm.sock"][..], request].concat(), 2, &[&format!("cannot {what} the VM: {why}")]);
    }
    let client = Running(client);
    client.signal(Signal::SIGINT);
    assert_eq!(client.end().0, Some(130));
    assert_eq!(target.end().0, Some(4));
    scratch.wideleaf(&["vm", "vm.sock", "set-policy", "never"]).assert().success();
    goes_on(&scratch, source);
}

#[test]
fn a_guest_moves_while_its_guarantee_asks_for_another_policy() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    // It is below its guarantee: after three seconds another policy is due, while the manager rests.
    let source = started_under(&scratch, "thp", &[&ENDLESS[..], &["--guarantee=bestEffort:99%"]].concat());
    let (target, place) = target(&scratch, "unix:move.sock");
    let (code, _, said) = end(migrate(&scratch, &place, &["--bytes-per-second=2M"]));
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(source.end(), (Some(0), String::new()));
    ask_to_end(&scratch, "vm2.sock");
    assert_eq!(target.end().0, Some(0));
    has_lost_nothing(&report(&scratch, "target.json"));
}

#[test]
fn the_guest_goes_on_where_it_was_if_the_target_is_killed() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target, client) = under_way(&scratch);
    drop(target);
    let (code, _, why) = end(client);
    assert!(code == Some(4) && why.contains("cannot migrate the VM to unix:move.sock: "), "{code:?}: {why}");
    goes_on(&scratch, source);
}

#[test]
fn the_target_ends_if_the_source_is_killed() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target, client) = under_way(&scratch);
    drop(source);
    assert_eq!(end(client).0, Some(4));
    let (code, why) = target.end();
    assert!(code == Some(4) && why.contains("it does not run here"), "{code:?}: {why}");
}

#[test]
fn a_connection_from_no_source_is_left_and_the_target_waits_for_another_one() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    let (target, place) = target(&scratch, "unix:move.sock");
    let connect = || UnixStream::connect(scratch.path("move.sock")).unwrap();
    let mut stranger = connect();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(connect());
    let (code, _, why) = end(migrate(&scratch, &place, &[]));
    assert_eq!(code, Some(0), "{why}");
    assert_eq!(source.end(), (Some(0), String::new()));
    ask_to_end(&scratch, "vm2.sock");
    let (code, said) = target.end();
    assert_eq!((code, said.matches("is from no source of a VM").count()), (Some(0), 2), "{said}");
    assert!(said.contains("it does not speak wideleaf's migration protocol"), "{said}");
    has_lost_nothing(&report(&scratch, "target.json"));
}

#[test]
fn a_limit_that_the_target_would_take_for_a_loss_is_refused() {
    let scratch = new_scratch();
    let words = ["vm", "vm.sock", "migrate", "unix:move.sock", "--bytes-per-second=32K"];
    scratch.refuses(&words, 2, &["cannot migrate with 32768 bytes per second", "allow at least 64 KiB"]);
}

#[test]
fn a_target_that_ends_before_go_has_left_leaves_the_guest_to_the_source() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    let (target, _) = target(&scratch, "unix:move.sock");
    let (listener, to) = (UnixListener::bind(scratch.path("deaf.sock")).unwrap(), scratch.path("move.sock"));
    let client = migrate(&scratch, "unix:deaf.sock", &[]);
    let (near, far) = (listener.accept().unwrap().0, UnixStream::connect(to).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ended = forward(&far, &near, |kind| {
                if kind == READY {
                    // The source can hear this, and say nothing more.
                    near.shutdown(std::net::Shutdown::Read).unwrap();
                }
                true
            });
        });
        let _ended = forward(&near, &far, |_| true);
        far.shutdown(std::net::Shutdown::Both).unwrap();
    });
    drop(near);
    let (code, _, why) = end(client);
    assert!(code == Some(4) && why.contains("the connection ended"), "{code:?}: {why}");
    let (code, why) = target.end();
    assert!(code == Some(4) && why.contains("it does not run here"), "{code:?}: {why}");
    goes_on(&scratch, source);
}

#[test]
fn a_target_that_cannot_take_the_vm_says_why_and_the_guest_goes_on() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    // Devices that the VM does not have are found when its state has come.
    let arguments = ["run", "--incoming=unix:move.sock", "--rng", "--no-daemon"];
    let target = Running::start(&scratch, &arguments);
    while !scratch.path("move.sock").exists() {
        sleep(AMONG_QUESTIONS);
    }
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &[]));
    assert!(code == Some(4) && why.contains("the target says: ") && why.contains("devices"), "{code:?}: {why}");
    assert_eq!(target.end().0, Some(3));
    goes_on(&scratch, source);
}

/// Stands between source and target until a message of kind `cut` comes: that one and all later ones are lost.
pub fn lossy(scratch: &Scratch, cut: u32) -> (String, JoinHandle<()>) {
    held_at(scratch, cut, || {})
}

/// The same; does something before both sides see the loss.
pub fn held_at(scratch: &Scratch, cut: u32, before: impl FnOnce() + Send + 'static) -> (String, JoinHandle<()>) {
    let listener = UnixListener::bind(scratch.path("lossy.sock")).unwrap();
    let to = scratch.path("move.sock");
    let thread = std::thread::spawn(move || {
        let source = listener.accept().unwrap().0;
        let target = UnixStream::connect(to).unwrap();
        let before = parking_lot::Mutex::new(Some(before));
        let pump = |from: &UnixStream, to: &UnixStream| {
            if forward(from, to, |kind| kind != cut).is_ok()
                && let Some(before) = before.lock().take()
            {
                before();
            }
            // Both directions end.
            for end in [from, to] {
                let _ = end.shutdown(std::net::Shutdown::Both);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| pump(&source, &target));
            scope.spawn(|| pump(&target, &source));
        });
    });
    ("unix:lossy.sock".to_owned(), thread)
}

/// Stands between source and target, and keeps what the target says from a message of this kind on.
pub fn withheld(scratch: &Scratch, kind: u32) -> (String, JoinHandle<()>) {
    let listener = UnixListener::bind(scratch.path("lossy.sock")).unwrap();
    let to = scratch.path("move.sock");
    let thread = std::thread::spawn(move || {
        let source = listener.accept().unwrap().0;
        let target = UnixStream::connect(to).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| forward(&target, &source, |is| is != kind));
            let _ended = forward(&source, &target, |_| true);
            target.shutdown(std::net::Shutdown::Both).unwrap();
        });
    });
    ("unix:lossy.sock".to_owned(), thread)
}

/// Passes on the first bytes and each message until one comes that does not pass, by its kind.
pub fn forward(mut from: &UnixStream, mut to: &UnixStream, mut passes: impl FnMut(u32) -> bool) -> std::io::Result<()> {
    let mut message = vec![0; 12];
    from.read_exact(&mut message)?;
    loop {
        to.write_all(&message)?;
        message.resize(16, 0);
        from.read_exact(&mut message)?;
        let field = |index: usize| u32::from_le_bytes(message[index..index + 4].try_into().unwrap());
        let (kind, bytes) = (field(0), field(8));
        message.resize(16 + bytes as usize, 0);
        from.read_exact(&mut message[16..])?;
        if !passes(kind) {
            return Ok(());
        }
    }
}

/// A source, a target, and a client with a migration that fails at a message of this kind.
fn failed_at(scratch: &Scratch, cut: u32) -> (Running, Running, String) {
    let source = source(scratch);
    let (target, _) = target(scratch, "unix:move.sock");
    let why = fails_at(scratch, cut);
    (source, target, why)
}

/// Migrates to the target at `move.sock`, which fails at a message of this kind; returns what the client says.
pub fn fails_at(scratch: &Scratch, cut: u32) -> String {
    let (place, thread) = lossy(scratch, cut);
    let (code, _, why) = end(migrate(scratch, &place, &[]));
    assert_eq!(code, Some(4), "{why}");
    thread.join().unwrap();
    why
}

#[test]
fn a_connection_that_is_lost_before_go_leaves_the_guest_at_the_source() {
    if !has_kvm() {
        return;
    }
    for cut in [PAGES, MACHINE, READY] {
        let scratch = new_scratch();
        let (source, target, why) = failed_at(&scratch, cut);
        assert!(why.contains("the connection ended"), "{cut}: {why}");
        let (code, why) = target.end();
        assert!(code == Some(4) && why.contains("it does not run here"), "{cut}: {code:?}: {why}");
        goes_on(&scratch, source);
    }
}

/// The source does not know, and stands still.
fn is_in_doubt(scratch: &Scratch, why: &str) {
    assert!(why.contains("cannot tell whether the VM runs at unix:lossy.sock"), "{why}");
    let state = status(scratch);
    assert_eq!((&state["state"], &state["vcpus"]), (&json!("paused"), &json!(["paused", "paused"])));
    assert!(state["doubt"].as_str().is_some_and(|doubt| why.contains(doubt)), "{state}");
    let (code, _, again) = end(migrate(scratch, "unix:lossy.sock", &[]));
    assert!(code != Some(0), "another migration: {again}");
}

#[test]
fn a_go_that_is_lost_leaves_the_guest_paused_at_the_source_until_the_operator_resumes_it() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target, why) = failed_at(&scratch, GO);
    assert_eq!(target.end().0, Some(4));
    is_in_doubt(&scratch, &why);
    scratch.wideleaf(&["vm", "vm.sock", "resume"]).assert().success();
    goes_on(&scratch, source);
}

#[test]
fn a_running_that_is_lost_leaves_a_guest_at_the_target_and_a_paused_one_to_be_stopped() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target, why) = failed_at(&scratch, RUNNING);
    is_in_doubt(&scratch, &why);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(source.end(), (Some(0), String::new()));
    assert_eq!(report(&scratch, "source.json")["outcome"], "stopped");
    ask_to_end(&scratch, "vm2.sock");
    let (code, said) = target.end();
    assert_eq!(code, Some(0), "{said}");
    has_lost_nothing(&report(&scratch, "target.json"));
}

#[test]
fn what_cannot_move_is_refused_before_anything_is_sent() {
    let scratch = new_scratch();
    let nowhere = scratch.wideleaf(&["run", "--incoming=nowhere"]).assert().code(2);
    let said = String::from_utf8_lossy(&nowhere.get_output().stderr).into_owned();
    assert!(said.contains("unix:PATH, tcp:HOST:PORT or stdio"), "{said}");
    scratch.refuses(&["vm", "vm.sock", "migrate", "unix:none"], 4, &["cannot connect to unix:none", "--incoming"]);
    scratch.refuses(&["run", "--incoming=stdio", "--no-daemon"], 2, &["--output"]);
}
