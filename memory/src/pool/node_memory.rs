//! Memory of a node for new pool pages: free memory, how much of it is in whole blocks, and how much
//! compaction may add.
//!
//! ```text
//!   a block, 2 MiB       now              after compaction       never
//!   ┌────────────┐ ┌────────────┐        ┌────────────┐    ┌────────────┐
//!   │            │ │ x   x    x │ ─────▶ │            │    │ x  U   x   │   x movable page in use
//!   └────────────┘ └────────────┘        └────────────┘    └────────────┘   U the kernel's page, which cannot be moved
//! ```
//!
//! Files: `/proc/buddyinfo` and `/proc/pagetypeinfo` (Documentation/filesystems/proc.rst; the second for root alone)
//! and `/sys/devices/system/node/node*/meminfo`. They show what may work, but only trying is certain: pages in use
//! can be freed or pinned in between. No file shows how many ranges of 1 GiB can be emptied.

use std::fmt;

use wideleaf_policies::{Bytes, PageSize};

use super::{HugetlbPools, PoolError};
use crate::sensors::free_blocks::{BLOCK_ORDER, base_pages_from, zone};

/// Memory of one node for new pool pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Number of the node.
    pub node: u32,
    /// Free memory, in bytes.
    pub free: Bytes,
    /// Number of entirely free blocks of 2 MiB.
    pub whole_blocks: u64,
    /// Maximum number of further blocks by compaction: of the other free memory, among movable pages if the
    /// kernel reports types.
    pub compactable_blocks: u64,
    /// Bytes of file cache, which the kernel drops when it needs memory; `None` if unknown.
    pub cache: Option<Bytes>,
    /// Blocks by the type of their pages; `None` if the kernel does not report them (only root may read them).
    pub blocks: Option<Blocks>,
}

/// Numbers of blocks of 2 MiB by use. In one that is not movable a page may stay for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Blocks with pages of processes and files, which can be moved.
    pub movable: u64,
    /// Blocks with the kernel's own pages, which cannot be moved.
    pub unmovable: u64,
    /// Blocks with the kernel's caches, which can be freed but not moved.
    pub reclaimable: u64,
}

impl NodeMemory {
    /// Upper bound on pages of that size on the node, if all free memory and all file cache became such pages; `None`
    /// if the cache is unknown.
    pub fn pages_max(&self, size: PageSize) -> Option<u64> {
        Some(self.free.get().saturating_add(self.cache?.get()) / size.bytes().get())
    }

    /// Number of pages of that size that free memory alone may be enough for.
    pub fn pages_of_free_memory(&self, size: PageSize) -> u64 {
        match size {
            PageSize::Giant1G => self.free.get() / size.bytes().get(),
            _ => self.whole_blocks.saturating_add(self.compactable_blocks),
        }
    }
}

impl fmt::Display for NodeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeMemory { node, free, whole_blocks, compactable_blocks, cache, blocks } = self;
        write!(f, "node {node} has {free} free: {whole_blocks} whole blocks of 2 MiB now, ")?;
        write!(f, "compaction may make {compactable_blocks} more")?;
        if let Some(Blocks { movable, unmovable, reclaimable }) = blocks {
            write!(f, "; of its blocks {movable} are movable, {unmovable} unmovable, {reclaimable} reclaimable")?;
        }
        match cache {
            Some(cache) => write!(f, "; {cache} of file cache can be dropped for more"),
            None => Ok(()),
        }
    }
}

/// Shortage of memory for new pages, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotEnoughMemory {
    /// Size of the pages.
    pub size: PageSize,
    /// Number of pages asked for.
    pub needed: u64,
    /// Number of pages that were made and given back; `None` if it was not tried, since there is not
    /// that much memory.
    pub made: Option<u64>,
    /// Memory of the nodes before.
    pub room: Vec<NodeMemory>,
}

impl fmt::Display for NotEnoughMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotEnoughMemory { size, needed, made, room } = self;
        let bytes = Bytes::new(needed.saturating_mul(size.bytes().get()));
        write!(f, "cannot make {needed} pages of {size} ({bytes}): ")?;
        match made {
            Some(made) => write!(f, "only {made} could be made, and were given back")?,
            None => write!(f, "there is not that much memory")?,
        }
        for (i, node) in room.iter().enumerate() {
            write!(f, "{}{node}", if i == 0 { ": " } else { ". " })?;
        }
        match size {
            PageSize::Giant1G => write!(
                f,
                ". A page of 1g needs a contiguous gibibyte without unmovable pages; reserve them at boot, with \
                 `hugepagesz=1G hugepages={needed}` on the kernel's command line"
            ),
            _ => write!(f, ". Free memory, ask for fewer pages, or take as many as there are"),
        }
    }
}

