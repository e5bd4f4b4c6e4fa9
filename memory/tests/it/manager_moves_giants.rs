//! The loop and giants, on the fake host: a giant is moved in a thread of its own, has no other user during the
//! move, and the outcome is recorded when the move ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use wideleaf_memory::actuators::giant::SwapLimits;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop, ManagerReport};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::second_level::{PagingMode, SecondLevelError, Slot, SlotId};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, Host, Paging, SecondLevel};
use wideleaf_policies::policy::{self, Policy};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{
    Action, Backing, Budget, BudgetLimits, Bytes, Cost, Gpa, GpaRange, MappingStats, Moment, PageSize, PerTenThousand,
    Plan, Snapshot, VmId, WindowIndex,
};

const VM: VmId = VmId(0);
const FIRST: WindowIndex = WindowIndex::new(0);
const NEIGHBOUR: WindowIndex = WindowIndex::new(1);
const SECOND_GIANT: WindowIndex = WindowIndex::new(512);
pub(crate) const PROMOTE: Action = Action::Promote { vm: VM, window: FIRST, to: PageSize::Giant1G };
const DEMOTE: Action = Action::Demote { vm: VM, window: FIRST, to: PageSize::Base4K };
/// Upper bound of ticks in these tests.
const TICKS_MAX: u32 = 100_000;

/// A second level with pauses that wait until the test opens the gate, so that a giant is under way for as long as
/// the test needs.
pub(crate) struct Gated {
    inner: FakeSecondLevel,
    is_open: Mutex<bool>,
    opened: Condvar,
    is_paused: AtomicBool,
    in_pause: Mutex<Option<Hook>>,
}

/// An action that runs once.
type Hook = Box<dyn FnOnce() + Send>;

impl Gated {
    fn new(is_open: bool) -> Arc<Gated> {
        let slots = [0, 1].map(|giant| GpaRange::new(Gpa::new(0) + gib(giant), gib(1)).unwrap());
        Arc::new(Gated {
            inner: FakeSecondLevel::new(&slots),
            is_open: Mutex::new(is_open),
            opened: Condvar::new(),
            is_paused: AtomicBool::new(false),
            in_pause: Mutex::default(),
        })
    }

    /// Sets an action for the next pause, before the exchange; the thread that moves the giant runs it.
    pub(crate) fn in_pause(&self, happens: impl FnOnce() + Send + 'static) {
        *self.in_pause.lock() = Some(Box::new(happens));
    }

    fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }
}

impl SecondLevel for Gated {
    fn paging(&self) -> Paging {
        self.inner.paging()
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.inner.mapping_stats()
    }

    fn slots(&self) -> Vec<Slot> {
        self.inner.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        self.inner.set_dirty_log(slot, is_on)
    }

    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let hook = self.in_pause.lock().take_if(|_| self.is_paused.load(Ordering::Relaxed));
        hook.into_iter().for_each(|happens| happens());
        self.inner.take_dirty_log(slot)
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        self.opened.wait_while(&mut self.is_open.lock(), |is_open| !*is_open);
        self.inner.pause()?;
        self.is_paused.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        self.inner.resume()?;
        self.is_paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        self.inner.paging_modes()
    }
}

/// A policy that plans what the test gives it, a list a tick, and shows its view of the first window.
#[derive(Clone, Default)]
pub(crate) struct Script(pub(crate) Arc<Mutex<ScriptState>>);

#[derive(Default)]
pub(crate) struct ScriptState {
    plans: VecDeque<Vec<Action>>,
    /// Backing of that window, and the moment from which it may be named.
    seen: Option<(Backing, Moment)>,
    pub(crate) giant_pages_free: u64,
}

impl Script {
    pub(crate) fn then(&self, actions: &[Action]) {
        self.0.lock().plans.push_back(actions.to_vec());
    }

    fn seen(&self) -> (Backing, Moment) {
        self.0.lock().seen.unwrap()
    }
}

impl Policy for Script {
    fn name(&self) -> &'static str {
        "script"
    }

    fn needs(&self) -> policy::Needs {
        policy::Needs { host_memory: true, ..policy::Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        let mut state = self.0.lock();
        state.seen = Some((snapshot.vms[0].backing[0], snapshot.vms[0].ready_at[0]));
        state.giant_pages_free = snapshot.host.unwrap().giant_pages_free;
        state.plans.pop_front().unwrap_or_default().into_iter().for_each(|action| plan.push(action, Cost::default()));
    }
}

