//! The behaviour of each policy in small drawn cases, with the numbers of its source.
//!
//! One character is one window, from window 0 on:
//!
//! ```text
//!   .  no page present        f  full, base pages        H  huge page        h  huge page, held at 4 KiB
//!   s  1 page present         n  460 pages present       m  256 present      q  64 present
//! ```

use std::time::Duration;

use wideleaf_policies::policy::{POLICIES, PolicyInfo, RamStart};
use wideleaf_policies::reservations::LeftPages;
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{
    AccessHistory, Action, Backing, Budget, BudgetLimits, Bytes, Cost, GuestMapping, HostMemory, HugePages, Moment,
    Outcome, OutcomeResult, PageSize, PerTenThousand, Plan, Policy, PolicyChoice, Refusal, Reservations, SampleQuality,
    Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

pub(crate) fn seconds(n: u64) -> Moment {
    Moment::after_start(Duration::from_secs(n))
}

fn row(window: u64, drawn: char) -> WindowRow {
    let (resident, backing, is_held) = match drawn {
        '.' => (0, Backing::Unbacked, false),
        's' => (1, Backing::Base4K, false),
        'q' => (64, Backing::Base4K, false),
        'm' => (256, Backing::Base4K, false),
        'n' => (460, Backing::Base4K, false),
        'f' => (512, Backing::Base4K, false),
        'H' => (512, Backing::Huge2M, false),
        'h' => (512, Backing::Huge2M, true),
        other => panic!("{other} is not drawn above"),
    };
    WindowRow { is_held, ..WindowRow::new(WindowIndex::new(window), resident, backing) }
}

/// A VM as drawn; `change` adjusts each row.
pub(crate) fn vm_with(id: u32, drawn: &str, change: impl Fn(usize, &mut WindowRow)) -> VmSnapshot {
    let mut vm = VmSnapshot::with_capacity(VmId(id), drawn.len());
    for (at, window) in drawn.chars().enumerate() {
        let mut row = row(at as u64, window);
        change(at, &mut row);
        vm.push(row);
    }
    vm
}

fn vm(id: u32, drawn: &str) -> VmSnapshot {
    vm_with(id, drawn, |_, _| {})
}

fn of(vms: Vec<VmSnapshot>) -> Snapshot {
    Snapshot { host: None, vms }
}

/// A host with 100 GiB, of which `gibibytes` are in use.
fn used(gibibytes: u64) -> Option<HostMemory> {
    Some(HostMemory { total: gib(100), available: gib(100 - gibibytes), giant_pages_free: 0, ..HostMemory::default() })
}

/// Samples as drawn, the oldest first: `x` touched, `-` not.
pub(crate) fn samples(drawn: &str) -> AccessHistory {
    drawn.chars().fold(AccessHistory::default(), |history, sample| history.with(sample == 'x'))
}

const PLENTY: BudgetLimits =
    BudgetLimits { copy_per_second: gib(64), cpu_share: PerTenThousand::new(1_000_000), burst: Duration::from_secs(1) };

pub(crate) struct Desk(pub(crate) Box<dyn Policy>);

impl Desk {
    pub(crate) fn new(choice: &str) -> Desk {
        Desk(PolicyChoice::parse(choice).expect("a policy").make())
    }

    pub(crate) fn plan_within(&mut self, snapshot: &Snapshot, now: Moment, limits: BudgetLimits) -> Vec<Action> {
        let mut plan = Plan::default();
        self.0.plan(snapshot, now, &mut Budget::new(limits, now), &mut plan);
        plan.actions().iter().map(|planned| planned.action).collect()
    }

    pub(crate) fn plan(&mut self, snapshot: &Snapshot, now: Moment) -> Vec<Action> {
        self.plan_within(snapshot, now, PLENTY)
    }

    /// VM and window of each promotion; the plan may contain no other action.
    fn promotions(&mut self, snapshot: &Snapshot, now: Moment) -> Vec<(u32, u64)> {
        let promotion = |action| match action {
            Action::Promote { vm, window, to: PageSize::Huge2M } => (vm.0, window.get()),
            other => panic!("{other:?} is not a promotion to 2 MiB"),
        };
        self.plan(snapshot, now).into_iter().map(promotion).collect()
    }

    pub(crate) fn hears(&mut self, action: Action, at: Moment, result: OutcomeResult) {
        let cost = Cost { copied: mib(2), cpu: Duration::from_micros(560) };
        self.0.learn(&Outcome { action, at, cost, unavailable: cost.cpu, result });
    }

    pub(crate) fn figure(&self, name: &str) -> u64 {
        self.0.figures().into_iter().find(|(known, _)| *known == name).expect("it counts that").1
    }
}

pub(crate) fn promote(window: u64) -> Action {
    Action::Promote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Huge2M }
}

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

