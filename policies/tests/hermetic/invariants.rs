//! The guarantees of every policy, over random snapshots and budgets.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{
    AccessHistory, Action, Backing, Budget, BudgetLimits, Bytes, GuestMapping, GuestProgress, HostMemory,
    HugePagePrice, HugePages, Moment, Outcome, OutcomeResult, PageSize, PerTenThousand, Plan, PlannedAction,
    PolicyChoice, Refusal, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

const NOW: Moment = Moment::after_start(Duration::from_secs(10));

fn backing() -> impl Strategy<Value = (u16, Backing, bool)> {
    prop_oneof![
        2 => (1_u16..=512, any::<bool>()).prop_map(|(resident, is_held)| (resident, Backing::Base4K, is_held)),
        2 => any::<bool>().prop_map(|is_held| (512, Backing::Huge2M, is_held)),
        1 => Just((512, Backing::Giant1G, false)),
        1 => Just((0, Backing::Unbacked, false)),
    ]
}

fn guest_mapping() -> impl Strategy<Value = GuestMapping> {
    use GuestMapping::*;
    prop::sample::select(vec![Unknown, Unmapped, Base4K, Huge2M, Giant1G, Mixed])
}

fn frequency() -> impl Strategy<Value = Option<u64>> {
    prop::option::of(prop_oneof![0_u64..100, 0..u64::MAX])
}

fn row() -> impl Strategy<Value = WindowRow> {
    let pages = || prop::option::of(0_u16..=512);
    let given_back = prop_oneof![3 => Just(0_u16), 1 => 0_u16..=512];
    let of_pages = (pages(), pages(), given_back);
    (backing(), 0_u64..20, (any::<u16>(), any::<u8>(), frequency()), of_pages, guest_mapping()).prop_map(
        |((resident, backing, is_held), ready, (touched, samples, frequency), of_pages, guest_mapping)| {
            let (written, zero, given_back) = of_pages;
            WindowRow {
                is_held,
                ready_at: Moment::after_start(Duration::from_secs(ready)),
                access: AccessHistory::from_parts(touched, samples).with_touches_per_s(frequency),
                written,
                zero,
                guest_mapping,
                given_back,
                ..WindowRow::new(WindowIndex::new(0), resident, backing)
            }
        },
    )
}

/// Rows with gaps between them, of at most three windows.
fn scattered() -> impl Strategy<Value = Vec<(u64, WindowRow)>> {
    prop::collection::vec((1_u64..4, row()), 0..60)
}

/// All rows of giant 1 and some of giant 2, all alike: giant 1 may become one page.
fn whole_giant() -> impl Strategy<Value = Vec<(u64, WindowRow)>> {
    (row(), 0_usize..40).prop_map(|(row, more)| {
        let mut rows = vec![(1, row); 512 + more];
        rows[0].0 = 512;
        rows
    })
}

fn vm(id: u32) -> impl Strategy<Value = VmSnapshot> {
    let tolerated = prop_oneof![Just(0_u16), 0_u16..=512];
    let reading = |(phase, done, ms)| GuestProgress { phase, done, cpu: Duration::from_millis(ms) };
    let progress = prop::collection::vec((0_u64..2, any::<u64>(), 0_u64..1000).prop_map(reading), 0..4);
    let rows = prop_oneof![4 => scattered(), 1 => whole_giant()];
    (rows, tolerated, progress).prop_map(move |(rows, tolerated, progress)| {
        let mut vm = VmSnapshot { progress, ..VmSnapshot::with_capacity(VmId(id), rows.len()) };
        vm.given_back_tolerated = tolerated;
        let mut window = 0;
        for (gap, row) in rows {
            window += gap;
            vm.push(WindowRow { window: WindowIndex::new(window), ..row });
        }
        vm
    })
}

fn host() -> impl Strategy<Value = Option<HostMemory>> {
    let host = |(available, giant_pages_free, huge_pages)| HostMemory {
        total: gib(64),
        available: gib(available),
        giant_pages_free,
        huge_pages,
    };
    prop::option::of((0_u64..=64, 0_u64..3, huge_pages()).prop_map(host))
}

