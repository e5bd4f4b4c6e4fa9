//! NUMA nodes: each decision of `auto` in a small drawn case. Windows are drawn as in `scenarios.rs`; a line has the
//! node of each window's memory, and one the node that touches it.
//!
//! ```text
//!   windows   f f H      memory on node 0 1 1      touched from 1 1 0      ? not known   * several nodes
//! ```

use std::time::Duration;

use wideleaf_policies::locality::{FreePages, MemoryByNode, Placing, home, is_remote, placing};
use wideleaf_policies::policy::KeptSmall;
use wideleaf_policies::units::gib;
use wideleaf_policies::{
    Action, Budget, BudgetLimits, HostMemory, HugePagePrice, HugePages, Moment, NodeId, NodeOfVm, OutcomeResult,
    PageSize, PerTenThousand, Plan, PlannedAction, Policy, PolicyChoice, Snapshot, TouchedFrom, VmId, VmSnapshot,
    WindowIndex, WindowNode,
};

use crate::drawn::{samples, seconds, vm_with};

const HERE: NodeId = NodeId(0);
const THERE: NodeId = NodeId(1);

/// A node with free pages of 2 MiB, and whether the VM may use it.
fn node(node: NodeId, free_2m: u64, vcpus: u16) -> NodeOfVm {
    NodeOfVm { node, may_use: true, vcpus, free_2m, free_1g: 0 }
}

fn digit(node: char) -> NodeId {
    NodeId(node.to_digit(10).expect("a node with one digit") as u16)
}

/// A VM on two nodes, touched all the time.
fn vm(windows: &str, memory: &str, touches: &str, nodes: [NodeOfVm; 2]) -> VmSnapshot {
    let (memory, touches): (Vec<char>, Vec<char>) = (memory.chars().collect(), touches.chars().collect());
    let mut vm = vm_with(0, windows, |at, row| {
        row.access = samples("xxxxxxxx").with_touches_per_s(Some(100_000));
        row.node = match memory[at] {
            '?' => WindowNode::Unknown,
            '*' => WindowNode::Spread(HERE),
            node => WindowNode::On(digit(node)),
        };
        row.touched_from = match touches[at] {
            '?' => TouchedFrom::Unknown,
            '*' => TouchedFrom::Several { most: HERE, share: PerTenThousand::new(6_000) },
            node => TouchedFrom::Node(digit(node)),
        };
    });
    vm.nodes = nodes.to_vec();
    vm
}

struct Desk(Box<dyn Policy>);

impl Desk {
    fn new(choice: &str) -> Desk {
        Desk(PolicyChoice::parse(choice).expect("a policy").make())
    }

    /// The plan after the windows were hot for a minute.
    fn plan(&mut self, vm: VmSnapshot) -> Vec<PlannedAction> {
        self.plan_with(HugePages::Plenty, vm)
    }

    /// The same on a host with this supply.
    fn plan_with(&mut self, huge_pages: HugePages, vm: VmSnapshot) -> Vec<PlannedAction> {
        let limits = BudgetLimits {
            copy_per_second: gib(64),
            cpu_share: PerTenThousand::new(1_000_000),
            burst: Duration::from_secs(1),
        };
        let host = HostMemory { total: gib(100), available: gib(50), huge_pages, ..HostMemory::default() };
        let snapshot = Snapshot { host: Some(host), vms: vec![vm] };
        let mut plan_at = |now: Moment| {
            let mut plan = Plan::default();
            self.0.plan(&snapshot, now, &mut Budget::new(limits, now), &mut plan);
            plan.actions().to_vec()
        };
        plan_at(seconds(1));
        plan_at(seconds(61))
    }
}

