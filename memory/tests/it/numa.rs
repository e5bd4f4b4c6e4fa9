//! Pages of guest RAM lie where its memory policy says, whatever brings them: the kernel's own faults, a fill in
//! advance, an answer to a first touch, a reserved frame, a swap, a trade, a collapse, a restore. On a host with one
//! node these tests are skipped with the reason; `WIDELEAF_REQUIRE=nodes` turns the skip into a failure.
//!
//! ```text
//!   RAM     [ 0 … WINDOWS )[ WINDOWS … 2 WINDOWS )         places of pages: `/proc/self/numa_maps`
//!   nodes    the last one   the first one                  so that no part is right by chance
//! ```

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::faults::{VM, backing, join, skip, touch, wait_for, word};
use crate::{moves, turn_at_the_pools};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::WindowMover;
use wideleaf_memory::giant_maker::make_in;
use wideleaf_memory::numa::host::HostNodes;
use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy, PlacedPart, Placement};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::restore::{ReadError, RestoreConfig, Restorer, SavedRam, SavedWindow};
use wideleaf_memory::side_mapping::GiantFile;
use wideleaf_memory::{BackingConfig, BackingKind, FirstTouch, GuestRam, LinuxHost, ReservedFrames};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Backing, Gpa, GpaRange, NodeId, NodeSet, OutcomeResult, PageSet, PageSize, PerTenThousand, ReservationRules,
    WindowIndex,
};

/// Number of windows of each part.
const WINDOWS: u64 = 8;
const PAGES: usize = 512;

/// The last and the first node with memory; `None` with the reason printed where there is only one.
fn nodes() -> Option<[NodeId; 2]> {
    let host = HostNodes::read(Path::new("/")).unwrap();
    let ids: Vec<NodeId> = host.with_memory().iter().collect();
    if let [first, .., last] = ids[..] {
        return Some([last, first]);
    }
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == "nodes"), "WIDELEAF_REQUIRE={required}, and the nodes are {ids:?}");
    println!("skipped: this host has memory on one node");
    None
}

fn range(first: u64, windows: u64) -> GpaRange {
    GpaRange::new(Gpa::new(first << 21), mib(2) * windows).unwrap()
}

fn part(first: u64, windows: u64, mode: MemoryMode, nodes: NodeSet) -> PlacedPart {
    PlacedPart { gpa: range(first, windows), policy: NodePolicy { mode, nodes } }
}

/// RAM of two parts, the first on the first of these nodes.
fn two_parts(nodes: [NodeId; 2], backing: BackingConfig) -> Arc<GuestRam> {
    let of = |number: u64| part(number * WINDOWS, WINDOWS, MemoryMode::Bind, NodeSet::of(nodes[number as usize]));
    GuestRam::map_on(&[range(0, 2 * WINDOWS)], backing, Placement::of(vec![of(0), of(1)])).unwrap()
}

fn anon() -> BackingConfig {
    BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()
}

/// Base pages on each node, from the mappings that begin in these windows.
fn pages_by_node(ram: &GuestRam, first: u64, windows: u64) -> BTreeMap<u16, u64> {
    let start = ram.base().get() + (first << 21);
    let mut pages = BTreeMap::new();
    for line in std::fs::read_to_string("/proc/self/numa_maps").unwrap().lines() {
        let at = u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
        if !(start..start + (windows << 21)).contains(&at) {
            continue;
        }
        let words = || line.split(' ').filter_map(|word| word.split_once('='));
        let size = words().find_map(|(key, value)| (key == "kernelpagesize_kB").then(|| value.parse::<u64>().unwrap()));
        let size = size.unwrap_or(4);
        for (key, value) in words() {
            if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
                *pages.entry(node).or_default() += value.parse::<u64>().unwrap() * size / 4;
            }
        }
    }
    pages
}

/// Asserts that each part has these pages, all on its node.
fn assert_placed(ram: &GuestRam, nodes: [NodeId; 2], pages: u64, when: &str) {
    for (number, node) in nodes.iter().enumerate() {
        let there = pages_by_node(ram, number as u64 * WINDOWS, WINDOWS);
        assert_eq!(there, BTreeMap::from([(node.0, pages)]), "{when}: part {number} is placed on {node}");
    }
}

