//! What every policy guarantees, over random snapshots and budgets.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Action, Backing, Budget, BudgetLimits, Bytes, Moment, Outcome, OutcomeResult, PerTenThousand, Plan, PlannedAction,
    Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

const NOW: Moment = Moment::after_start(Duration::from_secs(10));

fn row() -> impl Strategy<Value = (u16, Backing, bool, u64)> {
    let backed = (1_u16..=512, any::<bool>(), any::<bool>(), 0_u64..20).prop_map(|(resident, huge, held, ready)| {
        if huge { (512, Backing::Huge2M, held, ready) } else { (resident, Backing::Base4K, held, ready) }
    });
    prop_oneof![3 => backed, 1 => Just((0, Backing::Unbacked, false, 0))]
}

fn vm(id: u32) -> impl Strategy<Value = VmSnapshot> {
    prop::collection::vec((1_u64..4, row()), 0..60).prop_map(move |rows| {
        let mut vm = VmSnapshot::with_capacity(VmId(id), rows.len());
        let mut window = 0;
        for (gap, (resident, backing, held, ready)) in rows {
            window += gap;
            let ready = Moment::after_start(Duration::from_secs(ready));
            vm.push(WindowRow {
                is_held: held,
                ready_at: ready,
                ..WindowRow::new(WindowIndex::new(window), resident, backing)
            });
        }
        vm
    })
}

fn snapshot() -> impl Strategy<Value = Snapshot> {
    (vm(0), vm(1), vm(2)).prop_map(|(a, b, c)| Snapshot { vms: vec![a, b, c], ..Snapshot::default() })
}

fn limits() -> impl Strategy<Value = BudgetLimits> {
    (0_u64..400, 0_u32..10_000).prop_map(|(copy, cpu)| BudgetLimits {
        copy_per_second: mib(copy),
        cpu_share: PerTenThousand::new(cpu),
        burst: Duration::from_millis(200),
    })
}

fn plan_of(policy: &str, snapshot: &Snapshot, limits: BudgetLimits) -> Vec<PlannedAction> {
    let info = wideleaf_policies::policy::by_name(policy).expect("it is in the list");
    let mut budget = Budget::new(limits, NOW);
    let mut plan = Plan::with_bound(64);
    (info.make)().plan(snapshot, NOW, &mut budget, &mut plan);
    plan.actions().to_vec()
}

proptest! {
    #[test]
    fn a_plan_never_costs_more_than_the_budget_grants(snapshot in snapshot(), limits in limits()) {
        for policy in POLICIES {
            let plan = plan_of(policy.name, &snapshot, limits);
            let copied: Bytes = plan.iter().map(|planned| planned.cost.copied).sum();
            let cpu: Duration = plan.iter().map(|planned| planned.cost.cpu).sum();
            prop_assert!(copied.get() <= limits.copy_per_second.get() / 5, "{}: {copied}", policy.name);
            prop_assert!(cpu.as_nanos() <= 200_000_000 * u128::from(limits.cpu_share.get()) / 10_000, "{}", policy.name);
        }
    }

    #[test]
    fn a_plan_names_backed_ready_windows_each_once(snapshot in snapshot(), limits in limits()) {
        for policy in POLICIES {
            let plan = plan_of(policy.name, &snapshot, limits);
            let mut named = BTreeSet::new();
            for planned in plan {
                let vm = snapshot.vm(planned.action.vm()).expect("a VM of the snapshot");
                let row = vm.row(planned.action.window()).expect("a window of the snapshot");
                prop_assert!(vm.backing[row] != Backing::Unbacked && vm.ready_at[row] <= NOW, "{}", policy.name);
                prop_assert!(named.insert((vm.vm, planned.action.window())), "{}", policy.name);
                if matches!(planned.action, Action::Promote { .. }) {
                    prop_assert!(!vm.backing[row].is_large(), "{}", policy.name);
                }
            }
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
            let mut live = (policy.make)();
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
