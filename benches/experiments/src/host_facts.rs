//! What an experiment is told about its host and about the wanted length. An experiment is defined to fit them; the
//! command line finds them out, so that nothing here reads the host.

use serde::{Deserialize, Serialize};

/// Properties of the host, and the wanted length. An experiment is defined to fit them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct HostFacts {
    /// Number of processors online.
    pub cpus: u32,
    /// Memory that is free or can be freed, in MiB.
    pub memory_available_mib: u64,
    /// Reason why guests cannot run on this host, if so.
    pub why_no_kvm: Option<String>,
    /// Paging of guests in KVM: `shadow`, `ept`, `npt`, `none`.
    pub paging: String,
    /// Whether QEMU is installed.
    pub has_qemu: bool,
    /// Whether the wideleafd program is in the directory of this program.
    pub has_daemon: bool,
    /// Reason why the 2 MiB hugetlb pool cannot grow, if so.
    pub why_no_pool_2m: Option<String>,
    /// Number of free 1 GiB pages.
    pub free_pages_1g: u64,
    /// Whether `run --make-giant-pages` may have a page of 1 GiB made: the process is root, and memory is left.
    pub can_make_1g: bool,
    /// Whether this process is root and may change host settings.
    pub is_root: bool,
    /// Whether also those runs are wanted that make an experiment take hours (`--long`).
    pub wants_long_runs: bool,
    /// NUMA nodes with memory, ascending.
    #[serde(default)]
    pub nodes: Vec<NodeFacts>,
}

/// One NUMA node with memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NodeFacts {
    /// Number of the node.
    pub id: u16,
    /// CPUs of the node on which this process may run, as a list; empty for a node of memory alone.
    pub cpus: String,
    /// Memory that is free or can be freed, in MiB.
    pub memory_available_mib: u64,
}

impl HostFacts {
    /// The first node with CPUs and this memory, and another one with this memory, if there are such nodes.
    pub fn near_and_far(&self, mib: u64) -> Option<[&NodeFacts; 2]> {
        let with_memory = || self.nodes.iter().filter(|node| node.memory_available_mib >= mib);
        let near = with_memory().find(|node| !node.cpus.is_empty())?;
        Some([near, with_memory().find(|node| node.id != near.id)?])
    }

    /// Reason why a run cannot have a page of 1 GiB, if so.
    pub fn why_no_giant(&self) -> Option<String> {
        (self.free_pages_1g == 0 && !self.can_make_1g).then(|| {
            "the pool has no free 1 GiB page, and only root on a host with 4 GiB available may have one made; run \
             `wideleaf pool reserve --size 1g --pages 1`"
                .into()
        })
    }

    /// Options of a run that begins on `page` under `policy`: a page of 1 GiB that it needs is made for it, unless the
    /// pool has one.
    pub fn giant_options(&self, page: &str, policy: &str) -> &'static [&'static str] {
        let needs_one = page == "1g" || policy == "giant";
        if needs_one && self.free_pages_1g == 0 { &["--make-giant-pages", "1"] } else { &[] }
    }
}

#[cfg(test)]
impl HostFacts {
    /// Two CPUs, 20 GiB, guests by shadow tables, root, everything installed.
    pub(crate) fn of_a_test() -> HostFacts {
        HostFacts {
            cpus: 2,
            memory_available_mib: 20 * 1024,
            why_no_kvm: None,
            paging: "shadow".into(),
            has_qemu: true,
            why_no_pool_2m: None,
            free_pages_1g: 0,
            can_make_1g: false,
            is_root: true,
            has_daemon: true,
            wants_long_runs: false,
            nodes: Vec::new(),
        }
    }

    /// The same with two nodes, of one CPU each.
    pub(crate) fn with_two_nodes(self) -> HostFacts {
        let node = |id: u16| NodeFacts { id, cpus: id.to_string(), memory_available_mib: 8 << 10 };
        HostFacts { nodes: vec![node(0), node(1)], ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_has_cpus_and_far_is_another_node_with_memory() {
        let host = HostFacts::of_a_test();
        assert_eq!(host.near_and_far(1), None, "one node");
        let host = host.with_two_nodes();
        let ids = |host: &HostFacts, mib| host.near_and_far(mib).map(|nodes| nodes.map(|node| node.id));
        assert_eq!((ids(&host, 1024), ids(&host, 9 << 10)), (Some([0, 1]), None));
        let mut of_memory = host.clone();
        of_memory.nodes[0].cpus = String::new();
        assert_eq!(ids(&of_memory, 1024), Some([1, 0]), "the first node has no CPU");
    }
}
