//! A change of a pool that is about to be made, as plain data: whoever was killed while it was made leaves this behind, and whoever
//! comes next finds out what became of it.
//!
//! ```text
//!   note the intent ─▶ write nr_hugepages ─▶ read back ─▶ note the result
//!                  └──────────── killed ───────────┘
//!                                   ▼
//!                       settle: pages that stay, now and before
//!         as before ─▶ nothing   within what was asked for ─▶ ours   anything else ─▶ somebody else's hand: nothing is ours
//! ```
//!
//! The number of pages that stay changes by writing it alone, not by who maps or unmaps pages, so the pool itself tells. It does not
//! tell who wrote. Where the numbers fit no change of ours alone, pages are left where they are rather than taken from somebody. One case
//! looks like ours and is not: we were killed between the note and the write, and somebody else then added no more than we had wanted to.
//! So who lives, and knows that nothing was done or all of it undone, closes the intent and asks no numbers.

use serde::{Deserialize, Serialize};
use wideleaf_policies::PageSize;

use super::resize::by_name;
use super::{Granted, NodePages};

/// What is about to be done to a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Which pool.
    #[serde(with = "by_name")]
    size: PageSize,
    /// What of it; `None`: all.
    node: Option<u32>,
    /// Pages that stay, before it.
    before: u64,
    /// The number to be written.
    after: u64,
    /// `before`, node by node.
    nodes: Vec<NodePages>,
    /// Surplus pages, which a growth turns into pages that stay before it makes any.
    surplus: u64,
    /// As in [`Granted`].
    boot: String,
}

/// What became of an [`Intent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Nothing: the pool is as it was, or of another boot.
    Undone,
    /// It was done, all of it or a part; so many pages.
    Done(u64),
    /// The pool is as we alone can not have made it: so many pages stay now, where this lay between `before` and `after`.
    Unclear {
        /// Before the change.
        before: u64,
        /// What was to be written.
        after: u64,
        /// What there is.
        now: u64,
    },
}

impl Intent {
    /// Of the pool of that size, or of what of it is on `node`.
    pub fn new(size: PageSize, node: Option<u32>, before: u64, after: u64, boot: &str) -> Intent {
        Intent { size, node, before, after, nodes: Vec::new(), surplus: 0, boot: boot.to_owned() }
    }

    /// With the pages that stay on each node, and the surplus.
    pub(super) fn with_nodes(self, nodes: Vec<NodePages>, surplus: u64) -> Intent {
        Intent { nodes, surplus, ..self }
    }

    /// Which pool.
    pub fn size(&self) -> PageSize {
        self.size
    }

    /// What of it.
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// Whether it was noted in that boot.
    pub(super) fn is_of(&self, boot: &str) -> bool {
        self.boot == boot
    }

    /// What became of it, where so many pages stay `now`, in that boot: what was added is added to `granted`, and what was given back is
    /// taken out of it.
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

    /// What a growth added, where all that was added can be it.
    fn added(&self, now: u64, nodes: &[NodePages]) -> Option<Granted> {
        let sum = now.checked_sub(self.before).filter(|sum| *sum <= self.after - self.before)?;
        let was = |node: Option<u32>| self.nodes.iter().find(|was| was.node == node).map_or(0, |was| was.pages);
        let by_node = nodes.iter().filter(|_| self.node.is_none() && !self.nodes.is_empty());
        let by_node = by_node.map(|is| Some(NodePages { node: is.node, pages: is.pages.checked_sub(was(is.node))? }));
        // A node that has fewer than before is somebody else's doing.
        let mut added: Vec<NodePages> = by_node.collect::<Option<_>>()?;
        added.retain(|node| node.pages > 0);
        let is_sum = added.iter().try_fold(0u64, |sum, node| sum.checked_add(node.pages)) == Some(sum);
        let added = if is_sum { added } else { vec![NodePages { node: self.node, pages: sum }] };
        Some(Granted::new(self.size, sum.saturating_sub(self.surplus), added, &self.boot))
    }

    /// Takes `gone` of the `asked` pages that were about to be given back out of what is still to be.
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
    fn a_growth_is_as_large_as_the_pool_grew_and_never_larger_than_it_was_meant() {
        let settle = |now| {
            let mut granted = Vec::new();
            let settled = intent(10, 16).settle(now, &[], BOOT, &mut granted);
            (settled, granted.iter().flat_map(Granted::added).map(|part| part.pages).sum::<u64>())
        };
        let unclear = |now| Settled::Unclear { before: 10, after: 16, now };
        assert_eq!(settle(10), (Settled::Undone, 0));
        assert_eq!(settle(13), (Settled::Done(3), 3), "a kill ends the kernel's work early");
        assert_eq!(settle(16), (Settled::Done(6), 6));
        assert_eq!(settle(17), (unclear(17), 0), "somebody else added some");
        assert_eq!(settle(9), (unclear(9), 0), "somebody else released some");
        assert_eq!(intent(10, 16).settle(16, &[], "the next one", &mut Vec::new()), Settled::Undone);
    }

    #[test]
    fn what_grew_by_node_goes_back_by_node_and_a_node_that_shrank_is_somebody_elses_doing() {
        let intent = intent(10, 16).with_nodes(vec![pages(0, 6), pages(1, 4)], 1);
        let mut granted = Vec::new();
        assert_eq!(intent.settle(16, &[pages(0, 9), pages(1, 7)], BOOT, &mut granted), Settled::Done(5));
        assert_eq!(granted[0].added(), [pages(0, 3), pages(1, 3)]);
        let settled = intent.settle(14, &[pages(0, 12), pages(1, 2)], BOOT, &mut Vec::new());
        assert!(matches!(settled, Settled::Unclear { .. }), "{settled:?}");
    }

    #[test]
    fn what_was_given_back_is_not_given_back_again() {
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
        assert_eq!(settle(20), (unclear(20), 0), "added by somebody before or after ours went: nobody knows");
    }
}
