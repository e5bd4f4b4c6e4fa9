//! Guests with pages that a program provides on demand: a stand-in for Firecracker's restore, and a real postcopy
//! between two QEMU processes. They need KVM and root's userfaultfd; the postcopy needs QEMU as well
//! (`WIDELEAF_REQUIRE=kvm,userfaultfd,qemu` turns a skip into a failure).

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wideleaf_attach::find;
use wideleaf_attach::gate::GuestGate;
use wideleaf_attach::monitor::Monitor;
use wideleaf_attach::session::{Attached, Settings};
use wideleaf_attach::survey::Survey;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_control::view::{Care, Explanation, Vmm};
use wideleaf_memory::gate::{Gate as _, GateState, LeftAlone};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize, PolicyChoice};
use wideleaf_testing::stand_in_vmm::{StandIn, StandInFaults, StandInRam};
use wideleaf_testing::{Need, has_kvm, is_there};

use crate::qemu::{Guest, WORK, can_run, eventually};

const RAM: Bytes = mib(64);
/// Memory that QEMU's guest walks over.
const IN_USE: Bytes = mib(64);
const PAGES_PER_WINDOW: u64 = 512;
const WINDOWS: u64 = RAM.get() / PageSize::Huge2M.bytes().get();

/// A stand-in for Firecracker; `None` where the test is to be skipped.
fn firecracker(ram: StandInRam, faults: StandInFaults) -> Option<StandIn> {
    if !has_kvm() {
        return None;
    }
    let started = StandIn::start("firecracker", &["--id", "restored"], ram, RAM, faults);
    let is_possible = started.as_ref().map(drop).map_err(ToString::to_string);
    is_there(Need::Userfaultfd, is_possible).then(|| started.unwrap())
}

fn process(pid: u32) -> VmProcess {
    find::with_pid(&Places::default(), pid).unwrap()
}

fn by(policy: &str) -> Settings {
    let policy = Some(PolicyChoice::parse(policy).unwrap());
    Settings { policy, may_collapse_shared: true, ..Settings::default() }
}

fn windows(explanation: &Explanation, reason: &str) -> u64 {
    explanation.reasons.iter().find(|why| why.name == reason).map_or(0, |why| why.windows)
}

fn huge(attached: &Attached) -> u64 {
    attached.view().backing.unwrap().huge_2m / PageSize::Huge2M.bytes().get()
}

/// Number of windows on huge pages, with those that wait only because the host has no huge page for them now.
fn promoted(attached: &Attached) -> u64 {
    huge(attached) + windows(&attached.explain(), "backing_off_no_huge_page")
}

fn outcome(attached: &Attached, mechanism: &str, name: &str) -> u64 {
    let work = attached.view().work.unwrap();
    work.outcomes.get(mechanism).and_then(|outcomes| outcomes.get(name)).copied().unwrap_or(0)
}

#[test]
fn full_windows_of_a_restored_guest_are_promoted_and_those_with_holes_wait() {
    let Some(mut guest) = firecracker(StandInRam::Anonymous, StandInFaults::Missing) else { return };
    let half = WINDOWS / 2;
    // Half of the windows are full, and a quarter lack their last pages.
    guest.tell(&format!("visit 0 {}", half * PAGES_PER_WINDOW));
    for window in half..half + WINDOWS / 4 {
        let first = window * PAGES_PER_WINDOW;
        guest.tell(&format!("provide {first} {}", first + PAGES_PER_WINDOW - 7));
    }
    let attached = Attached::start(process(guest.pid()), by("greedy")).unwrap();
    assert_eq!((attached.process().vmm, attached.process().name.as_str()), (Vmm::Firecracker, "restored"));
    eventually("the full windows on huge pages", || promoted(&attached) == half);
    assert!(huge(&attached) > 0, "the host has some huge pages");
    let (view, explanation) = (attached.view(), attached.explain());
    assert_eq!(view.care, Care::Managed);
    assert!(view.notes.iter().any(|note| note.contains("provided on demand")), "{:?}", view.notes);
    assert_eq!(windows(&explanation, "holes_userfaultfd"), WINDOWS / 4, "{explanation:?}");
    assert_eq!(windows(&explanation, "never_touched"), WINDOWS - half - WINDOWS / 4);
    // The guest goes on over all of its memory, and each window follows as it becomes full.
    guest.tell(&format!("visit 0 {}", WINDOWS * PAGES_PER_WINDOW));
    eventually("all windows on huge pages", || promoted(&attached) == WINDOWS);
    for refused in ["refused_busy", "refused_not_eligible", "refused_not_observed"] {
        assert_eq!(outcome(&attached, "collapse", refused), 0, "the kernel was asked for what it refuses: {refused}");
    }
    guest.tell("close");
    guest.tell(&format!("visit 0 {}", WINDOWS * PAGES_PER_WINDOW));
}

