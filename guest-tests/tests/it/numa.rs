//! A guest's pages lie on the NUMA nodes of their parts of RAM, whatever moves them, while two vCPUs check and rewrite
//! every word. Needs KVM and a host with several nodes: the NPT lab with `--nodes`.
//!
//! ```text
//!   RAM     [ 0 … half )[ half … end )         places of pages: `/proc/self/numa_maps`
//!   nodes    the last    the first              the lab's processor is on the first: no page is on the last by chance
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::pattern_guest::PatternGuest;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::giant::{GiantPages, SwapLimits, SwapSite};
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::WindowMover;
use wideleaf_memory::numa::host::HostNodes;
use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy, PlacedPart, Placement};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, NodeId, NodeSet, OutcomeResult, PageSize, Refusal, WindowIndex};
use wideleaf_testing::swaps::can_swap;
use wideleaf_testing::{GiantPage, Need, has_kvm, is_there};

const MEMORY: Bytes = mib(64);
const WINDOWS: u64 = 32;

/// The last and the first node with memory; `None` where there is only one, or no KVM.
fn nodes() -> Option<[NodeId; 2]> {
    let ids: Vec<NodeId> = HostNodes::read(Path::new("/")).unwrap().with_memory().iter().collect();
    let found = if ids.len() > 1 { Ok(()) } else { Err(format!("the nodes with memory are {ids:?}")) };
    (has_kvm() && is_there(Need::Nodes, found)).then(|| [ids[ids.len() - 1], ids[0]])
}

fn range(start: Bytes, bytes: Bytes) -> GpaRange {
    GpaRange::new(Gpa::new(start.get()), bytes).unwrap()
}

fn bound(gpa: GpaRange, node: NodeId) -> PlacedPart {
    PlacedPart { gpa, policy: NodePolicy { mode: MemoryMode::Bind, nodes: NodeSet::of(node) } }
}

/// Two halves of RAM, the first on the first of these nodes.
fn halves(nodes: [NodeId; 2]) -> Placement {
    let half = mib(32);
    Placement::of(vec![bound(range(Bytes::ZERO, half), nodes[0]), bound(range(half, half), nodes[1])])
}

/// Base pages on each node, from the mappings that begin in this part of RAM.
fn pages_by_node(ram: &GuestRam, gpa: GpaRange) -> BTreeMap<u16, u64> {
    let start = ram.base().get() + gpa.start().get();
    let mut pages = BTreeMap::new();
    for line in std::fs::read_to_string("/proc/self/numa_maps").unwrap().lines() {
        let at = u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
        if !(start..start + gpa.bytes().get()).contains(&at) {
            continue;
        }
        let words = || line.split(' ').filter_map(|word| word.split_once('='));
        let size = words().find_map(|(key, value)| (key == "kernelpagesize_kB").then(|| value.parse::<u64>().unwrap()));
        for (key, value) in words() {
            if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
                *pages.entry(node).or_default() += value.parse::<u64>().unwrap() * size.unwrap_or(4) / 4;
            }
        }
    }
    pages
}

/// Asserts that all pages of each half are on its node, and that both have some.
fn assert_placed(guest: &PatternGuest, nodes: [NodeId; 2], when: &str) {
    for (number, node) in nodes.iter().enumerate() {
        let half = range(mib(32) * number as u64, mib(32));
        let pages = pages_by_node(&guest.ram, half);
        println!("{when}: half {number}: {pages:?}");
        assert_eq!(pages.keys().collect::<Vec<_>>(), [&node.0], "{when}: half {number} is on {node}: {pages:?}");
    }
}

fn start(nodes: [NodeId; 2], kind: BackingKind, page: PageSize) -> PatternGuest {
    let backing = BackingConfig::new(kind, page).unwrap();
    let guest = PatternGuest::start_on(MEMORY, backing, "48M", halves(nodes));
    guest.check_all_words();
    guest
}

#[test]
fn a_guests_first_touches_take_pages_of_its_parts() {
    let Some(nodes) = nodes() else { return };
    for (kind, page) in [
        (BackingKind::Anon, PageSize::Base4K),
        (BackingKind::Anon, PageSize::Huge2M),
        (BackingKind::Memfd, PageSize::Base4K),
        (BackingKind::Memfd, PageSize::Huge2M),
    ] {
        let guest = start(nodes, kind, page);
        assert_placed(&guest, nodes, &format!("{kind:?}, {page}"));
        guest.stop();
    }
}

#[test]
fn a_guests_pool_pages_come_from_the_nodes_of_its_parts() {
    let Some(nodes) = nodes() else { return };
    let pool = HugetlbPools::of_this_machine().status(PageSize::Huge2M).map(|pool| pool.nodes).unwrap_or_default();
    let has_some = |node: &NodeId| pool.iter().any(|pool| pool.node == u32::from(node.0) && pool.free >= WINDOWS / 2);
    let found = if nodes.iter().all(has_some) { Ok(()) } else { Err(format!("{pool:?}")) };
    if is_there(Need::Hugetlb, found) {
        let guest = start(nodes, BackingKind::Hugetlb, PageSize::Huge2M);
        assert_placed(&guest, nodes, "the pool");
        guest.stop();
    }
}