/// The reservations under `choice`, with windows of VM 0 reserved in this order, a second apart.
fn reserved(choice: &str, windows: &[u64]) -> Reservations {
    let mut book = Reservations::new(Desk::new(choice).0.reserves().expect("it reserves"));
    for (second, window) in (0..).zip(windows) {
        book.reserve(VmId(0), WindowIndex::new(*window), seconds(second));
    }
    book
}

/// No limit on the number of reservations that may be broken at once.
const ALL: usize = usize::MAX;

fn queue(book: &Reservations) -> Vec<u64> {
    book.queue().map(|(_, window)| window.get()).collect()
}

/// Touches `pages` more pages of a window of VM 0. Returns whether it becomes large.
fn touch(book: &mut Reservations, window: u64, pages: u16, at: u64) -> bool {
    book.populate(VmId(0), WindowIndex::new(window), pages, seconds(at))
}

#[test]
fn only_one_policy_reserves_frames_and_it_plans_nothing() {
    let reserving = |info: &&PolicyInfo| info.with_defaults().reserves().is_some();
    let names: Vec<_> = POLICIES.iter().filter(reserving).map(|info| info.name).collect();
    let mut desk = Desk::new("reservation");
    assert_eq!((names, desk.0.ram_start()), (vec!["reservation"], RamStart::OnReservableFrames));
    assert_eq!(desk.plan(&of(vec![vm(0, "fsh")]), seconds(1)), []);
}

#[test]
fn a_reservation_becomes_large_with_its_512th_page_and_leaves_the_queue() {
    let mut book = reserved("reservation", &[3]);
    let large: Vec<u16> = (1..=512).filter(|_| touch(&mut book, 3, 1, 1)).collect();
    assert_eq!(large, [512]);
    assert_eq!((queue(&book), book.unpopulated()), (vec![], Bytes::ZERO));
}

#[test]
fn a_partly_filled_window_never_becomes_large() {
    let mut book = reserved("reservation", &[3]);
    assert!(!touch(&mut book, 3, 511, 1));
    assert_eq!((queue(&book), book.unpopulated()), (vec![3], kib(4)));
}

#[test]
fn with_a_threshold_of_64_the_64th_page_makes_it_large() {
    let mut book = reserved("reservation:threshold=64", &[3]);
    assert_eq!([63, 1, 1].map(|pages| touch(&mut book, 3, pages, 1)), [false, true, false]);
}

/// `4 1 9`, then 4 is touched: `1 9 4`, then 1 within the tick in which it was queued: no change.
#[test]
fn a_change_puts_a_reservation_at_the_tail_once_a_tick() {
    let mut book = reserved("reservation", &[4, 1, 9]);
    assert_eq!(queue(&book), [4, 1, 9]);
    touch(&mut book, 4, 1, 3);
    assert_eq!(queue(&book), [1, 9, 4]);
    touch(&mut book, 1, 1, 1);
    assert_eq!(queue(&book), [1, 9, 4]);
}

