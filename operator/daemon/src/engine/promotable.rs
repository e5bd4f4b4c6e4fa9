//! Free memory that can become large pages, for the scheduler of a cluster.
//!
//! ```text
//!   MemAvailable - low_free ──────────────┐ at most
//!   buddyinfo: whole blocks of 2 MiB ─────┼──▶ now_2m         pool of 1 GiB, not in use ─────▶ now_1g
//!   pagetypeinfo: movable fragments ──────┴──▶ compacted_2m   free memory in movable blocks ─▶ compacted_1g
//! ```

use std::time::{Duration, Instant};

use wideleaf_control::view::PromotableView;
use wideleaf_memory::pool::{NodeMemory, PoolStatus};
use wideleaf_policies::{Bytes, PageSize};

use super::Engine;

/// Maximum age of the figures. The kernel walks its lists of free blocks for them, under the lock of each zone.
const AGE_MAX: Duration = Duration::from_secs(10);

/// The latest figures, and the time at which they were read.
#[derive(Debug, Default)]
pub(super) struct Promotable {
    read_at: Option<Instant>,
    view: Option<PromotableView>,
}

impl Engine {
    /// Figures that are at most `AGE_MAX` old; `None` where the kernel does not tell.
    pub(super) fn promotable(&self) -> Option<PromotableView> {
        let spare = {
            let table = self.table();
            table.host.available.saturating_sub(table.config.host.low_free)
        };
        let mut latest = self.promotable.lock();
        if latest.read_at.is_none_or(|read_at| read_at.elapsed() >= AGE_MAX) {
            let (room, pools) = (self.doors.pools.room(), self.doors.pools.status());
            *latest = Promotable { read_at: Some(Instant::now()), view: promotable(&room, &pools, spare) };
        }
        latest.view
    }
}

/// Memory of all nodes. `spare`: available memory beyond the part that is kept free on the host.
fn promotable(room: &[NodeMemory], pools: &[PoolStatus], spare: Bytes) -> Option<PromotableView> {
    if room.is_empty() {
        return None;
    }
    let sum = |of: &dyn Fn(&NodeMemory) -> u64| room.iter().fold(0, |sum: u64, node| sum.saturating_add(of(node)));
    let within = |bytes: u64| bytes.min(spare.get());
    let [huge, giant] = [PageSize::Huge2M, PageSize::Giant1G].map(|size| size.bytes().get());
    let whole = sum(&|node| node.whole_blocks).saturating_mul(huge);
    let compacted = sum(&|node| node.pages_of_free_memory(PageSize::Huge2M)).saturating_mul(huge);
    let pooled = pools.iter().filter(|pool| pool.size == PageSize::Giant1G).map(PoolStatus::unpromised).sum::<u64>();
    let pooled = pooled.saturating_mul(giant);
    // Each node for itself: no page is on two.
    let emptied = sum(&|node| {
        let movable = node.blocks.map_or(u64::MAX, |blocks| blocks.movable.saturating_mul(huge) / giant);
        node.pages_of_free_memory(PageSize::Giant1G).min(movable)
    });
    Some(PromotableView {
        now_2m: within(whole),
        now_1g: pooled,
        compacted_2m: within(compacted),
        compacted_1g: pooled.saturating_add(within(emptied.saturating_mul(giant))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_memory::pool::Blocks;
    use wideleaf_policies::units::{gib, mib};

    fn node(node: u32, free: Bytes, whole_blocks: u64, compactable_blocks: u64) -> NodeMemory {
        NodeMemory { node, free, whole_blocks, compactable_blocks, ..NodeMemory::default() }
    }

    fn giants(free: u64, reserved: u64) -> PoolStatus {
        let size = PageSize::Giant1G;
        PoolStatus { size, total: 8, free, reserved, surplus: 0, overcommit: 5, nodes: Vec::new() }
    }

    #[test]
    fn nodes_are_added_and_the_pool_counts_without_its_promises() {
        let room = [node(0, gib(3), 1024, 256), node(1, gib(1), 128, 0)];
        let view = promotable(&room, &[giants(3, 1)], gib(64)).expect("known");
        assert_eq!([view.now_2m, view.compacted_2m], [mib(2304), mib(2816)].map(Bytes::get));
        assert_eq!([view.now_1g, view.compacted_1g], [gib(2), gib(6)].map(Bytes::get));
    }

    #[test]
    fn memory_that_is_kept_free_on_the_host_is_not_promotable() {
        let view = promotable(&[node(0, gib(3), 1024, 256)], &[], mib(100)).expect("known");
        assert_eq!([view.now_2m, view.compacted_2m, view.compacted_1g], [mib(100).get(); 3]);
        let none = promotable(&[node(0, gib(3), 1024, 256)], &[], Bytes::ZERO).expect("known");
        assert_eq!(none, PromotableView::default());
    }

    #[test]
    fn gibibytes_without_enough_movable_blocks_cannot_be_emptied() {
        let movable = Blocks { movable: 1023, unmovable: 2, reclaimable: 0 };
        let room = NodeMemory { blocks: Some(movable), ..node(0, gib(3), 1024, 256) };
        assert_eq!(promotable(&[room], &[], gib(64)).expect("known").compacted_1g, gib(1).get());
    }

    #[test]
    fn a_kernel_that_tells_nothing_has_no_figures_rather_than_zeros() {
        assert_eq!(promotable(&[], &[giants(3, 0)], gib(64)), None);
    }
}
