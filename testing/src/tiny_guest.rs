//! Guests of a few instructions, as image files: for tests, and for benches that measure booting alone.

use wideleaf_protocol::elf::{ELF32, ELF64, ElfLayout};
use wideleaf_protocol::elf_note::{
    DIRECT_NOTE_OWNER, DIRECT_NOTE_TYPE, DIRECT_NOTE_VERSION, PVH_NOTE_OWNER, PVH_NOTE_TYPE,
};

/// Address at which the images of these tests are loaded and start.
pub const LOADED_AT: u64 = 0x20_0000;

/// Offset of an image's only segment in its file; the headers and the note come before it.
pub const CODE_AT: u64 = 0x1000;

/// A note with an image's entry.
pub fn note(owner: &str, kind: u32, descriptor: &[u8]) -> Vec<u8> {
    let mut name = [owner.as_bytes(), b"\0"].concat();
    let mut bytes = [name.len() as u32, descriptor.len() as u32, kind].map(u32::to_le_bytes).concat();
    name.resize(name.len().next_multiple_of(4), 0);
    bytes.extend(name);
    bytes.extend(descriptor);
    bytes
}

/// Note of a PVH entry: 32 bits, unpaged.
pub fn pvh() -> Vec<u8> {
    note(PVH_NOTE_OWNER, PVH_NOTE_TYPE, &LOADED_AT.to_le_bytes())
}

/// Note of a direct entry: 64 bits, ring 3.
pub fn direct() -> Vec<u8> {
    let version = DIRECT_NOTE_VERSION.to_le_bytes();
    note(DIRECT_NOTE_OWNER, DIRECT_NOTE_TYPE, &[&version[..], &[0; 4], &LOADED_AT.to_le_bytes()].concat())
}

/// An ELF file for x86-64 with one segment, `code`, that takes `bytes` in memory, and one note (System V ABI).
pub fn elf(notes: &[u8], code: &[u8], bytes: u64) -> Vec<u8> {
    elf_of(&ELF64, notes, code, bytes)
}

/// A well-formed image that runs `code`.
pub fn image(note: &[u8], code: &[u8]) -> Vec<u8> {
    elf(note, code, 0x1000)
}

/// A PVH image of five instructions: it prints `x` on its serial port and halts.
pub fn prints_one_byte() -> Vec<u8> {
    const CODE: [u8; 11] = [
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, b'x', // mov al, 'x'
        0xee, // out dx, al
        0xfa, // cli
        0xf4, // hlt
        0xeb, 0xfd, // jmp to the hlt
    ];
    image(&pvh(), &CODE)
}

/// An image that writes `text` to its serial port for ever. It runs in ring 3, and so at native speed on every
/// host.
pub fn prints_for_ever(text: &[u8]) -> Vec<u8> {
    const CODE_BYTES: u8 = 24;
    let mut code = vec![0x48, 0xbe]; // mov rsi, the text behind this code
    code.extend((LOADED_AT + u64::from(CODE_BYTES)).to_le_bytes());
    code.push(0xb9); // mov ecx, its length
    code.extend((text.len() as u32).to_le_bytes());
    code.extend([0x66, 0xba, 0xf8, 0x03]); // mov dx, 0x3f8
    code.extend([0xfc, 0xf3, 0x6e]); // cld; rep outsb
    code.extend([0xeb, CODE_BYTES.wrapping_neg()]); // jmp to the first instruction
    assert_eq!(code.len(), usize::from(CODE_BYTES), "the text lies behind the code");
    code.extend(text);
    let bytes = (code.len() as u64).next_multiple_of(0x1000);
    elf(&direct(), &code, bytes)
}

/// An image as a file of 32 bits, for a 386.
pub fn image32(note: &[u8], code: &[u8]) -> Vec<u8> {
    elf_of(&ELF32, note, code, 0x1000)
}

fn elf_of(layout: &ElfLayout, notes: &[u8], code: &[u8], bytes: u64) -> Vec<u8> {
    let (pt_load, pt_note) = (1_u8, 4_u8);
    let (class, machine) = if *layout == ELF64 { (2, 62) } else { (1, 3) };
    let notes_at = layout.header_bytes + 2 * layout.program_header_bytes;
    let mut file = vec![0; notes_at];
    let mut put =
        |at: usize, value: u64, bytes: usize| file[at..][..bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    put(0, u64::from_le_bytes(*b"\x7fELF\0\x01\x01\0"), 8);
    put(4, class, 1);
    put(16, 2, 2); // e_type: a program
    put(18, machine, 2);
    put(20, 1, 4); // e_version
    put(24, LOADED_AT, layout.word_bytes); // e_entry
    put(layout.table_at, layout.header_bytes as u64, layout.word_bytes);
    put(layout.stride_at, layout.program_header_bytes as u64, 2);
    put(layout.count_at, 2, 2);
    let mut program_header = |index: usize, kind: u8, at: u64, in_file: u64, in_memory: u64| {
        let header = layout.header_bytes + index * layout.program_header_bytes;
        put(header, kind.into(), 4);
        for (field, word) in [
            (layout.file_at, at),
            (layout.address_at, LOADED_AT),
            (layout.file_bytes_at, in_file),
            (layout.memory_bytes_at, in_memory),
        ] {
            put(header + field, word, layout.word_bytes);
        }
    };
    program_header(0, pt_load, CODE_AT, code.len() as u64, bytes);
    program_header(1, pt_note, notes_at as u64, notes.len() as u64, notes.len() as u64);
    // The last field of the last header: QEMU reads notes with the alignment in it.
    let alignment_at = notes_at - layout.word_bytes;
    file[alignment_at] = 4;
    file.extend(notes);
    file.resize(CODE_AT as usize, 0);
    file.extend(code);
    file
}
