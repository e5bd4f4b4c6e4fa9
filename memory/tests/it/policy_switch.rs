//! Replacing the policy of a running loop, on a host in memory: which policies take over, and which are refused
//! while the old one continues.

use std::sync::Arc;

use wideleaf_memory::GuestRam;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::gate::{Gate, GateState, KeptHoles};
use wideleaf_memory::host::Advice;
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig, ManagerLoop, SwitchError};
use wideleaf_memory::recorder::RecordTo;
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_policies::policy::{self, Policy};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, PageSize, VmId};

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 8;

fn range(start: Bytes, bytes: Bytes) -> GpaRange {
    GpaRange::new(Gpa::new(start.get()), bytes).unwrap()
}

/// RAM of another process on base pages, all of it present.
fn vm(host: &FakeHost) -> ManagedVm {
    let ram = RamRange { gpa: range(Bytes::ZERO, mib(2) * WINDOWS), hva: RAM_AT };
    host.make_present(RAM_AT, ram.gpa.bytes(), false);
    host.forbid_huge(RAM_AT, ram.gpa.bytes());
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    ManagedVm { may_collapse_shared: true, ..ManagedVm::external(VmId(0), vec![ram], backing, None) }
}

/// A gate of a guest that has ended.
struct Gone;

impl Gate for Gone {
    fn state(&self) -> GateState {
        GateState::Gone
    }
    fn keeps_holes(&self) -> Option<KeptHoles> {
        None
    }
}

fn named(name: &str) -> Box<dyn Policy> {
    policy::by_name(name).unwrap().with_defaults()
}

fn working(host: &Arc<FakeHost>, policy: &str) -> ManagerLoop {
    ManagerLoop::new(host.clone(), vec![vm(host)], named(policy), ManagerConfig::default())
}

#[test]
fn the_new_policy_begins_with_the_current_state_and_the_report_says_when() {
    let host = Arc::<FakeHost>::default();
    let mut work = working(&host, "never");
    assert_eq!(work.tick(), 0);
    assert_eq!(work.switch_policy(named("greedy")), Ok(()));
    assert_eq!((work.tick(), host.huge_windows()), (WINDOWS, WINDOWS));
    assert_eq!(work.live().policy, "greedy");
    assert_eq!(work.switch_policy(named("never")), Ok(()));
    let report = work.finish();
    let changes: Vec<_> = report.policy_changes.iter().map(|(_, name)| *name).collect();
    assert_eq!((report.policy, changes), ("never", vec!["greedy", "never"]));
}

#[test]
fn a_policy_that_answers_faults_starts_with_the_vm_or_never() {
    let host = Arc::<FakeHost>::default();
    let mut work = working(&host, "greedy");
    for name in ["at-fault", "reservation"] {
        assert_eq!(work.switch_policy(named(name)), Err(SwitchError::BeginsAtFirstFault(name)));
        let mut work = working(&host, name);
        assert_eq!(work.switch_policy(named("greedy")), Err(SwitchError::AnswersFaults(name)));
    }
    assert_eq!((work.report().policy, work.tick()), ("greedy", WINDOWS));
}

