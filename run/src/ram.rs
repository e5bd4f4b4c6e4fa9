//! RAM of a run: its size and its backing are checked, then it is mapped and faulted in. A pool of
//! 1 GiB pages grows by at most the pages that the run may make.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::first_touch::{GiantSource, place_before_loading};
use wideleaf_memory::giant_maker::GiantMaker;
use wideleaf_memory::pool::{HugetlbPools, NewPages, PoolError};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, GpaRange, PageSize};
use wideleaf_vmm::{HostLimits, config};

use crate::environment::{memory_available_kib, swap_free_kib};
use crate::failure::Failure;
use crate::front_end::{FrontEnd, Work};
use crate::interrupts::Interrupts;
use crate::numa::NumaPlan;
use crate::spec::{Fallback, RunSpec};

/// Runs before the pool is checked: a number of missing pages is no help if the RAM would end inside a page.
pub fn check_size(spec: &RunSpec) -> Result<(), Failure> {
    let pages = [(spec.backing.granule(), "host")];
    config::check_memory(spec.memory, &pages, &HostLimits::read(Path::new("/proc")))?;
    Ok(())
}

/// Backing of a run.
pub struct ChosenBacking {
    /// Backing of its RAM.
    pub backing: BackingConfig,
    /// Reason why it is not the requested one, if so.
    pub fallback: Option<String>,
    /// Number of pages of 1 GiB that the pool lacks and that are to be made.
    pub pages_to_make: u64,
}

/// Chooses the backing of the run.
pub fn choose_backing(spec: &RunSpec) -> Result<ChosenBacking, Failure> {
    let backing = spec.backing;
    let as_asked = |pages_to_make| Ok(ChosenBacking { backing, fallback: None, pages_to_make });
    if backing.kind() != BackingKind::Hugetlb {
        return as_asked(0);
    }
    let Err(error) = HugetlbPools::of_this_machine().check(backing.start_page(), spec.memory) else {
        return as_asked(0);
    };
    if let PoolError::Short(shortage) = &error
        && backing.start_page() == PageSize::Giant1G
        && shortage.short() <= u64::from(spec.giant_pages_made_max)
    {
        return as_asked(shortage.short());
    }
    if spec.fallback == Fallback::Fail {
        let remedy = if matches!(error, PoolError::Short(_)) { ", or use --fallback thp" } else { "" };
        return Err(Failure::Host(format!("{error}{remedy}")));
    }
    let thp = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM can start huge");
    let fallback = Some(format!("anonymous RAM with transparent huge pages, because: {error}"));
    Ok(ChosenBacking { backing: thp, fallback, pages_to_make: 0 })
}

/// Maps RAM of that layout on its nodes, with `pages_to_make` new pages of the backing's pool. The mapping reserves
/// them.
pub fn map(
    layout: &[GpaRange],
    backing: BackingConfig,
    pages_to_make: u64,
    numa: &NumaPlan,
) -> Result<Arc<GuestRam>, Failure> {
    let placement = numa.placement.clone();
    if pages_to_make > 0 {
        let node = numa.only_node().map(|node| u32::from(node.0));
        let new = NewPages { size: backing.start_page(), pages: pages_to_make, node };
        let made =
            HugetlbPools::of_this_machine().with_new_pages(&new, || GuestRam::map_on(layout, backing, placement));
        return made.map_err(|error| Failure::Host(error.to_string()));
    }
    GuestRam::map_on(layout, backing, placement).map_err(|error| match error {
        wideleaf_memory::region::RamError::Misaligned { .. } => Failure::Usage(format!("cannot use --memory: {error}")),
        other => Failure::Host(other.to_string()),
    })
}

/// Puts the first giant of a guest's RAM on a page of 1 GiB, where the policy decides at the first touch and wants such
/// pages: the loader of the image touches that giant, before any fault is answered. Returns why it is not there.
pub fn giant_before_loading(
    spec: &RunSpec,
    ram: &GuestRam,
    maker: Option<Arc<dyn GiantMaker>>,
) -> Result<Option<String>, Failure> {
    let policy = spec.policy.make();
    let wants_giants = policy.decides_at_first_touch() && policy.largest_page() == PageSize::Giant1G;
    let Some(giant) = ram.giants().next().filter(|_| wants_giants && ram.backing().kind() == BackingKind::Anon) else {
        return Ok(None);
    };
    let host = LinuxHost::open().map_err(|error| Failure::Host(error.to_string()))?;
    let source = GiantSource { pools: HugetlbPools::of_this_machine(), maker };
    Ok(place_before_loading(&host, ram, giant, &source).err())
}

/// Memory of the host that is available without swapping.
pub fn available() -> Bytes {
    kib(memory_available_kib())
}

/// Memory that RAM of this kind can take before the kernel kills processes, swap included; `None` for a pool, which
/// already has its pages.
pub fn takeable(backing: BackingConfig) -> Option<Bytes> {
    (backing.kind() != BackingKind::Hugetlb).then(|| available() + kib(swap_free_kib()))
}

/// Checks that the host has this amount of memory available. If it has not, prefaulting does not fail: the kernel
/// kills processes, and not only this one. A pool already has its pages.
pub fn check_available(memory: Bytes, backing: BackingConfig) -> Result<(), Failure> {
    let available = available();
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
