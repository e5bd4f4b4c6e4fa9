//! The gate of a domain by the status file that a real libvirtd writes.

use std::fs;
use std::path::Path;

use wideleaf_attach::gate::GuestGate;
use wideleaf_attach::{Places, find};
use wideleaf_memory::gate::Gate as _;
use wideleaf_testing::has_kvm;
use wideleaf_testing::libvirt::{Domain, IMAGES, Libvirt};

const NAME: &str = "with-balloon";

#[test]
fn a_domain_with_libvirts_own_balloon_keeps_no_holes_and_its_stops_are_events() {
    if !has_kvm() {
        return;
    }
    let Some(libvirt) = Libvirt::start(Path::new(env!("CARGO_TARGET_TMPDIR"))) else { return };
    libvirt.define(&Domain { name: NAME, ..Domain::PATTERN });
    // What libvirt adds to a domain that does not mention a balloon.
    let file = format!("{IMAGES}/{NAME}.xml");
    let change = format!("sed -i \"s/memballoon model='none'/memballoon model='virtio'/\" {file}");
    assert!(libvirt.run(&["sh", "-c", &change]).status.success());
    for command in [["undefine", NAME], ["define", file.as_str()], ["start", NAME]] {
        libvirt.virsh(&command).unwrap();
    }

    // libvirt's files, with the process id that the guest has outside of libvirt's namespace.
    let outside = tempfile::tempdir().unwrap();
    let copy = || {
        let status = libvirt.run(&["cat", &format!("/run/libvirt/qemu/{NAME}.xml")]);
        fs::write(outside.path().join(format!("{NAME}.xml")), status.stdout).unwrap();
    };
    copy();
    let guests = find::all(&Places::default()).unwrap().guests;
    let pid = guests.iter().find(|guest| guest.name == NAME).unwrap().pid;
    fs::write(outside.path().join(format!("{NAME}.pid")), pid.to_string()).unwrap();
    let places = Places { libvirt: outside.path().to_owned(), ..Places::default() };
    let process = find::with_pid(&places, pid).unwrap();
    assert_eq!(process.domain.as_deref(), Some(NAME));
    assert!(process.command_line.returns.balloon);
    let gate = GuestGate::new(process, None);
    assert_eq!(gate.keeps_holes(), None, "the balloon is empty");

    for (command, is_in_event) in [("suspend", true), ("resume", false)] {
        libvirt.virsh(&[command, NAME]).unwrap();
        copy();
        gate.refresh();
        assert_eq!(gate.is_in_event(), is_in_event, "{command}");
    }
    libvirt.virsh(&["destroy", NAME]).unwrap();
}
