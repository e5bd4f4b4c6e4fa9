//! The loop over external guests, on a host in memory: gates, holes, windows that can never be huge, and the end.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::explain::{Barred, CannotBeHuge, WhyNot};
use wideleaf_memory::gate::{Gate, GateState, KeptHoles, LeftAlone};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{LATEST_ACTIONS_MAX, Live, ManagedVm, Manager, ManagerConfig, ManagerLoop};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::second_level::SecondLevel;
use wideleaf_memory::sensors::guest_tables::{GuestTables, NoTables, TableSource, Walked};
use wideleaf_memory::sensors::kernel_flags::MergedPages;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_policies::policy::{self, Policy};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{
    Action, Budget, BudgetLimits, Cost, Gpa, GpaRange, GuestMapping, Hva, MappingStats, Moment, OutcomeResult,
    PageSize, PerTenThousand, Plan, Refusal, Snapshot, VmId, WindowIndex,
};

use crate::wait_until;

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 8;

fn gpa(first: u64, windows: u64) -> GpaRange {
    GpaRange::new(Gpa::new(0) + mib(2) * first, mib(2) * windows).unwrap()
}

fn ram() -> RamRange {
    RamRange { gpa: gpa(0, WINDOWS), hva: RAM_AT }
}

/// Another process, with all of the RAM present on base pages.
fn host() -> Arc<FakeHost> {
    let host = FakeHost::default();
    host.be_of_another_process();
    host.make_present(RAM_AT, ram().gpa.bytes(), false);
    Arc::new(host)
}

/// A gate that the test controls.
#[derive(Debug)]
struct TestGate {
    state: Mutex<GateState>,
    /// Number of further questions that are answered with "open", whatever the state is.
    open_for: Mutex<u32>,
    keeps_holes: Mutex<Option<KeptHoles>>,
}

impl TestGate {
    fn new(state: GateState) -> Arc<TestGate> {
        let (state, open_for) = (Mutex::new(state), Mutex::new(0));
        Arc::new(TestGate { state, open_for, keeps_holes: Mutex::new(None) })
    }

    fn set(&self, state: GateState) {
        *self.state.lock() = state;
    }

    fn keep_holes(&self, why: Option<KeptHoles>) {
        *self.keeps_holes.lock() = why;
    }
}

impl Gate for TestGate {
    fn state(&self) -> GateState {
        let mut open_for = self.open_for.lock();
        if *open_for > 0 {
            *open_for -= 1;
            return GateState::Open;
        }
        *self.state.lock()
    }

    fn keeps_holes(&self) -> Option<KeptHoles> {
        *self.keeps_holes.lock()
    }
}

fn of_kind(kind: BackingKind) -> ManagedVm {
    let backing = BackingConfig::new(kind, PageSize::Base4K).unwrap();
    ManagedVm::external(VmId(0), vec![ram()], backing, None)
}

fn behind(gate: &Arc<TestGate>) -> ManagedVm {
    ManagedVm { gate: Some(gate.clone()), ..of_kind(BackingKind::Anon) }
}

/// A budget that no test exceeds by accident.
fn plenty() -> ManagerConfig {
    let limits = BudgetLimits {
        copy_per_second: mib(1 << 20),
        cpu_share: PerTenThousand::new(1_000_000),
        burst: Duration::from_secs(1),
    };
    ManagerConfig { limits, ..ManagerConfig::for_external_guests() }
}

fn by_name(policy: &str) -> Box<dyn Policy> {
    policy::by_name(policy).unwrap().with_defaults()
}

fn greedy(host: &Arc<FakeHost>, vm: ManagedVm) -> ManagerLoop {
    ManagerLoop::new(host.clone(), vec![vm], by_name("greedy"), plenty())
}

fn why_not(live: &Live) -> BTreeMap<WhyNot, u64> {
    live.vms[0].why_not.clone()
}

fn only(why: WhyNot) -> BTreeMap<WhyNot, u64> {
    BTreeMap::from([(why, WINDOWS)])
}

