//! A real QEMU guest that gives memory to the host through a balloon and takes it back, again and again, while its
//! windows are promoted. It needs QEMU and KVM.
//!
//! ```text
//!   first monitor ── the manager          second monitor ── a gate of the test's, refreshed all the time
//! ```

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use wideleaf_attach::gate::GuestGate;
use wideleaf_attach::monitor::Monitor;
use wideleaf_attach::session::{Attached, Settings};
use wideleaf_memory::gate::{Gate as _, GateState, KeptHoles};
use wideleaf_policies::recovery::Cause;
use wideleaf_policies::{Moment, PolicyChoice};

use crate::qemu::{Guest, can_run, eventually, listens};

/// The driver in our image knows devices of version 1 alone, and a kernel takes no parameter for them.
const MACHINE: [&str; 8] = [
    "-M",
    "microvm,auto-kernel-cmdline=off",
    "-m",
    "256M",
    "-global",
    "virtio-mmio.force-legacy=false",
    "-device",
    "virtio-balloon-device",
];

#[test]
fn a_guest_with_a_balloon_loses_no_byte_and_its_balloon_is_an_event_when_it_deflates() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let second = folder.path().join("second");
    let socket = format!("unix:{},server=on,wait=off", second.display());
    let arguments = [&MACHINE[..], &["-qmp", socket.as_str()]].concat();
    let mut guest = Guest::with_kernel(&arguments, "balloon bytes=128M passes=24");
    eventually("its second monitor", || listens(&second));
    let monitor = Monitor::now_or_later(&guest.process(), &second).unwrap();
    let gate = GuestGate::new(guest.process(), Some(Arc::new(monitor)));
    let policy = Some(PolicyChoice::parse("greedy").unwrap());
    let settings = Settings { policy, qmp: Some(guest.qmp()), ..Settings::default() };
    let attached = Attached::start(guest.process(), settings).unwrap();

    let (mut was_inflated, mut was_empty_again, mut is_event, mut was_large) = (false, false, false, false);
    while guest.is_alive() {
        gate.refresh();
        let (state, holes) = (gate.state(), gate.keeps_holes());
        was_inflated |= state == GateState::Open && holes == Some(KeptHoles::GivenBack);
        was_empty_again |= was_inflated && state == GateState::Open && holes.is_none();
        is_event |= gate.events(Moment::START).latest.is_some_and(|(cause, _)| cause == Cause::Balloon);
        was_large |= attached.view().backing.is_some_and(|backing| backing.huge_2m > 0);
        thread::sleep(Duration::from_millis(1));
    }
    guest.wait_until("its verdict", |said| said.has_passed.is_some());
    assert_eq!(guest.said().has_passed, Some(true), "{:?}", guest.said().complaint);
    assert!(was_inflated && was_empty_again && is_event && was_large, "{:?}", gate.events(Moment::START));
    eventually("the end", || attached.has_ended());
}