#[test]
fn pages_that_arrive_while_windows_are_promoted_are_all_right() {
    let Some(mut guest) = firecracker(StandInRam::Anonymous, StandInFaults::Missing) else { return };
    let attached = Attached::start(process(guest.pid()), by("greedy")).unwrap();
    for round in 0..3 {
        for window in 0..WINDOWS {
            let first = window * PAGES_PER_WINDOW;
            // Its first page is a fault of the guest's, and the handler provides the rest meanwhile.
            guest.tell(&format!("visit {first} {}", first + PAGES_PER_WINDOW));
            guest.tell(&format!("provide {first} {}", first + PAGES_PER_WINDOW));
        }
        eventually("all windows on huge pages", || promoted(&attached) == WINDOWS);
        guest.tell("visit 0 0");
        if round < 2 {
            guest.tell(&format!("drop 0 {}", WINDOWS * PAGES_PER_WINDOW));
        }
    }
    guest.tell(&format!("visit 0 {}", WINDOWS * PAGES_PER_WINDOW));
}

#[test]
fn a_window_with_a_write_protected_page_stays_as_it_is_until_that_is_written() {
    let Some(mut guest) = firecracker(StandInRam::Anonymous, StandInFaults::MissingAndWrites) else { return };
    let all = WINDOWS * PAGES_PER_WINDOW;
    guest.tell(&format!("provide 0 {all}"));
    // One page in each of the first windows.
    let (protected, half) = (WINDOWS / 2, WINDOWS / 2 * PAGES_PER_WINDOW);
    for first in (0..half).step_by(PAGES_PER_WINDOW as usize) {
        guest.tell(&format!("protect {first} {}", first + 1));
    }
    let before = guest.tell("faults");
    let attached = Attached::start(process(guest.pid()), by("greedy")).unwrap();
    let is_tried = || windows(&attached.explain(), "backing_off_not_eligible") == protected;
    eventually("the other windows on huge pages", || promoted(&attached) == WINDOWS - protected && is_tried());
    assert_eq!(guest.tell("faults"), before);
    guest.tell(&format!("visit 0 {all}"));
    let reported = |guest: &mut StandIn| guest.tell("faults") - before;
    eventually("a report of each write", || reported(&mut guest) == protected);
    eventually("all windows on huge pages", || promoted(&attached) == WINDOWS);
    guest.tell(&format!("visit 0 {all}"));
}

#[test]
fn shared_memory_waits_for_the_end_of_a_userfaultfd() {
    let Some(mut guest) = firecracker(StandInRam::Memfd("guest_mem"), StandInFaults::Minor) else { return };
    let all = WINDOWS * PAGES_PER_WINDOW;
    let faults = guest.tell(&format!("visit 0 {all}"));
    let attached = Attached::start(process(guest.pid()), by("greedy")).unwrap();
    let waiting = attached.explain();
    assert_eq!(windows(&waiting, "shared_userfaultfd"), WINDOWS, "{waiting:?}");
    assert_eq!(guest.tell("faults"), faults.max(all), "no page had to be provided twice");
    guest.tell("close");
    // The others follow, within the budget of stalls of a guest at work.
    eventually("a huge page", || promoted(&attached) > 0);
    guest.tell(&format!("visit 0 {all}"));
}

