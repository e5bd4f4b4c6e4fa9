//! NUMA of a run: the cells that its guest sees, and the nodes of this host that back them.
//!
//! ```text
//!   NumaSpec ──▶ plan: checked against --memory, --vcpus and this host ─┬─▶ GuestCell    what the guest sees
//!     auto                                                             ├─▶ Placement    memory policies of RAM
//!     off                                                              └─▶ host CPUs    of each vCPU
//!     cells
//! ```
//!
//! Without cells, on a host with several nodes, the node with the most room for the whole guest is preferred.

use std::path::{Path, PathBuf};

use wideleaf_memory::numa::access::NodeAccess;
use wideleaf_memory::numa::host::HostNodes;
use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy, PlacedPart, Placement};
use wideleaf_memory::numa::seen::NodeSeen;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::{Bytes, CpuList, GpaRange, NodeId, NodeSet, PageSize};
use wideleaf_vmm::cells::{self, DISTANCE_OTHER, DISTANCE_OWN, GuestCell, split};
use wideleaf_vmm::x86::layout::ram_ranges;

use crate::failure::Failure;
use crate::spec::RunSpec;
use crate::spec::numa::{CellSpec, NumaSpec};

mod access;

/// NUMA of a guest on this host.
#[derive(Debug, Default)]
pub struct NumaPlan {
    /// Cells that the guest sees.
    pub cells: Vec<GuestCell>,
    /// Nodes of its RAM.
    pub placement: Placement,
    /// CPUs of the host for each vCPU; empty where none is bound.
    pub vcpu_cpus: Vec<CpuList>,
    /// Line for the user about a choice that was made for it.
    pub said: Option<String>,
    /// Whether the host has several nodes with memory.
    pub has_nodes: bool,
}

impl NumaPlan {
    /// Whether pages of the hugetlb pool must be there before the guest runs: the kernel reserves them for the whole
    /// machine, and a fault on a node that has none would end the process.
    pub fn must_populate(&self, backing: BackingConfig) -> bool {
        let is_strict = |part: &PlacedPart| part.policy.mode == MemoryMode::Bind;
        backing.kind() == BackingKind::Hugetlb && self.placement.parts().iter().any(is_strict)
    }

    /// Whether vCPUs are bound to CPUs.
    pub fn binds_vcpus(&self) -> bool {
        self.vcpu_cpus.iter().any(|cpus| !cpus.is_empty())
    }

    /// The node of pages that are made for the RAM, where it is placed on one alone.
    pub fn only_node(&self) -> Option<NodeId> {
        let mut nodes = self.placement.parts().iter().flat_map(|part| part.policy.nodes.iter().collect::<Vec<_>>());
        let first = nodes.next()?;
        nodes.all(|node| node == first).then_some(first)
    }
}

/// Plans NUMA of that run on the host below `root`; `backing` is the one that was chosen. A guest that `continues` from
/// a snapshot or another run keeps its cells, also where this host does not have its nodes.
///
/// # Errors
/// [`Failure::Usage`] for cells that contradict the run, [`Failure::Host`] for nodes, memory or CPUs that the host does
/// not have.
pub fn plan(spec: &RunSpec, continues: bool, backing: BackingConfig, root: &Path) -> Result<NumaPlan, Failure> {
    let has_nodes = HostNodes::are_several(root);
    if spec.is_native || spec.numa == NumaSpec::Off || (spec.numa.is_auto() && !has_nodes) {
        return Ok(NumaPlan { has_nodes, ..NumaPlan::default() });
    }
    let host =
        HostNodes::read(root).map_err(|error| Failure::Host(format!("cannot read the host's nodes: {error}")))?;
    let pages_to_make = if backing.start_page() == PageSize::Giant1G { spec.giant_pages_made_max } else { 0 };
    let host = Seen { host, backing, pools: HugetlbPools::at(root), pages_to_make, root: root.to_owned() };
    let plan = match &spec.numa {
        NumaSpec::Auto | NumaSpec::Off => host.preferred(spec),
        NumaSpec::Cells(cells) => host.placed(spec, continues, cells)?,
    };
    Ok(NumaPlan { has_nodes, ..plan })
}