/// A VM of two giants with some words in the first, and a pool of one free giant page.
pub(crate) struct Bed {
    pub(crate) host: Arc<FakeHost>,
    pub(crate) second_level: Arc<Gated>,
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) pool: tempfile::TempDir,
    pub(crate) work: ManagerLoop,
}

/// Places of the words: in two windows, and at the giant's end.
fn places() -> impl Iterator<Item = Gpa> {
    [Bytes::ZERO, mib(2), gib(1) - mib(2)].into_iter().map(|offset| Gpa::new(0) + offset)
}

fn word(ram: &GuestRam, place: Gpa) -> &AtomicU64 {
    &ram.words(ram.ranges()[0])[(place.get() / 8) as usize]
}

impl Bed {
    pub(crate) fn new(policy: Box<dyn Policy>, is_open: bool) -> Bed {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), gib(2)).unwrap()], backing).unwrap();
        let host = Arc::<FakeHost>::default();
        host.set_text("/proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n");
        for place in places() {
            word(&ram, place).store(place.get() + 1, Ordering::Relaxed);
            host.make_present(ram.hva(place).unwrap(), PageSize::Base4K.bytes(), false);
        }
        let pool = pool_of_one();
        let second_level = Gated::new(is_open);
        let vm = ManagedVm::new(VM, ram.clone(), Some(second_level.clone()));
        let work = ManagerLoop::new(host.clone(), vec![vm], policy, plenty());
        let patient = SwapLimits { pause_max: Duration::from_secs(60), rounds_max: 8 };
        let work = work.with_giants_from(HugetlbPools::at(pool.path()), patient);
        Bed { host, second_level, ram, pool, work }
    }

    /// Ticks until this mechanism has such a result.
    pub(crate) fn tick_until(&mut self, mechanism: &str, result: &str) {
        self.tick_until_report(|report| count(report, mechanism, result) > 0);
    }

    pub(crate) fn tick_until_report(&mut self, is_there: impl Fn(&ManagerReport) -> bool) {
        for _ in 0..TICKS_MAX {
            if is_there(self.work.report()) {
                return;
            }
            self.work.tick();
            self.host.sleep(Duration::from_millis(10));
            std::thread::yield_now();
        }
        panic!("not in {TICKS_MAX} ticks: {:?}", self.work.report().outcomes);
    }

    pub(crate) fn assert_words(&self) {
        places().for_each(|place| assert_eq!(word(&self.ram, place).load(Ordering::Relaxed), place.get() + 1));
    }
}

fn pool_of_one() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join(POOL)).unwrap();
    for (name, value) in [("nr_hugepages", 1), ("free_hugepages", 1), ("resv_hugepages", 0), ("surplus_hugepages", 0)] {
        std::fs::write(dir.path().join(POOL).join(name), format!("{value}\n")).unwrap();
    }
    dir
}

pub(crate) const POOL: &str = "sys/kernel/mm/hugepages/hugepages-1048576kB";

/// A budget that no test exceeds by accident.
fn plenty() -> ManagerConfig {
    let limits = BudgetLimits {
        copy_per_second: gib(1 << 10),
        cpu_share: PerTenThousand::new(1_000_000),
        burst: Duration::from_secs(1),
    };
    ManagerConfig { limits, ..ManagerConfig::default() }
}

pub(crate) fn count(report: &ManagerReport, mechanism: &str, result: &str) -> u64 {
    report.outcomes.iter().filter(|((m, r), _)| (*m, *r) == (mechanism, result)).map(|(_, n)| n).sum()
}

#[test]
fn a_giant_goes_there_and_back_and_each_outcome_is_recorded_when_it_ends() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), true);
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "done");
    assert_eq!(script.0.lock().giant_pages_free, 1);
    script.then(&[DEMOTE]);
    bed.tick_until("giant_demote", "done");
    assert_ne!(script.seen().0, Backing::Giant1G, "the snapshot of the tick in which it ended shows its new backing");
    bed.assert_words();
    let report = bed.work.finish();
    assert_eq!(report.bloat, gib(1) - PageSize::Base4K.bytes() * 3);
    assert_eq!(report.outcomes.len(), 2, "{:?}", report.outcomes);
}

#[test]
fn on_a_giant_page_windows_look_giant_and_single_windows_are_left_alone() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), true);
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "done");
    script.then(&[
        Action::Promote { vm: VM, window: NEIGHBOUR, to: PageSize::Huge2M },
        Action::Release { vm: VM, window: NEIGHBOUR },
    ]);
    bed.work.tick();
    assert_eq!(script.seen(), (Backing::Giant1G, Moment::START));
    let report = bed.work.finish();
    assert_eq!(count(&report, "none", "skipped_no_mechanism"), 2, "{:?}", report.outcomes);
    let (_, samples) = &report.samples[0];
    assert_eq!(samples.last().unwrap().host.giant_1g, gib(1));
}

