//! Measures how fast warm memory is copied on this machine, and touches free memory before a measurement so that both
//! of its arms find it equally fast. Both allocate ordinary memory and give it back; guests are not touched.

use std::sync::Arc;

use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

use crate::backing::{BackingConfig, BackingKind};
use crate::host::linux::LinuxHost;
use crate::host::{Advice, Host};
use crate::region::{GuestRam, RamError};
use crate::sys;

/// Speed of copying warm memory on this machine, in bytes per second, for comparison with that of a promotion.
/// Allocates twice `bytes` and frees it.
pub fn warm_copy_bytes_per_second(bytes: Bytes) -> f64 {
    const ROUNDS: u32 = 3;
    bytes.get() as f64 / sys::memcpy::fastest_copy(bytes, ROUNDS).as_secs_f64()
}

/// Makes the machine's free memory fast again, by touching `bytes` of it and giving them back. The first touch of a
/// free frame that a hypervisor had taken back costs ten times as much; without this, the first of two measurements
/// would pay for both.
///
/// # Errors
/// [`RamError`] if there is not that much memory.
pub fn warm_host_memory(bytes: Bytes) -> Result<(), RamError> {
    hold_host_memory(bytes).map(drop)
}

/// Touches `bytes` of the machine's free memory and keeps them until the result is dropped. They are fast for 2 s from
/// then on: a Linux guest reports free blocks to its hypervisor every 2 s (`mm/page_reporting.c`).
///
/// # Errors
/// The same as for [`warm_host_memory`].
pub fn hold_host_memory(bytes: Bytes) -> Result<Arc<GuestRam>, RamError> {
    let bytes = bytes.checked_round_up(PageSize::Huge2M).unwrap_or(bytes);
    let range = GpaRange::new(Gpa::new(0), bytes).ok_or(RamError::EmptyLayout)?;
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages");
    let ram = GuestRam::map(&[range], backing)?;
    let advise = |source| RamError::Advise { size: PageSize::Huge2M, source };
    LinuxHost::open().and_then(|host| host.advise(ram.base(), bytes, Advice::PopulateWrite)).map_err(advise)?;
    Ok(ram)
}
