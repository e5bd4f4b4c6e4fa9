//! Common part of the tests under a real libvirtd: our hook in it, a real wideleafd beside it.
#![allow(clippy::unwrap_used, dead_code, reason = "a test may panic, and does not need all of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use wideleaf_control::client::{self, ClientError};
use wideleaf_control::protocol::{Answer, Request};
use wideleaf_control::view::{Care, VmView};
use wideleaf_testing::libvirt::Libvirt;
use wideleaf_testing::programs::built;

pub fn program() -> &'static str {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false));
    program.to_str().unwrap()
}

/// A libvirtd that runs our hook; `None` if the test is to be skipped.
pub fn libvirt_with_hook() -> Option<Libvirt> {
    let libvirt = Libvirt::start(Path::new(env!("CARGO_TARGET_TMPDIR")))?;
    // A folder that only root can write: a hook is not installed for a program that other users can replace.
    let (bin, inside) = (libvirt.run_folder().join("bin"), "/run/wideleaf/bin/wideleaf");
    std::fs::create_dir(&bin).unwrap();
    // Written by another process: a file that this process has open for writing may be inherited by another test's
    // child (ETXTBSY).
    assert!(Command::new("cp").arg(program()).arg(bin.join("wideleaf")).status().unwrap().success());
    let hook = |command: &str| {
        let output = libvirt.run(&[inside, "hook", command]);
        (output.status.code(), [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()))
    };
    let (code, [_, why]) = hook("install");
    assert_eq!(code, Some(0), "{why}");
    let (code, [status, _]) = hook("status");
    assert!(
        code == Some(12) && status.contains("restart libvirtd once"),
        "libvirtd looked before the hook was installed"
    );
    libvirt.restart_libvirtd();
    let (code, [status, _]) = hook("status");
    assert!(code == Some(0) && status.contains("libvirtd  runs it"), "{status}");
    Some(libvirt)
}

pub fn is_running(libvirt: &Libvirt, domain: &str) -> bool {
    libvirt.virsh(&["domstate", domain]).is_ok_and(|state| state == "running")
}

pub fn passes(libvirt: &Libvirt, domain: &str) -> usize {
    libvirt.console(domain).matches(" phase=pass ").count()
}

/// Starts a real wideleafd inside; it ends with the libvirt.
pub fn start_wideleafd(libvirt: &Libvirt) {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| built(&["build", "-p", "wideleaf-daemon", "--bin", "wideleafd"], false));
    let config = "[metrics]\nlisten = \"off\"\n[state]\npath = \"/run/wideleaf/state.json\"\n";
    std::fs::write(libvirt.run_folder().join("wideleafd.toml"), config).unwrap();
    let start = "setsid \"$0\" --config /run/wideleaf/wideleafd.toml >/run/wideleaf/log 2>&1 &";
    assert!(libvirt.run(&["sh", "-c", start, program.to_str().unwrap()]).status.success());
    libvirt.wait_until("wideleafd answers", || ask(libvirt, Request::List).is_ok());
}

pub fn ask(libvirt: &Libvirt, request: Request) -> Result<Answer, ClientError> {
    client::ask(&libvirt.run_folder().join("control.sock"), request)
}

/// All VMs that the daemon knows.
pub fn vms(libvirt: &Libvirt) -> Vec<VmView> {
    match ask(libvirt, Request::List).unwrap() {
        Answer::Vms(vms) => vms,
        other => panic!("{other:?} is not a list"),
    }
}

/// The daemon's care for the domain's pages; `None` if it does not know the domain.
pub fn care(libvirt: &Libvirt, domain: &str) -> Option<Care> {
    vms(libvirt).into_iter().find(|vm| vm.name == domain).map(|vm| vm.care)
}
