//! The NUMA nodes of guest RAM: a memory policy for each part of it, set before the first touch and on every mapping
//! that brings pages to it.
//!
//! ```text
//!   guest RAM      [ part 0: bind 0 )[ part 1: interleave 0-1 )      mbind(2) of the mapping, before any page is there
//!                         ▲                      ▲
//!   staging areas  huge pages made ready, slots of a restore, memory beside a giant: bound to the nodes of the windows
//!                  that get their pages, since a page that is moved keeps its node
//! ```
//!
//! A window of interleaved RAM gets a page that was made ready from one node, by its number, so that windows alternate.
//! RAM without a part has the kernel's policy, and costs no call.

use std::io;

use libc::c_int;
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, NodeId, NodeSet, WindowIndex};

use crate::sys::{mempolicy, page_nodes};

/// Strictness with which the kernel takes pages from nodes (`set_mempolicy(2)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryMode {
    /// From these nodes alone; without memory there, the kernel ends a process (`MPOL_BIND`).
    #[default]
    Bind,
    /// From these nodes as long as they have memory, then from others (`MPOL_PREFERRED`, `MPOL_PREFERRED_MANY`).
    Preferred,
    /// From these nodes in turn, page by page (`MPOL_INTERLEAVE`).
    Interleave,
}

impl MemoryMode {
    /// Name of the mode in options.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryMode::Bind => "bind",
            MemoryMode::Preferred => "preferred",
            MemoryMode::Interleave => "interleave",
        }
    }

    /// The mode of this name.
    pub fn by_name(name: &str) -> Option<MemoryMode> {
        [MemoryMode::Bind, MemoryMode::Preferred, MemoryMode::Interleave].into_iter().find(|mode| mode.name() == name)
    }
}

/// Memory policy of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// Strictness of the policy.
    pub mode: MemoryMode,
    /// Nodes that it names, at least one.
    pub nodes: NodeSet,
}

impl NodePolicy {
    /// A policy that prefers this node; `None` for a number that no kernel has.
    pub fn preferring(node: u16) -> Option<NodePolicy> {
        let nodes: NodeSet = node.to_string().parse().ok()?;
        Some(NodePolicy { mode: MemoryMode::Preferred, nodes })
    }

    /// Number of the kernel's mode. `MPOL_PREFERRED` takes one node, and is older than its form for several.
    fn number(&self) -> c_int {
        match self.mode {
            MemoryMode::Bind => libc::MPOL_BIND,
            MemoryMode::Preferred if self.nodes.len() == 1 => libc::MPOL_PREFERRED,
            MemoryMode::Preferred => mempolicy::PREFERRED_MANY,
            MemoryMode::Interleave => libc::MPOL_INTERLEAVE,
        }
    }

    /// Sets it on a mapped range, for pages that do not exist yet.
    pub(crate) fn apply(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        mempolicy::mbind(start, bytes, self.number(), &self.nodes)
    }

    /// Calls `act` while the calling thread allocates by this policy, for calls that have no mapping (`fallocate(2)` of
    /// a file of huge pages). The thread's own policy is restored afterwards.
    pub(crate) fn of_thread_during<T>(&self, act: impl FnOnce() -> T) -> io::Result<T> {
        let (mode, nodes) = mempolicy::of_thread()?;
        mempolicy::set_of_thread(self.number(), &self.nodes)?;
        let done = act();
        mempolicy::set_of_thread(mode, &nodes)?;
        Ok(done)
    }

    /// The nodes to which it binds; `None` where pages may come from others too.
    pub(crate) fn bound_to(&self) -> Option<NodeSet> {
        (self.mode == MemoryMode::Bind).then_some(self.nodes)
    }

    /// The node, where the policy names one alone.
    pub(crate) fn single_node(&self) -> Option<NodeId> {
        let mut nodes = self.nodes.iter();
        nodes.next().filter(|_| nodes.next().is_none())
    }