fn touch_all(ram: &GuestRam) {
    for window in 0..2 * WINDOWS {
        (0..PAGES).for_each(|page| assert_eq!(touch(ram, window, page), 0));
    }
}

const ALL: u64 = WINDOWS * PAGES as u64;

#[test]
fn first_touches_of_each_backing_take_pages_of_its_part() {
    let Some(nodes) = nodes() else { return };
    let backings = [
        anon(),
        BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).unwrap(),
        BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).unwrap(),
        BackingConfig::new(BackingKind::Memfd, PageSize::Huge2M).unwrap(),
        BackingConfig::of_huge_folios(),
    ];
    for backing in backings {
        let ram = two_parts(nodes, backing);
        touch_all(&ram);
        assert_placed(&ram, nodes, ALL, &format!("{backing:?}"));
    }
}

#[test]
fn ram_that_is_faulted_in_takes_pages_of_its_part() {
    let Some(nodes) = nodes() else { return };
    let ram = two_parts(nodes, anon());
    prefault(&LinuxHost::open().unwrap(), ram.ranges(), 2, &|_| ControlFlow::Continue(())).unwrap();
    assert_placed(&ram, nodes, ALL, "faulted in");
}

#[test]
fn pages_of_the_pool_come_from_the_node_of_the_part() {
    let Some(nodes) = nodes() else { return };
    let _turn = turn_at_the_pools();
    let pool = HugetlbPools::of_this_machine().status(PageSize::Huge2M).unwrap();
    let free = |node: &NodeId| pool.nodes.iter().any(|pool| pool.node == u32::from(node.0) && pool.free >= WINDOWS);
    if !nodes.iter().all(free) {
        println!("skipped: the pool has fewer than {WINDOWS} free pages on a node: {:?}", pool.nodes);
        return;
    }
    let ram = two_parts(nodes, BackingConfig::new(BackingKind::Hugetlb, PageSize::Huge2M).unwrap());
    touch_all(&ram);
    assert_placed(&ram, nodes, ALL, "the pool");
}

#[test]
fn a_part_that_starts_on_huge_pages_is_huge_after_its_first_touch_and_its_neighbour_is_not() {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if enabled.is_empty() || enabled.contains("[never]") {
        println!("skipped: THP is off on this host: {enabled:?}");
        return;
    }
    let placement = Placement::default().with_huge_start(vec![range(WINDOWS, WINDOWS)]);
    let ram = GuestRam::map_on(&[range(0, 2 * WINDOWS)], anon(), placement).unwrap();
    // By writes: a window that is read first has the kernel's huge page of zeroes, for which Linux 6.12 makes base
    // pages at the first write.
    for (window, page) in (0..2 * WINDOWS).flat_map(|window| (0..PAGES).map(move |page| (window, page))) {
        word(&ram, window, page).store(1, Ordering::Relaxed);
    }
    let huge =
        |windows: std::ops::Range<u64>| windows.filter(|window| backing(&ram, *window).1 == Backing::Huge2M).count();
    // The kernel may have no block for some of them.
    assert!(huge(WINDOWS..2 * WINDOWS) > 0, "none of the second part is huge");
    assert_eq!(huge(0..WINDOWS), 0);
}

#[test]
fn a_giant_page_that_is_made_is_on_the_node_of_its_policy() {
    let Some([last, first]) = nodes() else { return };
    let _turn = turn_at_the_pools();
    let pools = HugetlbPools::of_this_machine();
    let in_use = |node: NodeId| {
        let pool = pools.status(PageSize::Giant1G).expect("the kernel has such a pool");
        pool.nodes.iter().find(|of| of.node == u32::from(node.0)).map_or(0, |of| of.total - of.free)
    };
    for (node, other) in [(last, first), (first, last)] {
        let before = [in_use(node), in_use(other)];
        let file = GiantFile::of_pool().unwrap();
        let policy = NodePolicy { mode: MemoryMode::Bind, nodes: NodeSet::of(node) };
        match make_in(&pools, &file, Some(policy)) {
            Ok(()) => assert_eq!([in_use(node), in_use(other)], [before[0] + 1, before[1]], "{node}"),
            Err(error) => println!("skipped: no page on {node}: {error}"),
        }
        drop(file);
        assert_eq!([in_use(node), in_use(other)], before, "it goes back");
    }
}