#[test]
fn a_userfaultfd_that_another_process_has_open_counts_and_reading_a_missing_page_disturbs_no_handler() {
    let Some(mut guest) = firecracker(StandInRam::Anonymous, StandInFaults::MissingOfAChild) else { return };
    guest.tell(&format!("visit 0 {}", PAGES_PER_WINDOW + 1));
    let seen = process(guest.pid());
    assert_eq!(seen.descriptors.as_ref().unwrap().userfaultfd, None);
    let attached = Attached::start(seen, by("greedy")).unwrap();
    eventually("a huge page", || promoted(&attached) == 1);
    assert_eq!(windows(&attached.explain(), "holes_userfaultfd"), 1);
    let before = guest.tell("faults");
    let memory = ProcessHost::open(guest.pid()).unwrap().open_file("mem").unwrap();
    let missing = guest.ram().get() + 7 * PageSize::Huge2M.bytes().get();
    let read = std::os::unix::fs::FileExt::read_at(&memory, &mut [0; 8], missing);
    assert!(read.is_err(), "{read:?}");
    assert_eq!(guest.tell("faults"), before);
}

#[test]
fn guests_of_other_vmms_are_found_with_their_names_and_their_ram() {
    if !has_kvm() {
        return;
    }
    let crosvm = ["run", "--name", "arc", "--no-balloon", "vmlinux"];
    let cloud = ["--api-socket", "/run/vc/vm/ab12/clh-api.sock", "--memory", "size=64M"];
    for (program, arguments, ram, vmm, name, kind) in [
        ("crosvm", &crosvm[..], StandInRam::Memfd("crosvm_guest"), Vmm::Crosvm, "arc", "shmem"),
        ("cloud-hypervisor", &cloud, StandInRam::Memfd("ch_ram"), Vmm::CloudHypervisor, "ab12", "shmem"),
        ("cloud-hypervisor", &cloud, StandInRam::Anonymous, Vmm::CloudHypervisor, "ab12", "anonymous"),
        ("firecracker", &["--id=vm-8"], StandInRam::Anonymous, Vmm::Firecracker, "vm-8", "anonymous"),
    ] {
        let mut guest = StandIn::start(program, arguments, ram, RAM, StandInFaults::None).unwrap();
        let found = find::all(&Places::default()).unwrap().guests;
        let found = found.iter().find(|found| found.pid == guest.pid()).unwrap();
        assert_eq!((found.vmm, found.name.as_str()), (vmm, name));
        guest.tell(&format!("visit 0 {}", WINDOWS * PAGES_PER_WINDOW));
        let view = Survey::take(found, None).view();
        assert_eq!(view.resident(), Some(RAM.get()), "{program}");
        let pieces: Vec<_> = view.ram.iter().map(|piece| (piece.kind.as_str(), piece.bytes, piece.hva)).collect();
        assert_eq!(pieces, [(kind, RAM.get(), guest.ram().get())], "{program}");
    }
}

/// Asks QEMU over its monitor, which has no other client.
pub fn ask(monitor: &Path, command: &str, arguments: Value) -> Value {
    let mut stream = UnixStream::connect(monitor).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let commands = [json!({ "execute": "qmp_capabilities" }), json!({ "execute": command, "arguments": arguments })];
    let mut answer = Value::Null;
    for command in commands {
        writeln!(stream, "{command}").unwrap();
        // A greeting and events come between.
        let mut answers = lines.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let answered = answers.find(|line| !line["return"].is_null() || !line["error"].is_null()).unwrap();
        assert!(answered["error"].is_null(), "{command}: {answered}");
        answer = answered["return"].clone();
    }
    answer
}

