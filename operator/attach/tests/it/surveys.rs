//! Surveys of real guests: QEMU on KVM with every kind of memory that it has. They need QEMU and KVM
//! (`WIDELEAF_REQUIRE=qemu,kvm` turns a skip into a failure).

use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wideleaf_attach::Places;
use wideleaf_attach::find;
use wideleaf_attach::gate::GuestGate;
use wideleaf_attach::monitor::Monitor;
use wideleaf_attach::qmp::Qmp;
use wideleaf_attach::ram::{self, NeverHuge, RamKind, RamMap};
use wideleaf_attach::survey::Survey;
use wideleaf_control::protocol::Target;
use wideleaf_control::view::Vmm;
use wideleaf_memory::gate::{Gate as _, GateState, KeptHoles, LeftAlone};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize};

use crate::qemu::{Guest, can_run, eventually};

/// Time for an answer: a QEMU that starts while a machine compiles on all its cores takes longer than one at work.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// The monitor's map, after a comparison with the guessed one, except for names and doubts.
fn map_of(guest: &Guest) -> RamMap {
    let process = guest.process();
    let mut qmp = Qmp::connect(&guest.qmp(), ANSWERS_WITHIN).unwrap();
    let (told, guessed) = (ram::map(&process, Some(&mut qmp)), ram::map(&process, None));
    let places = |map: &RamMap| map.pieces.iter().map(|piece| (piece.range, piece.kind)).collect::<Vec<_>>();
    assert_eq!(places(&told), places(&guessed), "told {told:?}, guessed {guessed:?}");
    assert!(told.notes.is_empty() && !told.pieces.iter().any(|piece| piece.is_guess), "{told:?}");
    assert!(guessed.pieces.iter().all(|piece| piece.is_guess) && !guessed.notes.is_empty(), "{guessed:?}");
    told
}

fn kind_of(arguments: &[&str]) -> (RamKind, Option<NeverHuge>) {
    let guest = Guest::start(arguments, "");
    let map = map_of(&guest);
    assert_eq!(map.bytes(), mib(256), "{map:?}");
    let piece = &map.pieces[0];
    assert_eq!((map.pieces.len(), piece.range.gpa.start().get()), (1, 0), "{map:?}");
    (piece.kind, piece.never_huge.clone())
}

#[test]
fn memory_is_anonymous_by_default() {
    if can_run() {
        for machine in ["q35", "pc", "microvm"] {
            assert_eq!(kind_of(&["-M", machine, "-m", "256M"]), (RamKind::Anonymous, None), "{machine}");
        }
        let backend =
            ["-object", "memory-backend-ram,id=a,size=256M", "-machine", "q35,memory-backend=a", "-m", "256M"];
        assert_eq!(kind_of(&backend), (RamKind::Anonymous, None));
    }
}

#[test]
fn shared_memory_is_distinguished_and_a_memfd_can_never_be_huge() {
    if can_run() {
        let shared =
            ["-object", "memory-backend-ram,id=a,size=256M,share=on", "-machine", "q35,memory-backend=a", "-m", "256M"];
        assert_eq!(kind_of(&shared), (RamKind::Shmem, None));
        let memfd =
            ["-object", "memory-backend-memfd,id=a,size=256M", "-machine", "q35,memory-backend=a", "-m", "256M"];
        let guest = Guest::start(&memfd, "");
        let piece = map_of(&guest).pieces.remove(0);
        assert_eq!(piece.kind, RamKind::Shmem);
        // QEMU aligns a memfd only to 4 KiB; one time in 512 that is a multiple of 2 MiB all the same.
        let is_off = !piece.range.hva.is_aligned_to(PageSize::Huge2M);
        assert_eq!(piece.never_huge.is_some_and(|why| why.is_misaligned()), is_off, "{}", piece.range.hva);
    }
}

#[test]
fn two_nodes_are_two_pieces_in_the_order_of_guest_addresses() {
    if can_run() {
        let guest = Guest::start(
            &[
                "-M",
                "q35",
                "-m",
                "256M",
                "-object",
                "memory-backend-ram,id=one,size=128M",
                "-object",
                "memory-backend-ram,id=two,size=128M",
                "-numa",
                "node,memdev=one",
                "-numa",
                "node,memdev=two",
            ],
            "",
        );
        let map = map_of(&guest);
        let seen: Vec<_> =
            map.pieces.iter().map(|piece| (piece.name.as_str(), piece.range.gpa.start().get())).collect();
        assert_eq!(seen, [("one", 0), ("two", 128 << 20)]);
    }
}

