//! No guest may lose a byte because the manager moves its giant. Two vCPUs check and rewrite every word of their
//! pattern while a policy puts the gibibyte around it onto a giant page and back, again and again, with the access
//! sensor enabled and windows promoted in between. Needs KVM and a page of 1 GiB.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pattern_guest::PatternGuest;
use wideleaf_memory::actuators::giant::SwapLimits;
use wideleaf_memory::manager::{ManagedVm, ManagerLoop, ManagerReport};
use wideleaf_memory::{LinuxHost, Manager, ManagerConfig};
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::units::gib;
use wideleaf_policies::{Action, Backing, Budget, Cost, Moment, PageSize, Plan, Snapshot, VmId, VmSnapshot};
use wideleaf_testing::{GiantPage, has_kvm};

/// Minimum number of round trips of the giant.
const ROUND_TRIPS: u64 = 5;
/// Longest wait for a sample.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// Limits for shared machines, which stop for tens of milliseconds, and for the slow emulated processors of a lab.
/// The benches measure the length of a pause.
const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(5), rounds_max: 100 };
/// Windows promoted per tick while the giant is in pieces.
const WINDOWS_A_TICK: usize = 4;

/// Puts every giant onto a giant page, and from there back to 2 MiB and to base pages in turn. Every other tick it
/// promotes some windows instead, and asks for the release of some, so that the memory varies.
#[derive(Default)]
struct Shuttle {
    tick: u64,
}

impl Policy for Shuttle {
    fn name(&self) -> &'static str {
        "giant-shuttle"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, zero: true, host_memory: true, ..Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, _: &mut Budget, plan: &mut Plan) {
        self.tick += 1;
        for vm in &snapshot.vms {
            let ready: Vec<usize> = (0..vm.len()).filter(|row| vm.ready_at[*row] <= now).collect();
            let actions: Vec<Action> = match self.tick % 2 {
                0 => ready.iter().filter_map(|row| self.giant(vm, *row)).collect(),
                _ => ready.iter().filter_map(|row| small(vm, *row)).take(WINDOWS_A_TICK).collect(),
            };
            actions.into_iter().for_each(|action| plan.push(action, Cost::default()));
        }
    }
}

impl Shuttle {
    fn giant(&self, vm: &VmSnapshot, row: usize) -> Option<Action> {
        let (vm_id, window) = (vm.vm, vm.windows[row]);
        let is_first = window.start().is_aligned_to(PageSize::Giant1G);
        let to = if self.tick.is_multiple_of(4) { PageSize::Huge2M } else { PageSize::Base4K };
        match vm.backing[row] {
            _ if !is_first => None,
            Backing::Giant1G => Some(Action::Demote { vm: vm_id, window, to }),
            Backing::Unbacked => None,
            Backing::Base4K | Backing::Huge2M => Some(Action::Promote { vm: vm_id, window, to: PageSize::Giant1G }),
        }
    }
}

/// Action on a single window.
fn small(vm: &VmSnapshot, row: usize) -> Option<Action> {
    let (vm_id, window) = (vm.vm, vm.windows[row]);
    match (vm.backing[row], vm.zero[row]) {
        (_, Some(1..)) => Some(Action::Release { vm: vm_id, window }),
        (Backing::Base4K, _) => Some(Action::Promote { vm: vm_id, window, to: PageSize::Huge2M }),
        _ => None,
    }
}

fn count(report: &ManagerReport, mechanism: &str) -> u64 {
    report.done(mechanism)
}

#[test]
fn a_writing_guest_survives_a_manager_that_moves_its_giant_again_and_again() {
    let Some(page) = GiantPage::of_this_machine().filter(|_| has_kvm()) else { return };
    let guest = PatternGuest::start(gib(1));
    let vm = ManagedVm::new(VmId(0), Arc::clone(&guest.ram), Some(guest.machine.second_level()));
    let host = Arc::new(LinuxHost::open().unwrap());
    let config = ManagerConfig { tick_longest: Duration::from_millis(100), ..ManagerConfig::default() };
    let work = ManagerLoop::new(host, vec![vm], Box::new(Shuttle::default()), config);
    let manager = Manager::spawn_loop(work.with_giants_from(page.pools().clone(), PATIENT)).unwrap();
    guest.check_all_words();
    manager.activate();
    for trip in 0..ROUND_TRIPS {
        for is_on_giant_page in [true, false] {
            guest.wait_until_on_giant_page(is_on_giant_page);
            guest.check_all_words();
        }
        println!("round trip {trip}");
    }
    // The access sensor first earns what its samples cost, and the trips may be over by then.
    let was_sampled = || manager.live().snapshot.vms[0].access.iter().any(|access| access.samples() > 0);
    let deadline = Instant::now() + WAIT_MAX;
    while !was_sampled() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let report = manager.stop();
    println!("{:?} {:?} {:?}", report.outcomes, report.sensor_costs, report.kvm_checks);
    guest.check_all_words();
    guest.stop();
    assert!(count(&report, "giant_promote") >= ROUND_TRIPS && count(&report, "giant_demote") >= ROUND_TRIPS);
    assert!(count(&report, "swap") + count(&report, "collapse") > 0, "windows were promoted in between");
    assert_eq!(report.kvm_checks[0].unwrap().contradictions, 0);
    let can_move = report.unanswered.is_empty();
    assert!(!can_move || report.sensor_costs["access"].windows > 0, "{:?}", report.sensor_costs);
    drop(guest);
    page.assert_given_back();
}
