//! `wideleaf vm SOCKET recover`: a connection that is lost while pages follow a guest is replaced by another one, and
//! the guest finds every word. Needs KVM and a userfaultfd (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::thread::sleep;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::{Running, Scratch};

use crate::migration::{
    AMONG_QUESTIONS, GO, RUNNING, ask_to_end, end, goes_on, has_lost_nothing, report, source, status, status_of,
    target_with, vm_client,
};
use crate::post_copy::{ConnectionLoss, PROXY, Proxy, migrate, proxy};
use crate::program::new_scratch;

/// Source and target of a migration that lost its connection while pages were missing.
struct LostMigration {
    source: Running,
    target: Running,
    /// What the client of the migration said.
    why: String,
}

fn lost(scratch: &Scratch, cut: ConnectionLoss) -> LostMigration {
    let (source, (target, _)) = (source(scratch), target_with(scratch, "unix:move.sock", &[]));
    let Proxy { thread, .. } = proxy(scratch, cut);
    let (code, _, why) = end(migrate(scratch, PROXY, &["--postcopy=1"]));
    assert_eq!(code, Some(4), "{why}");
    thread.join().unwrap();
    while status_of(scratch, "vm2.sock")["cut_off"].is_null() {
        sleep(AMONG_QUESTIONS);
    }
    LostMigration { source, target, why }
}

/// Source, target and client of a migration with pages missing, on a connection that is silent until it may go on.
struct Silent {
    source: Running,
    target: Running,
    proxy: Proxy,
    client: Child,
}

fn silent(scratch: &Scratch) -> Silent {
    let (source, (target, _)) = (source(scratch), target_with(scratch, "unix:move.sock", &[]));
    let proxy = proxy(scratch, ConnectionLoss::HoldPagesAfterGo);
    let client = migrate(scratch, PROXY, &["--postcopy=1"]);
    proxy.held.recv().unwrap();
    Silent { source, target, proxy, client }
}

/// A client at the target that waits at this path.
fn recover_target(scratch: &Scratch, path: &str) -> Child {
    let client = vm_client(scratch, &["vm2.sock", "recover", "--incoming", &format!("unix:{path}")]);
    while !scratch.path(path).exists() {
        sleep(AMONG_QUESTIONS);
    }
    client
}

/// Brings another connection to both sides; the answers of target and source.
fn recovered(scratch: &Scratch) -> [Value; 2] {
    let target = recover_target(scratch, "again.sock");
    let source = vm_client(scratch, &["vm.sock", "recover", "unix:again.sock"]);
    let answers = [target, source].map(|client| {
        let (code, said, why) = end(client);
        assert_eq!(code, Some(0), "{why}");
        serde_json::from_str(&said).unwrap()
    });
    assert!(!scratch.path("again.sock").exists());
    answers
}

/// Both runs end well, and the guest has lost nothing.
fn ends_well(scratch: &Scratch, source: Running, target: Running) {
    assert_eq!(source.end(), (Some(0), String::new()));
    ask_to_end(scratch, "vm2.sock");
    let (code, said) = target.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(report(scratch, "source.json")["outcome"], "migrated");
    has_lost_nothing(&report(scratch, "target.json"));
}

#[test]
fn a_migration_goes_on_over_another_connection_and_the_guest_loses_no_word() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let LostMigration { source, target, why } = lost(&scratch, ConnectionLoss::AtPagesAfterGo);
    assert!(why.contains("if it waits there, `recover --incoming ADDRESS` there"), "{why}");
    let waits = status_of(&scratch, "vm2.sock");
    assert_eq!(waits["state"], "running");
    assert!(waits["cut_off"].as_str().is_some_and(|why| why.contains("`recover --incoming ADDRESS` here")), "{waits}");
    assert!(waits["saving"]["total_bytes"].as_u64() > waits["saving"]["done_bytes"].as_u64(), "{waits}");

    // The target may need RAM as it is.
    scratch.refuses(&["vm", "vm.sock", "reset"], 2, &["cannot reset the VM", "while a part of its RAM was still here"]);
    let past = &status_of(&scratch, "vm.sock")["past_saves"];
    assert_eq!((&past["migrations"], &past["migrations_failed"]), (&json!(0), &json!(1)));
    assert!(past["last_failed"]["exits"].is_u64(), "until the pause: {past}");
    while status_of(&scratch, "vm2.sock")["past_saves"]["migrations"] != 1 {
        sleep(AMONG_QUESTIONS);
    }

    let [at_target, at_source] = recovered(&scratch);
    assert_eq!((&at_target["connections_lost"], &at_target["filled_bytes"]), (&json!(1), &at_target["missing_bytes"]));
    assert_eq!(at_source["to"], "unix:again.sock");
    assert_eq!(at_source["post_copy"]["connections_lost"], 1, "{at_source}");
    assert_eq!(at_source["rounds"], 2, "as they were before the loss");
    ends_well(&scratch, source, target);
    assert_eq!(report(&scratch, "source.json")["migrated"], at_source);
    assert_eq!(report(&scratch, "target.json")["arrived"]["post_copy"]["connections_lost"], 1);
}

