//! What went through a network card, and what did not.

use crate::devices::virtio::counters::counters;

counters! {
    /// What a card does, counted while it works.
    counters Counting,
    /// A card's numbers at one instant. Bytes are those of frames, without the headers between driver and device.
    values NetCounters:
    /// Frames that reached the guest.
    received_frames,
    /// Their bytes.
    received_bytes,
    /// Frames that the guest sent.
    sent_frames,
    /// Their bytes.
    sent_bytes,
    /// Times that frames had to wait for the guest's buffers.
    waits_for_buffers,
    /// Times that the guest's frames had to wait for the link.
    waits_for_link,
    /// Frames for the guest that its buffers are too short for.
    too_long,
    /// Frames of the guest that are none: shorter than their headers, longer than any, or with a header that contradicts itself.
    malformed,
    /// Frames of the guest that the link did not take, because it is down for instance.
    refused,
    /// Queues that the guest broke.
    broken_queues,
}
