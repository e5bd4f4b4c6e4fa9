//! Encoding of the header and the totals.
//!
//! ```text
//!   0          8         12        16            24           28                 32
//!   │ wl-trace │ version │ granule │ arena bytes │ iterations │ class_iterations │
//!
//!   32       34      36           38  40
//!   │ kernel │ class │ parameters │ 0 │ strings │ crc-32
//!   └── lengths of the strings ───┘
//! ```

use crate::block::{END_BYTES, checksum};
use crate::error::TraceError;
use crate::{GRANULE_BYTES, Header, Totals, VERSION};

const MAGIC: &[u8; 8] = b"wl-trace";
/// Largest total length of the strings in bytes: as long as a command line can be.
pub const STRINGS_MAX: usize = 4096;

impl Header {
    /// Encodes the header at the start of a file; `None` if its strings are too long.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        let strings = [&self.kernel, &self.class, &self.parameters];
        if strings.iter().map(|string| string.len()).sum::<usize>() > STRINGS_MAX {
            return None;
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(GRANULE_BYTES.to_le_bytes());
        bytes.extend(self.arena_bytes.to_le_bytes());
        bytes.extend(self.iterations.to_le_bytes());
        bytes.extend(self.class_iterations.to_le_bytes());
        strings.iter().for_each(|string| bytes.extend((string.len() as u16).to_le_bytes()));
        bytes.extend([0, 0]);
        strings.iter().for_each(|string| bytes.extend(string.as_bytes()));
        bytes.extend(checksum(&bytes, &[]).to_le_bytes());
        Some(bytes)
    }
}

/// The fixed-size part of the header.
#[derive(Debug)]
pub struct Fixed {
    bytes: [u8; Self::BYTES],
    lengths: [usize; 3],
}

impl Fixed {
    /// Length of this part in bytes.
    pub const BYTES: usize = 40;

    /// Decodes the beginning of a file. Distinguishes a file that is not a trace, or has another version, from one
    /// that ends early.
    pub fn from_bytes(read: &[u8]) -> Result<Self, TraceError> {
        if !read.starts_with(MAGIC) {
            return Err(TraceError::NotATrace);
        }
        if let Some(version) = read.get(8..12).and_then(|bytes| bytes.first_chunk())
            && u32::from_le_bytes(*version) != VERSION
        {
            return Err(TraceError::Version { found: u32::from_le_bytes(*version) });
        }
        let Ok(bytes) = <[u8; Self::BYTES]>::try_from(read) else {
            return Err(TraceError::Truncated { at: read.len() as u64 });
        };
        let lengths = [32, 34, 36].map(|at| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]])));
        if lengths.iter().sum::<usize>() > STRINGS_MAX {
            return Err(TraceError::Damaged { at: 0, what: "a header with impossible lengths" });
        }
        Ok(Self { bytes, lengths })
    }

    /// Bytes of the strings behind it.
    pub fn strings_bytes(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Decodes the whole header: `rest` is the strings and the checksum.
    pub fn header(&self, rest: &[u8]) -> Result<Header, TraceError> {
        let damaged = |what| TraceError::Damaged { at: 0, what };
        let (strings, expected) = rest.split_at(self.strings_bytes());
        if checksum(&self.bytes, strings).to_le_bytes() != *expected {
            return Err(damaged("the header's checksum is wrong"));
        }
        if self.u32_at(12) != GRANULE_BYTES {
            return Err(damaged("a granule that is not a cache line"));
        }
        let (kernel, behind) = strings.split_at(self.lengths[0]);
        let (class, parameters) = behind.split_at(self.lengths[1]);
        let text = |bytes: &[u8]| match str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(damaged("a header with names that are not UTF-8")),
        };
        Ok(Header {
            kernel: text(kernel)?,
            class: text(class)?,
            parameters: text(parameters)?,
            arena_bytes: u64::from(self.u32_at(16)) | u64::from(self.u32_at(20)) << 32,
            iterations: self.u32_at(24),
            class_iterations: self.u32_at(28),
        })
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes([self.bytes[at], self.bytes[at + 1], self.bytes[at + 2], self.bytes[at + 3]])
    }
}

impl Totals {
    /// Encodes the payload of the last block.
    pub(crate) fn to_bytes(self) -> [u8; END_BYTES] {
        let mut bytes = [0; END_BYTES];
        let fields = [self.records, self.reads, self.writes, u64::from(self.is_cut)];
        for (place, field) in bytes.as_chunks_mut().0.iter_mut().zip(fields) {
            *place = field.to_le_bytes();
        }
        bytes
    }

    /// Decodes the totals from this payload; `None` if it is invalid.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (fields, []) = bytes.as_chunks() else { return None };
        let [records, reads, writes, cut] = fields else { return None };
        let is_cut = match u64::from_le_bytes(*cut) {
            0 => false,
            1 => true,
            _ => return None,
        };
        let [records, reads, writes] = [records, reads, writes].map(|field| u64::from_le_bytes(*field));
        Some(Self { records, reads, writes, is_cut })
    }
}
