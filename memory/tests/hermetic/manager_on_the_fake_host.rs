//! The loop on a host in memory: its actions when all calls succeed, and with a failure at every call that can
//! fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{ManagedVm, Manager, ManagerConfig, ManagerLoop, ManagerReport, OutOfReach};
use wideleaf_memory::region::{GuestRam, RamRange};
use wideleaf_memory::second_level::{SecondLevel, SlotId};
use wideleaf_memory::sensors::outside_heat::{Heat, HeatRegion, LatestHeat};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_policies::policy::{self, Policy};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Action, Budget, BudgetLimits, Bytes, Cost, Gpa, GpaRange, Hva, MappingStats, Moment, Outcome, PageSize,
    PerTenThousand, Plan, Refusal, SampleQuality, Snapshot, VmId, WindowIndex,
};

use crate::watching::{Outside, Sees};

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 8;

fn ram() -> RamRange {
    RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap(), hva: RAM_AT }
}

/// RAM that starts with base pages, all of it present.
fn host() -> Arc<FakeHost> {
    let host = FakeHost::default();
    host.make_present(RAM_AT, ram().gpa.bytes(), false);
    host.forbid_huge(RAM_AT, ram().gpa.bytes());
    Arc::new(host)
}

fn vm(second_level: Option<Arc<dyn SecondLevel>>) -> ManagedVm {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let external = ManagedVm::external(VmId(0), vec![ram()], backing, second_level);
    ManagedVm { may_collapse_shared: true, ..external }
}

/// A budget that no test exceeds by accident.
fn plenty() -> ManagerConfig {
    ManagerConfig {
        limits: BudgetLimits {
            copy_per_second: mib(1 << 20),
            cpu_share: PerTenThousand::new(1_000_000),
            burst: Duration::from_secs(1),
        },
        ..ManagerConfig::default()
    }
}

fn greedy() -> Box<dyn Policy> {
    policy::by_name("greedy").unwrap().with_defaults()
}

fn greedy_loop(host: &Arc<FakeHost>) -> ManagerLoop {
    ManagerLoop::new(host.clone(), vec![vm(None)], greedy(), plenty())
}

/// Runs `ticks` ticks, a tick a second: longer than any back-off.
fn run(work: &mut ManagerLoop, host: &FakeHost, ticks: u32) {
    for _ in 0..ticks {
        work.tick();
        host.sleep(Duration::from_secs(1));
    }
}

fn count(report: &ManagerReport, mechanism: &str, result: &str) -> u64 {
    report.outcomes.iter().filter(|((m, r), _)| (*m, *r) == (mechanism, result)).map(|(_, n)| n).sum()
}

#[test]
fn greedy_makes_every_resident_window_huge() {
    let host = host();
    let mut work = greedy_loop(&host);
    assert_eq!(work.tick(), WINDOWS);
    assert_eq!(host.huge_windows(), WINDOWS);
    assert_eq!(work.tick(), 0, "huge windows need no action");
    let report = work.finish();
    assert_eq!(report.copied, mib(2) * WINDOWS);
    assert_eq!(report.unavailable_ns.len(), WINDOWS);
    let longest = Duration::from_nanos(report.unavailable_ns.max());
    assert!(longest >= report.copy_time / WINDOWS as u32, "{longest:?} for the longest of {:?}", report.copy_time);
    let (_, samples) = &report.samples[0];
    assert_eq!(samples.last().unwrap().host.huge_2m, mib(2) * WINDOWS);
}

#[test]
fn never_leaves_every_window_alone() {
    let host = host();
    let policy = policy::by_name("never").unwrap().with_defaults();
    let mut work = ManagerLoop::new(host.clone(), vec![vm(None)], policy, plenty());
    run(&mut work, &host, 3);
    assert_eq!(host.huge_windows(), 0);
    assert!(work.report().outcomes.is_empty());
}

#[test]
fn the_report_says_on_which_sensors_a_policy_decided() {
    let host = host();
    let policy = policy::by_name("auto").unwrap().with_defaults();
    let mut work = ManagerLoop::new(host.clone(), vec![vm(None)], policy, plenty());
    assert_eq!(work.tick(), WINDOWS, "accesses are not sampled here, and all windows are full");
    let figures = work.finish().policy_figures;
    assert!(figures.contains(&("planned_on_residency", WINDOWS)), "{figures:?}");
}