#[test]
fn behind_a_closed_gate_windows_are_sensed_and_not_changed() {
    let (host, gate) = (host(), TestGate::new(GateState::Closed(LeftAlone::Migration)));
    let mut work = greedy(&host, behind(&gate));
    assert_eq!((work.tick(), work.tick()), (0, 0));
    assert!(work.report().outcomes.is_empty());
    assert_eq!(why_not(&work.live()), only(WhyNot::LeftAlone(LeftAlone::Migration)));
    assert_eq!(work.live().snapshot.vms[0].resident, [512; WINDOWS as usize]);
    gate.set(GateState::Open);
    assert_eq!((work.tick(), host.huge_windows()), (WINDOWS, WINDOWS));
}

#[test]
fn every_window_has_its_reason_in_the_order_of_the_rows() {
    let (host, gate) = (host(), TestGate::new(GateState::Closed(LeftAlone::Migration)));
    let mut work = greedy(&host, behind(&gate));
    work.tick();
    assert_eq!(reasons_of(&work.live()), vec![Some(WhyNot::LeftAlone(LeftAlone::Migration)); WINDOWS as usize]);
    gate.set(GateState::Open);
    work.tick();
    assert_eq!(reasons_of(&work.live()), vec![None; WINDOWS as usize]);
    let samples = work.live().snapshot.vms[0].access_quality.clone();
    assert!(samples.iter().all(|sample| sample.windows == 0), "no sensor samples this guest: {samples:?}");
}

fn reasons_of(live: &Live) -> Vec<Option<WhyNot>> {
    live.vms[0].reasons.iter().flat_map(|(windows, why)| vec![*why; *windows as usize]).collect()
}

#[test]
fn a_gate_that_opens_is_seen_at_the_next_pulse() {
    let (host, gate) = (host(), TestGate::new(GateState::Closed(LeftAlone::Migration)));
    let hour = Duration::from_secs(3600);
    let config =
        ManagerConfig { tick_shortest: hour, tick_longest: hour, pulse: Some(Duration::from_millis(1)), ..plenty() };
    let manager = Manager::spawn(host.clone(), vec![behind(&gate)], by_name("greedy"), config).unwrap();
    manager.activate();
    wait_until(|| manager.live().ticks == 1);
    gate.set(GateState::Open);
    wait_until(|| host.huge_windows() == WINDOWS);
}

#[test]
fn a_gate_that_opens_is_seen_at_once_where_the_manager_hears_of_it() {
    let (host, gate) = (host(), TestGate::new(GateState::Closed(LeftAlone::Migration)));
    let hour = Duration::from_secs(3600);
    let config = ManagerConfig { tick_shortest: hour, tick_longest: hour, pulse: Some(hour / 2), ..plenty() };
    let manager = Manager::spawn(host.clone(), vec![behind(&gate)], by_name("greedy"), config).unwrap();
    manager.activate();
    wait_until(|| manager.live().ticks == 1);
    gate.set(GateState::Open);
    wait_until(|| {
        // The loop may not wait yet.
        manager.look();
        host.huge_windows() == WINDOWS
    });
}

#[test]
fn a_gate_that_closes_during_a_tick_stops_the_remaining_actions() {
    let (host, gate) = (host(), TestGate::new(GateState::Closed(LeftAlone::Snapshot)));
    *gate.open_for.lock() = 4; // one for the tick, three for windows
    let mut work = greedy(&host, behind(&gate));
    assert_eq!((work.tick(), host.huge_windows()), (3, 3));
    assert_eq!(work.report().outcomes[&("none", "skipped_left_alone")], WINDOWS - 3);
}

#[test]
fn windows_with_holes_are_promoted_unless_the_holes_are_kept() {
    for kept in [None, Some(KeptHoles::GivenBack), Some(KeptHoles::Watched), Some(KeptHoles::HostShort)] {
        let (host, gate) = (host(), TestGate::new(GateState::Open));
        gate.keep_holes(kept);
        let hole = RAM_AT + mib(2) * 3 + kib(64);
        host.make_absent(hole, kib(4));
        let mut work = greedy(&host, behind(&gate));
        work.tick();
        assert_eq!(host.has_page(hole, kib(4)), kept.is_none());
        let holes = kept.map(|why| (WhyNot::Holes(why), 1)).into_iter().collect::<BTreeMap<_, _>>();
        let waiting = holes.len() as u64;
        assert_eq!((why_not(&work.live()), host.huge_windows()), (holes, WINDOWS - waiting));
        host.make_present(hole, kib(4), false);
        work.tick();
        assert_eq!(host.huge_windows(), WINDOWS, "the guest uses all of it now");
    }
}

