//! `auto` while the host is short of memory: which huge windows it gives up, how, and when they come back. Windows are
//! drawn as in `scenarios.rs`.
//!
//! The numbers: a base page is worth 1000 cycles a second. The busiest window of a guest on base pages saves
//! 170 000 × used / 512 misses × 20 cycles. A release costs 0.8 M cycles, a split 0.36 M and a copy 1.12 M, of which
//! one and a half times are required within a minute.

use std::time::Duration;

use proptest::prelude::*;
use wideleaf_policies::policy::KeptSmall;
use wideleaf_policies::units::gib;
use wideleaf_policies::{
    AccessHistory, Action, Backing, GuestMapping, HostMemory, HugePagePrice, HugePages, MappingStats, Moment,
    OutcomeResult, PageSize, Refusal, SampleQuality, Skip, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use crate::drawn::{Desk, HOT, IDLE, PROOF, promote, samples, seconds, vm_with};

/// A host with 100 GiB, of which `gibibytes` are in use: short from 85 on, and until there are fewer than 70.
fn used(gibibytes: u64, vm: VmSnapshot) -> Snapshot {
    let host = HostMemory { total: gib(100), available: gib(100 - gibibytes), ..HostMemory::default() };
    Snapshot { host: Some(host), vms: vec![vm] }
}

fn short(vm: VmSnapshot) -> Snapshot {
    used(90, vm)
}

fn release(window: u64) -> Action {
    Action::Release { vm: VmId(0), window: WindowIndex::new(window) }
}

fn demote(window: u64) -> Action {
    Action::Demote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Base4K }
}

fn busiest() -> AccessHistory {
    samples(HOT).with_touches_per_s(Some(1_000_000))
}

/// Huge windows of a guest on base pages, with this access, of which `in_use[i]` pages of window i are no zero pages.
fn huge(access: AccessHistory, in_use: &[u16]) -> VmSnapshot {
    vm_with(0, &"H".repeat(in_use.len()), |at, row| {
        (row.access, row.guest_mapping, row.zero) = (access, GuestMapping::Base4K, Some(512 - in_use[at]));
    })
}

/// Cold windows without zero pages.
fn cold(windows: usize) -> VmSnapshot {
    huge(samples(IDLE), &vec![512; windows])
}

/// The plan of a policy that has seen this VM for a minute, in which its zero pages stayed zero.
fn plan_when_short(vm: VmSnapshot) -> Vec<Action> {
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.plan(&used(50, vm.clone()), seconds(0)), []);
    desk.plan(&short(vm), seconds(60))
}

#[test]
fn a_sparse_hot_window_is_split_while_memory_is_short_and_left_while_it_is_not() {
    let sparse = huge(busiest(), &[12]);
    assert_eq!(plan_when_short(sparse.clone()), [release(0)]);
    let mut desk = Desk::new(PROOF);
    let plans: Vec<_> = (0..60).map(|now| desk.plan(&used(84, sparse.clone()), seconds(now))).collect();
    assert!(plans.iter().all(Vec::is_empty));
}

/// 420 000 cycles a second pay the 2.88 M that a release and a copy back require after 7 s.
#[test]
fn zero_pages_of_a_window_in_use_must_have_stayed_zero_for_as_long_as_they_need_to_pay() {
    let released_at = |zero_at: &dyn Fn(u64) -> u16| {
        let mut desk = Desk::new(PROOF);
        (0..60).find(|now| {
            let mut vm = huge(busiest(), &[12]);
            vm.zero[0] = Some(zero_at(*now));
            desk.plan(&short(vm), seconds(*now)) == [release(0)]
        })
    };
    assert_eq!(released_at(&|_| 500), Some(7));
    assert_eq!(released_at(&|now| 500 - (now % 2) as u16 * 20), Some(8), "a few pages more or fewer are no change");
    assert_eq!(released_at(&|now| if now < 6 { 512 } else { 400 }), None, "it is being filled, and is too dense then");
    assert_eq!(released_at(&|now| if now < 5 { 50 } else { 500 }), Some(12), "most pages are zero for 7 s");
}

#[test]
fn a_dense_hot_window_is_never_split() {
    for in_use in [62, 100, 256, 511, 512] {
        assert_eq!(plan_when_short(huge(busiest(), &[in_use])), [], "{in_use} pages in use");
    }
}

