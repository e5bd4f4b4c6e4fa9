//! `wideleaf vm SOCKET migrate` of a VM that writes its disk: the lock of the file moves with the guest, whatever is
//! lost on the way, and the guest reads back all that it has written. Needs KVM (`WIDELEAF_REQUIRE=kvm` turns a skip
//! into a failure).

use std::fs::File;
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::{Running, Scratch};
use wideleaf_vmm::devices::virtio::block::{DiskError, DiskImage, DiskOptions};

use crate::migration::{
    GO, MACHINE, PAGES, READY, RUNNING, end, fails_at, forward, has_lost_nothing, migrate, report, started, status,
    target_with,
};
use crate::program::new_scratch;

const DISK: [&str; 1] = ["--disk=disk.img"];

/// A guest with two vCPUs that writes its disk and reads it back, pass after pass, while one checks memory.
fn source(scratch: &Scratch) -> Running {
    source_with(scratch, &[])
}

fn source_with(scratch: &Scratch, more: &[&str]) -> Running {
    File::create(scratch.path("disk.img")).unwrap().set_len(8 << 20).unwrap();
    let what = ["disk", "--vcpus=2", "--memory=128M", "--cmdline=bytes=2M passes=300", DISK[0]];
    let run = started(scratch, &[&what[..], more].concat());
    // Before that its disk could move without a driver, and the source's report would say so.
    while status(scratch)["virtio"][0]["driver"] != "ready" {
        std::thread::yield_now();
    }
    run
}

fn target(scratch: &Scratch) -> Running {
    target_with(scratch, "unix:move.sock", &DISK).0
}

/// The process that has the disk, if any.
fn holder(scratch: &Scratch) -> Option<u32> {
    let options = DiskOptions { path: scratch.path("disk.img"), ..DiskOptions::default() };
    match DiskImage::open(&options) {
        Ok(_) => None,
        Err(DiskError::InUse { holder, .. }) => holder,
        Err(error) => panic!("{error}"),
    }
}

/// The guest found all that it had written, and its disk has that too.
fn is_whole(scratch: &Scratch, name: &str) {
    let report = report(scratch, name);
    has_lost_nothing(&report);
    assert_eq!(report["results"]["passes"]["value"], json!(300.0));
    assert_eq!(holder(scratch), None);
}

/// The source is as if nothing had been, to its end.
fn goes_on(scratch: &Scratch, source: Running) {
    let state = status(scratch);
    assert_eq!((&state["state"], &state["doubt"]), (&json!("running"), &Value::Null));
    assert_eq!(holder(scratch), Some(source.0.id()));
    assert_eq!(source.end(), (Some(0), String::new()));
    is_whole(scratch, "source.json");
}

#[test]
fn a_disk_that_is_written_moves_with_its_guest_and_back() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let first = source(&scratch);
    assert_eq!(holder(&scratch), Some(first.0.id()));
    let second = target(&scratch);
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &[]));
    assert_eq!(code, Some(0), "{why}");
    assert_eq!(first.end(), (Some(0), String::new()));
    assert_eq!(holder(&scratch), Some(second.0.id()));
    std::fs::rename(scratch.path("vm2.sock"), scratch.path("vm.sock")).unwrap();
    std::fs::rename(scratch.path("source.json"), scratch.path("first.json")).unwrap();
    let third = target(&scratch);
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &[]));
    assert_eq!(code, Some(0), "{why}");
    assert_eq!(holder(&scratch), Some(third.0.id()));
    assert_eq!(third.end(), (Some(0), String::new()));
    second.end();
    is_whole(&scratch, "target.json");
}

#[test]
fn a_vm_that_is_saved_and_stopped_leaves_its_disk_as_the_snapshot_knows_it() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let mut run = source(&scratch);
    let mut says = String::new();
    for _ in 0..5 {
        scratch.wideleaf(&["vm", "vm.sock", "snapshot", "saved", "--stop", "--pause=60s"]).assert().success();
        assert_eq!(run.end(), (Some(0), says));
        // It is refused if the disk was written after the snapshot.
        run = started(&scratch, &["--restore=saved"]);
        says = "wideleaf: the VM gets what its snapshot names: disk disk.img; name the devices of a snapshot from \
                elsewhere\n"
            .to_owned();
    }
    assert_eq!(run.end(), (Some(0), says));
    is_whole(&scratch, "source.json");
}

/// A source, a target, and a client with a migration that fails at a message of this kind.
fn failed_at(scratch: &Scratch, cut: u32) -> (Running, Running, String) {
    let (source, target) = (source(scratch), target(scratch));
    let why = fails_at(scratch, cut);
    (source, target, why)
}

#[test]
fn a_connection_that_is_lost_before_go_leaves_the_disk_to_the_source() {
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

#[test]
fn a_source_that_has_its_disk_again_keeps_it_and_the_target_says_that_the_vm_does_not_run_there() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (running, waiting) = (source(&scratch), target(&scratch));
    let (listener, to) = (UnixListener::bind(scratch.path("late.sock")).unwrap(), scratch.path("move.sock"));
    let client = migrate(&scratch, "unix:late.sock", &[]);
    let (source, target) = (listener.accept().unwrap().0, UnixStream::connect(to).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| forward(&target, &source, |_| true));
        let _ended = forward(&source, &target, |kind| {
            if kind == MACHINE {
                // The source sees its connection end, and the target has yet to read this.
                source.shutdown(Shutdown::Write).unwrap();
                while holder(&scratch) != Some(running.0.id()) {
                    std::thread::yield_now();
                }
            }
            true
        });
    });
    let (code, _, why) = end(client);
    assert!(code == Some(4) && why.contains("the connection ended"), "{code:?}: {why}");
    let (code, why) = waiting.end();
    let said = why.contains("cannot lock disk disk.img: another process") && why.contains("; it does not run here");
    assert!(code == Some(4) && said, "{code:?}: {why}");
    goes_on(&scratch, running);
}

