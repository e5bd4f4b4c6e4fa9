//! What went through a network card, and what did not.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// A card's numbers at one instant. Bytes are those of frames, without the headers between driver and device.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct NetCounters {
    /// Frames that reached the guest.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that the guest sent.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Times that frames had to wait for the guest's buffers.
    pub waits_for_buffers: u64,
    /// Times that the guest's frames had to wait for the link.
    pub waits_for_link: u64,
    /// Frames for the guest that its buffers are too short for.
    pub too_long: u64,
    /// Frames of the guest that are none: shorter than their headers, longer than any, or with a header that contradicts itself.
    pub malformed: u64,
    /// Frames of the guest that the link did not take, because it is down for instance.
    pub refused: u64,
    /// Queues that the guest broke.
    pub broken_queues: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// The same, counted by one thread and read by others.
        #[derive(Debug, Default)]
        pub(super) struct Counting {
            $(pub(super) $name: AtomicU64),*
        }

        impl Counting {
            pub(super) fn get(&self) -> NetCounters {
                NetCounters { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters!(
    received_frames,
    received_bytes,
    sent_frames,
    sent_bytes,
    waits_for_buffers,
    waits_for_link,
    too_long,
    malformed,
    refused,
    broken_queues
);

/// Adds to one of them.
pub(super) fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}