fn huge_pages() -> impl Strategy<Value = HugePages> {
    let price = |(cycles_per_s, may_vacate, free)| HugePages::Priced(HugePagePrice { cycles_per_s, may_vacate, free });
    prop_oneof![
        2 => Just(HugePages::Plenty),
        2 => (0_u64..8).prop_map(|free| HugePages::Scarce { free }),
        1 => (0_u64..20_000_000, 0_u64..8, prop::option::of(0_u64..8)).prop_map(price),
    ]
}

fn snapshot() -> impl Strategy<Value = Snapshot> {
    (vm(0), vm(1), vm(2), host()).prop_map(|(a, b, c, host)| Snapshot { vms: vec![a, b, c], host })
}

fn limits() -> impl Strategy<Value = BudgetLimits> {
    (0_u64..400, 0_u32..10_000).prop_map(|(copy, cpu)| BudgetLimits {
        copy_per_second: mib(copy),
        cpu_share: PerTenThousand::new(cpu),
        burst: Duration::from_millis(200),
    })
}

fn is_more_than_a_burst(planned: &[PlannedAction], limits: BudgetLimits) -> bool {
    let copied: Bytes = planned.iter().map(|planned| planned.cost.copied).sum();
    let cpu: Duration = planned.iter().map(|planned| planned.cost.cpu).sum();
    copied.get() > limits.copy_per_second.get() / 5
        || cpu.as_nanos() > 200_000_000 * u128::from(limits.cpu_share.get()) / 10_000
}

fn plan_of(policy: &str, snapshot: &Snapshot, limits: BudgetLimits) -> Vec<PlannedAction> {
    let info = wideleaf_policies::policy::by_name(policy).expect("it is in the list");
    let mut budget = Budget::new(limits, NOW);
    let mut plan = Plan::with_bound(64);
    info.with_defaults().plan(snapshot, NOW, &mut budget, &mut plan);
    plan.actions().to_vec()
}

fn outcome_result() -> impl Strategy<Value = OutcomeResult> {
    let refusals = [Refusal::NoHugePage, Refusal::Busy, Refusal::NotEligible].map(OutcomeResult::Refused);
    prop_oneof![2 => Just(OutcomeResult::Done), 1 => prop::sample::select(refusals.to_vec())]
}

/// Windows that an action changes.
fn windows_of(action: Action) -> impl Iterator<Item = WindowIndex> {
    let is_of_giant =
        matches!(action, Action::Promote { to: PageSize::Giant1G, .. } | Action::Demote { to: PageSize::Huge2M, .. });
    let count = if is_of_giant { 512 } else { 1 };
    (0..count).map(move |n| WindowIndex::new(action.window().get() + n))
}

/// Whether the action changes anything at this row.
fn makes_sense(action: Action, vm: &VmSnapshot, row: usize) -> bool {
    let (backing, is_held) = (vm.backing[row], vm.is_held[row]);
    match action {
        Action::Promote { to: PageSize::Giant1G, .. } => backing != Backing::Giant1G,
        Action::Promote { .. } => !backing.is_large() || is_held,
        Action::Demote { .. } => backing.is_large() && !is_held,
        Action::Vacate { .. } => backing == Backing::Huge2M && !is_held,
        Action::Move { node, .. } => vm.node[row].most() != Some(node),
        Action::Release { .. } => backing.is_large() && vm.zero[row].is_some_and(|zero| zero > 0),
    }
}

/// Whether the action makes a window large although more of it is given back than is tolerated. A window that is
/// large and only held has that memory already.
fn takes_given_back(action: Action, vm: &VmSnapshot, row: usize) -> bool {
    let is_recovery = vm.is_held[row] && vm.backing[row].is_large();
    let makes_large = match action {
        Action::Promote { to: PageSize::Giant1G, .. } => true,
        Action::Promote { .. } => !is_recovery,
        Action::Demote { .. } | Action::Release { .. } | Action::Vacate { .. } | Action::Move { .. } => false,
    };
    makes_large && vm.given_back[row] > vm.given_back_tolerated
}

