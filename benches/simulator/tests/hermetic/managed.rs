//! Policies at work on streams of accesses: their input, the outcomes of their plans, the course of
//! coverage and bloat.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use wideleaf_policies::policy::RamStart;
use wideleaf_policies::units::mib;
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{
    Action, Budget, Bytes, Cost, Moment, NodeId, PageSize, Plan, Policy, PolicyChoice, Snapshot, TouchedFrom, VmId,
    WindowIndex, WindowNode,
};
use wideleaf_simulator::calibrated::{Calibration, walk_cost};
use wideleaf_simulator::simulated::{Clock, HostConfig, LocalNode, Managed, Mmu, windows_of};
use wideleaf_simulator::simulator::Options;
use wideleaf_simulator::{AddressSpace, Counts, Paging, Simulator, machine};

const PAGE: u64 = 4096;
const WINDOW: u64 = 512 * PAGE;

/// Stores the size of each window that was remapped.
#[derive(Default)]
struct Remembered {
    sizes: BTreeMap<u64, PageSize>,
    remaps: u64,
    /// Windows on another NUMA node.
    remote: BTreeSet<u64>,
}

impl Mmu for Remembered {
    fn map_host(&mut self, window: WindowIndex, to: PageSize) {
        self.sizes.insert(window.get(), to);
    }

    fn remap_host(&mut self, window: WindowIndex, to: PageSize) {
        let windows = if to == PageSize::Giant1G { 512 } else { 1 };
        self.sizes.extend((window.get()..).take(windows).map(|window| (window, to)));
        self.remaps += 1;
    }

    fn put_on_node(&mut self, window: WindowIndex, is_remote: bool) {
        match is_remote {
            true => self.remote.insert(window.get()),
            false => self.remote.remove(&window.get()),
        };
    }

    fn misses(&self) -> u64 {
        0
    }
}

impl Remembered {
    fn large(&self) -> Vec<u64> {
        self.sizes.iter().filter(|(_, size)| **size != PageSize::Base4K).map(|(window, _)| *window).collect()
    }
}

/// Sixteen windows: the even ones are used completely, and eight pages of each odd one.
const ARENA: Bytes = mib(32);

/// One pass over all used memory, one line of each page.
fn half_sparse() -> impl Iterator<Item = u64> {
    (0..windows_of(ARENA)).flat_map(|window| {
        let pages = if window % 2 == 0 { 512 } else { 8 };
        (0..pages).map(move |page| window * WINDOW + page * PAGE)
    })
}

/// Configuration in which a pass takes about 17 ms: an interval and a half.
fn config() -> HostConfig {
    HostConfig { clock: Clock { cycles_per_access: 8192 }, ..HostConfig::new(ARENA, PageSize::Base4K) }
}

fn run(config: HostConfig, policy: &str, passes: usize) -> (Managed, Remembered) {
    let mut mmu = Remembered::default();
    let mut managed = Managed::new(config, PolicyChoice::parse(policy).unwrap().make(), &mut mmu);
    for _ in 0..passes {
        half_sparse().for_each(|address| managed.access(address, 1, &mut mmu));
    }
    managed.end(&mmu);
    (managed, mmu)
}

fn even() -> Vec<u64> {
    (0..16).step_by(2).collect()
}

#[test]
fn never_leaves_every_page_alone_and_has_no_bloat() {
    let (managed, mmu) = run(config(), "never", 3);
    assert_eq!(mmu.remaps, 0);
    let end = managed.history().samples().last().unwrap();
    assert_eq!((end.coverage().get(), end.bloat()), (0, Bytes::ZERO));
    assert_eq!(end.resident, Bytes::new((8 * 512 + 8 * 8) * PAGE));
    assert!(managed.plans() > 3, "the policy was asked");
}

