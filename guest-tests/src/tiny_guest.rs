//! Guests of a few instructions, as image files: for tests, and for benches that compare what booting alone takes.

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

/// An image in ring 3, which runs at native speed on every host, that writes `text` to its serial port again and again, for ever.
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
