//! `auto` on a host that is short of memory, for guests with KVM's totals: which cold windows it demotes where windows
//! are split alone, where only a whole memslot can be held, and where neither can be done.

use std::sync::Arc;

use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop, ManagerReport};
use wideleaf_memory::second_level::SecondLevel;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_policies::units::mib;
use wideleaf_policies::{PageSize, PolicyChoice, VmId};

use crate::market_on_the_fake_host::{HalfIdle, RAM_AT, WINDOWS, ram, run};

/// More samples of each window than make it cold, and then time to act on all of them.
const TICKS: u32 = 60;

/// A host on which all windows are huge and half of the memory is in use.
fn host() -> Arc<FakeHost> {
    let host = FakeHost::default();
    host.set_text("/proc/meminfo", "MemTotal:  33554432 kB\nMemAvailable:  16777216 kB\n");
    host.make_present(RAM_AT, mib(2) * WINDOWS, true);
    Arc::new(host)
}

/// Runs `auto` for a guest with RAM of this kind, of which the first half is idle. For this policy, memory is short.
fn short_of_memory(host: &Arc<FakeHost>, kind: BackingKind, kvm: &Arc<FakeSecondLevel>) -> ManagerReport {
    let policy = PolicyChoice::parse("auto:short_from=1,short_to=0").unwrap().make();
    let backing = BackingConfig::new(kind, PageSize::Base4K).unwrap();
    let guest = ManagedVm::external(VmId(0), vec![ram()], backing, Some(kvm.clone() as Arc<dyn SecondLevel>));
    // Without permission to collapse it, no policy may act on shared memory at all.
    let vm = ManagedVm { heat: Some(Arc::new(HalfIdle)), may_collapse_shared: true, ..guest };
    let mut work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
    run(&mut work, host, TICKS);
    work.finish()
}

fn count(report: &ManagerReport, result: (&'static str, &'static str)) -> u64 {
    report.outcomes.get(&result).copied().unwrap_or(0)
}

/// KVM's totals as they are seen from outside: without memslots.
fn from_outside() -> Arc<FakeSecondLevel> {
    Arc::new(FakeSecondLevel::new(&[]))
}

#[test]
fn the_cold_windows_of_an_attached_guest_are_split_and_those_in_use_stay_huge() {
    let host = host();
    host.be_of_another_process();
    let report = short_of_memory(&host, BackingKind::Anon, &from_outside());
    assert_eq!(count(&report, ("split", "done")), WINDOWS / 2, "{:?}", report.outcomes);
    assert_eq!(host.huge_windows(), WINDOWS / 2);
    assert!(report.policy_figures.contains(&("demoted", WINDOWS / 2)), "{:?}", report.policy_figures);
}

#[test]
fn shared_memory_of_an_attached_guest_is_asked_for_once() {
    let host = host();
    host.be_of_another_process();
    let report = short_of_memory(&host, BackingKind::Memfd, &from_outside());
    assert_eq!(count(&report, ("hold_at_4k", "skipped_no_mechanism")), 1, "{:?}", report.outcomes);
    assert_eq!((report.outcomes.len(), host.huge_windows()), (1, WINDOWS));
}

#[test]
fn a_memslot_that_is_held_whole_is_taken_back_at_once_and_held_once() {
    let (host, kvm) = (host(), Arc::new(FakeSecondLevel::new(&[ram().gpa])));
    let report = short_of_memory(&host, BackingKind::Memfd, &kvm);
    let done = ["hold_at_4k", "recover"].map(|mechanism| count(&report, (mechanism, "done")));
    assert_eq!(done, [1, 1], "{:?}", report.outcomes);
    assert!(kvm.slots().iter().all(|slot| !slot.is_dirty_logged));
    assert_eq!(host.huge_windows(), WINDOWS);
}
