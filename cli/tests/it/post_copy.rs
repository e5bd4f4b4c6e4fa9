//! `wideleaf vm SOCKET migrate --postcopy`: a guest that writes all its memory faster than it can be sent moves before
//! its RAM has, and finds every word; whatever is lost on the way, at most one guest runs. Needs KVM and a userfaultfd
//! (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{JoinHandle, sleep};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::{Running, Scratch};

use crate::migration::{
    AMONG_QUESTIONS, GO, PAGES, RUNNING, ask_to_end, client, end, forward, goes_on, has_lost_nothing, report, source,
    status, target_with,
};
use crate::program::new_scratch;

/// Kinds of messages (`run/src/migration/frames.rs`).
const MISSING: u32 = 6;
const COMPLETE: u32 = 22;

/// A run that waits at `move.sock`. It has no control socket: with one it waits for `recover` after a loss.
fn target(scratch: &Scratch) -> Running {
    let arguments = ["run", "--incoming=unix:move.sock", "--no-daemon", "--format=json", "--output=target.json"];
    let run = Running::start(scratch, &arguments);
    while !scratch.path("move.sock").exists() {
        sleep(AMONG_QUESTIONS);
    }
    run
}

/// The same for a guest that will be asked to end there.
fn target_to_be_asked(scratch: &Scratch) -> Running {
    target_with(scratch, "unix:move.sock", &[]).0
}

/// A migration that sends a page in 1 ms: what the guest writes in a round needs 2 s, and the pause has 1.5 s for it.
pub fn migrate(scratch: &Scratch, to: &str, more: &[&str]) -> Child {
    client(scratch, to, &[&["--pause=3s", "--bytes-per-second=4M"], more].concat())
}

/// The target has said where it waited, and says nothing else.
fn ends_well(scratch: &Scratch, target: Running) {
    ask_to_end(scratch, "vm2.sock");
    assert_eq!(target.end(), (Some(0), String::new()));
}

#[test]
fn a_guest_that_pre_copy_cannot_move_moves_by_post_copy_onto_huge_pages_and_loses_no_word() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    // Pre-copy gives up after four rounds of 2 s, and so do the rounds before post-copy.
    let source = source(&scratch);
    let refused = target(&scratch);
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &[]));
    assert!(code == Some(4) && why.contains("pages that the guest keeps writing"), "{code:?}: {why}");
    assert_eq!(refused.end().0, Some(4));
    let past = &status(&scratch)["past_saves"];
    assert_eq!(past["migrations_failed"], 1);
    let paid = |what: &str| past["last_failed"][what].as_f64();
    assert!(paid("seconds") > Some(0.0) && paid("exits") > Some(0.0), "it wrote in all rounds: {past}");

    let target = target_to_be_asked(&scratch);
    let (code, said, why) = end(migrate(&scratch, "unix:move.sock", &["--postcopy"]));
    assert_eq!(code, Some(0), "{why}");
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(source.end(), (Some(0), String::new()));
    ends_well(&scratch, target);
    let (before, after) = (report(&scratch, "source.json"), report(&scratch, "target.json"));
    assert_eq!((&before["outcome"], &before["migrated"]), (&json!("migrated"), &said));
    has_lost_nothing(&after);
    let followed = &said["post_copy"];
    let number = |name: &str| followed[name].as_u64().unwrap_or_else(|| panic!("{name}: {said}"));
    assert!(number("missing_bytes") >= 4 << 20, "{said}");
    assert_eq!(number("filled_bytes"), number("missing_bytes"));
    assert!(number("windows_by_touch") >= 1, "the guest works on what is missing: {said}");
    assert!(number("windows_huge") >= 4, "8 MiB were on huge pages: {said}");
    assert!(followed["wait_max_us"].as_f64() >= followed["wait_p50_us"].as_f64(), "{said}");
    assert!(followed["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{said}");
    assert_eq!(&after["arrived"]["post_copy"]["missing_bytes"], &followed["missing_bytes"]);
    assert_eq!(after["arrived"]["source"]["downtime_ms"], said["downtime_ms"]);
    let (before_it_ran, in_all) = (&after["arrived"]["received_bytes"], &said["sent_bytes"]);
    assert!(before_it_ran.as_u64() < in_all.as_u64(), "what followed is not in it: {before_it_ran} of {in_all}");
    let mut left = scratch.names();
    left.sort();
    assert_eq!(left, ["source.json", "target.json"], "all sockets are removed");
}

#[test]
fn post_copy_begins_after_the_rounds_that_were_asked_for() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    let target = target_to_be_asked(&scratch);
    let (code, said, why) = end(migrate(&scratch, "unix:move.sock", &["--postcopy=1"]));
    assert_eq!(code, Some(0), "{why}");
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["rounds"], said["post_copy"].is_object()), (&json!(2), true), "{said}");
    assert_eq!(source.end(), (Some(0), String::new()));
    ends_well(&scratch, target);
    has_lost_nothing(&report(&scratch, "target.json"));
}

