//! The ELF notes with an image's entries, and a reader for them.
//!
//! | owner | type | descriptor | entry |
//! |---|---|---|---|
//! | `Xen` | [`PVH_NOTE_TYPE`] | physical address, of which the lower 32 bits count | 32-bit protected mode, EBX = start info (Xen: docs/misc/pvh.pandoc) |
//! | `wideleaf` | [`DIRECT_NOTE_TYPE`] | [`DirectNote`] | 64-bit ring 3 ([`direct`](crate::direct)) |

use crate::elf::{ELF64, ElfLayout, read_u16, read_u32, read_u64};

/// Owner of the PVH note.
pub const PVH_NOTE_OWNER: &str = "Xen";
/// Type of the PVH note: `XEN_ELFNOTE_PHYS32_ENTRY` (Xen: public/elfnote.h).
pub const PVH_NOTE_TYPE: u32 = 18;
/// Owner of the note of the direct entry.
pub const DIRECT_NOTE_OWNER: &str = "wideleaf";
/// Type of the note of the direct entry.
pub const DIRECT_NOTE_TYPE: u32 = 1;
/// Version in the descriptor of the direct entry.
pub const DIRECT_NOTE_VERSION: u32 = 1;

/// One note of an ELF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note<'a> {
    /// Name of the owner that defined the type, without the terminating zero.
    pub owner: &'a [u8],
    /// Type of the descriptor, in the owner's numbering.
    pub kind: u32,
    /// Content of the note.
    pub descriptor: &'a [u8],
}

/// Descriptor of the direct entry's note: `u32 version, u32 reserved, u64 entry64`, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectNote {
    /// Version of the descriptor, [`DIRECT_NOTE_VERSION`].
    pub version: u32,
    /// Address at which every vCPU starts.
    pub entry64: u64,
}

/// The direct entry of an image; `None` if the file is not an ELF64 file or has no such note of a known version.
pub fn direct_entry(elf: &[u8]) -> Option<DirectNote> {
    let is_64_bit = ElfLayout::of(elf) == Some(&ELF64);
    let mut notes = notes(elf).filter(|_| is_64_bit);
    let note = notes.find(|note| note.owner == DIRECT_NOTE_OWNER.as_bytes() && note.kind == DIRECT_NOTE_TYPE)?;
    let note = DirectNote { version: read_u32(note.descriptor, 0)?, entry64: read_u64(note.descriptor, 8)? };
    (note.version == DIRECT_NOTE_VERSION).then_some(note)
}

/// The PVH entry of an image; `None` if the file is not an ELF file or has no such note. 32-bit ELF files have one
/// too: its code is 32-bit code in every case.
pub fn pvh_entry(elf: &[u8]) -> Option<u32> {
    let mut notes = notes(elf);
    let note = notes.find(|note| note.owner == PVH_NOTE_OWNER.as_bytes() && note.kind == PVH_NOTE_TYPE)?;
    read_u32(note.descriptor, 0)
}

/// The notes in the `PT_NOTE` segments of a little-endian ELF file of either class, in file order. The iteration
/// ends at the first field outside the file, and is empty for a file of another kind.
pub fn notes(elf: &[u8]) -> impl Iterator<Item = Note<'_>> {
    let layout = ElfLayout::of(elf);
    let header_count = layout.and_then(|layout| read_u16(elf, layout.count_at)).unwrap_or(0);
    (0..header_count).flat_map(move |index| SegmentNotes { rest: note_segment(elf, index).unwrap_or(&[]) })
}

/// The bytes of the segment with this program header, if it is a `PT_NOTE` inside the file.
fn note_segment(elf: &[u8], index: u16) -> Option<&[u8]> {
    const PT_NOTE: u32 = 4;
    let layout = ElfLayout::of(elf)?;
    let stride = u64::from(read_u16(elf, layout.stride_at)?);
    let start = layout.word(elf, layout.table_at)?.checked_add(u64::from(index) * stride)?;
    let header = elf.get(usize::try_from(start).ok()?..)?;
    if read_u32(header, 0)? != PT_NOTE {
        return None;
    }
    let start = usize::try_from(layout.word(header, layout.file_at)?).ok()?;
    let bytes = usize::try_from(layout.word(header, layout.file_bytes_at)?).ok()?;
    elf.get(start..start.checked_add(bytes)?)
}

/// The notes of one segment. Names and descriptors are padded to 4 bytes (gABI, "Note Section").
struct SegmentNotes<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for SegmentNotes<'a> {
    type Item = Note<'a>;

    fn next(&mut self) -> Option<Note<'a>> {
        const HEADER_BYTES: usize = 12;
        let owner_bytes = read_u32(self.rest, 0)? as usize;
        let descriptor_bytes = read_u32(self.rest, 4)? as usize;
        let kind = read_u32(self.rest, 8)?;
        let descriptor_start = HEADER_BYTES.checked_add(owner_bytes.checked_next_multiple_of(4)?)?;
        let end = descriptor_start.checked_add(descriptor_bytes)?;
        let owner = self.rest.get(HEADER_BYTES..HEADER_BYTES + owner_bytes)?;
        let descriptor = self.rest.get(descriptor_start..end)?;
        self.rest = self.rest.get(end.checked_next_multiple_of(4)?..).unwrap_or(&[]);
        Some(Note { owner: owner.strip_suffix(b"\0").unwrap_or(owner), kind, descriptor })
    }
}
