//! Proxmox' hookscript, called as Proxmox calls it: with a VMID and a phase.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::place::Place;
use crate::wideleafd::has_qemu;
use wideleaf_policies::units::mib;
use wideleaf_testing::programs::built;
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};
use wideleaf_testing::{Need, has_kvm, is_there};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/proxmox/wideleaf-hookscript");

/// A host of Proxmox: process id files, and a program in the place of `wideleaf`.
struct Host {
    folder: tempfile::TempDir,
    program: PathBuf,
    socket: PathBuf,
}

impl Host {
    /// With a program that notes its arguments, prints a line and ends with this code.
    fn with_noting_program(code: u8) -> Host {
        let folder = tempfile::tempdir().unwrap();
        let (program, notes) = (folder.path().join("wideleaf"), folder.path().join("notes"));
        let text = format!("#!/bin/sh\necho \"$*\" >>{}\necho 'a line'\nexit {code}\n", notes.display());
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Host { folder, program, socket: "/run/x.sock".into() }
    }

    fn note_process(&self, vmid: &str, text: &str) {
        fs::write(self.folder.path().join(format!("{vmid}.pid")), text).unwrap();
    }

    /// The task log of a call, which never fails.
    fn call(&self, arguments: &[&str]) -> String {
        let mut script = Command::new(Path::new(SCRIPT));
        script.args(arguments).env("WIDELEAF", &self.program).env("WIDELEAF_SOCKET", &self.socket);
        let output = script.env("WIDELEAF_QEMU_PIDS", self.folder.path()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Calls of the program, a line each.
    fn notes(&self) -> String {
        fs::read_to_string(self.folder.path().join("notes")).unwrap_or_default()
    }
}

#[test]
fn a_vm_that_has_started_is_attached_by_its_process_id() {
    let host = Host::with_noting_program(0);
    host.note_process("100", "4711\n");
    for phase in ["pre-start", "post-start", "pre-stop", "post-stop"] {
        let said = host.call(&["100", phase]);
        let expected = if phase == "post-start" { "wideleaf: VM 100 (pid 4711) is managed\n" } else { "" };
        assert_eq!(said, expected, "{phase}");
    }
    assert_eq!(host.notes(), "list --socket /run/x.sock\nattach 4711 --socket /run/x.sock\n");
}

#[test]
fn no_mistake_keeps_a_vm_from_starting() {
    let host = Host::with_noting_program(4);
    host.note_process("100", "4711\n");
    host.note_process("101", "no number\n");
    host.note_process("102", "");
    for (arguments, said) in [
        (&["100", "pre-start"][..], "VM 100 starts without large pages: a line"),
        (&["100", "post-start"], "cannot manage VM 100 (pid 4711): a line"),
        (&["101", "post-start"], "101.pid has no process id"),
        (&["102", "post-start"], "102.pid has no process id"),
        (&["103", "post-start"], "103.pid has no process id"),
        (&["100", "another"], "does not know"),
        (&["../100", "post-start"], "cannot use the VMID '../100'"),
        (&["100"], "nothing to do in the phase ''"),
        (&[], "cannot use the VMID ''"),
    ] {
        let text = host.call(arguments);
        assert!(text.starts_with("wideleaf: ") && text.contains(said) && text.lines().count() == 1, "{text}");
    }
    assert_eq!(host.notes().lines().count(), 2, "only where there is a process");
}

#[test]
fn a_guest_of_qemu_is_managed_after_post_start_and_not_where_no_daemon_answers() {
    if !has_kvm() || !is_there(Need::Qemu, has_qemu()) {
        return;
    }
    let setup = QemuSetup::new("proxmox", mib(64), QemuRam::Anonymous, "pattern bytes=16M seconds=3600");
    let mut guest = QemuGuest::start(&setup).unwrap();
    let place = Place::new();
    let program = built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false);
    let host = Host { folder: tempfile::tempdir().unwrap(), program, socket: place.socket() };
    host.note_process("100", &format!("{}\n", guest.pid()));
    for (phase, said) in [("pre-start", "starts without large pages"), ("post-start", "cannot manage VM 100")] {
        let text = host.call(&["100", phase]);
        assert!(text.contains(said) && text.contains("wideleafd"), "{text}");
    }
    let daemon = place.start();
    assert_eq!(host.call(&["100", "pre-start"]), "");
    assert_eq!(host.call(&["100", "post-start"]), format!("wideleaf: VM 100 (pid {}) is managed\n", guest.pid()));
    let managed: Vec<u32> = daemon.managed().iter().map(|vm| vm.pid).collect();
    assert_eq!(managed, [guest.pid()]);
    assert!(guest.is_alive());
    guest.kill();
}