    /// Whether the present page at an address of this process is one that the policy permits. One of which the kernel
    /// does not tell the node is.
    pub(crate) fn permits_page_at(&self, address: Hva) -> bool {
        !matches!(page_nodes::node_of(address), Ok(Some(node)) if !self.permits(node))
    }

    /// Whether a page on this node is one that the policy permits. One from elsewhere is permitted unless it is strict.
    pub(crate) fn permits(&self, node: NodeId) -> bool {
        self.mode == MemoryMode::Preferred || self.nodes.contains(node)
    }
}

/// Part of guest RAM with a memory policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedPart {
    /// Guest addresses of the part, in whole windows.
    pub gpa: GpaRange,
    /// Policy of its pages.
    pub policy: NodePolicy,
}

/// Nodes that the pages of a window come from when they are made elsewhere: windows of one source may exchange pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source(u16);

impl Source {
    /// The source of this number.
    pub const fn new(number: u16) -> Source {
        Source(number)
    }
}

/// The nodes of all guest RAM.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    parts: Vec<PlacedPart>,
    /// Policies for staging areas, by number of the source.
    sources: Vec<NodePolicy>,
    /// Parts of RAM on base pages that start on huge ones.
    starts_huge: Vec<GpaRange>,
}

impl Placement {
    /// Placement of these parts, which ascend without overlap. RAM outside them has the kernel's policy.
    ///
    /// # Panics
    /// If they do not ascend, or one has no node.
    pub fn of(parts: Vec<PlacedPart>) -> Placement {
        assert!(parts.is_sorted_by(|a, b| a.gpa.end() <= b.gpa.start()), "parts ascend: {parts:?}");
        let mut sources = Vec::new();
        for policy in parts.iter().flat_map(|part| single_sources(&part.policy)) {
            assert!(!policy.nodes.is_empty(), "a policy names a node");
            if !sources.contains(&policy) {
                sources.push(policy);
            }
        }
        Placement { parts, sources, starts_huge: Vec::new() }
    }

    /// The same, with parts that start on huge pages of THP, where RAM starts on base pages.
    #[must_use]
    pub fn with_huge_start(self, starts_huge: Vec<GpaRange>) -> Placement {
        Placement { starts_huge, ..self }
    }

