//! What the loop knows of NUMA nodes from one tick to the next: of the host, and of each VM.
//!
//! The snapshot says that a window is touched from one node only if all vCPUs ran there at several looks in a row. No
//! counter of the kernel tells which vCPU touched a window.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Moment, NodeId, NodeSet, TouchedFrom, VmSnapshot, WindowNode};

use super::report::ManagerReport;
use crate::host::{Host, HostError};
use crate::numa::host::allowed_nodes;
use crate::numa::seen::NodesSeen;
use crate::region::RamRange;
use crate::sensors::vcpu_nodes::VcpuNodes;
use crate::sensors::window_nodes::WindowNodes;

/// Time between two looks at free pages: a plan that names a node needs them as they are, and the files are small.
const FREE_EVERY: Duration = Duration::from_millis(100);

/// Time between two looks at vCPUs. The scheduler moves threads between nodes within seconds, if at all.
const VCPUS_EVERY: Duration = Duration::from_secs(1);

/// Number of looks in a row at which all vCPUs must have run on one node, so that its touches count as all.
const STEADY_LOOKS: u8 = 3;

/// File with the nodes that the kernel lets the process use: its cpuset (proc_pid_status(5)).
const STATUS: &str = "/proc/self/status";

/// The host's nodes, where there are several.
#[derive(Clone, Debug)]
pub(super) struct HostSight {
    seen: Arc<NodesSeen>,
    due: Moment,
}

impl HostSight {
    /// The nodes of this host; `None` where memory is in one place. Nodes that cannot be read are counted as a failure,
    /// and the loop works as on a host with one.
    pub fn of(host: &dyn Host, report: &mut ManagerReport) -> Option<HostSight> {
        let count = |error: &std::io::Error| {
            // The next call ends the loop.
            if error.raw_os_error() == Some(libc::ESRCH) {
                return;
            }
            tracing::warn!("the host's NUMA nodes: {error}");
            *report.sensor_failures.entry("numa_nodes").or_default() += 1;
        };
        let seen = NodesSeen::through(host).inspect_err(count).ok()?;
        seen.are_several().then(|| HostSight { seen: Arc::new(seen), due: Moment::START })
    }

    /// The nodes with the latest numbers of free pages.
    pub fn seen(&self) -> Arc<NodesSeen> {
        Arc::clone(&self.seen)
    }

    /// Reads the numbers of free pages again, if that is due.
    pub fn update(&mut self, host: &dyn Host) {
        let now = host.now();
        if now >= self.due {
            Arc::make_mut(&mut self.seen).update_free(host);
            self.due = now + FREE_EVERY;
        }
    }
}

/// What is known of a VM by node.
#[derive(Debug, Default)]
pub(super) struct VmSight {
    windows: WindowNodes,
    vcpus: VcpuNodes,
    /// Node of all vCPUs, and the number of looks in a row at which that was so.
    only: Option<(NodeId, u8)>,
    /// Nodes that the process may use; empty where that is not known.
    allowed: NodeSet,
    due: Moment,
}

impl VmSight {
    /// The node of a window is not known any more.
    pub fn forget(&mut self, row: usize) {
        self.windows.forget(row);
    }

    /// Whether the node of each present window was asked for.
    pub fn is_complete(&self) -> bool {
        self.windows.is_complete()
    }

    /// Nodes that the process may use; empty where that is not known.
    pub fn allowed(&self) -> NodeSet {
        self.allowed
    }

    /// Node of each window, by row, as far as it is known.
    pub fn nodes(&self) -> &[WindowNode] {
        self.windows.nodes()
    }

    /// Number of vCPUs that ran last on a node.
    pub fn vcpus_on(&self, node: NodeId) -> u16 {
        self.vcpus.on(node)
    }

    /// Looks at the next windows, if that is due.
    ///
    /// # Errors
    /// [`HostError`] if the kernel does not answer.
    pub fn look_at_windows(
        &mut self,
        host: &dyn Host,
        ranges: &[RamRange],
        rows: &VmSnapshot,
    ) -> Result<(), HostError> {
        self.windows.look(host, ranges, rows)
    }

    /// Looks at the vCPUs and at the cpuset, if that is due.
    ///
    /// # Errors
    /// [`HostError`] if the threads cannot be listed.
    pub fn look_at_vcpus(&mut self, host: &dyn Host, nodes: &NodesSeen) -> Result<(), HostError> {
        let now = host.now();
        if now < self.due {
            return Ok(());
        }
        self.due = now + VCPUS_EVERY;
        self.allowed = host.read_text(STATUS).ok().and_then(|text| allowed_nodes(&text)).unwrap_or_default();
        let seen = VcpuNodes::look(host, nodes)?;
        if !seen.by_node.is_empty() {
            self.vcpus = seen; // or else the guest has ended, and this is where its vCPUs ran last
        }
        self.only = match (self.vcpus.only(), self.only) {
            (Some(now), Some((before, looks))) if now == before => Some((now, looks.saturating_add(1))),
            (Some(now), _) => Some((now, 1)),
            (None, _) => None,
        };
        Ok(())
    }

    /// From where all windows are touched.
    pub fn touched_from(&self) -> TouchedFrom {
        match self.only {
            Some((node, STEADY_LOOKS..)) => TouchedFrom::Node(node),
            _ => TouchedFrom::Unknown,
        }
    }
}
