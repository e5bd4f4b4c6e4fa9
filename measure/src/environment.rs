//! The machine of a measurement: without it a number cannot be interpreted. Reads files of `/proc` and `/sys`, and
//! changes nothing.

use std::{fmt, fs};

use serde::{Deserialize, Serialize};

/// Environment that is recorded with every result.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Environment {
    /// Release of the kernel.
    pub kernel: String,
    /// Model of the CPU.
    pub cpu: String,
    /// Number of processors online.
    pub cpus: u32,
    /// Physical memory in KiB.
    pub memory_total_kib: u64,
    /// Free and reclaimable memory when the run began, in KiB.
    pub memory_available_kib: u64,
    /// Content of `transparent_hugepage/enabled`.
    pub thp_enabled: String,
    /// Content of `transparent_hugepage/shmem_enabled`.
    pub thp_shmem_enabled: String,
    /// Whether this machine is itself a VM: then even a native process walks two tables in hardware.
    pub is_virtual: bool,
    /// Load average of the last minute when the run began.
    pub load_1m: f64,
    /// Time stolen by the hypervisor during the run, over all CPUs, in milliseconds.
    pub steal_ms: u64,
    /// Version of wideleaf.
    pub wideleaf: String,
}

/// A kernel file as one line; empty if it cannot be read.
pub fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn field<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':')).map_or("", str::trim)
}

fn kib(text: &str) -> u64 {
    text.strip_suffix(" kB").and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// The word in brackets, as in `always [madvise] never`.
pub fn chosen(setting: &str) -> String {
    setting.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']')).unwrap_or(setting).to_owned()
}

impl Environment {
    /// Reads the environment; what cannot be read stays empty.
    pub fn capture() -> Environment {
        let (cpuinfo, meminfo) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        Environment {
            kernel: read("/proc/sys/kernel/osrelease"),
            cpu: field(&cpuinfo, "model name").to_owned(),
            cpus: cpuinfo.lines().filter(|line| line.starts_with("processor")).count() as u32,
            memory_total_kib: kib(field(&meminfo, "MemTotal")),
            memory_available_kib: kib(field(&meminfo, "MemAvailable")),
            thp_enabled: chosen(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
            thp_shmem_enabled: chosen(&read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            is_virtual: field(&cpuinfo, "flags").split_whitespace().any(|flag| flag == "hypervisor"),
            load_1m: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
            steal_ms: 0,
            wideleaf: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

impl fmt::Display for Environment {
    /// CPUs, kernel and load in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = if self.cpu.is_empty() { "an unknown CPU" } else { &self.cpu };
        let Environment { cpus, kernel, load_1m, .. } = self;
        write!(f, "{cpus} x {cpu}, kernel {kernel}, load {load_1m} at the start")
    }
}

/// Free and reclaimable memory now, in KiB.
pub fn memory_available_kib() -> u64 {
    kib(field(&read("/proc/meminfo"), "MemAvailable"))
}

/// Free swap space now, in KiB.
pub fn swap_free_kib() -> u64 {
    kib(field(&read("/proc/meminfo"), "SwapFree"))
}

/// Milliseconds stolen from all CPUs since boot (`/proc/stat`, eighth number; proc(5)). Its unit is `USER_HZ`,
/// which is 100 on every x86 kernel.
pub fn stolen_ms() -> u64 {
    let stat = read("/proc/stat");
    let jiffies =
        stat.lines().next().and_then(|line| line.split_whitespace().nth(8)).and_then(|n| n.parse::<u64>().ok());
    jiffies.unwrap_or(0) * 10
}
