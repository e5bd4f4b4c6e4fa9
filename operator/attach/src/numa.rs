//! A VM's memory and vCPUs by NUMA node, from a manager's state or from one look.
//!
//! ```text
//!   manager's snapshot ─┐                              one node of the host ─▶ nothing
//!   one look: move_pages ─┼─▶ MemoryByNode ─▶ NumaView
//!   or else numa_maps  ─┘       and what limits the VM: cpuset, policy of its memory
//! ```

use wideleaf_control::view::{NodeView, NumaView};
use wideleaf_memory::host::Host;
use wideleaf_memory::manager::{Live, LiveNodes};
use wideleaf_memory::numa::host::allowed_nodes;
use wideleaf_memory::numa::seen::{NodeSeen, NodesSeen};
use wideleaf_memory::region::RamRange;
use wideleaf_memory::sensors::host_backing::WindowBacking;
use wideleaf_memory::sensors::numa_maps;
use wideleaf_memory::sensors::vcpu_nodes::VcpuNodes;
use wideleaf_memory::sensors::window_nodes::WindowNodes;
use wideleaf_policies::locality::MemoryByNode;
use wideleaf_policies::{Bytes, NodeOfVm, NodeSet, PageSize, VmId, VmSnapshot, WindowNode, WindowRow};

use crate::placed::Placed;

/// Maximum number of batches of one look: windows of 64 GiB. The figures of a larger guest are incomplete, and say so.
const LOOKS_MAX: usize = 64;

/// The view of a managed VM; `None` on a host with one node.
pub fn of_live(live: &Live) -> Option<NumaView> {
    let nodes = live.nodes.as_deref()?;
    let parts: Vec<&VmSnapshot> = live.snapshot.vms.iter().collect();
    let limits = live.vms.first().and_then(|vm| vm.nodes).map(|limits| limits_of(&limits, nodes)).unwrap_or_default();
    Some(view(&parts, nodes, limits))
}

/// The view of a managed VM of another process; its backends say this of nodes. `None` on a host with one node.
pub(crate) fn of_attached(live: &Live, placed: &Placed) -> Option<NumaView> {
    let mut view = of_live(live)?;
    view.limits.extend(placed.sentences.iter().cloned());
    Some(view)
}

/// The view of a VM without a manager, and the node of each window by piece; `None` on a host with one node. Notes say
/// what is missing.
pub(crate) fn of_look(
    host: &dyn Host,
    pieces: &[(RamRange, &[WindowBacking])],
    placed: &Placed,
    notes: &mut Vec<String>,
) -> Option<(NumaView, Vec<Vec<WindowNode>>)> {
    let nodes = NodesSeen::through(host).ok().filter(NodesSeen::are_several)?;
    let vcpus = VcpuNodes::look(host, &nodes).unwrap_or_default();
    let status = host.read_text("/proc/self/status").unwrap_or_default();
    let cpuset = allowed_nodes(&status).unwrap_or_default();
    let limits = LiveNodes { cpuset, bound_to: placed.bound_to, is_complete: true };
    let permitted = |node: &NodeSeen| {
        let is_bound_there = placed.bound_to.is_none_or(|bound| bound.contains(node.id));
        is_bound_there && (cpuset.is_empty() || cpuset.contains(node.id))
    };
    let row = |node: &NodeSeen| NodeOfVm {
        node: node.id,
        may_use: permitted(node),
        vcpus: vcpus.on(node.id),
        free_2m: node.free_2m,
        free_1g: node.free_1g(),
    };
    let table: Vec<NodeOfVm> = nodes.nodes.iter().map(row).collect();
    let mut parts = Vec::new();
    let mut refused = None;
    for (range, windows) in pieces {
        let mut rows = VmSnapshot::with_capacity(VmId(0), windows.len());
        for seen in *windows {
            rows.push(WindowRow::new(seen.window, seen.resident, seen.backing));
        }
        rows.nodes.clone_from(&table);
        let mut sensor = WindowNodes::default();
        if let Err(error) = sensor.look_at_all(host, &[*range], &rows, LOOKS_MAX) {
            refused = Some(error);
        }
        rows.node.copy_from_slice(sensor.nodes());
        parts.push(rows);
    }
    let of_windows = parts.iter().map(|rows| rows.node.clone()).collect();
    let parts: Vec<&VmSnapshot> = parts.iter().collect();
    let limits = limits_of(&limits, &nodes).into_iter().chain(placed.sentences.iter().cloned());
    let mut view = view(&parts, &nodes, limits.collect());
    if let Some(error) = refused {
        notes.push(format!("the nodes of its pages are those of numa_maps, without page sizes: {error}"));
        from_numa_maps(&mut view, host, pieces);
    }
    Some((view, of_windows))
}