#[test]
fn prealloc_is_large_before_the_first_access_and_greedy_after_the_first_touch() {
    let mut mmu = Remembered::default();
    let _before = Managed::new(config(), PolicyChoice::parse("prealloc").unwrap().make(), &mut mmu);
    assert_eq!(mmu.large(), (0..16).collect::<Vec<_>>());
    let (managed, mmu) = run(config(), "greedy", 3);
    assert_eq!(mmu.large(), (0..16).collect::<Vec<_>>());
    let end = managed.history().samples().last().unwrap();
    assert_eq!((end.coverage().get(), end.bloat()), (10_000, Bytes::new(8 * 504 * PAGE)));
    assert_eq!(managed.tally().count_of("promote_2m", "done"), 16);
    assert_eq!(managed.tally().copied, ARENA);
}

#[test]
fn at_fault_decides_only_at_each_first_touch() {
    let (managed, mmu) = run(config(), "at-fault", 2);
    assert_eq!((mmu.large().len(), mmu.remaps), (16, 0));
    assert_eq!(managed.tally().count_of("first_touch_2m", "done"), 16);
    assert_eq!(managed.tally().copied, Bytes::ZERO);
}

#[test]
fn reservation_promotes_full_windows_without_a_copy() {
    let (managed, mmu) = run(config(), "reservation", 2);
    assert_eq!(mmu.large(), even());
    assert_eq!(managed.tally().count_of("promote_in_place_2m", "done"), 8);
    assert_eq!(managed.tally().copied, Bytes::ZERO);
    let end = managed.history().samples().last().unwrap();
    assert_eq!((end.bloat(), end.reserved), (Bytes::ZERO, Bytes::new(8 * 504 * PAGE)));
    // 4096 of 4160 pages
    assert_eq!(end.coverage().get(), 9_846);
    // 8 pages do not reach Quicksilver's threshold either; a threshold of 8 pages they reach.
    assert_eq!(run(config(), "reservation:threshold=64", 2).1.large(), even());
    assert_eq!(run(config(), "reservation:threshold=8", 2).1.large().len(), 16);
}

#[test]
fn a_short_host_breaks_the_reservations_that_hold_little() {
    // 16 MiB of full windows and 16 MiB of frames reserved for the sparse ones, of 33 MiB in all; the mark is 85 %.
    let (managed, _) = run(HostConfig { memory: mib(33), ..config() }, "reservation", 3);
    let broken = managed.tally().count_of("break_reservation", "done");
    assert!((1..=8).contains(&broken), "{broken}");
    assert!(managed.history().samples().last().unwrap().reserved < Bytes::new(8 * 504 * PAGE));
}

#[test]
fn auto_decides_by_the_cost_of_a_miss_on_its_machine() {
    // Windows that lack a few pages: without evidence of accesses none of them is promoted.
    let nearly_full =
        || (0..windows_of(ARENA)).flat_map(|window| (0..500).map(move |page| window * WINDOW + page * PAGE));
    let promotions = |cost: &WalkCost| {
        let mut mmu = Remembered::default();
        let policy = PolicyChoice::parse("auto:resident_min=100,bloat_price=0").unwrap().make_for(cost);
        let clock = Clock { cycles_per_access: 2048 };
        let mut managed =
            Managed::new(HostConfig { clock, ..HostConfig::new(ARENA, PageSize::Huge2M) }, policy, &mut mmu);
        (0..400).for_each(|_| nearly_full().for_each(|address| managed.access(address, 1, &mut mmu)));
        managed.end(&mmu);
        managed.tally().count_of("promote_2m", "done")
    };
    // 400 passes of 500 misses in three seconds. At one cycle each a copy of 2 MiB does not pay; at four cycles
    // most of them do.
    assert_eq!(promotions(&WalkCost::by_references(1, 2_000)), 0);
    let options = Options::default();
    let of = Calibration { footprint: ARENA, paging: Paging::FOUR_LEVELS, is_native: false, options };
    let of_zen4 = machine("zen4").map(|machine| walk_cost(machine, &of)).unwrap();
    assert_eq!(promotions(&of_zen4), 16, "all of them, at {of_zen4}");
}

