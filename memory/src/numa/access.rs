//! Latency and bandwidth of a node's memory, as this host's firmware tells them (HMAT or CXL's tables).
//!
//! ```text
//!   node/nodeN/access1/initiators/   nodeM                                     nodes of CPUs that reach N best
//!                                    read_latency,   write_latency             nanoseconds
//!                                    read_bandwidth, write_bandwidth           MB/s
//! ```
//!
//! The kernel shows the figures of the best initiators alone (Documentation/admin-guide/mm/numaperf.rst), so a pair of
//! nodes that is not the best for its memory stays unknown. `access1` is of CPUs; kernels before 5.10 have `access0`
//! alone, which may also be of devices.

use std::fs;
use std::path::Path;

use wideleaf_policies::{NodeId, NodeSet};

/// Folders of the figures, the best first.
const CLASSES: [&str; 2] = ["access1", "access0"];

/// Figures of a node's memory for its best initiators. 0 means that one is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeAccess {
    /// Nodes with these CPUs.
    pub initiators: NodeSet,
    /// Latency of a read, in nanoseconds.
    pub read_latency_ns: u32,
    /// Latency of a write, in nanoseconds.
    pub write_latency_ns: u32,
    /// Bandwidth of reads, in MB/s.
    pub read_bandwidth_mb_s: u32,
    /// Bandwidth of writes, in MB/s.
    pub write_bandwidth_mb_s: u32,
}

impl NodeAccess {
    /// The figures of a node of the host with its `/sys` below `root`; `None` where the kernel tells none.
    pub fn of(node: NodeId, root: &Path) -> Option<NodeAccess> {
        let node = root.join(format!("sys/devices/system/node/node{}", node.0));
        CLASSES.into_iter().find_map(|class| NodeAccess::below(&node.join(class).join("initiators")))
    }

    fn below(folder: &Path) -> Option<NodeAccess> {
        let names = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let number = |name: String| name.strip_prefix("node")?.parse().ok().map(NodeId);
        let initiators: NodeSet = names.filter_map(number).collect();
        let figure = |name: &str| {
            let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
            text.trim().parse::<u32>().unwrap_or_default()
        };
        let access = NodeAccess {
            initiators,
            read_latency_ns: figure("read_latency"),
            write_latency_ns: figure("write_latency"),
            read_bandwidth_mb_s: figure("read_bandwidth"),
            write_bandwidth_mb_s: figure("write_bandwidth"),
        };
        let is_known = access != NodeAccess { initiators, ..NodeAccess::default() };
        (is_known && !initiators.is_empty()).then_some(access)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in files {
            let path = root.path().join("sys/devices/system/node/node1").join(name);
            fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        root
    }

    fn read(files: &[(&str, &str)]) -> Option<NodeAccess> {
        NodeAccess::of(NodeId(1), with(files).path())
    }

    #[test]
    fn figures_of_cpus_are_read_and_those_of_all_initiators_where_there_are_no_others() {
        let first = [
            ("access0/initiators/node7", ""),
            ("access0/initiators/read_latency", "60\n"),
            ("access0/initiators/write_latency", "70\n"),
        ];
        let all = read(&first).expect("they are there");
        assert_eq!((all.initiators.to_string().as_str(), all.read_latency_ns, all.write_latency_ns), ("7", 60, 70));
        assert_eq!((all.read_bandwidth_mb_s, all.write_bandwidth_mb_s), (0, 0));
        let second = [
            ("access1/initiators/node1", ""),
            ("access1/initiators/node3", ""),
            ("access1/initiators/read_bandwidth", "41000\n"),
            ("access1/initiators/write_bandwidth", "39000\n"),
        ];
        let of_cpus = read(&[&first[..], &second[..]].concat()).expect("they are there");
        assert_eq!((of_cpus.initiators.to_string().as_str(), of_cpus.read_latency_ns), ("1,3", 0));
        assert_eq!((of_cpus.read_bandwidth_mb_s, of_cpus.write_bandwidth_mb_s), (41_000, 39_000));
    }

    #[test]
    fn a_kernel_that_tells_no_figure_or_no_initiator_tells_nothing() {
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("access0/initiators/node0", ""), ("access0/initiators/read_latency", "0\n")]), None);
        assert_eq!(read(&[("access0/initiators/read_latency", "60\n")]), None);
    }
}
