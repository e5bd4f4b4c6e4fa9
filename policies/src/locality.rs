//! Where the memory of a window lies, from which nodes it is touched, and on which node a huge page for it belongs.
//!
//! ```text
//!   touched from one node     there already  ─▶ a page of that node, or none for now: never a remote one
//!                             elsewhere      ─▶ a page of that node, as it is copied anyway; none free: stay there
//!   touched from several      on one node    ─▶ a page of that node: each node's share of the touches stays
//!                             spread         ─▶ by turns, a window to each of these nodes: still interleaved
//!   not known                                ─▶ wherever the memory lies now
//!   a node that the guest may not use (cpuset, policy of its memory) is never named
//! ```
//!
//! On a host with one node the table of nodes is empty, all columns are unknown, and no action names a node.

use alloc::vec::Vec;

use crate::node::NodeId;
use crate::snapshot::{Backing, VmSnapshot};
use crate::units::{PerTenThousand, WindowIndex};
use crate::window_node::{NodeOfVm, WindowNode};

/// Where a huge page for a window should come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placing {
    /// The host has one node, or nothing is known: the kernel chooses.
    Anywhere,
    /// From this node alone.
    On(NodeId),
    /// The window is where it is used, and that node has no free page: base pages there are better than a remote
    /// huge page.
    NoneFree(NodeId),
}

/// Free pages that a plan has not yet used, by VM and node; one plan must not promise a page twice.
#[derive(Clone, Debug, Default)]
pub struct FreePages {
    /// By node; all VMs share the host.
    left: Vec<(NodeId, u64)>,
}

impl FreePages {
    /// Free pages of 2 MiB as one VM's table has them: the nodes are those of the host. Each has one more, which the
    /// kernel may make by compaction.
    pub fn of(vm: &VmSnapshot) -> FreePages {
        FreePages { left: vm.nodes.iter().map(|row| (row.node, row.free_2m.saturating_add(1))).collect() }
    }

    /// Whether the node has a page left, or may make one.
    pub fn has(&self, node: NodeId) -> bool {
        self.left_on(node) > 0
    }

    /// Whether the node has a page left for which nothing needs to be made.
    pub fn has_block(&self, node: NodeId) -> bool {
        self.left_on(node) > 1
    }

    fn left_on(&self, node: NodeId) -> u64 {
        self.left.iter().find(|(known, _)| *known == node).map_or(0, |(_, left)| *left)
    }

    /// Uses one page of the node.
    pub fn take(&mut self, node: NodeId) {
        if let Some((_, left)) = self.left.iter_mut().find(|(known, _)| *known == node) {
            *left = left.saturating_sub(1);
        }
    }
}

/// Whether the VM's host has several nodes.
pub fn has_nodes(vm: &VmSnapshot) -> bool {
    vm.nodes.len() > 1
}

fn may_use(vm: &VmSnapshot, node: NodeId) -> bool {
    vm.nodes.iter().any(|row| row.node == node && row.may_use)
}

/// Node on which the memory of a window belongs, by its touches; `None` if it may stay where it is.
pub fn home(vm: &VmSnapshot, row: usize) -> Option<NodeId> {
    vm.touched_from[row].mainly().filter(|node| may_use(vm, *node))
}

/// Whether the window has its memory on another node than the one that touches it.
pub fn is_remote(vm: &VmSnapshot, row: usize) -> bool {
    has_nodes(vm) && home(vm, row).is_some_and(|home| vm.node[row].most().is_some_and(|node| node != home))
}

/// Node from which a huge page for the window has to come, so that its memory lies where it belongs; `None` if the node
/// makes no difference, or is not known.
pub fn node_of_page(vm: &VmSnapshot, row: usize) -> Option<NodeId> {
    if !has_nodes(vm) {
        return None;
    }
    let now = if let WindowNode::On(node) = vm.node[row] { Some(node) } else { None };
    home(vm, row).or_else(|| now.filter(|node| may_use(vm, *node)))
}

/// The node on which all vCPUs of the VM ran when they were last seen running; `None` if there are several, or if the
/// host has one node.
pub fn only_node(vm: &VmSnapshot) -> Option<NodeId> {
    let mut with_vcpus = vm.nodes.iter().filter(|row| row.vcpus > 0);
    let first = with_vcpus.next().filter(|_| has_nodes(vm))?;
    with_vcpus.next().is_none().then_some(first.node)
}

