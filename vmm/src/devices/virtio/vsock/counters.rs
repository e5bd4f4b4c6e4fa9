//! What went through the sockets between guest and host, and what did not.

use crate::devices::virtio::counters::counters;

counters! {
    /// What the sockets do, counted while they work.
    counters Counting,
    /// The device's numbers at one instant.
    values VsockCounters:
    /// Connections that the guest asked for and got.
    from_guest,
    /// Connections that the host asked for and got.
    from_host,
    /// Connections that somebody asked for and did not get.
    refused,
    /// Bytes that reached a socket of the host.
    to_host_bytes,
    /// Bytes that the guest got.
    to_guest_bytes,
    /// Connections ended because the guest sent more than there was room for.
    over_credit,
    /// Packets of the guest that are none, or that are for nobody.
    malformed,
    /// Queues that the guest broke.
    broken_queues,
}
