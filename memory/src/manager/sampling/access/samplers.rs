//! Starts the kernel's means to see which windows of a VM are used: an exact one where there is one for its backing, or
//! else the kernel's monitor.

use std::path::Path;
use std::sync::Arc;

use wideleaf_policies::PageSize;

use crate::backing::BackingKind;
use crate::detached::WindowMover;
use crate::kernel::Kernel;
use crate::region::GuestRam;
use crate::sensors::access::{AccessConfig, AccessSampler, AccessSensor};
use crate::sensors::damon::DamonSensor;
use crate::sensors::minor_faults::MinorFaultSensor;

/// The sensor that sees every touch of what it samples; its kind depends on the backing.
pub(super) fn exact_sampler(
    host: &Arc<dyn Kernel>,
    ram: Arc<GuestRam>,
) -> Result<(Box<dyn AccessSampler>, Option<WindowMover>), String> {
    match ram.backing().kind() {
        BackingKind::Anon => {
            let mover = WindowMover::start(host.clone(), ram).map_err(|error| error.to_string())?;
            let sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
            Ok((Box::new(sensor), Some(mover)))
        }
        BackingKind::Memfd | BackingKind::Hugetlb => {
            let ranges = ram.ranges().to_vec();
            let faults = host.open_minor_faults(ram).map_err(|error| error.to_string())?;
            let sensor = MinorFaultSensor::start_on(faults, ranges, AccessConfig::default());
            let sensor = sensor.map_err(|error| error.to_string())?;
            Ok((Box::new(sensor), None))
        }
    }
}

/// The kernel's own monitor, which may miss touches, for VMs without an exact sensor.
pub(super) fn kernel_sampler(ram: &GuestRam) -> Result<Box<dyn AccessSampler>, String> {
    if ram.backing().fixed_page().is_some_and(|page| page > PageSize::Huge2M) {
        return Err("the kernel has one accessed bit for each page of 1 GiB".into());
    }
    let sensor = DamonSensor::start(Path::new("/"), ram.ranges()).map_err(|error| error.to_string())?;
    Ok(Box::new(sensor))
}