#[test]
fn a_policy_with_an_unanswerable_question_is_refused_unless_the_run_began_with_it() {
    let host = Arc::<FakeHost>::default();
    let mut work = working(&host, "greedy");
    let refused = work.switch_policy(named("utilization")).unwrap_err();
    let SwitchError::Unanswered { policy: "utilization", question: "which windows are used", .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!((work.report().policy, work.tick()), ("greedy", WINDOWS), "the one before goes on");

    let mut work = working(&host, "utilization");
    let at_start = work.report().unanswered.clone();
    assert_eq!(at_start.len(), 1);
    assert_eq!(work.switch_policy(named("greedy")), Ok(()));
    assert_eq!(work.report().unanswered, Vec::<String>::new());
    assert_eq!(work.switch_policy(named("utilization")), Ok(()));
    assert_eq!(work.report().unanswered, at_start);
}

#[test]
fn prealloc_is_for_ram_that_is_huge_already() {
    let host = Arc::<FakeHost>::default();
    let mut work = working(&host, "greedy");
    let not_huge = SwitchError::NotHuge { policy: "prealloc", windows: WINDOWS as usize };
    assert_eq!(work.switch_policy(named("prealloc")), Err(not_huge));
    assert_eq!(work.tick(), WINDOWS);
    assert_eq!(work.switch_policy(named("prealloc")), Ok(()));
}

#[test]
fn giants_take_memslots_that_hold_one() {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let slots =
        |bytes: Bytes| (0..gib(1).get() / bytes.get()).map(|slot| range(bytes * slot, bytes)).collect::<Vec<_>>();
    for (ram, slot, is_taken) in
        [(gib(1), gib(1), true), (gib(1), mib(512), false), (mib(512), mib(64), true), (mib(512), gib(1), true)]
    {
        let ram = GuestRam::map(&[range(Bytes::ZERO, ram)], backing).unwrap();
        let vm = ManagedVm::new(VmId(0), ram, Some(Arc::new(FakeSecondLevel::new(&slots(slot)))));
        let host = Arc::<FakeHost>::default();
        let mut work = ManagerLoop::new(host, vec![vm], named("never"), ManagerConfig::default());
        let expected = if is_taken { Ok(()) } else { Err(SwitchError::SmallSlots("giant")) };
        assert_eq!(work.switch_policy(named("giant")), expected, "{slot}");
    }
}

#[test]
fn a_recording_is_of_one_policy() {
    let host = Arc::<FakeHost>::default();
    let to = RecordTo { file: Box::new(std::io::sink()), facts: Vec::new() };
    let mut work = working(&host, "never").recorded(to).unwrap();
    assert_eq!(work.switch_policy(named("greedy")), Err(SwitchError::Recorded));
    assert_eq!(work.report().policy, "never");
}

#[test]
fn a_switch_request_is_answered_before_the_thread_acts_and_after_its_end() {
    let host = Arc::<FakeHost>::default();
    let vm = ManagedVm { gate: Some(Arc::new(Gone)), ..vm(&host) };
    let manager = Manager::spawn(host, vec![vm], named("never"), ManagerConfig::default()).unwrap();
    assert_eq!(manager.set_policy(named("greedy")).wait(), Ok(()));
    assert_eq!(manager.set_policy(named("at-fault")).wait(), Err(SwitchError::BeginsAtFirstFault("at-fault")));
    assert_eq!(manager.live().ticks, 0, "it has not been activated");
    manager.activate();
    while manager.set_policy(named("never")).wait() != Err(SwitchError::Ended) {}
    assert_eq!(manager.stop().ticks, 1);
}

#[test]
fn a_resting_loop_does_nothing_and_then_knows_nothing_of_the_guest_before() {
    // Its time stands still: a window in back-off stays so for ever.
    let host = Arc::<FakeHost>::default();
    let vms = vec![vm(&host)];
    host.fail_advice(Advice::Collapse, libc::EBUSY, WINDOWS);
    let manager = Manager::spawn(host.clone(), vms, named("greedy"), ManagerConfig::default()).unwrap();
    manager.activate();
    let tick = |after: u64| while manager.live().ticks < after {};
    tick(3);
    let resting = manager.ask_to_rest().wait();
    let calls = host.calls();
    manager.activate();
    for _ in 0..1_000 {
        std::thread::yield_now();
    }
    assert_eq!((host.calls(), host.huge_windows()), (calls, 0), "all windows are left alone and not scanned");
    resting.begin_anew(named("greedy"));
    tick(manager.live().ticks + 2);
    assert_eq!(host.huge_windows(), WINDOWS, "they are another guest's, and were never refused");
    // Ending the rest without another policy changes nothing.
    drop(manager.ask_to_rest().wait());
    assert_eq!(manager.stop().policy, "greedy");
}

#[test]
fn a_loop_that_has_ended_rests() {
    let host = Arc::<FakeHost>::default();
    let vm = ManagedVm { gate: Some(Arc::new(Gone)), ..vm(&host) };
    let manager = Manager::spawn(host, vec![vm], named("never"), ManagerConfig::default()).unwrap();
    manager.activate();
    while !manager.has_ended() {}
    manager.ask_to_rest().wait().begin_anew(named("never"));
    assert_eq!(manager.stop().ticks, 1);
}