#[test]
fn an_unbacked_window_is_not_filled() {
    let host = host();
    host.make_absent(RAM_AT + mib(4), mib(2));
    let mut work = greedy_loop(&host);
    run(&mut work, &host, 3);
    assert_eq!(host.huge_windows(), WINDOWS - 1);
}

#[test]
fn a_window_with_more_swapped_pages_than_khugepaged_would_read_back_stays_as_it_is() {
    let host = host();
    host.make_absent(RAM_AT, mib(1));
    host.swap_out(RAM_AT, mib(1));
    host.set_text("/proc/self/status", "VmSwap:\t1024 kB\n");
    let mut work = greedy_loop(&host);
    run(&mut work, &host, 3);
    assert_eq!(host.huge_windows(), WINDOWS - 1);
}

#[test]
fn bloat_is_counted() {
    let host = host();
    host.make_absent(RAM_AT + mib(1), mib(1)); // half of window 0
    let mut work = greedy_loop(&host);
    work.tick();
    assert_eq!(work.report().bloat, mib(1));
}

#[test]
fn if_any_call_fails_the_loop_continues_and_reaches_the_same_state() {
    let calls = {
        let host = host();
        let mut work = greedy_loop(&host);
        work.tick();
        host.calls()
    };
    assert!(calls > WINDOWS * 4, "scan, advise, collapse and scan again for each window, {calls} calls");
    for errno in [libc::ENOMEM, libc::EAGAIN, libc::EBUSY, libc::EINVAL, libc::EPERM, libc::EIO] {
        let mut uncounted = Vec::new();
        for call in 0..calls {
            let host = host();
            host.fail_call(call, errno);
            let mut work = greedy_loop(&host);
            // After a refusal for want of a page, one is requested at the next tick, then twice as many at each.
            run(&mut work, &host, 6);
            assert_eq!(host.huge_windows(), WINDOWS, "call {call} failed with errno {errno}");
            let report = work.finish();
            let failures = report.sensor_failures.values().sum::<u64>()
                + report.outcomes.iter().filter(|((_, r), _)| r.starts_with("refused")).map(|(_, n)| n).sum::<u64>();
            assert!(failures <= 1, "the failure of call {call} is counted {failures} times: {:?}", report.outcomes);
            uncounted.extend((failures == 0).then_some(call));
        }
        // Without the memory in use, scans come at their longest time; without free blocks, a page is requested.
        assert_eq!(uncounted.len(), 2, "{uncounted:?}");
    }
}

#[test]
fn a_window_that_refuses_is_left_alone_for_a_growing_time() {
    let host = host();
    host.fail_advice(Advice::Collapse, libc::EINVAL, u64::MAX);
    let mut work = greedy_loop(&host);
    for _ in 0..1_000 {
        work.tick();
        host.sleep(Duration::from_millis(10));
    }
    // 10 s of ticks; after the refusal of a window that cannot be huge: 0.1, 0.2, 0.4 … 6.4 s
    assert_eq!(count(work.report(), "collapse", "refused_not_eligible"), WINDOWS * 7);
    assert_eq!(count(work.report(), "collapse", "done"), 0);
}

#[test]
fn a_host_without_huge_pages_is_asked_for_one_at_a_time_and_for_each_free_one() {
    let host = host();
    let free =
        |pages: u64| host.set_text("/proc/buddyinfo", &format!("Node 0, zone Normal 0 0 0 0 0 0 0 0 0 {pages} 0"));
    free(2); // both kept by the kernel
    host.fail_advice(Advice::Collapse, libc::ENOMEM, 4);
    let mut work = greedy_loop(&host);
    for _ in 0..1_000 {
        work.tick();
        host.sleep(Duration::from_millis(10));
    }
    // 10 s of ticks, the first at once, the others 1, 2, 4 s after the one before.
    assert_eq!(count(work.report(), "collapse", "refused_no_huge_page"), 4);
    assert!(count(work.report(), "none", "skipped_no_huge_page") > 0);
    let live = work.live();
    assert_eq!(
        live.vms[0].why_not,
        BTreeMap::from([(WhyNot::BackingOff(Refusal::NoHugePage), WINDOWS)]),
        "each has a reason"
    );
    free(5);
    run(&mut work, &host, 1);
    assert_eq!(host.huge_windows(), 3, "as many as became free");
    free(2);
    run(&mut work, &host, 8);
    assert_eq!(host.huge_windows(), WINDOWS, "compaction made one page available, and then the others");
}