#[test]
fn utilization_and_auto_take_the_full_windows_only() {
    assert_eq!(run(config(), "utilization", 3).1.large(), even());
    let (managed, mmu) = run(config(), "auto", 60);
    assert_eq!(mmu.large(), even(), "{:?}", managed.policy().figures());
    let figures: BTreeMap<_, _> = managed.policy().figures().into_iter().collect();
    assert!(figures["planned_on_access"] + figures["planned_on_residency"] == 8, "{figures:?}");
}

#[test]
fn thp_scans_at_the_pace_of_khugepaged() {
    // 3 s and a bit are one wake-up at the default pace, and four at one a second: 8 windows each.
    let passes = 180;
    assert_eq!(run(config(), "thp", passes).1.large().len(), 8);
    assert_eq!(run(config(), "thp:scan_sleep_ms=1000", passes).1.large().len(), 16);
    let (managed, _) = run(config(), "thp:max_ptes_none=0,scan_sleep_ms=100", passes);
    assert_eq!(managed.tally().bloat, Bytes::ZERO);
}

#[test]
fn schemes_demote_idle_windows_and_release_untouched_pages() {
    // All windows are used for a second, then only window 0 for fifteen.
    let mut mmu = Remembered::default();
    let policy = PolicyChoice::parse("schemes").unwrap().make();
    let mut managed = Managed::new(config(), policy, &mut mmu);
    (0..60).for_each(|_| half_sparse().for_each(|address| managed.access(address, 1, &mut mmu)));
    assert_eq!(mmu.large().len(), 16, "all of it is hot");
    let interval = config().interval.as_micros() as u32 * 2000 / 8192;
    (0..1500).for_each(|_| managed.access(0, interval + 1, &mut mmu));
    managed.end(&mmu);
    assert!(managed.tally().count_of("demote_4k", "done") >= 15, "{:?}", managed.tally().actions);
    let end = managed.history().samples().last().unwrap();
    assert_eq!(end.bloat(), Bytes::ZERO);
}

/// A policy that requests the given actions, plan by plan.
struct ScriptedPolicy(VecDeque<Vec<Action>>);

impl Policy for ScriptedPolicy {
    fn name(&self) -> &'static str {
        "told"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        self.0.pop_front().into_iter().flatten().for_each(|action| plan.push(action, Cost::default()));
    }
}

#[test]
fn a_vacated_window_gives_its_huge_page_to_a_promotion_of_the_same_plan() {
    let promote = |window| Action::Promote { vm: VmId(0), window: WindowIndex::new(window), to: PageSize::Huge2M };
    let vacate = Action::Vacate { vm: VmId(0), window: WindowIndex::new(1) };
    // The only free block goes to window 1, which is sparse; for window 0 none is left.
    let told = ScriptedPolicy([vec![promote(1)], vec![promote(0)], vec![vacate, promote(2)]].into());
    let mut mmu = Remembered::default();
    let mut managed = Managed::new(HostConfig { huge_pages: 1, ..config() }, Box::new(told), &mut mmu);
    (0..4).for_each(|_| half_sparse().for_each(|address| managed.access(address, 1, &mut mmu)));
    managed.end(&mmu);
    let count = |action, result| managed.tally().count_of(action, result);
    assert_eq!((count("promote_2m", "done"), count("promote_2m", "refused_no_huge_page")), (2, 1));
    assert_eq!((count("vacate", "done"), mmu.large()), (1, vec![2]));
    let end = managed.history().samples().last().unwrap();
    assert_eq!(end.bloat(), Bytes::new(504 * PAGE), "the untouched pages of window 1 were copied too");
}

/// Two nodes: the thread's has memory for half of the windows, and this number of free blocks. A pass takes less than
/// an interval, so that all windows are touched before the first plan.
fn two_nodes(huge_pages: u64) -> HostConfig {
    let clock = Clock { cycles_per_access: 4096 };
    HostConfig { local_node: Some(LocalNode { memory: mib(16), huge_pages }), clock, ..config() }
}

