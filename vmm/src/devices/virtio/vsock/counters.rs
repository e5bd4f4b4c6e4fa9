//! What went through the sockets between guest and host, and what did not.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The device's numbers at one instant.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct VsockCounters {
    /// Connections that the guest asked for and got.
    pub from_guest: u64,
    /// Connections that the host asked for and got.
    pub from_host: u64,
    /// Connections that somebody asked for and did not get.
    pub refused: u64,
    /// Bytes that reached a socket of the host.
    pub to_host_bytes: u64,
    /// Bytes that the guest got.
    pub to_guest_bytes: u64,
    /// Connections ended because the guest sent more than there was room for.
    pub over_credit: u64,
    /// Packets of the guest that are none, or that are for nobody.
    pub malformed: u64,
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
            pub(super) fn get(&self) -> VsockCounters {
                VsockCounters { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters!(from_guest, from_host, refused, to_host_bytes, to_guest_bytes, over_credit, malformed, broken_queues);

/// Adds to one of them.
pub(super) fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}