#[test]
fn each_errno_is_counted_under_its_class() {
    for (errno, name) in [
        (libc::ENOMEM, "refused_no_huge_page"),
        (libc::EAGAIN, "refused_busy"),
        (libc::EBUSY, "refused_busy"),
        (libc::EINVAL, "refused_not_eligible"),
        (libc::EPERM, "refused_not_permitted"),
        (libc::EIO, "refused_other"),
    ] {
        let host = host();
        host.fail_advice(Advice::Collapse, errno, 1);
        let mut work = greedy_loop(&host);
        work.tick();
        assert_eq!(count(work.report(), "collapse", name), 1, "errno {errno}");
        let done = if errno == libc::ENOMEM { 0 } else { WINDOWS - 1 };
        assert_eq!(count(work.report(), "collapse", "done"), done, "the others wait only for a huge page");
    }
}

#[test]
fn a_success_without_effect_is_not_believed() {
    let host = host();
    host.collapse_does_nothing(true);
    let mut work = greedy_loop(&host);
    work.tick();
    assert_eq!(count(work.report(), "collapse", "refused_not_observed"), WINDOWS);
    assert_eq!(work.report().copied, Bytes::ZERO);
    host.collapse_does_nothing(false);
    run(&mut work, &host, 2);
    assert_eq!(host.huge_windows(), WINDOWS);
}

#[test]
fn the_budget_limits_the_actions_per_second() {
    let host = host();
    let limits = BudgetLimits {
        copy_per_second: mib(4), // two windows a second
        cpu_share: PerTenThousand::ALL,
        burst: Duration::from_secs(1),
    };
    let mut work =
        ManagerLoop::new(host.clone(), vec![vm(None)], greedy(), ManagerConfig { limits, ..ManagerConfig::default() });
    let mut huge = Vec::new();
    for _ in 0..4 {
        work.tick();
        huge.push(host.huge_windows());
        host.sleep(Duration::from_secs(1));
    }
    assert_eq!(huge, [2, 4, 6, 8]);
    assert!(work.report().budget_refusals >= 3);
}

/// A policy that plans the test's actions, regardless of the budget.
struct Script(Vec<Vec<Action>>);

impl Policy for Script {
    fn name(&self) -> &'static str {
        "script"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        if !self.0.is_empty() {
            self.0.remove(0).into_iter().for_each(|action| plan.push(action, Cost::default()));
        }
    }
}

fn promote(window: u64, to: PageSize) -> Action {
    Action::Promote { vm: VmId(0), window: WindowIndex::new(window), to }
}

fn demote(window: u64) -> Action {
    Action::Demote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Base4K }
}

/// Two memslots of four windows each.
fn second_level() -> Arc<FakeSecondLevel> {
    let half = |i: u64| GpaRange::new(Gpa::new(i * mib(8).get()), mib(8)).unwrap();
    Arc::new(FakeSecondLevel::new(&[half(0), half(1)]))
}

/// RAM of a memfd: only KVM can be kept from mapping its huge pages as such.
fn scripted(host: &Arc<FakeHost>, kvm: &Arc<FakeSecondLevel>, script: Vec<Vec<Action>>) -> ManagerLoop {
    scripted_within(plenty(), host, kvm, script)
}

fn scripted_within(
    config: ManagerConfig,
    host: &Arc<FakeHost>,
    kvm: &Arc<FakeSecondLevel>,
    script: Vec<Vec<Action>>,
) -> ManagerLoop {
    let memfd = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap();
    let vm = ManagedVm { backing: memfd, ..vm(Some(kvm.clone())) };
    ManagerLoop::new(host.clone(), vec![vm], Box::new(Script(script)), config)
}

