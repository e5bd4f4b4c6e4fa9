//! Receiving: frames from the link go into the guest's buffers.
//!
//! ```text
//!   link ── readv ──▶ [ buffer | buffer | buffer ] … [ spill ]        one frame, as many buffers as it needs
//!                       used     used     given back    └─▶ held: a frame that did not fit waits for more buffers
//! ```
//!
//! A frame is read only when there is a buffer, so that others wait in the link; its queue is bounded. The kernel
//! reports a frame's length after the read; the part that exceeds the present buffers is kept, one frame at most.

use std::collections::VecDeque;
use std::io::ErrorKind;

use virtio_queue::{QueueOwnedT, QueueT};

use super::shared::{Next, Shared};
use super::{FRAME_BYTES_MAX, HEADER_BYTES};
use crate::devices::virtio::counters::add;
use crate::devices::virtio::pieces::{PIECES_MAX, Piece, collect, read_at, write_at};
use crate::devices::virtio::used::{NotifiedUpTo, publish};
use crate::devices::virtio::{ActiveQueue, BrokenQueue};
use crate::kvm::guest_memory::GuestView;
use crate::sys::vectored::read;

/// Number of frames taken before other work on the thread has its turn.
const FRAMES_AT_ONCE: usize = 64;

/// Offset in the header of the number of buffers: `num_buffers` of `struct virtio_net_hdr` (section 5.1.6).
const NUM_BUFFERS_OFFSET: usize = 10;

/// The receive queue of a card.
pub(super) struct Receiver {
    pub(super) queue: ActiveQueue,
    /// Whether the driver accepts a frame in several chains.
    is_mergeable: bool,
    /// Length in bytes of the longest frame that the link may deliver, with its header.
    frame_bytes_max: usize,
    /// A frame with its header that waits for buffers; empty where no frame waits.
    held: Vec<u8>,
    spill: Box<[u8]>,
    notified: NotifiedUpTo,
}

/// Chains that were taken from the queue and are still empty.
#[derive(Default)]
struct Offered<'a> {
    chains: VecDeque<Buffer>,
    pieces: Vec<Piece<'a>>,
    bytes: usize,
    /// Whether no more chains fit at present, whatever the driver adds.
    is_full: bool,
}

struct Buffer {
    head: u16,
    pieces: usize,
    bytes: usize,
}

impl Receiver {
    pub(super) fn new(queue: ActiveQueue, is_mergeable: bool, frame_bytes_max: usize) -> Receiver {
        let spill = vec![0; FRAME_BYTES_MAX].into_boxed_slice();
        let notified = NotifiedUpTo::now(&queue.queue);
        Receiver { queue, is_mergeable, frame_bytes_max, held: Vec::new(), spill, notified }
    }

    /// Receives some frames. Returns the event to wait for next.
    pub(super) fn serve(&mut self, shared: &Shared) -> Result<Next, BrokenQueue> {
        let access = shared.memory.access();
        let view: &GuestView = &access;
        let mut offered = Offered::default();
        self.queue.queue.disable_notification(view)?;
        let next = self.fill_buffers(shared, view, &mut offered)?;
        let position = self.queue.queue.next_avail().wrapping_sub(offered.chains.len() as u16);
        self.queue.queue.set_next_avail(position);
        if self.notified.is_due(&self.queue.queue, view)? {
            shared.interrupt.used();
        }
        Ok(next)
    }

    fn fill_buffers<'a>(
        &mut self,
        shared: &Shared,
        view: &'a GuestView,
        offered: &mut Offered<'a>,
    ) -> Result<Next, BrokenQueue> {
        for _ in 0..FRAMES_AT_ONCE {
            self.take_buffers(view, offered)?;
            if offered.chains.is_empty() || offered.bytes < self.held.len() {
                // A frame that the whole queue cannot hold would wait forever.
                if offered.is_full || offered.chains.len() == usize::from(self.queue.queue.size()) {
                    self.held.clear();
                    add(&shared.counting.too_long, 1);
                } else if !self.queue.queue.enable_notification(view)? {
                    add(&shared.counting.waits_for_buffers, 1);
                    return Ok(Next::Buffers);
                }
                continue;
            }
            let bytes = if self.held.is_empty() {
                match read(shared.link.as_fd(), &offered.pieces, &mut self.spill) {
                    Ok(0) => return Ok(Next::Gone),
                    Ok(bytes) => bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Next::Link),
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => {
                        tracing::warn!(%error, "cannot read from a network card's link");
                        return Ok(Next::Gone);
                    }
                }
            } else {
                let bytes = write_at(&offered.pieces, 0, &self.held);
                self.held.clear();
                bytes
            };
            if bytes > offered.bytes {
                self.keep(shared, offered, bytes);
            } else if bytes > HEADER_BYTES {
                self.deliver(view, offered, bytes)?;
                add(&shared.counting.received_frames, 1);
                add(&shared.counting.received_bytes, bytes - HEADER_BYTES);
            }
        }
        Ok(Next::Again)
    }

    /// Takes the chains that the longest frame may need, as far as the driver has offered them.
    fn take_buffers<'a>(&mut self, view: &'a GuestView, offered: &mut Offered<'a>) -> Result<(), BrokenQueue> {
        let wanted = if self.is_mergeable { self.frame_bytes_max.max(self.held.len()) } else { 1 };
        while offered.bytes < wanted && !offered.is_full {
            let Some(chain) = self.queue.queue.iter(view)?.next() else { return Ok(()) };
            let (head, before) = (chain.head_index(), offered.pieces.len());
            let bytes = collect(chain.writable(), view, &mut offered.pieces)?;
            let pieces = offered.pieces.len() - before;
            // Section 5.1.6.3.2: a buffer holds at least the header.
            if bytes < HEADER_BYTES {
                return Err(virtio_queue::Error::InvalidChain.into());
            }
            if offered.pieces.len() > PIECES_MAX {
                offered.pieces.truncate(before);
                offered.is_full = true;
                self.queue.queue.go_to_previous_position();
                return Ok(());
            }
            offered.chains.push_back(Buffer { head, pieces, bytes });
            offered.bytes += bytes;
        }
        Ok(())
    }

    /// Keeps a frame that continues in the spill: it waits for more buffers where the driver accepts a
    /// frame in several.
    fn keep(&mut self, shared: &Shared, offered: &Offered<'_>, bytes: usize) {
        if !self.is_mergeable {
            return add(&shared.counting.too_long, 1);
        }
        self.held.resize(offered.bytes, 0);
        read_at(&offered.pieces, 0, &mut self.held);
        self.held.extend_from_slice(&self.spill[..bytes - offered.bytes]);
    }

    /// Gives the driver the buffers that a frame fills.
    fn deliver<'a>(&mut self, view: &'a GuestView, offered: &mut Offered<'a>, bytes: usize) -> Result<(), BrokenQueue> {
        let (mut used, mut left, mut pieces) = (Vec::new(), bytes, 0);
        while left > 0 {
            let buffer = offered.chains.pop_front().expect("the frame fits the chains that were taken");
            let here = left.min(buffer.bytes);
            left -= here;
            pieces += buffer.pieces;
            offered.bytes -= buffer.bytes;
            used.push((buffer.head, here as u32));
        }
        write_at(&offered.pieces, NUM_BUFFERS_OFFSET, &(used.len() as u16).to_le_bytes());
        offered.pieces.drain(..pieces);
        offered.is_full = false;
        publish(&mut self.queue.queue, view, &used)
    }
}