#[test]
fn a_window_that_is_swapped_out_beyond_khugepageds_limit_waits_and_one_below_it_is_promoted() {
    let host = FakeHost::default();
    host.be_of_another_process();
    // Window 0 is full, 1 has all but 64 pages, 2 all but 65, 3 none; the others were never used.
    host.make_present(RAM_AT, mib(2), false);
    for (window, swapped) in [(1, 64), (2, 65), (3, 512)] {
        let (start, swapped) = (RAM_AT + mib(2) * window, kib(4) * swapped);
        host.make_present(start, mib(2) - swapped, false);
        host.swap_out(start + (mib(2) - swapped), swapped);
    }
    host.set_text("/proc/self/status", "VmSwap:\t2564 kB\n");
    let mut work = greedy(&Arc::new(host), of_kind(BackingKind::Anon));
    assert_eq!(work.tick(), 2);
    let live = work.live();
    assert_eq!(why_not(&live), BTreeMap::from([(WhyNot::NeverTouched, 4), (WhyNot::Swapped, 2)]));
    assert_eq!(live.vms[0].swapped, Some(kib(4) * (64 + 65 + 512)));
}

#[test]
fn windows_that_the_kernel_makes_large_are_counted_apart_from_the_managers() {
    let host = host();
    host.make_absent(RAM_AT, mib(2));
    let never = || ManagerLoop::new(host.clone(), vec![of_kind(BackingKind::Anon)], by_name("never"), plenty());
    let counted = |work: &ManagerLoop| work.live().vms[0].kernel_work.named().map(|(_, windows)| windows);
    let mut work = never();
    work.tick();
    host.make_present(RAM_AT, mib(4), true);
    work.tick();
    assert_eq!(counted(&work), [1, 1, 0]);
    host.make_present(RAM_AT + mib(2), mib(2), false);
    host.fail_call(0, libc::EIO); // a scan that fails is no change
    work.tick();
    work.tick();
    assert_eq!(counted(&work), [1, 1, 1]);
    let mut greedy = greedy(&host, of_kind(BackingKind::Anon));
    assert!(greedy.tick() > 0);
    greedy.tick();
    assert_eq!(counted(&greedy), [0, 0, 0], "all of it was the manager's");
}

/// Demotes every large window, whether it is ready or not.
struct Splitter;

impl Policy for Splitter {
    fn name(&self) -> &'static str {
        "splitter"
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        for vm in &snapshot.vms {
            for row in (0..vm.len()).filter(|row| vm.backing[*row].is_large()) {
                let (vm, window, to) = (vm.vm, vm.windows[row], PageSize::Base4K);
                plan.push(Action::Demote { vm, window, to }, Cost::default());
            }
        }
    }
}

#[test]
fn nothing_is_split_while_a_userfaultfd_is_open() {
    let (host, gate) = (host(), TestGate::new(GateState::Open));
    gate.keep_holes(Some(KeptHoles::Watched));
    greedy(&host, behind(&gate)).tick();
    assert_eq!(host.huge_windows(), WINDOWS, "full windows are promoted");
    let mut work = ManagerLoop::new(host.clone(), vec![behind(&gate)], Box::new(Splitter), plenty());
    work.tick();
    assert_eq!(work.report().outcomes, BTreeMap::from([(("none", "skipped_left_alone"), WINDOWS)]));
    assert_eq!(host.huge_windows(), WINDOWS);
    let is_ready = |work: &ManagerLoop| work.live().snapshot.vms[0].ready_at.iter().any(|at| *at <= host.now());
    assert!(!is_ready(&work), "no policy that keeps the rules names one");
    gate.keep_holes(None);
    work.tick();
    assert_eq!((host.huge_windows(), is_ready(&work)), (0, true));
}

#[test]
fn shared_memory_is_not_collapsed_while_a_userfaultfd_is_open() {
    let (host, gate) = (host(), TestGate::new(GateState::Open));
    gate.keep_holes(Some(KeptHoles::Watched));
    let shared = ManagedVm { gate: Some(gate.clone()), may_collapse_shared: true, ..of_kind(BackingKind::Memfd) };
    let mut work = greedy(&host, shared);
    work.tick();
    assert_eq!(work.report().outcomes, BTreeMap::new());
    assert_eq!(why_not(&work.live()), only(WhyNot::SharedWatched));
    gate.keep_holes(None);
    set_used(&host, 0);
    assert_eq!(work.tick(), 0, "whether it idles is not known yet");
    host.sleep(Duration::from_millis(200));
    assert_eq!((work.tick(), host.huge_windows()), (WINDOWS, WINDOWS));
}

