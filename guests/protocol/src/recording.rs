//! Standard output of a recorded kernel: frames, in the order of its actions.
//!
//! ```text
//!   ┌──────┬────────┬─────────────────────────────┐
//!   │ kind │ length │ payload, `length` bytes     │   kind, length: u32, little-endian
//!   └──────┴────────┴─────────────────────────────┘
//!   ACCESSES  packed accesses, 8 bytes each     63 … 22    21    20 … 0
//!                                               line     │ write │ repeats − 1
//!   LINE      a line of this protocol, without its end
//! ```

/// Bytes before a payload.
pub const FRAME_HEADER_BYTES: usize = 8;
/// Kind of a frame with packed accesses.
pub const ACCESSES: u32 = 1;
/// Kind of a frame with one line.
pub const LINE: u32 = 2;
/// Largest payload of a frame in bytes: half of a common second-level cache, so that the reader finds it in the
/// cache.
pub const PAYLOAD_MAX: usize = 1 << 18;

/// Exit code of the process if its reader is gone. Those of kernels are [`ExitCode`](crate::ExitCode)s, which are
/// smaller.
pub const ENDED_LOST: u8 = 70;
/// Exit code for unusable arguments, which the parent has checked before.
pub const ENDED_MISUSED: u8 = 71;
/// Exit code if there is no memory for the kernel.
pub const ENDED_NO_MEMORY: u8 = 72;
/// Exit code if a limit of steps is given for a kernel without steps.
pub const ENDED_WITHOUT_STEPS: u8 = 73;

/// Encodes the header of a frame.
pub const fn frame_header(kind: u32, length: u32) -> [u8; FRAME_HEADER_BYTES] {
    (kind as u64 | (length as u64) << 32).to_le_bytes()
}

/// Kind and payload length of a frame; `None` for an unknown kind or an impossible length.
pub fn frame_of(header: [u8; FRAME_HEADER_BYTES]) -> Option<(u32, usize)> {
    let number = u64::from_le_bytes(header);
    let (kind, length) = (number as u32, (number >> 32) as usize);
    let is_known = matches!(kind, ACCESSES | LINE) && length <= PAYLOAD_MAX;
    (is_known && (kind != ACCESSES || length.is_multiple_of(8))).then_some((kind, length))
}

/// Consecutive loads, or consecutive stores, of one line, as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed(pub u64);

impl Packed {
    /// Bytes of a cache line.
    pub const LINE_BYTES: u64 = 64;
    /// Largest number of repeats in one record.
    pub const REPEATS_MAX: u32 = 1 << Self::WRITE_BIT;
    /// Largest memory in bytes with line numbers that fit.
    pub const BYTES_MAX: u64 = Self::LINE_BYTES << (63 - Self::WRITE_BIT);
    const WRITE_BIT: u32 = 21;

    /// One access of the byte at this offset from the start of the memory.
    pub const fn one(offset: u64, is_write: bool) -> Self {
        Self((offset / Self::LINE_BYTES) << (Self::WRITE_BIT + 1) | (is_write as u64) << Self::WRITE_BIT)
    }

    /// This record with `more` repeats.
    pub const fn with_more(self, more: u32) -> Self {
        Self(self.0 + more as u64)
    }

    /// Number of the line.
    pub const fn line(self) -> u64 {
        self.0 >> (Self::WRITE_BIT + 1)
    }

    /// Whether the accesses are stores.
    pub const fn is_write(self) -> bool {
        self.0 >> Self::WRITE_BIT & 1 == 1
    }

    /// Number of accesses.
    pub const fn repeats(self) -> u32 {
        (self.0 as u32 & (Self::REPEATS_MAX - 1)) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_accesses_come_back() {
        for (offset, is_write, more) in
            [(0, false, 0), (Packed::BYTES_MAX - 1, true, Packed::REPEATS_MAX - 1), (64, true, 7)]
        {
            let packed = Packed::one(offset, is_write).with_more(more);
            assert_eq!((packed.line(), packed.is_write(), packed.repeats()), (offset / 64, is_write, more + 1));
        }
    }

    #[test]
    fn frames_that_no_kernel_writes_are_refused() {
        assert_eq!(frame_of(frame_header(LINE, 7)), Some((LINE, 7)));
        assert_eq!(frame_of(frame_header(ACCESSES, PAYLOAD_MAX as u32)), Some((ACCESSES, PAYLOAD_MAX)));
        for (kind, length) in [(0, 8), (3, 8), (ACCESSES, 12), (ACCESSES, PAYLOAD_MAX as u32 + 8), (LINE, u32::MAX)] {
            assert_eq!(frame_of(frame_header(kind, length)), None, "{kind} {length}");
        }
    }
}
