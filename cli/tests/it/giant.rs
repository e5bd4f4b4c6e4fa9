//! Giant pages through the command line: a running guest of 1 GiB moves onto one page of the hugetlb pool, and the
//! report says so. The pool gets its page back, however the run ends. Needs KVM and a page of 1 GiB, or root and the
//! memory to make one.

use crate::migration::{AMONG_QUESTIONS, ask_to_end};
use crate::program::new_scratch;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::thread::sleep;
use wideleaf_policies::PageSize;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::{GiantPage, GiantPool, has_kvm};
use wideleaf_vmm::kvm::KvmSystem;
use wideleaf_vmm::x86::cpuid::has_page_size;

const GIANT_BYTES: u64 = 1 << 30;
/// Name of the thread that moves a giant page; proc_pid_comm(5).
const MOVER: &str = "giant-mover";

fn giant_page() -> Option<GiantPage> {
    if has_kvm() { GiantPage::of_this_machine() } else { None }
}

/// Runs GUPS under the policy for giant pages until this is true of the statistics of the VM, and returns the report.
fn run_until(more: &[&str], is_over: impl Fn(&Value) -> bool) -> Value {
    let scratch = new_scratch();
    let output = ["--timeout=5m", "--control-socket=vm.sock", "--output=report.json", "--format=json"];
    let mut run = endless(&scratch, &[&output[..], more].concat());
    while run.0.try_wait().unwrap().is_none() {
        let statistics = scratch.wideleaf(&["vm", "vm.sock", "statistics", "--format=json"]).output().unwrap();
        if statistics.status.success() && is_over(&serde_json::from_slice(&statistics.stdout).unwrap()) {
            ask_to_end(&scratch, "vm.sock");
            break;
        }
        sleep(AMONG_QUESTIONS);
    }
    assert_eq!(run.end(), (Some(0), String::new()));
    serde_json::from_slice(&std::fs::read(scratch.path("report.json")).unwrap()).unwrap()
}

/// Whether all of the RAM is on a page of 1 GiB.
fn is_on_one_page(statistics: &Value) -> bool {
    statistics["vm"]["backing"]["giant_1g"] == GIANT_BYTES
}

/// Runs a guest with its own pages of this size onto a giant page, and returns its report.
fn ends_on_one_page(guest_page: &str) -> Value {
    let report = run_until(&["--guest-page", guest_page], is_on_one_page);
    let manager = &report["manager"];
    println!("{} {}", manager["outcomes"], manager["kvm_check"]);
    assert_eq!(report["verification"]["passed"], true);
    assert_eq!(manager["outcomes"]["giant_promote.done"], 1, "{manager}");
    assert_eq!(manager["kvm_check"]["contradictions"], 0, "{manager}");
    assert_eq!(manager["samples"].as_array().unwrap().last().unwrap()["host_1g_bytes"], GIANT_BYTES, "{manager}");
    report
}

#[test]
fn a_guest_of_one_gib_ends_on_one_page_and_loses_no_word() {
    let Some(page) = giant_page() else { return };
    ends_on_one_page("2m");
    page.assert_given_back();
}

/// Only with a guest page of 1 GiB can KVM show one leaf for all of it.
#[test]
fn a_guest_with_a_1_gib_page_is_mapped_with_one_leaf() {
    let Some(page) = giant_page() else { return };
    let cpuid = KvmSystem::open().and_then(|kvm| kvm.supported_cpuid()).unwrap();
    if !has_page_size(&cpuid, PageSize::Giant1G) {
        println!("skipped: guests have no pages of 1 GiB on this host");
        return;
    }
    let report = ends_on_one_page("1g");
    let is_giant = |sample: &Value| sample["kvm"]["pages_1g"].as_u64() >= Some(1);
    assert!(report["manager"]["samples"].as_array().unwrap().iter().any(is_giant), "{report}");
    page.assert_given_back();
}

/// Needs KVM alone. If another program leaves a page of 1 GiB free, the test checks nothing.
#[test]
fn a_run_for_giant_pages_without_a_page_gives_the_reason_first() {
    if !has_kvm() {
        return;
    }
    let arguments = ["run", "gups", "--memory=1G", "--cmdline=log2_words=16", "--policy=giant", "--format=json"];
    let output = new_scratch().wideleaf(&[&arguments[..], &["--timeout=5m"]].concat()).assert().success();
    let report: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    if report["manager"]["unanswered"].as_array().unwrap().is_empty() {
        println!("skipped: the pool has a page of 1 GiB");
        return;
    }
    let headline = report["headline"].as_str().unwrap();
    assert!(headline.starts_with("success: nothing is on 1 GiB pages: hugetlb pool of 1g pages is "), "{headline}");
}