#[test]
fn pages_that_disappear_after_a_scan_are_not_brought_back() {
    let (host, gate) = (host(), TestGate::new(GateState::Open));
    gate.keep_holes(Some(KeptHoles::GivenBack));
    let given_back = host.clone();
    host.when_scanned(move || given_back.make_absent(RAM_AT, kib(4)));
    let mut work = greedy(&host, behind(&gate));
    work.tick();
    assert_eq!(work.report().outcomes[&("collapse", "skipped_hole")], 1);
    assert!(!host.has_page(RAM_AT, kib(4)));
}

#[test]
fn windows_that_can_never_be_huge_are_not_requested_and_are_explained() {
    let misaligned =
        ManagedVm { ranges: vec![RamRange { hva: RAM_AT + kib(4), ..ram() }], ..of_kind(BackingKind::Anon) };
    let marked = Barred { range: gpa(0, WINDOWS), why: CannotBeHuge::Marked };
    let marked = ManagedVm { barred: vec![marked], ..of_kind(BackingKind::Anon) };
    let shared = of_kind(BackingKind::Memfd);
    for (vm, why) in
        [(misaligned, CannotBeHuge::Misaligned), (marked, CannotBeHuge::Marked), (shared, CannotBeHuge::SharedStalls)]
    {
        let host = host();
        host.make_present(RAM_AT + ram().gpa.bytes(), kib(4), false);
        let mut work = greedy(&host, vm);
        work.tick();
        assert!(work.report().outcomes.is_empty(), "{why:?}");
        assert_eq!(why_not(&work.live()), only(WhyNot::CannotBeHuge(why)));
    }
}

/// Sets the CPU time that the guest's process has used, in units of 10 ms.
fn set_used(host: &FakeHost, ticks: u64) {
    host.set_text("/proc/self/stat", &format!("7 (qemu) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 9 0 1\n"));
}

#[test]
fn shared_memory_is_collapsed_if_that_is_allowed_while_the_guest_idles() {
    let host = host();
    let allowed = ManagedVm { may_collapse_shared: true, ..of_kind(BackingKind::Memfd) };
    let mut work = greedy(&host, allowed);
    set_used(&host, 0);
    assert_eq!((work.tick(), host.huge_windows()), (0, 0), "whether it idles is not known yet");
    assert_eq!(why_not(&work.live()), only(WhyNot::StallBudgetSpent));
    assert_eq!(work.report().outcomes[&("none", "skipped_stall_budget")], WINDOWS);
    host.sleep(Duration::from_millis(200));
    set_used(&host, 1);
    assert_eq!((work.tick(), host.huge_windows()), (WINDOWS, WINDOWS));
}

#[test]
fn shared_memory_of_a_guest_at_work_is_collapsed_at_a_hundredth_of_its_time() {
    let host = host();
    let mut work = greedy(&host, ManagedVm { may_collapse_shared: true, ..of_kind(BackingKind::Memfd) });
    let mut done = 0;
    // A collapse takes the fake 0.6 ms, which is a hundredth of 60 ms.
    for tick in 0..2 * WINDOWS {
        set_used(&host, 3 * tick);
        let now = work.tick();
        assert!(now <= 1, "one window at once, not {now}");
        done += now;
        host.sleep(Duration::from_millis(30));
    }
    assert!(done.abs_diff(WINDOWS) <= 1, "{done}");
}

#[test]
fn a_part_that_can_never_be_huge_does_not_keep_the_others_back() {
    let host = host();
    let barred = vec![Barred { range: gpa(2, 3), why: CannotBeHuge::OnDisk }];
    let mut work = greedy(&host, ManagedVm { barred, ..of_kind(BackingKind::Anon) });
    assert_eq!(work.tick(), WINDOWS - 3);
    assert_eq!(why_not(&work.live()), BTreeMap::from([(WhyNot::CannotBeHuge(CannotBeHuge::OnDisk), 3)]));
}

