//! The behaviour of each policy but `auto` in small drawn cases ([`crate::drawn`]), with the numbers of its source.

use std::time::Duration;

use wideleaf_policies::policy::{POLICIES, RamStart};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{
    AccessHistory, Action, Backing, BudgetLimits, GuestMapping, HostMemory, HugePages, Moment, OutcomeResult, PageSize,
    Refusal, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use crate::drawn::{Desk, PLENTY, of, promote, samples, seconds, used, vm, vm_with};

#[test]
fn never_and_prealloc_plan_nothing_and_differ_in_how_ram_starts() {
    let snapshot = of(vec![vm(0, "fsH")]);
    for (policy, start) in [("never", RamStart::OnBasePages), ("prealloc", RamStart::HugeAndPrefaulted)] {
        let mut desk = Desk::new(policy);
        assert_eq!((desk.plan(&snapshot, seconds(1)), desk.0.ram_start()), (vec![], start));
    }
}

#[test]
fn only_two_policies_serve_page_faults() {
    for info in POLICIES {
        assert_eq!(
            info.with_defaults().answers_faults(),
            ["at-fault", "reservation"].contains(&info.name),
            "{}",
            info.name
        );
    }
}

#[test]
fn at_fault_answers_the_first_touch_and_never_promotes_again() {
    let mut desk = Desk::new("at-fault");
    assert!(desk.0.decides_at_first_touch());
    assert_eq!(desk.0.first_touch(VmId(0), WindowIndex::new(3)), PageSize::Huge2M);
    assert_eq!(desk.plan(&of(vec![vm(0, "fsh")]), seconds(1)), []);
}

/// `GGG…G` (512) `H`: a giant page with given-back pages, and a window behind it.
#[test]
fn at_fault_demotes_a_giant_of_which_a_whole_window_was_given_back() {
    let plan = |given_back: u16, late: bool| {
        let mut desk = Desk::new("at-fault:giant=1");
        let drawn = "H".repeat(513);
        let vms = vec![vm_with(0, &drawn, |at, row| {
            row.backing = if at < 512 { Backing::Giant1G } else { Backing::Huge2M };
            row.given_back = if at == 100 || at == 512 { given_back } else { 0 };
            row.ready_at = if late && at == 511 { seconds(2) } else { Moment::START };
        })];
        desk.plan(&of(vms), seconds(1))
    };
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Huge2M };
    assert_eq!((plan(512, false), plan(511, false), plan(512, true)), (vec![demote], vec![], vec![]));
}

#[test]
fn at_fault_asks_for_giants_only_where_the_user_does() {
    let [small, giant] = ["at-fault", "at-fault:giant=1"].map(|choice| {
        let mut desk = Desk::new(choice);
        (desk.0.first_touch(VmId(0), WindowIndex::new(3)), desk.0.largest_page())
    });
    assert_eq!((small, giant), ((PageSize::Huge2M, PageSize::Huge2M), (PageSize::Giant1G, PageSize::Giant1G)));
}

#[test]
fn greedy_takes_turns_and_recovers_held_windows() {
    let snapshot = of(vec![vm(0, "f.sH"), vm(1, "Hhf")]);
    assert_eq!(Desk::new("greedy").promotions(&snapshot, seconds(1)), [(0, 0), (1, 1), (0, 2), (1, 2)]);
}

/// 4096 pages each wake-up are 8 windows:  `ffffffff ffffffff ff`  at 0, 10 and 20 s, then from the start again.
#[test]
fn thp_scans_eight_windows_every_ten_seconds() {
    let snapshot = of(vec![vm(0, "ffffffffffff"), vm(1, "ffffff")]);
    let mut desk = Desk::new("thp");
    assert_eq!(desk.promotions(&snapshot, seconds(0)), (0..8).map(|w| (0, w)).collect::<Vec<_>>());
    assert_eq!(desk.promotions(&snapshot, seconds(9)), []);
    let second: Vec<_> = (8..12).map(|w| (0, w)).chain((0..4).map(|w| (1, w))).collect();
    assert_eq!(desk.promotions(&snapshot, seconds(10)), second);
    let third: Vec<_> = (4..6).map(|w| (1, w)).chain((0..6).map(|w| (0, w))).collect();
    assert_eq!(desk.promotions(&snapshot, seconds(20)), third);
}

