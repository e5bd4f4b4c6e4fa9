//! The hook under a real libvirtd, with real QEMU guests: which process learns what, and when; and that no failure
//! keeps a guest from starting or ends one.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod under_libvirt;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use under_libvirt::{ask, care, is_running, libvirt_with_hook, passes, program, start_wideleafd};
use wideleaf_control::protocol::{Answer, Envelope, Reply, Request, Settings};
use wideleaf_control::view::Care;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::PageSize;
use wideleaf_testing::has_kvm;
use wideleaf_testing::libvirt::{Domain, IMAGES, Libvirt};

/// Time limit of one request: a guest of 128 MiB starts within a second on an idle machine.
const REQUEST_MAX: Duration = Duration::from_secs(60);

/// Answers the hook like a daemon, makes room in the pool on request, and records the requests.
struct RecordingDaemon {
    requests: Receiver<Request>,
}

impl RecordingDaemon {
    fn listen(libvirt: &Libvirt) -> RecordingDaemon {
        let listener = UnixListener::bind(libvirt.run_folder().join("control.sock")).unwrap();
        let (sender, requests) = channel();
        // It waits for more requests until the test program ends.
        thread::spawn(move || {
            let mut rooms = HashMap::new();
            for stream in listener.incoming() {
                let request = answer(&stream.unwrap(), &mut rooms);
                if sender.send(request).is_err() {
                    return;
                }
            }
        });
        RecordingDaemon { requests }
    }

    fn next(&self) -> Request {
        self.requests.recv_timeout(REQUEST_MAX).expect("the hook asks")
    }

    /// Waits for a Started request and returns its process and settings.
    fn next_started(&self) -> (u32, Settings) {
        match self.next() {
            Request::Started { pid, settings, .. } => (pid, settings),
            other => panic!("{other:?} is not a Started"),
        }
    }
}

fn answer(stream: &UnixStream, rooms: &mut HashMap<String, Room>) -> Request {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    let request = serde_json::from_str::<Envelope>(&line).unwrap().request;
    match &request {
        Request::Prepare { uuid, pages, .. } => {
            let pages = pages.iter().map(|want| want.pages).sum();
            rooms.insert(uuid.clone(), Room::lease(pages));
        }
        Request::Release { uuid, .. } => drop(rooms.remove(uuid)),
        _ => {}
    }
    // The hook may already have ended.
    let _ = writeln!(&*stream, "{}", serde_json::to_string(&Reply::Ok(Box::new(Answer::Done))).unwrap());
    request
}

/// Pages of 2 MiB, held by a process of its own. They are given back when this is dropped, and also when the test
/// is killed.
struct Room(Child);

impl Room {
    fn lease(pages: u64) -> Room {
        let mut holder = Command::new(program())
            .args(["hold-pool", "--pages", &pages.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut held = [0; 4];
        holder.stdout.take().unwrap().read_exact(&mut held).unwrap();
        assert_eq!(&held, b"held");
        Room(holder)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn a_domain_on_huge_pages_starts_in_a_pool_that_has_none_and_leaves_none() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    let daemon = RecordingDaemon::listen(&libvirt);
    let before = HugetlbPools::of_this_machine().status(PageSize::Huge2M).unwrap();
    let domain = Domain { metadata: "policy='off' guarantee='95%'", backing: "<hugepages/>", ..Domain::PATTERN };
    libvirt.define(&domain);
    let uuid = libvirt.virsh(&["domuuid", "pattern"]).unwrap();

    libvirt.virsh(&["start", "pattern"]).unwrap();
    let Request::Prepare { domain: name, uuid: said, pages, .. } = daemon.next() else { panic!("no Prepare first") };
    assert_eq!((name.as_str(), &said, pages.len()), ("pattern", &uuid, 1));
    // 128 MiB.
    assert_eq!((pages[0].page_bytes, pages[0].pages, pages[0].node), (2 << 20, 64, None));
    let (pid, settings) = daemon.next_started();
    assert_eq!(pid, libvirt.pid("pattern"));
    assert_eq!((settings.policy.as_deref(), settings.guarantee.as_deref()), (Some("off"), Some("95%")));
    libvirt.wait_until("the guest works", || passes(&libvirt, "pattern") > 0);

    libvirt.virsh(&["destroy", "pattern"]).unwrap();
    assert_eq!(daemon.next(), Request::Release { domain: "pattern".into(), uuid });
    let status = || HugetlbPools::of_this_machine().status(PageSize::Huge2M).unwrap();
    libvirt.wait_until("the pool is as it was", || status() == before);
}

#[test]
fn guests_live_through_a_restart_of_libvirtd_and_are_reported_again() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    let daemon = RecordingDaemon::listen(&libvirt);
    libvirt.define(&Domain::PATTERN);
    libvirt.virsh(&["start", "pattern"]).unwrap();
    let (pid, settings) = daemon.next_started();
    assert_eq!(settings, Settings::default(), "a domain without settings");
    libvirt.restart_libvirtd();
    assert_eq!(daemon.next_started().0, pid);
    let before = passes(&libvirt, "pattern");
    libvirt.wait_until("the guest goes on", || passes(&libvirt, "pattern") > before);
    assert!(is_running(&libvirt, "pattern"));
    libvirt.virsh(&["destroy", "pattern"]).unwrap();
    assert!(matches!(daemon.next(), Request::Release { .. }));
}

#[test]
fn a_guest_is_saved_and_restored_with_its_xml_as_it_was() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    let daemon = RecordingDaemon::listen(&libvirt);
    libvirt.define(&Domain { metadata: "policy='auto'", ..Domain::PATTERN });
    libvirt.virsh(&["start", "pattern"]).unwrap();
    let (first, _) = daemon.next_started();
    libvirt.wait_until("the guest works", || passes(&libvirt, "pattern") > 0);
    let file = format!("{IMAGES}/saved");
    libvirt.virsh(&["save", "pattern", &file]).unwrap();
    assert!(matches!(daemon.next(), Request::Release { .. }));
    libvirt.virsh(&["restore", &file]).unwrap();
    let (second, settings) = daemon.next_started();
    assert_ne!(first, second);
    assert_eq!(settings.policy.as_deref(), Some("auto"));
    let before = passes(&libvirt, "pattern");
    libvirt.wait_until("the guest goes on", || passes(&libvirt, "pattern") > before);
    assert!(!libvirt.console("pattern").contains("mismatch"), "{}", libvirt.console("pattern"));
}

#[test]
fn a_daemon_that_is_dead_or_hangs_keeps_no_guest_from_starting() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    libvirt.define(&Domain::PATTERN);
    let start_and_end = || {
        libvirt.virsh(&["start", "pattern"]).unwrap();
        assert!(is_running(&libvirt, "pattern"));
        libvirt.restart_libvirtd();
        assert!(is_running(&libvirt, "pattern"), "at reconnect a failing hook would have killed it");
        libvirt.virsh(&["destroy", "pattern"]).unwrap();
    };
    start_and_end();
    let _hanging = UnixListener::bind(libvirt.run_folder().join("control.sock")).unwrap();
    start_and_end();
}

