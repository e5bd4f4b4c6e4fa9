//! What a snapshot says of NUMA nodes: where the memory of a window lies, from where it is touched, and what each node
//! has. `locality` decides with it.

use crate::node::NodeId;
use crate::units::PerTenThousand;

/// Node that holds a window, from samples of its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WindowNode {
    /// No sample has seen a page of it.
    #[default]
    Unknown,
    /// All sampled pages lie on this node. A huge page lies on one node as a whole.
    On(NodeId),
    /// Sampled pages lie on several nodes, most of them on this one.
    Spread(NodeId),
}

impl WindowNode {
    /// Node of all or most of the pages.
    pub const fn most(self) -> Option<NodeId> {
        match self {
            WindowNode::Unknown => None,
            WindowNode::On(node) | WindowNode::Spread(node) => Some(node),
        }
    }
}

/// Nodes with CPUs that touch a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TouchedFrom {
    /// vCPUs ran on several nodes, or were not found, and nothing here sees which of them touch this window.
    #[default]
    Unknown,
    /// All of its touches come from this node.
    Node(NodeId),
    /// Touches come from several nodes, this share of them from the first.
    Several {
        /// Node with most of the touches.
        most: NodeId,
        /// Share of the touches that come from that node.
        share: PerTenThousand,
    },
}

impl TouchedFrom {
    /// Share of touches from one node from which on the window counts as touched from that node alone: four fifths, so
    /// that a move makes at most one remote access of four local ones.
    pub const ALMOST_ALL: PerTenThousand = PerTenThousand::new(8_000);

    /// The only node that matters for the window's placement, if there is one.
    pub fn mainly(self) -> Option<NodeId> {
        match self {
            TouchedFrom::Unknown => None,
            TouchedFrom::Node(node) => Some(node),
            TouchedFrom::Several { most, share } => (share.get() >= Self::ALMOST_ALL.get()).then_some(most),
        }
    }
}

/// A node of the host, from the point of view of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeOfVm {
    /// Number of the node.
    pub node: NodeId,
    /// Whether the VM may have memory there: cpuset and the policy of its memory, as far as they are known.
    pub may_use: bool,
    /// Number of its vCPUs that ran on CPUs of the node when they were last seen running.
    pub vcpus: u16,
    /// Number of pages of 2 MiB in free blocks of the node.
    pub free_2m: u64,
    /// Number of free pages of 1 GiB: of the pool, and in free blocks of the node.
    pub free_1g: u64,
}
