//! Blocks: what stands between the header and the end of a trace, each with its lengths and its checksum.
//!
//! ```text
//!   0        4         8        12      16        20
//!   │ kind   │ records │ stored │ plain │ crc-32  │ payload, `stored` bytes
//!   └────────┴─────────┴────────┴───────┴─────────┴──────────────
//!   └────── under the checksum ─────────┘           └ under it too ┘      all numbers little-endian
//! ```

use crc32fast::Hasher;

use crate::records::RECORD_BYTES_MAX;

/// Records of a block at most: some hundred KiB as bytes, enough to compress well and little to hold.
pub const RECORDS_MAX: usize = 1 << 16;
/// Bytes of a payload before compression at most.
pub const PLAIN_MAX: usize = RECORDS_MAX * RECORD_BYTES_MAX;
/// Bytes of a payload as it is stored at most. Deflate adds five bytes to each 64 KiB that it cannot make smaller.
pub const STORED_MAX: usize = PLAIN_MAX + PLAIN_MAX / 1024 + 64;
/// Bytes before the payload.
pub const BLOCK_HEADER_BYTES: usize = 20;
/// Bytes of a phase's name at most: the protocol's names are no longer.
pub const PHASE_BYTES_MAX: usize = 64;
/// Bytes of the last block's payload: records, reads, writes, and 1 where the recording was cut.
pub const END_BYTES: usize = 4 * 8;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Records, compressed.
    Records = 1,
    /// The name of the phase that begins.
    Phase = 2,
    /// Totals; nothing follows.
    End = 3,
}

/// The numbers before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// What it is.
    pub kind: Kind,
    /// How many records it holds.
    pub records: u32,
    /// Bytes of the payload.
    pub stored: u32,
    /// Bytes of the payload when it is unpacked.
    pub plain: u32,
}

impl BlockHeader {
    /// The header as bytes, with the checksum over itself and the payload.
    pub fn to_bytes(self, payload: &[u8]) -> [u8; BLOCK_HEADER_BYTES] {
        let mut bytes = [0; BLOCK_HEADER_BYTES];
        let fields = [self.kind as u32, self.records, self.stored, self.plain];
        for (place, field) in bytes.as_chunks_mut().0.iter_mut().zip(fields) {
            *place = field.to_le_bytes();
        }
        let checksum = checksum(&bytes[..16], payload);
        bytes[16..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The header in these bytes, and the checksum. Lengths that no writer would write are refused here, before anybody makes room for them.
    pub fn from_bytes(bytes: &[u8; BLOCK_HEADER_BYTES]) -> Result<(Self, u32), &'static str> {
        let field = |index: usize| u32::from_le_bytes(bytes.as_chunks().0[index]);
        let (records, stored, plain) = (field(1), field(2), field(3));
        let (kind, is_possible) = match field(0) {
            1 => {
                let has_records = (1..=RECORDS_MAX as u32).contains(&records);
                (Kind::Records, has_records && stored as usize <= STORED_MAX && plain as usize <= PLAIN_MAX)
            }
            2 => (Kind::Phase, records == 0 && stored == plain && stored as usize <= PHASE_BYTES_MAX),
            3 => (Kind::End, records == 0 && stored == plain && stored as usize == END_BYTES),
            _ => return Err("no block of a known kind"),
        };
        if !is_possible {
            return Err("a block whose lengths cannot be");
        }
        Ok((Self { kind, records, stored, plain }, field(4)))
    }
}

/// The checksum of a block's first 16 bytes and its payload.
pub fn checksum(numbers: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = Hasher::new();
    hasher.update(numbers);
    hasher.update(payload);
    hasher.finalize()
}
