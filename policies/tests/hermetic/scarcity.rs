//! `auto` where huge pages are short: what it bids, what it promotes at a price, and which windows it vacates. Windows
//! are drawn as in `scenarios.rs`.
//!
//! The numbers: a hot window of these tests saves 170 000 misses × 20 cycles = 3.4 M cycles a second. A promotion costs
//! 1.12 M cycles and a vacated window 1.0 M, of which one and a half times are required: 1.68 M and 3.18 M.

use std::time::Duration;

use wideleaf_policies::market::{Level, bid};
use wideleaf_policies::rotation::{Rotation, TouchFrequency};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{
    AccessHistory, Action, BudgetLimits, GuestMapping, HostMemory, HugePagePrice, HugePages, Moment, OutcomeResult,
    PerTenThousand, Refusal, SampleQuality, Skip, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use crate::drawn::{Desk, HOT, IDLE, PROOF, promote, samples, seconds, vm_with};

/// Cycles per second that a hot window saves, less one page of bloat.
const SAVED: u64 = 170_000 * 511 / 512 * 20 - 1000;

fn with(huge_pages: HugePages, vms: Vec<VmSnapshot>) -> Snapshot {
    let host = HostMemory { total: gib(100), available: gib(50), giant_pages_free: 0, huge_pages };
    Snapshot { host: Some(host), vms }
}

fn scarce(free: u64, vms: Vec<VmSnapshot>) -> Snapshot {
    with(HugePages::Scarce { free }, vms)
}

fn vacate(window: u64) -> Action {
    Action::Vacate { vm: VmId(0), window: WindowIndex::new(window) }
}

fn hot() -> AccessHistory {
    samples(HOT).with_touches_per_s(Some(1000))
}

/// A VM as drawn: large windows are idle, those on base pages hot and one page short of full.
fn cold_and_hot(drawn: &str) -> VmSnapshot {
    vm_with(0, drawn, |_, row| {
        row.guest_mapping = GuestMapping::Base4K;
        if row.resident == 512 && row.backing.is_large() {
            row.access = samples(IDLE);
        } else {
            (row.access, row.resident) = (hot(), 511);
        }
    })
}

/// A policy that has seen this VM for a second, so that its hot windows are proven.
fn proven(vm: &VmSnapshot) -> Desk {
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.plan(&with(HugePages::Plenty, vec![vm.clone()]), seconds(0)), []);
    desk
}

fn at(ms: u64) -> Moment {
    Moment::after_start(Duration::from_millis(ms))
}

#[test]
fn exactly_the_cold_windows_that_the_hot_ones_lack_give_their_page_back_before_each_promotion() {
    let vm = cold_and_hot("HHHHff");
    let plan = |free| proven(&vm).plan(&scarce(free, vec![vm.clone()]), seconds(1));
    assert_eq!(plan(0), [vacate(0), promote(4), vacate(1), promote(5)]);
    assert_eq!(plan(1), [vacate(0), promote(4), promote(5)]);
    assert_eq!(plan(2), [promote(4), promote(5)]);
    let plentiful = proven(&vm).plan(&with(HugePages::Plenty, vec![vm.clone()]), seconds(1));
    assert_eq!(plentiful, [promote(4), promote(5)]);
}

/// A burst of 7 MiB: two trades copy 8 MiB.
#[test]
fn no_window_is_vacated_for_a_promotion_that_the_budget_does_not_cover() {
    let vm = cold_and_hot("HHHHff");
    let limits = BudgetLimits { copy_per_second: mib(7), burst: Duration::from_secs(1), ..BudgetLimits::default() };
    let plan = proven(&vm).plan_within(&scarce(0, vec![vm.clone()]), seconds(1), limits);
    assert_eq!(plan, [vacate(0), promote(4)]);
}

#[test]
fn a_window_must_also_pay_for_the_one_that_is_vacated_for_it() {
    // After 0.6 s it pays for its promotion, after 1 s also for a vacated window.
    let vm = cold_and_hot("Hf");
    let plan = |ms| proven(&vm).plan(&scarce(0, vec![vm.clone()]), at(ms));
    assert_eq!([400, 600, 1000].map(plan), [vec![], vec![promote(1)], vec![vacate(0), promote(1)]]);
}

