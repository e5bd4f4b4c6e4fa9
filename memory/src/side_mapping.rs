//! Memory beside guest RAM, of one giant (1 GiB). The next backing is prepared there while the guest runs on the
//! present one, and the present one is kept there until the next is certain to work.
//!
//! ```text
//!   guest RAM   [ … )[ giant ……… )[ … )        take: its anonymous pages go aside, RAM there is empty
//!                      │      ▲                give: the other way
//!                 take ▼      │ give           map_over: a giant page in the place of the present mapping
//!   aside            [ 1 GiB …… )
//! ```
//!
//! All three must run while no vCPU does: between two of them the guest would read zeroes.

use std::sync::atomic::Ordering;

use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, PageSize};

pub use crate::giant_page::{GIANT, GiantFile, GiantPage};
use crate::numa::placement::NodePolicy;
use crate::region::GuestRam;
use crate::sys::mapping::{AddressReservation, MapError};

/// Contents of a side mapping.
#[derive(Clone, Copy, Debug)]
pub enum SideContents<'a> {
    /// Nothing: addresses to move pages to.
    Nothing,
    /// Anonymous memory that reads zero, with a memory policy or the kernel's own.
    Anonymous(Option<NodePolicy>),
    /// Pool page of 1 GiB.
    Giant(&'a GiantFile),
}

/// 1 GiB of addresses outside guest RAM, equal to any giant's modulo 1 GiB. Unmapped on drop, which frees the
/// anonymous memory that was moved there.
#[derive(Debug)]
pub struct SideMapping(AddressReservation);

impl SideMapping {
    /// Maps new addresses with these contents.
    pub(crate) fn map(contents: SideContents<'_>) -> Result<SideMapping, MapError> {
        let addresses = AddressReservation::new(GIANT, PageSize::Giant1G)?;
        let map = |file| addresses.map_at(Bytes::ZERO, GIANT, file).map(drop);
        match contents {
            SideContents::Nothing => {}
            SideContents::Anonymous(policy) => {
                map(None)?;
                // The mapping is moved into guest RAM with its policy.
                let placed = policy.map_or(Ok(()), |policy| policy.apply(addresses.base(), GIANT));
                placed.map_err(|source| MapError::Call { call: "mbind of memory beside guest RAM", source })?;
            }
            SideContents::Giant(page) => map(Some((page.file(), Bytes::ZERO)))?,
        }
        Ok(SideMapping(addresses))
    }

    /// First address of the mapping.
    pub fn start(&self) -> Hva {
        self.0.base()
    }

    /// Moves the pages of the giant at `giant` here.
    pub(crate) fn take(&self, ram: &GuestRam, giant: Gpa) -> std::io::Result<()> {
        ram.reservation().piece(place(ram, giant), GIANT).move_to(self.0.piece(Bytes::ZERO, GIANT))
    }

    /// Moves the pages here to the giant at `giant`.
    pub(crate) fn give(&self, ram: &GuestRam, giant: Gpa) -> std::io::Result<()> {
        self.0.piece(Bytes::ZERO, GIANT).move_to(ram.reservation().piece(place(ram, giant), GIANT))
    }

    /// Clears the pages of `page`, which is mapped here, that have data.
    pub(crate) fn clear(&self, page: &GiantFile) {
        for offset in page.occupied() {
            let words = self.0.piece(offset, PageSize::Base4K.bytes()).words();
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }

    /// Copies a base page of guest RAM to the same offset here, while the guest may write to it.
    pub(crate) fn copy_page(&self, ram: &GuestRam, page: Gpa) {
        let giant = page.align_down(PageSize::Giant1G);
        let bytes = PageSize::Base4K.bytes();
        ram.reservation().piece(page - Gpa::new(0), bytes).copy_to(self.0.piece(page - giant, bytes));
    }
}

/// Maps a giant page at the giant at `giant`.
pub(crate) fn map_giant_over(page: &GiantFile, ram: &GuestRam, giant: Gpa) -> Result<(), MapError> {
    ram.reservation().map_at(place(ram, giant), GIANT, Some((page.file(), Bytes::ZERO)))?;
    // The page is there: the policy of its mapping is for observers.
    let placed = GpaRange::new(giant, GIANT).map_or(Ok(()), |all| ram.place(all));
    if let Err(error) = placed {
        tracing::debug!("{giant}: {error}");
    }
    Ok(())
}

/// Start of a giant, counted from guest address zero.
fn place(ram: &GuestRam, giant: Gpa) -> Bytes {
    assert!(ram.giants().any(|whole| whole == giant), "{giant} is not the start of 1 GiB of RAM");
    giant - Gpa::new(0)
}
