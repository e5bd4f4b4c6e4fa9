//! Free memory in blocks, from `/proc/buddyinfo` (Documentation/filesystems/proc.rst): a line for each zone of each
//! node, a column for each order from 0 on.
//!
//! ```text
//!   Node 0, zone   Normal   3131  3595 …  57  4623
//!                           4 KiB 8 KiB   2 MiB 4 MiB
//! ```

use std::collections::BTreeSet;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, NodeId, PageSize};

use crate::host::Host;

/// Path of the file.
pub const BUDDYINFO: &str = "/proc/buddyinfo";

/// The order of a block of 2 MiB: 2^9 base pages.
pub(crate) const BLOCK_ORDER: usize = 9;

const _: () = assert!(1 << BLOCK_ORDER == BASE_PAGES_PER_WINDOW, "a block is a window's worth of base pages");

/// Maximum number of orders: `MAX_PAGE_ORDER` is 10 on x86-64, and no build of any architecture has more than 64.
const ORDERS_MAX: usize = 64;

/// Zone of the first 16 MiB. The kernel keeps its blocks from programs on a host of some GiB (`protection` of
/// `/proc/zoneinfo`; vm.lowmem_reserve_ratio in Documentation/admin-guide/sysctl/vm.rst).
const KEPT_ZONE: &str = "DMA";

/// Number of pages of 2 MiB in free blocks of that size or more, over all nodes. The kernel keeps some of them for
/// itself. It also has free huge pages on the lists of each CPU, which are in no block: `pagesets` of `/proc/zoneinfo`
/// counts their base pages together with all others.
pub fn free_huge_pages(buddyinfo: &str) -> u64 {
    FreeMemory::parse(buddyinfo, None).huge_pages
}

/// Pages of 2 MiB in free blocks now, as [`free_huge_pages`] counts them; 0 where the kernel does not report them.
pub(crate) fn free_now(host: &dyn Host) -> u64 {
    free_now_on(host, None)
}

/// The same on one node; `None`: on all of them.
pub(crate) fn free_now_on(host: &dyn Host, node: Option<NodeId>) -> u64 {
    FreeMemory::on(host, node).huge_pages
}

/// Free memory of a node, or of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreeMemory {
    /// Number of pages of 2 MiB in free blocks.
    pub huge_pages: u64,
    /// In blocks of any size.
    pub bytes: Bytes,
    /// Number of such parts that the host has: 1 for all of it, its number of nodes for one of them; 0 where the kernel
    /// does not report them.
    pub nodes: u64,
}

impl FreeMemory {
    /// What is free now, as `/proc/buddyinfo` has it; nothing where the kernel does not report it.
    pub fn on(host: &dyn Host, node: Option<NodeId>) -> FreeMemory {
        host.read_text(BUDDYINFO).map_or_else(|_| FreeMemory::default(), |text| FreeMemory::parse(&text, node))
    }

    /// From the text of [`BUDDYINFO`].
    pub fn parse(buddyinfo: &str, node: Option<NodeId>) -> FreeMemory {
        let zones: Vec<_> = buddyinfo.lines().filter(|line| !is_kept(line)).filter_map(zone).collect();
        let nodes = zones.iter().map(|(number, _)| number).collect::<BTreeSet<_>>().len() as u64;
        let is_counted = |number| node.is_none_or(|node| u32::from(node.0) == number);
        let counted = || zones.iter().filter(|(number, _)| is_counted(*number)).map(|(_, free)| free);
        let pages_from = |order| counted().map(|free| base_pages_from(free, order)).fold(0, u64::saturating_add);
        FreeMemory {
            huge_pages: pages_from(BLOCK_ORDER) >> BLOCK_ORDER,
            bytes: Bytes::new(pages_from(0).saturating_mul(PageSize::Base4K.bytes().get())),
            nodes: if node.is_none() { nodes.min(1) } else { nodes },
        }
    }
}

/// Whether the line is that of [`KEPT_ZONE`].
fn is_kept(line: &str) -> bool {
    line.split_whitespace().skip_while(|word| *word != "zone").nth(1) == Some(KEPT_ZONE)
}

/// Parses `Node 0, zone   Normal   4  3 …` into the node, and free blocks by order.
pub(crate) fn zone(line: &str) -> Option<(u32, Vec<u64>)> {
    let (node, rest) = line.strip_prefix("Node")?.split_once(',')?;
    let mut words = rest.split_whitespace();
    (words.next()? == "zone").then_some(())?;
    words.next()?; // the zone's name
    let free = words.take(ORDERS_MAX).map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
    Some((node.trim().parse().ok()?, free))
}

/// Base pages in the blocks of `order` and above.
pub(crate) fn base_pages_from(by_order: &[u64], order: usize) -> u64 {
    let orders = by_order.iter().take(ORDERS_MAX).enumerate().skip(order);
    orders.fold(0, |sum, (order, blocks)| sum.saturating_add(blocks.saturating_mul(1 << order)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_of_all_zones_are_counted_and_larger_ones_are_several() {
        let two = "Node 0, zone   DMA32  3 2 4 2 5 4 4 4 5 3 10 \nNode 1, zone  Normal  9 9 9 9 9 9 9 9 9 1 0 \n";
        assert_eq!(free_huge_pages(two), (3 + 2 * 10) + 1);
        assert_eq!(free_huge_pages("Node 0, zone Normal many\n"), 0);
        assert_eq!(free_huge_pages(""), 0);
    }

    #[test]
    fn free_memory_is_that_of_a_node_or_of_all_without_the_zone_that_is_kept() {
        let host = "Node 0, zone DMA 1 0 0 0 0 0 0 0 0 1 3 \n\
                    Node 0, zone DMA32 3 2 0 0 0 0 0 0 0 3 10 \n\
                    Node 1, zone Normal 9 0 0 0 0 0 0 0 0 0 0\n";
        let free = |huge_pages, base_pages: u64, nodes| {
            let bytes = Bytes::new(4096 * (512 * huge_pages + base_pages));
            FreeMemory { huge_pages, bytes, nodes }
        };
        let found = [None, Some(0), Some(1), Some(2)].map(|node| FreeMemory::parse(host, node.map(NodeId)));
        assert_eq!(found, [free(23, 7 + 9, 1), free(23, 7, 2), free(0, 9, 2), free(0, 0, 2)]);
        assert_eq!(FreeMemory::parse("", None), FreeMemory::default());
    }
}