fn upper_half() -> BTreeSet<u64> {
    (8..16).collect()
}

#[test]
fn first_touches_fill_the_threads_node_and_then_the_other() {
    assert_eq!(run(two_nodes(u64::MAX), "never", 2).1.remote, upper_half());
    assert_eq!(run(config(), "never", 2).1.remote, BTreeSet::new());
}

#[test]
fn a_promotion_that_names_no_node_stays_on_the_windows_and_needs_a_block_there() {
    let (managed, mmu) = run(two_nodes(3), "greedy", 3);
    assert_eq!(mmu.remote, upper_half());
    assert_eq!(mmu.large().len(), 3 + 8, "three of the first node, all of the other");
    assert!(managed.tally().count_of("promote_2m", "refused_no_huge_page") >= 5, "{:?}", managed.tally().actions);
}

#[test]
fn auto_brings_windows_home_while_the_home_has_blocks() {
    let brought = |blocks| {
        let (managed, mmu) = run(two_nodes(blocks), "auto", 120);
        let figures: BTreeMap<_, _> = managed.policy().figures().into_iter().collect();
        (mmu.remote, figures["promoted_home"])
    };
    // The even windows are full, so that they are promoted; the odd ones stay where they are.
    let (remote, promoted_home) = brought(100);
    assert_eq!((remote, promoted_home), ([9, 11, 13, 15].into(), 4));
    let (remote, _) = brought(0);
    assert_eq!(remote, upper_half(), "the thread's node has no block");
}

#[test]
fn a_policy_sees_nodes_and_moves_windows_as_far_as_there_is_room() {
    struct Moves(VecDeque<Vec<(Action, Option<NodeId>)>>);

    impl Policy for Moves {
        fn name(&self) -> &'static str {
            "moves"
        }

        fn plan(&mut self, seen: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
            let vm = &seen.vms[0];
            let vcpus: Vec<(NodeId, u16)> = vm.nodes.iter().map(|row| (row.node, row.vcpus)).collect();
            assert_eq!(vcpus, [(NodeId(0), 1), (NodeId(1), 0)]);
            assert_eq!(vm.touched_from[0], TouchedFrom::Node(NodeId(0)));
            assert_eq!(vm.node[0], WindowNode::On(NodeId(0)), "touched first, and never moved");
            for (action, node) in self.0.pop_front().into_iter().flatten() {
                plan.push_on(node, action, Cost::default());
            }
        }
    }
    let (vm, to) = (VmId(0), PageSize::Huge2M);
    let promote = |window, node| (Action::Promote { vm, window: WindowIndex::new(window), to }, Some(NodeId(node)));
    let go = |window, node| (Action::Move { vm, window: WindowIndex::new(window), node: NodeId(node) }, None);
    // The thread's node is full of base pages and has one block:
    // window 14 gets it, and gives it back when it moves away again; then window 8 has it. Window 2 makes room, which
    // window 13 takes.
    let plans = [
        vec![promote(14, 0), promote(12, 0)],
        vec![go(14, 1), promote(8, 0)],
        vec![go(10, 0), go(2, 1)],
        vec![go(13, 0)],
    ];
    let mut mmu = Remembered::default();
    let mut managed = Managed::new(two_nodes(1), Box::new(Moves(plans.into())), &mut mmu);
    (0..9).for_each(|_| half_sparse().for_each(|address| managed.access(address, 1, &mut mmu)));
    managed.end(&mmu);
    let count = |action, result| managed.tally().count_of(action, result);
    assert_eq!((count("promote_2m", "done"), count("promote_2m", "refused_no_huge_page")), (2, 1));
    assert_eq!(mmu.remote, [2, 9, 10, 11, 12, 14, 15].into(), "{:?}", managed.tally().actions);
}

