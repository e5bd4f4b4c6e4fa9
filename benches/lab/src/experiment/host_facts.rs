//! The facts about this host that an experiment is made for. They are read, and QEMU is asked for its version; nothing
//! is changed.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::experiment::jobs;
use wideleaf_experiments::definition::{HostFacts, NodeFacts};
use wideleaf_experiments::peers::QEMU;
use wideleaf_measure::environment::Environment;
use wideleaf_memory::numa::host::HostNodes;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::{NodeSet, PageSize};
use wideleaf_run::guest;

/// Minimum available memory of a host on which a page of 1 GiB is made for a run of 1 GiB, in MiB. The kernel moves
/// what is in the page's way to the rest.
const MAKING_MIB: u64 = 4096;

/// Reads the facts about this host.
pub(super) fn read(wants_long_runs: bool) -> HostFacts {
    let environment = Environment::capture();
    let is_root = nix::unistd::geteuid().is_root();
    let qemu = Command::new(QEMU).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let pool_1g = HugetlbPools::of_this_machine().status(PageSize::Giant1G).ok();
    let memory_available_mib = environment.memory_available_kib / 1024;
    HostFacts {
        cpus: environment.cpus,
        memory_available_mib,
        why_no_kvm: guest::why_no_kvm(),
        paging: guest::paging_name().unwrap_or("none").to_owned(),
        has_daemon: jobs::together::program().is_some(),
        has_qemu: qemu.is_ok_and(|status| status.success()),
        why_no_pool_2m: (!is_root).then(|| "only root may make the hugetlb pool larger".to_owned()),
        can_make_1g: is_root && pool_1g.is_some() && memory_available_mib >= MAKING_MIB,
        free_pages_1g: pool_1g.map_or(0, |pool| pool.available()),
        is_root,
        wants_long_runs,
        nodes: nodes(Path::new("/")),
    }
}

/// NUMA nodes with memory that this process may use; none where the kernel tells none.
fn nodes(root: &Path) -> Vec<NodeFacts> {
    let host = HostNodes::read(root).unwrap_or_default();
    let usable = host.with_memory().iter().filter(|node| host.allowed.contains(*node)).collect::<Vec<_>>();
    let facts = |id| {
        let set = NodeSet::of(id);
        let memory_available_mib = host.available(&set).get() >> 20;
        NodeFacts { id: id.0, cpus: host.cpus_of(&set).to_string(), memory_available_mib }
    };
    usable.into_iter().map(facts).collect()
}