#[test]
fn windows_that_are_swapped_under_a_guest_stay_on_their_nodes() {
    let Some(nodes) = nodes() else { return };
    if !can_swap() {
        return;
    }
    let guest = start(nodes, BackingKind::Anon, PageSize::Base4K);
    let host = std::sync::Arc::new(LinuxHost::open().unwrap());
    let mover = WindowMover::start(host.clone(), guest.ram.clone()).unwrap();
    let mut swapper = Swapper::new(mover.aside().clone());
    let mut swapped = 0;
    // Of both halves in turn.
    for window in (0..WINDOWS / 2).flat_map(|window| [window, WINDOWS / 2 + window]) {
        swapper.refill().unwrap_or_default();
        swapped += u64::from(swapper.swap(host.as_ref(), WindowIndex::new(window)).result == OutcomeResult::Done);
    }
    assert!(swapped >= 16, "{swapped} windows were swapped");
    assert_placed(&guest, nodes, "swapped");
    guest.check_all_words();
    // And back onto base pages, which were made ready.
    let vacated = (0..WINDOWS)
        .filter(|window| swapper.vacate(host.as_ref(), WindowIndex::new(*window)).result == OutcomeResult::Done);
    assert!(vacated.count() >= 8);
    drop(swapper);
    assert_placed(&guest, nodes, "vacated");
    guest.check_all_words();
    guest.stop();
}

#[test]
fn windows_that_are_collapsed_under_a_guest_stay_on_their_nodes() {
    let Some(nodes) = nodes() else { return };
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let guest = start(nodes, kind, PageSize::Base4K);
        let host = LinuxHost::open().unwrap();
        let done = (0..WINDOWS).filter(|window| {
            let collapse = collapse_window(&host, guest.ram.ranges()[0], WindowIndex::new(*window));
            collapse.result == OutcomeResult::Done
        });
        assert!(done.count() >= 8);
        assert_placed(&guest, nodes, "collapsed");
        guest.check_all_words();
        guest.stop();
    }
}

/// Limits for the emulated processors of a lab, which are a hundred times slower than real ones.
const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(5), rounds_max: 100 };
const GIANT: Gpa = Gpa::new(0);

/// Node of the pool's free page of 1 GiB, and another one.
fn giant_nodes() -> Option<(GiantPage, NodeId, NodeId)> {
    let nodes = nodes()?;
    let page = GiantPage::of_this_machine()?;
    let pool = page.pools().status(PageSize::Giant1G).unwrap().nodes;
    let of = pool.iter().find(|pool| pool.free > 0).map(|pool| NodeId(pool.node as u16))?;
    let other = nodes.into_iter().find(|node| *node != of)?;
    Some((page, of, other))
}

#[test]
fn a_giant_of_a_guest_is_on_its_node_there_and_back() {
    let Some((page, node, _)) = giant_nodes() else { return };
    let giants = GiantPages::new(page.pools().clone(), false, PATIENT);
    let memory = gib(1) + mib(64);
    let all = range(Bytes::ZERO, memory);
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let guest = PatternGuest::start_on(memory, backing, "32M", Placement::of(vec![bound(all, node)]));
    let host = LinuxHost::open().unwrap();
    let second_level = guest.machine.second_level();
    let site = SwapSite { host: &host, ram: &guest.ram, second_level: second_level.as_ref() };
    guest.check_all_words();
    for to in [PageSize::Base4K, PageSize::Huge2M] {
        assert_eq!(giants.promote(site, GIANT).result, OutcomeResult::Done);
        guest.check_all_words();
        let on_page = pages_by_node(&guest.ram, range(Bytes::ZERO, gib(1)));
        assert_eq!(on_page, BTreeMap::from([(node.0, 1 << 18)]), "one page of 1 GiB");
        assert_eq!(giants.demote(site, GIANT, to).result, OutcomeResult::Done);
        guest.check_all_words();
        let back = pages_by_node(&guest.ram, all);
        assert_eq!(back.keys().collect::<Vec<_>>(), [&node.0], "{back:?}");
        page.assert_given_back();
    }
    guest.stop();
}

#[test]
fn a_giant_of_another_node_is_refused_and_the_guest_keeps_its_pages() {
    let Some((page, _, other)) = giant_nodes() else { return };
    let giants = GiantPages::new(page.pools().clone(), false, PATIENT);
    let memory = gib(1) + mib(64);
    let placement = Placement::of(vec![bound(range(Bytes::ZERO, memory), other)]);
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let guest = PatternGuest::start_on(memory, backing, "32M", placement);
    let host = LinuxHost::open().unwrap();
    let second_level = guest.machine.second_level();
    let site = SwapSite { host: &host, ram: &guest.ram, second_level: second_level.as_ref() };
    guest.check_all_words();
    assert_eq!(giants.promote(site, GIANT).result, OutcomeResult::Refused(Refusal::NoHugePage));
    page.assert_given_back();
    guest.check_all_words();
    guest.stop();
}

#[test]
fn a_giant_of_two_parts_is_not_one() {
    let first = range(Bytes::ZERO, mib(512));
    let second = range(mib(512), gib(2) - mib(512));
    let parts = vec![bound(first, NodeId(0)), bound(second, NodeId(0))];
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    // Each host has a node 0; a kernel without nodes has no memory policies.
    let Ok(ram) = GuestRam::map_on(&[range(Bytes::ZERO, gib(2))], backing, Placement::of(parts)) else { return };
    assert_eq!(ram.giants().collect::<Vec<_>>(), [Gpa::new(1 << 30)]);
}
