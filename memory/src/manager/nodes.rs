//! NUMA nodes of a tick: the columns of the snapshot that say where windows lie, from where they are touched, and what
//! nodes have free.
//!
//! ```text
//!   several nodes with memory?  no ─▶ nothing is read, no column is filled
//!        │ yes
//!        ▼
//!   free blocks, pools (each 100 ms) ──┐
//!   threads of vCPUs    (each second) ─┼─▶ node, touched_from, nodes of the snapshot's rows
//!   pages of windows  (paced by cost) ─┤
//!   Mems_allowed, policy of the RAM  ──┘        what is kept from one tick to the next: node_sight.rs
//! ```

use wideleaf_policies::{NodeId, NodeOfVm, Snapshot, TouchedFrom, VmSnapshot};

use super::ManagerLoop;
use super::report::ManagerReport;
use super::vm_state::VmState;
use crate::host::Host;
use crate::numa::seen::NodesSeen;

impl ManagerLoop {
    /// Fills the columns about nodes. On a host with one node they stay as they are.
    pub(super) fn sense_nodes(&mut self, snapshot: &mut Snapshot) {
        let Some(sight) = &mut self.nodes else { return };
        sight.update(self.host.as_ref());
        let nodes = sight.seen();
        for (vm, rows) in self.vms.iter_mut().zip(&mut snapshot.vms).filter(|(vm, _)| vm.is_there()) {
            vm.sense_nodes(self.host.as_ref(), &nodes, rows, &mut self.report);
        }
    }
}

impl VmState {
    fn sense_nodes(&mut self, host: &dyn Host, nodes: &NodesSeen, rows: &mut VmSnapshot, report: &mut ManagerReport) {
        match self.node_sight.look_at_windows(host, &self.managed.ranges, rows) {
            Ok(()) => {
                self.failing.remove("window_nodes");
            }
            Err(error) => self.tell_of_failure("window_nodes", &error, report),
        }
        match self.node_sight.look_at_vcpus(host, nodes) {
            Ok(()) => {
                self.failing.remove("vcpu_nodes");
            }
            Err(error) => self.tell_of_failure("vcpu_nodes", &error, report),
        }
        let sight = &self.node_sight;
        rows.node.copy_from_slice(sight.nodes());
        // Where the placement of the RAM names the node of each window, a policy has no choice.
        let is_fixed = self.managed.fixes_nodes;
        let touched_from = if is_fixed { TouchedFrom::Unknown } else { sight.touched_from() };
        rows.touched_from.fill(touched_from);
        let permitted = |node: NodeId| {
            let by_cpuset = sight.allowed().is_empty() || sight.allowed().contains(node);
            by_cpuset && self.managed.bound_to.is_none_or(|bound| bound.contains(node))
        };
        rows.nodes = (nodes.nodes.iter())
            .map(|node| NodeOfVm {
                node: node.id,
                may_use: permitted(node.id),
                vcpus: sight.vcpus_on(node.id),
                free_2m: node.free_2m,
                free_1g: node.free_1g(),
            })
            .collect();
    }
}