#[test]
fn a_shortage_breaks_the_reservations_changed_longest_ago_and_no_more_than_needed() {
    let mut book = reserved("reservation", &[4, 1, 9]);
    touch(&mut book, 4, 100, 3);
    // 2048 MiB, of which 1741 are in use (85 %): 614 must become free again, as 70 % is 1434
    let short =
        |available| Some(HostMemory { total: mib(2048), available, giant_pages_free: 0, ..HostMemory::default() });
    assert_eq!(book.to_break(short(mib(308)), ALL), [], "84.96 % is not yet short");
    let broken: Vec<_> = book.to_break(short(mib(307)), ALL).iter().map(|(_, window)| window.get()).collect();
    assert_eq!(broken, [1, 9, 4], "all of them; the one touched last comes last");
    let mut book = reserved("reservation:break_from=85,break_to=85", &[4, 1, 9]);
    let broken: Vec<_> = book.to_break(short(mib(304)), ALL).iter().map(|(_, window)| window.get()).collect();
    assert_eq!((broken, queue(&book)), (vec![4, 1], vec![9]), "308 MiB are enough");
    assert_eq!(book.unpopulated(), mib(2));
    assert_eq!(book.populated(VmId(0), WindowIndex::new(4)), None, "a broken reservation is no longer kept");
}

/// Rounds of two; after the first round 9 is touched and 7 reserved.
#[test]
fn rounds_of_breaking_follow_the_current_order_of_the_queue() {
    let mut book = reserved("reservation", &[4, 1, 9, 2]);
    let round =
        |book: &mut Reservations| book.to_break(used(99), 2).iter().map(|(_, window)| window.get()).collect::<Vec<_>>();
    assert_eq!((round(&mut book), queue(&book)), (vec![4, 1], vec![9, 2]));
    assert_eq!(book.unpopulated(), mib(4), "reservations that are not broken yet stay");
    touch(&mut book, 9, 1, 3);
    book.reserve(VmId(0), WindowIndex::new(7), seconds(4));
    assert_eq!([round(&mut book), round(&mut book)], [vec![2, 9], vec![7]]);
}

#[test]
fn without_the_hosts_memory_no_reservation_is_broken() {
    let mut book = reserved("reservation", &[4]);
    assert_eq!(book.to_break(used(99), ALL).len(), 1, "the host is still short");
    book.reserve(VmId(0), WindowIndex::new(1), Moment::START);
    assert_eq!(book.to_break(None, ALL), []);
    assert_eq!(book.to_break(used(99), ALL).len(), 1);
}

#[test]
fn a_large_window_is_never_broken() {
    let mut book = reserved("reservation", &[4]);
    assert_eq!(book.to_break(None, ALL), []);
    assert!(touch(&mut book, 4, 512, 1));
    assert_eq!(book.to_break(used(99), ALL), []);
}

/// Gives back `populated` populated and `unpopulated` reserved pages of a window of VM 0. Returns whether it is still
/// reserved.
fn give_back(book: &mut Reservations, window: u64, populated: u16, unpopulated: u16, at: u64) -> bool {
    book.depopulate(VmId(0), WindowIndex::new(window), LeftPages { populated, unpopulated }, seconds(at))
}

#[test]
fn giving_pages_back_makes_a_reservation_partial_and_the_last_page_ends_it() {
    let window = WindowIndex::new(4);
    let mut book = reserved("reservation", &[4, 1]);
    assert!(touch(&mut book, 4, 512, 2));
    assert!(give_back(&mut book, 4, 2, 0, 3));
    assert_eq!((queue(&book), book.unpopulated()), (vec![1, 4], mib(2)), "their two frames are the host's");
    assert_eq!((book.populated(VmId(0), window), book.absent(VmId(0), window)), (Some(510), 2));
    book.refill(VmId(0), window, 2);
    assert_eq!(book.unpopulated(), mib(2) + kib(8));
    assert!(touch(&mut book, 4, 2, 4), "it is large again with the last page");
    assert!(!give_back(&mut book, 4, 512, 0, 5), "it is reserved no more");
    assert_eq!((book.populated(VmId(0), window), book.unpopulated()), (None, mib(2)));
    book.reserve(VmId(0), window, seconds(6));
}