#[test]
fn a_guarantee_without_a_daemon_is_an_error_of_libvirt_and_starts_no_guest() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    libvirt.define(&Domain { metadata: "guarantee='95%'", ..Domain::PATTERN });
    let error = libvirt.virsh(&["start", "pattern"]).unwrap_err();
    assert!(error.contains("wideleaf: cannot give pattern its guarantee: no wideleafd listens"), "{error}");
    assert!(!is_running(&libvirt, "pattern"));
}

#[test]
fn a_misspelt_attribute_is_an_error_of_libvirt_that_names_the_right_one_and_starts_no_guest() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    libvirt.define(&Domain { metadata: "garantee='95%'", ..Domain::PATTERN });
    let error = libvirt.virsh(&["start", "pattern"]).unwrap_err();
    assert!(error.contains("unknown attribute garantee: did you mean guarantee?"), "{error}");
    assert!(!is_running(&libvirt, "pattern"));
}

#[test]
fn renewing_a_hook_under_a_libvirtd_that_runs_it_raises_no_alarm() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    let socket = "/run/wideleaf/other.sock";
    let hook = |command: &str| {
        let program = "/run/wideleaf/bin/wideleaf";
        libvirt.run(&[program, "hook", command, "--socket", socket]).status.code()
    };
    assert_eq!(hook("status"), Some(11), "it is for another socket");
    assert_eq!((hook("install"), hook("status")), (Some(0), Some(0)), "the renewed script is as old as the first");
    let uninstall = libvirt.run(&["/run/wideleaf/bin/wideleaf", "hook", "uninstall"]);
    assert_eq!(uninstall.status.code(), Some(0));
    assert_eq!((hook("install"), hook("status")), (Some(0), Some(12)), "it is young, and has not been called");
    libvirt.define(&Domain::PATTERN);
    libvirt.virsh(&["start", "pattern"]).unwrap();
    assert_eq!(hook("status"), Some(0), "this libvirtd has called it");
    libvirt.restart_libvirtd();
    assert_eq!(hook("status"), Some(0), "so has this one");
    libvirt.virsh(&["destroy", "pattern"]).unwrap();
}

#[test]
fn nothing_of_libvirt_is_left_when_a_test_ends_or_fails() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    libvirt.define(&Domain::PATTERN);
    libvirt.virsh(&["start", "pattern"]).unwrap();
    let folder = libvirt.run_folder();
    let name = folder.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let sees_folder = |process: &PathBuf| {
        std::fs::read_to_string(process.join("mountinfo")).is_ok_and(|mounts| mounts.contains(&name))
    };
    let ours = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|process| process.path());
        processes.filter(sees_folder).count()
    };
    // virtlogd, libvirtd, QEMU, a shell and the process that keeps it.
    assert!(ours() >= 5, "{}", ours());
    let failed = catch_unwind(AssertUnwindSafe(move || {
        let _libvirt = libvirt;
        resume_unwind(Box::new("a test that fails"));
    }));
    assert!(failed.is_err());
    assert_eq!(ours(), 0);
    assert!(!folder.exists());
}

