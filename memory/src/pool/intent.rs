//! A planned change of a pool, as plain data. If the process is killed during the change, the intent remains, and the
//! next process finds out what became of it.
//!
//! ```text
//!   note the intent ─▶ write nr_hugepages ─▶ read back ─▶ note the result
//!                  └──────────── killed ───────────┘
//!                                   ▼
//!                       settle: persistent pages, now and before
//!         as before ─▶ nothing   within what was asked for ─▶ ours   anything else ─▶ another program: nothing is ours
//! ```
//!
//! Only a write to `nr_hugepages` changes the number of persistent pages; mapping and unmapping do not. So the pool
//! itself shows what was done, but not by which process. If our change alone cannot explain the numbers, pages stay
//! where they are, rather than being taken from another program. One case looks like our change and is not: we were
//! killed between the note and the write, and another program then added at most what we had wanted. So a living
//! process that knows that nothing was done, or that all was undone, closes the intent without asking the numbers.

use serde::{Deserialize, Serialize};
use wideleaf_policies::PageSize;

use super::granted::by_name;
use super::{Granted, NodePages};

/// A change that is about to be made to a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Page size of the pool.
    #[serde(with = "by_name")]
    size: PageSize,
    /// Node to change; `None`: all of them.
    node: Option<u32>,
    /// Persistent pages before the change.
    before: u64,
    /// Number to be written.
    after: u64,
    /// Value of `before`, node by node.
    nodes: Vec<NodePages>,
    /// Surplus pages, which a growth makes persistent before it allocates any.
    surplus: u64,
    /// Identifier of the boot, as in [`Granted`].
    boot: String,
}

/// Result of an [`Intent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Nothing was done: the pool is unchanged, or the intent is of another boot.
    Undone,
    /// Number of pages changed: all, or a part.
    Done(u64),
    /// The pool is in a state that this change alone cannot have made.
    Unclear {
        /// Persistent pages before the change.
        before: u64,
        /// Number that was to be written.
        after: u64,
        /// Persistent pages now.
        now: u64,
    },
}

impl Intent {
    /// An intent for the pool of that size, or for its part on `node`.
    pub fn new(size: PageSize, node: Option<u32>, before: u64, after: u64, boot: &str) -> Intent {
        Intent { size, node, before, after, nodes: Vec::new(), surplus: 0, boot: boot.to_owned() }
    }

    /// Adds the persistent pages of each node, and the surplus.
    pub(super) fn with_nodes(self, nodes: Vec<NodePages>, surplus: u64) -> Intent {
        Intent { nodes, surplus, ..self }
    }

    /// Page size of the pool.
    pub fn size(&self) -> PageSize {
        self.size
    }

    /// Node to change; `None`: all of them.
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// Whether it was noted in that boot.
    pub(super) fn is_of(&self, boot: &str) -> bool {
        self.boot == boot
    }

    /// Determines its result from the persistent pages `now`, in that boot. Added pages are added to `granted`, and
    /// returned ones are taken out of it.
    pub fn settle(&self, now: u64, nodes: &[NodePages], boot: &str, granted: &mut Vec<Granted>) -> Settled {
        if self.boot != boot || now == self.before {
            return Settled::Undone;
        }
        let unclear = Settled::Unclear { before: self.before, after: self.after, now };
        if self.after >= self.before {
            let added = self.added(now, nodes);
            granted.extend(added.clone());
            added.map_or(unclear, |added| Settled::Done(added.pages()))
        } else {
            let asked = self.before - self.after;
            let gone = self.before.checked_sub(now).filter(|gone| *gone <= asked);
            self.take_out(gone.unwrap_or(asked), asked, granted);
            gone.map_or(unclear, Settled::Done)
        }
    }