#[test]
fn data_of_remote_windows_are_counted_where_they_miss_the_caches() {
    // 16 MiB on either node, once each line of a page: nothing of it is in a cache of a K8.
    let remote_data = |config: HostConfig| {
        let mut simulator = Simulator::new(machine("k8").unwrap(), AddressSpace::native(ARENA, PageSize::Base4K));
        let policy = PolicyChoice::parse("never").unwrap().make();
        let mut managed = Managed::new(config, policy, &mut simulator);
        for address in half_sparse() {
            managed.access(address, 1, &mut simulator);
            simulator.access(address, true);
        }
        managed.end(&simulator);
        simulator.counts().remote_data
    };
    assert_eq!(remote_data(config()), 0);
    assert_eq!(remote_data(two_nodes(0)), 4 * 512 + 4 * 8, "a line of each page of the upper half");
}

#[test]
fn a_giant_needs_a_whole_giant_and_a_page_of_the_pool() {
    let arena = mib(1024 + 64);
    let run = |giant_pages| {
        let mut mmu = Remembered::default();
        let config = HostConfig { giant_pages, ..HostConfig::new(arena, PageSize::Base4K) };
        let policy = PolicyChoice::parse("giant").unwrap().make();
        let mut managed = Managed::new(config, policy, &mut mmu);
        for window in 0..windows_of(arena) {
            managed.access(window * WINDOW, 1 << 20, &mut mmu);
        }
        managed.end(&mmu);
        mmu.sizes.values().filter(|size| **size == PageSize::Giant1G).count()
    };
    assert_eq!(run(0), 0);
    assert_eq!(run(5), 512, "the 64 MiB behind it are not a giant");
}

/// Giant 0, of which every other window is touched, on a host with 100 free huge pages.
#[test]
fn a_giant_goes_back_to_huge_pages_as_far_as_there_are_and_untouched_windows_are_gone() {
    let (vm, window) = (VmId(0), WindowIndex::new(0));
    let promote = vec![Action::Promote { vm, window, to: PageSize::Giant1G }];
    let demote = vec![Action::Demote { vm, window, to: PageSize::Huge2M }];
    let run = |plans: Vec<Vec<Action>>| {
        let mut mmu = Remembered::default();
        let config = HostConfig { giant_pages: 1, huge_pages: 100, ..HostConfig::new(mib(1024), PageSize::Base4K) };
        let mut managed = Managed::new(config, Box::new(ScriptedPolicy(plans.into())), &mut mmu);
        for round in 0..16 {
            // Every window is touched in the first round, as only then it may be part of a plan.
            (0..512).step_by(2).for_each(|window| managed.access(window * WINDOW, 1 << (12 + round), &mut mmu));
        }
        managed.end(&mmu);
        let of = |size| mmu.sizes.values().filter(|of| **of == size).count();
        let counts = [("promote_1g", "done"), ("demote_2m", "done"), ("demote_2m", "skipped_no_mechanism")];
        let counts = counts.map(|(action, result)| managed.tally().count_of(action, result));
        (counts, of(PageSize::Giant1G), of(PageSize::Huge2M), mmu.remaps)
    };
    // Each action on the giant is one change of a mapping, with one flush.
    assert_eq!(run(vec![promote.clone()]), ([1, 0, 0], 512, 0, 1));
    assert_eq!(run(vec![promote.clone(), demote.clone()]), ([1, 1, 0], 0, 100, 2));
    assert_eq!(run(vec![promote.clone(), demote.clone(), demote.clone()]), ([1, 1, 1], 0, 100, 2));
    // The page is free again.
    assert_eq!(run(vec![promote.clone(), demote, promote]), ([2, 1, 0], 512, 0, 3));
}

