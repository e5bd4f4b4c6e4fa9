//! NUMA nodes under the loop on a host in memory: what the policy sees, and what its moves do.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::two_nodes::TWO_NODES;
use wideleaf_policies::policy::Policy;
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Action, Budget, Cost, Gpa, GpaRange, Hva, Moment, NodeId, NodeSet, PageSize, Plan, Snapshot, TouchedFrom, VmId,
    VmSnapshot, WindowIndex, WindowNode,
};

const RAM_AT: Hva = Hva::new(1 << 40);
const WINDOWS: u64 = 4;
const HERE: NodeId = NodeId(0);
const THERE: NodeId = NodeId(1);

/// What is planned at each tick, with the node of a promotion.
type Script = Vec<Vec<(Action, Option<NodeId>)>>;

/// Plans the script, and keeps what it saw.
struct Scripted {
    script: Script,
    seen: Arc<Mutex<Vec<VmSnapshot>>>,
}

impl Policy for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        self.seen.lock().push(snapshot.vms[0].clone());
        if !self.script.is_empty() {
            self.script.remove(0).into_iter().for_each(|(action, node)| plan.push_on(node, action, Cost::default()));
        }
    }
}

fn stat(cpu: u32) -> String {
    format!("7 (vcpu0) S 1 7 7 0 -1 0 9 0 0 0 1 3 0 0 20 0 9 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0")
}

/// A host with two nodes, one vCPU on node 1, and all memory on node 0.
fn two_nodes() -> Arc<FakeHost> {
    let host = FakeHost::default();
    TWO_NODES.all().for_each(|(path, text)| host.set_text(path, text));
    host.make_present(RAM_AT, mib(2) * WINDOWS, false);
    host.set_threads(&[7]);
    host.set_text("/proc/self/task/7/stat", &stat(2));
    Arc::new(host)
}

struct Bench {
    host: Arc<FakeHost>,
    work: ManagerLoop,
    seen: Arc<Mutex<Vec<VmSnapshot>>>,
}

impl Bench {
    fn new(host: Arc<FakeHost>, bound_to: Option<NodeSet>, script: Script) -> Bench {
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap(), hva: RAM_AT };
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let vm = ManagedVm { bound_to, ..ManagedVm::external(VmId(0), vec![range], backing, None) };
        let seen = Arc::<Mutex<Vec<VmSnapshot>>>::default();
        let policy = Box::new(Scripted { script, seen: Arc::clone(&seen) });
        let work = ManagerLoop::new(host.clone(), vec![vm], policy, ManagerConfig::default());
        Bench { host, work, seen }
    }

    /// Ticks this often, a tick a second, and returns what the policy saw last.
    fn tick(&mut self, times: u32) -> VmSnapshot {
        for _ in 0..times {
            self.work.tick();
            self.host.sleep(Duration::from_secs(1));
        }
        self.seen.lock().last().unwrap().clone()
    }

    fn done(&self, mechanism: &str) -> u64 {
        self.work.report().done(mechanism)
    }
}

fn window(index: u64) -> WindowIndex {
    WindowIndex::new(index)
}

#[test]
fn the_policy_sees_the_node_of_each_window_and_what_nodes_have_free() {
    let host = two_nodes();
    host.put_on_node(RAM_AT + mib(2), mib(2), THERE);
    host.put_on_node(RAM_AT + mib(4), mib(1), THERE);
    let seen = Bench::new(host, None, Vec::new()).tick(1);
    assert_eq!(seen.node[..2], [WindowNode::On(HERE), WindowNode::On(THERE)]);
    assert!(matches!(seen.node[2], WindowNode::Spread(_)), "{:?}", seen.node[2]);
    let nodes: Vec<_> = seen.nodes.iter().map(|node| (node.node, node.vcpus, node.free_2m, node.free_1g)).collect();
    assert_eq!(nodes, [(HERE, 0, 512, 0), (THERE, 1, 0, 1)]);
}

#[test]
fn touches_come_from_one_node_only_once_all_vcpus_ran_there_at_three_looks() {
    let host = two_nodes();
    let mut bench = Bench::new(host, None, Vec::new());
    assert_eq!(bench.tick(2).touched_from[0], TouchedFrom::Unknown);
    assert_eq!(bench.tick(1).touched_from[0], TouchedFrom::Node(THERE));
    bench.host.set_text("/proc/self/task/7/stat", &stat(0));
    assert_eq!(bench.tick(1).touched_from[0], TouchedFrom::Unknown, "the vCPU has moved");
    assert_eq!(bench.tick(2).touched_from[0], TouchedFrom::Node(HERE));
    bench.host.set_threads(&[]);
    assert_eq!(bench.tick(2).touched_from[0], TouchedFrom::Node(HERE), "where they ran last");
}

