//! The kinds of devices, by the numbers that drivers read. A snapshot's state and the registers both need them.

/// The kind of a device, as its driver sees it (Virtual I/O Device 1.2, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A network card.
    Net = 1,
    /// A disk (block device).
    Block = 2,
    /// A source of random bytes.
    Entropy = 4,
    /// Memory given back to the host.
    Balloon = 5,
    /// Sockets between guest and host.
    Vsock = 19,
}