#[test]
fn the_huge_page_of_an_untouched_window_is_free_when_the_window_is_split() {
    struct Prefaulted(VecDeque<Vec<Action>>);

    impl Policy for Prefaulted {
        fn name(&self) -> &'static str {
            "prefaulted"
        }

        fn ram_start(&self) -> RamStart {
            RamStart::HugeAndPrefaulted
        }

        fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
            self.0.pop_front().into_iter().flatten().for_each(|action| plan.push(action, Cost::default()));
        }
    }
    let vm = VmId(0);
    let split = |window| Action::Demote { vm, window: WindowIndex::new(window), to: PageSize::Base4K };
    let promote = |window| Action::Promote { vm, window: WindowIndex::new(window), to: PageSize::Huge2M };
    let promoted = |of: HostConfig, window| {
        let mut mmu = Remembered::default();
        let plans = [vec![split(0), split(window)], vec![promote(0)]];
        let mut managed = Managed::new(of, Box::new(Prefaulted(plans.into())), &mut mmu);
        // All other windows are touched before the first plan.
        (0..15).for_each(|window| managed.access(window * WINDOW, 1, &mut mmu));
        (0..3).for_each(|_| managed.access(0, 1 << 12, &mut mmu));
        managed.end(&mmu);
        managed.tally().count_of("promote_2m", "done")
    };
    // No block of 2 MiB is left: each window has one.
    let one_node = HostConfig { huge_pages: 16, ..config() };
    let local_node = Some(LocalNode { memory: mib(16), huge_pages: 16 });
    let two_nodes = HostConfig { local_node, huge_pages: 0, ..config() };
    for of in [one_node, two_nodes] {
        assert_eq!([promoted(of, 15), promoted(of, 1)], [1, 0], "the pages of window 1 are still used");
    }
}

#[test]
fn time_follows_the_accesses_and_intervals_have_equal_length() {
    let (managed, _) = run(config(), "never", 3);
    let accesses = 3 * (8 * 512 + 8 * 8);
    let end = managed.history().samples().last().unwrap();
    assert_eq!(end.accesses, accesses);
    assert_eq!(end.at.since_start(), Duration::from_nanos(accesses * 8192 / 2));
    let samples = managed.history().samples();
    let apart = samples[1].at.since(samples[0].at);
    assert!((config().interval..config().interval + Duration::from_micros(5)).contains(&apart), "{apart:?}");
}

/// Misses of several passes on a K8, natively.
fn misses(policy: Option<&str>) -> Counts {
    let mut simulator = Simulator::new(machine("k8").unwrap(), AddressSpace::native(ARENA, PageSize::Base4K));
    let passes = 40;
    let Some(policy) = policy else {
        (0..passes).flat_map(|_| half_sparse()).for_each(|address| simulator.access(address, true));
        return simulator.counts().clone();
    };
    let mut managed = Managed::new(config(), PolicyChoice::parse(policy).unwrap().make(), &mut simulator);
    for address in (0..passes).flat_map(|_| half_sparse()) {
        managed.access(address, 1, &mut simulator);
        simulator.access(address, true);
    }
    managed.end(&simulator);
    simulator.counts().clone()
}

#[test]
fn a_policy_that_promotes_nothing_is_the_same_as_fixed_base_pages() {
    assert_eq!(misses(Some("never")), misses(None));
}

#[test]
fn misses_fall_from_never_to_greedy_to_prealloc() {
    let [never, thp, greedy, prealloc] =
        ["never", "thp", "greedy", "prealloc"].map(|policy| misses(Some(policy)).data_misses());
    // 4160 pages in order through 544 entries miss each time; 16 windows through 8 entries miss once a window.
    assert_eq!((never, prealloc), (40 * 4160, 40 * 16));
    assert!(prealloc < greedy && greedy < thp && thp < never, "{prealloc} {greedy} {thp} {never}");
}

#[test]
fn the_same_stream_gives_the_same_history_under_every_policy() {
    for info in wideleaf_policies::policy::POLICIES {
        let once = || {
            let (managed, mmu) = run(config(), info.name, 30);
            (managed.tally().clone(), managed.history().samples().to_vec(), mmu.remaps)
        };
        assert_eq!(once(), once(), "{}", info.name);
    }
}