#[test]
fn a_go_that_is_lost_leaves_the_disk_to_neither_until_the_operator_resumes_the_source() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target, why) = failed_at(&scratch, GO);
    assert_eq!(target.end().0, Some(4));
    assert!(why.contains("cannot tell whether the VM runs at"), "{why}");
    let copy = std::fs::read(scratch.path("disk.img")).unwrap();
    assert_eq!(holder(&scratch), None);
    // Another process that uses the disk meanwhile keeps the guest from running.
    let options = DiskOptions { path: scratch.path("disk.img"), ..DiskOptions::default() };
    let other = DiskImage::open(&options).unwrap();
    scratch.refuses(&["vm", "vm.sock", "resume"], 2, &["cannot resume the VM: cannot lock disk disk.img"]);
    drop(other);
    assert!(std::fs::read(scratch.path("disk.img")).unwrap() == copy, "neither side writes it");
    scratch.wideleaf(&["vm", "vm.sock", "resume"]).assert().success();
    goes_on(&scratch, source);
}

#[test]
fn a_running_that_is_lost_leaves_the_disk_to_the_target_and_the_source_cannot_be_resumed() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target, _) = failed_at(&scratch, RUNNING);
    assert_eq!(holder(&scratch), Some(target.0.id()));
    scratch.refuses(&["vm", "vm.sock", "resume"], 2, &["cannot resume the VM: cannot lock disk disk.img"]);
    assert_eq!(status(&scratch)["state"], "paused");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(source.end(), (Some(0), String::new()), "its disk is stopped");
    let (code, said) = target.end();
    assert_eq!(code, Some(0), "{said}");
    is_whole(&scratch, "target.json");
}

#[test]
fn a_target_that_was_ready_too_late_gives_the_disk_back() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target) = (source(&scratch), target(&scratch));
    let (place, thread) = crate::migration::withheld(&scratch, READY);
    let (code, _, why) = end(crate::migration::client(&scratch, &place, &["--pause=2s"]));
    assert!(code == Some(4) && why.contains("the target was not ready within the pause"), "{code:?}: {why}");
    let (code, why) = target.end();
    assert!(code == Some(4) && why.contains("the VM stays at the source"), "{code:?}: {why}");
    goes_on(&scratch, source);
    thread.join().unwrap();
}

#[test]
fn a_target_that_is_killed_with_the_disk_gives_it_back() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (source, target) = (source(&scratch), target(&scratch));
    let (place, thread) = crate::migration::held_at(&scratch, READY, move || {
        target.signal(Signal::SIGKILL);
        drop(target);
    });
    let (code, _, why) = end(migrate(&scratch, &place, &[]));
    assert_eq!(code, Some(4), "{why}");
    thread.join().unwrap();
    goes_on(&scratch, source);
}

#[test]
fn a_copy_of_the_disk_is_refused_and_the_guest_goes_on() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let source = source(&scratch);
    std::fs::copy(scratch.path("disk.img"), scratch.path("copy.img")).unwrap();
    let arguments = ["run", "--incoming=unix:move.sock", "--disk=copy.img,id=disk.img", "--no-daemon"];
    let target = Running::start(&scratch, &arguments);
    while !scratch.path("move.sock").exists() {
        std::thread::yield_now();
    }
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &[]));
    assert!(code == Some(4) && why.contains("cannot use disk copy.img: the VM that arrives has its"), "{why}");
    assert_eq!(target.end().0, Some(3));
    goes_on(&scratch, source);
}

#[test]
fn a_vm_moves_into_a_jail_of_another_user_with_its_disk_and_its_sockets() {
    if !has_kvm() || !crate::sandboxed::has_root() {
        return;
    }
    let scratch = new_scratch();
    std::fs::create_dir(scratch.path("jail")).unwrap();
    // That user writes the report.
    std::fs::set_permissions(scratch.path("."), std::fs::Permissions::from_mode(0o777)).unwrap();
    let source = source_with(&scratch, &["--vsock=cid=3,socket=vsock1", "--balloon", "--rng"]);
    let options = [
        "--jail=jail",
        "--user=64999:64999",
        DISK[0],
        "--vsock=cid=3,socket=vsock2",
        "--balloon",
        "--rng",
        "--require-sandbox",
    ];
    let (target, _) = target_with(&scratch, "unix:move.sock", &options);
    let (code, _, why) = end(migrate(&scratch, "unix:move.sock", &[]));
    assert_eq!(code, Some(0), "{why}");
    assert_eq!(source.end().0, Some(0));
    assert!(scratch.path("vsock2").exists() && !scratch.path("vsock1").exists());
    let root = format!("/proc/{}/root", target.0.id());
    assert!(!std::path::Path::new(&root).join("etc").exists(), "no file of the host is there");
    let (code, said) = target.end();
    assert_eq!(code, Some(0), "{said}");
    is_whole(&scratch, "target.json");
    assert!(!scratch.path("vsock2").exists(), "its socket is removed from outside the jail");
}