#[test]
fn bids_count_windows_that_want_and_that_could_give_and_there_are_none_in_plenty() {
    let vm = cold_and_hot("HHHff");
    let mut desk = proven(&vm);
    assert_eq!(desk.0.bids(), None);
    desk.plan(&scarce(1, vec![vm.clone()]), seconds(1));
    let levels: Vec<Level> = desk.0.bids().expect("huge pages are short").levels().collect();
    let expected = [(0, 0, 3), (bid(SAVED), 2, 0)];
    assert_eq!(levels, expected.map(|(cycles_per_s, wanted, held)| Level { cycles_per_s, wanted, held }));
    assert_eq!(desk.figure("huge_page_price"), bid(SAVED));
    desk.plan(&with(HugePages::Plenty, vec![vm]), seconds(2));
    assert_eq!((desk.0.bids(), desk.figure("huge_page_price")), (None, 0));
}

#[test]
fn no_window_is_vacated_for_one_without_proof() {
    // Full windows without any sample are promoted while pages are free, but cost no other window its page. One more is
    // requested, so that the manager knows of a window that waits.
    let change = |at: usize, row: &mut WindowRow| row.access = if at < 2 { samples(IDLE) } else { Default::default() };
    let vm = vm_with(0, "HHfff", change);
    let plan = |free| Desk::new("auto").plan(&scarce(free, vec![vm.clone()]), seconds(0));
    assert_eq!(plan(0), [promote(2)]);
    assert_eq!(plan(1), [promote(2), promote(3)]);
    // At a price they are not promoted at all.
    let price = HugePages::Priced(HugePagePrice { cycles_per_s: 1, ..HugePagePrice::default() });
    assert_eq!(Desk::new("auto").plan(&with(price, vec![vm]), seconds(0)), []);
}

#[test]
fn only_windows_that_are_idle_at_their_two_latest_samples_are_vacated() {
    let given = |access: AccessHistory, shared_by| {
        let mut vm = cold_and_hot("Hf");
        (vm.access[0], vm.access_quality[0]) = (access, SampleQuality::new(Duration::ZERO, shared_by));
        proven(&vm).plan(&scarce(0, vec![vm]), seconds(1)).contains(&vacate(0))
    };
    assert!(given(samples(IDLE), 1));
    assert!(given(samples("x--"), 1));
    assert!(!given(samples("--------------x-"), 1), "touched at one of the two");
    assert!(!given(samples("-"), 1), "one sample is missing");
    assert!(!given(AccessHistory::default(), 1), "never sampled");
    assert!(!given(samples(IDLE), 5), "one result for five windows");
}

#[test]
fn a_window_gives_its_page_only_to_one_that_saves_at_least_twice_as_much() {
    // Touched 100 times a second, 96 in its bucket, it saves 0.98 M; touched 200 times, 1.97 M of 3.4 M.
    let given = |touches| {
        let mut vm = cold_and_hot("Hf");
        vm.access[0] = samples(IDLE).with_touches_per_s(Some(touches));
        proven(&vm).plan(&scarce(0, vec![vm]), seconds(1)).contains(&vacate(0))
    };
    assert_eq!([0, 100, 200, 1000].map(given), [true, true, false, false]);
}