/// Huge mappings of a domain by KVM's own count, which libvirt queries from QEMU.
fn pages_2m(libvirt: &Libvirt, domain: &str) -> u64 {
    let text = libvirt.virsh(&["domstats", "--vm", domain]).unwrap();
    let count = text.lines().find_map(|line| line.trim().strip_prefix("vm.pages_2m.cur="));
    count.expect("QEMU reports KVM's statistics since 7.1").parse().unwrap()
}

#[test]
fn wideleafd_promotes_a_domain_that_the_hook_reports_and_leaves_it_on_request() {
    if !has_kvm() {
        return;
    }
    let Some(libvirt) = libvirt_with_hook() else { return };
    start_wideleafd(&libvirt);
    let off = Domain { metadata: "policy='off'", is_on_base_pages: true, ..Domain::PATTERN };
    libvirt.define(&off);
    libvirt.virsh(&["start", "pattern"]).unwrap();
    libvirt.wait_until("the daemon knows it", || care(&libvirt, "pattern") == Some(Care::Off));
    libvirt.wait_until("the guest works", || passes(&libvirt, "pattern") > 0);
    assert_eq!(pages_2m(&libvirt, "pattern"), 0, "on base pages");

    let changes = Settings { policy: Some("greedy".into()), ..Settings::default() };
    ask(&libvirt, Request::Set { vm: "pattern".into(), changes }).unwrap();
    // The 32 MiB under check are 16 windows, all of which are touched again at every pass.
    libvirt.wait_until("KVM maps what is checked in huge pages", || pages_2m(&libvirt, "pattern") >= 16);

    ask(&libvirt, Request::Detach { vm: "pattern".into() }).unwrap();
    assert_ne!(care(&libvirt, "pattern"), Some(Care::Managed));
    let before = passes(&libvirt, "pattern");
    libvirt.wait_until("the guest goes on", || passes(&libvirt, "pattern") > before);
    assert!(!libvirt.console("pattern").contains("mismatch"), "{}", libvirt.console("pattern"));
    libvirt.virsh(&["destroy", "pattern"]).unwrap();
    libvirt.wait_until("the daemon has forgotten it", || care(&libvirt, "pattern").is_none());
}

#[test]
fn wideleafd_takes_up_a_domain_that_was_saved_and_restored_and_gives_it_large_pages_again() {
    if !has_kvm() {
        return;
    }
    let Some(libvirt) = libvirt_with_hook() else { return };
    start_wideleafd(&libvirt);
    libvirt.define(&Domain { metadata: "policy='greedy'", is_on_base_pages: true, ..Domain::PATTERN });
    libvirt.virsh(&["start", "pattern"]).unwrap();
    let is_large = || pages_2m(&libvirt, "pattern") >= 16;
    libvirt.wait_until("KVM maps what is checked in huge pages", is_large);
    let first = libvirt.pid("pattern");
    let file = format!("{IMAGES}/saved");
    libvirt.virsh(&["save", "pattern", &file]).unwrap();
    libvirt.wait_until("the daemon has forgotten it", || care(&libvirt, "pattern").is_none());

    libvirt.virsh(&["restore", &file]).unwrap();
    assert_ne!(libvirt.pid("pattern"), first);
    libvirt.wait_until("the daemon manages it again", || care(&libvirt, "pattern") == Some(Care::Managed));
    libvirt.wait_until("KVM maps it in huge pages again", is_large);
    let before = passes(&libvirt, "pattern");
    libvirt.wait_until("the guest goes on", || passes(&libvirt, "pattern") > before + 1);
    assert!(!libvirt.console("pattern").contains("mismatch"), "{}", libvirt.console("pattern"));
    libvirt.virsh(&["destroy", "pattern"]).unwrap();
}

#[test]
fn wideleafd_makes_room_for_a_domain_on_huge_pages_and_takes_it_back() {
    let Some(libvirt) = libvirt_with_hook() else { return };
    start_wideleafd(&libvirt);
    let status = || HugetlbPools::of_this_machine().status(PageSize::Huge2M).unwrap();
    let before = status();
    libvirt.define(&Domain { metadata: "guarantee='95%'", backing: "<hugepages/>", ..Domain::PATTERN });
    libvirt.virsh(&["start", "pattern"]).unwrap();
    libvirt.wait_until("the guest works", || passes(&libvirt, "pattern") > 0);
    libvirt.wait_until("the daemon has it", || care(&libvirt, "pattern").is_some());
    libvirt.virsh(&["destroy", "pattern"]).unwrap();
    libvirt.wait_until("the pool is as it was", || status() == before);
}