#[test]
fn while_a_giant_is_under_way_no_other_action_can_change_it() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), false);
    let others = [
        Action::Promote { vm: VM, window: NEIGHBOUR, to: PageSize::Huge2M },
        Action::Demote { vm: VM, window: NEIGHBOUR, to: PageSize::Base4K },
        Action::Release { vm: VM, window: NEIGHBOUR },
    ];
    script.then(&[&[PROMOTE][..], &others].concat()); // in the same tick, too
    script.then(&others);
    bed.work.tick();
    bed.work.tick();
    assert_eq!(script.seen().1, Moment::after_start(Duration::MAX), "a policy that keeps to its contract names none");
    let report = bed.work.report();
    assert_eq!(count(report, "none", "skipped_giant_under_way"), 6, "{:?}", report.outcomes);
    assert_eq!(bed.host.huge_windows(), 0);
    bed.second_level.open();
    bed.tick_until("giant_promote", "done");
    bed.assert_words();
}

#[test]
fn a_window_named_in_the_same_plan_as_its_giant_is_left_alone_in_any_order() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), false);
    let window = Action::Promote { vm: VM, window: PROMOTE.window(), to: PageSize::Huge2M };
    script.then(&[window, PROMOTE]);
    bed.work.tick();
    assert_eq!(count(bed.work.report(), "collapse", "done"), 0, "{:?}", bed.work.report().outcomes);
    bed.second_level.open();
    bed.tick_until("giant_promote", "done");
    bed.assert_words();
}

#[test]
fn giants_are_moved_one_at_a_time_and_other_windows_in_parallel() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), false);
    let elsewhere = bed.ram.hva(SECOND_GIANT.start()).unwrap();
    bed.host.make_present(elsewhere, mib(2), false);
    let second = Action::Promote { vm: VM, window: SECOND_GIANT, to: PageSize::Giant1G };
    let huge = Action::Promote { vm: VM, window: SECOND_GIANT, to: PageSize::Huge2M };
    script.then(&[PROMOTE, second, huge]);
    bed.work.tick();
    assert_eq!(count(bed.work.report(), "giant_promote", "skipped_giant_under_way"), 1);
    assert_eq!(count(bed.work.report(), "collapse", "done"), 1, "{:?}", bed.work.report().outcomes);
    bed.second_level.open();
    bed.tick_until("giant_promote", "done");
    script.then(&[second]);
    bed.work.tick();
    let report = bed.work.finish();
    assert_eq!(
        count(&report, "giant_promote", "done"),
        2,
        "a skip causes no back-off, and the loop waits for the last one"
    );
}

#[test]
fn a_stopped_loop_waits_for_the_giant_and_counts_it() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), false);
    script.then(&[PROMOTE]);
    bed.work.tick();
    let gate = bed.second_level.clone();
    let opener = std::thread::spawn(move || gate.open());
    let report = bed.work.finish();
    opener.join().unwrap();
    assert_eq!(count(&report, "giant_promote", "done"), 1);
    assert_eq!(report.samples[0].1.last().unwrap().host.giant_1g, gib(1));
    assert!(matches!(bed.second_level.resume(), Err(SecondLevelError::WrongState(_))), "nothing is paused");
}

#[test]
fn kvm_s_totals_are_not_compared_while_a_giant_is_under_way() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), false);
    script.then(&[PROMOTE]);
    bed.work.tick();
    // The exchange comes between the two readings of a tick: KVM maps pages that the host's tables did not have
    // yet.
    bed.second_level.inner.set_stats(MappingStats { pages_2m: 512, ..MappingStats::default() });
    bed.work.tick();
    bed.second_level.open();
    let report = bed.work.finish();
    assert_eq!(report.kvm_checks[0].unwrap().contradictions, 0);
    assert_eq!(report.kvm_checks[0].unwrap().large_at_most, 512, "it is compared again after the move");
}

#[test]
fn a_giant_that_is_refused_backs_off_as_its_first_window() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), true);
    bed.host.cut_mappings(); // not one mapping: not eligible
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "refused_not_eligible");
    script.then(&[PROMOTE]);
    bed.work.tick();
    assert!(script.seen().1 > bed.host.now(), "the policy learns it");
    assert_eq!(count(bed.work.report(), "giant_promote", "skipped_backing_off"), 1);
    bed.assert_words();
}

