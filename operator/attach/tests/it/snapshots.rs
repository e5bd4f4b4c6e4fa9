//! A real QEMU guest under a manager that is saved into its disk's file (`savevm`) and taken back to that moment. It
//! needs QEMU and KVM.

use std::path::Path;

use serde_json::{Value, json};
use wideleaf_attach::session::{Attached, Settings};
use wideleaf_control::view::Care;
use wideleaf_policies::PolicyChoice;
use wideleaf_policies::units::mib;

use crate::qemu::{can_run, eventually};
use crate::sessions::{IN_USE, assert_no_byte_was_lost, at_work, split_all};
use crate::userfaultfd::ask;

/// Runs a job of QEMU's to its end.
fn run(monitor: &Path, command: &str, mut arguments: Value) {
    arguments["job-id"] = json!("job");
    ask(monitor, command, arguments);
    let job = || {
        let jobs = ask(monitor, "query-jobs", json!({}));
        jobs.as_array().unwrap().iter().find(|job| job["id"] == "job").unwrap().clone()
    };
    eventually(command, || job()["status"] == "concluded");
    assert!(job()["error"].is_null(), "{command}: {}", job());
    ask(monitor, "job-dismiss", json!({ "id": "job" }));
}

/// Adds a disk that can hold snapshots, which the guest does not see.
fn add_disk(monitor: &Path, file: &Path) {
    let of_file = json!({ "driver": "file", "filename": file, "size": 0 });
    run(monitor, "blockdev-create", json!({ "options": of_file }));
    ask(monitor, "blockdev-add", json!({ "driver": "file", "node-name": "file", "filename": file }));
    let of_disk = json!({ "driver": "qcow2", "file": "file", "size": mib(1).get() });
    run(monitor, "blockdev-create", json!({ "options": of_disk }));
    ask(monitor, "blockdev-add", json!({ "driver": "qcow2", "node-name": "disk", "file": "file" }));
}

#[test]
fn a_guest_that_is_saved_and_taken_back_loses_no_byte_and_gets_its_large_pages_back() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let second = folder.path().join("second");
    let socket = format!("unix:{},server=on,wait=off", second.display());
    let guest = at_work(&["-M", "microvm", "-m", "128M", "-qmp", &socket]);
    add_disk(&second, &folder.path().join("disk.qcow2"));
    let policy = Some(PolicyChoice::parse("greedy").unwrap());
    let settings = Settings { policy, qmp: Some(guest.qmp()), ..Settings::default() };
    let attached = Attached::start(guest.process(), settings).unwrap();
    let is_large = || attached.view().backing.is_some_and(|of| of.huge_2m >= IN_USE.get() - mib(8).get());
    eventually("huge pages", is_large);

    let snapshot = json!({ "tag": "moment", "vmstate": "disk", "devices": ["disk"] });
    for command in ["snapshot-save", "snapshot-load", "snapshot-load"] {
        // The manager promotes while QEMU reads or writes all of the memory.
        split_all(&guest);
        run(&second, command, snapshot.clone());
        assert_eq!(ask(&second, "query-status", json!({}))["running"], true, "after {command}");
        assert_no_byte_was_lost(&guest);
        eventually("huge pages again", is_large);
    }
    // QEMU answered no question meanwhile.
    eventually("the guest is managed", || attached.view().care == Care::Managed);
}