#[test]
fn a_vacated_window_comes_back_by_proof_only() {
    let mut desk = proven(&cold_and_hot("Hf"));
    let before = cold_and_hot("Hf");
    assert_eq!(desk.plan(&scarce(0, vec![before]), seconds(1)), [vacate(0), promote(1)]);
    desk.hears(vacate(0), seconds(1), OutcomeResult::Done);
    desk.hears(promote(1), seconds(1), OutcomeResult::Done);
    assert_eq!(desk.figure("vacated"), 1);
    // Now on base pages and full. A policy without that past promotes it at once when the guest touches it.
    let after = |access| {
        let change = |at: usize, row: &mut WindowRow| {
            row.guest_mapping = GuestMapping::Base4K;
            row.access = if at == 0 { access } else { hot() };
        };
        with(HugePages::Plenty, vec![vm_with(0, "fH", change)])
    };
    let touched_once = samples("---------------x").with_touches_per_s(Some(1));
    assert_eq!(Desk::new("auto").plan(&after(touched_once), seconds(2)), [promote(0)]);
    let plans: Vec<_> = (2..60).map(|now| desk.plan(&after(touched_once), seconds(now))).collect();
    assert!(plans.iter().all(Vec::is_empty), "touched once in a while, it does not pay");
    desk.plan(&after(samples(IDLE)), seconds(60));
    assert_eq!(desk.plan(&after(hot()), seconds(61)), []);
    assert_eq!(desk.plan(&after(hot()), seconds(62)), [promote(0)], "hot for a second");
    desk.hears(promote(0), seconds(62), OutcomeResult::Done);
    // As large as before, it is a window like any other.
    desk.plan(&with(HugePages::Plenty, vec![cold_and_hot("HH")]), seconds(63));
    assert_eq!(desk.plan(&after(touched_once), seconds(64)), [promote(0)]);
}

#[test]
fn a_window_that_could_not_be_vacated_is_a_window_like_any_other() {
    for result in [OutcomeResult::Refused(Refusal::Busy), OutcomeResult::Skipped(Skip::BackingOff)] {
        let mut desk = proven(&cold_and_hot("Hf"));
        assert_eq!(desk.plan(&scarce(0, vec![cold_and_hot("Hf")]), seconds(1)), [vacate(0), promote(1)]);
        desk.hears(vacate(0), seconds(1), result);
        // Later the kernel splits it. It is full, and the guest touches it once.
        let change = |at: usize, row: &mut WindowRow| {
            row.guest_mapping = GuestMapping::Base4K;
            row.access = if at == 0 { samples("---------------x").with_touches_per_s(Some(1)) } else { hot() };
        };
        let small = with(HugePages::Plenty, vec![vm_with(0, "fH", change)]);
        assert_eq!(desk.plan(&small, seconds(2)), [promote(0)], "{result}");
        assert_eq!(desk.0.why_small(VmId(0), 0), None);
    }
}

#[test]
fn windows_of_a_vm_that_cannot_be_vacated_are_asked_once() {
    let vm = cold_and_hot("HHff");
    let mut desk = proven(&vm);
    assert!(desk.plan(&scarce(0, vec![vm.clone()]), seconds(1)).contains(&vacate(0)));
    desk.hears(vacate(0), seconds(1), OutcomeResult::Refused(Refusal::Busy));
    assert!(desk.plan(&scarce(0, vec![vm.clone()]), seconds(2)).contains(&vacate(0)), "busy is no proof");
    desk.hears(vacate(0), seconds(2), OutcomeResult::Skipped(Skip::NoMechanism));
    assert_eq!(desk.plan(&scarce(0, vec![vm]), seconds(3)), [promote(2)]);
    assert_eq!(desk.0.bids().map(|bids| bids.held()), Some(0));
}

