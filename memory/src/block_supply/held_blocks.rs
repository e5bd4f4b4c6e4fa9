//! Huge pages that this process holds for a moment, so that the kernel makes others free: each is one window of an
//! address range of their own. They touch no guest's memory, and all go back to the host together, at the latest when
//! the holder is dropped.

use std::sync::Arc;

use wideleaf_policies::{Bytes, Hva, NodeSet, PageSize};

use crate::host::{Advice, Host, HostError};
use crate::numa::placement::{MemoryMode, NodePolicy};
use crate::sys::mapping::AddressReservation;

const WINDOW: PageSize = PageSize::Huge2M;

/// Maximum number of blocks held at once, whatever the rules say: 512 MiB of addresses.
pub const HELD_MAX: u64 = 256;

/// Blocks that can be taken one by one, and are given back together.
pub(super) trait Blocks {
    /// Takes one more.
    ///
    /// # Errors
    /// [`HostError`] if the kernel has none; those taken before are still held.
    fn take(&mut self) -> Result<(), HostError>;

    /// Number of blocks held.
    fn held(&self) -> u64;

    /// Gives all of them back to the host.
    fn give_back(&mut self);

    /// Takes further blocks from these NUMA nodes, or from any node if the set is empty. Only while no block is held.
    fn take_from(&mut self, nodes: &NodeSet);
}

/// Blocks of this machine.
pub(super) struct HeldBlocks {
    host: Arc<dyn Host>,
    /// NUMA nodes that the blocks come from; empty for any.
    nodes: NodeSet,
    /// Mapped at the first use.
    windows: Option<AddressReservation>,
    held: u64,
}

impl HeldBlocks {
    pub fn new(host: Arc<dyn Host>) -> HeldBlocks {
        HeldBlocks { host, nodes: NodeSet::EMPTY, windows: None, held: 0 }
    }

    fn windows(&mut self) -> Result<&AddressReservation, HostError> {
        let windows = match self.windows.take() {
            Some(windows) => windows,
            None => mapped(&self.nodes)?,
        };
        Ok(self.windows.insert(windows))
    }

    /// Makes the window a huge page, beginning with one base page: a window without any is not collapsed.
    fn fill(&self, window: Hva) -> Result<(), HostError> {
        self.host.advise(window, PageSize::Base4K.bytes(), Advice::PopulateWrite)?;
        self.host.advise(window, WINDOW.bytes(), Advice::Collapse)?;
        let mut present = Vec::new();
        self.host.scan(window, WINDOW.bytes(), &mut present)?;
        let is_huge = present.iter().any(|run| run.is_huge);
        let split = || HostError { what: "a collapse", source: std::io::Error::from_raw_os_error(libc::ENOMEM) };
        if is_huge { Ok(()) } else { Err(split()) }
    }
}

fn mapped(nodes: &NodeSet) -> Result<AddressReservation, HostError> {
    let bytes = WINDOW.bytes() * HELD_MAX;
    let windows = AddressReservation::new(bytes, WINDOW)?;
    windows.map_at(Bytes::ZERO, bytes, None)?;
    if !nodes.is_empty() {
        let policy = NodePolicy { mode: MemoryMode::Bind, nodes: *nodes };
        // A VM may have told of nodes that this process may not use, or that do not exist.
        if let Err(error) = policy.apply(windows.base(), bytes) {
            tracing::debug!("free blocks of any node are made, not only of {nodes}: {error}");
        }
    }
    Ok(windows)
}

fn discard(windows: &AddressReservation, from: u64, count: u64) {
    let piece = windows.piece(WINDOW.bytes() * from, WINDOW.bytes() * count);
    // It fails for a range that is not mapped or locked in memory; then the pages stay until the thread ends.
    if let Err(error) = piece.discard() {
        tracing::warn!("{count} free blocks stay with wideleaf: {error}");
    }
}

impl Blocks for HeldBlocks {
    fn take(&mut self) -> Result<(), HostError> {
        let held = self.held;
        let window = self.windows()?.base() + WINDOW.bytes() * held;
        let filled = self.fill(window);
        match (&filled, &self.windows) {
            (Ok(()), _) => self.held += 1,
            (Err(_), Some(windows)) => discard(windows, held, 1),
            (Err(_), None) => {}
        }
        filled
    }

    fn held(&self) -> u64 {
        self.held
    }

    fn give_back(&mut self) {
        let held = std::mem::take(&mut self.held);
        if let (Some(windows), 1..) = (&self.windows, held) {
            discard(windows, 0, held);
        }
    }

    fn take_from(&mut self, nodes: &NodeSet) {
        if *nodes != self.nodes {
            // Mapped anew at the next request, with a policy of memory for these nodes.
            (self.nodes, self.windows) = (*nodes, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::linux::LinuxHost;
    use wideleaf_policies::NodeId;
    use wideleaf_policies::node::NODES_MAX;

    /// Pages that are present in the windows of `blocks`.
    fn present(blocks: &HeldBlocks) -> Bytes {
        let windows = blocks.windows.as_ref().expect("mapped by the first request");
        let mut runs = Vec::new();
        blocks.host.scan(windows.base(), WINDOW.bytes() * HELD_MAX, &mut runs).expect("PAGEMAP_SCAN");
        runs.iter().fold(Bytes::ZERO, |sum, run| sum + run.bytes)
    }

    #[test]
    fn blocks_are_huge_pages_until_they_are_given_back() {
        let mut blocks = HeldBlocks::new(Arc::new(LinuxHost::open().expect("/proc is mounted")));
        let taken = (0..3).filter(|_| blocks.take().is_ok()).count() as u64;
        // A kernel with no block gives none, and holds nothing for the request.
        assert_eq!((blocks.held(), present(&blocks)), (taken, WINDOW.bytes() * taken));
        blocks.give_back();
        assert_eq!((blocks.held(), present(&blocks)), (0, Bytes::ZERO));
    }

    #[test]
    fn nodes_that_do_not_exist_leave_the_choice_to_the_kernel() {
        let mut blocks = HeldBlocks::new(Arc::new(LinuxHost::open().expect("/proc is mounted")));
        for node in [NODES_MAX - 1, 0] {
            blocks.take_from(&NodeSet::of(NodeId(node)));
            assert!(blocks.windows.is_none(), "mapped anew, with a policy for node {node}");
            // The kernel may have no block: then the request for one fails, and not its preparation.
            assert!(blocks.take().is_ok() || blocks.windows.is_some(), "node {node}");
            blocks.give_back();
        }
        blocks.take_from(&NodeSet::of(NodeId(0)));
        assert!(blocks.windows.is_some(), "the same nodes as before");
    }
}
