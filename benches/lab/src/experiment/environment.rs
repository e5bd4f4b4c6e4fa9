//! The machine that produced the results, read once at the start.

use std::fs;
use std::path::Path;

use wideleaf::tlbcost::counters::{LinuxPmu, Pmu as _, describe, select};
use wideleaf_experiments::results::Environment;
use wideleaf_measure::environment::{chosen, read};
use wideleaf_memory::walk_cost::CpuModel;
use wideleaf_run::guest;

/// Reads the environment; what cannot be read stays empty.
pub(super) fn capture() -> Environment {
    let base = wideleaf_measure::environment::Environment::capture();
    let thp = |file: &str| chosen(&read(&format!("/sys/kernel/mm/transparent_hugepage/{file}")));
    let khugepaged = |file: &str| {
        read(&format!("/sys/kernel/mm/transparent_hugepage/khugepaged/{file}")).parse().unwrap_or_default()
    };
    let governor = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    let mut not_controlled = vec!["other load on the machine and on its host".to_owned()];
    if governor != "performance" {
        not_controlled.push("CPU frequency".into());
    }
    if base.is_virtual {
        not_controlled.push("page sizes of the hypervisor below".into());
    }
    let revision = env!("WIDELEAF_REVISION");
    Environment {
        wideleaf: if revision.is_empty() { base.wideleaf } else { format!("{} ({revision})", base.wideleaf) },
        kernel: base.kernel,
        cpu: base.cpu,
        microcode: microcode(&read("/proc/cpuinfo")),
        cpus: base.cpus,
        numa_nodes: numa_nodes(Path::new("/sys/devices/system/node")),
        memory_total_mib: base.memory_total_kib / 1024,
        memory_available_mib: base.memory_available_kib / 1024,
        paging: guest::paging_name().unwrap_or("none").to_owned(),
        is_virtual: base.is_virtual,
        has_pmu: LinuxPmu.open_cycles().is_ok(),
        walk_events: describe(&select(&LinuxPmu, &CpuModel::read(Path::new("/")))),
        thp: [thp("enabled"), thp("shmem_enabled"), thp("defrag")],
        khugepaged: [khugepaged("scan_sleep_millisecs"), khugepaged("pages_to_scan")],
        governor,
        load_1m: base.load_1m,
        not_controlled,
    }
}

fn microcode(cpuinfo: &str) -> String {
    let value = cpuinfo.lines().find_map(|line| line.strip_prefix("microcode")?.split_once(':'));
    value.map_or_else(String::new, |(_, revision)| revision.trim().to_owned())
}

/// Number of folders `node0`, `node1`, … (Documentation/ABI/stable/sysfs-devices-node).
fn numa_nodes(folder: &Path) -> u32 {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count() as u32
}
