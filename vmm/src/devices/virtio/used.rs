//! Chains that are handed back together, and the check whether the driver wants an interrupt for them.
//!
//! `virtio-queue` shows the driver one chain at a time. The several buffers of one frame must appear at once: a
//! driver that looks in between would find only the beginning of a frame.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes as _, GuestAddress};

use super::BrokenQueue;
use crate::kvm::guest_memory::GuestView;

/// Offset of a ring's entries, behind flags and index (Virtual I/O Device 1.2, sections 2.7.6 and 2.7.8), and their
/// length, in bytes.
const RING_HEADER_BYTES: u64 = 4;
const AVAIL_ENTRY_BYTES: u64 = 2;
const USED_ENTRY_BYTES: u64 = 8;

/// The head of a chain, and the number of bytes written into it.
pub type Used = (u16, u32);

/// Puts all chains into the used ring, and only then shows them.
///
/// # Errors
/// [`BrokenQueue`] where a head is invalid.
pub fn publish(queue: &mut Queue, view: &GuestView, chains: &[Used]) -> Result<(), BrokenQueue> {
    let Some(((last_head, last_bytes), others)) = chains.split_last() else { return Ok(()) };
    // Entries behind the index belong to the device until it moves the index; `add_used` does that with
    // the last one.
    for (head, bytes) in others {
        if *head >= queue.size() {
            return Err(virtio_queue::Error::InvalidDescriptorIndex.into());
        }
        let entry = u64::from(queue.next_used() % queue.size()) * USED_ENTRY_BYTES;
        let address = GuestAddress(queue.used_ring() + RING_HEADER_BYTES + entry);
        let used = (u64::from(*bytes) << 32 | u64::from(*head)).to_le_bytes();
        view.write_slice(&used, address).map_err(virtio_queue::Error::GuestMemory)?;
        queue.set_next_used(queue.next_used().wrapping_add(1));
    }
    Ok(queue.add_used(view, *last_head, *last_bytes)?)
}

/// The position up to which the driver was notified.
#[derive(Clone, Copy, Debug)]
pub struct NotifiedUpTo {
    used: Wrapping<u16>,
}

impl NotifiedUpTo {
    /// The driver knows of all chains that `queue` handed back until now.
    pub fn now(queue: &Queue) -> NotifiedUpTo {
        NotifiedUpTo { used: Wrapping(queue.next_used()) }
    }

    /// Whether the driver wants an interrupt for the chains used since the last call (section 2.7.7).
    ///
    /// # Errors
    /// [`BrokenQueue`] where the ring is not within RAM, which was checked before.
    pub fn is_due(&mut self, queue: &Queue, view: &GuestView) -> Result<bool, BrokenQueue> {
        let (before, now) = (self.used, Wrapping(queue.next_used()));
        self.used = now;
        if before == now {
            return Ok(false);
        }
        // Used chains become visible before the field is read in which the driver asks for notifications; the driver
        // does the two in the other order.
        fence(Ordering::SeqCst);
        let load = |address: u64| -> Result<u16, BrokenQueue> {
            let word = view.load::<u16>(GuestAddress(address), Ordering::Relaxed);
            Ok(u16::from_le(word.map_err(virtio_queue::Error::GuestMemory)?))
        };
        if !queue.event_idx_enabled() {
            return Ok(u32::from(load(queue.avail_ring())?) & VRING_AVAIL_F_NO_INTERRUPT == 0);
        }
        let used_event = queue.avail_ring() + RING_HEADER_BYTES + u64::from(queue.size()) * AVAIL_ENTRY_BYTES;
        // `vring_need_event` (include/uapi/linux/virtio_ring.h): whether the index passed the one that the
        // driver waits for.
        Ok(now - Wrapping(load(used_event)?) - Wrapping(1) < now - before)
    }
}
