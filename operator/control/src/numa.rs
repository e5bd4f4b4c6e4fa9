//! Part of a description that exists on hosts with several NUMA nodes: where a VM's memory lies, where its vCPUs ran,
//! what each node has free, and what limits the VM to some nodes.

use serde::{Deserialize, Serialize};

use crate::units::ByteCount;

/// Memory and vCPUs of a VM by NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaView {
    /// Nodes of the host, ascending.
    pub nodes: Vec<NodeView>,
    /// Resident memory on a node that was not asked for yet, in bytes.
    #[serde(default)]
    pub unknown: ByteCount,
    /// Share of the memory with a known node that is on nodes where vCPUs ran last, in ten thousandths; `None` where no
    /// vCPU was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_share: Option<u32>,
    /// What limits its memory to some nodes, one sentence for each limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<String>,
}

/// One node of the host, and the VM's part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// Number of the node.
    pub node: u16,
    /// Whether the VM may have memory there, as far as that is known.
    pub may_use: bool,
    /// Number of its vCPUs that ran there last.
    pub vcpus: u16,
    /// Resident memory of the VM in windows that are there, in bytes. A window on base pages counts where most of its
    /// sampled pages are.
    pub memory: ByteCount,
    /// The part of it in pages of 2 MiB, in bytes.
    pub huge_2m: ByteCount,
    /// The part of it in pages of 1 GiB, in bytes.
    pub giant_1g: ByteCount,
    /// Number of pages of 2 MiB in free blocks of the node.
    pub free_2m: u64,
    /// Number of free pages in the node's pool of 1 GiB.
    pub free_1g: u64,
    /// Page tables of all processes of the host in this node's memory, in bytes; `None` where the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_tables: Option<ByteCount>,
    /// Second-level page tables of all VMs of the host in this node's memory, in bytes; `None` before Linux 6.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_level_tables: Option<ByteCount>,
}

impl NumaView {
    /// Sentences about nodes that lack huge pages where the VM runs, about limits, and about remote memory.
    pub fn explanation(&self) -> Vec<String> {
        let short = self.nodes.iter().filter(|node| node.vcpus > 0 && node.free_2m == 0);
        let shortages = short.map(|node| self.shortage(node));
        let limits = self.limits.iter().cloned();
        shortages.chain(limits).chain(self.remote()).collect()
    }

    fn shortage(&self, of: &NodeView) -> String {
        let others = || self.nodes.iter().filter(|node| node.node != of.node);
        let having = |node: &NodeView| format!("node {} has {}", node.node, node.free_2m);
        let others_have: Vec<String> = others().map(having).collect();
        let helps = others().any(|node| node.free_2m > 0 && node.may_use);
        let exists = others().any(|node| node.free_2m > 0);
        let remedy = match (helps, exists) {
            (true, _) => "windows that are local stay local, on base pages: free memory there, or move a guest away",
            (false, true) => "its limits keep it from those: widen them, or free memory there",
            (false, false) => "no node has one: free memory, or let the supply of blocks work",
        };
        format!("node {} has 0 free blocks of 2 MiB; {}: {remedy}", of.node, others_have.join("; "))
    }

    fn remote(&self) -> Option<String> {
        let share = self.local_share.filter(|share| *share < 10_000)?;
        let runs: Vec<String> =
            self.nodes.iter().filter(|node| node.vcpus > 0).map(|node| node.node.to_string()).collect();
        let nodes = if runs.len() == 1 { format!("node {}", runs[0]) } else { format!("nodes {}", runs.join(", ")) };
        let percent = f64::from(share) / 100.0;
        Some(format!("{percent:.1} % of its memory is local: on {nodes}, where its vCPUs ran last"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(limits: &[&str]) -> NumaView {
        let node = |node, may_use, vcpus, free_2m| NodeView { node, may_use, vcpus, free_2m, ..NodeView::default() };
        let is_free = limits.is_empty();
        NumaView {
            nodes: vec![node(0, is_free, 0, 512), node(1, true, 2, 0)],
            local_share: Some(6_200),
            limits: limits.iter().map(|limit| (*limit).to_owned()).collect(),
            ..NumaView::default()
        }
    }

    #[test]
    fn the_node_without_free_blocks_is_named_beside_those_that_have_some() {
        let said = view(&[]).explanation();
        assert!(
            said[0].starts_with("node 1 has 0 free blocks of 2 MiB; node 0 has 512: windows that are local"),
            "{said:?}"
        );
        assert_eq!(said[1], "62.0 % of its memory is local: on node 1, where its vCPUs ran last");
    }

    #[test]
    fn a_limit_is_named_and_free_blocks_behind_it_are_no_help() {
        let said = view(&["its cpuset permits node 1 alone"]).explanation();
        assert!(said[0].contains("node 0 has 512: its limits keep it from those"), "{said:?}");
        assert_eq!(said[1], "its cpuset permits node 1 alone");
    }

    #[test]
    fn a_node_without_vcpus_may_be_full_and_local_memory_needs_no_sentence() {
        let mut calm = view(&[]);
        (calm.nodes[0].vcpus, calm.nodes[1].vcpus, calm.local_share) = (2, 0, Some(10_000));
        assert_eq!(calm.explanation(), Vec::<String>::new());
    }
}