/// A kernel that has merged the first page of window 2, which it keeps in frame 1, and no other.
fn merged_pages() -> MergedPages {
    const PRESENT: u64 = 1 << 63;
    const KSM: u64 = 1 << 21;
    let (pagemap, kpageflags) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let entry_of = |hva: Hva| hva.get() / kib(4).get() * 8;
    pagemap.set_len(entry_of(RAM_AT + ram().gpa.bytes())).unwrap();
    pagemap.write_all_at(&(PRESENT | 1).to_ne_bytes(), entry_of(RAM_AT + mib(4))).unwrap();
    kpageflags.write_all_at(&KSM.to_ne_bytes(), 8).unwrap();
    MergedPages::of_files(pagemap, kpageflags)
}

#[test]
fn a_window_with_merged_pages_stays_as_it_is_and_is_checked_again_later() {
    let host = host();
    let mut work = greedy(&host, ManagedVm { merged: Some(merged_pages()), ..of_kind(BackingKind::Anon) });
    work.tick();
    work.tick();
    assert_eq!(work.report().outcomes[&("collapse", "refused_merged")], 1, "it backs off");
    assert_eq!(host.huge_windows(), WINDOWS - 1);
    assert_eq!(why_not(&work.live()), BTreeMap::from([(WhyNot::Merged, 1)]));
}

#[test]
fn each_window_that_is_not_huge_has_one_reason() {
    // window 0: huge   1: never touched   2: refused   3..8: no budget for more than one window at once
    let host = host();
    host.make_present(RAM_AT, mib(2), true);
    host.make_absent(RAM_AT + mib(2), mib(2));
    host.fail_advice(Advice::Collapse, libc::EBUSY, 1);
    let limits = BudgetLimits { copy_per_second: mib(2), ..plenty().limits };
    let config = ManagerConfig { limits, ..plenty() };
    let vms = vec![of_kind(BackingKind::Anon)];
    let mut work = ManagerLoop::new(host.clone(), vms, by_name("greedy"), config);
    work.tick();
    let expected = BTreeMap::from([
        (WhyNot::NeverTouched, 1),
        (WhyNot::BackingOff(Refusal::Busy), 1),
        (WhyNot::BudgetSpent, WINDOWS - 3),
    ]);
    assert_eq!(why_not(&work.live()), expected);
    let policy = by_name("never");
    let mut never = ManagerLoop::new(host.clone(), vec![of_kind(BackingKind::Anon)], policy, plenty());
    never.tick();
    let expected = BTreeMap::from([(WhyNot::NeverTouched, 1), (WhyNot::PolicyNeverPromotes, WINDOWS - 2)]);
    assert_eq!(why_not(&never.live()), expected);
}

#[test]
fn a_policy_s_unanswered_questions_are_reported() {
    let mut work = ManagerLoop::new(host(), vec![of_kind(BackingKind::Anon)], by_name("coverage"), plenty());
    work.tick();
    let unanswered = &work.live().unanswered;
    assert!(unanswered.iter().any(|line| line.contains("mapped in this process")), "{unanswered:?}");
}

#[test]
fn windows_that_a_tick_promoted_are_large_in_its_live_report() {
    let host = host();
    let mut work = greedy(&host, of_kind(BackingKind::Anon));
    assert_eq!((work.live().ticks, work.live().vms.len()), (0, 0), "the live report is empty before the first tick");
    work.tick();
    let live = work.live();
    assert!(live.snapshot.vms[0].backing.iter().all(|backing| backing.is_large()));
    assert_eq!((why_not(&live), live.copied), (BTreeMap::new(), mib(2) * WINDOWS));
    assert_eq!((live.unavailable_ns.len(), live.outcomes[&("collapse", "done")]), (WINDOWS, WINDOWS));
    let windows: Vec<u64> = live.latest.iter().map(|action| action.window.get()).collect();
    assert_eq!(windows, (0..WINDOWS).collect::<Vec<_>>());
    assert!(live.latest.iter().all(|action| action.result == OutcomeResult::Done && action.mechanism == "collapse"));
    for _ in 0..LATEST_ACTIONS_MAX {
        host.make_present(RAM_AT, mib(2), false);
        work.tick();
    }
    assert_eq!(work.live().latest.len(), LATEST_ACTIONS_MAX);
    assert_eq!(live.latest.len() as u64, WINDOWS, "an earlier snapshot keeps its values");
}