/// The host of a plan.
struct Seen {
    host: HostNodes,
    backing: BackingConfig,
    pools: HugetlbPools,
    /// Number of pages of 1 GiB that may be made where the pool has none.
    pages_to_make: u16,
    /// Folder above the host's `/sys`.
    root: PathBuf,
}

impl Seen {
    /// Memory for a new guest on a node: free pages of the pool and those that may be made, or free and reclaimable
    /// memory.
    fn available(&self, node: &NodeSeen) -> Bytes {
        if self.backing.kind() != BackingKind::Hugetlb {
            return node.available();
        }
        let page = self.backing.start_page();
        let pools = self.pools.status(page).map(|pool| pool.nodes).unwrap_or_default();
        let free = pools.iter().filter(|pool| pool.node == u32::from(node.id.0)).map(|pool| pool.free).sum::<u64>();
        page.bytes() * (free + u64::from(self.pages_to_make))
    }

    /// The node with the most room, preferred for all RAM, with its CPUs if they are as many as the vCPUs.
    fn preferred(&self, spec: &RunSpec) -> NumaPlan {
        let cpus = |node: &NodeSeen| self.host.cpus_of(&NodeSet::of(node.id));
        let allowed = self.host.nodes.iter().filter(|node| self.host.allowed.contains(node.id));
        let fits =
            |node: &&NodeSeen| self.available(node) >= spec.memory && cpus(node).len() >= usize::from(spec.vcpus);
        let Some(node) = allowed.filter(fits).max_by_key(|node| (self.available(node), u16::MAX - node.id.0)) else {
            let said = format!(
                "wideleaf: no node of this host has room for the whole guest ({} and {} vCPUs), so the kernel chooses \
                 its nodes: {}",
                spec.memory,
                spec.vcpus,
                self.rooms()
            );
            return NumaPlan { said: Some(said), ..NumaPlan::default() };
        };
        let policy = NodePolicy { mode: MemoryMode::Preferred, nodes: NodeSet::of(node.id) };
        let parts = ram_ranges(spec.memory).into_iter().map(|gpa| PlacedPart { gpa, policy });
        let said = format!(
            "wideleaf: the guest's memory comes from {} as long as that has some ({} available for {}), and its vCPUs \
             run on its CPUs {}; --numa off leaves both to the kernel",
            node.id,
            self.available(node),
            spec.memory,
            cpus(node)
        );
        NumaPlan {
            placement: Placement::of(parts.collect()),
            vcpu_cpus: vec![cpus(node); usize::from(spec.vcpus)],
            said: Some(said),
            ..NumaPlan::default()
        }
    }

    /// Memory of each node, for a message.
    fn rooms(&self) -> String {
        let room = |node: &NodeSeen| format!("{} has {} available of {}", node.id, self.available(node), node.total);
        self.host.nodes.iter().map(room).collect::<Vec<_>>().join(", ")
    }