fn endless(scratch: &Scratch, more: &[&str]) -> Running {
    let arguments = ["run", "gups", "--memory=1G", "--cmdline=log2_words=24 seconds=600", "--policy=giant"];
    Running::start(scratch, &[&arguments[..], more].concat())
}

#[test]
fn an_interrupt_while_a_giant_page_is_moved_restores_the_pool() {
    let Some(page) = giant_page() else { return };
    let scratch = new_scratch();
    let mut running = endless(&scratch, &[]);
    running.wait_for("comm", |name| name.trim() == MOVER);
    running.signal(Signal::SIGINT);
    let (code, stderr) = running.end();
    assert_eq!(code, Some(130), "{stderr}");
    page.assert_given_back();
}

#[test]
fn a_timeout_with_a_guest_on_a_giant_page_restores_the_pool() {
    let Some(page) = giant_page() else { return };
    let scratch = new_scratch();
    let (code, stderr) = endless(&scratch, &["--timeout=4s"]).end();
    assert!(code.is_some_and(|code| code != 0) && stderr.contains("4s"), "{code:?}: {stderr}");
    page.assert_given_back();
}

/// A pool without a page, from which a run may have pages made.
fn empty_pool() -> Option<GiantPool> {
    if has_kvm() { GiantPool::without_a_page() } else { None }
}

fn report_of(arguments: &[&str]) -> Value {
    let output = new_scratch().wideleaf(&[arguments, &["--timeout=5m", "--format=json"]].concat()).assert().success();
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// Whether the kernel had no room for a page after all, by these counts of a report. Other tests run beside, and may
/// have taken what there was when it was tried.
fn had_no_room(counts: &Value, names: &[impl AsRef<str>]) -> bool {
    let had_none = names.iter().any(|name| counts[name.as_ref()].as_u64() > Some(0));
    if had_none {
        println!("skipped: the kernel no longer had room for a page of 1 GiB: {counts}");
    }
    had_none
}

#[test]
fn a_page_is_made_for_a_running_guest_and_the_pool_is_as_before() {
    let Some(pool) = empty_pool() else { return };
    const NOT_MADE: [&str; 2] = ["no_room", "not_mapped"];
    let is_over = |statistics: &Value| {
        let not_made = &statistics["vm"]["work"]["outcomes"]["giant_page_not_made"];
        is_on_one_page(statistics) || NOT_MADE.iter().any(|why| not_made[why].as_u64() > Some(0))
    };
    let report = run_until(&["--make-giant-pages=1"], is_over);
    let manager = &report["manager"];
    println!("{}", manager["outcomes"]);
    assert_eq!(report["verification"]["passed"], true);
    if had_no_room(&manager["outcomes"], &NOT_MADE.map(|why| format!("giant_page_not_made.{why}"))) {
        return pool.assert_given_back();
    }
    assert_eq!(manager["outcomes"]["giant_page.made"], 1, "{manager}");
    assert_eq!(manager["outcomes"]["giant_promote.done"], 1, "{manager}");
    assert_eq!(manager["samples"].as_array().unwrap().last().unwrap()["host_1g_bytes"], GIANT_BYTES, "{manager}");
    assert_eq!(manager["unanswered"].as_array().map(Vec::len), Some(0), "{manager}");
    pool.assert_given_back();
}

/// The RAM of a run at the first touch, from its report.
fn at_first_touch(report: &Value) -> &Value {
    let regions = report["manager"]["first_touch_regions"].as_array().unwrap();
    assert_eq!(regions.len(), 1, "{regions:?}");
    &regions[0]
}

#[test]
fn at_fault_starts_a_guest_on_a_page_that_is_made_for_it() {
    let Some(pool) = empty_pool() else { return };
    let arguments = ["run", "gups", "--memory=1G", "--cmdline=log2_words=20", "--policy=at-fault:giant=1"];
    let report = report_of(&[&arguments[..], &["--make-giant-pages=1"]].concat());
    let region = at_first_touch(&report);
    assert_eq!(report["verification"]["passed"], true);
    if had_no_room(&region["refused"], &["giant_not_made"]) {
        return pool.assert_given_back();
    }
    assert_eq!((&region["pages_1g_at_first"], &region["now"]["pages_1g"]), (&1.into(), &1.into()), "{region}");
    assert_eq!(report["ram_at_end"]["host_1g_bytes"], GIANT_BYTES, "{}", report["ram_at_end"]);
    assert_eq!(report["manager"]["unanswered"].as_array().map(Vec::len), Some(0), "{}", report["manager"]);
    pool.assert_given_back();
}

#[test]
fn at_fault_gives_a_kernel_of_this_process_a_giant_at_its_first_touch() {
    let Some(page) = giant_page() else { return };
    let arguments = ["run", "gups", "--native", "--memory=1G", "--cmdline=log2_words=20", "--policy=at-fault:giant=1"];
    let report = report_of(&arguments);
    let (region, outcomes) = (at_first_touch(&report), &report["manager"]["outcomes"]);
    assert_eq!(report["verification"]["passed"], true);
    if outcomes["first_touch.giant_too_late"] == 1 {
        println!("skipped: this host needs more than 10 s to clear a page of 1 GiB");
        return;
    }
    assert_eq!((&outcomes["first_touch.asked"], &outcomes["first_touch.answered_1g"]), (&1.into(), &1.into()));
    assert_eq!((&region["pages_1g_at_first"], &region["now"]["pages_1g"]), (&1.into(), &1.into()), "{region}");
    assert_eq!(region["faults"], 1, "one fault for a gibibyte");
    page.assert_given_back();
}

#[test]
fn at_fault_without_a_giant_page_uses_huge_ones_and_gives_the_reason() {
    let Some(_pool) = empty_pool() else { return };
    let arguments = ["run", "gups", "--memory=1G", "--cmdline=log2_words=20", "--policy=at-fault:giant=1"];
    let report = report_of(&arguments);
    let headline = report["headline"].as_str().unwrap();
    assert!(
        headline.starts_with("success: nothing is on 1 GiB pages: hugetlb pool of 1g pages is 1 short"),
        "{headline}"
    );
    let region = at_first_touch(&report);
    assert_eq!(region["refused"]["giant_touched"], 1, "by the loader, before the service began: {region}");
    assert!(region["pages_2m_at_first"].as_u64() >= Some(4), "8 MiB of table: {region}");
}

#[test]
fn ram_of_the_pool_gets_its_pages_made_and_gives_them_back() {
    let Some(pool) = empty_pool() else { return };
    let arguments = ["run", "gups", "--memory=1G", "--cmdline=log2_words=20", "--backing=hugetlb", "--host-page=1g"];
    let making = [&arguments[..], &["--make-giant-pages=1", "--timeout=5m", "--format=json"]].concat();
    let output = new_scratch().wideleaf(&making).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    if said.contains("cannot make 1 pages of 1g") {
        println!("skipped: the kernel no longer had room for a page of 1 GiB: {said}");
        return pool.assert_given_back();
    }
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["verification"]["passed"], true);
    assert_eq!(report["setup"]["host_page"], "1g");
    pool.assert_given_back();
    // Fewer than it needs: the run is refused as without the option.
    let words = ["hugetlb pool of 1g pages is 1 short", "wideleaf pool reserve --size 1g --pages 1"];
    new_scratch().refuses(&arguments, 4, &words);
}