#[test]
fn thp_scans_a_gibibyte_in_ten_minutes_and_forty_seconds() {
    let snapshot = of(vec![vm(0, &"f".repeat(512))]);
    let mut desk = Desk::new("thp");
    let promoted: usize = (0..640).map(|second| desk.promotions(&snapshot, seconds(second)).len()).sum();
    assert_eq!(promoted, 512);
}

#[test]
fn thp_skips_too_empty_windows_and_sleeps_longer_without_huge_pages() {
    let snapshot = of(vec![vm(0, "sqn")]);
    let mut desk = Desk::new("thp:max_ptes_none=448"); // 64 present is just enough
    assert_eq!(desk.promotions(&snapshot, seconds(0)), [(0, 1), (0, 2)]);
    desk.hears(promote(1), seconds(1), OutcomeResult::Refused(Refusal::NoHugePage));
    assert_eq!(desk.promotions(&snapshot, seconds(60)), []);
    assert_eq!(desk.promotions(&snapshot, seconds(61)), [(0, 1), (0, 2)]);
}

#[test]
fn thp_decides_the_same_with_and_without_samples_of_accesses() {
    let idle = of(vec![vm_with(0, "ff", |_, row| row.access = samples("x-"))]);
    assert_eq!(Desk::new("thp").promotions(&idle, seconds(0)), [(0, 0), (0, 1)]);
}

#[test]
fn thp_continues_at_the_window_that_the_budget_refused() {
    let one = BudgetLimits { copy_per_second: mib(2), ..PLENTY };
    let (snapshot, mut desk) = (of(vec![vm(0, "fff")]), Desk::new("thp:scan_sleep_ms=0"));
    let plans: Vec<_> = (0..4).map(|second| desk.plan_within(&snapshot, seconds(second), one)).collect();
    assert_eq!(plans, [[promote(0)], [promote(1)], [promote(2)], [promote(0)]]);
}

#[test]
fn thp_that_the_budget_stops_scans_the_rest_of_its_wake_up_before_it_sleeps() {
    let one = BudgetLimits { copy_per_second: mib(2), ..PLENTY };
    let (snapshot, mut desk) = (of(vec![vm(0, "fffff")]), Desk::new("thp:pages_to_scan=1536"));
    let mut plan = |second| desk.plan_within(&snapshot, seconds(second), one);
    assert_eq!([plan(0), plan(1), plan(2)], [[promote(0)], [promote(1)], [promote(2)]]);
    assert_eq!([plan(3), plan(11)], [[], []], "the sleep of 10 s begins with the end of the scan");
    assert_eq!(plan(12), [promote(3)]);
}

#[test]
fn utilization_uses_accesses_only_where_they_can_change_a_decision() {
    let (alone, two) = (of(vec![vm(0, "ff")]), of(vec![vm(0, "ff"), vm(1, "ff")]));
    let uses = |choice: &str, snapshot: &Snapshot| {
        let mut desk = Desk::new(choice);
        desk.plan(snapshot, seconds(1));
        desk.0.uses_access(&snapshot.vms[0], 0)
    };
    assert!(!uses("utilization", &alone), "the tax compares nothing");
    assert!(uses("utilization", &two));
    assert!(!uses("utilization:idle_tax=0", &two));
    assert!(uses("utilization:needs_access=1", &alone));
}

#[test]
fn utilization_promotes_from_460_of_512_pages_on() {
    assert_eq!(Desk::new("utilization").promotions(&of(vec![vm(0, "smnfH.")]), seconds(1)), [(0, 2), (0, 3)]);
    assert_eq!(Desk::new("utilization:threshold=50").promotions(&of(vec![vm(0, "smn")]), seconds(1)), [(0, 1), (0, 2)]);
}