    fn placed(&self, spec: &RunSpec, continues: bool, cells: &[CellSpec]) -> Result<NumaPlan, Failure> {
        let mut guest = guest_cells(spec, cells)?;
        self.check_page_sizes(spec, cells).map_err(|why| Failure::Usage(format!("cannot use --numa: {why}")))?;
        let checked = cells::check(&guest, spec.memory, self.backing.granule(), u32::from(spec.vcpus));
        checked.map_err(|error| Failure::Usage(format!("cannot use --numa: {error}")))?;
        access::check(cells, &guest).map_err(|why| Failure::Usage(format!("cannot use --numa: {why}")))?;
        let vcpu_cpus = self.vcpu_cpus(spec, cells, &guest);
        let checked = self.check_nodes(cells);
        let nodes: Vec<NodeSet> = guest.iter().map(|cell| self.nodes_of_vcpus(cell, &vcpu_cpus)).collect();
        let of_host = |from: usize, to: usize| self.access(&nodes[from], cells[to].host_nodes?);
        let filled = access::fill(cells, &mut guest, &of_host);
        let plan = NumaPlan { cells: guest, ..NumaPlan::default() };
        match checked {
            Ok(()) => {}
            // A VM that continues keeps its cells. Its former host's nodes may not be here.
            Err(why) if continues => {
                let said = format!(
                    "wideleaf: {why}; the guest keeps its cells, and this host's kernel chooses their nodes and CPUs, \
                     unless --numa names others"
                );
                return Ok(NumaPlan { said: Some(said), ..plan });
            }
            Err(why) => return Err(Failure::Host(format!("cannot use --numa: {why}"))),
        }
        let said = match filled {
            Ok(()) => None,
            Err(why) if continues => Some(format!("wideleaf: {why}; the guest is told none of them when it resets")),
            Err(why) => return Err(Failure::Host(format!("cannot use --numa: {why}"))),
        };
        self.check_memory(cells, &plan.cells)?;
        let ranges = split(&ram_ranges(spec.memory), plan.cells.iter().map(|cell| cell.memory));
        // A guest that continues has the pages that it had.
        let starts_huge = cells.iter().zip(&ranges).filter(|(cell, _)| self.starts_huge(cell) && !continues);
        let starts_huge = starts_huge.flat_map(|(_, ranges)| ranges.iter().copied()).collect();
        let parts = joined(cells.iter().zip(ranges).flat_map(|(cell, ranges)| parts(cell, ranges)));
        let placement = Placement::of(parts).with_huge_start(starts_huge);
        Ok(NumaPlan { placement, vcpu_cpus, said, ..plan })
    }

    /// Whether a cell starts on huge pages where all other RAM starts on base pages.
    fn starts_huge(&self, cell: &CellSpec) -> bool {
        cell.page_size == Some(PageSize::Huge2M) && self.backing.start_page() == PageSize::Base4K
    }

    /// Checks that RAM of this backing can start on the pages that the cells name.
    fn check_page_sizes(&self, spec: &RunSpec, cells: &[CellSpec]) -> Result<(), String> {
        let all = self.backing.start_page();
        for (cell, size) in cells.iter().filter_map(|cell| Some((cell, cell.page_size?))) {
            let CellSpec { id, .. } = cell;
            let why = match (self.backing.kind(), size) {
                (BackingKind::Hugetlb, _) if size != all => {
                    format!("and the hugetlb pool of all RAM has {all} pages; use --host-page {size} for all cells")
                }
                (_, PageSize::Giant1G) if size != all => {
                    "which the hugetlb pool alone has; use --backing hugetlb --host-page 1g for all cells".to_owned()
                }
                (_, PageSize::Base4K) if size != all => {
                    format!("and all RAM starts on {all} pages; omit --host-page, and write page-size={all} at others")
                }
                _ if self.starts_huge(cell) && self.backing.is_reservable() => {
                    "and the policy reserves frames for base pages; omit it, or use another --policy".to_owned()
                }
                _ if self.starts_huge(cell) && spec.policy.make().answers_faults() => {
                    "and the policy decides at each first touch; omit it, or use another --policy".to_owned()
                }
                _ => continue,
            };
            return Err(format!("cell {id} has page-size={size}, {why}"));
        }
        Ok(())
    }

    /// Nodes of the CPUs on which the vCPUs of a cell run; none if one of them may run anywhere.
    fn nodes_of_vcpus(&self, cell: &GuestCell, vcpu_cpus: &[CpuList]) -> NodeSet {
        let cpus = || cell.vcpus.iter().map(|vcpu| &vcpu_cpus[usize::from(vcpu)]);
        if cpus().any(CpuList::is_empty) {
            return NodeSet::EMPTY;
        }
        let runs_there = |node: &&NodeSeen| cpus().any(|cpus| cpus.iter().any(|cpu| node.cpus.contains(cpu)));
        self.host.nodes.iter().filter(runs_there).map(|node| node.id).collect()
    }

    /// Figures of the memory of one node for all CPUs of these nodes, where the kernel tells them.
    fn access(&self, from: &NodeSet, to: NodeSet) -> Option<NodeAccess> {
        let node = to.iter().next().filter(|_| to.len() == 1 && !from.is_empty())?;
        NodeAccess::of(node, &self.root).filter(|access| from.without(&access.initiators).is_empty())
    }