#[test]
fn a_price_from_outside_decides_what_is_promoted_and_how_many_windows_are_vacated() {
    let mut vm = cold_and_hot("HHHff");
    vm.access[4] = samples(HOT).with_touches_per_s(Some(200)); // 1.97 M cycles a second
    let plan = |cycles_per_s, may_vacate| {
        let mut desk = proven(&vm);
        let price = HugePages::Priced(HugePagePrice { cycles_per_s, may_vacate, free: None });
        let plan = desk.plan(&with(price, vec![vm.clone()]), seconds(2));
        (plan, desk.figure("priced_out_now"))
    };
    assert_eq!(plan(0, 0), (vec![promote(3), promote(4)], 0));
    // A trade within the VM needs no permission.
    assert_eq!(plan(bid(SAVED), 0), (vec![vacate(0), promote(3)], 1));
    assert_eq!(plan(1, 0), (vec![vacate(0), promote(3), vacate(1), promote(4)], 0));
    // The others are for another VM of the host.
    assert_eq!(plan(bid(SAVED), 1), (vec![vacate(0), promote(3), vacate(1)], 1));
    assert_eq!(plan(bid(SAVED), 3), (vec![vacate(0), promote(3), vacate(1), vacate(2)], 1));
    assert_eq!(plan(bid(SAVED) + 1, 0), (vec![], 2));
    assert_eq!(plan(bid(SAVED) + 1, 2), (vec![vacate(0), vacate(1)], 2));
    assert_eq!(plan(1, 9), (vec![vacate(0), promote(3), vacate(1), promote(4), vacate(2)], 0));
}

#[test]
fn at_a_price_from_outside_no_more_pages_are_asked_for_than_are_free_and_one() {
    let vm = cold_and_hot("Hffff");
    let plan = |cycles_per_s, free| {
        let price = HugePagePrice { cycles_per_s, free, ..HugePagePrice::default() };
        proven(&vm).plan(&with(HugePages::Priced(price), vec![vm.clone()]), seconds(2))
    };
    assert_eq!(plan(1, None), [vacate(0), promote(1), promote(2), promote(3), promote(4)], "not known");
    assert_eq!(plan(1, Some(0)), [vacate(0), promote(1), promote(2)]);
    assert_eq!(plan(1, Some(1)), [vacate(0), promote(1), promote(2), promote(3)]);
    assert_eq!(plan(0, Some(2)), [promote(1), promote(2), promote(3)]);
}

#[test]
fn a_vm_gives_no_page_of_its_guarantee_to_others_and_trades_all_of_them_within_itself() {
    let vm =
        |percent: u32, drawn: &str| VmSnapshot { guarantee: PerTenThousand::new(percent * 100), ..cold_and_hot(drawn) };
    let vacates = |plan: &[Action]| plan.iter().filter(|action| matches!(action, Action::Vacate { .. })).count();
    // Eight windows of 2 MiB: a part in 32 of them is 0.5 MiB, the margin.
    let for_others = |percent| {
        let price = HugePages::Priced(HugePagePrice { cycles_per_s: 1, may_vacate: 9, free: Some(0) });
        let vm = vm(percent, "HHHHHHHH");
        vacates(&proven(&vm).plan(&with(price, vec![vm]), seconds(1)))
    };
    assert_eq!([0, 1, 9, 10, 50, 84, 85, 100].map(for_others), [8, 7, 7, 6, 3, 1, 0, 0]);
    // With two windows that want one, and with the price of these bids alone.
    for percent in [0, 1, 50, 100] {
        let vm = vm(percent, "HHHHHHff");
        let plan = proven(&vm).plan(&scarce(0, vec![vm]), seconds(1));
        assert_eq!(plan[..4], [vacate(0), promote(6), vacate(1), promote(7)], "{percent} %");
        assert_eq!(vacates(&plan), 2);
    }
}

#[test]
fn a_vm_that_can_spare_no_page_gives_none_to_another_vm() {
    let guaranteed = VmSnapshot { guarantee: PerTenThousand::ALL, ..cold_and_hot("HHHf") };
    let other = VmSnapshot { vm: VmId(1), ..cold_and_hot("Hfff") };
    let vms = vec![guaranteed, other];
    let mut desk = Desk::new(PROOF);
    desk.plan(&with(HugePages::Plenty, vms.clone()), seconds(0));
    let plan = desk.plan(&scarce(0, vms), seconds(1));
    let given = |vm| plan.iter().filter(|action| matches!(action, Action::Vacate { vm: of, .. } if of.0 == vm)).count();
    let promoted = |vm| {
        let is_its = |action: &&Action| matches!(action, Action::Promote { vm: of, .. } if of.0 == vm);
        plan.iter().filter(is_its).count()
    };
    assert_eq!([given(0), given(1)], [1, 1], "{plan:?}");
    // One more page than those is asked for.
    assert_eq!((promoted(0), promoted(1)), (1, 2), "{plan:?}");
}

