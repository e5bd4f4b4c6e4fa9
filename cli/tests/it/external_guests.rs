//! The operator's commands on a real, external QEMU guest, without a daemon. They need QEMU and KVM
//! (`WIDELEAF_REQUIRE=qemu,kvm` turns a skip into a failure).

use std::path::Path;

use crate::program::new_scratch;
use nix::sys::signal::Signal;
use serde_json::Value;
use wideleaf::vm_source::Source;
use wideleaf::vm_source::processes::{Processes, WithoutDaemon};
use wideleaf_control::protocol::{SOCKET_PATH, Settings};
use wideleaf_control::view::{Care, VmView, Vmm};
use wideleaf_policies::units::mib;
use wideleaf_testing::qemu_guest::{QEMU, QemuGuest, QemuRam, QemuSetup};
use wideleaf_testing::scratch::Running;
use wideleaf_testing::{Need, is_there};

/// Workload of the guest: it checks this memory over and over.
const WORK: &str = "pattern bytes=33554432 seconds=600";

fn can_run() -> bool {
    let qemu = std::process::Command::new(QEMU).arg("--version").output();
    is_there(Need::Qemu, qemu.map(drop).map_err(|error| format!("{QEMU}: {error}")))
        && is_there(Need::Kvm, std::fs::File::open("/dev/kvm").map(drop).map_err(|error| format!("/dev/kvm: {error}")))
}

/// Starts a guest that works on all of its memory.
fn guest(name: &str, ram: QemuRam) -> QemuGuest {
    let mut guest = QemuGuest::start(&QemuSetup::new(name, mib(128), ram, WORK)).unwrap();
    guest.wait_until("a pass over its memory", |said| !said.marks.is_empty());
    guest
}

fn processes() -> Processes {
    Processes::because(WithoutDaemon::Absent("none.sock".into()))
}

#[test]
fn a_qemu_guest_is_visible_without_a_daemon() {
    if !can_run() {
        return;
    }
    let guest = guest("seen", QemuRam::AnonymousOnBasePages);
    let host = processes().host().unwrap();
    assert!(host.source.starts_with("no wideleafd listens at none.sock"), "{}", host.source);
    let seen = host.vms.iter().find(|vm| vm.pid == guest.pid()).unwrap();
    assert_eq!((seen.name.as_str(), seen.vmm, &seen.care), ("seen", Vmm::Qemu, &Care::Unmanaged));
    assert_eq!(seen.ram.iter().map(|block| block.bytes).sum::<u64>(), mib(128).get());
    assert!(seen.backing.unwrap().base_4k >= mib(32).get(), "it checks 32 MiB: {:?}", seen.backing);
    let by_pid = processes().vm(&guest.pid().to_string()).unwrap();
    assert_eq!(by_pid.name, "seen");
    let windows: usize = processes().windows("seen").unwrap().ranges.iter().map(|range| range.backing.len()).sum();
    let explanation = processes().explanation("seen").unwrap();
    assert_eq!(explanation.windows, Some(windows as u64));
    let small = explanation.reasons.iter().map(|reason| reason.windows).sum::<u64>();
    assert_eq!(explanation.huge, Some(windows as u64 - small));
}

#[test]
fn without_a_daemon_nothing_changes_and_an_unknown_vm_is_refused() {
    let refused = processes().set("any", Settings::default()).unwrap_err().to_string();
    assert!(refused.starts_with("no wideleafd listens at none.sock: start it"), "{refused}");
    let unknown = processes().vm("no such VM").unwrap_err();
    assert_eq!(unknown.exit_code(), 2);
    assert!(unknown.to_string().starts_with("no VM on this host is called \"no such VM\""), "{unknown}");
}

#[test]
fn a_process_without_a_guest_is_refused_by_name() {
    let me = std::process::id().to_string();
    let scratch = new_scratch();
    for mode in ["--dry-run", "--foreground"] {
        scratch.refuses(&["attach", &me, mode], 2, &[&format!("process {me} ("), "has no KVM guest"]);
    }
}

#[test]
fn a_guarantee_that_only_wideleafd_could_keep_is_refused() {
    let own = std::process::id().to_string();
    let attach = ["attach", &own, "--foreground", "--guarantee=95%"];
    let why = ["cannot keep a guarantee of 95% without wideleafd", "omit"];
    new_scratch().refuses(&attach, 2, &why);
    if !Path::new(SOCKET_PATH).exists() {
        new_scratch().refuses(&["attach", &own, "--guarantee=95%"], 2, &why);
    }
}

#[test]
fn a_dry_run_describes_the_actions_and_takes_none() {
    if !can_run() {
        return;
    }
    let guest = guest("dry", QemuRam::AnonymousOnBasePages);
    let scratch = new_scratch();
    let pid = guest.pid().to_string();
    let output = scratch.wideleaf(&["attach", &pid, "--dry-run", "--policy=greedy"]).assert().success();
    let text = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(text.contains("may be promoted, as greedy chooses"), "{text}");
    assert_eq!(processes().vm("dry").unwrap().backing.unwrap().huge_2m, 0);
    scratch.refuses(&["attach", &pid, "--dry-run", "--policy=giant"], 2, &["works only for guests of `wideleaf run`"]);
}

#[test]
fn a_guest_is_promoted_in_the_foreground_and_loses_no_word() {
    if !can_run() {
        return;
    }
    let mut guest = guest("promoted", QemuRam::AnonymousOnBasePages);
    let scratch = new_scratch();
    let pid = guest.pid().to_string();
    let mut attach = Running::start(&scratch, &["attach", &pid, "--foreground", "--policy=greedy", "--format=json"]);
    while processes().vm(&pid).unwrap().backing.unwrap().huge_2m < mib(32).get() {
        assert_eq!(attach.0.try_wait().unwrap(), None, "it goes on until it is interrupted");
        std::thread::yield_now();
    }
    guest.check_all_words();
    attach.signal(Signal::SIGINT);
    let json = std::io::read_to_string(attach.0.stdout.take().unwrap()).unwrap();
    let (code, stderr) = attach.end();
    assert_eq!(code, Some(130), "{stderr}");
    let view: VmView = serde_json::from_str(&json).unwrap();
    assert!(view.work.unwrap().outcomes["collapse"]["done"] >= 16, "32 MiB are 16 windows: {json}");
    assert!(guest.is_alive(), "it is left to itself");
}

#[test]
fn the_end_of_a_guest_ends_the_command_that_manages_it() {
    if !can_run() {
        return;
    }
    let mut guest = guest("ended", QemuRam::Anonymous);
    let scratch = new_scratch();
    let pid = guest.pid().to_string();
    let mut attach = Running::start(&scratch, &["attach", &pid, "--foreground", "--policy=off", "--format=json"]);
    let mut said = [0; 1];
    std::io::Read::read_exact(attach.0.stderr.as_mut().unwrap(), &mut said).unwrap();
    guest.kill();
    let json = std::io::read_to_string(attach.0.stdout.take().unwrap()).unwrap();
    assert_eq!(attach.end().0, Some(0));
    let view: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&view["name"], &view["policy"]), (&"ended".into(), &"off".into()));
}
