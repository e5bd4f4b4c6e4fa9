//! The header of each packet (Virtual I/O Device 1.2, section 5.10.6).
//!
//! The crate `virtio-vsock` also has this header, but requires it in the first buffer and all data in one other.
//! Section 2.7.4 leaves the layout to the driver, and Linux sends data in several buffers with `MSG_ZEROCOPY`.

/// Length of a header, in bytes.
pub const HEADER_BYTES: usize = 44;

/// Address of the host for every guest.
pub const HOST_CID: u64 = 2;

/// Bytes that arrive in order, or not at all: the only socket type of this device.
pub const STREAM: u16 = 1;

/// Flag of [`Operation::Shutdown`]: the sender accepts no more data.
pub const NO_MORE_RECEIVED: u32 = 1;
/// Flag of [`Operation::Shutdown`]: the sender sends no more data.
pub const NO_MORE_SENT: u32 = 2;
/// Both flags of [`Operation::Shutdown`].
pub const NOTHING_MORE: u32 = NO_MORE_RECEIVED | NO_MORE_SENT;

/// The meaning of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Operation {
    /// The sender asks for a connection.
    Request = 1,
    /// The sender accepts the connection.
    Response = 2,
    /// The connection does not exist, or no longer.
    Reset = 3,
    /// The sender ends one or both directions: see [`NOTHING_MORE`].
    Shutdown = 4,
    /// Data of the connection.
    Data = 5,
    /// Credit: free room of the sender.
    CreditUpdate = 6,
    /// Request for the other side's credit.
    CreditRequest = 7,
}

impl Operation {
    /// The operation of this number; `None` for an unknown number.
    pub fn from_number(number: u16) -> Option<Operation> {
        use Operation::{CreditRequest, CreditUpdate, Data, Request, Reset, Response, Shutdown};
        [Request, Response, Reset, Shutdown, Data, CreditUpdate, CreditRequest]
            .get(usize::from(number).checked_sub(1)?)
            .copied()
    }
}

/// The ports of a connection, which identify it.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Ports {
    /// Port of its end in the host.
    pub host: u32,
    /// Port of its end in the guest.
    pub guest: u32,
}

/// A packet header. Its numbers lie in this order, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Address of the sender.
    pub from_cid: u64,
    /// Address of the receiver.
    pub to_cid: u64,
    /// Port of the sender.
    pub from_port: u32,
    /// Port of the receiver.
    pub to_port: u32,
    /// Number of bytes of data behind the header.
    pub bytes: u32,
    /// Type of the socket: [`STREAM`].
    pub kind: u16,
    /// Number of an [`Operation`], or an unknown one.
    pub operation: u16,
    /// Flags of a shutdown.
    pub flags: u32,
    /// Size of the sender's buffer for a connection, in bytes.
    pub room: u32,
    /// Total number of the connection's bytes that have left the sender's buffer, modulo 2^32.
    pub passed: u32,
}

impl Header {
    /// Parses the header in these bytes.
    pub fn read(bytes: &[u8; HEADER_BYTES]) -> Header {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Header {
            from_cid: long(0),
            to_cid: long(8),
            from_port: word(16),
            to_port: word(20),
            bytes: word(24),
            kind: word(28) as u16,
            operation: (word(28) >> 16) as u16,
            flags: word(32),
            room: word(36),
            passed: word(40),
        }
    }

    /// Bytes of this header.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.from_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.to_cid.to_le_bytes());
        let kind_and_operation = u32::from(self.kind) | u32::from(self.operation) << 16;
        let words = [self.from_port, self.to_port, self.bytes, kind_and_operation, self.flags, self.room, self.passed];
        bytes[16..].chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// A header from the host to the guest `cid`, about a connection, without data, flags or credit.
    pub fn to_guest(cid: u64, ports: Ports, operation: Operation) -> Header {
        Header {
            from_cid: HOST_CID,
            to_cid: cid,
            from_port: ports.host,
            to_port: ports.guest,
            bytes: 0,
            kind: STREAM,
            operation: operation as u16,
            flags: 0,
            room: 0,
            passed: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_layout_of_the_specification() {
        let header = Header {
            from_cid: 0x0102_0304_0506_0708,
            to_cid: 2,
            from_port: 0x11,
            to_port: 0x22,
            bytes: 0x33,
            kind: 1,
            operation: 5,
            flags: 3,
            room: 0x44,
            passed: 0x55,
        };
        let bytes = header.to_bytes();
        assert_eq!(bytes[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!((bytes[16], bytes[20], bytes[24], bytes[28], bytes[30]), (0x11, 0x22, 0x33, 1, 5));
        assert_eq!((bytes[32], bytes[36], bytes[40]), (3, 0x44, 0x55));
        assert_eq!(Header::read(&bytes), header);
    }

    #[test]
    fn an_unknown_number_is_not_an_operation() {
        assert_eq!(Operation::from_number(5), Some(Operation::Data));
        assert_eq!([0, 8, u16::MAX].map(Operation::from_number), [None; 3]);
    }
}