    /// Pieces of a range that start on huge pages although RAM starts on base pages.
    pub(crate) fn huge_pieces(&self, gpa: GpaRange) -> impl Iterator<Item = GpaRange> + '_ {
        self.starts_huge.iter().filter_map(move |part| common(*part, gpa))
    }

    /// Policy for memory that pages of any part are moved to, and none is made in; `None` where RAM has no policy.
    /// Under the kernel's own policy its NUMA balancing would move such pages to the node of the thread that reads
    /// them.
    pub(crate) fn policy_of_all(&self) -> Option<NodePolicy> {
        let nodes = self.parts.iter().flat_map(|part| part.policy.nodes.iter()).collect();
        (!self.is_none()).then_some(NodePolicy { mode: MemoryMode::Bind, nodes })
    }

    /// Whether the kernel's policy is that of all RAM.
    pub fn is_none(&self) -> bool {
        self.parts.is_empty()
    }

    /// The parts, ascending.
    pub fn parts(&self) -> &[PlacedPart] {
        &self.parts
    }

    /// Nodes to which all of the RAM is bound, if one policy binds it; `None` if it may be anywhere or parts differ.
    pub(crate) fn bound_to(&self) -> Option<NodeSet> {
        let policy = self.parts.first()?.policy;
        (policy.mode == MemoryMode::Bind && !self.fixes_nodes()).then_some(policy.nodes)
    }

    /// Whether it says for each window where its pages lie: by turns of the nodes, or by parts with different policies.
    /// Nothing is moved to another node then.
    pub(crate) fn fixes_nodes(&self) -> bool {
        let mut policies = self.parts.iter().map(|part| part.policy);
        policies
            .next()
            .is_some_and(|first| first.mode == MemoryMode::Interleave || policies.any(|policy| policy != first))
    }

    /// Pieces of a range that have a policy.
    pub(crate) fn pieces(&self, gpa: GpaRange) -> impl Iterator<Item = PlacedPart> + '_ {
        self.parts.iter().filter_map(move |part| Some(PlacedPart { gpa: common(part.gpa, gpa)?, policy: part.policy }))
    }

    /// Policy of the page at an address.
    pub(crate) fn policy_at(&self, gpa: Gpa) -> Option<&NodePolicy> {
        self.parts.iter().find(|part| part.gpa.contains(gpa)).map(|part| &part.policy)
    }

    /// Source of a window's pages that are made elsewhere.
    pub(crate) fn source_of(&self, window: WindowIndex) -> Source {
        let Some(policy) = self.policy_at(window.start()) else { return Source::default() };
        let single = single_source(policy, window);
        let number = self.sources.iter().position(|source| *source == single).unwrap_or_default();
        Source(number as u16)
    }

    /// Policy of a staging area for windows of this source; `None` where the kernel's own is in force.
    pub(crate) fn policy_of(&self, source: Source) -> Option<&NodePolicy> {
        self.sources.get(usize::from(source.0))
    }

    /// Policy of a page of 1 GiB at that giant; `None` where the kernel's own is in force.
    pub(crate) fn giant_policy(&self, giant: Gpa) -> Option<NodePolicy> {
        self.policy_at(giant).map(|policy| match policy.mode {
            MemoryMode::Interleave => {
                let nodes: Vec<NodeId> = policy.nodes.iter().collect();
                let turn = WindowIndex::containing(giant).giant() as usize % nodes.len();
                NodePolicy { mode: MemoryMode::Preferred, nodes: NodeSet::of(nodes[turn]) }
            }
            MemoryMode::Bind | MemoryMode::Preferred => *policy,
        })
    }

    /// Whether one policy is in force in all of a range: one page may back it.
    pub(crate) fn is_one(&self, gpa: GpaRange) -> bool {
        let mut pieces = self.pieces(gpa);
        match (pieces.next(), pieces.next()) {
            (None, _) => true,
            (Some(piece), None) => piece.gpa == gpa,
            (Some(_), Some(_)) => false,
        }
    }
}

/// The addresses that two ranges share, if there are some.
fn common(one: GpaRange, other: GpaRange) -> Option<GpaRange> {
    let (start, end) = (one.start().max(other.start()), one.end().min(other.end()));
    (start < end).then(|| GpaRange::new(start, end - start)).flatten()
}

/// The sources of windows under a policy: one, or each of the nodes in turn.
fn single_sources(policy: &NodePolicy) -> Vec<NodePolicy> {
    match policy.mode {
        MemoryMode::Bind | MemoryMode::Preferred => vec![*policy],
        MemoryMode::Interleave => policy.nodes.iter().map(of_interleaved).collect(),
    }
}

fn single_source(policy: &NodePolicy, window: WindowIndex) -> NodePolicy {
    let sources = single_sources(policy);
    sources[(window.get() % sources.len() as u64) as usize]
}