#[test]
fn a_window_with_pages_given_back_is_not_large_before_they_are_used_again() {
    let mut book = reserved("reservation:threshold=64", &[4]);
    assert!(!touch(&mut book, 4, 60, 1));
    assert!(give_back(&mut book, 4, 1, 3, 2));
    assert_eq!(book.unpopulated(), kib(4) * (512 - 60 - 3));
    assert!(!touch(&mut book, 4, 100, 3), "159 pages are populated, but a large page would take the four again");
    book.refill(VmId(0), WindowIndex::new(4), 4);
    assert!(touch(&mut book, 4, 4, 4));
}

#[test]
fn what_the_guest_touched_while_a_window_was_large_counts_as_populated() {
    let mut book = reserved("reservation:threshold=64", &[4]);
    assert!(touch(&mut book, 4, 64, 1));
    book.demote(VmId(0), WindowIndex::new(4), seconds(2));
    assert_eq!((book.populated(VmId(0), WindowIndex::new(4)), book.unpopulated()), (Some(512), Bytes::ZERO));
    assert!(give_back(&mut book, 4, 500, 0, 3), "12 pages are left that the guest may use");
    assert!(!give_back(&mut book, 4, 12, 0, 4));
}

/// Given-back frames are the host's already: breaking `4` frees 512 - 100 - 300 pages, and a window that was given
/// back whole has no turn any more.
#[test]
fn breaking_counts_only_frames_that_are_still_reserved() {
    let mut book = reserved("reservation:break_from=85,break_to=85", &[4, 1, 9]);
    touch(&mut book, 4, 400, 1);
    assert!(give_back(&mut book, 4, 300, 0, 1));
    touch(&mut book, 1, 1, 1);
    assert!(!give_back(&mut book, 1, 1, 0, 1));
    touch(&mut book, 9, 1, 3);
    assert_eq!((queue(&book), book.unpopulated()), (vec![4, 9], kib(4) * (112 + 511)));
    // 2048 MiB, of which 1741 are 85 %: 307 MiB must be available, and 304 are; 4 adds 0.4 MiB, and 9 adds 2.
    let short =
        Some(HostMemory { total: mib(2048), available: mib(304), giant_pages_free: 0, ..HostMemory::default() });
    let broken: Vec<_> = book.to_break(short, ALL).iter().map(|(_, window)| window.get()).collect();
    assert_eq!((broken, book.unpopulated()), (vec![4, 9], Bytes::ZERO));
}

/// A window that was large and lost some pages to a balloon has no unused frame.
#[test]
fn a_reservation_that_would_free_nothing_is_not_broken_and_becomes_large_again() {
    let mut book = reserved("reservation", &[4, 1]);
    assert!(touch(&mut book, 4, 512, 1));
    assert!(give_back(&mut book, 4, 100, 0, 2));
    touch(&mut book, 1, 1, 3);
    assert_eq!((queue(&book), book.unpopulated()), (vec![4, 1], kib(4) * 511));
    assert_eq!(book.to_break(used(99), ALL), [(VmId(0), WindowIndex::new(1))]);
    assert_eq!(book.to_break(used(99), ALL), [], "the host is still short");
    book.refill(VmId(0), WindowIndex::new(4), 100);
    assert_eq!(book.to_break(used(50), ALL), [], "its frames are unused, but the host has enough");
    assert!(touch(&mut book, 4, 100, 4));
}

#[test]
fn partial_reservations_are_counted_by_the_time_since_their_last_change() {
    let mut book = reserved("reservation", &[4, 1, 9, 2, 5]);
    assert!(touch(&mut book, 2, 512, 50), "a large window is not partial");
    touch(&mut book, 9, 1, 99);
    touch(&mut book, 1, 1, 70);
    // at 100: 9 changed a second ago, 1 30 seconds ago, 4 and 5 at 0 and 4
    assert_eq!(book.partial_by_age(seconds(100)), [0, 1, 1, 2]);
    assert_eq!(book.partial_by_age(seconds(99)), [1, 0, 1, 2]);
}