#[test]
fn interleaved_ram_is_on_both_nodes_by_halves() {
    let Some(nodes) = nodes() else { return };
    for page in [PageSize::Base4K, PageSize::Huge2M] {
        let both = nodes.into_iter().collect();
        let placement = Placement::of(vec![part(0, 2 * WINDOWS, MemoryMode::Interleave, both)]);
        let backing = BackingConfig::new(BackingKind::Anon, page).unwrap();
        let ram = GuestRam::map_on(&[range(0, 2 * WINDOWS)], backing, placement).unwrap();
        touch_all(&ram);
        let there = pages_by_node(&ram, 0, 2 * WINDOWS);
        assert_eq!(there, nodes.map(|node| (node.0, ALL)).into(), "{page}");
    }
}

#[test]
fn preferred_ram_is_on_its_node() {
    let Some(nodes) = nodes() else { return };
    let placement = Placement::of(vec![part(0, WINDOWS, MemoryMode::Preferred, NodeSet::of(nodes[0]))]);
    let ram = GuestRam::map_on(&[range(0, WINDOWS)], anon(), placement).unwrap();
    (0..WINDOWS).for_each(|window| assert_eq!(touch(&ram, window, 0), 0));
    assert_eq!(pages_by_node(&ram, 0, WINDOWS), BTreeMap::from([(nodes[0].0, WINDOWS)]));
}

#[test]
fn answers_to_first_touches_bring_pages_of_the_part() {
    let Some(nodes) = nodes() else { return };
    if skip() {
        return;
    }
    for backing in [anon(), BackingConfig::of_huge_folios()] {
        let ram = two_parts(nodes, backing);
        let decide =
            |_, window: WindowIndex| if window.get().is_multiple_of(2) { PageSize::Huge2M } else { PageSize::Base4K };
        let service =
            FirstTouch::start(Arc::new(LinuxHost::open().unwrap()), vec![(VM, ram.clone())], None, decide).unwrap();
        let toucher = ram.clone();
        join(std::thread::spawn(move || touch_all(&toucher)));
        let report = join(std::thread::spawn(move || service.stop()));
        assert_eq!(report.answered_2m + report.huge_refused(), WINDOWS, "{report:?}");
        assert_placed(&ram, nodes, ALL, &format!("{backing:?}, {report:?}"));
    }
}

#[test]
fn reserved_frames_are_frames_of_the_part() {
    let Some(nodes) = nodes() else { return };
    if skip() {
        return;
    }
    let ram = two_parts(nodes, BackingConfig::reservable());
    let rules = ReservationRules {
        threshold: 512,
        break_from: PerTenThousand::of(85, 100),
        break_to: PerTenThousand::of(70, 100),
    };
    let host = Arc::new(LinuxHost::open().unwrap());
    let service = ReservedFrames::start(host, vec![(VM, ram.clone())], rules).unwrap();
    let toucher = ram.clone();
    join(std::thread::spawn(move || touch_all(&toucher)));
    let report = join(std::thread::spawn(move || service.stop()));
    assert_eq!(report.reserved, 2 * WINDOWS, "{report:?}");
    assert_placed(&ram, nodes, ALL, &format!("{report:?}"));
}

/// RAM with a word in each page, and its mover; `None` where windows cannot be swapped.
fn moved(nodes: [NodeId; 2]) -> Option<(Arc<LinuxHost>, Arc<GuestRam>, WindowMover)> {
    if moves::are_missing() {
        return None;
    }
    let ram = two_parts(nodes, anon());
    touch_all(&ram);
    let host = Arc::new(LinuxHost::open().unwrap());
    let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
    Some((host, ram, mover))
}

fn assert_intact(ram: &GuestRam) {
    for (window, page) in (0..2 * WINDOWS).flat_map(|window| (0..PAGES).map(move |page| (window, page))) {
        let found = word(ram, window, page).load(Ordering::Relaxed);
        assert_eq!(found, crate::faults::mark(window, page), "window {window}, page {page}");
    }
}

/// Windows of both parts in turn, so that pages made ready for one part would be used for the other.
fn in_turn() -> impl Iterator<Item = u64> {
    (0..WINDOWS).flat_map(|window| [window, WINDOWS + window])
}

