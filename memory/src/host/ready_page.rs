//! A huge page of this machine that is made ready for the next collapse.
//!
//! ```text
//!   before:  allocate a huge page ─▶ the kernel clears it ─▶ free it     no thread of the guest waits
//!   after:   MADV_COLLAPSE allocates the page freed last                 threads that touch the window wait
//! ```
//!
//! Two waits of a guest end with it. A free page may not be there: the kernel compacts memory at the first of the two
//! allocations. And on a machine that is itself virtual, its hypervisor may have taken the free page (free page
//! reporting of virtio-balloon): the first touch then takes milliseconds. The kernel keeps freed huge pages in a list
//! of the CPU, the last one first (mm/page_alloc.c, `pcp_allowed_order`); if this thread moves to another CPU or
//! another process takes the page, a collapse is as slow as without.

use parking_lot::Mutex;

use wideleaf_policies::{Bytes, NodeId, NodeSet, PageSize};

use super::Advice;
use crate::sys;
use crate::sys::mapping::AddressReservation;

const WINDOW: PageSize = PageSize::Huge2M;

/// Addresses of one window, at which huge pages are made ready. Mapped at the first use.
#[derive(Debug, Default)]
pub(super) struct ReadyPage(Mutex<Option<AddressReservation>>);

impl ReadyPage {
    /// Makes a huge page ready, on this NUMA node if one is named. Without one, nothing has happened but one fault of a
    /// base page: the collapse finds out by itself, and has the error.
    pub fn make(&self, node: Option<NodeId>) -> std::io::Result<()> {
        let mut held = self.0.lock();
        let reservation = match held.take() {
            Some(reservation) => reservation,
            None => window().map_err(std::io::Error::other)?,
        };
        let reservation = held.insert(reservation);
        if let Some(node) = node {
            let nodes = NodeSet::of(node);
            sys::mempolicy::mbind(reservation.base(), WINDOW.bytes(), libc::MPOL_PREFERRED, &nodes)?;
        }
        sys::madvise::madvise(reservation.base(), WINDOW.bytes(), Advice::HugePage)?;
        // The fault at one address makes the whole window present, if there is a huge page.
        sys::madvise::madvise(reservation.base(), PageSize::Base4K.bytes(), Advice::PopulateWrite)?;
        reservation.piece(Bytes::ZERO, WINDOW.bytes()).discard()
    }
}

fn window() -> Result<AddressReservation, sys::mapping::MapError> {
    let reservation = AddressReservation::new(WINDOW.bytes(), WINDOW)?;
    reservation.map_at(Bytes::ZERO, WINDOW.bytes(), None)?;
    Ok(reservation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;
    use crate::host::linux::LinuxHost;

    #[test]
    fn a_page_that_is_ready_is_free_and_the_next_one_is_made_at_the_same_addresses() {
        let (ready, host) = (ReadyPage::default(), LinuxHost::open().expect("/proc is mounted"));
        let address_of_one = || {
            // A kernel without THP refuses the mark; the addresses stay mapped all the same.
            let _ = ready.make(None);
            ready.0.lock().as_ref().expect("mapped at the first use").base()
        };
        let first = address_of_one();
        assert_eq!(address_of_one(), first);
        let mut present = Vec::new();
        host.scan(first, WINDOW.bytes(), &mut present).expect("PAGEMAP_SCAN");
        assert_eq!(present, []);
    }
}
