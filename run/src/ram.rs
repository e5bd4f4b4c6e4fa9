//! RAM of a run: its size and its backing are checked, then it is mapped and faulted in.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::pool::{HugetlbPools, PoolError};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, GpaRange, PageSize};
use wideleaf_vmm::{HostLimits, config};

use crate::environment::memory_available_kib;
use crate::failure::Failure;
use crate::front_end::{FrontEnd, Work};
use crate::interrupts::Interrupts;
use crate::spec::{Fallback, RunSpec};

/// Runs before the pool is checked: a number of missing pages is no help if the RAM would end inside a page.
pub fn check_size(spec: &RunSpec) -> Result<(), Failure> {
    let pages = [(spec.backing.granule(), "host")];
    config::check_memory(spec.memory, &pages, &HostLimits::read(Path::new("/proc")))?;
    Ok(())
}

/// Backing of the run, and the reason why it is not the requested one, if so.
pub fn choose_backing(spec: &RunSpec) -> Result<(BackingConfig, Option<String>), Failure> {
    let backing = spec.backing;
    if backing.kind() != BackingKind::Hugetlb {
        return Ok((backing, None));
    }
    let Err(error) = HugetlbPools::of_this_machine().check(backing.start_page(), spec.memory) else {
        return Ok((backing, None));
    };
    if spec.fallback == Fallback::Fail {
        let remedy = if matches!(error, PoolError::Short(_)) { ", or use --fallback thp" } else { "" };
        return Err(Failure::Host(format!("{error}{remedy}")));
    }
    let thp = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM can start huge");
    Ok((thp, Some(format!("anonymous RAM with transparent huge pages, because: {error}"))))
}

/// Maps RAM of that layout.
pub fn map(layout: &[GpaRange], backing: BackingConfig) -> Result<Arc<GuestRam>, Failure> {
    GuestRam::map(layout, backing).map_err(|error| match error {
        wideleaf_memory::region::RamError::Misaligned { .. } => Failure::Usage(format!("--memory: {error}")),
        other => Failure::Host(other.to_string()),
    })
}

/// Checks that the host has this amount of memory available. If it has not, prefaulting does not fail: the kernel
/// kills processes, and not only this one. A pool already has its pages.
pub fn check_available(memory: Bytes, backing: BackingConfig) -> Result<(), Failure> {
    let available = kib(memory_available_kib());
    if backing.kind() == BackingKind::Hugetlb || memory <= available {
        return Ok(());
    }
    let remedy = "use less --memory, or omit --prefault";
    Err(Failure::Host(format!("cannot prefault {memory} of guest RAM: the host has {available} available; {remedy}")))
}

/// Faults in all of it, and shows the progress.
pub fn prefault_all(
    host: &LinuxHost,
    ram: &GuestRam,
    front: &dyn FrontEnd,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let progress = front.progress(Work::Prefault(ram.bytes()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_chunk = |bytes: Bytes| {
        progress.add(bytes.get());
        if interrupts.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let result = prefault(host, ram.ranges(), threads, &on_chunk);
    progress.finish();
    result.map_err(|error| Failure::Host(format!("cannot prefault {} of guest RAM: {error}", ram.bytes())))?;
    interrupts.check()
}