#[test]
fn demotion_of_anonymous_ram_splits_one_window_and_promotion_collapses_it_again() {
    let (host, kvm) = (host(), second_level());
    host.make_present(RAM_AT, ram().gpa.bytes(), true);
    let script = Script(vec![vec![demote(5)], vec![promote(5, PageSize::Huge2M)]]);
    let mut work = ManagerLoop::new(host.clone(), vec![vm(Some(kvm.clone()))], Box::new(script), plenty());
    assert_eq!((work.tick(), host.huge_windows()), (1, WINDOWS - 1));
    assert!(kvm.slots().iter().all(|slot| !slot.is_dirty_logged), "its neighbours stay mapped large");
    assert_eq!(
        (work.report().unavailable_ns.len(), work.report().copy_time),
        (1, Duration::ZERO),
        "a split copies nothing"
    );
    assert_eq!((work.tick(), host.huge_windows()), (1, WINDOWS));
    assert_eq!((count(work.report(), "split", "done"), count(work.report(), "collapse", "done")), (1, 1));
    assert_eq!(work.report().copied, mib(2));
}

#[test]
fn several_threads_copy_each_window_once_and_record_in_the_order_of_the_plan() {
    let host = host();
    let heard = Arc::<Mutex<Vec<WindowIndex>>>::default();
    let policy = Box::new(Heard(greedy(), heard.clone()));
    let config = ManagerConfig { copy_threads: 2, ..plenty() };
    let mut work = ManagerLoop::new(host.clone(), vec![vm(None)], policy, config);
    assert_eq!((work.tick(), host.huge_windows()), (WINDOWS, WINDOWS));
    assert_eq!(count(work.report(), "collapse", "done"), WINDOWS);
    let in_order: Vec<_> = (0..WINDOWS).map(WindowIndex::new).collect();
    assert_eq!(*heard.lock(), in_order);
}

/// A wrapped policy, and the windows that it was notified of, in order.
struct Heard(Box<dyn Policy>, Arc<Mutex<Vec<WindowIndex>>>);

impl Policy for Heard {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.0.plan(snapshot, now, budget, plan);
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.1.lock().push(outcome.action.window());
    }
}