/// A window that was broken, or never became large, has no reservation: it may get a new one.
#[test]
fn a_reservation_that_ended_can_be_made_again() {
    let mut book = reserved("reservation", &[4, 1]);
    book.end(VmId(0), WindowIndex::new(4));
    book.end(VmId(0), WindowIndex::new(77));
    assert_eq!((queue(&book), book.unpopulated()), (vec![1], mib(2)));
    assert_eq!(book.to_break(used(99), ALL).len(), 1);
    for window in [4, 1] {
        book.reserve(VmId(0), WindowIndex::new(window), seconds(5));
    }
    assert_eq!((queue(&book), book.unpopulated()), (vec![4, 1], mib(4)));
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

pub(crate) const HOT: &str = "xxxxxxxxxxxxxxxx";
pub(crate) const IDLE: &str = "----------------";

/// Under this choice only a full window is promoted without proof.
pub(crate) const PROOF: &str = "auto:resident_min=100";

/// A hot window with one page missing.
fn hot_for_proof(access: AccessHistory, guest: GuestMapping) -> Snapshot {
    of(vec![vm_with(0, "f", |_, row| (row.access, row.guest_mapping, row.resident) = (access, guest, 511))])
}

/// The first second at which auto promotes a window that is hot from 0 on.
fn promoted_after(snapshot: &Snapshot) -> Option<u64> {
    let mut desk = Desk::new(PROOF);
    (0..120).find(|now| !desk.plan(snapshot, seconds(*now)).is_empty())
}

/// The cost is 560 us × 2000 = 1.12 M cycles, and half as much again is required: 1.68 M. Aligned: 10 000 misses ×
/// 19 × 4 = 760 k cycles a second, 2.2 s. Guest on base pages: 10 000 × 5 × 4 = 200 k, 8.4 s.
#[test]
fn auto_promotes_when_a_window_has_been_hot_long_enough_to_pay() {
    let after = |guest| promoted_after(&hot_for_proof(samples(HOT), guest));
    let guests = [GuestMapping::Huge2M, GuestMapping::Base4K, GuestMapping::Unmapped];
    assert_eq!(guests.map(after), [Some(3), Some(9), None]);
}

#[test]
fn auto_promotes_a_full_window_without_proof_unless_its_latest_sample_was_idle() {
    let after = |drawn| {
        let snapshot = of(vec![vm_with(0, "f", |_, row| row.access = samples(drawn))]);
        Desk::new("auto").plan(&snapshot, seconds(0))
    };
    assert_eq!(["x", "-x", "x-", "-"].map(after), [vec![promote(0)], vec![promote(0)], vec![], vec![]]);
}

#[test]
fn auto_takes_an_idle_sample_of_many_windows_for_no_proof_of_one() {
    let after = |windows| {
        let quality = SampleQuality::new(Duration::from_secs(5), windows);
        let snapshot = of(vec![vm_with(0, "f", |_, row| (row.access, row.access_quality) = (samples("-"), quality))]);
        Desk::new("auto").plan(&snapshot, seconds(0))
    };
    assert_eq!([1, 4, 5].map(after), [vec![], vec![], vec![promote(0)]]);
}

/// In a guest on base pages. Touched 1000 times a second: at the upper limit, 170 000 × 20 = 3.4 M cycles a second,
/// 0.5 s; with 2 MiB pages × 76 = 12.9 M, 0.13 s. Touched 100 times, 96 in its bucket: × 512 × 20 = 983 k, 1.7 s.
/// Touched once: 10 240, which bring 614 k in the horizon of a minute.
#[test]
fn auto_weighs_a_window_by_its_touch_frequency_not_by_its_touched_samples() {
    let touched = |touches, guest| hot_for_proof(samples(HOT).with_touches_per_s(Some(touches)), guest);
    let after = |touches| promoted_after(&touched(touches, GuestMapping::Base4K));
    assert_eq!([1000, 100, 1].map(after), [Some(1), Some(2), None]);
    let mut desk = Desk::new(PROOF);
    let aligned = touched(1000, GuestMapping::Huge2M);
    let at = |ms| Moment::after_start(Duration::from_millis(ms));
    assert_eq!([0, 100, 200].map(|ms| desk.plan(&aligned, at(ms)).len()), [0, 0, 1]);
}

/// The busiest window of a guest on base pages, with 1 page present: 170 000 / 512 × 20 = 6 640 cycles a second
/// against 511 000 of bloat. With 71: 471 460 against 441 000, so 30 460 a second, which bring 1.68 M within the
/// minute. With 70: 22 820, which do not.
#[test]
fn auto_never_promotes_a_sparse_window_that_does_not_pay_for_its_bloat() {
    let busiest = samples(HOT).with_touches_per_s(Some(1_000_000));
    let hot = |drawn| of(vec![vm_with(0, drawn, |_, row| row.access = busiest)]);
    assert_eq!(promoted_after(&hot("s")), None);
    let present = |pages| of(vec![vm_with(0, "q", |_, row| (row.access, row.resident) = (busiest, pages))]);
    assert_eq!([70, 71].map(|pages| promoted_after(&present(pages))), [None, Some(56)]);
    let mut desk = Desk::new("auto");
    desk.plan(&hot("ss"), seconds(1));
    assert_eq!(desk.figure("sparse_now"), 2);
}

#[test]
fn auto_restarts_the_hot_time_of_a_window_that_was_cold() {
    let with = |drawn| hot_for_proof(samples(drawn), GuestMapping::Base4K);
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.plan(&with(HOT), seconds(0)), []);
    assert_eq!(desk.plan(&with("xxxxxxxxxxxxxxx-"), seconds(5)), [], "one sample without an access may be chance");
    assert_eq!(desk.plan(&with("xxxxxxxxxxxxxx--"), seconds(6)), []);
    assert_eq!(desk.plan(&with(HOT), seconds(9)), [], "hot for 9 s, except for one break");
    assert_eq!(desk.plan(&with(HOT), seconds(18)), [promote(0)]);
}

