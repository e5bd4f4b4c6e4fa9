//! Offsets of the fields of an ELF file (System V ABI, "ELF header" and "Program header"): little-endian files of
//! both classes.
//!
//! | class | header | program header | a word |
//! |---|---|---|---|
//! | 32 bits | 52 bytes | 32 bytes | 4 bytes |
//! | 64 bits | 64 bytes | 56 bytes | 8 bytes |

/// Offsets and sizes in a file of one class, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElfLayout {
    /// Size of a word: an address, an offset or a size in the file.
    pub word_bytes: usize,
    /// Size of the ELF header.
    pub header_bytes: usize,
    /// Offset of the word with the offset of the program headers.
    pub table_at: usize,
    /// Offset of the distance between two program headers, 16 bits.
    pub stride_at: usize,
    /// Offset of the number of program headers, 16 bits.
    pub count_at: usize,
    /// Size of a program header. Its first 32 bits are its type, in both classes.
    pub program_header_bytes: usize,
    /// Offset, in a program header, of the segment's place in the file.
    pub file_at: usize,
    /// Offset, in a program header, of the segment's physical address.
    pub address_at: usize,
    /// Offset, in a program header, of the segment's size in the file.
    pub file_bytes_at: usize,
    /// Offset, in a program header, of the segment's size in memory.
    pub memory_bytes_at: usize,
}

/// Layout of 32-bit files.
pub const ELF32: ElfLayout = ElfLayout {
    word_bytes: 4,
    header_bytes: 52,
    table_at: 28,
    stride_at: 42,
    count_at: 44,
    program_header_bytes: 32,
    file_at: 4,
    address_at: 12,
    file_bytes_at: 16,
    memory_bytes_at: 20,
};

/// Layout of 64-bit files.
pub const ELF64: ElfLayout = ElfLayout {
    word_bytes: 8,
    header_bytes: 64,
    table_at: 32,
    stride_at: 54,
    count_at: 56,
    program_header_bytes: 56,
    file_at: 8,
    address_at: 24,
    file_bytes_at: 32,
    memory_bytes_at: 40,
};

/// Bytes of a file's identification that [`ElfLayout::of`] reads: magic, class, byte order.
pub const IDENTIFICATION_BYTES: usize = 6;

impl ElfLayout {
    /// The layout of a little-endian ELF file; `None` for every other file.
    pub fn of(file: &[u8]) -> Option<&'static ElfLayout> {
        const LITTLE_ENDIAN: u8 = 1;
        match file.first_chunk()? {
            [0x7f, b'E', b'L', b'F', 1, LITTLE_ENDIAN] => Some(&ELF32),
            [0x7f, b'E', b'L', b'F', 2, LITTLE_ENDIAN] => Some(&ELF64),
            _ => None,
        }
    }

    /// The word at this offset; `None` if it is not inside.
    pub fn word(&self, bytes: &[u8], at: usize) -> Option<u64> {
        if self.word_bytes == 4 { read_u32(bytes, at).map(u64::from) } else { read_u64(bytes, at) }
    }
}

/// 16 bits at this offset; `None` if they are not inside.
pub fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// 32 bits at this offset; `None` if they are not inside.
pub fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// 64 bits at this offset; `None` if they are not inside.
pub fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
