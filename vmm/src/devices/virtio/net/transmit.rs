//! Transmitting: the guest's frames go to the link. A chain is a frame with its header, written at once from its
//! place in RAM.

use std::io::ErrorKind;

use nix::errno::Errno;
use virtio_queue::{QueueOwnedT, QueueT};

use super::shared::{Next, Shared};
use super::{FRAME_BYTES_MAX, HEADER_BYTES};
use crate::devices::virtio::counters::add;
use crate::devices::virtio::pieces::{Piece, collect};
use crate::devices::virtio::used::{NotifiedUpTo, publish};
use crate::devices::virtio::{ActiveQueue, BrokenQueue};
use crate::kvm::guest_memory::GuestView;
use crate::sys::vectored::write;

/// Number of frames sent before other work on the thread has its turn.
const FRAMES_AT_ONCE: usize = 64;

/// The transmit queue of a card.
pub(super) struct Transmitter {
    pub(super) queue: ActiveQueue,
    notified: NotifiedUpTo,
}

impl Transmitter {
    pub(super) fn new(queue: ActiveQueue) -> Transmitter {
        let notified = NotifiedUpTo::now(&queue.queue);
        Transmitter { queue, notified }
    }

    /// Sends some frames. Returns the event to wait for next.
    pub(super) fn serve(&mut self, shared: &Shared) -> Result<Next, BrokenQueue> {
        let access = shared.memory.access();
        let view: &GuestView = &access;
        self.queue.queue.disable_notification(view)?;
        let next = self.send_frames(shared, view)?;
        if self.notified.is_due(&self.queue.queue, view)? {
            shared.interrupt.used();
        }
        Ok(next)
    }

    fn send_frames(&mut self, shared: &Shared, view: &GuestView) -> Result<Next, BrokenQueue> {
        let mut pieces = Vec::new();
        for _ in 0..FRAMES_AT_ONCE {
            let Some(chain) = self.queue.queue.iter(view)?.next() else {
                if self.queue.queue.enable_notification(view)? {
                    continue;
                }
                return Ok(Next::Buffers);
            };
            let head = chain.head_index();
            pieces.clear();
            let bytes = collect(chain.readable(), view, &mut pieces)?;
            if !send(shared, &pieces, bytes) {
                self.queue.queue.go_to_previous_position();
                add(&shared.counting.waits_for_link, 1);
                return Ok(Next::Link);
            }
            publish(&mut self.queue.queue, view, &[(head, 0)])?;
        }
        Ok(Next::Again)
    }
}

/// Sends a frame. Returns whether it is finished: only a frame that the link has no room for is not.
fn send(shared: &Shared, pieces: &[Piece<'_>], bytes: usize) -> bool {
    let counting = &shared.counting;
    if !(HEADER_BYTES + 1..=FRAME_BYTES_MAX).contains(&bytes) {
        add(&counting.malformed, 1);
        return true;
    }
    match write(shared.link.as_fd(), pieces) {
        Ok(_) => {
            add(&counting.sent_frames, 1);
            add(&counting.sent_bytes, bytes - HEADER_BYTES);
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
        // The frame is shorter than an Ethernet header, or has offsets beyond its end.
        Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => add(&counting.malformed, 1),
        Err(_) => add(&counting.refused, 1),
    }
    true
}
