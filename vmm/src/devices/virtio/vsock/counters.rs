//! Counters of the sockets between guest and host: data that passed, and data that did not.

use crate::devices::virtio::counters::counters;

counters! {
    /// Counters of the sockets, updated while they work.
    counters Counting,
    /// Values of the device's counters at one moment.
    values VsockCounters:
    /// Number of connections that the guest asked for and got.
    from_guest,
    /// Number of connections that the host asked for and got.
    from_host,
    /// Number of requested connections that were refused.
    refused,
    /// Number of bytes that reached a socket of the host.
    to_host_bytes,
    /// Number of bytes that the guest received.
    to_guest_bytes,
    /// Number of connections ended because the guest sent more than there was room for.
    over_credit,
    /// Number of packets of the guest that are malformed, or for an unknown address.
    malformed,
    /// Number of queues that the guest broke.
    broken_queues,
}