#[test]
fn new_limits_hold_from_the_next_tick_on() {
    let host = host();
    let none = BudgetLimits { cpu_share: PerTenThousand::new(0), ..plenty().limits };
    let manager = Manager::spawn(
        host.clone(),
        vec![of_kind(BackingKind::Anon)],
        by_name("greedy"),
        ManagerConfig { limits: none, tick_longest: Duration::from_millis(1), ..plenty() },
    )
    .unwrap();
    manager.activate();
    wait_until(|| manager.live().budget_refusals > 0);
    assert_eq!(host.huge_windows(), 0);
    manager.set_limits(plenty().limits);
    // Time passes only when the test advances it: memory that arrives must be allowed by the new limits.
    wait_until(|| {
        host.sleep(Duration::from_millis(1));
        host.huge_windows() == WINDOWS
    });
    // A tick publishes its report after its actions.
    wait_until(|| manager.live().limits == plenty().limits);
}

#[test]
fn a_paused_manager_senses_and_does_not_act() {
    let host = host();
    let vms = vec![of_kind(BackingKind::Anon)];
    let manager = Manager::spawn(host.clone(), vms, by_name("greedy"), plenty()).unwrap();
    manager.pause();
    wait_until(|| manager.live().ticks > 0);
    assert_eq!(why_not(&manager.live()), only(WhyNot::LeftAlone(LeftAlone::Asked)));
    manager.activate();
    wait_until(|| host.huge_windows() == WINDOWS);
    manager.pause();
    wait_until(|| manager.live().vms[0].gate == GateState::Closed(LeftAlone::Asked));
    host.make_present(RAM_AT, mib(2), false);
    manager.pause(); // a tick at once
    let ticks = manager.live().ticks;
    wait_until(|| manager.live().ticks > ticks);
    assert_eq!(manager.stop().done("collapse"), WINDOWS);
}

#[test]
fn a_loop_without_a_guest_ends_by_itself_and_keeps_its_report() {
    let by_gate = TestGate::new(GateState::Open);
    let manager = Manager::spawn(host(), vec![behind(&by_gate)], by_name("greedy"), plenty()).unwrap();
    manager.activate();
    wait_until(|| manager.live().copied == mib(2) * WINDOWS && manager.live().ticks > 1);
    assert!(!manager.has_ended());
    by_gate.set(GateState::Gone);
    manager.activate(); // a tick at once
    wait_until(|| manager.has_ended());
    assert_eq!(manager.live().vms[0].gate, GateState::Gone);
    let report = manager.stop();
    assert_eq!((report.done("collapse"), report.panics.len(), report.sensor_failures.len()), (WINDOWS, 0, 0));
    let (_, samples) = &report.samples[0];
    assert_eq!(samples.last().unwrap().host.huge_2m, mib(2) * WINDOWS, "its last reading");
}

#[test]
fn a_guest_that_ends_at_any_call_ends_the_loop_or_is_refused_and_nothing_panics() {
    let (at_start, calls) = {
        let host = host();
        let mut work = greedy(&host, of_kind(BackingKind::Anon));
        let at_start = host.calls();
        work.tick();
        (at_start, host.calls())
    };
    let mut not_noticed = Vec::new();
    for call in 0..calls {
        let host = host();
        host.fail_call(call, libc::ESRCH);
        let mut work = greedy(&host, of_kind(BackingKind::Anon));
        work.tick();
        let refused = work.report().outcomes.get(&("collapse", "refused_gone")).copied().unwrap_or(0);
        let noticed = u64::from(work.has_ended()) + refused;
        assert!(noticed <= 1, "call {call}");
        not_noticed.extend((noticed == 0).then_some(call));
        assert!(work.report().sensor_failures.is_empty(), "its end is not a failure of a sensor");
    }
    // Before the first tick the loop asks for the host's nodes alone, at its start for the memory in use, and before
    // the first request for the host's free blocks. It does without them, and other calls show the end.
    assert!(not_noticed.len() as u64 == at_start + 2 && not_noticed[at_start as usize] == at_start, "{not_noticed:?}");
}