#[test]
fn a_window_that_is_only_held_needs_no_page_and_pays_no_price() {
    let vm = vm_with(0, "h", |_, row| (row.access, row.guest_mapping) = (hot(), GuestMapping::Base4K));
    let price = HugePages::Priced(HugePagePrice { cycles_per_s: u64::MAX, ..HugePagePrice::default() });
    assert_eq!(Desk::new("auto").plan(&with(price, vec![vm]), seconds(0)), [promote(0)]);
}

#[test]
fn what_was_hot_seconds_ago_takes_no_page_of_a_cold_window() {
    // All have been hot for three seconds, as far as samples of this age tell.
    let plan = |age_s, latest: bool| {
        let mut vm = cold_and_hot("Hf");
        let mut desks = [(); 2].map(|()| proven(&vm));
        vm.access[1] = hot().with(latest).with_touches_per_s(Some(1000));
        vm.access_quality[1] = SampleQuality::new(Duration::from_secs(age_s), 1);
        let [short, plentiful] = &mut desks;
        let plentiful = plentiful.plan(&with(HugePages::Plenty, vec![vm.clone()]), seconds(3));
        (short.plan(&scarce(0, vec![vm]), seconds(3)), plentiful)
    };
    assert_eq!(plan(0, true), (vec![vacate(0), promote(1)], vec![promote(1)]));
    assert_eq!(plan(2, true), (vec![vacate(0), promote(1)], vec![promote(1)]), "hot for a second at least");
    // It may still have a free page that no other window wants: one is requested.
    assert_eq!(plan(3, true), (vec![promote(1)], vec![promote(1)]), "touched once, three seconds ago");
    assert_eq!(plan(0, false), (vec![promote(1)], vec![promote(1)]), "a sample since saw no touch");
}

/// A guest reads its first half for 1.5 s and then updates its second half. A sensor looks at a few windows in each
/// tenth of a second. The first half holds all huge pages then, and each of them moves once.
#[test]
fn each_page_of_a_set_that_becomes_cold_moves_once_to_the_set_that_became_hot() {
    const HALF: usize = 40;
    let mut desk = Desk::new(PROOF);
    let mut sensor = Sensor::new(2 * HALF);
    let mut is_large: Vec<bool> = (0..2 * HALF).map(|window| window < HALF / 2).collect();
    let (mut vacated, mut promoted, mut free) = (Vec::new(), Vec::new(), 0);
    for tenth in 0..200 {
        let now = at(100 * tenth);
        let is_hot = |window: usize| (window < HALF) == (tenth < 15);
        let drawn: String = is_large.iter().map(|is_large| if *is_large { 'H' } else { 'f' }).collect();
        let vm = vm_with(0, &drawn, |at, row| {
            row.guest_mapping = GuestMapping::Base4K;
            row.resident = if row.backing.is_large() { 512 } else { 511 };
            (row.access, row.access_quality) = sensor.seen(at, now);
        });
        for action in desk.plan(&scarce(free, vec![vm.clone()]), now) {
            let window = action.window().get() as usize;
            let (changes, is_done) = match action {
                Action::Vacate { .. } => (&mut vacated, true),
                Action::Promote { .. } => (&mut promoted, free > 0),
                other => panic!("{other:?}"),
            };
            if is_done {
                is_large[window] = !is_large[window];
                free = if is_large[window] { free - 1 } else { free + 1 };
                changes.push(window);
            }
            let refused = OutcomeResult::Refused(Refusal::NoHugePage);
            desk.hears(action, now, if is_done { OutcomeResult::Done } else { refused });
        }
        sensor.sample(&vm, |row| desk.0.hurries(&vm, row), is_hot, now);
    }
    vacated.sort_unstable();
    assert_eq!(vacated, (0..HALF / 2).collect::<Vec<_>>());
    assert!(promoted.len() == HALF / 2 && promoted.iter().all(|window| *window >= HALF), "{promoted:?}");
}

