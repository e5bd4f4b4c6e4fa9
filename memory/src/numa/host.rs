//! The NUMA nodes of this host: CPUs, memory and distances (`/sys/devices/system/node`,
//! Documentation/ABI/stable/sysfs-devices-node).

use std::path::{Path, PathBuf};

use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, CpuList, NodeId, NodeSet};

/// A node of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostNode {
    /// Number of the node.
    pub id: NodeId,
    /// CPUs of the node that are online.
    pub cpus: CpuList,
    /// All memory of the node; zero for a node with CPUs alone.
    pub total: Bytes,
    /// Memory that is free now.
    pub free: Bytes,
    /// Memory that the kernel can reclaim without writing guests out: its page cache and its slabs of that kind.
    pub reclaimable: Bytes,
    /// Distances to all nodes, in the order of the nodes; 10 is the node itself.
    pub distances: Vec<u8>,
}

impl HostNode {
    /// Memory for a new guest.
    pub fn available(&self) -> Bytes {
        self.free + self.reclaimable
    }
}

/// The nodes of a host, and those that this process may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNodes {
    /// The nodes, ascending; none where the kernel does not know nodes.
    pub nodes: Vec<HostNode>,
    /// Nodes from which this process may have memory, by its cgroups.
    pub allowed: NodeSet,
    /// CPUs on which this process may run, by its cgroups and its affinity.
    pub allowed_cpus: CpuList,
}

/// A file of the kernel that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the host's nodes: {}: {why}", path.display())]
pub struct HostNodesError {
    /// Path of the file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

impl HostNodes {
    /// Whether the host has several nodes with memory. Reads one small file.
    pub fn are_several(root: &Path) -> bool {
        let with_memory = std::fs::read_to_string(root.join("sys/devices/system/node/has_memory"));
        with_memory.is_ok_and(|text| text.parse::<NodeSet>().is_ok_and(|nodes| nodes.len() > 1))
    }

    /// Reads the nodes of the host with its `/proc` and `/sys` below `root`.
    ///
    /// # Errors
    /// [`HostNodesError`] for a file that is malformed or disappears. A kernel without nodes has none.
    pub fn read(root: &Path) -> Result<HostNodes, HostNodesError> {
        let folder = root.join("sys/devices/system/node");
        let online = folder.join("online");
        if !online.exists() {
            return Ok(HostNodes::default());
        }
        let ids: NodeSet = parsed(&online, |text| text.parse().ok())?;
        let nodes = ids.iter().map(|id| read_node(&folder, id)).collect::<Result<_, _>>()?;
        let status = root.join("proc/self/status");
        let allowed = parsed(&status, |text| field(text, "Mems_allowed_list:")?.parse().ok())?;
        let allowed_cpus = parsed(&status, |text| field(text, "Cpus_allowed_list:")?.parse().ok())?;
        Ok(HostNodes { nodes, allowed, allowed_cpus })
    }

    /// The node of this number.
    pub fn get(&self, id: NodeId) -> Option<&HostNode> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// Numbers of the nodes that have memory.
    pub fn with_memory(&self) -> NodeSet {
        self.nodes.iter().filter(|node| node.total > Bytes::ZERO).map(|node| node.id).collect()
    }

    /// CPUs of these nodes on which this process may run.
    pub fn cpus_of(&self, nodes: &NodeSet) -> CpuList {
        let of_nodes = self.nodes.iter().filter(|node| nodes.contains(node.id)).flat_map(|node| node.cpus.iter());
        of_nodes.filter(|cpu| self.allowed_cpus.contains(*cpu)).collect()
    }