/// Window and node of each promotion; no other action may be planned.
fn promotions(plan: &[PlannedAction]) -> Vec<(u64, Option<u16>)> {
    let promotion = |planned: &PlannedAction| match planned.action {
        Action::Promote { window, to: PageSize::Huge2M, .. } => (window.get(), planned.node.map(|node| node.0)),
        other => panic!("{other:?} is not a promotion to 2 MiB"),
    };
    let mut all: Vec<_> = plan.iter().map(promotion).collect();
    all.sort_unstable();
    all
}

#[test]
fn on_a_host_with_one_node_no_action_names_a_node() {
    let mut alone = vm("ff", "??", "??", [node(HERE, 9, 2), node(THERE, 9, 0)]);
    alone.nodes.clear();
    assert_eq!(promotions(&Desk::new("auto").plan(alone)), [(0, None), (1, None)]);
}

#[test]
fn what_is_local_is_promoted_on_its_node_and_what_is_remote_moves_home_with_its_promotion() {
    let vm = vm("fff", "101", "111", [node(HERE, 9, 0), node(THERE, 9, 2)]);
    let mut desk = Desk::new("auto");
    assert_eq!(promotions(&desk.plan(vm)), [(0, Some(1)), (1, Some(1)), (2, Some(1))]);
    let figures = desk.0.figures();
    let home = figures.iter().find(|(name, _)| *name == "promoted_home").expect("it is counted").1;
    assert_eq!(home, 2, "the remote window, at both plans");
}

#[test]
fn a_local_window_never_becomes_huge_on_a_remote_node() {
    // Node 1 has no block: the kernel may still make one page a plan by compaction, and the others wait.
    let vm = vm("ffff", "1111", "1111", [node(HERE, 512, 0), node(THERE, 0, 2)]);
    let mut desk = Desk::new("auto");
    let planned = promotions(&desk.plan(vm));
    assert_eq!(planned.iter().map(|(_, node)| *node).collect::<Vec<_>>(), [Some(1)]);
    let waiting = (0..4).filter(|row| desk.0.why_small(VmId(0), *row) == Some(KeptSmall::NoneOnNode)).count();
    assert_eq!(waiting, 3, "the others are explained");
}

/// The same VM with its huge windows idle.
fn idle_where_huge(mut vm: VmSnapshot) -> VmSnapshot {
    let huge = vm.access.iter_mut().zip(&vm.backing).filter(|(_, backing)| backing.is_large());
    huge.for_each(|(access, _)| *access = samples("----------------"));
    vm
}

/// The plan as text: windows that are vacated, and promoted ones with their node.
fn shown(plan: &[PlannedAction]) -> Vec<String> {
    let shown = |planned: &PlannedAction| match (planned.action, planned.node) {
        (Action::Vacate { window, .. }, None) => format!("vacate {}", window.get()),
        (Action::Promote { window, .. }, Some(node)) => format!("promote {} on {}", window.get(), node.0),
        other => panic!("{other:?}"),
    };
    plan.iter().map(shown).collect()
}

#[test]
fn a_window_on_a_node_without_blocks_gets_the_page_of_a_cold_window_there_although_another_node_has_enough() {
    let nodes = [node(HERE, 9, 0), node(THERE, 0, 2)];
    let short = HugePages::Scarce { free: 9 };
    let mut desk = Desk::new("auto");
    let plan = desk.plan_with(short, idle_where_huge(vm("HHff", "1111", "1111", nodes)));
    assert_eq!(shown(&plan), ["vacate 0", "promote 2 on 1", "vacate 1", "promote 3 on 1"]);
    assert_eq!(desk.0.why_small(VmId(0), 3), None);
    // Pages of the other node are of no use.
    let plan = Desk::new("auto").plan_with(short, idle_where_huge(vm("HHff", "0011", "1111", nodes)));
    assert_eq!(shown(&plan), ["promote 2 on 1"], "one that the kernel may make");
}