#[test]
fn pages_of_the_pool_are_distinguished() {
    if can_run() {
        let lease = match HugetlbPools::of_this_machine().lease(PageSize::Huge2M, 128) {
            Ok(lease) => lease,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let pool = [
            "-object",
            "memory-backend-memfd,id=a,size=256M,hugetlb=on,hugetlbsize=2M",
            "-machine",
            "q35,memory-backend=a",
            "-m",
            "256M",
        ];
        let guest = Guest::start(&pool, "");
        let map = map_of(&guest);
        assert_eq!(map.pieces[0].kind, RamKind::Hugetlb(PageSize::Huge2M));
        let process = guest.process();
        eventually("memory of the pool", || {
            Survey::take(&process, None).view().backing.is_some_and(|backing| backing.huge_2m > 0)
        });
        let survey = Survey::take(&process, None);
        assert_eq!((survey.view().backing.unwrap().base_4k, survey.view().backing.unwrap().misaligned), (0, 0));
        drop((guest, lease));
    }
}

#[test]
fn a_survey_counts_every_byte_and_has_a_reason_for_each_small_window() {
    if can_run() {
        let guest = Guest::start(&["-M", "microvm", "-m", "256M", "-name", "guest=surveyed,debug-threads=on"], "");
        let process = guest.process();
        eventually("a guest at work", || guest.console().contains(" begin "));
        let touched = mib(64).get();
        eventually("64 MiB in use", || Survey::take(&process, None).view().resident() >= Some(touched));
        let mut survey = Survey::take(&process, Some(&guest.qmp()));
        eventually("an answer of its monitor", || {
            survey = Survey::take(&process, Some(&guest.qmp()));
            survey.view().mapping.is_some()
        });
        let (view, map, explanation) = (survey.view(), survey.windows(), survey.explanation());
        assert_eq!((view.name.as_str(), view.vmm, view.pid), ("surveyed", Vmm::Qemu, guest.pid()));
        assert_eq!(view.backing.unwrap().resident() + view.backing.unwrap().unbacked, mib(256).get());
        let mapping = view.mapping.expect("the monitor tells");
        assert!(mapping.pages_4k + mapping.pages_2m > 0, "{mapping:?}");
        assert!(!view.notes.iter().any(|note| note.contains("guessed")), "{:?}", view.notes);
        assert_eq!(map.ranges.iter().map(|range| range.backing.len()).sum::<usize>(), 128);
        assert_eq!(explanation.windows, Some(128));
        assert_eq!(
            explanation.huge.unwrap() + explanation.reasons.iter().map(|reason| reason.windows).sum::<u64>(),
            128
        );
        assert!(explanation.reasons.iter().any(|reason| reason.name == "never_touched"), "{explanation:?}");
    }
}

#[test]
fn a_guest_is_found_by_process_name_and_monitor() {
    if can_run() {
        let name = format!("found-{}", std::process::id());
        let guest = Guest::start(&["-M", "microvm", "-m", "128M", "-name", &name], "");
        assert_eq!(guest.process().name, name);
        let places = Places::default();
        for target in [Target::Pid(guest.pid()), Target::Domain(name.clone()), Target::Qmp(guest.qmp())] {
            assert_eq!(find::resolve(&places, &target).unwrap().pid, guest.pid(), "{target:?}");
        }
        assert!(find::all(&places).unwrap().guests.iter().any(|found| found.pid == guest.pid()));
        let not_a_vm = find::with_pid(&places, std::process::id()).unwrap_err().to_string();
        assert!(not_a_vm.contains("has no KVM guest; "), "{not_a_vm}");
    }
}

#[test]
fn the_gate_is_open_for_a_guest_that_only_runs_and_gone_when_it_ends() {
    if can_run() {
        let mut guest = Guest::start(&["-M", "microvm", "-m", "128M"], "");
        let gate = gate_of(&guest);
        assert_eq!((gate.state(), gate.keeps_holes()), (GateState::Open, None));
        guest.kill();
        gate.refresh();
        assert_eq!(gate.state(), GateState::Gone);
    }
}

/// A gate that asks the guest's monitor, once that has answered.
fn gate_of(guest: &Guest) -> GuestGate {
    let monitor = Monitor::now_or_later(&guest.process(), &guest.qmp()).unwrap();
    let gate = GuestGate::new(guest.process(), Some(Arc::new(monitor)));
    eventually("an answer of its monitor", || {
        gate.refresh();
        gate.state() != GateState::Closed(LeftAlone::NoAnswer)
    });
    gate
}

#[test]
fn a_guest_that_waits_for_a_migration_is_left_alone() {
    if can_run() {
        let guest = Guest::start(&["-M", "microvm", "-m", "128M", "-incoming", "defer"], "");
        assert_eq!(gate_of(&guest).state(), GateState::Closed(LeftAlone::Migration));
    }
}

#[test]
fn a_monitor_that_hangs_closes_the_gate_until_it_answers_again() {
    if can_run() {
        let guest = Guest::start(&["-M", "microvm", "-m", "128M"], "");
        let gate = gate_of(&guest);
        let pid = Pid::from_raw(guest.pid() as i32);
        kill(pid, Signal::SIGSTOP).unwrap();
        gate.refresh();
        assert_eq!(gate.state(), GateState::Closed(LeftAlone::NoAnswer));
        kill(pid, Signal::SIGCONT).unwrap();
        eventually("an answer", || {
            gate.refresh();
            gate.state() == GateState::Open
        });
    }
}

#[test]
fn a_socket_of_another_guest_is_refused() {
    if can_run() {
        let [one, other] = [0; 2].map(|_| Guest::start(&["-M", "microvm", "-m", "128M"], ""));
        let error = Monitor::of(&one.process(), &other.qmp()).unwrap_err().to_string();
        assert!(error.contains(&format!("belongs to process {} and not to {}", other.pid(), one.pid())), "{error}");
    }
}

#[test]
fn a_balloon_that_holds_something_keeps_its_holes() {
    if can_run() {
        let guest =
            Guest::start(&["-M", "q35", "-m", "256M", "-device", "virtio-balloon-pci,free-page-reporting=on"], "");
        assert_eq!(gate_of(&guest).keeps_holes(), Some(KeptHoles::GivenBack));
    }
}

#[test]
fn plugged_memory_is_known_to_the_monitor_and_missing_in_the_guess() {
    if can_run() {
        let guest = Guest::start(
            &[
                "-M",
                "q35",
                "-m",
                "256M,slots=2,maxmem=1G",
                "-object",
                "memory-backend-ram,id=plugged,size=128M",
                "-device",
                "pc-dimm,id=dimm,memdev=plugged",
            ],
            "",
        );
        let process = guest.process();
        let mut qmp = Qmp::connect(&guest.qmp(), ANSWERS_WITHIN).unwrap();
        let told = ram::map(&process, Some(&mut qmp));
        assert_eq!(told.bytes(), mib(384), "{told:?}");
        let above: Vec<_> = told
            .pieces
            .iter()
            .filter(|piece| piece.name == "plugged")
            .map(|piece| piece.range.gpa.start().get())
            .collect();
        assert_eq!(above, [4 << 30]);
        let guessed = ram::map(&process, None);
        assert_eq!(guessed.bytes(), mib(256));
        assert!(guessed.notes.iter().any(|note| note.contains("plugged in")), "{:?}", guessed.notes);
    }
}

#[test]
fn ram_on_both_sides_of_the_hole_is_found_before_any_page_is_touched() {
    if can_run() {
        // Five gibibytes of addresses, none of which the guest gets to touch.
        let guest = Guest::start(&["-M", "q35", "-m", "5G", "-S"], "");
        let map = map_of(&guest);
        let seen: Vec<_> = map
            .pieces
            .iter()
            .map(|piece| (piece.range.gpa.start().get() >> 30, piece.range.gpa.bytes().get() >> 30))
            .collect();
        assert_eq!(seen, [(0, 2), (4, 3)]);
        assert!(Bytes::new(Survey::take(&guest.process(), None).view().backing.unwrap().resident()) < mib(16));
    }
}
