//! Capabilities of this host: a table in which each entry is probed, and each missing one has its reason and the
//! consequence. The probes ask the kernel and do not compare its version.

use std::path::{Path, PathBuf};

use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize, WindowIndex};

use crate::backing::{BackingConfig, BackingKind};
use crate::host::{Advice, Host, linux::LinuxHost};
use crate::pool::HugetlbPools;
use crate::region::GuestRam;
use crate::sys::userfaultfd::{Mode, Userfaultfd};
use crate::thp_settings::{NEVER, THP, chosen_setting, thp_enabled};

mod newer_kernels;
mod numa;

/// One row of the table.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Capability {
    /// Short name of the capability.
    pub name: &'static str,
    /// Whether this host has it.
    pub is_available: bool,
    /// Result of the probe, or the reason of its failure.
    pub detail: String,
    /// Consequence of a missing capability.
    pub without: &'static str,
}

impl Capability {
    /// Makes a row from the result of a probe.
    pub fn new(name: &'static str, without: &'static str, found: Result<String, String>) -> Capability {
        let is_available = found.is_ok();
        Capability { name, is_available, detail: found.unwrap_or_else(|why| why), without }
    }
}

/// Probes the host's side. `root` contains `sys/` and `proc/`, for the entries that are files; system calls are tried
/// on a window of memory that is unmapped again.
pub fn probe(root: &Path) -> Vec<Capability> {
    let row = Capability::new;
    let thp = |file: &str| chosen_setting(&root.join(THP).join(file));
    let mut rows = vec![
        row("collapse", "guest RAM keeps the page size it started with", probe_collapse(BackingKind::Anon)),
        row("collapse_memfd", "memfd RAM keeps its page size; use --backing anon", probe_collapse(BackingKind::Memfd)),
        row("pagemap_scan", "no outcome can be checked: the manager does not act", probe_scan()),
        row(
            "thp_enabled",
            "--host-page 2m starts with base pages; collapse works all the same",
            match thp_enabled(root) {
                Ok(setting) if setting == NEVER => Err("enabled=never: no huge page at the fault".into()),
                Ok(setting) => Ok(format!("enabled={setting}")),
                Err(why) => Err(why),
            },
        ),
        row(
            "thp_shmem",
            "memfd RAM starts with base pages; collapse works all the same",
            match thp("shmem_enabled") {
                Ok(setting) if setting == "never" || setting == "deny" => Err(format!("shmem_enabled={setting}")),
                Ok(setting) => Ok(format!("shmem_enabled={setting}")),
                Err(why) => Err(why),
            },
        ),
        row(
            "hugetlb_2m",
            "--backing hugetlb --host-page 2m is refused, or --fallback thp",
            pool(root, PageSize::Huge2M),
        ),
        row(
            "hugetlb_1g",
            "--backing hugetlb --host-page 1g is refused, or --fallback thp",
            pool(root, PageSize::Giant1G),
        ),
        row(
            "userfaultfd",
            "no first-touch policy, no access sensor, no swap",
            crate::first_touch::probe().map(str::to_owned).map_err(|error| error.to_string()),
        ),
        row(
            "uffd_move",
            "no access sensor for anonymous RAM, promotion by collapse alone, no zero page is released",
            crate::detached::probe()
                .map(|took| format!("moving a window away and back took {:.2} ms", took.as_secs_f64() * 1e3)),
        ),
        row("uffd_minor", "no access sensor for memfd and hugetlb RAM", probe_minor_faults()),
        row("reserved_frames", "--policy reservation copies, or does not run", crate::reserved_frames::probe()),
        row("page_idle", "no access heat from idle page tracking", exists(root, "sys/kernel/mm/page_idle/bitmap")),
        row(
            "damon",
            "no access heat of attached guests, nor where userfaultfd is not permitted",
            crate::sensors::damon::probe(root).map_err(|error| error.to_string()),
        ),
    ];
    rows.extend(newer_kernels::rows(root));
    rows.extend(numa::rows(root));
    rows
}

fn exists(root: &Path, file: &str) -> Result<String, String> {
    let path: PathBuf = root.join(file);
    if path.exists() { Ok(format!("/{file}")) } else { Err(format!("/{file} does not exist")) }
}

fn pool(root: &Path, size: PageSize) -> Result<String, String> {
    let pool = HugetlbPools::at(root).status(size).map_err(|error| error.to_string())?;
    let text = format!("{} pages can be mapped ({} in the pool, {} free)", pool.available(), pool.total, pool.free);
    if pool.available() > 0 { Ok(text) } else { Err(text) }
}

/// One window of memory, populated with base pages.
fn one_window(kind: BackingKind) -> Result<std::sync::Arc<GuestRam>, String> {
    let backing = BackingConfig::new(kind, PageSize::Base4K).map_err(|error| error.to_string())?;
    let range = GpaRange::new(Gpa::new(0), mib(2)).expect("two mebibytes fit");
    let ram = GuestRam::map(&[range], backing).map_err(|error| error.to_string())?;
    LinuxHost::open()
        .and_then(|host| host.advise(ram.base(), ram.bytes(), Advice::PopulateWrite))
        .map_err(|error| error.to_string())?;
    Ok(ram)
}

fn probe_collapse(kind: BackingKind) -> Result<String, String> {
    let ram = one_window(kind)?;
    let host = LinuxHost::open().map_err(|error| error.to_string())?;
    let window = WindowIndex::new(0);
    let collapse = crate::actuators::collapse::collapse_window(&host, ram.ranges()[0], window);
    match collapse.result {
        wideleaf_policies::OutcomeResult::Done => {
            Ok(format!("MADV_COLLAPSE of one window took {:.2} ms", collapse.unavailable.as_secs_f64() * 1e3))
        }
        other => Err(format!("MADV_COLLAPSE of one window: {other}")),
    }
}

/// Unmaps a window and maps it again from the file.
fn probe_minor_faults() -> Result<String, String> {
    let text = |error: std::io::Error| error.to_string();
    let ram = one_window(BackingKind::Memfd)?;
    let uffd = Userfaultfd::open_for_minor_faults().map_err(|error| error.to_string())?;
    uffd.register(ram.base(), ram.bytes(), Mode::Minor).map_err(text)?;
    ram.window(WindowIndex::new(0)).discard().map_err(text)?;
    match uffd.map_file_pages(ram.base(), ram.bytes()).map_err(text)? {
        bytes if bytes == ram.bytes() => Ok("UFFDIO_CONTINUE".into()),
        bytes => Err(format!("UFFDIO_CONTINUE mapped {bytes} of {}", ram.bytes())),
    }
}

fn probe_scan() -> Result<String, String> {
    let ram = one_window(BackingKind::Anon)?;
    let host = LinuxHost::open().map_err(|error| error.to_string())?;
    let mut runs = Vec::new();
    host.scan(ram.base(), ram.bytes(), &mut runs).map_err(|error| error.to_string())?;
    let present: wideleaf_policies::Bytes = runs.iter().map(|run| run.bytes).sum();
    if present == ram.bytes() { Ok("PAGEMAP_SCAN".into()) } else { Err(format!("saw {present} of {}", ram.bytes())) }
}
