//! Guest RAM as a `vm-memory` view, through which the loaders and the table builders write.
//!
//! `vm-memory` cannot create this mapping itself: it refuses `MAP_FIXED`, and wideleaf's RAM must lie at chosen
//! addresses. It therefore receives the raw mapping without owning it, and this type keeps the owner alive.
#![expect(unsafe_code, reason = "vm-memory takes a mapping it did not make only as a raw pointer")]

use std::sync::Arc;

use vm_memory::mmap::MmapRegionError;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion};
use wideleaf_memory::GuestRam;
use wideleaf_memory::region::RamHasOwner;
use wideleaf_policies::{GpaRange, PageSize};

use crate::dma::DeviceLog;

/// Guest RAM by guest addresses. Writes through it are logged.
pub type GuestView = GuestMemoryMmap<DeviceLog>;

/// A view of guest RAM, and the RAM behind it.
#[derive(Debug)]
pub struct GuestMemory {
    view: GuestView,
    ram: Arc<GuestRam>,
}

/// The reasons why the RAM cannot be viewed.
#[derive(Debug, thiserror::Error)]
pub enum GuestMemoryError {
    /// A range of RAM was refused.
    #[error("cannot show guest RAM at {gpa:#x} to the loader: {source}")]
    Region {
        /// First guest-physical address of the range.
        gpa: u64,
        /// Reason of the refusal.
        source: MmapRegionError,
    },
    /// The RAM has another owner.
    #[error(transparent)]
    Owned(#[from] RamHasOwner),
    /// The ranges do not form a valid memory.
    #[error("cannot show guest RAM to the loader: {0}")]
    Collection(&'static str),
}

impl GuestMemory {
    /// A view of all of `ram`, which cannot get an exclusive owner from now on.
    ///
    /// # Errors
    /// [`GuestMemoryError`]; [`GuestMemoryError::Owned`] where a kernel in this process owns the words exclusively:
    /// writes through the view would change them under its `&mut`.
    pub fn new(ram: Arc<GuestRam>) -> Result<GuestMemory, GuestMemoryError> {
        ram.share()?;
        let mut regions = Vec::with_capacity(ram.ranges().len());
        for range in ram.ranges() {
            let gpa = range.gpa.start().get();
            let start = std::ptr::with_exposed_provenance_mut::<u8>(range.hva.get() as usize);
            // SAFETY: [start, start + bytes) is mapped readable and writable by the `GuestRam` that this struct keeps
            // alive for as long as the view; vm-memory reaches it by volatile access only, and does not unmap it.
            let mapping = unsafe {
                MmapRegion::build_raw(
                    start,
                    range.gpa.bytes().as_usize(),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                )
            }
            .map_err(|source| GuestMemoryError::Region { gpa, source })?;
            regions.push(
                GuestRegionMmap::new(mapping, GuestAddress(gpa))
                    .ok_or(GuestMemoryError::Collection("a range ends past the last address"))?,
            );
        }
        let view = GuestMemoryMmap::from_regions(regions)
            .map_err(|_| GuestMemoryError::Collection("the memory is empty, or its ranges overlap or descend"))?;
        Ok(GuestMemory { view, ram })
    }

    /// The view of the RAM.
    pub fn view(&self) -> &GuestView {
        &self.view
    }

    /// Fetches and clears the bits of a memslot's base pages that devices wrote, in the form of KVM's dirty log.
    pub fn take_device_log(&self, slot: GpaRange) -> Vec<u64> {
        let page = |bytes: u64| (bytes / PageSize::Base4K.bytes().get()) as usize;
        let Some(region) = self.view.find_region(GuestAddress(slot.start().get())) else { return Vec::new() };
        let first = page(slot.start().get() - region.start_addr().0);
        (**region).bitmap().take(first..first + page(slot.bytes().get()))
    }

    /// The RAM itself.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_memory::{BackingConfig, BackingKind};
    use wideleaf_policies::Gpa;
    use wideleaf_policies::units::mib;

    fn ram() -> Arc<GuestRam> {
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).unwrap()];
        GuestRam::map(&layout, BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap()
    }

    #[test]
    fn words_with_an_exclusive_owner_are_not_shown_to_devices() {
        let ram = ram();
        let _words = ram.exclusive_words(ram.ranges()[0]).unwrap();
        assert!(matches!(GuestMemory::new(ram.clone()), Err(GuestMemoryError::Owned(_))));
    }

    #[test]
    fn words_that_devices_see_get_no_exclusive_owner() {
        let ram = ram();
        let _memory = GuestMemory::new(ram.clone()).unwrap();
        assert!(ram.exclusive_words(ram.ranges()[0]).is_none());
    }
}
