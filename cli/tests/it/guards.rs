//! The order in which a run takes its guards, begins its sandbox, and gives the guards back, from the log that
//! `WIDELEAF_LOG=wideleaf_run::guards=trace` writes. A guest's parts need KVM.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use nix::unistd::geteuid;
use wideleaf_testing::has_kvm;

use crate::program::new_scratch;

/// Lines of the log of a run that ends with this exit code.
fn guards(arguments: &[&str], code: i32) -> Vec<String> {
    const TARGET: &str = "wideleaf_run::guards: ";
    let scratch = new_scratch();
    let mut run = scratch.wideleaf(&[&["run"], arguments].concat());
    let output = run.env("WIDELEAF_LOG", "wideleaf_run::guards=trace").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_eq!(scratch.names(), [""; 0], "nothing is left behind");
    text.lines().filter_map(|line| line.split_once(TARGET)).map(|(_, line)| line.to_owned()).collect()
}

#[test]
fn a_native_run_stops_its_manager_before_it_releases_its_ram() {
    let order = guards(&["gups", "--native", "--memory=64M", "--cmdline=log2_words=20", "--policy=never"], 0);
    let expected = [
        "= standard error served",
        "+ claim",
        "+ RAM",
        "+ manager",
        "- manager",
        "= standard error settled",
        "- RAM",
        "- claim",
    ];
    assert_eq!(order, expected);
}

#[test]
fn a_guest_s_sandbox_is_planned_before_its_ram_and_entered_by_the_main_thread_last() {
    if !has_kvm() {
        return;
    }
    let guest = ["pattern", "--cmdline=bytes=16M passes=2", "--memory=64M", "--daemon=no.sock"];
    let files = ["--vsock=cid=3,socket=vsock", "--control-socket=vm.sock", "--console", "--record=/dev/null"];
    let expected = [
        "+ path",
        "= sandbox planned",
        "+ claim",
        "+ path",
        "+ control socket",
        "+ RAM",
        "+ console",
        "+ guest",
        "= standard error served",
        "+ manager",
        "= control socket served",
        "+ registration",
        "= main thread restricted",
        "- guest",
        "- console",
        "- registration",
        "- manager",
        "= standard error settled",
        "- RAM",
        "- path",
        "- control socket",
        "- claim",
        "- path",
    ];
    assert_eq!(guards(&[&guest[..], &files[..]].concat(), 0), expected);
}

#[test]
fn a_guest_with_a_result_that_could_not_be_written_ends_before_its_console_and_its_sockets() {
    if !has_kvm() {
        return;
    }
    if !geteuid().is_root() {
        println!("skipped: only root can run a guest as another user: run the test as root");
        return;
    }
    let guest = ["pattern", "--cmdline=bytes=16M passes=2", "--memory=64M", "--no-daemon", "--user=nobody"];
    // Its folder belongs to root.
    let files = ["--vsock=cid=3,socket=vsock", "--control-socket=vm.sock", "--console", "--output=result.json"];
    let expected = [
        "+ path",
        "= sandbox planned",
        "+ claim",
        "+ path",
        "+ control socket",
        "+ RAM",
        "+ console",
        "+ guest",
        "= standard error served",
        "- guest",
        "- console",
        "- RAM",
        "- path",
        "- control socket",
        "- claim",
        "- path",
    ];
    assert_eq!(guards(&[&guest[..], &files[..]].concat(), 7), expected);
}