#[test]
fn at_a_price_a_window_gets_the_page_of_the_coldest_window_of_its_own_node() {
    let nodes = [node(HERE, 0, 0), node(THERE, 0, 2)];
    let vm = idle_where_huge(vm("HHHff", "00111", "11111", nodes));
    let plan = Desk::new("auto").plan_with(HugePages::Scarce { free: 0 }, vm);
    assert_eq!(shown(&plan), ["vacate 2", "promote 3 on 1", "promote 4 on 1"]);
}

#[test]
fn other_vms_get_pages_of_the_node_on_which_a_vm_runs() {
    let price = HugePagePrice { cycles_per_s: 1000, may_vacate: 3, free: Some(0) };
    let vacated = |vcpus: [u16; 2]| {
        let nodes = [node(HERE, 0, vcpus[0]), node(THERE, 0, vcpus[1])];
        let vm = idle_where_huge(vm("HHH", "010", "???", nodes));
        shown(&Desk::new("auto").plan_with(HugePages::Priced(price), vm))
    };
    assert_eq!(vacated([0, 2]), ["vacate 1"]);
    assert_eq!(vacated([2, 0]), ["vacate 0", "vacate 2"]);
    assert_eq!(vacated([1, 1]), ["vacate 0", "vacate 1", "vacate 2"], "it runs on both");
}

#[test]
fn a_window_that_is_remote_already_becomes_huge_where_it_is_if_home_is_full() {
    let vm = vm("ff", "00", "11", [node(HERE, 9, 0), node(THERE, 0, 2)]);
    assert_eq!(promotions(&Desk::new("auto").plan(vm)), [(0, Some(0)), (1, Some(0))]);
}

#[test]
fn what_all_nodes_use_stays_spread_a_window_to_each_in_turn() {
    let vm = vm("ffff", "****", "****", [node(HERE, 9, 1), node(THERE, 9, 1)]);
    let placed: Vec<_> = promotions(&Desk::new("auto").plan(vm)).into_iter().map(|(_, node)| node).collect();
    assert_eq!(placed, [Some(0), Some(1), Some(0), Some(1)]);
}

#[test]
fn where_touches_are_not_known_memory_stays_on_its_node() {
    let vm = vm("fff", "01?", "???", [node(HERE, 9, 1), node(THERE, 9, 1)]);
    assert_eq!(promotions(&Desk::new("auto").plan(vm)), [(0, Some(0)), (1, Some(1)), (2, None)]);
}

#[test]
fn a_cpuset_is_law_memory_goes_to_no_other_node() {
    let forbidden = NodeOfVm { may_use: false, ..node(THERE, 9, 2) };
    let bound = vm("ff", "00", "11", [node(HERE, 9, 0), forbidden]);
    assert_eq!(home(&bound, 0), None);
    assert_eq!(promotions(&Desk::new("auto").plan(bound)), [(0, Some(0)), (1, Some(0))]);
    let huge = vm("HH", "00", "11", [node(HERE, 9, 0), forbidden]);
    assert_eq!(Desk::new("auto").plan(huge), []);
}

#[test]
fn a_hot_remote_huge_page_moves_home_and_an_idle_one_stays() {
    let nodes = [node(HERE, 9, 0), node(THERE, 9, 2)];
    let moved: Vec<_> =
        Desk::new("auto").plan(vm("HH", "01", "11", nodes)).iter().map(|planned| planned.action).collect();
    assert_eq!(moved, [Action::Move { vm: VmId(0), window: WindowIndex::new(0), node: THERE }]);
    let mut idle = vm("H", "0", "1", nodes);
    idle.access[0] = samples("----------------");
    assert_eq!(Desk::new("auto").plan(idle), []);
    let full = vm("H", "0", "1", [node(HERE, 9, 0), node(THERE, 0, 2)]);
    assert_eq!(Desk::new("auto").plan(full), [], "no page is made by compaction for a move");
}

