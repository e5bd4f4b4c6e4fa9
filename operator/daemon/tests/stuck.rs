//! The daemon beside a process with a locked memory map: all other clients are served, and it ends on a signal.
//! Needs KVM, `/dev/fuse` and root (`WIDELEAF_REQUIRE=kvm,fuse` turns a skip into a failure).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod place;

use std::os::unix::net::UnixStream;

use nix::sys::signal::Signal;
use place::{Daemon, Place, eventually, scrape};
use wideleaf_control::client::{ClientError, ask};
use wideleaf_control::protocol::{Answer, Request, Settings, Target};
use wideleaf_control::view::{Care, VmView};
use wideleaf_testing::stuck_process::{StuckProcess, be_the_stuck_process};

#[test]
#[ignore = "the process that the tests start"]
fn be_the_stuck_process_itself() {
    be_the_stuck_process();
}

fn list(daemon: &Daemon<'_>) -> Vec<VmView> {
    let Answer::Vms(vms) = daemon.ask(Request::List) else { panic!("that is no list") };
    vms
}

fn row(daemon: &Daemon<'_>, pid: u32) -> Option<VmView> {
    list(daemon).into_iter().find(|vm| vm.pid == pid)
}

fn is_silent(vm: &VmView) -> bool {
    vm.notes.iter().any(|note| note.contains("does not answer"))
}

fn attach(place: &Place, pid: u32) -> Result<Answer, ClientError> {
    let settings = Settings { policy: Some("never".into()), ..Settings::default() };
    ask(&place.socket(), Request::Attach { target: Target::Pid(pid), settings })
}

/// What libvirt's hook says of a domain that this process runs.
fn started(pid: u32) -> Request {
    Request::Started {
        domain: "web".into(),
        uuid: "web".into(),
        pid,
        settings: Settings::default(),
        mistakes: Vec::new(),
        flavor: None,
    }
}

#[test]
fn a_process_that_hangs_has_a_row_and_a_line_in_the_log_and_everything_else_continues() {
    let (Some(mut stuck), Some(other)) = (StuckProcess::start(), StuckProcess::start()) else { return };
    let place = Place::new();
    place.configure("[attach]\ninterval = \"1s\"");
    stuck.lock();
    let daemon = place.start();
    eventually("both are in the list", || row(&daemon, stuck.pid()).is_some() && row(&daemon, other.pid()).is_some());
    assert!(is_silent(&row(&daemon, stuck.pid()).unwrap()) && !is_silent(&row(&daemon, other.pid()).unwrap()));

    let refused = attach(&place, stuck.pid()).unwrap_err().to_string();
    assert!(refused.contains(&format!("process {} does not answer", stuck.pid())), "{refused}");
    attach(&place, other.pid()).unwrap();
    let name = other.pid().to_string();
    let changes = Settings { policy: Some("off".into()), ..Settings::default() };
    daemon.ask(Request::Set { vm: name.clone(), changes });
    // `top` looks at either.
    assert_eq!(daemon.view().vms, 1);
    daemon.ask(Request::Windows { vm: name.clone() });
    let of_stuck = stuck.pid().to_string();
    for request in [Request::Windows { vm: of_stuck.clone() }, Request::Explain { vm: of_stuck }] {
        let refused = ask(&place.socket(), request).unwrap_err().to_string();
        assert!(refused.contains("does not answer"), "{refused}");
    }
    let scraped = scrape(UnixStream::connect(place.file("metrics.sock")).unwrap());
    assert!(scraped.contains("\nwideleaf_daemon_vms{} 1.0\n"), "{scraped}");
    daemon.ask(Request::Detach { vm: name });
    daemon.ask(Request::Rooms);
    daemon.ask(Request::Prepare { domain: "none".into(), uuid: "none".into(), pages: Vec::new(), ordinary: None });
    daemon.ask(started(other.pid()));
    let refused = ask(&place.socket(), started(stuck.pid())).unwrap_err().to_string();
    assert!(refused.contains("does not answer"), "{refused}");
    daemon.ask(Request::Release { domain: "none".into(), uuid: "none".into() });
    place.configure("[attach]\ninterval = \"1s\"\n[budget]\ncopy_per_second = \"1G\"");
    daemon.signal(Signal::SIGHUP);
    eventually("the configuration is read again", || daemon.view().copy_per_second == 1 << 30);

    stuck.unlock();
    eventually("it is looked at again", || row(&daemon, stuck.pid()).is_some_and(|vm| !is_silent(&vm)));
    let named = format!("process {} (", stuck.pid());
    let log = place.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(&named)).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("its memory map is locked"), "{log}");
    attach(&place, stuck.pid()).unwrap();
}

#[test]
fn a_daemon_ends_and_keeps_its_state_beside_guests_that_hang_even_managed_ones() {
    let (Some(mut managed), Some(mut stuck)) = (StuckProcess::start(), StuckProcess::start()) else { return };
    let place = Place::new();
    let daemon = place.start();
    attach(&place, managed.pid()).unwrap();
    managed.lock();
    stuck.lock();
    eventually("one is seen to hang", || row(&daemon, stuck.pid()).is_some_and(|vm| is_silent(&vm)));
    assert!(daemon.end(Signal::SIGTERM).success());
    assert!(!place.socket().exists());
    let state = std::fs::read_to_string(place.file("state.json")).unwrap();
    assert!(state.contains(&format!("\"pid\":{}", managed.pid())), "{state}");

    let daemon = place.start();
    let care = |daemon: &Daemon<'_>| row(daemon, managed.pid()).map(|vm| vm.care);
    eventually("it is said not to answer", || matches!(care(&daemon), Some(Care::LeftAlone { .. })));
    managed.unlock();
    eventually("it is taken up again", || row(&daemon, managed.pid()).is_some_and(|vm| vm.care == Care::Managed));
}

#[test]
fn a_managed_guest_that_hangs_can_be_detached() {
    let Some(mut stuck) = StuckProcess::start() else { return };
    let place = Place::new();
    let daemon = place.start();
    attach(&place, stuck.pid()).unwrap();
    stuck.lock();
    // The first request waits for the policy and is refused; the second one does not even wait.
    let policy = || Settings { policy: Some("greedy".into()), ..Settings::default() };
    let set = || ask(&place.socket(), Request::Set { vm: stuck.pid().to_string(), changes: policy() });
    for _ in 0..2 {
        let refused = set().unwrap_err().to_string();
        assert!(refused.contains("does not answer"), "{refused}");
    }
    daemon.ask(Request::Detach { vm: stuck.pid().to_string() });
    assert!(daemon.managed().is_empty());
}