/// With 60 pages in use the 452 others are worth 452 000 cycles a second, and the walks 398 420: 53 580, which bring
/// 3.2 M in a minute. With 61 they bring 2.76 M, and 2.88 M are required for the release and for a copy back. The same
/// window on base pages is promoted with 71 pages or more.
#[test]
fn memory_gained_must_outweigh_walks_lost_and_the_cost_of_the_way_there_and_back() {
    let released = |access| [59, 60, 61].map(|in_use| plan_when_short(huge(access, &[in_use])).len());
    assert_eq!(released(busiest()), [1, 1, 0]);
    assert_eq!(released(samples(HOT)), [1, 1, 0], "a window of unknown frequency may be the busiest");
    let seldom = samples(HOT).with_touches_per_s(Some(10));
    assert_eq!(plan_when_short(huge(seldom, &[300])), [release(0)], "ten passes a second");
}

#[test]
fn where_the_guest_maps_huge_pages_walks_are_worth_more() {
    let released = |guest| {
        let mut vm = huge(busiest(), &[30]);
        vm.guest_mapping[0] = guest;
        plan_when_short(vm).len()
    };
    // 30 pages: 170 000 × 30 / 512 misses × 76 cycles are 757 000 of 482 000.
    assert_eq!([GuestMapping::Base4K, GuestMapping::Huge2M].map(released), [1, 0]);
}

#[test]
fn a_window_with_fewer_than_four_samples_is_left() {
    let of = |drawn| plan_when_short(huge(samples(drawn).with_touches_per_s(Some(1)), &[1])).len();
    assert_eq!(["", "x", "xxx", "xxxx"].map(of), [0, 0, 0, 1]);
}

#[test]
fn one_result_for_many_windows_says_nothing_of_one() {
    let shared = |windows| {
        let mut vm = huge(samples(IDLE), &[200]);
        vm.access_quality[0] = SampleQuality::new(Duration::ZERO, windows);
        plan_when_short(vm)
    };
    assert_eq!(shared(4), [release(0)]);
    assert_eq!(shared(5), [], "200 pages may be in use");
}

#[test]
fn the_best_return_comes_first_and_zero_pages_before_cold_windows() {
    let mut vm = huge(busiest(), &[40, 5, 512, 300]);
    (vm.access[2], vm.access[3]) = (samples(IDLE), samples(IDLE));
    // Idle with 212 zero pages: no walks to lose and no copy back.
    assert_eq!(plan_when_short(vm), [release(3), release(1), release(0), demote(2)]);
}

#[test]
fn the_windows_that_are_cold_for_longest_are_demoted_first() {
    let mut desk = Desk::new(PROOF);
    let mut vm = cold(3);
    (vm.access[0], vm.access[2]) = (busiest(), busiest());
    assert_eq!(desk.plan(&used(50, vm.clone()), seconds(0)), []);
    vm.access[2] = samples(IDLE);
    assert_eq!(desk.plan(&used(50, vm.clone()), seconds(100)), []);
    vm.access[0] = samples(IDLE);
    assert_eq!(desk.plan(&short(vm), seconds(300)), [demote(1), demote(2), demote(0)]);
}

/// Plans once a second and does everything that is planned, until nothing is. Returns the actions.
fn until_nothing_is_planned(desk: &mut Desk, vm: &mut VmSnapshot, from_s: u64) -> Vec<Action> {
    let mut done = Vec::new();
    for second in from_s.. {
        let plan = desk.plan(&short(vm.clone()), seconds(second));
        if plan.is_empty() {
            break;
        }
        for action in plan {
            let row = vm.row(action.window()).expect("a window of the VM");
            vm.backing[row] = Backing::Base4K;
            if matches!(action, Action::Release { .. }) {
                vm.resident[row] -= vm.zero[row].replace(0).unwrap_or(0);
            }
            desk.hears(action, seconds(second), OutcomeResult::Done);
            done.push(action);
        }
    }
    done
}

#[test]
fn cold_windows_are_demoted_some_at_a_time_and_no_more_than_the_kernel_takes_pages_of() {
    let (mut desk, mut vm) = (Desk::new(PROOF), cold(100));
    assert_eq!(desk.plan(&short(vm.clone()), seconds(0)).len(), 16);
    let mut desk_again = Desk::new(PROOF);
    assert_eq!(until_nothing_is_planned(&mut desk_again, &mut vm, 0).len(), 64);
    assert_eq!(desk_again.figure("demoted"), 64);
    // The kernel has reclaimed a page of ten of them.
    (0..10).for_each(|row| vm.resident[row] = 511);
    assert_eq!(until_nothing_is_planned(&mut desk_again, &mut vm, 200).len(), 10);
}