    /// Memory for a new guest on these nodes together.
    pub fn available(&self, nodes: &NodeSet) -> Bytes {
        self.nodes.iter().filter(|node| nodes.contains(node.id)).map(HostNode::available).sum()
    }
}

fn read_node(folder: &Path, id: NodeId) -> Result<HostNode, HostNodesError> {
    let folder = folder.join(format!("node{}", id.0));
    let cpus = parsed(&folder.join("cpulist"), |text| text.parse().ok())?;
    let meminfo = folder.join("meminfo");
    let of = |name: &str| parsed(&meminfo, |text| amount(text, name));
    let reclaimable = of("Active(file):")? + of("Inactive(file):")? + of("SReclaimable:")?;
    let distances = parsed(&folder.join("distance"), |text| {
        text.split_whitespace().map(|distance| distance.parse().ok()).collect()
    })?;
    Ok(HostNode { id, cpus, total: of("MemTotal:")?, free: of("MemFree:")?, reclaimable, distances })
}

fn parsed<T>(path: &Path, parse: impl FnOnce(&str) -> Option<T>) -> Result<T, HostNodesError> {
    let wrong = |why: String| HostNodesError { path: path.to_owned(), why };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    parse(&text).ok_or_else(|| wrong("its format is unknown".to_owned()))
}

/// The value of a line `Name: value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The amount of a line `Node 0 Name: 12 kB`.
fn amount(text: &str, name: &str) -> Option<Bytes> {
    let mut words = text.lines().map(str::split_whitespace).find_map(|mut words| {
        words.nth(2).filter(|word| *word == name)?;
        Some(words)
    })?;
    words.next()?.parse().ok().map(kib)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use wideleaf_policies::units::gib;

    /// A host with two nodes of two CPUs: 8 GiB with 2 free and 1 reclaimable, and 4 GiB with 3 free.
    pub(crate) fn two_nodes() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        };
        let node = "sys/devices/system/node";
        put(&format!("{node}/online"), "0-1\n");
        put(&format!("{node}/has_memory"), "0-1\n");
        for (number, cpus, total, free, files) in [(0, "0-1", 8, 2, 1), (1, "2-3", 4, 3, 0)] {
            put(&format!("{node}/node{number}/cpulist"), &format!("{cpus}\n"));
            let line = |name: &str, gib: u64| format!("Node {number} {name}       {} kB\n", gib << 20);
            let meminfo = [
                line("MemTotal:", total),
                line("MemFree:", free),
                line("Active(file):", files),
                line("Inactive(file):", 0),
                line("SReclaimable:", 0),
            ];
            put(&format!("{node}/node{number}/meminfo"), &meminfo.concat());
            put(&format!("{node}/node{number}/distance"), if number == 0 { "10 21\n" } else { "21 10\n" });
        }
        put("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-2\nMems_allowed_list:\t0-1\n");
        root
    }

    #[test]
    fn a_host_with_two_nodes_is_read() {
        let root = two_nodes();
        let host = HostNodes::read(root.path()).expect("the tree is well-formed");
        let first = host.get(NodeId(0)).expect("it is there");
        assert_eq!((first.total, first.free, first.reclaimable), (gib(8), gib(2), gib(1)));
        assert_eq!((first.cpus.to_string().as_str(), &first.distances[..]), ("0-1", &[10, 21][..]));
        assert_eq!(host.available(&host.with_memory()), gib(6));
        assert_eq!(host.cpus_of(&"1".parse().expect("a list")).to_string(), "2", "CPU 3 is not allowed");
        assert!(host.get(NodeId(2)).is_none() && HostNodes::are_several(root.path()));
    }

    #[test]
    fn a_kernel_without_nodes_has_none_and_a_malformed_file_is_named() {
        let root = tempfile::tempdir().expect("a temporary folder");
        assert_eq!(HostNodes::read(root.path()).expect("none"), HostNodes::default());
        assert!(!HostNodes::are_several(root.path()));
        let root = two_nodes();
        let meminfo = root.path().join("sys/devices/system/node/node1/meminfo");
        std::fs::write(&meminfo, "Node 1 MemTotal: much kB\n").expect("a file");
        let error = HostNodes::read(root.path()).expect_err("it is malformed").to_string();
        assert!(error.contains("node1/meminfo: its format is unknown"), "{error}");
    }
}
