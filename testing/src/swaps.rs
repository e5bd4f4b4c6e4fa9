//! Whether this kernel can swap windows, found out with a window of the test's own; for tests that skip where it
//! cannot.

use std::ops::ControlFlow;
use std::sync::Arc;

use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::WindowMover;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, OutcomeResult, PageSize, Refusal, WindowIndex};

use crate::{Need, is_there};

/// Result of a swap of one window of base pages, outside any guest.
fn swap_one() -> Result<OutcomeResult, String> {
    let range = GpaRange::new(Gpa::new(0), mib(2)).ok_or("no range")?;
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).map_err(|error| error.to_string())?;
    let ram = GuestRam::map(&[range], backing).map_err(|error| error.to_string())?;
    let host = Arc::new(LinuxHost::open().map_err(|error| error.to_string())?);
    let is_going_on = |_| ControlFlow::Continue(());
    prefault(host.as_ref(), ram.ranges(), 1, &is_going_on).map_err(|error| error.to_string())?;
    let mover = WindowMover::start(host.clone(), ram).map_err(|error| error.to_string())?;
    Ok(Swapper::new(mover.aside().clone()).swap(host.as_ref(), WindowIndex::new(0)).result)
}

/// Whether windows can be swapped on this kernel.
pub fn can_swap() -> bool {
    let found = match swap_one() {
        Ok(OutcomeResult::Done) => Ok(()),
        Ok(result) => Err(format!("the swap of a window ended as {}", result.name())),
        Err(why) => Err(why),
    };
    is_there(Need::Swap, found)
}

/// Whether this kernel moves pages, and keeps empty page tables: the swapper finds that out before it moves a window,
/// or by the page that was split on its way in.
pub fn keeps_page_tables() -> bool {
    let found = match swap_one() {
        Ok(OutcomeResult::Refused(Refusal::NotObserved | Refusal::Other(_))) => Ok(()),
        Ok(result) => Err(format!("the swap of a window ended as {}", result.name())),
        Err(why) => Err(why),
    };
    is_there(Need::NoSwap, found)
}
