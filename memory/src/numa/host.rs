//! The NUMA nodes of this host, and those that this process may use (`Mems_allowed_list` and `Cpus_allowed_list` of
//! `/proc/self/status`, proc_pid_status(5)).

use std::io;
use std::path::Path;

use wideleaf_policies::{Bytes, CpuList, NodeId, NodeSet};

use super::seen::{NodeSeen, NodesSeen};

/// The nodes of a host, and those that this process may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNodes {
    /// The nodes, ascending; none where the kernel does not know nodes.
    pub nodes: Vec<NodeSeen>,
    /// Nodes from which this process may have memory, by its cgroups.
    pub allowed: NodeSet,
    /// CPUs on which this process may run, by its cgroups and its affinity.
    pub allowed_cpus: CpuList,
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
    /// Error of the kernel, or of a file that is malformed. A kernel without nodes has none.
    pub fn read(root: &Path) -> io::Result<HostNodes> {
        let nodes = NodesSeen::below(root)?.nodes;
        if nodes.is_empty() {
            return Ok(HostNodes::default());
        }
        let status = std::fs::read_to_string(root.join("proc/self/status"))?;
        let unknown = || io::Error::new(io::ErrorKind::InvalidData, "/proc/self/status: its format is unknown");
        let allowed = allowed_nodes(&status).ok_or_else(unknown)?;
        let allowed_cpus =
            field(&status, "Cpus_allowed_list:").and_then(|list| list.parse().ok()).ok_or_else(unknown)?;
        Ok(HostNodes { nodes, allowed, allowed_cpus })
    }

    /// The node of this number.
    pub fn get(&self, id: NodeId) -> Option<&NodeSeen> {
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
        self.nodes.iter().filter(|node| nodes.contains(node.id)).map(NodeSeen::available).sum()
    }
}

/// Nodes from which a process may have memory, by its `/proc/PID/status`; `None` if it does not tell.
pub fn allowed_nodes(status: &str) -> Option<NodeSet> {
    field(status, "Mems_allowed_list:")?.parse().ok()
}

/// The value of a line `Name: value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
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
