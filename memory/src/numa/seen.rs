//! What a node has at this moment: free blocks, pages of the pools, page tables; and the nodes of CPUs. From
//! `/sys/devices/system/node` (Documentation/ABI/stable/sysfs-devices-node) and `/proc/buddyinfo`
//! (Documentation/filesystems/proc.rst), read in the way that a sandboxed process can.
//!
//! ```text
//!   node/online             0-1                  numbers of the nodes
//!   node/nodeN/cpulist      0-15,32-47           CPUs; a node may have none
//!   node/nodeN/distance     10 21                from N to each online node; 10 is the node itself (ACPI SLIT)
//!   node/nodeN/meminfo      MemTotal, MemFree, page cache and slabs, PageTables, SecPageTables
//!   node/nodeN/hugepages    pages of the pools
//!   buddyinfo               free blocks of 2 MiB and more
//! ```
//!
//! The kernel counts page tables by node, but not by process or guest. It has no list of free ranges of 1 GiB: its
//! largest free blocks have 4 MiB.

use std::fs;
use std::io;
use std::path::Path;

use wideleaf_policies::{Bytes, CpuList, NodeId, NodeSet, PageSize};

use crate::host::Host;
use crate::proc_fields::bytes_of;
use crate::sensors::free_blocks::{BUDDYINFO, FreeMemory};

/// Folder of the nodes in sysfs.
const NODES: &str = "/sys/devices/system/node";

/// Lines of a node's meminfo with memory that can be reclaimed.
const RECLAIMABLE: [&str; 3] = ["Active(file)", "Inactive(file)", "SReclaimable"];

/// Page sizes with a pool.
const POOLED: [PageSize; 2] = [PageSize::Huge2M, PageSize::Giant1G];

/// Nodes of a host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodesSeen {
    /// Online nodes, ascending by number; none where the kernel has no NUMA.
    pub nodes: Vec<NodeSeen>,
}

/// One node of a host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSeen {
    /// Number of the node.
    pub id: NodeId,
    /// CPUs of the node; none for a node of memory alone.
    pub cpus: CpuList,
    /// Memory of the node; zero for a node of CPUs alone.
    pub total: Bytes,
    /// Free memory of the node.
    pub free: Bytes,
    /// Memory that the kernel can reclaim without writing guests out: its page cache and its slabs of that kind.
    pub reclaimable: Bytes,
    /// Distance to each online node, in the order of [`NodesSeen::nodes`]: 10 to itself, 20 if twice as far.
    pub distances: Vec<u32>,
    /// Number of pages of 2 MiB in free blocks of that size or more.
    pub free_2m: u64,
    /// Pages of the pools, for each page size that has a pool there.
    pub pools: Vec<PoolOnNode>,
    /// Page tables of all processes in the memory of this node; `None` where the kernel does not tell.
    pub page_tables: Option<Bytes>,
    /// Second-level page tables of all guests (and of IOMMUs) in the memory of this node; `None` before Linux 6.1.
    pub second_level_tables: Option<Bytes>,
}

/// Pages of one pool on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOnNode {
    /// Page size of the pool.
    pub size: PageSize,
    /// Number of its pages on the node.
    pub total: u64,
    /// Number of those that are free.
    pub free: u64,
}

type Read<'a> = &'a dyn Fn(&str) -> io::Result<String>;

impl NodesSeen {
    /// Reads the nodes of a host with its `/proc` and `/sys` below `root`.
    ///
    /// # Errors
    /// Error of the kernel if there are nodes that cannot be read, or a file has an unknown form.
    pub fn below(root: &Path) -> io::Result<NodesSeen> {
        NodesSeen::from(&|path: &str| fs::read_to_string(root.join(path.trim_start_matches('/'))))
    }

    /// Reads the nodes of this machine through `host`.
    ///
    /// # Errors
    /// The same as for [`NodesSeen::below`].
    pub fn through(host: &dyn Host) -> io::Result<NodesSeen> {
        NodesSeen::from(&|path: &str| host.read_text(path).map_err(|error| error.source))
    }

