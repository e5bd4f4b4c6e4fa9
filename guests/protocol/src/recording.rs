//! What a kernel that is recorded writes on its standard output: frames, in the order in which it does things.
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
/// A frame of packed accesses.
pub const ACCESSES: u32 = 1;
/// A frame of one line.
pub const LINE: u32 = 2;
/// Bytes of a frame's payload at most: half of a common second-level cache, so what one side writes the other finds there.
pub const PAYLOAD_MAX: usize = 1 << 18;

/// The process's exit code where nobody reads any more. Those of kernels are [`ExitCode`](crate::ExitCode)s, which are smaller.
pub const ENDED_LOST: u8 = 70;
/// Its exit code for arguments that it cannot use: whoever starts it has checked them before.
pub const ENDED_MISUSED: u8 = 71;
/// Its exit code where there is no memory for the kernel.
pub const ENDED_NO_MEMORY: u8 = 72;
/// Its exit code where fewer steps were asked of a kernel that has none.
pub const ENDED_WITHOUT_STEPS: u8 = 73;

/// The header of a frame.
pub const fn frame_header(kind: u32, length: u32) -> [u8; FRAME_HEADER_BYTES] {
    (kind as u64 | (length as u64) << 32).to_le_bytes()
}

/// Kind and length of a frame's payload; `None` for a kind that does not exist, or a length that cannot be.
pub fn frame_of(header: [u8; FRAME_HEADER_BYTES]) -> Option<(u32, usize)> {
    let number = u64::from_le_bytes(header);
    let (kind, length) = (number as u32, (number >> 32) as usize);
    let is_known = matches!(kind, ACCESSES | LINE) && length <= PAYLOAD_MAX;
    (is_known && (kind != ACCESSES || length.is_multiple_of(8))).then_some((kind, length))
}

/// Loads, or stores, of one line that follow each other, as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed(pub u64);

impl Packed {
    /// Bytes of a line.
    pub const LINE_BYTES: u64 = 64;
    /// Most repeats of one record.
    pub const REPEATS_MAX: u32 = 1 << Self::WRITE_BIT;
    /// Most bytes of memory whose lines have room.
    pub const BYTES_MAX: u64 = Self::LINE_BYTES << (63 - Self::WRITE_BIT);
    const WRITE_BIT: u32 = 21;

    /// One access of the byte so far from the start of the memory.
    pub const fn one(offset: u64, is_write: bool) -> Self {
        Self((offset / Self::LINE_BYTES) << (Self::WRITE_BIT + 1) | (is_write as u64) << Self::WRITE_BIT)
    }

    /// The record of this one and `more` of the same.
    pub const fn with_more(self, more: u32) -> Self {
        Self(self.0 + more as u64)
    }

    /// Number of the line.
    pub const fn line(self) -> u64 {
        self.0 >> (Self::WRITE_BIT + 1)
    }

    /// Whether they are stores.
    pub const fn is_write(self) -> bool {
        self.0 >> Self::WRITE_BIT & 1 == 1
    }

    /// How many they are.
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
    fn frames_that_nobody_writes_are_refused() {
        assert_eq!(frame_of(frame_header(LINE, 7)), Some((LINE, 7)));
        assert_eq!(frame_of(frame_header(ACCESSES, PAYLOAD_MAX as u32)), Some((ACCESSES, PAYLOAD_MAX)));
        for (kind, length) in [(0, 8), (3, 8), (ACCESSES, 12), (ACCESSES, PAYLOAD_MAX as u32 + 8), (LINE, u32::MAX)] {
            assert_eq!(frame_of(frame_header(kind, length)), None, "{kind} {length}");
        }
    }
}
