//! Two NUMA nodes of a simulated host: the guest's thread runs on the first, and each window lies on one of them.
//!
//! ```text
//!   first touch of a window ──▶ node 0 while it has memory ──▶ then node 1
//!   huge page               ──▶ the node that the plan names, else the window's: a free block there, or a refusal
//!   move                    ──▶ the node that the plan names
//! ```

use alloc::vec;
use alloc::vec::Vec;

use super::Mmu;
use wideleaf_policies::node::NodeId;
use wideleaf_policies::units::{Bytes, PageSize, WindowIndex};
use wideleaf_policies::window_node::{NodeOfVm, TouchedFrom, WindowNode};

/// The node on which the thread runs.
pub(super) const LOCAL: NodeId = NodeId(0);

/// The other node.
pub(super) const REMOTE: NodeId = NodeId(1);

/// What the thread's node has for the guest; the other node has the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalNode {
    /// Memory for base pages. Windows that are first touched when it is used up lie on the other node.
    pub memory: Bytes,
    /// Number of free blocks of 2 MiB.
    pub huge_pages: u64,
}

/// Where windows lie.
pub(super) struct Nodes {
    is_remote: Vec<bool>,
    /// Number of windows on base pages that the first node can still hold.
    windows_left: u64,
    /// Number of free blocks of 2 MiB on the first node.
    blocks: u64,
}

impl Nodes {
    pub fn new(local: LocalNode, rows: usize) -> Nodes {
        let windows_left = local.memory.get() / PageSize::Huge2M.bytes().get();
        Nodes { is_remote: vec![false; rows], windows_left, blocks: local.huge_pages }
    }

    /// Chooses the node of a window that is touched for the first time.
    pub fn first_touch(&mut self, row: usize, mmu: &mut dyn Mmu) {
        let is_remote = self.windows_left == 0;
        self.windows_left -= u64::from(!is_remote);
        self.put(row, is_remote, mmu);
    }

    fn put(&mut self, row: usize, is_remote: bool, mmu: &mut dyn Mmu) {
        self.is_remote[row] = is_remote;
        mmu.put_on_node(WindowIndex::new(row as u64), is_remote);
    }

    /// Whether a huge page for the window comes from the first node, if the plan names this node or none.
    pub fn is_from_local(&self, row: usize, node: Option<NodeId>) -> bool {
        node.map_or(!self.is_remote[row], |node| node == LOCAL)
    }

    /// Whether the first node has a free block.
    pub fn has_block(&self) -> bool {
        self.blocks > 0
    }

    /// Whether the first node has memory for base pages of one more window.
    pub fn has_memory(&self) -> bool {
        self.windows_left > 0
    }

    /// Takes a free block of the first node, if it has one.
    pub fn take_block(&mut self) -> bool {
        let is_free = self.blocks > 0;
        self.blocks -= u64::from(is_free);
        is_free
    }

    /// Gives a block of the window's node back; returns whether that is the first one.
    pub fn free_block(&mut self, row: usize) -> bool {
        let is_local = !self.is_remote[row];
        self.blocks = self.blocks.saturating_add(u64::from(is_local));
        is_local
    }

    /// The base pages of a window are free: it has a huge page of that node now.
    pub fn on_huge_page_of(&mut self, row: usize, is_local: bool, mmu: &mut dyn Mmu) {
        self.leave_base_pages(row);
        self.put(row, !is_local, mmu);
    }

    /// The base pages of a window are gone.
    pub fn leave_base_pages(&mut self, row: usize) {
        self.windows_left += u64::from(!self.is_remote[row]);
    }

    /// A window leaves its huge page for base pages of the same node.
    pub fn on_base_pages(&mut self, row: usize) {
        self.windows_left = self.windows_left.saturating_sub(u64::from(!self.is_remote[row]));
    }

    /// Moves base pages of a window to a node that has memory for them.
    pub fn move_base_pages(&mut self, row: usize, node: NodeId, mmu: &mut dyn Mmu) {
        match (self.is_remote[row], node == LOCAL) {
            (true, true) => self.windows_left = self.windows_left.saturating_sub(1),
            (false, false) => self.windows_left += 1,
            (true, false) | (false, true) => {}
        }
        self.put(row, node != LOCAL, mmu);
    }

    /// Moves a huge page of a window onto a block of that node, which was taken.
    pub fn move_huge_page(&mut self, row: usize, is_local: bool, mmu: &mut dyn Mmu) {
        self.put(row, !is_local, mmu);
    }

    /// Node of a window with pages.
    pub fn of(&self, row: usize) -> WindowNode {
        WindowNode::On(if self.is_remote[row] { REMOTE } else { LOCAL })
    }

    /// All touches come from the first node.
    pub fn touched_from(&self) -> TouchedFrom {
        TouchedFrom::Node(LOCAL)
    }

    /// Both nodes as a snapshot has them; the second one has `blocks` free.
    pub fn table(&self, blocks: u64) -> Vec<NodeOfVm> {
        let row = |node, vcpus, free_2m| NodeOfVm { node, may_use: true, vcpus, free_2m, free_1g: 0 };
        Vec::from([row(LOCAL, 1, self.blocks), row(REMOTE, 0, blocks)])
    }
}
