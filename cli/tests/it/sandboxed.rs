//! A guest's process in its sandbox as seen from outside: its remaining rights, its user, its files, and
//! that nothing is left behind. Needs KVM. Other users, jails and cgroups need root: without it each test
//! says that it was skipped.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::time::Instant;

use crate::migration::AMONG_QUESTIONS;
use crate::program::new_scratch;
use crate::snapshot::saved;
use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use serde_json::Value;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;

/// Arguments of a guest that lives until the test ends it.
const LONG: [&str; 6] =
    ["run", "pattern", "--cmdline=bytes=16M seconds=600", "--memory=64M", "--no-daemon", "--vcpus=2"];
/// Arguments of a guest that lives for a moment.
const SHORT: [&str; 5] = ["run", "pattern", "--cmdline=bytes=16M passes=2", "--memory=64M", "--no-daemon"];
/// A guest that leaves nearly all of its memory alone once it has filled it.
pub const CALM: [&str; 3] = ["pattern", "--memory=128M", "--cmdline=bytes=32M pages_per_second=1 seconds=600"];

pub fn has_root() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        println!("skipped: only root can have another user, a jail or a cgroup: run the test as root");
    }
    is_root
}

/// Contents of `/proc/PID/task/*/status`, one text per thread, once the guest runs and every thread
/// has entered the sandbox.
fn threads(running: &mut Running) -> Vec<String> {
    // The last step before the wait: the main thread has more restrictions than the process.
    running.wait_for("status", |status| status.starts_with("Name:\twideleaf\n") && has_entered(status));
    loop {
        let tasks = fs::read_dir(format!("/proc/{}/task", running.0.id())).unwrap();
        let texts = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
        let texts: Vec<_> = texts.collect();
        // A new thread has only inherited restrictions until it has started.
        if texts.iter().all(|status| has_entered(status)) {
            return texts;
        }
        assert_eq!(running.0.try_wait().unwrap(), None, "it ended before that");
        std::thread::yield_now();
    }
}

/// Three filters: without clone3, the process's filter, the thread's own.
fn has_entered(status: &str) -> bool {
    field(status, "Seccomp_filters") == "3"
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim()
}

fn report(stdout: &[u8]) -> Value {
    serde_json::from_slice(stdout).unwrap()
}

#[test]
fn every_thread_of_a_guest_s_process_is_restricted_and_has_no_capability() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let mut running = Running::start(&scratch, &LONG);
    let threads = threads(&mut running);
    assert!(threads.len() >= 4, "main, two vCPUs, the manager: {threads:?}");
    are_restricted(&threads);
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(130));
}

fn are_restricted(threads: &[String]) {
    for status in threads {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(status, set).trim_matches('0'), "", "{status}");
        }
        assert_eq!(["NoNewPrivs", "Seccomp"].map(|name| field(status, name)), ["1", "2"], "{status}");
    }
}

#[test]
fn threads_that_read_a_restored_guest_s_memory_are_restricted_and_read_it_from_a_jail_too() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    saved(&scratch, &CALM);
    // Its memory comes within minutes, except for what it touches.
    let mut arguments = vec!["run", "--restore=saved", "--restore-rate=64K", "--no-daemon"];
    arguments.extend(["--control-socket=vm.sock", "--format=json", "--output=result.json"]);
    if has_root() {
        fs::create_dir(scratch.path("jail")).unwrap();
        arguments.push("--jail=jail");
    }
    let began = Instant::now();
    let mut running = Running::start(&scratch, &arguments);
    let threads = threads(&mut running);
    are_restricted(&threads);
    for name in ["restore-", "save", "teardown"] {
        let has_name = threads.iter().any(|status| field(status, "Name").starts_with(name));
        assert!(has_name, "no thread {name}: {threads:?}");
    }
    // Of two windows, the guest has touched at least one.
    let has_two_windows = || {
        let output = scratch.wideleaf(&["vm", "vm.sock", "statistics", "--format=json"]).output().unwrap();
        let statistics: Value = serde_json::from_slice(&output.stdout).unwrap();
        let bytes = |name: &str| statistics["vm"]["backing"][name].as_u64().unwrap();
        bytes("base_4k") + bytes("huge_2m") > 2 << 20
    };
    while !has_two_windows() {
        std::thread::sleep(AMONG_QUESTIONS);
    }
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(running.end(), (Some(0), String::new()));
    let restored = &report(&fs::read(scratch.path("result.json")).unwrap())["restored"];
    assert!(restored["windows_by_touch"].as_u64() >= Some(1), "{restored}");
    let [filled, stored, touched] =
        ["filled_bytes", "stored_bytes", "windows_by_touch"].map(|name| restored[name].as_u64().unwrap());
    // A window is begun at once, and the next one when the rate allows.
    let at_its_rate = (began.elapsed().as_secs_f64() * f64::from(64 << 10)) as u64 + (2 << 20);
    assert!(filled < stored && filled <= (touched << 21) + at_its_rate, "{at_its_rate} at its rate: {restored}");
}

