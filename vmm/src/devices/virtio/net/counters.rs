//! Counters of a network card: frames that passed, and frames that did not.

use crate::devices::virtio::counters::counters;

counters! {
    /// Counters of a card, updated while it works.
    counters Counting,
    /// Values of a card's counters at one moment. Bytes are those of frames, without the headers between
    /// driver and device.
    values NetCounters:
    /// Number of frames that reached the guest.
    received_frames,
    /// Number of bytes in these frames.
    received_bytes,
    /// Number of frames that the guest sent.
    sent_frames,
    /// Number of bytes in these frames.
    sent_bytes,
    /// Number of times that frames had to wait for the guest's buffers.
    waits_for_buffers,
    /// Number of times that the guest's frames had to wait for the link.
    waits_for_link,
    /// Number of frames for the guest that exceed its buffers.
    too_long,
    /// Number of invalid frames of the guest: shorter than their headers, too long, or with a header
    /// that contradicts itself.
    malformed,
    /// Number of the guest's frames that the link did not accept, for instance because it is down.
    refused,
    /// Number of queues that the guest broke.
    broken_queues,
}