/// What a proxy does when a message comes.
#[derive(Clone, Copy, PartialEq)]
pub enum ConnectionLoss {
    /// It and all later ones are lost.
    At(u32),
    /// The same for the first pages after `go`, once the target has said that the guest runs there.
    AtPagesAfterGo,
    /// The first pages after `go` wait until the test says so, once the target has said that the guest runs there.
    HoldPagesAfterGo,
}

/// A proxy between source and target.
pub struct Proxy {
    pub thread: JoinHandle<()>,
    /// Says that pages are held.
    pub held: Receiver<()>,
    /// Lets them go.
    pub go_on: Sender<()>,
}

pub const PROXY: &str = "unix:proxy.sock";

pub fn proxy(scratch: &Scratch, cut: ConnectionLoss) -> Proxy {
    let listener = UnixListener::bind(scratch.path("proxy.sock")).unwrap();
    let to = scratch.path("move.sock");
    let ((is_held, held), (go_on, goes_on)) = (channel(), channel());
    let thread = std::thread::spawn(move || {
        let source = listener.accept().unwrap().0;
        let target = UnixStream::connect(to).unwrap();
        let pump = |from: &UnixStream, to: &UnixStream, sees: &dyn Fn()| {
            let _ = forward_until(cut, from, to, sees);
            // The other direction passes on what it has, and ends too.
            let _ = to.shutdown(std::net::Shutdown::Both);
        };
        let ((runs, has_begun), backwards) = (channel(), (&target, &source));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                pump(backwards.0, backwards.1, &|| {
                    let _ = runs.send(());
                });
            });
            pump(&source, &target, &|| match cut {
                ConnectionLoss::At(_) => {}
                ConnectionLoss::AtPagesAfterGo => {
                    let _ = has_begun.recv();
                }
                ConnectionLoss::HoldPagesAfterGo => {
                    let _ = has_begun.recv();
                    let _ = is_held.send(());
                    let _ = goes_on.recv();
                }
            });
        });
    });
    Proxy { thread, held, go_on }
}

/// Passes messages on as `cut` says; calls `sees` before the first pages after `go`, and before the word that the guest
/// runs.
fn forward_until(cut: ConnectionLoss, from: &UnixStream, to: &UnixStream, sees: &dyn Fn()) -> std::io::Result<()> {
    let (mut runs, mut was_seen) = (false, false);
    forward(from, to, |kind| {
        runs |= kind == GO;
        let comes_after_go = runs && kind == PAGES;
        if kind == RUNNING || comes_after_go && !std::mem::replace(&mut was_seen, true) {
            sees();
        }
        match cut {
            ConnectionLoss::At(cut) => kind != cut,
            ConnectionLoss::AtPagesAfterGo => !comes_after_go,
            ConnectionLoss::HoldPagesAfterGo => true,
        }
    })
}

#[test]
fn a_loss_of_what_is_missing_leaves_the_guest_at_the_source() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target) = (source(&scratch), target(&scratch));
    let proxy = proxy(&scratch, ConnectionLoss::At(MISSING));
    let (code, _, why) = end(migrate(&scratch, PROXY, &["--postcopy=1"]));
    assert!(code == Some(4) && why.contains("the connection ended"), "{code:?}: {why}");
    proxy.thread.join().unwrap();
    let (code, why) = target.end();
    assert!(code == Some(4) && why.contains("it does not run here"), "{code:?}: {why}");
    goes_on(&scratch, source);
}

/// The source is paused as it was at the switch, and the operator continues it.
fn continues_from_the_switch(scratch: &Scratch, source: Running, why: &str) {
    assert!(why.contains("while a part of its RAM was still here"), "{why}");
    let state = status(scratch);
    assert_eq!((&state["state"], &state["vcpus"]), (&json!("paused"), &json!(["paused", "paused"])));
    assert!(state["doubt"].as_str().is_some_and(|doubt| why.contains(doubt)), "{state}");
    scratch.wideleaf(&["vm", "vm.sock", "resume"]).assert().success();
    goes_on(scratch, source);
}

#[test]
fn a_connection_that_breaks_while_pages_are_missing_ends_the_targets_guest_and_leaves_the_sources_paused() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target) = (source(&scratch), target(&scratch));
    let proxy = proxy(&scratch, ConnectionLoss::AtPagesAfterGo);
    let (code, _, why) = end(migrate(&scratch, PROXY, &["--postcopy=1"]));
    assert_eq!(code, Some(4), "{why}");
    proxy.thread.join().unwrap();
    let (code, said) = target.end();
    assert_eq!(code, Some(5), "{said}");
    let outcome = report(&scratch, "target.json")["outcome"].as_str().unwrap().to_owned();
    let expected = ["the guest cannot continue: cannot restore window", "does not send its pages", "resume"];
    assert!(expected.iter().all(|part| outcome.contains(part)), "{outcome}");
    continues_from_the_switch(&scratch, source, &why);
}