#[test]
fn a_report_names_the_restrictions_of_its_run() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let output = scratch.wideleaf(&[&SHORT[..], &["--format=json"]].concat()).output().unwrap();
    let sandbox = &report(&output.stdout)["setup"]["sandbox"];
    assert!(sandbox["layers"].as_array().unwrap().contains(&"no capabilities".into()), "{sandbox}");
    assert_eq!(sandbox["capabilities_kept"], Value::Array(Vec::new()), "{sandbox}");
    // A kernel that lacks a part of the sandbox refuses a run that requires all of it.
    let is_complete = sandbox["missing"].as_array().unwrap().is_empty();
    let required = scratch.wideleaf(&[&SHORT[..], &["--require-sandbox"]].concat()).output().unwrap();
    assert_eq!(required.status.code(), Some(if is_complete { 0 } else { 4 }), "{required:?}");
    let output = scratch.wideleaf(&[&SHORT[..], &["--format=json", "--no-sandbox"]].concat()).output().unwrap();
    assert_eq!(report(&output.stdout)["setup"]["sandbox"], Value::Null);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("wideleaf: --no-sandbox: ") && said.lines().count() == 1, "{said}");
}

#[test]
fn a_run_as_another_user_in_a_jail_sees_only_its_own_files_and_leaves_nothing() {
    if !has_kvm() || !has_root() {
        return;
    }
    let scratch = new_scratch();
    fs::create_dir(scratch.path("jail")).unwrap();
    let mut running = Running::start(&scratch, &[&LONG[..], &["--user=64999:64998", "--jail=jail"]].concat());
    let threads = threads(&mut running);
    for status in &threads {
        assert_eq!(field(status, "Uid"), "64999\t64999\t64999\t64999", "{status}");
        assert_eq!(field(status, "Gid"), "64998\t64998\t64998\t64998", "{status}");
        assert_eq!(field(status, "Groups"), "64998", "{status}");
    }
    let of = |file: &str| format!("/proc/{}/{file}", running.0.id());
    let mut names: Vec<_> = fs::read_dir(of("root")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["proc", "sys"], "no other file of the host is there");
    let interfaces = fs::read_to_string(of("net/dev")).unwrap();
    assert_eq!(
        interfaces.lines().skip(2).filter(|line| !line.trim_start().starts_with("lo:")).count(),
        0,
        "{interfaces}"
    );
    assert!(fs::read_dir(scratch.path("jail")).unwrap().next().is_none(), "the host's folder stays empty");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end(), (Some(130), "wideleaf: interrupted\n".to_owned()));
}