impl HugetlbPools {
    /// Memory of all nodes, or of that one, for new pages; empty if the kernel does not report its free memory.
    ///
    /// # Errors
    /// [`PoolError::Malformed`] for a file that cannot be parsed.
    pub fn room(&self, node: Option<u32>) -> Result<Vec<NodeMemory>, PoolError> {
        let path = self.root.join("proc/buddyinfo");
        let Ok(text) = self.files.read(&path) else { return Ok(Vec::new()) };
        let malformed = |line: &str| PoolError::Malformed {
            path: path.clone(),
            expected: "a node, a zone and its free blocks by order",
            text: line.to_owned(),
        };
        let mut nodes: Vec<NodeMemory> = Vec::new();
        for line in text.lines() {
            let (number, free) = zone(line).ok_or_else(|| malformed(line))?;
            if node.is_some_and(|node| node != number) {
                continue;
            }
            let known = nodes.iter().position(|known| known.node == number).unwrap_or_else(|| {
                nodes.push(NodeMemory { node: number, ..NodeMemory::default() });
                nodes.len() - 1
            });
            add(&mut nodes[known], &free);
        }
        let types = self.files.read(&self.root.join("proc/pagetypeinfo")).unwrap_or_default();
        for node in &mut nodes {
            node.cache = self.cache(node.node);
            node.blocks = blocks(&types, node.node);
            if let Some(pages) = movable_fragments(&types, node.node) {
                node.compactable_blocks = node.compactable_blocks.min(pages >> BLOCK_ORDER);
            }
        }
        Ok(nodes)
    }

    /// File cache of a node that the kernel drops without writing it anywhere first, as far as reported.
    fn cache(&self, node: u32) -> Option<Bytes> {
        let text = self.files.read(&self.node_folder(node).join("meminfo")).ok()?;
        let field = |name: &str| -> Option<u64> {
            let rest = text.lines().find_map(|line| Some(line.split_once(name)?.1.strip_prefix(':')?.trim()))?;
            rest.strip_suffix("kB")?.trim().parse().ok()
        };
        let kibibytes = field("Active(file)")?.saturating_add(field("Inactive(file)")?);
        Some(Bytes::new(kibibytes.saturating_mul(1 << 10)))
    }
}

/// Adds a zone's free blocks to a node's room.
fn add(node: &mut NodeMemory, free: &[u64]) {
    let all = base_pages(free);
    let whole = base_pages_from(free, BLOCK_ORDER);
    let free = node.free.get().saturating_add(all.saturating_mul(PageSize::Base4K.bytes().get()));
    node.free = Bytes::new(free);
    node.whole_blocks = node.whole_blocks.saturating_add(whole >> BLOCK_ORDER);
    node.compactable_blocks = node.compactable_blocks.saturating_add((all - whole) >> BLOCK_ORDER);
}

fn base_pages(by_order: &[u64]) -> u64 {
    base_pages_from(by_order, 0)
}

/// Free base pages in blocks smaller than 2 MiB among movable pages, from the first table of `/proc/pagetypeinfo`;
/// `None` if it has no such line.
fn movable_fragments(types: &str, node: u32) -> Option<u64> {
    let of_line = |line: &str| -> Option<u64> {
        let (of_node, rest) = line.strip_prefix("Node")?.split_once(',')?;
        let (_, rest) = rest.split_once("type")?;
        let mut words = rest.split_whitespace();
        (of_node.trim().parse() == Ok(node) && matches!(words.next()?, "Movable" | "CMA")).then_some(())?;
        // Above 100 000 the kernel stops counting and writes `>100000`.
        let free = words.take(BLOCK_ORDER).map(|word| word.trim_start_matches('>').parse().ok());
        Some(base_pages(&free.collect::<Option<Vec<u64>>>()?))
    };
    types.lines().filter_map(of_line).reduce(u64::saturating_add)
}