/// A guest that has just moved by postcopy, with most of its pages still to come.
pub struct Postcopy {
    pub source: Guest,
    pub target: Guest,
    _folder: tempfile::TempDir,
}

impl Postcopy {
    /// A guest with this memory at this work moves.
    pub fn start(memory: Bytes, work: &str) -> Postcopy {
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("unix:{}", folder.path().join("migration").display());
        let machine = ["-M", "q35", "-m", &format!("{}M", memory.get() >> 20)];
        let source = Guest::with_kernel(&machine, work);
        eventually("a guest at work", || source.console().matches(" progress ").count() > 1);
        let target = Guest::with_kernel(&[&machine[..], &["-incoming", "defer"]].concat(), work);
        let capabilities = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
        for guest in [&source, &target] {
            ask(&guest.qmp(), "migrate-set-capabilities", capabilities.clone());
        }
        ask(&target.qmp(), "migrate-incoming", json!({ "uri": uri }));
        // Slow before, so that little has moved; slow afterwards, so that the test can watch.
        let slow = json!({ "max-bandwidth": 4 << 20, "max-postcopy-bandwidth": 4 << 20 });
        ask(&source.qmp(), "migrate-set-parameters", slow);
        ask(&source.qmp(), "migrate", json!({ "uri": uri }));
        let state = || ask(&source.qmp(), "query-migrate", json!({}))["status"].as_str().unwrap().to_owned();
        eventually("the migration", || state() == "active");
        ask(&source.qmp(), "migrate-start-postcopy", json!({}));
        eventually("the postcopy", || state() == "postcopy-active");
        Postcopy { source, target, _folder: folder }
    }

    /// Lets the remaining pages come as fast as they can.
    pub fn finish(&self) {
        ask(&self.source.qmp(), "migrate-set-parameters", json!({ "max-postcopy-bandwidth": 0 }));
        let state = || ask(&self.source.qmp(), "query-migrate", json!({}))["status"].clone();
        eventually("its end", || state() == "completed");
    }
}

#[test]
fn a_guest_that_arrives_by_postcopy_loses_no_byte_and_is_promoted_after_it() {
    if !can_run() {
        return;
    }
    let moving = Postcopy::start(mib(128), WORK);
    // The source is ahead: its target still has to read that it listens now.
    let has_userfaultfd = || process(moving.target.pid()).descriptors.unwrap().userfaultfd.is_some();
    eventually("the target's userfaultfd", has_userfaultfd);
    let target = process(moving.target.pid());
    let attached = Attached::start(target, by("greedy")).unwrap();
    let during = attached.explain();
    // QEMU forbids huge pages until it is over: `postcopy_ram_prepare_discard` in migration/postcopy-ram.c.
    assert_eq!((during.huge, windows(&during, "marked_no_huge_page")), (Some(0), 64), "{during:?}");
    assert!(during.notes.iter().any(|note| note.contains("provided on demand")), "{during:?}");
    assert!(attached.view().work.unwrap().outcomes.is_empty(), "the kernel is not asked");
    let with_monitor = {
        let process = process(moving.target.pid());
        let monitor = Monitor::now_or_later(&process, &moving.target.qmp()).unwrap();
        GuestGate::new(process, Some(Arc::new(monitor)))
    };
    eventually("the migration in its gate", || {
        with_monitor.refresh();
        with_monitor.state() == GateState::Closed(LeftAlone::Migration)
    });
    moving.finish();
    let is_promoted = || promoted(&attached) >= IN_USE.get() / PageSize::Huge2M.bytes().get() - 4;
    eventually("huge pages", is_promoted);
    assert!(huge(&attached) > 0, "the host has some huge pages");
    let passes = || moving.target.console().matches(" progress ").count();
    let before = passes();
    eventually("another pass over its memory", || passes() > before + 1);
    assert_eq!(moving.target.said().complaint, None);
}