/// Memory by node as the kernel has it by mapping, where single pages cannot be asked for.
fn from_numa_maps(view: &mut NumaView, host: &dyn Host, pieces: &[(RamRange, &[WindowBacking])]) {
    let Ok(text) = host.read_text("/proc/self/numa_maps") else { return };
    let ranges: Vec<_> = pieces.iter().map(|(range, _)| (range.hva, range.gpa.bytes())).collect();
    for (node, bytes) in numa_maps::bytes_by_node(&text, &ranges) {
        if let Some(row) = view.nodes.iter_mut().find(|row| u32::from(row.node) == node) {
            row.memory = bytes.get();
            view.unknown = view.unknown.saturating_sub(bytes.get());
        }
    }
    let known: u64 = view.nodes.iter().map(|row| row.memory).sum();
    let local: u64 = view.nodes.iter().filter(|row| row.vcpus > 0).map(|row| row.memory).sum();
    let runs = view.nodes.iter().any(|row| row.vcpus > 0);
    view.local_share = (known > 0 && runs).then(|| (u128::from(local) * 10_000 / u128::from(known)) as u32);
}

/// Parts of one guest have the same nodes and vCPUs.
fn view(parts: &[&VmSnapshot], nodes: &NodesSeen, limits: Vec<String>) -> NumaView {
    let sums: Vec<MemoryByNode> = parts.iter().map(|part| MemoryByNode::of(part)).collect();
    let of_vm = |node: &NodeSeen| parts.first().and_then(|part| part.nodes.iter().find(|row| row.node == node.id));
    let row = |node: &NodeSeen| {
        let of_vm = of_vm(node).copied().unwrap_or_default();
        let here = || sums.iter().flat_map(|sum| &sum.nodes).filter(|row| row.node == node.id);
        NodeView {
            node: node.id.0,
            may_use: of_vm.may_use,
            vcpus: of_vm.vcpus,
            memory: (PageSize::Base4K.bytes() * here().map(|row| row.pages).sum::<u64>()).get(),
            huge_2m: (PageSize::Huge2M.bytes() * here().map(|row| row.windows_2m).sum::<u64>()).get(),
            giant_1g: (PageSize::Huge2M.bytes() * here().map(|row| row.windows_1g).sum::<u64>()).get(),
            free_2m: node.free_2m,
            free_1g: node.free_1g(),
            page_tables: node.page_tables.map(Bytes::get),
            second_level_tables: node.second_level_tables.map(Bytes::get),
        }
    };
    let whole = sums.iter().fold(MemoryByNode::default(), |whole, part| whole.with(part));
    let table = parts.first().map(|part| part.nodes.as_slice()).unwrap_or_default();
    NumaView {
        nodes: nodes.nodes.iter().map(row).collect(),
        unknown: (PageSize::Base4K.bytes() * whole.unknown).get(),
        local_share: whole.local_share(table).map(|share| share.get()),
        limits,
    }
}

/// Sentences about what limits the VM to some nodes.
fn limits_of(limits: &LiveNodes, nodes: &NodesSeen) -> Vec<String> {
    let all: NodeSet = nodes.nodes.iter().filter(|node| node.total > Bytes::ZERO).map(|node| node.id).collect();
    let leaves_out = |set: &NodeSet| !all.without(set).is_empty();
    let cpuset = Some(limits.cpuset).filter(|set| !set.is_empty() && leaves_out(set));
    let cpuset = cpuset.map(|set| {
        format!("its cpuset permits memory of {} alone (cpuset.mems of its cgroup; libvirt's <numatune>)", named(&set))
    });
    let bound = limits.bound_to.filter(leaves_out);
    let bound = bound
        .map(|set| format!("its memory is bound to {} (mbind: libvirt's <numatune>, QEMU's host-nodes)", named(&set)));
    cpuset.into_iter().chain(bound).collect()
}