/// Place for a huge page of 2 MiB for the window at `row`.
pub fn placing(vm: &VmSnapshot, row: usize, free: &FreePages) -> Placing {
    if !has_nodes(vm) {
        return Placing::Anywhere;
    }
    let now = vm.node[row];
    match (home(vm, row), now.most().filter(|node| may_use(vm, *node))) {
        (Some(home), _) if free.has_block(home) => Placing::On(home),
        (Some(home), Some(now)) if now != home && free.has_block(now) => Placing::On(now),
        (Some(home), _) if free.has(home) => Placing::On(home),
        (Some(home), _) => Placing::NoneFree(home),
        (None, _) if matches!(now, WindowNode::Spread(_)) => by_turns(vm, vm.windows[row], free),
        (None, Some(now)) if free.has(now) => Placing::On(now),
        (None, Some(now)) => Placing::NoneFree(now),
        (None, None) => Placing::Anywhere,
    }
}

/// One of the nodes with vCPUs (or of all, if no vCPU was found), the next one for the next window.
fn by_turns(vm: &VmSnapshot, window: WindowIndex, free: &FreePages) -> Placing {
    let any_vcpu = vm.nodes.iter().any(|row| row.may_use && row.vcpus > 0);
    let nodes = || vm.nodes.iter().filter(|row| row.may_use && (row.vcpus > 0 || !any_vcpu));
    let count = nodes().count();
    if count == 0 {
        return Placing::Anywhere;
    }
    let first = (window.get() % count as u64) as usize;
    let in_turn = nodes().cycle().skip(first).take(count).map(|row| row.node);
    let found =
        in_turn.clone().find(|node| free.has_block(*node)).or_else(|| in_turn.clone().find(|node| free.has(*node)));
    match found {
        Some(node) => Placing::On(node),
        None => in_turn.map(Placing::NoneFree).next().unwrap_or(Placing::Anywhere),
    }
}

/// Memory of a VM by node, in bytes, from the sampled windows: the pages of a window count where most of its sampled
/// pages are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryByNode {
    /// Rows by node, ascending.
    pub nodes: Vec<MemoryOnNode>,
    /// Present memory of windows that were not sampled yet, in base pages.
    pub unknown: u64,
}

/// Memory of a VM on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOnNode {
    /// Number of the node.
    pub node: NodeId,
    /// Present base pages of windows that are there, whatever their size.
    pub pages: u64,
    /// Number of windows on pages of 2 MiB.
    pub windows_2m: u64,
    /// Number of windows in pages of 1 GiB.
    pub windows_1g: u64,
}

impl MemoryByNode {
    /// Memory of a VM by node. Every node of the VM's table has a row.
    pub fn of(vm: &VmSnapshot) -> MemoryByNode {
        let nodes = vm.nodes.iter().map(|row| MemoryOnNode { node: row.node, ..MemoryOnNode::default() });
        let mut sum = MemoryByNode { nodes: nodes.collect(), unknown: 0 };
        for (row, node) in vm.node.iter().enumerate() {
            let pages = u64::from(vm.resident[row]);
            let Some(node) = node.most() else {
                sum.unknown += pages;
                continue;
            };
            let on_node = sum.row(node);
            on_node.pages += pages;
            on_node.windows_2m += u64::from(vm.backing[row] == Backing::Huge2M);
            on_node.windows_1g += u64::from(vm.backing[row] == Backing::Giant1G);
        }
        sum
    }

    /// The memory of both together: parts of one VM.
    #[must_use]
    pub fn with(mut self, other: &MemoryByNode) -> MemoryByNode {
        self.unknown += other.unknown;
        for more in &other.nodes {
            let row = self.row(more.node);
            row.pages += more.pages;
            row.windows_2m += more.windows_2m;
            row.windows_1g += more.windows_1g;
        }
        self
    }

    fn row(&mut self, node: NodeId) -> &mut MemoryOnNode {
        let at = match self.nodes.binary_search_by_key(&node, |row| row.node) {
            Ok(at) => at,
            Err(at) => {
                self.nodes.insert(at, MemoryOnNode { node, ..MemoryOnNode::default() });
                at
            }
        };
        &mut self.nodes[at]
    }

    /// Share of the known memory that lies on nodes where vCPUs ran; `None` if either is not known.
    pub fn local_share(&self, nodes: &[NodeOfVm]) -> Option<PerTenThousand> {
        let runs_there = |of: NodeId| nodes.iter().any(|row| row.node == of && row.vcpus > 0);
        let is_any_known = nodes.iter().any(|row| row.vcpus > 0);
        let known: u64 = self.nodes.iter().map(|row| row.pages).sum();
        let local: u64 = self.nodes.iter().filter(|row| runs_there(row.node)).map(|row| row.pages).sum();
        (known > 0 && is_any_known).then(|| PerTenThousand::of(local, known))
    }
}