    fn from(read: Read<'_>) -> io::Result<NodesSeen> {
        let online = match read(&format!("{NODES}/online")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(NodesSeen::default()),
            online => online?.trim().parse::<NodeSet>().map_err(|_| unknown_form(&format!("{NODES}/online")))?,
        };
        let blocks = read(BUDDYINFO).unwrap_or_default();
        let nodes = online.iter().map(|id| NodeSeen::from(id, read, &blocks));
        Ok(NodesSeen { nodes: nodes.collect::<io::Result<_>>()? })
    }

    /// Updates the number of free pages, which is cheaper than to read all again. A node that went offline keeps its
    /// last numbers.
    pub fn update_free(&mut self, host: &dyn Host) {
        let blocks = host.read_text(BUDDYINFO).unwrap_or_default();
        for node in &mut self.nodes {
            node.free_2m = FreeMemory::parse(&blocks, Some(node.id)).huge_pages;
            let folder = folder_of(node.id);
            let read = |path: &str| host.read_text(path).map_err(|error| error.source);
            for of_size in &mut node.pools {
                *of_size = pool(&folder, of_size.size, &read).unwrap_or(*of_size);
            }
        }
    }

    /// The node with that number.
    pub fn node(&self, id: NodeId) -> Option<&NodeSeen> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The node of a CPU.
    pub fn of_cpu(&self, cpu: u16) -> Option<NodeId> {
        self.nodes.iter().find(|node| node.cpus.contains(cpu)).map(|node| node.id)
    }

    /// Distance from one node to another; `None` where the kernel has none.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let column = self.nodes.iter().position(|node| node.id == to)?;
        self.node(from)?.distances.get(column).copied()
    }

    /// Whether memory can be on a wrong node: more than one node has some.
    pub fn are_several(&self) -> bool {
        self.nodes.iter().filter(|node| node.total > Bytes::ZERO).count() > 1
    }
}

impl NodeSeen {
    fn from(id: NodeId, read: Read<'_>, buddyinfo: &str) -> io::Result<NodeSeen> {
        let folder = folder_of(id);
        let [meminfo, cpulist] = ["meminfo", "cpulist"].map(|name| format!("{folder}/{name}"));
        let (memory, cpus) = (read(&meminfo)?, read(&cpulist)?);
        let distances = read(&format!("{folder}/distance")).unwrap_or_default();
        let amount = |name: &str| of_node(&memory, name).ok_or_else(|| unknown_form(&meminfo));
        Ok(NodeSeen {
            id,
            cpus: cpus.trim().parse().map_err(|_| unknown_form(&cpulist))?,
            total: amount("MemTotal")?,
            free: amount("MemFree")?,
            reclaimable: RECLAIMABLE.into_iter().filter_map(|name| of_node(&memory, name)).sum(),
            distances: distances.split_whitespace().map_while(|word| word.parse().ok()).collect(),
            free_2m: FreeMemory::parse(buddyinfo, Some(id)).huge_pages,
            pools: POOLED.into_iter().filter_map(|size| pool(&folder, size, read)).collect(),
            page_tables: of_node(&memory, "PageTables"),
            second_level_tables: of_node(&memory, "SecPageTables"),
        })
    }

    /// Memory for a new guest.
    pub fn available(&self) -> Bytes {
        self.free + self.reclaimable
    }

    /// Number of free pages of its pool of 1 GiB.
    pub fn free_1g(&self) -> u64 {
        self.pools.iter().filter(|pool| pool.size == PageSize::Giant1G).map(|pool| pool.free).sum()
    }
}

fn folder_of(id: NodeId) -> String {
    format!("{NODES}/node{}", id.0)
}

fn unknown_form(path: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{path}: its format is unknown"))
}

/// `Node 1 MemFree:  2048 kB`: a line of a node's meminfo is one of `/proc/meminfo` behind two words.
fn of_node(meminfo: &str, name: &str) -> Option<Bytes> {
    let lines = meminfo.lines().filter_map(|line| Some(line.trim_start().strip_prefix("Node ")?.split_once(' ')?.1));
    lines.filter(|line| line.split_once(':').is_some_and(|(of, _)| of == name)).find_map(|line| bytes_of(line, name))
}