fn named(set: &NodeSet) -> String {
    format!("{} {set}", if set.len() == 1 { "node" } else { "nodes" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy};
    use wideleaf_memory::testing::fake_host::FakeHost;
    use wideleaf_memory::testing::two_nodes::TWO_NODES;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Backing, Gpa, GpaRange, Hva, NodeId, WindowIndex};

    const BASE: Hva = Hva::new(1 << 40);

    fn stat(cpu: u32) -> String {
        format!("7 (CPU 0/KVM) S 1 7 7 0 -1 0 9 0 0 0 1 3 0 0 20 0 9 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0")
    }

    /// Four windows on node 0, of which the first is huge, and one huge one on node 1, where the vCPU runs.
    fn host() -> FakeHost {
        let host = FakeHost::default();
        host.be_of_another_process();
        TWO_NODES.all().for_each(|(path, text)| host.set_text(path, text));
        host.make_present(BASE, mib(2), true);
        host.make_present(BASE + mib(2), mib(6), false);
        host.make_present(BASE + mib(8), mib(2), true);
        host.put_on_node(BASE + mib(8), mib(2), NodeId(1));
        host.set_threads(&[7]);
        host.set_text("/proc/self/task/7/stat", &stat(3));
        host
    }

    fn look(host: &FakeHost) -> (Option<NumaView>, Vec<String>) {
        look_at(host, &Placed::default())
    }

    fn look_at(host: &FakeHost, placed: &Placed) -> (Option<NumaView>, Vec<String>) {
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(10)).expect("fits"), hva: BASE };
        let backing = |window| if [0, 4].contains(&window) { Backing::Huge2M } else { Backing::Base4K };
        let windows: Vec<WindowBacking> = (0..5)
            .map(|window| WindowBacking { window: WindowIndex::new(window), resident: 512, backing: backing(window) })
            .collect();
        let mut notes = Vec::new();
        (of_look(host, &[(range, &windows)], placed, &mut notes).map(|(view, _)| view), notes)
    }

    #[test]
    fn a_look_shows_memory_and_vcpus_by_node_and_the_local_share() {
        let (view, notes) = look(&host());
        let view = view.expect("two nodes");
        let rows: Vec<_> = view.nodes.iter().map(|row| (row.memory, row.huge_2m, row.vcpus, row.free_2m)).collect();
        assert_eq!(rows, [(mib(8).get(), mib(2).get(), 0, 512), (mib(2).get(), mib(2).get(), 1, 0)]);
        assert_eq!((view.unknown, view.local_share, notes.len()), (0, Some(2_000), 0));
        assert_eq!(view.limits, Vec::<String>::new());
    }

    #[test]
    fn a_cpuset_is_named_as_a_limit() {
        let host = host();
        host.set_text("/proc/self/status", "Name:\tqemu\nMems_allowed_list:\t1\n");
        let view = look(&host).0.expect("two nodes");
        assert_eq!(view.nodes.iter().map(|row| row.may_use).collect::<Vec<_>>(), [false, true]);
        assert!(view.limits[0].starts_with("its cpuset permits memory of node 1 alone"), "{:?}", view.limits);
        host.set_text("/proc/self/status", "Mems_allowed_list:\t0-1\n");
        assert_eq!(look(&host).0.expect("two nodes").limits, Vec::<String>::new());
    }

    #[test]
    fn backends_that_bind_memory_are_named_as_a_limit() {
        let policy = |node: u16| Some(NodePolicy { mode: MemoryMode::Bind, nodes: NodeSet::of(NodeId(node)) });
        let limits = |backends: &[(&str, Option<NodePolicy>)]| {
            let placed = Placed::of(backends.iter().copied());
            let view = look_at(&host(), &placed).0.expect("two nodes");
            (view.nodes.iter().map(|row| row.may_use).collect::<Vec<_>>(), view.limits)
        };
        let (may_use, said) = limits(&[("ram", policy(1))]);
        assert_eq!(may_use, [false, true]);
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("its memory is bound to node 1 (mbind:"), "{said:?}");
        let (may_use, said) = limits(&[("m0", policy(0)), ("m1", policy(1))]);
        assert_eq!((may_use, said.len()), (vec![true, true], 2));
        assert!(said[1].starts_with("its memory m1 comes from node 1 alone"), "{said:?}");
    }

    #[test]
    fn where_pages_cannot_be_asked_for_numa_maps_has_their_nodes() {
        let host = host();
        let maps = "10000000000 default anon=2560 dirty=2560 N0=2048 N1=512 kernelpagesize_kB=4\n\
                    7f0000000000 default heap anon=9 N1=9 kernelpagesize_kB=4\n";
        host.set_text("/proc/self/numa_maps", maps);
        // Each look reads the nodes first: refuse the first call after that.
        let calls = {
            let counted = self::host();
            let before = counted.calls();
            let _view = NodesSeen::through(&counted);
            let _vcpus = VcpuNodes::look(&counted, &NodesSeen::default());
            let _status = counted.read_text("/proc/self/status");
            counted.calls() - before
        };
        host.fail_call(calls, nix::errno::Errno::EPERM as i32);
        let (view, notes) = look(&host);
        let view = view.expect("two nodes");
        let rows: Vec<_> = view.nodes.iter().map(|row| row.memory).collect();
        assert_eq!((rows, view.local_share), (vec![mib(8).get(), mib(2).get()], Some(2_000)));
        assert!(notes[0].contains("numa_maps"), "{notes:?}");
    }

    #[test]
    fn on_a_host_with_one_node_there_is_no_view() {
        let host = FakeHost::default();
        assert_eq!(look(&host), (None, Vec::new()), "the kernel has no nodes");
        let host = self::host();
        host.set_text("/sys/devices/system/node/online", "0\n");
        assert_eq!(look(&host), (None, Vec::new()));
    }
}
