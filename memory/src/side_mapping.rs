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

use std::fs::File;

#[cfg(any(test, feature = "testing"))]
use nix::unistd::{Whence, lseek};
use wideleaf_policies::{Bytes, Gpa, Hva, PageSize};

use crate::host::SideContents;
use crate::pool::PoolLease;
use crate::region::GuestRam;
use crate::sys::mapping::{AddressReservation, MapError, create_memfd};

/// The size of a giant page, in bytes.
pub const GIANT: Bytes = PageSize::Giant1G.bytes();

/// 1 GiB of addresses outside guest RAM, equal to any giant's modulo 1 GiB. Unmapped on drop, which frees the
/// anonymous memory that was moved there.
#[derive(Debug)]
pub struct SideMapping(AddressReservation);

impl SideMapping {
    /// Maps new addresses with these contents.
    pub(crate) fn map(contents: SideContents<'_>) -> Result<SideMapping, MapError> {
        let addresses = AddressReservation::new(GIANT, PageSize::Giant1G)?;
        match contents {
            SideContents::Nothing => {}
            SideContents::Anonymous => drop(addresses.map_at(Bytes::ZERO, GIANT, None)?),
            SideContents::Giant(page) => drop(addresses.map_at(Bytes::ZERO, GIANT, Some((&page.0, Bytes::ZERO)))?),
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

    /// Copies a base page of guest RAM to the same offset here, while the guest may write to it.
    pub(crate) fn copy_page(&self, ram: &GuestRam, page: Gpa) {
        let giant = page.align_down(PageSize::Giant1G);
        let bytes = PageSize::Base4K.bytes();
        ram.reservation().piece(page - Gpa::new(0), bytes).copy_to(self.0.piece(page - giant, bytes));
    }
}

/// A file that holds one giant page. The page goes back to the pool when the file is closed and nothing maps it.
#[derive(Debug)]
pub struct GiantFile(File);

impl GiantFile {
    /// A page of the hugetlb pool; it is taken when the file is mapped.
    pub(crate) fn of_pool() -> Result<GiantFile, MapError> {
        create_memfd(GIANT, Some(PageSize::Giant1G)).map(GiantFile)
    }

    /// Ordinary memory in its place, for the fake host.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn of_ordinary_memory() -> Result<GiantFile, MapError> {
        create_memfd(GIANT, None).map(GiantFile)
    }

    /// The base pages of ordinary memory with data, by their offsets in the giant (lseek(2), `SEEK_DATA`).
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn occupied(&self) -> Vec<Bytes> {
        let seek = |from: u64, whence| lseek(&self.0, from as i64, whence).ok().map(|at| at as u64);
        let extents = std::iter::successors(Some(0..0), |before| {
            let start = seek(before.end, Whence::SeekData)?;
            Some(start..seek(start, Whence::SeekHole)?)
        });
        extents.flat_map(|extent| extent.step_by(PageSize::Base4K.bytes().as_usize())).map(Bytes::new).collect()
    }

    /// Maps the page at the giant at `giant`.
    pub(crate) fn map_over(&self, ram: &GuestRam, giant: Gpa) -> Result<(), MapError> {
        ram.reservation().map_at(place(ram, giant), GIANT, Some((&self.0, Bytes::ZERO))).map(drop)
    }
}

/// The page of a giant, and the growth of the pool for it.
#[derive(Debug)]
pub struct GiantPage {
    // Dropped before the lease: the pool shrinks when the page is back.
    file: GiantFile,
    _lease: Option<PoolLease>,
}

impl GiantPage {
    pub(crate) fn new(file: GiantFile, lease: Option<PoolLease>) -> GiantPage {
        GiantPage { file, _lease: lease }
    }

    /// The file that holds it.
    pub(crate) fn file(&self) -> &GiantFile {
        &self.file
    }
}

/// Start of a giant, counted from guest address zero.
fn place(ram: &GuestRam, giant: Gpa) -> Bytes {
    assert!(ram.giants().any(|whole| whole == giant), "{giant} is not the start of 1 GiB of RAM");
    giant - Gpa::new(0)
}