#[test]
fn a_demoted_window_comes_back_by_proof_only_and_its_reason_is_known() {
    let (mut desk, mut vm) = (Desk::new("auto"), cold(1));
    assert_eq!(until_nothing_is_planned(&mut desk, &mut vm, 0), [demote(0)]);
    assert_eq!(desk.0.why_small(VmId(0), 0), Some(KeptSmall::Cold));
    vm.access[0] = samples("---------------x").with_touches_per_s(Some(1));
    assert_eq!(Desk::new("auto").plan(&short(vm.clone()), seconds(10)), [promote(0)], "a policy without that past");
    for second in 10..60 {
        assert_eq!(desk.plan(&short(vm.clone()), seconds(second)), [], "touched once in a while, it does not pay");
    }
    vm.access[0] = samples(IDLE);
    desk.plan(&short(vm.clone()), seconds(60));
    vm.access[0] = busiest();
    assert_eq!(desk.plan(&short(vm.clone()), seconds(61)), []);
    assert_eq!(desk.plan(&short(vm.clone()), seconds(62)), [promote(0)], "3.4 M cycles pay 1.48 M and half as much");
    desk.hears(promote(0), seconds(62), OutcomeResult::Done);
    (vm.backing[0], vm.access[0]) = (Backing::Huge2M, busiest());
    assert_eq!(desk.plan(&short(vm), seconds(63)), []);
    assert_eq!(desk.0.why_small(VmId(0), 0), None);
}

#[test]
fn a_window_split_for_its_zero_pages_is_not_promoted_for_being_full() {
    let (mut desk, mut vm) = (Desk::new("auto"), huge(busiest(), &[12]));
    desk.plan(&used(50, vm.clone()), seconds(0));
    assert_eq!(until_nothing_is_planned(&mut desk, &mut vm, 9), [release(0)]);
    assert_eq!((desk.figure("released"), desk.figure("split_in_use")), (1, 1));
    assert_eq!(desk.0.why_small(VmId(0), 0), Some(KeptSmall::ZeroPages));
    (vm.resident[0], vm.zero[0], vm.access[0]) = (500, Some(0), AccessHistory::default());
    let plenty = used(50, vm);
    assert_eq!(Desk::new("auto").plan(&plenty, seconds(20)), [promote(0)]);
    assert_eq!(desk.plan(&plenty, seconds(20)), []);
}

/// Huge windows, idle and with this many pages in use each, of a VM with KVM's counters: it could be held whole.
fn counted(in_use: &[u16]) -> VmSnapshot {
    VmSnapshot { mapping: Some(MappingStats::default()), ..huge(samples(IDLE), in_use) }
}

#[test]
fn one_cold_window_shows_that_memory_with_kvms_counters_is_split_alone_and_the_rest_follows() {
    let (mut desk, mut vm) = (Desk::new(PROOF), counted(&[512, 500, 512]));
    assert_eq!(desk.plan(&short(vm.clone()), seconds(0)), [demote(0)], "12 zero pages are not worth a release");
    desk.hears(demote(0), seconds(0), OutcomeResult::Refused(Refusal::Busy));
    assert_eq!(desk.plan(&short(vm.clone()), seconds(1)), [demote(0)], "a refusal says nothing of the memory");
    desk.hears(demote(0), seconds(1), OutcomeResult::Done);
    vm.backing[0] = Backing::Base4K;
    assert_eq!(desk.plan(&short(vm), seconds(2)), [demote(1), demote(2)]);
}

#[test]
fn memory_that_is_held_whole_is_taken_back_and_no_further_window_is_demoted() {
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.plan(&short(counted(&[512; 3])), seconds(0)), [demote(0)]);
    desk.hears(demote(0), seconds(0), OutcomeResult::Done);
    let mut held = counted(&[512; 3]);
    held.is_held.fill(true);
    assert_eq!(desk.plan(&short(held), seconds(1)), [promote(0)], "it costs no memory");
    desk.hears(promote(0), seconds(1), OutcomeResult::Done);
    for second in 2..10 {
        assert_eq!(desk.plan(&short(counted(&[512; 3])), seconds(second)), []);
    }
}

