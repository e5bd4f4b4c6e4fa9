//! Free memory in blocks, from `/proc/buddyinfo` (Documentation/filesystems/proc.rst): a line for each zone of each
//! node, a column for each order from 0 on.
//!
//! ```text
//!   Node 0, zone   Normal   3131  3595 …  57  4623
//!                           4 KiB 8 KiB   2 MiB 4 MiB
//! ```

use wideleaf_policies::NodeId;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use crate::host::Host;

/// Path of the file.
pub const BUDDYINFO: &str = "/proc/buddyinfo";

/// The order of a block of 2 MiB: 2^9 base pages.
pub(crate) const BLOCK_ORDER: usize = 9;

const _: () = assert!(1 << BLOCK_ORDER == BASE_PAGES_PER_WINDOW, "a block is a window's worth of base pages");

/// Maximum number of orders: `MAX_PAGE_ORDER` is 10 on x86-64, and no build of any architecture has more than 64.
const ORDERS_MAX: usize = 64;

/// Number of pages of 2 MiB in free blocks of that size or more, over all nodes. The kernel keeps some of them for
/// itself. It also has free huge pages on the lists of each CPU, which are in no block: `pagesets` of `/proc/zoneinfo`
/// counts their base pages together with all others.
pub fn free_huge_pages(buddyinfo: &str) -> u64 {
    let zones = buddyinfo.lines().filter_map(zone);
    zones.fold(0, |sum, (_, free)| sum.saturating_add(base_pages_from(&free, BLOCK_ORDER) >> BLOCK_ORDER))
}

/// Pages of 2 MiB in free blocks now, as [`free_huge_pages`] counts them; 0 where the kernel does not report them.
pub(crate) fn free_now(host: &dyn Host) -> u64 {
    host.read_text(BUDDYINFO).map_or(0, |text| free_huge_pages(&text))
}

/// The same on one node; `None`: on all of them.
pub(crate) fn free_now_on(host: &dyn Host, node: Option<NodeId>) -> u64 {
    let Some(node) = node else { return free_now(host) };
    let text = host.read_text(BUDDYINFO).unwrap_or_default();
    let zones = text.lines().filter_map(zone).filter(|(number, _)| *number == u32::from(node.0));
    zones.fold(0, |sum, (_, free)| sum.saturating_add(base_pages_from(&free, BLOCK_ORDER) >> BLOCK_ORDER))
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
}