#[test]
fn utilization_requires_hot_windows_when_configured() {
    let histories = [samples("xxx-"), samples("xx--"), AccessHistory::default()];
    let snapshot = of(vec![vm_with(0, "fff", |at, row| row.access = histories[at])]);
    assert_eq!(Desk::new("utilization:needs_access=1").promotions(&snapshot, seconds(1)), [(0, 0)]);
}

/// VM 0 has two huge pages, VM 1 none: VM 1 gets the first two, then they take turns.
#[test]
fn utilization_gives_the_next_huge_page_to_the_vm_that_has_fewest() {
    let snapshot = of(vec![vm(0, "HHff"), vm(1, "ffff")]);
    let vms: Vec<u32> = Desk::new("utilization").promotions(&snapshot, seconds(1)).iter().map(|(vm, _)| *vm).collect();
    assert_eq!(vms, [1, 1, 0, 1, 0, 1]);
}

/// Tax 75 %: each huge page of the idle VM 0 counts four times. Prices of one more: 4, 8 against 1, 2, 3, 4, 5 …
#[test]
fn utilization_taxes_idle_vms() {
    let idle_first = |taxed: &str| {
        let vms = [("--", 0), ("xx", 1)].map(|(drawn, id)| vm_with(id, "ffffff", |_, row| row.access = samples(drawn)));
        Desk::new(taxed).promotions(&of(vms.into()), seconds(1)).iter().map(|(vm, _)| *vm).take(6).collect::<Vec<_>>()
    };
    assert_eq!(idle_first("utilization"), [1, 1, 1, 0, 1, 1]);
    assert_eq!(idle_first("utilization:idle_tax=0"), [0, 1, 0, 1, 0, 1]);
}

/// Accessed pages of 512: 512, 128, 256, 512 → buckets 9, 2, 5, 9. Windows 0 and 3 share the highest.
#[test]
fn coverage_promotes_the_most_accessed_first() {
    let histories = [samples("xxxx"), samples("x---"), samples("xx--"), samples("xxxx")];
    let snapshot = of(vec![vm_with(0, "ffff", |at, row| row.access = histories[at])]);
    let order: Vec<u64> = Desk::new("coverage").promotions(&snapshot, seconds(1)).iter().map(|(_, w)| *w).collect();
    assert_eq!(order, [0, 3, 2, 1]);
}

#[test]
fn coverage_skips_hardly_accessed_windows_and_counts_written_pages() {
    let change = |at: usize, row: &mut WindowRow| {
        row.access = samples("x---------------"); // 1/16 of 512 are 32 pages: bucket 0
        row.written = (at == 1).then_some(300); // bucket 6
    };
    let snapshot = of(vec![vm_with(0, "ff", change)]);
    assert_eq!(Desk::new("coverage").promotions(&snapshot, seconds(1)), [(0, 1)]);
    assert_eq!(Desk::new("coverage:lowest_bucket=0").promotions(&snapshot, seconds(1)), [(0, 1), (0, 0)]);
}

/// The host is short from 85 % to 70 %; VM 1 is idle, so its bloat goes first.
#[test]
fn coverage_takes_bloat_back_between_its_marks() {
    let bloated = |drawn: &'static str| {
        move |at: usize, row: &mut WindowRow| {
            row.access = samples(drawn);
            row.zero = Some([256, 255, 400][at]);
        }
    };
    let at = |used_gib| Snapshot {
        host: used(used_gib),
        vms: vec![vm_with(0, "HHf", bloated("xx")), vm_with(1, "HHf", bloated("x-"))],
    };
    let release = |vm| Action::Release { vm: VmId(vm), window: WindowIndex::new(0) };
    let mut desk = Desk::new("coverage");
    assert_eq!(desk.promotions(&at(84), seconds(1)), [(0, 2), (1, 2)]);
    assert_eq!(desk.plan(&at(85), seconds(2)), [release(1), release(0)]);
    assert_eq!(desk.plan(&at(70), seconds(3)), [release(1), release(0)]);
    assert_eq!(desk.promotions(&at(69), seconds(4)), [(0, 2), (1, 2)]);
}

