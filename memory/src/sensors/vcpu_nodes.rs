//! NUMA nodes on which the vCPUs of a guest ran last: field `processor` of `/proc/PID/task/TID/stat`
//! (proc_pid_stat(5)), and the node of that CPU.
//!
//! ```text
//!   4711 (CPU 2/KVM) S 1 … 17 3 0 0 …      the 37th field behind the name: CPU 3
//!         vcpu2, fc_vcpu 2, crosvm_vcpu2   names of vCPU threads in other VMMs
//! ```
//!
//! QEMU names its threads only with `debug-threads=on`, as libvirt starts it. Without names no vCPU is found, and
//! nothing is said of them: other threads of a VMM run elsewhere.

use wideleaf_policies::NodeId;

use crate::host::{Host, HostError};
use crate::numa::seen::NodesSeen;

/// Maximum number of threads that are read in one look; a guest has at most 4096 vCPUs (`KVM_MAX_VCPUS`).
const THREADS_MAX: usize = 4096;

/// Number of vCPUs that ran last on each node, ascending by node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VcpuNodes {
    /// Nodes with at least one vCPU.
    pub by_node: Vec<(NodeId, u16)>,
}

impl VcpuNodes {
    /// Looks at all threads of the process.
    ///
    /// # Errors
    /// [`HostError`] if the threads cannot be listed. One that ends meanwhile is left out.
    pub fn look(host: &dyn Host, nodes: &NodesSeen) -> Result<VcpuNodes, HostError> {
        let mut seen = VcpuNodes::default();
        for thread in host.threads()?.into_iter().take(THREADS_MAX) {
            let Ok(stat) = host.read_text(&format!("/proc/self/task/{thread}/stat")) else { continue };
            seen.add(vcpu_processor(&stat).and_then(|cpu| nodes.of_cpu(cpu)));
        }
        Ok(seen)
    }

    fn add(&mut self, node: Option<NodeId>) {
        let Some(node) = node else { return };
        match self.by_node.binary_search_by_key(&node, |(known, _)| *known) {
            Ok(at) => self.by_node[at].1 = self.by_node[at].1.saturating_add(1),
            Err(at) => self.by_node.insert(at, (node, 1)),
        }
    }

    /// Number of vCPUs on a node.
    pub fn on(&self, node: NodeId) -> u16 {
        self.by_node.iter().find(|(known, _)| *known == node).map_or(0, |(_, vcpus)| *vcpus)
    }

    /// The node on which all vCPUs ran; `None` if there are several, or no vCPU was found.
    pub fn only(&self) -> Option<NodeId> {
        match self.by_node.as_slice() {
            [(node, _)] => Some(*node),
            _ => None,
        }
    }
}

/// The CPU on which a thread ran last, if its name is one of a vCPU.
fn vcpu_processor(stat: &str) -> Option<u16> {
    // The name may hold any character, so the last bracket ends it.
    let (head, fields) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    is_vcpu(name).then_some(())?;
    // Field 3 (state) is the first behind the name, so field 39 is the 37th.
    fields.split_whitespace().nth(36)?.parse().ok()
}

/// Whether a thread of this name runs a vCPU: QEMU's `CPU 0/KVM`, and `vcpu0` with or without a prefix and a space.
fn is_vcpu(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let qemu = name.strip_prefix("CPU ").and_then(|rest| rest.strip_suffix("/KVM"));
    let of_prefix = |prefix: &str| name.strip_prefix(prefix).map(str::trim_start);
    qemu.or_else(|| ["vcpu", "fc_vcpu", "crosvm_vcpu"].into_iter().find_map(of_prefix)).is_some_and(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::two_nodes::TWO_NODES;

    fn stat(name: &str, cpu: u32) -> String {
        format!(
            "7 ({name}) S 1 7 7 0 -1 4194368 9 0 0 0 120 30 0 0 20 0 9 0 100 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0"
        )
    }

    #[test]
    fn the_processor_of_threads_with_the_name_of_a_vcpu_is_found() {
        for name in ["CPU 0/KVM", "CPU 31/KVM", "vcpu3", "fc_vcpu 0", "crosvm_vcpu12"] {
            assert_eq!(vcpu_processor(&stat(name, 6)), Some(6), "{name}");
        }
        for name in ["qemu-system-x86", "CPU 0/TCG", "vcpu", "vcpux", "vhost-7", "worker) S 1 (CPU 0/KVM x"] {
            assert_eq!(vcpu_processor(&stat(name, 6)), None, "{name}");
        }
        assert_eq!(vcpu_processor(&stat("vcpu0", 6)[..40]), None, "a cut line");
        assert_eq!(vcpu_processor(""), None);
    }

    #[test]
    fn vcpus_are_counted_by_the_node_of_their_cpu() {
        let host = FakeHost::default();
        TWO_NODES.all().for_each(|(path, text)| host.set_text(path, text));
        let nodes = NodesSeen::through(&host).expect("two nodes");
        host.set_threads(&[10, 11, 12, 13]);
        let threads = [(10, "qemu-system-x86", 0), (11, "CPU 0/KVM", 2), (12, "CPU 1/KVM", 7)];
        for (thread, name, cpu) in threads {
            host.set_text(&format!("/proc/self/task/{thread}/stat"), &stat(name, cpu));
        }
        let seen = VcpuNodes::look(&host, &nodes).expect("the fake answers"); // thread 13 has ended meanwhile
        assert_eq!((seen.on(NodeId(0)), seen.on(NodeId(1)), seen.only()), (0, 2, Some(NodeId(1))));
        host.set_text("/proc/self/task/12/stat", &stat("CPU 1/KVM", 0));
        let seen = VcpuNodes::look(&host, &nodes).expect("the fake answers");
        assert_eq!((seen.on(NodeId(0)), seen.on(NodeId(1)), seen.only()), (1, 1, None));
        host.set_threads(&[10]);
        assert_eq!(VcpuNodes::look(&host, &nodes).expect("the fake answers").only(), None, "no vCPU was found");
    }
}