/// A sensor of accesses: in each tenth of a second it looks at 16 windows that are hurried for, or at one in its turn.
struct Sensor {
    histories: Vec<AccessHistory>,
    frequencies: Vec<TouchFrequency>,
    sampled_at: Vec<Option<Moment>>,
    rotations: [Rotation; 2],
}

impl Sensor {
    fn new(windows: usize) -> Sensor {
        Sensor {
            histories: vec![AccessHistory::default(); windows],
            frequencies: vec![TouchFrequency::default(); windows],
            sampled_at: vec![None; windows],
            rotations: Default::default(),
        }
    }

    fn seen(&self, row: usize, now: Moment) -> (AccessHistory, SampleQuality) {
        let quality = self.sampled_at[row].map(|sampled_at| SampleQuality::new(now.since(sampled_at), 1));
        (self.histories[row], quality.unwrap_or_default())
    }

    /// A hot window is touched after a millisecond.
    fn sample(
        &mut self,
        vm: &VmSnapshot,
        is_urgent: impl Fn(usize) -> bool,
        is_hot: impl Fn(usize) -> bool,
        now: Moment,
    ) {
        let urgent: Vec<_> = (0..vm.len()).filter(|row| is_urgent(*row)).map(|row| vm.windows[row]).collect();
        let sample = match urgent.is_empty() {
            false => self.rotations[0].next_share(&urgent, 16),
            true => self.rotations[1].next_share(&vm.windows, 1),
        };
        for window in sample {
            let row = window.get() as usize;
            let watched_for = Duration::from_millis(if is_hot(row) { 1 } else { 40 });
            self.frequencies[row].add(is_hot(row), watched_for);
            let touches_per_s = self.frequencies[row].per_second();
            self.histories[row] = self.histories[row].with(is_hot(row)).with_touches_per_s(touches_per_s);
            self.sampled_at[row] = Some(now);
        }
    }
}

#[test]
fn windows_that_may_be_cold_or_buyers_are_hurried_for_while_pages_are_short() {
    let mut vm = cold_and_hot("HHHHff");
    vm.access[..3].copy_from_slice(&[samples("-"), samples("x"), AccessHistory::default()]);
    vm.access[5] = AccessHistory::default();
    let mut desk = proven(&vm);
    let hurried = |desk: &Desk| [0, 1, 2, 3, 4, 5].map(|row| desk.0.hurries(&vm, row));
    assert_eq!(hurried(&desk), [false; 6]);
    desk.plan(&scarce(0, vec![vm.clone()]), seconds(1));
    // Idle once, touched, never sampled, known to be idle; on base pages: proven, never sampled.
    assert_eq!(hurried(&desk), [true, false, true, false, false, true]);
}

#[test]
fn a_window_that_was_never_sampled_is_hurried_for_only_where_a_page_may_come() {
    let mut vm = cold_and_hot("ff");
    vm.access[1] = AccessHistory::default();
    let hurried = |huge_pages| {
        let mut desk = proven(&vm);
        desk.plan(&with(huge_pages, vec![vm.clone()]), seconds(1));
        desk.0.hurries(&vm, 1)
    };
    let others = HugePages::Priced(HugePagePrice { free: Some(0), ..HugePagePrice::default() });
    let supplies = [HugePages::Plenty, HugePages::Scarce { free: 0 }, HugePages::Scarce { free: 1 }, others];
    assert_eq!(supplies.map(hurried), [false, false, true, true]);
}

#[test]
fn a_large_window_with_an_idle_result_of_its_region_is_hurried_for() {
    let mut vm = cold_and_hot("Hf");
    let mut desk = proven(&vm);
    desk.plan(&scarce(0, vec![vm.clone()]), seconds(1));
    let mut hurried = |windows| {
        vm.access_quality[0] = SampleQuality::new(Duration::ZERO, windows);
        desk.0.hurries(&vm, 0)
    };
    assert_eq!([1, 4, 5].map(&mut hurried), [false, false, true]);
}