    /// Checks that all nodes and CPUs exist, and that this process may use them.
    fn check_nodes(&self, cells: &[CellSpec]) -> Result<(), String> {
        for cell in cells {
            let nodes = cell.host_nodes.unwrap_or_default();
            let missing = nodes.without(&self.host.with_memory());
            if !missing.is_empty() {
                let there = self.host.with_memory();
                let id = cell.id;
                return Err(format!("cell {id} asks for node {missing}, and this host has memory on node {there}"));
            }
            let forbidden = nodes.without(&self.host.allowed);
            if !forbidden.is_empty() {
                let (id, allowed) = (cell.id, self.host.allowed);
                return Err(format!(
                    "cell {id} asks for node {forbidden}, and the cgroup of this process allows node {allowed}"
                ));
            }
            let absent = |cpu: &u16| !self.host.allowed_cpus.contains(*cpu);
            let absent: CpuList = cell.host_cpus.iter().flat_map(CpuList::iter).filter(absent).collect();
            if !absent.is_empty() {
                let (id, allowed) = (cell.id, &self.host.allowed_cpus);
                return Err(format!("cell {id} asks for CPU {absent}, and this process may run on CPU {allowed}"));
            }
        }
        Ok(())
    }

    /// Checks that the nodes have the memory that strict cells need, for each set of nodes together.
    fn check_memory(&self, cells: &[CellSpec], guest: &[GuestCell]) -> Result<(), Failure> {
        let strict = || {
            let all = cells.iter().zip(guest);
            all.filter(|(cell, _)| cell.policy != MemoryMode::Preferred)
                .filter_map(|(cell, guest)| Some((cell.host_nodes?, cell.id, guest.memory)))
        };
        let mut sets: Vec<NodeSet> = strict().map(|(nodes, ..)| nodes).collect();
        sets.push(sets.iter().fold(NodeSet::EMPTY, |all, nodes| all.union(nodes)));
        for set in sets {
            // All that can only come from these nodes.
            let within = || strict().filter(|(nodes, ..)| nodes.without(&set).is_empty());
            let needed: Bytes = within().map(|(_, _, memory)| memory).sum();
            let nodes = || self.host.nodes.iter().filter(|node| set.contains(node.id));
            let available: Bytes = nodes().map(|node| self.available(node)).sum();
            if needed > available {
                let ids: CpuList = within().map(|(_, id, _)| id).collect();
                let what = self.what_nodes_have(&nodes().collect::<Vec<_>>());
                return Err(Failure::Host(format!(
                    "cannot place cell {ids} on node {set}: {needed} are needed, and {available} are available \
                     ({what}); use other nodes, less memory, or policy=preferred"
                )));
            }
        }
        Ok(())
    }