#[test]
fn a_move_pays_by_the_price_of_a_remote_reference_on_this_machine() {
    let near = wideleaf_policies::walk::cost::WalkCost::PRIOR.with_remote_extra(0).expect("a possible figure");
    let mut desk = Desk::new("auto");
    desk.0.take_walk_cost(&near);
    let nodes = [node(HERE, 9, 0), node(THERE, 9, 2)];
    assert_eq!(desk.plan(vm("H", "0", "1", nodes)), []);
}

#[test]
fn a_shared_hot_huge_page_is_split_where_that_is_asked_for_and_stays_small() {
    let nodes = [node(HERE, 9, 1), node(THERE, 9, 1)];
    let shared = || vm("HH", "00", "*0", nodes);
    assert_eq!(Desk::new("auto").plan(shared()), [], "by default none is split");
    let mut desk = Desk::new("auto:split_shared=6");
    let demote = |window| Action::Demote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Base4K };
    let planned: Vec<_> = desk.plan(shared()).iter().map(|planned| planned.action).collect();
    assert_eq!(planned, [demote(0)]);
    let outcome = wideleaf_policies::Outcome {
        action: demote(0),
        at: seconds(61),
        cost: wideleaf_policies::Cost::default(),
        unavailable: Duration::ZERO,
        result: OutcomeResult::Done,
    };
    desk.0.learn(&outcome);
    assert_eq!(desk.plan(vm("fH", "00", "*0", nodes)), [], "it would be fought over again");
    assert_eq!(desk.0.why_small(VmId(0), 0), Some(KeptSmall::SharedByNodes));
    assert_eq!(promotions(&desk.plan(vm("fH", "00", "00", nodes))), [(0, Some(0))], "one node uses it now");
}

#[test]
fn a_window_with_nine_tenths_of_its_touches_from_one_node_moves_there_instead_of_being_split() {
    let mut mostly = vm("H", "0", "1", [node(HERE, 9, 1), node(THERE, 9, 1)]);
    mostly.touched_from[0] = TouchedFrom::Several { most: THERE, share: PerTenThousand::new(9_000) };
    let planned: Vec<_> = Desk::new("auto:split_shared=6").plan(mostly).iter().map(|planned| planned.action).collect();
    assert_eq!(planned, [Action::Move { vm: VmId(0), window: WindowIndex::new(0), node: THERE }]);
}

#[test]
fn a_plan_promises_no_page_of_a_node_twice() {
    let vm = vm("ffffff", "111111", "111111", [node(HERE, 9, 0), node(THERE, 3, 2)]);
    assert_eq!(promotions(&Desk::new("auto").plan(vm)).len(), 3 + 1, "three free ones, and one that may be made");
}

#[test]
fn memory_is_summed_by_node_and_the_local_share_counts_nodes_with_vcpus() {
    let vm = vm("fHs.f", "011??", "?????", [node(HERE, 9, 0), node(THERE, 9, 2)]);
    let sum = MemoryByNode::of(&vm);
    let rows: Vec<_> = sum.nodes.iter().map(|row| (row.node.0, row.pages, row.windows_2m)).collect();
    assert_eq!((rows, sum.unknown), (vec![(0, 512, 0), (1, 513, 1)], 512));
    assert_eq!(sum.local_share(&vm.nodes), Some(PerTenThousand::of(513, 1025)));
    let no_vcpus = [node(HERE, 9, 0), node(THERE, 9, 0)];
    assert_eq!(sum.local_share(&no_vcpus), None);
    let one = self::vm("ff", "01", "11", [node(HERE, 9, 0), node(THERE, 9, 1)]);
    assert_eq!([is_remote(&one, 0), is_remote(&one, 1)], [true, false]);
}

#[test]
fn without_any_usable_node_the_kernel_chooses() {
    let nowhere = [node(HERE, 9, 1), node(THERE, 9, 1)].map(|row| NodeOfVm { may_use: false, ..row });
    let vm = vm("f", "*", "*", nowhere);
    assert_eq!(placing(&vm, 0, &FreePages::of(&vm)), Placing::Anywhere);
}