#[test]
fn a_cpuset_and_a_bound_memory_forbid_nodes() {
    let may_use = |host, bound| -> Vec<bool> {
        Bench::new(host, bound, Vec::new()).tick(1).nodes.iter().map(|node| node.may_use).collect()
    };
    assert_eq!(may_use(two_nodes(), None), [true, true]);
    assert_eq!(may_use(two_nodes(), Some(NodeSet::of(HERE))), [true, false]);
    let host = two_nodes();
    host.set_text("/proc/self/status", "Mems_allowed_list:\t1\n");
    assert_eq!(may_use(host, None), [false, true]);
}

#[test]
fn a_move_brings_a_window_to_its_node_and_the_next_snapshot_shows_it() {
    let to_there = |index| (Action::Move { vm: VmId(0), window: window(index), node: THERE }, None);
    let mut bench = Bench::new(two_nodes(), None, vec![vec![to_there(1)], vec![], vec![to_there(1)]]);
    let seen = bench.tick(2);
    assert_eq!(seen.node[..2], [WindowNode::On(HERE), WindowNode::On(THERE)]);
    assert_eq!((bench.done("move_to_node"), bench.host.moved_pages()), (1, 512));
    bench.tick(1);
    let outcomes = &bench.work.report().outcomes;
    assert_eq!(outcomes.get(&("move_to_node", "skipped_already_done")), Some(&1));
}

#[test]
fn a_promotion_that_names_a_node_ends_there_and_one_that_cannot_is_huge_all_the_same() {
    let promote = |index| (Action::Promote { vm: VmId(0), window: window(index), to: PageSize::Huge2M }, Some(THERE));
    let mut bench = Bench::new(two_nodes(), None, vec![vec![promote(0)], vec![promote(1)]]);
    let seen = bench.tick(1);
    assert_eq!(seen.node[0], WindowNode::On(HERE));
    bench.host.fill_node(THERE);
    bench.tick(1);
    let seen = bench.tick(1);
    assert_eq!(seen.node[..2], [WindowNode::On(THERE), WindowNode::On(HERE)]);
    assert_eq!((bench.done("collapse"), bench.host.huge_windows(), bench.host.moved_pages()), (2, 2, 512));
}

#[test]
fn a_sensor_that_fails_is_counted_and_later_looks_again() {
    let mut failed = BTreeSet::new();
    for call in 0..20 {
        let mut bench = Bench::new(two_nodes(), None, Vec::new());
        bench.tick(1);
        bench.host.make_present(RAM_AT, mib(2), true);
        bench.host.fail_call(call, libc::EPERM);
        bench.tick(1);
        failed.extend(bench.work.report().sensor_failures.keys().copied());
        let seen = bench.tick(12);
        assert_eq!((seen.node[0], seen.nodes[1].vcpus), (WindowNode::On(HERE), 1), "after a failure of call {call}");
    }
    assert!(failed.contains("window_nodes") && failed.contains("vcpu_nodes"), "{failed:?}");
}

#[test]
fn nodes_that_cannot_be_read_at_the_start_are_counted() {
    let host = two_nodes();
    host.fail_call(0, libc::EIO);
    let mut bench = Bench::new(host, None, Vec::new());
    assert_eq!(bench.tick(1).nodes, []);
    assert_eq!(bench.work.report().sensor_failures.get("numa_nodes"), Some(&1));
}

#[test]
fn on_a_host_with_one_node_nothing_is_asked_and_nothing_is_filled() {
    let one = FakeHost::default();
    TWO_NODES.all().for_each(|(path, text)| one.set_text(path, text));
    one.set_text("/sys/devices/system/node/online", "0\n");
    one.make_present(RAM_AT, mib(2) * WINDOWS, false);
    let mut bench = Bench::new(Arc::new(one), None, Vec::new());
    let seen = bench.tick(3);
    assert_eq!((seen.node[0], seen.touched_from[0], seen.nodes.len()), (WindowNode::Unknown, TouchedFrom::Unknown, 0));
    assert!(bench.work.live().nodes.is_none() && bench.work.live().vms[0].nodes.is_none());
}
