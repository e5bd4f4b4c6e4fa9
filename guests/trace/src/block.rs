//! Blocks between the header and the end of a trace, each with its lengths and its checksum.
//!
//! ```text
//!   0        4         8        12      16        20
//!   │ kind   │ records │ stored │ plain │ crc-32  │ payload, `stored` bytes
//!   └────────┴─────────┴────────┴───────┴─────────┴──────────────
//!   └────── under the checksum ─────────┘           └ under it too ┘      all numbers little-endian
//! ```

use crc32fast::Hasher;

use crate::records::RECORD_BYTES_MAX;

/// Largest number of records in a block: some hundred KiB, enough to compress well and little to hold.
pub const RECORDS_MAX: usize = 1 << 16;
/// Largest payload before compression, in bytes.
pub const PLAIN_MAX: usize = RECORDS_MAX * RECORD_BYTES_MAX;
/// Largest stored payload in bytes. Deflate adds five bytes to each 64 KiB that it cannot compress.
pub const STORED_MAX: usize = PLAIN_MAX + PLAIN_MAX / 1024 + 64;
/// Bytes before the payload.
pub const BLOCK_HEADER_BYTES: usize = 20;
/// Longest name of a phase in bytes: the protocol's names are no longer.
pub const PHASE_BYTES_MAX: usize = 64;
/// Bytes of the last block's payload: records, reads, writes, and 1 if the recording was cut.
pub const END_BYTES: usize = 4 * 8;

/// Kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Compressed records of accesses.
    Records = 1,
    /// Name of the phase that begins.
    Phase = 2,
    /// Totals; the last block of the trace.
    End = 3,
}

/// The numbers before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// Kind of the block.
    pub kind: Kind,
    /// Number of records in the block.
    pub records: u32,
    /// Bytes of the stored payload.
    pub stored: u32,
    /// Bytes of the payload after decompression.
    pub plain: u32,
}

impl BlockHeader {
    /// Encodes the header, with the checksum over itself and the payload.
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

    /// Decodes the header and the checksum. Impossible lengths are refused here, before memory is allocated for
    /// them.
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
            _ => return Err("a block of unknown kind"),
        };
        if !is_possible {
            return Err("a block with impossible lengths");
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