#[test]
fn a_result_comes_out_of_a_jail() {
    if !has_kvm() || !has_root() {
        return;
    }
    let scratch = new_scratch();
    fs::create_dir(scratch.path("jail")).unwrap();
    let wanted = ["--jail=jail", "--format=json", "--output=result", "--record=record", "--policy=greedy"];
    let output = scratch.wideleaf(&[&SHORT[..], &wanted].concat()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = report(&fs::read(scratch.path("result")).unwrap());
    assert_eq!(report["verification"]["passed"], Value::Bool(true));
    assert_eq!(report["manager"]["sensor_failures"], Value::Object(serde_json::Map::new()), "its files are there");
    assert!(!report["environment"]["cpu"].as_str().unwrap().is_empty());
    assert!(fs::metadata(scratch.path("record")).unwrap().len() > 0);
}

#[test]
fn an_unwritable_result_is_reported_before_the_guest_starts_its_work() {
    if !has_kvm() || !has_root() {
        return;
    }
    let scratch = new_scratch();
    let arguments = [&LONG[..], &["--user=64999:64999", "--output=result"]].concat();
    scratch.refuses(&arguments, 7, &["--output", "user 64999:64999 cannot write in", "permission denied"]);
}

#[test]
fn an_impossible_sandbox_is_refused_in_one_line() {
    if !has_kvm() || !has_root() {
        return;
    }
    let scratch = new_scratch();
    fs::create_dir(scratch.path("full")).unwrap();
    scratch.file("full/file", b"");
    let refused = |with: &str, code, words: &[&str]| scratch.refuses(&[&LONG[..], &[with]].concat(), code, words);
    refused("--user=no-such-user", 2, &["--user", "there is no user \"no-such-user\""]);
    refused("--user=64999", 2, &["--user", "has no account", "UID:GID"]);
    refused("--jail=full", 2, &["--jail", "is not empty"]);
    refused("--jail=absent", 2, &["--jail", "is not a folder"]);
}

/// Folder of a cgroup with this name, if the host has cgroups.
fn cgroup(name: &str) -> Option<std::path::PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts
        .lines()
        .find_map(|line| line.split(' ').nth(2).filter(|kind| *kind == "cgroup2").and(line.split(' ').nth(1)));
    if root.is_none() {
        println!("skipped: no cgroup2 is mounted here");
    }
    Some(std::path::Path::new(root?).join(name))
}

#[test]
fn a_runs_own_cgroup_is_removed_after_the_run_also_after_sigkill() {
    let Some(folder) = cgroup(&format!("wideleaf-test-{}", std::process::id())).filter(|_| has_kvm() && has_root())
    else {
        return;
    };
    let scratch = new_scratch();
    let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
    let option = format!("--cgroup={name}");
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut running = Running::start(&scratch, &[&LONG[..], &[option.as_str()]].concat());
        running.wait_for("cgroup", |cgroups| cgroups.contains(&format!("0::/{name}\n")));
        running.signal(signal);
        let mut child = running;
        let status = child.0.wait().unwrap();
        assert!(status.code() == Some(130) || status.signal() == Some(Signal::SIGKILL as i32), "{status}");
        // The process that removes the cgroup outlives a killed run for a moment.
        while folder.exists() {
            std::thread::yield_now();
        }
    }
    scratch.refuses(
        &[&LONG[..], &["--cgroup=no-such/wideleaf"]].concat(),
        4,
        &["--cgroup no-such/wideleaf", "cannot make it"],
    );
    scratch.refuses(&[&LONG[..], &["--cgroup=/tmp"]].concat(), 4, &["--cgroup /tmp", "cgroups (v2) are in"]);
}

#[test]
fn an_existing_cgroup_is_kept() {
    let Some(folder) = cgroup(&format!("wideleaf-stays-{}", std::process::id())).filter(|_| has_kvm() && has_root())
    else {
        return;
    };
    fs::create_dir(&folder).unwrap();
    let scratch = new_scratch();
    let option = format!("--cgroup={}", folder.display());
    let output = scratch.wideleaf(&[&SHORT[..], &[option.as_str()]].concat()).output().unwrap();
    let left = fs::read_to_string(folder.join("cgroup.procs")).unwrap();
    fs::remove_dir(&folder).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(left, "", "no process is left in it");
}