#[test]
fn swapped_windows_stay_on_the_node_of_their_part() {
    let Some(nodes) = nodes() else { return };
    let Some((host, ram, mover)) = moved(nodes) else { return };
    let mut swapper = Swapper::new(mover.aside().clone());
    let mut swapped = 0;
    for window in in_turn() {
        swapper.refill().unwrap_or_default();
        let swap = swapper.swap(host.as_ref(), WindowIndex::new(window));
        swapped += u64::from(swap.result == OutcomeResult::Done);
        println!("{window}: {:?}", swap.result);
    }
    if swapped == 0 {
        println!("skipped: too few huge pages, or the kernel keeps empty page tables (before Linux 6.14)");
        return;
    }
    assert_eq!(swapped, 2 * WINDOWS);
    assert!((0..2 * WINDOWS).all(|window| backing(&ram, window) == (512, Backing::Huge2M)));
    assert_placed(&ram, nodes, ALL, "swapped");
    assert_intact(&ram);
}

#[test]
fn windows_trade_pages_within_their_part_alone() {
    let Some(nodes) = nodes() else { return };
    let Some((host, ram, mover)) = moved(nodes) else { return };
    let mut swapper = Swapper::new(mover.aside().clone());
    // Half of the windows of each part get huge pages, which they give to the other half.
    let (mut vacated, mut swapped) = (0, 0);
    for window in in_turn().filter(|window| window % 2 == 0) {
        collapse_window(host.as_ref(), ram.ranges()[0], WindowIndex::new(window));
    }
    for window in in_turn().filter(|window| window % 2 == 0) {
        vacated += u64::from(swapper.vacate(host.as_ref(), WindowIndex::new(window)).result == OutcomeResult::Done);
        // Of the other part, and then of its own.
        for other in [(window + WINDOWS + 1) % (2 * WINDOWS), window + 1] {
            let swap = swapper.swap(host.as_ref(), WindowIndex::new(other));
            swapped += u64::from(swap.result == OutcomeResult::Done);
        }
    }
    if swapped == 0 {
        println!("skipped: too few huge pages, or the kernel keeps empty page tables (before Linux 6.14)");
        return;
    }
    assert_eq!((vacated, swapped), (WINDOWS, WINDOWS));
    drop(swapper);
    assert_placed(&ram, nodes, ALL, "traded");
    assert_intact(&ram);
}

#[test]
fn collapsed_windows_stay_on_the_node_of_their_part() {
    let Some(nodes) = nodes() else { return };
    let host = LinuxHost::open().unwrap();
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let ram = two_parts(nodes, BackingConfig::new(kind, PageSize::Base4K).unwrap());
        touch_all(&ram);
        let done = in_turn().filter(|window| {
            collapse_window(&host, ram.ranges()[0], WindowIndex::new(*window)).result == OutcomeResult::Done
        });
        println!("{kind:?}: {} windows are huge", done.count());
        assert_placed(&ram, nodes, ALL, "collapsed");
        assert_intact(&ram);
    }
}

/// RAM in which every window is stored, by turns as a huge page and as base pages.
struct Saved;

impl SavedRam for Saved {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        SavedWindow {
            pages: PageSet::ALL,
            was_huge: (window.get() / 2).is_multiple_of(2),
            heat: PerTenThousand::default(),
            has_others: false,
        }
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        for (page, bytes) in into.as_chunks_mut::<4096>().0.iter_mut().enumerate() {
            bytes[..8].copy_from_slice(&crate::faults::mark(window.get(), page).to_le_bytes());
        }
        Ok(())
    }
}

#[test]
fn restored_windows_are_filled_on_the_node_of_their_part() {
    let Some(nodes) = nodes() else { return };
    if skip() {
        return;
    }
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let ram = two_parts(nodes, BackingConfig::new(kind, PageSize::Base4K).unwrap());
        let restorer = Restorer::start(ram.clone(), Arc::new(Saved), RestoreConfig::default()).unwrap();
        let toucher = ram.clone();
        join(std::thread::spawn(move || {
            in_turn().for_each(|window| {
                word(&toucher, window, 7).load(Ordering::Relaxed);
            });
        }));
        wait_for("the end of the restore", || restorer.is_finished());
        let report = restorer.report();
        assert_intact(&ram);
        assert_placed(&ram, nodes, ALL, &format!("{kind:?}, {report:?}"));
    }
}