#[test]
fn auto_puts_the_best_return_first_and_unproven_windows_last() {
    let change = |at: usize, row: &mut WindowRow| {
        row.access = [AccessHistory::default(), samples("x-x-x-x-x-x-x-x-"), samples(HOT)][at];
        row.guest_mapping = GuestMapping::Huge2M;
        row.resident = [512, 511, 511][at];
    };
    let snapshot = of(vec![vm_with(0, "fff", change)]);
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.promotions(&snapshot, seconds(0)), [(0, 0)], "no window has been hot for any time yet");
    assert_eq!(desk.promotions(&snapshot, seconds(30)), [(0, 2), (0, 1), (0, 0)]);
    assert_eq!((desk.figure("planned_on_access"), desk.figure("planned_on_residency")), (2, 2));
}

#[test]
fn auto_without_samples_promotes_nearly_full_windows_the_guest_maps() {
    let guests = [GuestMapping::Unknown, GuestMapping::Huge2M, GuestMapping::Unmapped, GuestMapping::Base4K];
    let snapshot = of(vec![vm_with(0, "nnnm", |at, row| row.guest_mapping = guests[at])]);
    assert_eq!(Desk::new("auto").promotions(&snapshot, seconds(0)), [(0, 1), (0, 0)]);
}

/// Accesses to windows that a promotion cannot help are of no use to `auto`, unless they are large already.
#[test]
fn auto_uses_no_samples_of_windows_that_shadow_tables_keep_small() {
    let mappings = [GuestMapping::Base4K, GuestMapping::Huge2M, GuestMapping::Unknown, GuestMapping::Base4K];
    let vm = vm_with(0, "fffH", |at, row| row.guest_mapping = mappings[at]);
    let used = |walk: WalkCost| {
        let mut desk = Desk::new("auto");
        desk.0.take_walk_cost(&walk);
        [0, 1, 2, 3].map(|row| desk.0.uses_access(&vm, row))
    };
    assert_eq!(used(WalkCost::PRIOR), [true; 4]);
    assert_eq!(used(WalkCost::PRIOR.under_shadow_paging()), [false, true, true, true]);
}