    /// Pages added by a growth, if it can explain all that were added.
    fn added(&self, now: u64, nodes: &[NodePages]) -> Option<Granted> {
        let sum = now.checked_sub(self.before).filter(|sum| *sum <= self.after - self.before)?;
        let was = |node: Option<u32>| self.nodes.iter().find(|was| was.node == node).map_or(0, |was| was.pages);
        let by_node = nodes.iter().filter(|_| self.node.is_none() && !self.nodes.is_empty());
        let by_node = by_node.map(|is| Some(NodePages { node: is.node, pages: is.pages.checked_sub(was(is.node))? }));
        // A node with fewer pages than before was changed by another program.
        let mut added: Vec<NodePages> = by_node.collect::<Option<_>>()?;
        added.retain(|node| node.pages > 0);
        let is_sum = added.iter().try_fold(0u64, |sum, node| sum.checked_add(node.pages)) == Some(sum);
        let added = if is_sum { added } else { vec![NodePages { node: self.node, pages: sum }] };
        Some(Granted::new(self.size, sum.saturating_sub(self.surplus), added, &self.boot))
    }

    /// Takes `gone` of the `asked` pages that were about to be returned out of the pages still to be returned.
    fn take_out(&self, gone: u64, asked: u64, granted: &mut [Granted]) {
        let is_it = |part: &NodePages| part.node == self.node && part.pages >= asked;
        let ours = granted.iter_mut().filter(|granted| granted.size() == self.size);
        let part = ours.flat_map(Granted::added_mut).rfind(|part| is_it(part));
        if let Some(part) = part {
            part.pages -= gone.min(part.pages);
        }
        granted.iter_mut().for_each(Granted::drop_empty_parts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: &str = "this-one";

    fn intent(before: u64, after: u64) -> Intent {
        Intent::new(PageSize::Huge2M, None, before, after, BOOT)
    }

    fn pages(node: u32, pages: u64) -> NodePages {
        NodePages { node: Some(node), pages }
    }

    #[test]
    fn a_growth_counts_as_large_as_the_pool_grew_and_no_larger_than_planned() {
        let settle = |now| {
            let mut granted = Vec::new();
            let settled = intent(10, 16).settle(now, &[], BOOT, &mut granted);
            (settled, granted.iter().flat_map(Granted::added).map(|part| part.pages).sum::<u64>())
        };
        let unclear = |now| Settled::Unclear { before: 10, after: 16, now };
        assert_eq!(settle(10), (Settled::Undone, 0));
        assert_eq!(settle(13), (Settled::Done(3), 3), "a kill ends the kernel's work early");
        assert_eq!(settle(16), (Settled::Done(6), 6));
        assert_eq!(settle(17), (unclear(17), 0), "another program added some");
        assert_eq!(settle(9), (unclear(9), 0), "another program released some");
        assert_eq!(intent(10, 16).settle(16, &[], "the next one", &mut Vec::new()), Settled::Undone);
    }

    #[test]
    fn growth_by_node_goes_back_by_node_and_a_shrunk_node_is_another_programs() {
        let intent = intent(10, 16).with_nodes(vec![pages(0, 6), pages(1, 4)], 1);
        let mut granted = Vec::new();
        assert_eq!(intent.settle(16, &[pages(0, 9), pages(1, 7)], BOOT, &mut granted), Settled::Done(5));
        assert_eq!(granted[0].added(), [pages(0, 3), pages(1, 3)]);
        let settled = intent.settle(14, &[pages(0, 12), pages(1, 2)], BOOT, &mut Vec::new());
        assert!(matches!(settled, Settled::Unclear { .. }), "{settled:?}");
    }

    #[test]
    fn returned_pages_are_not_returned_again() {
        let settle = |now| {
            let mut granted = vec![Granted::new(PageSize::Huge2M, 6, vec![NodePages { node: None, pages: 6 }], BOOT)];
            let settled = intent(16, 10).settle(now, &[], BOOT, &mut granted);
            (settled, granted[0].added().iter().map(|part| part.pages).sum::<u64>())
        };
        let unclear = |now| Settled::Unclear { before: 16, after: 10, now };
        assert_eq!(settle(16), (Settled::Undone, 6));
        assert_eq!(settle(12), (Settled::Done(4), 2));
        assert_eq!(settle(10), (Settled::Done(6), 0));
        assert_eq!(settle(9), (unclear(9), 0));
        assert_eq!(settle(20), (unclear(20), 0), "added by another program before or after ours went: unknown");
    }
}