#[test]
fn a_loss_between_go_and_running_is_recovered_too() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let LostMigration { source, target, why } = lost(&scratch, ConnectionLoss::At(RUNNING));
    assert!(why.contains("cannot tell whether the VM runs"), "{why}");
    recovered(&scratch);
    ends_well(&scratch, source, target);
}

#[test]
fn the_wrong_side_and_a_migration_that_lost_nothing_are_refused_before_anything_is_sent() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let LostMigration { source, target, .. } = lost(&scratch, ConnectionLoss::AtPagesAfterGo);
    let wrong = ["vm", "vm.sock", "recover", "--incoming", "unix:again.sock"];
    scratch.refuses(&wrong, 3, &["no page of its RAM is missing here", "leave --incoming out"]);
    let wrong = ["vm", "vm2.sock", "recover", "unix:again.sock"];
    scratch.refuses(
        &wrong,
        4,
        &["cannot connect to unix:again.sock", "recover --incoming unix:again.sock` there first"],
    );
    // A client that is interrupted while it waits leaves nothing.
    let client = Running(recover_target(&scratch, "again.sock"));
    client.signal(Signal::SIGINT);
    assert_eq!(client.end().0, Some(130));
    assert!(!scratch.path("again.sock").exists());
    assert_eq!(status(&scratch)["state"], "paused");
    recovered(&scratch);
    ends_well(&scratch, source, target);
}

#[test]
fn a_target_that_waits_can_be_stopped_and_the_source_then_continues_from_the_switch() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let LostMigration { source, target, .. } = lost(&scratch, ConnectionLoss::AtPagesAfterGo);
    scratch.wideleaf(&["vm", "vm2.sock", "stop", "--how=kill"]).assert().success();
    let (code, said) = target.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(report(&scratch, "target.json")["outcome"], "stopped");
    scratch.wideleaf(&["vm", "vm.sock", "resume"]).assert().success();
    let late = ["vm", "vm.sock", "recover", "unix:again.sock"];
    scratch.refuses(&late, 3, &["it is not paused after a migration"]);
    goes_on(&scratch, source);
}

#[test]
fn another_connection_takes_the_place_of_one_that_is_silent() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let Silent { source, target, proxy, client } = silent(&scratch);
    recovered(&scratch);
    let (code, _, why) = end(client);
    assert!(code == Some(4) && why.contains("a part of its RAM was still here"), "{code:?}: {why}");
    proxy.go_on.send(()).unwrap();
    proxy.thread.join().unwrap();
    ends_well(&scratch, source, target);
}

#[test]
fn a_connection_that_is_refused_leaves_the_one_that_works() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let Silent { source, target, proxy, client } = silent(&scratch);
    let wrong = recover_target(&scratch, "again.sock");
    let mut stranger = UnixStream::connect(scratch.path("again.sock")).unwrap();
    stranger.write_all(b"some other program").unwrap();
    let (code, _, why) = end(wrong);
    assert!(code != Some(0) && why.contains("does not speak wideleaf's migration protocol"), "{code:?}: {why}");
    assert!(status_of(&scratch, "vm2.sock")["cut_off"].is_null());

    proxy.go_on.send(()).unwrap();
    let (code, said, why) = end(client);
    assert_eq!(code, Some(0), "{why}");
    let moved: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(moved["post_copy"]["connections_lost"], 0, "{moved}");
    proxy.thread.join().unwrap();
    ends_well(&scratch, source, target);
}

#[test]
fn a_loss_before_go_is_as_final_as_without_a_control_socket() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, (target, _)) = (source(&scratch), target_with(&scratch, "unix:move.sock", &[]));
    let proxy = proxy(&scratch, ConnectionLoss::At(GO));
    let (code, _, why) = end(migrate(&scratch, PROXY, &["--postcopy=1"]));
    assert!(code == Some(4) && why.contains("cannot tell whether the VM runs"), "{code:?}: {why}");
    proxy.thread.join().unwrap();
    let (code, why) = target.end();
    assert!(code == Some(4) && why.contains("it does not run here"), "{code:?}: {why}");
    scratch.wideleaf(&["vm", "vm.sock", "resume"]).assert().success();
    goes_on(&scratch, source);
}