    fn what_nodes_have(&self, nodes: &[&NodeSeen]) -> String {
        let page = self.backing.start_page();
        let of = |node: &&NodeSeen| match self.backing.kind() {
            BackingKind::Hugetlb => format!("{}: {} in free {page} pages of the pool", node.id, self.available(node)),
            BackingKind::Anon | BackingKind::Memfd => {
                let NodeSeen { id, free, reclaimable, total, .. } = node;
                format!("{id}: {free} free and {reclaimable} to reclaim of {total}")
            }
        };
        nodes.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    /// CPUs for each vCPU: those that its cell names, or those of its nodes.
    fn vcpu_cpus(&self, spec: &RunSpec, cells: &[CellSpec], guest: &[GuestCell]) -> Vec<CpuList> {
        let mut all = vec![CpuList::default(); usize::from(spec.vcpus)];
        for (cell, guest) in cells.iter().zip(guest) {
            let of_nodes = || cell.host_nodes.as_ref().map(|nodes| self.host.cpus_of(nodes));
            let cpus = cell.host_cpus.clone().or_else(of_nodes).unwrap_or_default();
            guest.vcpus.iter().for_each(|vcpu| all[usize::from(vcpu)] = cpus.clone());
        }
        all
    }
}

/// The cells as the guest sees them, with all that is not said.
fn guest_cells(spec: &RunSpec, cells: &[CellSpec]) -> Result<Vec<GuestCell>, Failure> {
    let wrong = |why: String| Failure::Usage(format!("cannot use --numa: {why}"));
    for (number, cell) in cells.iter().enumerate() {
        if usize::from(cell.id) != number {
            let why = match cells[..number].iter().any(|other| other.id == cell.id) {
                true => format!("there are two cells {}: number them from 0", cell.id),
                false => format!("there is a cell {} and no cell {number}: number them from 0", cell.id),
            };
            return Err(wrong(why));
        }
    }
    let is_only = cells.len() == 1;
    let guest = cells.iter().map(|cell| {
        let (all_cpus, all_memory) = ((0..u16::from(spec.vcpus)).collect(), spec.memory);
        let vcpus = cell.cpus.clone().unwrap_or(if is_only { all_cpus } else { CpuList::default() });
        let memory = cell.memory.or(is_only.then_some(all_memory)).unwrap_or(Bytes::ZERO);
        Ok(GuestCell { vcpus, memory, distances: distances(cells, cell).map_err(wrong)?, access: Vec::new() })
    });
    guest.collect()
}

/// Distances of a cell to all: given for it, or for the way back, or the usual ones.
fn distances(cells: &[CellSpec], from: &CellSpec) -> Result<Vec<u8>, String> {
    if let Some((to, _)) = from.distances.iter().find(|(to, _)| usize::from(*to) >= cells.len()) {
        return Err(format!("cell {} has a distance to cell {to}, and the last cell is {}", from.id, cells.len() - 1));
    }
    let given = |from: &CellSpec, to: u16| from.distances.iter().find(|(other, _)| *other == to).map(|(_, far)| *far);
    let usual = |to: &CellSpec| if to.id == from.id { DISTANCE_OWN } else { DISTANCE_OTHER };
    let distance = |to: &CellSpec| given(from, to.id).or_else(|| given(to, from.id)).unwrap_or_else(|| usual(to));
    Ok(cells.iter().map(distance).collect())
}

/// Parts of RAM with a cell's memory policy.
fn parts(cell: &CellSpec, ranges: Vec<GpaRange>) -> Vec<PlacedPart> {
    let policy = cell.host_nodes.map(|nodes| NodePolicy { mode: cell.policy, nodes });
    policy.map_or(Vec::new(), |policy| ranges.into_iter().map(|gpa| PlacedPart { gpa, policy }).collect())
}

/// The parts, with neighbours of one policy as one.
fn joined(parts: impl Iterator<Item = PlacedPart>) -> Vec<PlacedPart> {
    let mut all: Vec<PlacedPart> = Vec::new();
    for part in parts {
        match all.last_mut().filter(|last| last.policy == part.policy && last.gpa.end() == part.gpa.start()) {
            Some(last) => {
                let both = GpaRange::new(last.gpa.start(), last.gpa.bytes() + part.gpa.bytes());
                last.gpa = both.expect("RAM does not reach the end of 64 bits");
            }
            None => all.push(part),
        }
    }
    all
}

/// Checks that the cells of a VM that continues are those that it has: its guest knows them.
///
/// # Errors
/// [`Failure::Usage`] if vCPUs, memory or distances differ.
pub fn check_same_cells(saved: &NumaSpec, asked: &NumaSpec) -> Result<(), Failure> {
    let seen = |numa: &NumaSpec| {
        let of = |cell: &CellSpec| (cell.id, cell.cpus.clone(), cell.memory, cell.distances.clone());
        numa.cells().iter().map(of).collect::<Vec<_>>()
    };
    if seen(saved) == seen(asked) {
        return Ok(());
    }
    let count = saved.cells().len();
    Err(Failure::Usage(format!(
        "cannot give the VM other cells than it has ({count}): repeat their cpus=, memory= and distances=, and change \
         host-nodes=, policy= and host-cpus= alone"
    )))
}

#[cfg(test)]
mod tests;