#[test]
fn a_complete_that_is_lost_leaves_the_guest_at_the_target_and_a_paused_one_to_be_stopped() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target) = (source(&scratch), target_to_be_asked(&scratch));
    let proxy = proxy(&scratch, ConnectionLoss::At(COMPLETE));
    let (code, _, why) = end(migrate(&scratch, PROXY, &["--postcopy=1"]));
    assert!(code == Some(4) && why.contains("while a part of its RAM was still here"), "{code:?}: {why}");
    proxy.thread.join().unwrap();
    assert_eq!(status(&scratch)["state"], "paused");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(source.end(), (Some(0), String::new()));
    ask_to_end(&scratch, "vm2.sock");
    let (code, said) = target.end();
    assert_eq!(code, Some(0), "{said}");
    has_lost_nothing(&report(&scratch, "target.json"));
}

/// A migration with a guest that runs at the target and waits for pages that a proxy holds.
struct Held {
    source: Running,
    target: Running,
    proxy: Proxy,
    client: Child,
}

fn held(scratch: &Scratch, target: Running) -> Held {
    let source = source(scratch);
    let proxy = proxy(scratch, ConnectionLoss::HoldPagesAfterGo);
    let client = migrate(scratch, PROXY, &["--postcopy=1"]);
    proxy.held.recv().unwrap();
    Held { source, target, proxy, client }
}

#[test]
fn after_the_switch_nothing_cancels_a_migration_and_the_source_is_kept_until_all_has_come() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let Held { source, target, proxy, client } = held(&scratch, target_to_be_asked(&scratch));
    let client = Running(client);
    client.signal(Signal::SIGINT);
    for request in [&["stop", "--how=kill"][..], &["resume"]] {
        let arguments = [&["vm", "vm.sock"], request].concat();
        scratch.refuses(&arguments, 2, &["it runs at unix:proxy.sock", "a part of its RAM is still here"]);
    }
    proxy.go_on.send(()).unwrap();
    assert_eq!(client.end().0, Some(0), "it was past cancelling");
    assert_eq!(source.end(), (Some(0), String::new()));
    ends_well(&scratch, target);
    proxy.thread.join().unwrap();
    has_lost_nothing(&report(&scratch, "target.json"));
}

#[test]
fn a_target_that_is_killed_while_pages_are_missing_leaves_the_source_to_be_continued_from_the_switch() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let Held { source, target, proxy, client } = held(&scratch, target(&scratch));
    drop(target);
    proxy.go_on.send(()).unwrap();
    let (code, _, why) = end(client);
    assert_eq!(code, Some(4), "{why}");
    proxy.thread.join().unwrap();
    continues_from_the_switch(&scratch, source, &why);
}

#[test]
fn a_source_that_is_killed_while_pages_are_missing_ends_the_targets_guest_with_the_windows_name() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let Held { source, target, proxy, client } = held(&scratch, target(&scratch));
    drop(source);
    proxy.go_on.send(()).unwrap();
    assert_eq!(end(client).0, Some(4));
    let (code, said) = target.end();
    assert_eq!(code, Some(5), "{said}");
    let outcome = report(&scratch, "target.json")["outcome"].as_str().unwrap().to_owned();
    assert!(outcome.contains("the guest cannot continue: cannot restore window"), "{outcome}");
    proxy.thread.join().unwrap();
}

#[test]
fn what_post_copy_cannot_move_is_refused_before_anything_is_sent() {
    let scratch = new_scratch();
    let wrong = scratch.wideleaf(&["vm", "vm.sock", "migrate", "unix:a", "--postcopy=0"]).assert().code(2);
    let said = String::from_utf8_lossy(&wrong.get_output().stderr).into_owned();
    assert!(said.contains("write when-needed, or a number of rounds from 1 on"), "{said}");
    if !has_kvm() {
        return;
    }
    let arguments = [
        "run",
        "pattern",
        "--memory=64M",
        "--backing=memfd",
        "--no-daemon",
        "--control-socket=vm.sock",
        "--cmdline=passes=1000",
    ];
    let source = Running::start(&scratch, &arguments);
    let target = target(&scratch);
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
        sleep(AMONG_QUESTIONS);
    }
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &["--postcopy"]));
    assert!(code == Some(4) && why.contains("post-copy needs anonymous RAM"), "{code:?}: {why}");
    // It waits for another attempt.
    target.signal(Signal::SIGTERM);
    assert_eq!(target.end().0, Some(130));
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(source.end().0, Some(0));
}