const GUESTS: [GuestMapping; 6] = [
    GuestMapping::Base4K,
    GuestMapping::Unknown,
    GuestMapping::Huge2M,
    GuestMapping::Unmapped,
    GuestMapping::Mixed,
    GuestMapping::Giant1G,
];

#[test]
fn aligned_promotes_windows_that_the_guest_maps_large_first_and_misaligned_last() {
    let snapshot = of(vec![vm_with(0, "ffffff", |at, row| row.guest_mapping = GUESTS[at])]);
    let order =
        |policy| Desk::new(policy).promotions(&snapshot, seconds(1)).iter().map(|(_, w)| *w).collect::<Vec<_>>();
    assert_eq!(order("aligned"), [2, 5, 4, 1, 0]);
    assert_eq!(order("aligned:misaligned=0"), [2, 5, 4, 1]);
}

#[test]
fn aligned_leaves_windows_below_half_and_splits_misaligned_ones_when_short() {
    assert_eq!(Desk::new("aligned").promotions(&of(vec![vm(0, "sqmn")]), seconds(1)), [(0, 2), (0, 3)]);
    let vms = vec![vm_with(0, "HHHHHf", |at, row| row.guest_mapping = GUESTS[at])];
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Base4K };
    assert_eq!(Desk::new("aligned").plan(&Snapshot { host: used(90), vms }, seconds(1)), [demote]);
}

const ONE_GIANT_FREE: Option<HostMemory> =
    Some(HostMemory { total: gib(100), available: gib(50), giant_pages_free: 1, huge_pages: HugePages::Plenty });

/// `ffff…f` (512) `ff`: giant 0 is whole, giant 1 is not.
#[test]
fn giant_takes_a_whole_giant_first_and_alone_then_windows() {
    let vms = || vec![vm(0, &"f".repeat(514))];
    let giant = Action::Promote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Giant1G };
    let mut desk = Desk::new("giant");
    let first = desk.plan_within(&Snapshot { host: ONE_GIANT_FREE, vms: vms() }, seconds(1), BudgetLimits::default());
    assert_eq!(first, [giant], "a giant costs more than a burst: it is borrowed, and no budget is left for others");
    let all = desk.plan(&Snapshot { host: ONE_GIANT_FREE, vms: vms() }, seconds(2));
    assert_eq!(all, [giant, promote(512), promote(513)]);
    let none_free = desk.promotions(&of(vms()), seconds(3));
    assert_eq!(none_free.len(), 514);
}

#[test]
fn giant_promotes_huge_windows_to_a_giant_and_skips_too_empty_ones() {
    let plan = |policy, drawn: String| {
        Desk::new(policy).plan(&Snapshot { host: ONE_GIANT_FREE, vms: vec![vm(0, &drawn)] }, seconds(1))
    };
    let giant = Action::Promote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Giant1G };
    assert_eq!(plan("giant", "H".repeat(512)), [giant]);
    assert_eq!(plan("giant", "s".to_owned() + &".".repeat(511)), [giant], "one present page suffices for Trident");
    assert_eq!(plan("giant", ".".to_owned() + &"H".repeat(511)), [giant], "its first window may be empty");
    assert_eq!(plan("giant", ".".repeat(512)), []);
    assert_eq!(plan("giant:max_none_1g=511", "s".to_owned() + &"f".repeat(511)), [giant]);
    assert_eq!(plan("giant:max_none_1g=511", "s".to_owned() + &".".repeat(511)), [promote(0)]);
}

#[test]
fn giant_waits_until_every_window_of_a_giant_is_ready() {
    for late in [0, 100, 511] {
        let drawn = "f".repeat(512);
        let vms =
            vec![vm_with(0, &drawn, |at, row| row.ready_at = if at == late { seconds(2) } else { Moment::START })];
        let snapshot = Snapshot { host: ONE_GIANT_FREE, vms };
        let others: Vec<Action> = (0..512).filter(|window| *window != late as u64).map(promote).collect();
        assert_eq!(Desk::new("giant").plan(&snapshot, seconds(1)), others, "one by one, except window {late}");
        let giant = Action::Promote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Giant1G };
        assert_eq!(Desk::new("giant").plan(&snapshot, seconds(2)), [giant]);
    }
}

