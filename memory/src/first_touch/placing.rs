//! Puts a page of 1 GiB into a giant of guest RAM that is empty and stays so: all of it is registered for missing
//! faults, or no thread reaches it yet. One mapping replaces the other while threads may wait for a page there; they
//! find the new one when they are woken.

use std::sync::Arc;

use wideleaf_policies::{Gpa, PageSize};

use super::giant_supply::{GiantSource, Obstacle, Supplied};
use crate::backing::BackingKind;
use crate::claims::GiantClaim;
use crate::giant_page::{GIANT, GiantPage};
use crate::host::{Advice, HostError};
use crate::kernel::Kernel;
use crate::numa::placement::NodePolicy;
use crate::region::GuestRam;
use crate::side_mapping::SideContents;

/// Number of attempts to restore RAM that the kernel would not map.
const RESTORE_ATTEMPTS: u32 = 3;

/// A page that was not put there.
#[derive(Debug)]
pub(super) enum NotPlaced {
    /// Everything is as it was.
    Unchanged(Obstacle),
    /// New anonymous memory is there, empty as the memory before.
    Replaced(Obstacle),
    /// Guest RAM may lack a mapping there: a touch ends the guest, and no byte of it is lost.
    Lost(HostError),
}

/// Puts `page` there.
pub(super) fn place(
    kernel: &dyn Kernel,
    ram: &GuestRam,
    claim: &GiantClaim,
    page: &Arc<GiantPage>,
) -> Result<(), NotPlaced> {
    let giant = claim.giant();
    let start = ram.base() + (giant - Gpa::new(0));
    // Ready before anything changes: a failed mapping may have removed the one before.
    if let Some(policy) = ram.placement().giant_policy(giant)
        && !is_on_its_node(kernel, page, &policy)
    {
        return Err(NotPlaced::Unchanged("giant_on_other_node"));
    }
    let of_part = ram.placement().policy_at(giant).copied();
    let spare = kernel.map_aside(SideContents::Anonymous(of_part)).map_err(|error| {
        tracing::debug!("{giant}: {error}");
        NotPlaced::Unchanged("giant_not_mapped")
    })?;
    page.begin_use();
    let mapped = claim.exchanging(|| {
        kernel.map_over(ram, giant, page.file())?;
        claim.moved_to(Some(page.clone()));
        Ok(())
    });
    let Err(error): Result<(), HostError> = mapped else {
        // The page is there already; without this, the first touch maps it.
        if let Err(error) = kernel.advise(start, GIANT, Advice::PopulateWrite) {
            tracing::debug!("{giant}: {error}");
        }
        return Ok(());
    };
    tracing::warn!("cannot map a page of 1 GiB at {giant}, so its RAM is mapped anew: {error}");
    let restore = || kernel.move_in(&spare, ram, giant);
    let restored = (0..RESTORE_ATTEMPTS).map(|_| restore()).find(Result::is_ok);
    if restored.is_none() {
        return Err(NotPlaced::Lost(error));
    }
    if let Err(error) = kernel.advise(start, GIANT, ram.backing().advice_at_start()) {
        tracing::warn!("{giant}: {error}");
    }
    Err(NotPlaced::Replaced("giant_not_mapped"))
}

/// Whether a page, which was perhaps made on any node, is one that the policy permits.
fn is_on_its_node(kernel: &dyn Kernel, page: &GiantPage, policy: &NodePolicy) -> bool {
    let looked = kernel.map_aside(SideContents::Giant(page.file())).and_then(|aside| {
        kernel.advise(aside.start(), PageSize::Base4K.bytes(), Advice::PopulateRead)?;
        Ok(policy.permits_page_at(aside.start()))
    });
    looked.unwrap_or_else(|error| {
        tracing::debug!("cannot tell the node of a page of 1 GiB: {error}");
        false
    })
}

/// Puts a page of 1 GiB at a giant that no thread has reached yet, before a loader writes to it: the loader's touches
/// are first touches too, but come before the service. Waits for the page, which may take seconds if it is made.
///
/// # Errors
/// The reason why the giant starts on base pages.
///
/// # Panics
/// If the giant is not RAM.
pub fn place_before_loading(
    kernel: &dyn Kernel,
    ram: &GuestRam,
    giant: Gpa,
    source: &GiantSource,
) -> Result<(), String> {
    assert!(ram.giants().any(|whole| whole == giant), "{giant} is not the start of 1 GiB of RAM");
    let refused = |why: &dyn std::fmt::Display| {
        format!("cannot put {} of RAM at {giant} on one page: {why}; smaller pages are used there", GIANT)
    };
    if ram.backing().kind() != BackingKind::Anon || ram.backing().start_page() != PageSize::Base4K {
        return Err(refused(&"only anonymous RAM on 4k pages can have one"));
    }
    let policy = ram.placement().giant_policy(giant);
    let Supplied { page, .. } = source.page(kernel, policy.as_ref()).map_err(|_| {
        let pool = source.pools.check_for(policy.as_ref(), PageSize::Giant1G, GIANT).err();
        refused(&pool.map_or_else(|| "no page could be taken".to_owned(), |error| error.to_string()))
    })?;
    let claim = ram.claims().giant(giant).map_err(|claimed| refused(&claimed))?;
    place(kernel, ram, &claim, &page).map_err(|why| match why {
        NotPlaced::Unchanged(_) | NotPlaced::Replaced(_) => refused(&"the kernel did not map it"),
        NotPlaced::Lost(error) => refused(&error),
    })
}