/// As for interleaved memory, other nodes follow where this one has no page.
fn of_interleaved(node: NodeId) -> NodePolicy {
    NodePolicy { mode: MemoryMode::Preferred, nodes: NodeSet::of(node) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{gib, mib};

    fn range(start: u64, bytes: Bytes) -> GpaRange {
        GpaRange::new(Gpa::new(start), bytes).expect("it fits")
    }

    fn part(start: u64, bytes: Bytes, mode: MemoryMode, nodes: &str) -> PlacedPart {
        PlacedPart { gpa: range(start, bytes), policy: NodePolicy { mode, nodes: nodes.parse().expect("a list") } }
    }

    ///   [0 bind 0 1G)[1G interleave 1-2 2G)   [3G …): the kernel's
    fn placement() -> Placement {
        Placement::of(vec![
            part(0, gib(1), MemoryMode::Bind, "0"),
            part(1 << 30, gib(2), MemoryMode::Interleave, "1-2"),
        ])
    }

    #[test]
    fn ram_is_bound_where_one_policy_binds_all_of_it_and_fixed_where_windows_have_nodes_of_their_own() {
        let of = |parts: &[PlacedPart]| Placement::of(parts.to_vec());
        let nodes =
            |placement: &Placement| (placement.bound_to().map(|nodes| nodes.to_string()), placement.fixes_nodes());
        let [low, high] = [(0, "0"), (1 << 30, "1")].map(|(start, nodes)| part(start, gib(1), MemoryMode::Bind, nodes));
        assert_eq!(nodes(&of(&[low])), (Some("0".to_owned()), false));
        assert_eq!(nodes(&of(&[low, high])), (None, true));
        assert_eq!(nodes(&of(&[part(0, gib(1), MemoryMode::Interleave, "0-1")])), (None, true));
        assert_eq!(nodes(&of(&[part(0, gib(1), MemoryMode::Preferred, "0")])), (None, false));
        assert_eq!(nodes(&Placement::default()), (None, false));
    }

    #[test]
    fn windows_of_one_part_have_one_source_and_interleaved_ones_alternate() {
        let placement = placement();
        let source = |window| placement.source_of(WindowIndex::new(window));
        let nodes = |window| placement.policy_of(source(window)).map(|policy| policy.nodes.to_string());
        assert_eq!(source(0), source(511));
        assert_eq!([nodes(0), nodes(512), nodes(513), nodes(514)].map(Option::unwrap), ["0", "1", "2", "1"]);
        assert_ne!(source(512), source(513));
        assert!(Placement::default().policy_of(Source::default()).is_none());
    }

    #[test]
    fn a_range_over_two_parts_is_not_one_and_has_two_pieces() {
        let placement = placement();
        assert!(placement.is_one(range(0, gib(1))) && placement.is_one(range(3 << 30, gib(1))));
        let over = range((1 << 30) - (2 << 20), mib(4));
        assert!(!placement.is_one(over));
        let pieces: Vec<GpaRange> = placement.pieces(over).map(|piece| piece.gpa).collect();
        assert_eq!(pieces, [range((1 << 30) - (2 << 20), mib(2)), range(1 << 30, mib(2))]);
        assert!(!placement.is_one(range((3 << 30) - (2 << 20), mib(4))), "half of it has a policy");
    }

    #[test]
    fn a_strict_policy_permits_its_own_nodes_alone() {
        let permits = |mode, node| part(0, gib(1), mode, "0-1").policy.permits(NodeId(node));
        assert!(permits(MemoryMode::Bind, 1) && !permits(MemoryMode::Bind, 2));
        assert!(permits(MemoryMode::Preferred, 2) && !permits(MemoryMode::Interleave, 2));
    }

    #[test]
    fn giants_of_interleaved_memory_take_turns() {
        let placement = placement();
        let nodes = |giant: u64| placement.giant_policy(Gpa::new(giant << 30)).map(|policy| policy.nodes.to_string());
        assert_eq!([nodes(0), nodes(1), nodes(2), nodes(3)].map(Option::unwrap_or_default), ["0", "2", "1", ""]);
    }

    #[test]
    fn the_kernels_mode_for_several_preferred_nodes_is_another_one() {
        let number = |mode, nodes: &str| part(0, gib(1), mode, nodes).policy.number();
        assert_eq!((number(MemoryMode::Preferred, "1"), number(MemoryMode::Preferred, "0-1")), (1, 5));
        assert_eq!((number(MemoryMode::Bind, "0"), number(MemoryMode::Interleave, "0")), (2, 3));
    }
}