#[test]
fn ethp_promotes_accessed_windows_and_demotes_windows_idle_for_seven_seconds() {
    let histories = [samples("xxx-"), samples("----"), samples("----"), AccessHistory::default()];
    let snapshot = of(vec![vm_with(0, "fHfH", |at, row| row.access = histories[at])]);
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(1), to: PageSize::Base4K };
    let mut desk = Desk::new("schemes");
    assert_eq!(desk.plan(&snapshot, seconds(10)), [promote(0)]);
    assert_eq!(desk.plan(&snapshot, seconds(16)), [promote(0)]);
    assert_eq!(desk.plan(&snapshot, seconds(17)), [promote(0), demote]);
}

/// A VM with KVM's counters: its first demotion shows whether the next snapshot has a split window or a held slot.
fn with_counters(mut vm: VmSnapshot) -> VmSnapshot {
    vm.mapping = Some(Default::default());
    vm
}

#[test]
fn ethp_demotes_no_further_window_of_a_vm_that_is_held_by_whole_slots() {
    let idle = |drawn| of(vec![with_counters(vm_with(0, drawn, |_, row| row.access = samples("----")))]);
    let demote = |window| Action::Demote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Base4K };
    let after = |result, drawn| {
        let mut desk = Desk::new("schemes");
        desk.plan(&idle("HHHH"), seconds(0));
        assert_eq!(desk.plan(&idle("HHHH"), seconds(7)), [demote(0)], "one shows it");
        desk.hears(demote(0), seconds(7), result);
        desk.plan(&idle(drawn), seconds(8))
    };
    assert_eq!(after(OutcomeResult::Done, "fHHH"), [demote(1), demote(2), demote(3)]);
    assert_eq!(after(OutcomeResult::Done, "hhHH"), [promote(0)], "windows 2 and 3 are in another slot");
    assert_eq!(after(OutcomeResult::Refused(Refusal::Busy), "HHHH"), [demote(0)], "it has shown nothing");
}

#[test]
fn schemes_that_only_demote_take_back_a_demotion_that_held_a_whole_slot() {
    let idle = |drawn| of(vec![with_counters(vm_with(0, drawn, |_, row| row.access = samples("----")))]);
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Base4K };
    let mut desk = Desk::new("schemes:rules=min max 0% 0% min max demote");
    assert_eq!(desk.plan(&idle("HHHH"), seconds(1)), [demote]);
    desk.hears(demote, seconds(1), OutcomeResult::Done);
    assert_eq!(desk.plan(&idle("hhHH"), seconds(2)), [promote(0)]);
    assert_eq!(desk.plan(&idle("HHHH"), seconds(3)), []);
}

#[test]
fn aligned_takes_back_a_split_after_the_shortage_too() {
    let of_use = |gibibytes, drawn| {
        let vm = vm_with(0, drawn, |_, row| row.guest_mapping = GuestMapping::Base4K);
        Snapshot { host: used(gibibytes), vms: vec![with_counters(vm)] }
    };
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Base4K };
    for (choice, taken_back) in [("aligned:misaligned=0", vec![promote(0)]), ("aligned", vec![promote(0), promote(1)])]
    {
        let mut desk = Desk::new(choice);
        assert_eq!(desk.plan(&of_use(90, "HHHH"), seconds(1)), [demote]);
        desk.hears(demote, seconds(1), OutcomeResult::Done);
        assert_eq!(desk.plan(&of_use(10, "hhHH"), seconds(2)), taken_back, "{choice}");
    }
}

#[test]
fn aligned_takes_back_a_split_that_held_a_whole_slot() {
    let short = |drawn| {
        let vm = vm_with(0, drawn, |_, row| row.guest_mapping = GuestMapping::Base4K);
        Snapshot { host: used(90), vms: vec![with_counters(vm)] }
    };
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(0), to: PageSize::Base4K };
    let mut desk = Desk::new("aligned");
    assert_eq!(desk.plan(&short("HHHH"), seconds(1)), [demote]);
    desk.hears(demote, seconds(1), OutcomeResult::Done);
    assert_eq!(desk.plan(&short("hhHH"), seconds(2)), [promote(0)]);
    assert_eq!(desk.plan(&short("HHHH"), seconds(3)), []);
}