#[test]
fn a_killed_run_leaves_no_page_that_was_made_for_it() {
    let Some(pool) = empty_pool() else { return };
    let scratch = new_scratch();
    let mut running = endless(&scratch, &["--make-giant-pages=1"]);
    running.wait_for("comm", |name| name.trim() == MOVER);
    running.signal(Signal::SIGKILL);
    running.end();
    pool.assert_given_back();
}

/// Whatever the moment: the next change of the pool undoes what is left.
#[test]
fn a_run_killed_together_with_its_child_leaves_a_note_at_most() {
    let Some(pool) = empty_pool() else { return };
    for wait_ms in [0, 50, 150] {
        let scratch = new_scratch();
        let mut running = endless(&scratch, &["--make-giant-pages=1"]);
        running.wait_for("comm", |name| name.trim() == "giant-maker");
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", running.0.id())).unwrap();
        for child in children.split_whitespace() {
            let pid = nix::unistd::Pid::from_raw(child.parse().unwrap());
            let _may_have_ended = nix::sys::signal::kill(pid, Signal::SIGKILL);
        }
        running.signal(Signal::SIGKILL);
        running.end();
        scratch.wideleaf(&["pool", "release", "--size=1g", "--pages=0"]).assert().success();
        pool.assert_given_back();
    }
}

#[test]
fn pages_are_made_only_for_a_run_that_uses_them() {
    let words = [
        "cannot make pages of 1 GiB for a run that uses none",
        "use --policy giant, auto:giant=1 or at-fault:giant=1, or --backing",
    ];
    let scratch = new_scratch();
    for more in [&["--policy=auto"][..], &["--backing=hugetlb"], &["--backing=memfd", "--policy=giant"]] {
        scratch.refuses(&[&["run", "gups", "--make-giant-pages=1"][..], more].concat(), 2, &words);
    }
}