#[test]
fn kvms_totals_are_compared_with_all_kinds_of_ram_together() {
    // KVM has more large mappings than either kind has huge windows, and as many as both have.
    let (host, kvm) = (host(), Arc::new(FakeSecondLevel::new(&[])));
    let other = RamRange { hva: Hva::new(1 << 41), gpa: GpaRange::new(Gpa::new(1 << 32), ram().gpa.bytes()).unwrap() };
    for start in [RAM_AT, other.hva] {
        host.make_present(start, ram().gpa.bytes(), true);
    }
    let both = |id, ranges, kind| ManagedVm {
        id: VmId(id),
        ranges,
        second_level: Some(kvm.clone() as Arc<dyn SecondLevel>),
        ..of_kind(kind)
    };
    let vms = vec![both(0, vec![ram()], BackingKind::Anon), both(1, vec![other], BackingKind::Memfd)];
    let mut work = ManagerLoop::new(host.clone(), vms, by_name("never"), plenty());
    let stats = |pages_2m| MappingStats { pages_4k: 9, pages_2m, pages_1g: 0 };
    kvm.set_stats(stats(2 * WINDOWS));
    work.tick();
    let seen: Vec<_> = work.live().snapshot.vms.iter().map(|vm| vm.mapping).collect();
    assert_eq!(seen, [Some(stats(2 * WINDOWS)); 2]);
    let check = |work: &ManagerLoop| work.report().kvm_checks.clone();
    assert_eq!((check(&work)[0].unwrap().contradictions, check(&work)[1]), (0, None));
    kvm.set_stats(stats(2 * WINDOWS + 3));
    work.tick();
    assert_eq!(check(&work)[0].unwrap().contradictions, 1, "a window or two may change between the two readings");
}

#[test]
fn one_guest_that_is_gone_does_not_end_another() {
    let (host, gate) = (host(), TestGate::new(GateState::Gone));
    let other = RamRange { hva: Hva::new(1 << 41), ..ram() };
    host.make_present(other.hva, other.gpa.bytes(), false);
    let second = ManagedVm { id: VmId(1), ranges: vec![other], ..of_kind(BackingKind::Anon) };
    let mut work = ManagerLoop::new(host.clone(), vec![behind(&gate), second], by_name("greedy"), plenty());
    assert_eq!((work.tick(), work.has_ended()), (WINDOWS, false));
    assert_eq!(host.huge_windows(), WINDOWS);
}

/// Guest page tables set by the test, read on every tick.
#[derive(Default)]
struct TestTables(Mutex<Vec<Result<Walked, NoTables>>>);

impl TableSource for TestTables {
    fn every(&self) -> Duration {
        Duration::ZERO
    }

    fn sample(&self) -> Result<Walked, NoTables> {
        self.0.lock().pop().unwrap_or_else(|| Err(NoTables::NotNow("no table is left".into())))
    }
}

#[test]
fn the_known_tables_of_an_external_guest_reach_the_policy() {
    use GuestMapping::{Base4K, Huge2M, Unknown, Unmapped};
    let walked = |is_complete, mappings: &[GuestMapping]| {
        let windows = mappings.iter().enumerate().map(|(row, of)| (WindowIndex::new(row as u64), *of)).collect();
        Ok(Walked {
            tables: GuestTables { windows, tables: 1, is_complete },
            waits: 1,
            cpu_elsewhere: Duration::from_secs(7),
        })
    };
    let looks = [
        (walked(true, &[Huge2M, Unmapped]), [Huge2M, Unmapped]),
        (walked(false, &[Base4K, Unmapped]), [Base4K, Unknown]),
        (Err(NoTables::NotNow("it does not answer".into())), [Base4K, Unknown]),
        (Err(NoTables::NotThese("32 bits".into())), [Unknown, Unknown]),
        (walked(true, &[Huge2M, Huge2M]), [Huge2M, Huge2M]),
        (Err(NoTables::TooOld("it hangs".into())), [Unknown, Unknown]),
    ];
    let tables = Arc::<TestTables>::default();
    let vm = ManagedVm { guest_tables: Some(tables.clone()), ..of_kind(BackingKind::Anon) };
    let mut work = ManagerLoop::new(host(), vec![vm], by_name("aligned"), plenty());
    for (look, expected) in looks {
        tables.0.lock().push(look);
        // The sensor reads them at the end of a tick, and the next tick shows them.
        work.tick();
        work.tick();
        assert_eq!(work.live().snapshot.vms[0].guest_mapping[..2], expected);
    }
    let cost = work.report().sensor_costs["guest_tables"];
    assert_eq!((cost.samples, cost.waits), (3, 3));
    assert!(cost.cpu >= Duration::from_secs(21), "including CPU time of other processes: {:?}", cost.cpu);
}