#[test]
fn windows_on_base_pages_are_sampled_again_and_again_more_rarely_while_there_is_a_page_for_them() {
    // Age of the newest sample in seconds from which on the last window is hurried for.
    let hurried = |drawn: &str, latest: &str| {
        let mut vm = cold_and_hot(drawn);
        let last = vm.len() - 1;
        vm.access[last] = samples(latest);
        let mut desk = proven(&vm);
        desk.plan(&scarce(0, vec![vm.clone()]), seconds(1));
        (0..=20).find(|age_s| {
            vm.access_quality[last] = SampleQuality::new(Duration::from_secs(*age_s), 1);
            desk.0.hurries(&vm, last)
        })
    };
    assert_eq!(["x", "-xx", "xxxxx", HOT].map(|latest| hurried("Hff", latest)), [1, 2, 5, 16].map(Some));
    assert_eq!(["-", "x--"].map(|latest| hurried("HHff", latest)), [1, 2].map(Some), "two pages and one buyer");
    assert_eq!(hurried("Hff", "-"), None, "the page is for the window that is hot already");
    assert_eq!(hurried("ff", "x"), None, "no page is to be had");
}

#[test]
fn large_windows_are_sampled_once_more_after_demand_rose() {
    let with_age = |drawn, age_s| {
        let mut vm = cold_and_hot(drawn);
        vm.access[0] = samples(HOT);
        vm.access_quality[0] = SampleQuality::new(Duration::from_secs(age_s), 1);
        vm
    };
    let mut desk = proven(&with_age("Hff", 0));
    let mut hurried = |drawn, second, age_s| {
        let vm = with_age(drawn, age_s);
        desk.plan(&scarce(0, vec![vm.clone()]), seconds(second));
        desk.0.hurries(&vm, 0)
    };
    assert!(hurried("Hff", 2, 1), "sampled before there was a price");
    assert!(!hurried("Hff", 2, 0));
    assert!(!hurried("Hff", 9, 7), "and it was hot since");
    assert!(!hurried("Hf", 10, 8), "fewer buyers");
    assert!(!hurried("Hfff", 11, 3), "a new window is no buyer at once");
    assert!(hurried("Hfff", 12, 4), "now it is proven");
    hurried("HHHHfff", 13, 9); // Three new buyers are not proven yet.
    assert!(!hurried("HHHHfff", 14, 9), "three others are known to be cold");
    assert!(hurried("HHHffff", 15, 9), "one of the buyers has no page");
}

/// No window goes to and fro: over an hour in which two halves of the memory take turns, each window moves once for
/// each change at most.
#[test]
fn pages_follow_the_heat_and_do_not_swing() {
    let mut desk = Desk::new(PROOF);
    let mut is_large = [true, true, false, false];
    let (mut vacated, mut promoted) = (0, 0);
    for second in 0..3600 {
        let hot_half = (second / 1200) % 2; // two changes within the hour
        let change = |at: usize, row: &mut WindowRow| {
            let is_hot = at / 2 != hot_half;
            row.guest_mapping = GuestMapping::Base4K;
            row.access = if is_hot { hot() } else { samples(IDLE).with_touches_per_s(Some(0)) };
            row.resident = if row.backing.is_large() { 512 } else { 511 }; // nothing without proof
        };
        let drawn: String = is_large.iter().map(|is_large| if *is_large { 'H' } else { 'f' }).collect();
        let now = seconds(second as u64);
        for action in desk.plan(&scarce(0, vec![vm_with(0, &drawn, change)]), now) {
            let window = action.window().get() as usize;
            match action {
                Action::Vacate { .. } => (is_large[window], vacated) = (false, vacated + 1),
                Action::Promote { .. } => (is_large[window], promoted) = (true, promoted + 1),
                other => panic!("{other:?}"),
            }
            desk.hears(action, now, OutcomeResult::Done);
        }
    }
    assert_eq!((vacated, promoted, is_large), (6, 6, [false, false, true, true]));
}