#[test]
fn memory_that_is_held_whole_is_taken_back_when_the_host_is_short_no_more() {
    let mut desk = Desk::new(PROOF);
    desk.plan(&short(counted(&[512])), seconds(0));
    desk.hears(demote(0), seconds(0), OutcomeResult::Done);
    let mut held = counted(&[512]);
    held.is_held.fill(true);
    held.access[0] = busiest();
    assert_eq!(desk.plan(&used(50, held), seconds(1)), [promote(0)], "once, although it is hot");
}

#[test]
fn a_release_that_was_done_shows_it_too_and_one_without_a_mechanism_that_no_window_can_be_split() {
    let after = |result| {
        let mut desk = Desk::new(PROOF);
        assert_eq!(desk.plan(&short(counted(&[512, 512, 300])), seconds(1)), [release(2), demote(0)]);
        desk.hears(release(2), seconds(1), result);
        desk.hears(demote(0), seconds(1), OutcomeResult::Skipped(Skip::BackingOff));
        desk.plan(&short(counted(&[512, 512, 300])), seconds(2))
    };
    assert_eq!(after(OutcomeResult::Done), [release(2), demote(0), demote(1)]);
    assert_eq!(after(OutcomeResult::Refused(Refusal::Busy)), [release(2), demote(0)]);
    assert_eq!(after(OutcomeResult::Skipped(Skip::NoMechanism)), []);
}

#[test]
fn a_window_that_was_not_given_up_after_all_is_a_window_like_any_other() {
    for (mut vm, action) in [(cold(1), demote(0)), (huge(busiest(), &[12]), release(0))] {
        let mut desk = Desk::new("auto");
        desk.plan(&used(50, vm.clone()), seconds(0));
        assert_eq!(desk.plan(&short(vm.clone()), seconds(60)), [action]);
        desk.hears(action, seconds(60), OutcomeResult::Refused(Refusal::Busy));
        // Later the kernel splits it.
        (vm.backing[0], vm.access[0], vm.zero[0]) = (Backing::Base4K, AccessHistory::default(), Some(0));
        assert_eq!(desk.plan(&used(50, vm), seconds(61)), [promote(0)], "it is full");
        assert_eq!(desk.0.why_small(VmId(0), 0), None);
    }
}

#[test]
fn a_vm_with_windows_that_cannot_be_split_is_asked_once() {
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.plan(&short(cold(1)), seconds(0)), [demote(0)]);
    desk.hears(demote(0), seconds(0), OutcomeResult::Skipped(Skip::NoMechanism));
    assert_eq!(desk.plan(&short(cold(1)), seconds(1)), []);
}

#[test]
fn while_huge_pages_have_a_price_cold_windows_are_left_to_the_market() {
    let mut snapshot = short(huge(samples(IDLE), &[512, 200]));
    let price = HugePagePrice { cycles_per_s: 1000, may_vacate: 2, free: None };
    snapshot.host = snapshot.host.map(|host| HostMemory { huge_pages: HugePages::Priced(price), ..host });
    let vacate = Action::Vacate { vm: VmId(0), window: WindowIndex::new(0) };
    assert_eq!(Desk::new(PROOF).plan(&snapshot, seconds(0)), [release(1), vacate]);
}

/// As of an attached guest: a split is possible from outside, and a vacated window is not.
#[test]
fn cold_windows_that_cannot_be_vacated_are_demoted_while_huge_pages_have_a_price() {
    let mut snapshot = short(cold(2));
    let price = HugePagePrice { cycles_per_s: 1000, may_vacate: 1, free: None };
    snapshot.host = snapshot.host.map(|host| HostMemory { huge_pages: HugePages::Priced(price), ..host });
    let mut desk = Desk::new(PROOF);
    let vacate = Action::Vacate { vm: VmId(0), window: WindowIndex::new(0) };
    assert_eq!(desk.plan(&snapshot, seconds(0)), [vacate]);
    desk.hears(vacate, seconds(0), OutcomeResult::Skipped(Skip::NoMechanism));
    assert_eq!(desk.plan(&snapshot, seconds(1)), [demote(0), demote(1)]);
}