#[test]
fn if_any_call_fails_the_giant_is_promoted_in_the_end() {
    /// Upper bound of the calls of the host or the second level until a giant is in place.
    const CALLS: u64 = 16;
    for (call, is_of_host) in (0..CALLS).flat_map(|call| [(call, true), (call, false)]) {
        let giant = policy::by_name("giant").unwrap().with_defaults();
        let mut bed = Bed::new(giant, true);
        match is_of_host {
            true => bed.host.fail_call(call, libc::EAGAIN),
            false => bed.second_level.inner.fail_call(call, libc::EAGAIN),
        }
        // Ticks until it is `done`: if only the last check fails, the giant is in place but reported as refused,
        // since the check did not see it.
        let is_there =
            |report: &ManagerReport| report.samples[0].1.last().is_some_and(|sample| sample.host.giant_1g == gib(1));
        bed.tick_until_report(is_there);
        bed.assert_words();
        let report = bed.work.finish();
        assert!(is_there(&report), "call {call}: {:?}", report.outcomes);
    }
}

/// Asserts that the VM is left alone: the loop asks it nothing more, and requests for it are not carried out.
fn assert_left_alone(bed: &mut Bed, script: &Script) {
    let panics = &bed.work.report().panics;
    assert_eq!(panics.len(), 1, "{panics:?}");
    assert!(panics[0].contains("vm 0 is left alone") && panics[0].contains("as by a defect of wideleaf"), "{panics:?}");
    script.then(&[
        Action::Promote { vm: VM, window: SECOND_GIANT, to: PageSize::Giant1G },
        Action::Promote { vm: VM, window: SECOND_GIANT, to: PageSize::Huge2M },
    ]);
    bed.work.tick();
    assert_eq!(script.seen().1, Moment::after_start(Duration::MAX), "a policy that keeps to its contract names none");
    let report = bed.work.report();
    assert_eq!(count(report, "giant_promote", "skipped_no_mechanism"), 1, "{:?}", report.outcomes);
    assert_eq!(count(report, "none", "skipped_no_mechanism"), 1, "{:?}", report.outcomes);
}

#[test]
fn a_panic_in_the_pause_lets_the_guest_go_on_and_its_vm_alone() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), true);
    bed.second_level.in_pause(|| panic!("as by a defect of wideleaf"));
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "refused_other");
    assert!(matches!(bed.second_level.resume(), Err(SecondLevelError::WrongState(_))), "nothing is paused");
    assert!(bed.second_level.slots().iter().all(|slot| !slot.is_dirty_logged));
    bed.assert_words();
    assert_eq!(count(bed.work.report(), "giant_promote", "guest_stuck"), 0);
    assert_left_alone(&mut bed, &script);
}

#[test]
fn a_panic_in_the_exchange_is_counted_as_a_guest_that_is_stuck() {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), true);
    let (host, start) = (bed.host.clone(), bed.ram.base());
    bed.second_level.in_pause(move || host.panic_at(start)); // the thread that populates the giant panics
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "guest_stuck");
    assert_left_alone(&mut bed, &script);
    assert!(bed.second_level.resume().is_ok(), "it is paused");
    assert!(bed.ram.claims().is_under_way(FIRST) && bed.ram.claims().is_on_giant_page(FIRST), "the state at the panic");
}

#[test]
fn without_a_free_page_in_the_pool_the_policy_goes_on_with_huge_ones() {
    let mut bed = Bed::new(policy::by_name("giant").unwrap().with_defaults(), true);
    std::fs::write(bed.pool.path().join(POOL).join("free_hugepages"), "0\n").unwrap();
    bed.work.tick();
    assert_eq!(count(bed.work.report(), "giant_promote", "refused_no_huge_page"), 0, "no request without success");
    assert_eq!(count(bed.work.report(), "collapse", "done"), 3, "{:?}", bed.work.report().outcomes);
}

#[test]
fn a_process_without_a_second_level_has_no_giants() {
    let script = Script::default();
    let Bed { host, ram, .. } = Bed::new(Box::new(script.clone()), true);
    let vm = ManagedVm::new(VM, ram, None);
    let mut work = ManagerLoop::new(host, vec![vm], Box::new(script.clone()), plenty());
    script.then(&[PROMOTE]);
    work.tick();
    assert_eq!(count(work.report(), "none", "skipped_no_mechanism"), 1);
    assert_eq!(script.0.lock().giant_pages_free, 0, "independent of the pool");
}