/// The contract of a plan, except for its cost.
fn check(policy: &str, snapshot: &Snapshot, now: Moment, plan: &[PlannedAction]) -> Result<(), TestCaseError> {
    let mut named = BTreeSet::new();
    for PlannedAction { action, .. } in plan.iter().copied() {
        let vm = snapshot.vm(action.vm()).expect("a VM of the snapshot");
        let row = vm.row(action.window()).expect("a window of the snapshot");
        let is_backed = windows_of(action).filter_map(|window| vm.row(window)).any(|row| vm.resident[row] > 0);
        prop_assert!(is_backed && vm.ready_at[row] <= now, "{policy}: {action:?}");
        prop_assert!(makes_sense(action, vm, row), "{policy}: {action:?}");
        for window in windows_of(action) {
            let takes_again = vm.row(window).is_some_and(|row| takes_given_back(action, vm, row));
            prop_assert!(!takes_again, "{policy}: {action:?} takes {window}, which was given back");
            prop_assert!(named.insert((vm.vm, window)), "{policy}: {window} twice");
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_plan_never_costs_more_than_the_budget_grants(snapshot in snapshot(), limits in limits()) {
        for policy in POLICIES {
            let plan = plan_of(policy.name, &snapshot, limits);
            // What costs more than a burst is borrowed, alone, from a full budget: an action, or the two of a trade.
            let is_trade = plan.first().is_some_and(|first| matches!(first.action, Action::Vacate { .. }));
            let longest = if is_trade { 2 } else { 1 };
            let borrowed = (1..=longest.min(plan.len())).find(|n| is_more_than_a_burst(&plan[..*n], limits));
            let plan = &plan[borrowed.unwrap_or(0)..];
            let copied: Bytes = plan.iter().map(|planned| planned.cost.copied).sum();
            let cpu: Duration = plan.iter().map(|planned| planned.cost.cpu).sum();
            prop_assert!(copied.get() <= limits.copy_per_second.get() / 5, "{}: {copied}", policy.name);
            let cpu_max = 200_000_000 * u128::from(limits.cpu_share.get()) / 10_000;
            prop_assert!(cpu.as_nanos() <= cpu_max, "{}", policy.name);
        }
    }

    #[test]
    fn a_plan_names_backed_ready_windows_each_once(snapshot in snapshot(), limits in limits()) {
        for policy in POLICIES {
            check(policy.name, &snapshot, NOW, &plan_of(policy.name, &snapshot, limits))?;
        }
    }

    #[test]
    fn the_guarantees_hold_after_any_past_and_plans_repeat_exactly(
        past in prop::collection::vec((snapshot(), outcome_result(), 0_u64..30), 1..5),
    ) {
        for policy in POLICIES {
            let mut twins = [policy.with_defaults(), policy.with_defaults()];
            let mut now = NOW;
            for (snapshot, result, pause) in &past {
                now = now + Duration::from_secs(*pause);
                let [first, second] = twins.each_mut().map(|twin| {
                    let mut plan = Plan::with_bound(64);
                    twin.plan(snapshot, now, &mut Budget::new(BudgetLimits::default(), now), &mut plan);
                    for PlannedAction { action, cost, .. } in plan.actions().iter().copied() {
                        twin.learn(&Outcome { action, at: now, cost, unavailable: cost.cpu, result: *result });
                    }
                    plan.actions().to_vec()
                });
                prop_assert_eq!(&first, &second, "{}", policy.name);
                check(policy.name, snapshot, now, &first)?;
            }
        }
    }

    /// The same with giants, which are an option of `auto`.
    #[test]
    fn the_guarantees_hold_with_giants_after_any_past(
        past in prop::collection::vec((snapshot(), outcome_result(), 0_u64..30), 1..5),
    ) {
        let mut auto = PolicyChoice::parse("auto:giant=1,horizon_s=3600").expect("it is in the list").make();
        let mut now = NOW;
        for (snapshot, result, pause) in &past {
            now = now + Duration::from_secs(*pause);
            let mut plan = Plan::with_bound(64);
            auto.plan(snapshot, now, &mut Budget::new(BudgetLimits::default(), now), &mut plan);
            for PlannedAction { action, cost, .. } in plan.actions().iter().copied() {
                auto.learn(&Outcome { action, at: now, cost, unavailable: cost.cpu, result: *result });
            }
            check("auto:giant=1", snapshot, now, plan.actions())?;
        }
    }

    /// A market in which free pages suffice changes no plan, whatever the policy has seen.
    #[test]
    fn plans_are_the_same_with_and_without_a_market_while_free_pages_suffice(
        past in prop::collection::vec((snapshot(), outcome_result(), 0_u64..30), 1..5),
    ) {
        let auto = wideleaf_policies::policy::by_name("auto").expect("it is in the list");
        let (scarce, priced) = (HugePages::Scarce { free: 1000 }, HugePages::Priced(HugePagePrice::default()));
        let mut twins = [HugePages::Plenty, scarce, priced].map(|huge_pages| (huge_pages, auto.with_defaults()));
        let mut now = NOW;
        for (snapshot, result, pause) in &past {
            now = now + Duration::from_secs(*pause);
            let [plenty, scarce, priced] = twins.each_mut().map(|(huge_pages, twin)| {
                let host = snapshot.host.map(|host| HostMemory { huge_pages: *huge_pages, ..host });
                let (snapshot, mut plan) = (Snapshot { host, ..snapshot.clone() }, Plan::with_bound(64));
                twin.plan(&snapshot, now, &mut Budget::new(BudgetLimits::default(), now), &mut plan);
                for PlannedAction { action, cost, .. } in plan.actions().iter().copied() {
                    twin.learn(&Outcome { action, at: now, cost, unavailable: cost.cpu, result: *result });
                }
                plan.actions().to_vec()
            });
            prop_assert_eq!(&plenty, &scarce);
            prop_assert_eq!(&plenty, &priced);
        }
    }

    #[test]
    fn a_plan_is_the_same_for_the_same_snapshot(snapshot in snapshot(), limits in limits()) {
        for policy in POLICIES {
            prop_assert_eq!(plan_of(policy.name, &snapshot, limits), plan_of(policy.name, &snapshot, limits));
        }
    }

    #[test]
    fn outcomes_of_any_cost_do_not_break_a_policy(snapshot in snapshot(), cpu_ms in 0_u64..100_000) {
        for policy in POLICIES {
            let mut live = policy.with_defaults();
            let mut budget = Budget::new(BudgetLimits::default(), NOW);
            let mut plan = Plan::default();
            live.plan(&snapshot, NOW, &mut budget, &mut plan);
            for planned in plan.actions() {
                let mut cost = planned.cost;
                cost.cpu = Duration::from_millis(cpu_ms);
                live.learn(&Outcome {
                    action: planned.action, at: NOW, cost, unavailable: cost.cpu, result: OutcomeResult::Done,
                });
            }
            plan.clear();
            live.plan(&snapshot, NOW, &mut budget, &mut plan);
        }
    }
}

#[test]
fn greedy_takes_turns_between_vms() {
    let mut vms = Vec::new();
    for id in 0..2 {
        let mut vm = VmSnapshot::with_capacity(VmId(id), 3);
        for window in 0..3 {
            vm.push(WindowRow::new(WindowIndex::new(window), 512, Backing::Base4K));
        }
        vms.push(vm);
    }
    let order: Vec<u32> = plan_of("greedy", &Snapshot { vms, ..Snapshot::default() }, BudgetLimits::default())
        .iter()
        .map(|p| p.action.vm().0)
        .collect();
    assert_eq!(order, [0, 1, 0, 1, 0, 1]);
}