/// `ff ff` are two regions of 4 MiB by their rates, `f` is one of 2 MiB behind a window without samples.
#[test]
fn schemes_see_regions_not_windows() {
    let histories =
        [samples("xx"), samples("xx"), samples("x-"), samples("x-"), AccessHistory::default(), samples("xx")];
    let snapshot = of(vec![vm_with(0, "ffffff", |at, row| row.access = histories[at])]);
    let promoted = |rules: &str| {
        let choice = format!("schemes:rules={rules}");
        Desk::new(&choice).promotions(&snapshot, seconds(1)).iter().map(|(_, w)| *w).collect::<Vec<_>>()
    };
    assert_eq!(promoted("4M max 5% max min max promote"), [0, 1, 2, 3]);
    assert_eq!(promoted("min 2M 5% max min max promote"), [5]);
    assert_eq!(promoted("min max 60% max min max promote"), [0, 1, 5]);
}

/// Windows 0 and 1 are first sampled at 1 s, 2 and 3 one turn later, and 4 at 5 s.
#[test]
fn windows_that_are_sampled_in_turns_are_one_region_of_schemes_with_the_age_of_the_youngest() {
    let sampled = |windows: usize| {
        let access = move |at: usize| if at < windows { samples("xx") } else { AccessHistory::default() };
        of(vec![vm_with(0, "fffff", move |at, row| row.access = access(at))])
    };
    let at = |milliseconds| Moment::after_start(Duration::from_millis(milliseconds));
    let mut desk = Desk::new("schemes:rules=8M max 5% max 2s max promote");
    assert_eq!(desk.promotions(&sampled(2), at(1_000)), []);
    assert_eq!(desk.promotions(&sampled(4), at(1_050)), []);
    assert_eq!(desk.promotions(&sampled(4), at(3_000)), [], "windows 2 and 3 are younger than 2 s");
    let first_four = [(0, 0), (0, 1), (0, 2), (0, 3)];
    assert_eq!(desk.promotions(&sampled(4), at(3_100)), first_four);
    assert_eq!(desk.promotions(&sampled(5), at(5_000)), first_four);
    assert_eq!(desk.promotions(&sampled(5), at(8_000)), first_four, "window 4 is far younger");
}

#[test]
fn schemes_respect_their_quota_interval_and_watermarks() {
    let touched = |drawn| vm_with(0, drawn, |_, row| row.access = samples("xx"));
    let at = |used_gib| Snapshot { host: used(used_gib), vms: vec![touched("ffff")] };
    let mut desk = Desk::new("schemes:quota_windows=3,interval_ms=2000,on_from=60,off_below=50");
    let plans: Vec<usize> = [(59, 0), (60, 1), (60, 2), (50, 3), (49, 5)]
        .map(|(used, now)| desk.plan(&at(used), seconds(now)).len())
        .into();
    assert_eq!(plans, [0, 3, 0, 3, 0]);
}

#[test]
fn schemes_release_only_windows_with_zero_pages() {
    let change = |at: usize, row: &mut WindowRow| {
        row.access = samples("--");
        row.zero = [Some(1), Some(0), None][at];
    };
    let snapshot = of(vec![vm_with(0, "HHH", change)]);
    let release = Action::Release { vm: VmId(0), window: WindowIndex::new(0) };
    assert_eq!(Desk::new("schemes:rules=min max 0% 0% min max release").plan(&snapshot, seconds(1)), [release]);
}

#[test]
fn no_policy_names_a_window_that_is_not_ready() {
    let vms = vec![vm_with(0, "fsnmqHh", |_, row| row.ready_at = seconds(5))];
    let snapshot = Snapshot { host: used(90), vms };
    for info in POLICIES {
        assert_eq!(Desk(info.with_defaults()).plan(&snapshot, seconds(4)), [], "{}", info.name);
    }
}