/// Blocks by type, from the second table of `/proc/pagetypeinfo`; `None` if it is missing, or its blocks are not
/// of 2 MiB.
fn blocks(types: &str, node: u32) -> Option<Blocks> {
    let order: usize = types.lines().find_map(|line| line.strip_prefix("Page block order:"))?.trim().parse().ok()?;
    (order == BLOCK_ORDER).then_some(())?;
    let mut lines = types.lines().skip_while(|line| !line.starts_with("Number of blocks type"));
    let header = lines.next()?.strip_prefix("Number of blocks type")?;
    let names: Vec<&str> = header.split_whitespace().collect();
    let mut sum = Blocks::default();
    for line in lines {
        let Some((number, counts)) = zone(line) else { continue };
        for (name, count) in names.iter().zip(counts).filter(|_| number == node) {
            let into = match *name {
                "Movable" | "CMA" => &mut sum.movable,
                "Unmovable" | "HighAtomic" => &mut sum.unmovable,
                "Reclaimable" => &mut sum.reclaimable,
                _ => continue,
            };
            *into = into.saturating_add(count);
        }
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::fake_kernel::Tree;
    use wideleaf_policies::units::{kib, mib};

    const TYPES: &str = include_str!("../../tests/proc/pagetypeinfo.txt");

    #[test]
    fn free_memory_is_listed_by_node_with_whole_and_compactable_blocks() {
        let tree = Tree::new();
        // Node 0: 14 halves of a block, 3 blocks and one double block; only 5 of the halves lie among movable pages.
        tree.put(
            "proc/buddyinfo",
            "Node 0, zone   Normal  0 0 0 0 0 0 0 0 14 3 1\nNode 1, zone   Normal 1 0 0 0 0 0 0 0 0 0 0\n",
        );
        tree.put("proc/pagetypeinfo", TYPES);
        tree.put(
            "sys/devices/system/node/node0/meminfo",
            "Node 0 Active(file):   10 kB\nNode 0 Inactive(file): 6 kB\n",
        );
        let room = tree.pools().room(None).expect("well formed");
        let blocks = Some(Blocks { movable: 263, unmovable: 142, reclaimable: 57 });
        let node0 =
            NodeMemory { node: 0, free: mib(24), whole_blocks: 5, compactable_blocks: 2, cache: Some(kib(16)), blocks };
        assert_eq!(room[0], node0);
        assert_eq!((room[1].free, room[1].whole_blocks, room[1].compactable_blocks), (kib(4), 0, 0));
        assert_eq!(tree.pools().room(Some(1)).expect("well formed"), room[1..]);
        let text = node0.to_string();
        assert!(text.starts_with("node 0 has 24 MiB free: 5 whole blocks of 2 MiB now, compaction may make 2 more"));
        assert!(text.contains("263 are movable, 142 unmovable, 57 reclaimable; 16 KiB of file cache"), "{text}");
    }

    #[test]
    fn without_page_types_all_free_memory_may_be_compacted() {
        let tree = Tree::new();
        tree.put("proc/buddyinfo", "Node 0, zone   Normal  512 0 0 0 0 0 0 0 2 0 0\n");
        let room = tree.pools().room(None).expect("well formed");
        assert_eq!((room[0].compactable_blocks, room[0].blocks, room[0].cache), (2, None, None));
    }

    #[test]
    fn a_missing_file_means_unknown_and_a_malformed_one_is_named() {
        let tree = Tree::new();
        assert_eq!(tree.pools().room(None).expect("nothing is known"), []);
        tree.put("proc/buddyinfo", "Node 0, zone Normal many\n");
        let error = tree.pools().room(None).expect_err("not a number").to_string();
        assert!(error.contains("proc/buddyinfo: expected a node, a zone") && error.contains("many"), "{error}");
    }

    #[test]
    fn a_shortage_of_giant_pages_points_to_the_boot_command_line() {
        let none = NotEnoughMemory { size: PageSize::Giant1G, needed: 8, made: Some(3), room: Vec::new() };
        let text = none.to_string();
        assert!(
            text.starts_with("cannot make 8 pages of 1g (8 GiB): only 3 could be made, and were given back"),
            "{text}"
        );
        assert!(text.contains("a contiguous gibibyte") && text.contains("`hugepagesz=1G hugepages=8`"), "{text}");
    }
}
