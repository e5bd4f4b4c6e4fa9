//! Memory of one window outside guest RAM, in which the contents of a guest's window are made ready.

use std::io;
use std::sync::atomic::Ordering;

use wideleaf_policies::{Bytes, PageSize};

use super::madvise::madvise;
use super::mapping::{AddressReservation, MapError, Piece};
use crate::host::Advice;

const WINDOW: PageSize = PageSize::Huge2M;

/// Addresses of one window that belong to one thread. It has pages once it is populated, or written.
#[derive(Debug)]
pub(crate) struct FillSlot(AddressReservation);

impl FillSlot {
    /// Maps the addresses, in which the kernel may make a huge page. A kernel without huge pages makes base pages.
    pub(crate) fn map() -> Result<FillSlot, MapError> {
        let area = AddressReservation::new(WINDOW.bytes(), WINDOW)?;
        let start = area.map_at(Bytes::ZERO, WINDOW.bytes(), None)?;
        if let Err(error) = madvise(start, WINDOW.bytes(), Advice::HugePage) {
            tracing::debug!("memory for a window gets base pages: {error}");
        }
        Ok(FillSlot(area))
    }

    /// Has the kernel allocate a page, cleared: a huge one if it has one. By a touch, which holds only the mapping's
    /// own lock while the kernel clears the page.
    pub(crate) fn populate(&self) {
        self.piece().words()[0].store(0, Ordering::Relaxed);
    }

    /// The memory as a place to read to. Missing pages read zero.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let start = self.0.base().get() as *mut u8;
        // SAFETY: `map` mapped all of it readable and writable, and it stays so for as long as `self` lives. `self` is
        // borrowed mutably: all other ways to the memory are pieces, which borrow `self`, so neither this program nor
        // a call of the kernel for it uses them meanwhile. Any bits are bytes.
        unsafe { std::slice::from_raw_parts_mut(start, WINDOW.bytes().as_usize()) }
    }

    /// The memory for calls of the kernel that move or copy its pages.
    pub(crate) fn piece(&self) -> Piece<'_> {
        self.0.piece(Bytes::ZERO, WINDOW.bytes())
    }

    /// Gives all pages back. Takes `&mut self`, because the memory reads zero afterwards.
    pub(crate) fn discard(&mut self) -> io::Result<()> {
        self.piece().discard()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_reads_zero_at_first_and_after_its_pages_were_given_back() {
        let mut slot = FillSlot::map().expect("addresses");
        slot.populate();
        assert!(slot.bytes().iter().all(|byte| *byte == 0));
        slot.bytes().fill(7);
        slot.discard().expect("it is mapped");
        assert!(slot.bytes().iter().all(|byte| *byte == 0));
        assert!(slot.piece().start().is_aligned_to(WINDOW), "a huge page fits");
    }
}
