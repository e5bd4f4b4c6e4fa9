//! Guests of a few instructions, as image files.

use wideleaf_protocol::elf_note::{
    DIRECT_NOTE_OWNER, DIRECT_NOTE_TYPE, DIRECT_NOTE_VERSION, PVH_NOTE_OWNER, PVH_NOTE_TYPE,
};

/// Where the images of these tests are loaded and start.
pub const LOADED_AT: u64 = 0x20_0000;

/// The only segment of an image begins here in its file; before it are headers and note.
pub const CODE_AT: u64 = 0x1000;

/// A note that gives an image its entry.
pub fn note(owner: &str, kind: u32, descriptor: &[u8]) -> Vec<u8> {
    let mut name = [owner.as_bytes(), b"\0"].concat();
    let mut bytes = [name.len() as u32, descriptor.len() as u32, kind].map(u32::to_le_bytes).concat();
    name.resize(name.len().next_multiple_of(4), 0);
    bytes.extend(name);
    bytes.extend(descriptor);
    bytes
}

/// 32 bits, unpaged.
pub fn pvh() -> Vec<u8> {
    note(PVH_NOTE_OWNER, PVH_NOTE_TYPE, &LOADED_AT.to_le_bytes())
}

/// 64 bits, ring 3.
pub fn direct() -> Vec<u8> {
    let version = DIRECT_NOTE_VERSION.to_le_bytes();
    note(DIRECT_NOTE_OWNER, DIRECT_NOTE_TYPE, &[&version[..], &[0; 4], &LOADED_AT.to_le_bytes()].concat())
}

/// An ELF64 file for x86-64 with one segment, `code`, that takes `bytes` in memory, and one note (System V ABI).
pub fn elf(notes: &[u8], code: &[u8], bytes: u64) -> Vec<u8> {
    const HEADER_BYTES: u64 = 64;
    const PROGRAM_HEADER_BYTES: u64 = 56;
    let (pt_load, pt_note, flags_rwx) = (1_u32, 4_u32, 7_u32);
    let notes_at = HEADER_BYTES + 2 * PROGRAM_HEADER_BYTES;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    file.extend([LOADED_AT, HEADER_BYTES, 0].map(u64::to_le_bytes).concat());
    file.extend([0, 0, HEADER_BYTES as u16, PROGRAM_HEADER_BYTES as u16, 2, 0, 0, 0].map(u16::to_le_bytes).concat());
    let mut program_header = |kind: u32, at: u64, in_file: u64, in_memory: u64| {
        file.extend([kind, flags_rwx].map(u32::to_le_bytes).concat());
        file.extend([at, LOADED_AT, LOADED_AT, in_file, in_memory, 0x1000].map(u64::to_le_bytes).concat());
    };
    program_header(pt_load, CODE_AT, code.len() as u64, bytes);
    program_header(pt_note, notes_at, notes.len() as u64, notes.len() as u64);
    file.extend(notes);
    file.resize(CODE_AT as usize, 0);
    file.extend(code);
    file
}

/// An image that is well formed and runs `code`.
pub fn image(note: &[u8], code: &[u8]) -> Vec<u8> {
    elf(note, code, 0x1000)
}

/// An image that prints `text` for ever, a page of it at each exit.
pub fn printer(text: &[u8]) -> Vec<u8> {
    let code = |text_at: u32| {
        let set_up: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xfc]; // mov dx, 0x3f8; cld
        let from = [&[0xbe][..], &text_at.to_le_bytes()].concat(); // mov esi, text
        let count = [&[0xb9][..], &(text.len() as u32).to_le_bytes()].concat(); // mov ecx, count
        [set_up, &from, &count, &[0xf3, 0x6e, 0xeb, 0xf2]].concat() // rep outsb; jmp to mov esi
    };
    let text_at = LOADED_AT as u32 + code(0).len() as u32;
    let all = [&code(text_at), text].concat();
    elf(&pvh(), &all, all.len().next_multiple_of(0x1000) as u64)
}