/// With 67 pages the busiest window saves 444 920 cycles a second, and its bloat costs 445 000; with 68 pages it saves
/// 451 560 and costs 444 000.
#[test]
fn auto_samples_a_window_that_cannot_pay_for_its_bloat_once_a_minute() {
    let uses = |pages, access, age_s| {
        let quality = SampleQuality::new(Duration::from_secs(age_s), 1);
        let vm = vm_with(0, "q", |_, row| (row.resident, row.access, row.access_quality) = (pages, access, quality));
        Desk::new("auto").0.uses_access(&vm, 0)
    };
    let (none, hot) = (AccessHistory::default(), samples(HOT));
    assert_eq!([uses(1, none, 0), uses(1, hot, 0), uses(67, hot, 59), uses(67, hot, 60)], [true, false, false, true]);
    assert_eq!([68, 512].map(|pages| uses(pages, hot, 0)), [true; 2], "the busiest of these pay");
}

/// A full window and a hot one for each mapping of the guest: no promotion where shadow tables keep the guest's
/// base pages unchanged.
#[test]
fn auto_under_shadow_paging_skips_windows_that_the_guest_maps_with_base_pages() {
    let guests = [GuestMapping::Base4K, GuestMapping::Huge2M, GuestMapping::Unknown, GuestMapping::Mixed];
    let change = |at: usize, row: &mut WindowRow| (row.access, row.guest_mapping) = (samples(HOT), guests[at % 4]);
    let snapshot = of(vec![vm_with(0, "ffffnnnn", change)]);
    let promoted = |walk: WalkCost| {
        let mut desk = Desk(PolicyChoice::parse("auto").expect("a policy").make_for(&walk));
        desk.plan(&snapshot, seconds(0));
        let mut windows: Vec<u64> =
            desk.promotions(&snapshot, seconds(60)).into_iter().map(|(_, window)| window).collect();
        windows.sort_unstable();
        windows
    };
    assert_eq!(promoted(WalkCost::PRIOR), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(promoted(WalkCost::PRIOR.under_shadow_paging()), [1, 2, 3, 5, 6, 7]);
}

#[test]
fn auto_adds_no_page_while_the_host_is_short_and_gives_up_what_pays() {
    let change = |at: usize, row: &mut WindowRow| {
        row.access =
            [AccessHistory::default(), AccessHistory::default(), samples(IDLE), samples(HOT), samples(IDLE)][at];
        row.zero = [None, None, Some(500), Some(500), Some(10)][at];
    };
    let snapshot = Snapshot { host: used(90), vms: vec![vm_with(0, "fnHHH", change)] };
    let release = |window| Action::Release { vm: VmId(0), window: WindowIndex::new(window) };
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(4), to: PageSize::Base4K };
    assert_eq!(Desk::new("auto").plan(&snapshot, seconds(1)), [release(2), demote, promote(0)]);
}

/// Auto's figures after a promotion at 9 s, when the window continues as `later` for ten samples of a second each.
fn score_after(later: &'static str) -> (u64, u64, u64) {
    let mut desk = Desk::new(PROOF);
    let hot = hot_for_proof(samples(HOT), GuestMapping::Base4K);
    desk.plan(&hot, seconds(0));
    assert_eq!(desk.plan(&hot, seconds(9)), [promote(0)]);
    desk.hears(promote(0), seconds(9), OutcomeResult::Done);
    let after = of(vec![vm_with(0, "H", |_, row| row.access = samples(later))]);
    (10..20).for_each(|now| assert_eq!(desk.plan(&after, seconds(now)), []));
    (desk.figure("paid_back"), desk.figure("written_off"), desk.figure("caution_percent"))
}

#[test]
fn auto_scores_its_own_decisions_and_becomes_cautious() {
    assert_eq!(score_after(HOT), (1, 0, 100)); // 200 k a second pay 1.12 M in 6 s
    assert_eq!(score_after(IDLE), (0, 1, 111)); // one of nine
    assert_eq!(score_after("x---------------"), (0, 0, 100)); // 12.5 k a second: not paid back yet, and not written off
}

#[test]
fn no_policy_names_a_window_that_is_not_ready() {
    let vms = vec![vm_with(0, "fsnmqHh", |_, row| row.ready_at = seconds(5))];
    let snapshot = Snapshot { host: used(90), vms };
    for info in POLICIES {
        assert_eq!(Desk(info.with_defaults()).plan(&snapshot, seconds(4)), [], "{}", info.name);
    }
}