#[test]
fn a_panic_of_a_thread_that_copies_is_an_error_of_the_report_and_ends_no_other_copy() {
    for copy_threads in [1, 2] {
        let host = host();
        host.panic_at(RAM_AT + mib(2) * 3);
        let heard = Arc::<Mutex<Vec<WindowIndex>>>::default();
        let policy = Box::new(Heard(greedy(), heard.clone()));
        let manager =
            Manager::spawn(host.clone(), vec![vm(None)], policy, ManagerConfig { copy_threads, ..plenty() }).unwrap();
        manager.activate();
        for _ in 0..LOOKS_MAX {
            if heard.lock().len() as u64 == WINDOWS {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let report = manager.stop();
        assert_eq!(report.panics.len(), 1, "{:?}", report.panics);
        assert!(report.panics[0].contains("left alone") && report.panics[0].contains("as by a defect of wideleaf"));
        assert_eq!(count(&report, "none", "refused_other"), 1, "{:?}", report.outcomes);
        assert_eq!((count(&report, "collapse", "done"), host.huge_windows()), (WINDOWS - 1, WINDOWS - 1));
    }
}

/// Address of a second VM's RAM, as large as the first's.
const SECOND_RAM_AT: Hva = Hva::new(1 << 41);

#[test]
fn a_vm_that_panicked_takes_no_budget_from_others() {
    let host = host();
    host.make_present(SECOND_RAM_AT, ram().gpa.bytes(), false);
    host.panic_at(RAM_AT);
    let second = ManagedVm { id: VmId(1), ranges: vec![RamRange { hva: SECOND_RAM_AT, ..ram() }], ..vm(None) };
    // One window a tick.
    let limits = BudgetLimits { copy_per_second: mib(2), ..plenty().limits };
    let config = ManagerConfig { limits, ..plenty() };
    let mut work = ManagerLoop::new(host.clone(), vec![vm(None), second], greedy(), config);
    run(&mut work, &host, WINDOWS as u32 + 1);
    assert_eq!(work.report().panics.len(), 1, "{:?}", work.report().panics);
    assert_eq!(count(work.report(), "none", "skipped_no_mechanism"), 0, "it gets no requests");
    assert_eq!(host.huge_windows(), WINDOWS, "all of the second VM, one after the other");
}

#[test]
fn a_shortage_is_forgotten_when_nothing_is_given_back_any_more() {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let (host, mapped) = (Arc::<FakeHost>::default(), GuestRam::map(&[ram().gpa], backing).unwrap());
    let has_available = |kib: u64| {
        host.set_text("/proc/meminfo", &format!("MemTotal: 1000 kB\nMemAvailable: {kib} kB\n"));
    };
    let never = policy::by_name("never").unwrap().with_defaults();
    let vm = ManagedVm::new(VmId(0), mapped.clone(), None);
    let mut work = ManagerLoop::new(host.clone(), vec![vm], never, plenty());
    has_available(10);
    mapped.given_back().book().inflate(Gpa::new(0));
    run(&mut work, &host, 1);
    assert!(mapped.given_back().is_short());
    has_available(900);
    mapped.given_back().book().deflate(Gpa::new(0));
    run(&mut work, &host, 1);
    assert!(!mapped.given_back().is_short(), "the next page that is given back would split a huge page");
}

#[test]
fn given_back_pages_go_although_their_window_cannot_be_marked() {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let (host, mapped) = (Arc::<FakeHost>::default(), GuestRam::map(&[ram().gpa], backing).unwrap());
    host.make_present(mapped.base(), mib(2), false);
    host.fail_advice(Advice::NoHugePage, libc::ENOMEM, 1);
    GiveBack::new(host.clone(), mapped.clone()).unwrap().inflate([Gpa::new(0)]);
    let counters = mapped.given_back().counters();
    assert_eq!((counters.released, counters.failed, counters.kept), (1, 0, 0));
}

/// A policy that needs every expensive sensor.
struct Curious(Box<dyn Policy>);

impl Policy for Curious {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn needs(&self) -> policy::Needs {
        policy::Needs { zero: true, written: true, guest_mapping: true, ..policy::Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.0.plan(snapshot, now, budget, plan);
    }
}

#[test]
fn a_vm_that_panicked_is_not_sampled_any_more() {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let mapped = GuestRam::map(&[ram().gpa], backing).unwrap();
    let (host, kvm) = (Arc::<FakeHost>::default(), second_level());
    host.make_present(mapped.base(), mib(2) * (WINDOWS - 1), false);
    let vm = ManagedVm::new(VmId(0), mapped.clone(), Some(kvm.clone()));
    let mut work = ManagerLoop::new(host.clone(), vec![vm], Box::new(Curious(greedy())), plenty());
    run(&mut work, &host, 4);
    let last = mapped.base() + mib(2) * (WINDOWS - 1);
    host.make_present(last, mib(2), false);
    host.panic_at(last);
    run(&mut work, &host, 2); // panics, and ends the work under way
    assert_eq!(work.report().panics.len(), 1, "{:?}", work.report().panics);
    let before = work.report().sensor_costs.clone();
    assert!(["zero_pages", "written", "guest_tables"].iter().all(|sensor| before[sensor].samples > 0), "{before:?}");
    run(&mut work, &host, 20);
    assert_eq!(work.report().sensor_costs, before);
    assert!(kvm.slots().iter().all(|slot| !slot.is_dirty_logged));
}

#[test]
fn heat_seen_from_outside_reaches_the_policy_with_its_age_and_error() {
    let (host, outside, seen) = (host(), Arc::<Outside>::default(), Arc::<Mutex<Snapshot>>::default());
    let vm = ManagedVm { heat: Some(outside.clone()), ..vm(None) };
    let mut work = ManagerLoop::new(host.clone(), vec![vm], Box::new(Sees::access(seen.clone())), plenty());
    // Window 0 is hot, 1 to 4 are one idle region, and the rest is not watched.
    let region = |first: u64, end: u64, rate| HeatRegion {
        start: RAM_AT + mib(2) * first,
        end: RAM_AT + mib(2) * end,
        rate: PerTenThousand::new(rate),
    };
    let heat = Arc::new(Heat::new(vec![region(0, 1, 10_000), region(1, 5, 0)]));
    let mut tell = |number, age| {
        let age = Duration::from_secs(age);
        *outside.0.lock() = Some(LatestHeat { number, age, heat: heat.clone() });
        run(&mut work, &host, 2);
        let vm = seen.lock().vms[0].clone();
        let row = |row: usize| (vm.access[row].touched(), vm.access[row].samples(), vm.access_quality[row]);
        [0, 4, 5].map(row)
    };
    host.sleep(Duration::from_secs(1000));
    let of = |age_s, windows| SampleQuality { age_s, windows };
    assert_eq!(tell(0, 7), [(0b1111, 4, of(8, 1)), (0, 4, of(8, 4)), (0, 0, of(0, 0))]);
    assert_eq!(tell(0, 9), [(0b1111, 4, of(10, 1)), (0, 4, of(10, 4)), (0, 0, of(0, 0))], "it is the same reading");
    assert_eq!(tell(1, 0)[..2], [(0b1111_1111, 8, of(1, 1)), (0, 8, of(1, 4))]);
    assert_eq!(tell(1, 301), [(0, 0, of(0, 0)); 3], "what is older than five minutes is not known");
    assert_eq!(work.report().unanswered, Vec::<String>::new());
    assert_eq!(work.report().sensor_costs["access_outside"].samples, 2);
}

/// Number of waits of a millisecond for the manager.
const LOOKS_MAX: u32 = 60_000;

#[test]
fn demotion_of_other_ram_holds_the_slot_and_promotion_recovers_it_without_a_copy() {
    let (host, kvm) = (host(), second_level());
    let mut work = scripted(&host, &kvm, vec![vec![demote(5)], vec![promote(5, PageSize::Huge2M)]]);
    work.tick();
    let logged: Vec<bool> = kvm.slots().iter().map(|slot| slot.is_dirty_logged).collect();
    assert_eq!(logged, [false, true], "window 5 is in the second slot");
    work.tick();
    assert!(kvm.slots().iter().all(|slot| !slot.is_dirty_logged));
    assert_eq!((count(work.report(), "hold_at_4k", "done"), count(work.report(), "recover", "done")), (1, 1));
    assert_eq!(work.report().copied, Bytes::ZERO);
}

#[test]
fn a_hold_and_its_end_wait_for_nothing_after_a_collapse_has_used_up_the_time_out_of_reach() {
    let (host, kvm) = (host(), second_level());
    let collapse = || vec![promote(0, PageSize::Huge2M)];
    let script = vec![collapse(), collapse(), vec![demote(5)], vec![promote(5, PageSize::Huge2M)]];
    let config = ManagerConfig { out_of_reach: OutOfReach::nearest_to(PerTenThousand::new(1)), ..plenty() };
    let mut work = scripted_within(config, &host, &kvm, script);
    // Stalls of the whole guest are saved up from the first that was wanted.
    run(&mut work, &host, 1);
    work.tick();
    let before = host.now();
    work.tick();
    work.tick();
    assert_eq!(host.now(), before, "time passes in sleeps alone");
    let done = ["collapse", "hold_at_4k", "recover"].map(|mechanism| count(work.report(), mechanism, "done"));
    assert_eq!(done, [1, 1, 1]);
}

/// Window 0 is hot, the others are idle, and one slot has all of them.
#[test]
fn schemes_hold_a_slot_with_a_hot_window_once_and_then_no_more() {
    let (host, outside) = (host(), Arc::<Outside>::default());
    let kvm = Arc::new(FakeSecondLevel::new(&[ram().gpa]));
    host.make_present(RAM_AT, ram().gpa.bytes(), true);
    let memfd = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap();
    let vm = ManagedVm { backing: memfd, heat: Some(outside.clone()), ..vm(Some(kvm)) };
    let schemes = policy::by_name("schemes").unwrap().with_defaults();
    let mut work = ManagerLoop::new(host.clone(), vec![vm], schemes, plenty());
    let of_windows = |from: u64, to: u64| (RAM_AT + mib(2) * from, RAM_AT + mib(2) * to);
    let regions = [(of_windows(0, 1), 10_000), (of_windows(1, WINDOWS), 0)];
    let region = |((start, end), rate)| HeatRegion { start, end, rate: PerTenThousand::new(rate) };
    let heat = Arc::new(Heat::new(regions.map(region).to_vec()));
    for number in 0..60 {
        *outside.0.lock() = Some(LatestHeat { number, age: Duration::ZERO, heat: heat.clone() });
        run(&mut work, &host, 1);
    }
    assert_eq!((count(work.report(), "hold_at_4k", "done"), count(work.report(), "recover", "done")), (1, 1));
}

#[test]
fn a_hold_set_by_another_user_is_left_alone_and_reported() {
    let (host, kvm) = (host(), second_level());
    host.make_present(RAM_AT, ram().gpa.bytes(), true);
    kvm.set_dirty_log(SlotId(0), true).unwrap(); // as a migration does
    let held = || kvm.slots().iter().map(|slot| slot.is_dirty_logged).collect::<Vec<_>>();
    let auto = policy::by_name("auto").unwrap().with_defaults();
    let mut work = ManagerLoop::new(host.clone(), vec![vm(Some(kvm.clone()))], auto, plenty());
    run(&mut work, &host, 3);
    let report = work.finish();
    assert_eq!((held(), report.outcomes.len()), (vec![true, false], 0), "{:?}", report.outcomes);
    assert_eq!(report.foreign_logs.into_iter().collect::<Vec<_>>(), [(VmId(0), SlotId(0))]);
    // A policy that names it anyway is refused.
    let mut work = scripted(&host, &kvm, vec![vec![promote(0, PageSize::Huge2M)]]);
    work.tick();
    assert_eq!((held(), count(work.report(), "recover", "refused_busy")), (vec![true, false], 1));
}

#[test]
fn a_second_demotion_in_the_same_slot_has_nothing_to_do() {
    let (host, kvm) = (host(), second_level());
    let mut work = scripted(&host, &kvm, vec![vec![demote(0), demote(1)]]);
    work.tick();
    assert_eq!(count(work.report(), "hold_at_4k", "done"), 1);
    assert_eq!(count(work.report(), "hold_at_4k", "skipped_already_done"), 1);
}

#[test]
fn a_failing_dirty_log_is_refused_and_leaves_the_slot_as_it_was() {
    let (host, kvm) = (host(), second_level());
    let mut work = scripted(&host, &kvm, vec![vec![demote(0)]]);
    kvm.fail_call(1, libc::ENOMEM); // 0: the statistics of the snapshot
    work.tick();
    assert_eq!(count(work.report(), "hold_at_4k", "refused_other"), 1);
    assert!(!kvm.slots()[0].is_dirty_logged);
}

#[test]
fn a_dirty_log_that_does_not_switch_is_not_believed() {
    let (host, kvm) = (host(), second_level());
    kvm.ignore_dirty_log();
    let mut work = scripted(&host, &kvm, vec![vec![demote(0)]]);
    work.tick();
    assert_eq!(count(work.report(), "hold_at_4k", "refused_not_observed"), 1);
}

#[test]
fn failing_statistics_are_counted_and_do_not_stop_promotion() {
    let (host, kvm) = (host(), second_level());
    kvm.fail_call(0, libc::EIO);
    let mut work = ManagerLoop::new(host.clone(), vec![vm(Some(kvm.clone()))], greedy(), plenty());
    work.tick();
    assert_eq!(host.huge_windows(), WINDOWS);
    assert_eq!(work.report().sensor_failures["kvm_stats"], 1);
}

#[test]
fn kvms_totals_are_sampled_at_every_tick() {
    let (host, kvm) = (host(), second_level());
    let mut work = ManagerLoop::new(host.clone(), vec![vm(Some(kvm.clone()))], greedy(), plenty());
    work.tick();
    kvm.set_stats(MappingStats { pages_4k: 1, pages_2m: WINDOWS, pages_1g: 0 }); // the guest touched it again
    let report = work.finish();
    let seen: Vec<u64> = report.samples[0].1.iter().map(|sample| sample.mapping.unwrap().pages_2m).collect();
    assert_eq!(seen, [0, WINDOWS]);
}

#[test]
fn totals_that_the_host_cannot_explain_are_a_contradiction() {
    let (host, kvm) = (host(), second_level());
    let never = policy::by_name("never").unwrap().with_defaults();
    let mut work = ManagerLoop::new(host.clone(), vec![vm(Some(kvm.clone()))], never, plenty());
    work.tick();
    kvm.set_stats(MappingStats { pages_4k: 0, pages_2m: WINDOWS, pages_1g: 0 }); // the host has base pages only
    work.tick();
    let check = work.report().kvm_checks[0].unwrap();
    assert_eq!((check.large_at_first, check.large_at_most, check.contradictions), (0, WINDOWS, 1));
    host.make_present(RAM_AT, ram().gpa.bytes(), true);
    work.tick();
    assert_eq!(work.report().kvm_checks[0].unwrap().contradictions, 1, "now the host explains them");
}

#[test]
fn an_action_without_a_mechanism_is_skipped_under_that_name() {
    let host = host();
    let script = Script(vec![vec![demote(0), promote(1, PageSize::Giant1G)]]);
    let memfd = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap();
    let vm = ManagedVm { backing: memfd, ..vm(None) };
    let mut work = ManagerLoop::new(host.clone(), vec![vm], Box::new(script), plenty());
    work.tick();
    assert_eq!(count(work.report(), "none", "skipped_no_mechanism"), 2, "no KVM to hold with, no giant swap");
}

#[test]
fn a_window_the_policy_made_up_is_skipped() {
    let host = host();
    let script = Script(vec![vec![promote(WINDOWS + 7, PageSize::Huge2M)]]);
    let mut work = ManagerLoop::new(host.clone(), vec![vm(None)], Box::new(script), plenty());
    work.tick();
    assert_eq!(count(work.report(), "none", "skipped_not_resident"), 1);
    assert_eq!(host.huge_windows(), 0);
}

#[test]
fn hugetlb_ram_is_never_collapsed() {
    let host = host();
    let mut hugetlb = vm(None);
    hugetlb.backing = BackingConfig::new(BackingKind::Hugetlb, PageSize::Huge2M).unwrap();
    let script = Script(vec![vec![promote(0, PageSize::Huge2M)]]);
    let mut work = ManagerLoop::new(host.clone(), vec![hugetlb], Box::new(script), plenty());
    work.tick();
    assert_eq!(count(work.report(), "none", "skipped_no_mechanism"), 1);
}

#[test]
fn reserved_frames_are_never_collapsed() {
    let host = host();
    let reservable = ManagedVm { backing: BackingConfig::reservable(), ..vm(None) };
    let script = Script(vec![vec![promote(0, PageSize::Huge2M)]]);
    let mut work = ManagerLoop::new(host.clone(), vec![reservable], Box::new(script), plenty());
    work.tick();
    assert_eq!((count(work.report(), "none", "skipped_no_mechanism"), host.huge_windows()), (1, 0));
}

#[test]
fn two_vms_share_one_budget_window_by_window() {
    let host = host();
    let other = RamRange { gpa: ram().gpa, hva: RAM_AT + mib(64) };
    host.make_present(other.hva, other.gpa.bytes(), false);
    let second = ManagedVm { id: VmId(1), ranges: vec![other], ..vm(None) };
    let limits =
        BudgetLimits { copy_per_second: mib(8), cpu_share: PerTenThousand::ALL, burst: Duration::from_secs(1) };
    let config = ManagerConfig { limits, ..ManagerConfig::default() };
    let mut work = ManagerLoop::new(host.clone(), vec![vm(None), second], greedy(), config);
    work.tick();
    let report = work.finish();
    let huge: Vec<Bytes> = report.samples.iter().map(|(_, s)| s.last().unwrap().host.huge_2m).collect();
    assert_eq!(huge, [mib(4), mib(4)], "four windows were allowed, two for each");
}

#[test]
fn an_unknown_slot_is_an_error() {
    let kvm = second_level();
    assert!(kvm.set_dirty_log(SlotId(9), true).is_err());
    assert!(kvm.take_dirty_log(SlotId(0)).is_err(), "the log is off");
    assert!(kvm.resume().is_err(), "nothing is paused");
    assert!(kvm.paging_modes().is_err(), "not paused");
}
