//! The machine that produced the results, read once at the start. What cannot be read stays empty, and nothing is
//! changed.

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
    if reports_free_pages(Path::new("/sys/bus/virtio/devices")) {
        not_controlled.push("free memory that the hypervisor takes back within seconds: its next touch is slow".into());
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

/// Where two environments differ in build, machine or settings that decide about results, in a few words each.
pub(super) fn differences(there: &Environment, here: &Environment) -> Vec<String> {
    let of = |environment: &Environment| {
        let Environment { wideleaf, cpu, microcode, cpus, numa_nodes, memory_total_mib, kernel, .. } = environment;
        let Environment { paging, is_virtual, has_pmu, thp, khugepaged, governor, .. } = environment;
        [
            ("build", wideleaf.clone()),
            ("CPU", cpu.clone()),
            ("microcode", microcode.clone()),
            ("CPUs", cpus.to_string()),
            ("NUMA nodes", numa_nodes.to_string()),
            // From boot to boot, a kernel keeps a few KiB more or less for itself.
            ("memory in GiB", (memory_total_mib >> 10).to_string()),
            ("kernel", kernel.clone()),
            ("paging", paging.clone()),
            ("virtual machine", is_virtual.to_string()),
            ("PMU", has_pmu.to_string()),
            ("THP", thp.join(", ")),
            ("khugepaged, ms and pages", khugepaged.map(|of| of.to_string()).join(", ")),
            ("governor", governor.clone()),
        ]
    };
    let shown = |value: String| if value.is_empty() { "unknown".to_owned() } else { value };
    let pairs = of(there).into_iter().zip(of(here)).filter(|(there, here)| there != here);
    pairs.map(|((what, there), (_, here))| format!("{what}: {} there, {} here", shown(there), shown(here))).collect()
}

fn microcode(cpuinfo: &str) -> String {
    let value = cpuinfo.lines().find_map(|line| line.strip_prefix("microcode")?.split_once(':'));
    value.map_or_else(String::new, |(_, revision)| revision.trim().to_owned())
}

/// Whether this machine reports its free pages to its hypervisor, by features of virtio devices: a balloon (device 5)
/// with `VIRTIO_BALLOON_F_PAGE_REPORTING` (bit 5; virtio 1.2, 5.5.3). The file `features` has one digit per bit.
fn reports_free_pages(devices: &Path) -> bool {
    const BALLOON: &str = "0x0005";
    const REPORTING: usize = 5;
    fs::read_dir(devices).into_iter().flatten().flatten().any(|device| {
        let of = |file: &str| fs::read_to_string(device.path().join(file)).unwrap_or_default();
        of("device").trim() == BALLOON && of("features").as_bytes().get(REPORTING) == Some(&b'1')
    })
}

/// Number of folders `node0`, `node1`, … (Documentation/ABI/stable/sysfs-devices-node).
fn numa_nodes(folder: &Path) -> u32 {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_of_build_machine_or_setting_is_named_and_that_of_load_is_not() {
        let there = Environment { wideleaf: "1.0 (a)".into(), governor: "performance".into(), ..capture() };
        let (load_1m, memory_available_mib) = (99.0, there.memory_available_mib + 9);
        let loaded = Environment { load_1m, memory_available_mib, ..there.clone() };
        assert_eq!(differences(&there, &loaded), [""; 0]);
        let here = Environment { wideleaf: "1.0 (b)".into(), governor: String::new(), ..there.clone() };
        let named = differences(&there, &here);
        assert_eq!(named, ["build: 1.0 (a) there, 1.0 (b) here", "governor: performance there, unknown here"]);
        let change: [fn(&mut Environment); 12] = [
            |other| other.cpu.push('x'),
            |other| other.microcode.push('x'),
            |other| other.cpus += 1,
            |other| other.numa_nodes += 1,
            |other| other.memory_total_mib += 1024,
            |other| other.kernel.push('x'),
            |other| other.paging.push('x'),
            |other| other.is_virtual = !other.is_virtual,
            |other| other.has_pmu = !other.has_pmu,
            |other| other.thp[2].push('x'),
            |other| other.khugepaged[0] += 1,
            |other| other.khugepaged[1] += 1,
        ];
        for change in change {
            let mut other = there.clone();
            change(&mut other);
            assert_eq!(differences(&there, &other).len(), 1, "{other:?}");
        }
    }

    #[test]
    fn only_a_balloon_with_the_feature_reports_free_pages() {
        let folder = tempfile::tempdir().expect("a folder");
        let add = |name: &str, device: &str, features: &str| {
            let device_folder = folder.path().join(name);
            fs::create_dir(&device_folder).expect("new");
            fs::write(device_folder.join("device"), format!("{device}\n")).expect("writable");
            fs::write(device_folder.join("features"), format!("{features}\n")).expect("writable");
        };
        assert!(!reports_free_pages(&folder.path().join("none")));
        add("virtio0", "0x0001", "0000010000");
        add("virtio1", "0x0005", "0110000000");
        assert!(!reports_free_pages(folder.path()));
        add("virtio2", "0x0005", "0110010000");
        assert!(reports_free_pages(folder.path()));
    }
}