fn pool(folder: &str, size: PageSize, read: Read<'_>) -> Option<PoolOnNode> {
    let folder = format!("{folder}/hugepages/hugepages-{}kB", size.bytes().get() >> 10);
    let number = |name: &str| read(&format!("{folder}/{name}")).ok()?.trim().parse().ok();
    Some(PoolOnNode { size, total: number("nr_hugepages")?, free: number("free_hugepages")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::two_nodes::TWO_NODES;
    use wideleaf_policies::units::{gib, kib};

    fn two() -> (FakeHost, NodesSeen) {
        let host = FakeHost::default();
        TWO_NODES.all().for_each(|(path, text)| host.set_text(path, text));
        let seen = NodesSeen::through(&host).expect("a host with two nodes");
        (host, seen)
    }

    #[test]
    fn nodes_have_cpus_memory_distances_blocks_pools_and_tables() {
        let (_, host) = two();
        assert_eq!(host.nodes.iter().map(|node| node.id).collect::<Vec<_>>(), [NodeId(0), NodeId(1)]);
        let (first, second) = (&host.nodes[0], &host.nodes[1]);
        assert_eq!((first.cpus.to_string().as_str(), second.cpus.to_string().as_str()), ("0-1,4-5", "2-3,6-7"));
        assert_eq!((first.total, second.total, second.free), (gib(16), gib(16), gib(1)));
        assert_eq!((first.free_2m, second.free_2m), (512, 0));
        let pools = [(PageSize::Huge2M, 64, 0), (PageSize::Giant1G, 2, 1)];
        assert_eq!(second.pools, pools.map(|(size, total, free)| PoolOnNode { size, total, free }));
        assert_eq!((first.free_1g(), second.free_1g()), (0, 1));
        assert_eq!((second.page_tables, second.second_level_tables), (Some(kib(2048)), Some(kib(512))));
        assert_eq!((host.distance(NodeId(0), NodeId(1)), host.distance(NodeId(1), NodeId(1))), (Some(21), Some(10)));
        assert_eq!((host.of_cpu(5), host.of_cpu(6), host.of_cpu(8)), (Some(NodeId(0)), Some(NodeId(1)), None));
        assert!(host.are_several());
    }

    #[test]
    fn free_pages_are_read_again_and_the_rest_stays() {
        let (host, mut seen) = two();
        let before = seen.clone();
        host.set_text(BUDDYINFO, "Node 1, zone Normal 0 0 0 0 0 0 0 0 0 3 2\n");
        let free = "/sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages";
        host.set_text(free, "0\n");
        seen.update_free(&host);
        assert_eq!((seen.nodes[0].free_2m, seen.nodes[1].free_2m, seen.nodes[1].free_1g()), (0, 7, 0));
        assert_eq!(seen.nodes[1].cpus, before.nodes[1].cpus);
    }

    #[test]
    fn a_node_without_memory_or_without_cpus_is_a_node() {
        let host = FakeHost::default();
        let set = |file: &str, text: &str| host.set_text(&format!("{NODES}/{file}"), text);
        set("online", "0,2\n");
        set("node0/meminfo", "Node 0 MemTotal: 2048 kB\nNode 0 MemFree: 1024 kB\n");
        set("node2/meminfo", "Node 2 MemTotal: 0 kB\nNode 2 MemFree: 0 kB\n");
        set("node0/cpulist", "\n");
        set("node2/cpulist", "0-3\n");
        let seen = NodesSeen::through(&host).expect("two nodes");
        assert_eq!((seen.nodes[1].id, seen.nodes[1].total), (NodeId(2), Bytes::ZERO));
        assert!(seen.nodes[0].cpus.is_empty() && !seen.are_several(), "memory is in one place");
        assert_eq!((seen.distance(NodeId(0), NodeId(2)), seen.nodes[0].page_tables), (None, None));
        set("node0/cpulist", "many\n");
        assert!(NodesSeen::through(&host).expect_err("no list").to_string().contains("cpulist"));
    }

    #[test]
    fn a_kernel_without_nodes_has_none() {
        let empty = tempfile::tempdir().expect("a folder");
        assert_eq!(NodesSeen::below(empty.path()).expect("that is no error"), NodesSeen::default());
    }
}