/// An attached guest without buyers is asked for no window, so that no refusal shows that none can be vacated.
#[test]
fn cold_windows_that_no_buyer_has_wanted_for_ten_seconds_are_demoted_while_huge_pages_have_a_price() {
    let mut desk = Desk::new(PROOF);
    let mut plan = |may_vacate, second| {
        let mut snapshot = short(cold(2));
        let price = HugePagePrice { cycles_per_s: 1000, may_vacate, free: None };
        snapshot.host = snapshot.host.map(|host| HostMemory { huge_pages: HugePages::Priced(price), ..host });
        desk.plan(&snapshot, seconds(second))
    };
    let vacate = Action::Vacate { vm: VmId(0), window: WindowIndex::new(0) };
    assert_eq!([plan(0, 0), plan(0, 9), plan(1, 9), plan(0, 18)], [vec![], vec![], vec![vacate], vec![]]);
    assert_eq!(plan(0, 19), [demote(0), demote(1)]);
}

/// A window of a random run.
#[derive(Clone, Debug)]
struct Scripted {
    in_use: u16,
    /// Lengths of the phases in seconds, the first one hot, then cold and hot in turns.
    phases: Vec<u64>,
}

impl Scripted {
    fn phase(&self, second: u64) -> usize {
        let mut end = 0;
        self.phases
            .iter()
            .position(|length| {
                end += length;
                second < end
            })
            .unwrap_or(self.phases.len())
    }

    fn is_hot(&self, second: u64) -> bool {
        self.phase(second).is_multiple_of(2)
    }
}

fn scripted() -> impl Strategy<Value = Scripted> {
    (1_u16..=512, prop::collection::vec(1_u64..90, 1..8)).prop_map(|(in_use, phases)| Scripted { in_use, phases })
}

/// One window of the run as the host has it.
struct Played {
    script: Scripted,
    access: AccessHistory,
    is_huge: bool,
    resident: u16,
    promoted: usize,
    given_up: usize,
}

impl Played {
    fn row(&mut self, window: u64, second: u64) -> WindowRow {
        let is_hot = self.script.is_hot(second);
        self.access = self.access.with(is_hot).with_touches_per_s(Some(if is_hot { 1000 } else { 0 }));
        let backing = if self.is_huge { Backing::Huge2M } else { Backing::Base4K };
        WindowRow {
            access: self.access,
            guest_mapping: GuestMapping::Base4K,
            zero: Some(self.resident - self.script.in_use),
            ..WindowRow::new(WindowIndex::new(window), self.resident, backing)
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Promote { .. } => (self.is_huge, self.resident, self.promoted) = (true, 512, self.promoted + 1),
            Action::Release { .. } | Action::Demote { .. } => {
                (self.is_huge, self.resident, self.given_up) = (false, self.script.in_use, self.given_up + 1);
            }
            Action::Vacate { .. } => panic!("there is no market"),
            Action::Move { .. } => panic!("there is one node"),
        }
    }
}

proptest! {
    /// Over ten minutes in which windows turn hot and cold, and the host short and not short, each window is given up
    /// at most once for each of its cold phases, and comes back at most as often. A sparse one is given up once.
    #[test]
    fn no_window_goes_to_and_fro(
        windows in prop::collection::vec(scripted(), 1..12),
        memory in prop::collection::vec((any::<bool>(), 10_u64..200), 1..8),
    ) {
        let mut desk = Desk::new("auto");
        let mut played: Vec<Played> = windows.into_iter().map(|script| Played {
            resident: 512, access: AccessHistory::default(), is_huge: true, promoted: 0, given_up: 0, script,
        }).collect();
        let shortages: Vec<bool> =
            memory.iter().flat_map(|(is_short, length)| vec![*is_short; *length as usize]).collect();
        for second in 0..600_u64 {
            let mut vm = VmSnapshot::with_capacity(VmId(0), played.len());
            for (window, played) in played.iter_mut().enumerate() {
                vm.push(played.row(window as u64, second));
            }
            let is_short = shortages.get(second as usize).copied().unwrap_or(false);
            let now = Moment::after_start(Duration::from_secs(second));
            for action in desk.plan(&used(if is_short { 90 } else { 50 }, vm), now) {
                played[action.window().get() as usize].act(action);
                desk.hears(action, now, OutcomeResult::Done);
            }
        }
        for Played { script, promoted, given_up, .. } in played {
            // The last phase lasts to the end.
            let cold_phases = script.phases.len().div_ceil(2);
            prop_assert!(given_up <= cold_phases && promoted <= given_up, "{script:?}: {given_up}, {promoted}");
        }
    }
}
