//! Format and needs of an image: all checks that are possible before a byte of it is in guest memory. The image is not
//! trusted: every offset and length is checked against the file, and segments that overlap are refused.

use std::ops::Range;

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};
use wideleaf_protocol::elf::{ELF32, ELF64, ElfLayout, IDENTIFICATION_BYTES};
use wideleaf_protocol::elf_note::{
    DIRECT_NOTE_OWNER, DIRECT_NOTE_TYPE, DIRECT_NOTE_VERSION, direct_entry, notes, pvh_entry,
};

use crate::config::EntryChoice;
use crate::x86::layout::IMAGE_START_MIN;

/// An image in a format that this VMM boots.
#[derive(Clone, Debug)]
pub enum Image {
    /// An ELF file with a wideleaf note: 64-bit ring 3, no boot code.
    Direct {
        /// Address where every vCPU starts.
        entry: u64,
        /// Parts of the file and their addresses.
        segments: Vec<Segment>,
    },
    /// An ELF file, of 32 or 64 bits, with a PVH note: 32-bit code, unpaged. Linux's `vmlinux`, and our image.
    Pvh {
        /// Address where the first vCPU starts.
        entry: u32,
        /// Parts of the file and their addresses.
        segments: Vec<Segment>,
    },
    /// Linux's bzImage format.
    BzImage {
        /// Its header; boxed because it is large.
        header: Box<setup_header>,
        /// Length of the part of the file in front of the loaded part, in bytes.
        setup_bytes: usize,
    },
}

impl Image {
    /// The image format's name in reports.
    pub const fn name(&self) -> &'static str {
        match self {
            Image::Direct { .. } => "direct",
            Image::Pvh { .. } => "pvh",
            Image::BzImage { .. } => "bzimage",
        }
    }
}

/// A part of an ELF file that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Range of its bytes in the file.
    pub file: Range<usize>,
    /// Range in guest memory, including the part that is zero.
    pub memory: GpaRange,
}

/// The reasons why an image cannot be booted. Each is one line that follows "cannot boot image PATH: it".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The file has no bytes.
    #[error("is empty")]
    Empty,
    /// The file's format is unknown.
    #[error("is neither an ELF file nor a bzImage: it looks like {looks_like}")]
    Unknown {
        /// Format that its first bytes suggest.
        looks_like: &'static str,
    },
    /// The file ends early.
    #[error("is truncated: {what} ends at byte {needs}, the file has {has}")]
    Truncated {
        /// Name of the part that is cut off.
        what: &'static str,
        /// End of that part, in bytes from the file's start.
        needs: u64,
        /// Size of the file, in bytes.
        has: usize,
    },
    /// An ELF file for another CPU.
    #[error("is an ELF file for {machine}: build it for x86_64")]
    WrongMachine {
        /// Name of that CPU.
        machine: &'static str,
    },
    /// An ELF file with invalid header fields.
    #[error("is a malformed ELF file: {0}")]
    MalformedElf(&'static str),
    /// An ELF file without a known entry.
    #[error(
        "is an ELF file without a {wanted} note: an ordinary program cannot be booted; for Linux use the bzImage, or \
         build with CONFIG_PVH=y"
    )]
    NoEntryNote {
        /// The notes that are accepted.
        wanted: &'static str,
    },
    /// A wideleaf note of another version.
    #[error("has a wideleaf note of version {found}, this VMM knows {DIRECT_NOTE_VERSION}: rebuild the image")]
    DirectNoteVersion {
        /// Version of the note.
        found: u32,
    },
    /// A file without a loadable segment.
    #[error("has nothing to load: no PT_LOAD segment")]
    NothingToLoad,
    /// A segment overlaps the VMM's own tables.
    #[error("must be loaded at {start}, below {IMAGE_START_MIN} where the VMM keeps its tables: link it higher")]
    TooLow {
        /// Start of the segment.
        start: Gpa,
    },
    /// A segment outside RAM.
    #[error("needs memory up to {end}, guest RAM ends at {ram_end}: {}", more_ram(*end))]
    BeyondRam {
        /// First address behind the image.
        end: Gpa,
        /// First address behind RAM.
        ram_end: Gpa,
    },
    /// A segment in the hole below 4 GiB.
    #[error("must be loaded at {start}..{end}, where there is no RAM: the hole is 3 to 4 GiB")]
    InHole {
        /// Start of the segment.
        start: Gpa,
        /// First address behind the segment.
        end: Gpa,
    },
    /// Two segments overlap.
    #[error("has segments that overlap: {first} and {second}")]
    Overlap {
        /// Start of the first segment.
        first: Gpa,
        /// Start of the second segment.
        second: Gpa,
    },
    /// The entry is not in the image.
    #[error("starts at {entry:#x}, which no segment covers")]
    EntryOutside {
        /// Address of the entry.
        entry: u64,
    },
    /// A kernel with an old boot protocol.
    #[error(
        "is a bzImage of boot protocol {}.{:02}: Linux has had the 64-bit entry since 2.12 (Linux 3.8)",
        version >> 8,
        version & 0xff
    )]
    OldBzImage {
        /// Protocol version, major in the high byte.
        version: u16,
    },
    /// A kernel that has no 64-bit entry.
    #[error("is a 32-bit bzImage: use its 64-bit build (of Linux: CONFIG_64BIT=y)")]
    BzImage32,
    /// A kernel that must be loaded below 640 KiB.
    #[error("is a zImage: build a bzImage, which is loaded at 1 MiB")]
    ZImage,
}

/// Remedy for an image that needs RAM up to `end`; x86-64 cannot address more than 52 bits.
fn more_ram(end: Gpa) -> String {
    match ram_up_to(end) {
        ram if ram.get() > 1 << 52 => "no machine has this amount; check whether the file is damaged".to_owned(),
        ram => format!("use at least {ram} of --memory"),
    }
}

/// RAM that reaches `end`, in whole windows; the next check would refuse other sizes.
fn ram_up_to(end: Gpa) -> Bytes {
    Bytes::new(end.get().checked_next_multiple_of(PageSize::Huge2M.bytes().get()).unwrap_or(u64::MAX))
}

/// Offset of a bzImage's header in the file, and below its magic word (Linux, Documentation/arch/x86/boot.rst).
const HEADER_AT: usize = 0x1f1;
const HEADER_MAGIC_AT: usize = 0x202;
const HEADER_MAGIC: &[u8] = b"HdrS";
/// Base of the header's end: this offset plus the byte at [`HEADER_JUMP_AT`].
const HEADER_END_AFTER: usize = 0x202;
/// Offset of the byte that holds the length of the jump over the header.
const HEADER_JUMP_AT: usize = 0x201;
/// Flag in `loadflags`: the kernel is loaded at 1 MiB.
const LOADED_HIGH: u8 = 1;
/// Unit of `syssize`, in bytes.
const PARAGRAPH: usize = 16;
/// First protocol version with a 64-bit entry.
const VERSION_64: u16 = 0x020c;
/// Flag in `xloadflags`: the kernel has the 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;

/// Determines the format of the image in `bytes`.
///
/// # Errors
/// [`ImageError`].
pub fn identify(bytes: &[u8], choice: EntryChoice) -> Result<Image, ImageError> {
    if bytes.is_empty() {
        return Err(ImageError::Empty);
    }
    if bytes.starts_with(b"\x7fELF") {
        return identify_elf(bytes, choice);
    }
    if bytes.get(HEADER_MAGIC_AT..).is_some_and(|rest| rest.starts_with(HEADER_MAGIC)) {
        return identify_bzimage(bytes);
    }
    Err(ImageError::Unknown { looks_like: looks_like(bytes) })
}

fn identify_bzimage(bytes: &[u8]) -> Result<Image, ImageError> {
    let truncated = |what, needs: usize| ImageError::Truncated { what, needs: needs as u64, has: bytes.len() };
    let mut header = setup_header::default();
    let end = HEADER_AT + size_of::<setup_header>();
    let raw = bytes.get(HEADER_AT..end).ok_or_else(|| truncated("the setup header", end))?;
    header.as_mut_slice().copy_from_slice(raw);
    // The header is shorter, of an earlier protocol: its last field here is code already.
    if HEADER_END_AFTER + usize::from(bytes[HEADER_JUMP_AT]) < end {
        header.kernel_info_offset = 0;
    }
    let (version, flags) = (header.version, header.xloadflags);
    if version < VERSION_64 {
        return Err(ImageError::OldBzImage { version });
    }
    if flags & XLF_KERNEL_64 == 0 {
        return Err(ImageError::BzImage32);
    }
    if header.loadflags & LOADED_HIGH == 0 {
        return Err(ImageError::ZImage);
    }
    // Zero means four, for historical reasons; the boot sector comes on top.
    let sectors = if header.setup_sects == 0 { 4 } else { usize::from(header.setup_sects) };
    let setup_bytes = (sectors + 1) * 512;
    // `syssize` is rounded up: in a complete file the last paragraph may have only one byte.
    let needs = (setup_bytes + header.syssize as usize * PARAGRAPH).saturating_sub(PARAGRAPH - 1);
    if bytes.len() < needs || bytes.len() <= setup_bytes {
        return Err(truncated("the kernel", needs.max(setup_bytes + 1)));
    }
    Ok(Image::BzImage { header: Box::new(header), setup_bytes })
}

fn identify_elf(bytes: &[u8], choice: EntryChoice) -> Result<Image, ImageError> {
    let layout = elf_layout(bytes)?;
    let segments = parse_elf(bytes, layout)?;
    // The direct entry is 64-bit code; PVH's is 32-bit code in files of either class.
    let may_be_direct = choice == EntryChoice::Best && *layout == ELF64;
    if may_be_direct
        && let Some(note) =
            notes(bytes).find(|note| note.owner == DIRECT_NOTE_OWNER.as_bytes() && note.kind == DIRECT_NOTE_TYPE)
    {
        let entry = direct_entry(bytes).map(|direct| direct.entry64).ok_or_else(|| {
            let found = note.descriptor.first_chunk().map_or(0, |version| u32::from_le_bytes(*version));
            ImageError::DirectNoteVersion { found }
        })?;
        check_entry(entry, &segments)?;
        return Ok(Image::Direct { entry, segments });
    }
    let wanted = if may_be_direct { "wideleaf or PVH (Xen, type 18)" } else { "PVH (Xen, type 18)" };
    let entry = pvh_entry(bytes).ok_or(ImageError::NoEntryNote { wanted })?;
    check_entry(u64::from(entry), &segments)?;
    Ok(Image::Pvh { entry, segments })
}

fn check_entry(entry: u64, segments: &[Segment]) -> Result<(), ImageError> {
    let is_inside = segments.iter().any(|segment| segment.memory.contains(Gpa::new(entry)));
    if is_inside { Ok(()) } else { Err(ImageError::EntryOutside { entry }) }
}

/// Determines the layout of an ELF file for the CPU of this host.
fn elf_layout(bytes: &[u8]) -> Result<&'static ElfLayout, ImageError> {
    const MACHINE_AT: usize = 18;
    const MACHINE_386: u16 = 3;
    const MACHINE_X86_64: u16 = 62;
    const BIG_ENDIAN: u8 = 2;
    let truncated = |layout: &ElfLayout| ImageError::Truncated {
        what: "the ELF header",
        needs: layout.header_bytes as u64,
        has: bytes.len(),
    };
    if bytes.len() < IDENTIFICATION_BYTES {
        return Err(truncated(&ELF64));
    }
    if bytes[5] == BIG_ENDIAN {
        return Err(ImageError::WrongMachine { machine: "a big-endian CPU" });
    }
    let layout = ElfLayout::of(bytes).ok_or(ImageError::MalformedElf("it is of neither 32 nor 64 bits"))?;
    if bytes.len() < layout.header_bytes {
        return Err(truncated(layout));
    }
    match u16_at(bytes, MACHINE_AT) {
        MACHINE_X86_64 => Ok(layout),
        MACHINE_386 if *layout == ELF32 => Ok(layout),
        machine => Err(ImageError::WrongMachine { machine: machine_name(machine) }),
    }
}

/// Reads the program headers (System V ABI, "ELF header" and "Program header"). The segments are
/// ascending and disjoint.
fn parse_elf(bytes: &[u8], layout: &ElfLayout) -> Result<Vec<Segment>, ImageError> {
    let stride = usize::from(u16_at(bytes, layout.stride_at));
    let count = u64::from(u16_at(bytes, layout.count_at));
    if count > 0 && stride < layout.program_header_bytes {
        return Err(ImageError::MalformedElf("its program headers are too short"));
    }
    let table = word_at(layout, bytes, layout.table_at);
    let mut segments = Vec::new();
    for index in 0..count {
        let start = table.saturating_add(index * stride as u64);
        let end = start.saturating_add(layout.program_header_bytes as u64);
        let truncated = || ImageError::Truncated { what: "a program header", needs: end, has: bytes.len() };
        let header = slice(bytes, start, layout.program_header_bytes as u64).ok_or_else(truncated)?;
        segments.extend(loaded_segment(bytes, layout, header)?);
    }
    if segments.is_empty() {
        return Err(ImageError::NothingToLoad);
    }
    segments.sort_by_key(|segment| segment.memory.start());
    for pair in segments.windows(2) {
        if pair[0].memory.overlaps(pair[1].memory) {
            return Err(ImageError::Overlap { first: pair[0].memory.start(), second: pair[1].memory.start() });
        }
    }
    Ok(segments)
}

/// The segment of a program header, if it is loadable.
fn loaded_segment(bytes: &[u8], layout: &ElfLayout, header: &[u8]) -> Result<Option<Segment>, ImageError> {
    const PT_LOAD: u32 = 1;
    let word = |at| word_at(layout, header, at);
    let (file_at, file_bytes, memory_bytes) =
        (word(layout.file_at), word(layout.file_bytes_at), word(layout.memory_bytes_at));
    if u32_at(header, 0) != PT_LOAD || memory_bytes == 0 {
        return Ok(None);
    }
    if file_bytes > memory_bytes {
        return Err(ImageError::MalformedElf("a segment is longer in the file than in memory"));
    }
    let end = file_at
        .checked_add(file_bytes)
        .ok_or(ImageError::MalformedElf("a segment's place in the file is past 64 bits"))?;
    let truncated = || ImageError::Truncated { what: "a segment", needs: end, has: bytes.len() };
    slice(bytes, file_at, file_bytes).ok_or_else(truncated)?;
    let memory = GpaRange::new(Gpa::new(word(layout.address_at)), Bytes::new(memory_bytes))
        .ok_or(ImageError::MalformedElf("a segment ends past the last address"))?;
    Ok(Some(Segment { file: file_at as usize..end as usize, memory }))
}

/// Checks that every segment lies in RAM, clear of the VMM's tables. Returns the first address behind the image.
///
/// # Errors
/// [`ImageError::TooLow`], [`ImageError::BeyondRam`], [`ImageError::InHole`].
pub fn check_placement(segments: &[Segment], ram: &[GpaRange]) -> Result<Gpa, ImageError> {
    let ram_end = ram.iter().map(|range| range.end()).max().unwrap_or_default();
    let mut image_end = Gpa::default();
    for segment in segments {
        let (start, end) = (segment.memory.start(), segment.memory.end());
        if start < IMAGE_START_MIN {
            return Err(ImageError::TooLow { start });
        }
        if end > ram_end {
            return Err(ImageError::BeyondRam { end, ram_end });
        }
        if !ram.iter().any(|range| range.start() <= start && end <= range.end()) {
            return Err(ImageError::InHole { start, end });
        }
        image_end = image_end.max(end);
    }
    Ok(image_end)
}

/// Describes a file that is not an image, by its first bytes.
fn looks_like(bytes: &[u8]) -> &'static str {
    const MAGICS: [(&[u8], &str); 14] = [
        (b"\x1f\x8b", "a gzip file (unpack it; a kernel inside may be a vmlinux)"),
        (b"\xfd7zXZ", "an xz file (unpack it)"),
        (b"\x28\xb5\x2f\xfd", "a zstd file (unpack it)"),
        (b"BZh", "a bzip2 file (unpack it)"),
        (b"PK\x03\x04", "a zip file"),
        (b"QFI\xfb", "a qcow2 disk: give the kernel inside"),
        (b"070701", "a cpio archive: is this the initrd?"),
        (b"!<arch>", "an archive or a .deb package: unpack it"),
        (b"\xed\xab\xee\xdb", "an .rpm package: unpack it"),
        (b"#!", "a script"),
        (b"MZ", "an EFI program without a Linux boot header"),
        (b"hsqs", "a squashfs image"),
        (b"\xde\xc0\x17\x0b", "LLVM bitcode"),
        (b"\xca\xfe\xba\xbe", "a Mach-O or Java file"),
    ];
    if let Some((_, name)) = MAGICS.into_iter().find(|(magic, _)| bytes.starts_with(magic)) {
        return name;
    }
    if bytes.get(510..512) == Some(&[0x55, 0xaa]) {
        return "a boot sector or a raw disk: give the kernel inside";
    }
    let sample = &bytes[..bytes.len().min(512)];
    if sample.iter().all(|byte| *byte == 0) {
        return "zeroes";
    }
    if std::str::from_utf8(sample).is_ok_and(|text| text.chars().all(|c| !c.is_control() || c.is_whitespace())) {
        return "text";
    }
    "unknown data"
}

fn machine_name(machine: u16) -> &'static str {
    match machine {
        3 => "32-bit x86",
        8 => "MIPS",
        20 | 21 => "POWER",
        22 => "s390",
        40 => "32-bit ARM",
        183 => "aarch64",
        243 => "RISC-V",
        258 => "LoongArch",
        _ => "another CPU",
    }
}

fn slice(bytes: &[u8], start: u64, length: u64) -> Option<&[u8]> {
    let end = usize::try_from(start.checked_add(length)?).ok()?;
    bytes.get(usize::try_from(start).ok()?..end)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// Reads a word of a file of this layout.
fn word_at(layout: &ElfLayout, bytes: &[u8], at: usize) -> u64 {
    let low = u64::from(u32_at(bytes, at));
    if layout.word_bytes == 4 { low } else { low | u64::from(u32_at(bytes, at + 4)) << 32 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::x86::layout::ram_ranges;
    use wideleaf_policies::units::{gib, mib};

    /// Builds a note as the linker lays it out.
    pub(in crate::boot) fn note(owner: &str, kind: u32, descriptor: &[u8]) -> Vec<u8> {
        let mut owner = owner.as_bytes().to_vec();
        owner.push(0);
        let mut bytes = Vec::new();
        bytes.extend((owner.len() as u32).to_le_bytes());
        bytes.extend((descriptor.len() as u32).to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        owner.resize(owner.len().next_multiple_of(4), 0);
        bytes.extend(owner);
        bytes.extend(descriptor);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn direct_note(version: u32, entry: u64) -> Vec<u8> {
        let descriptor = [&version.to_le_bytes()[..], &[0; 4], &entry.to_le_bytes()].concat();
        note("wideleaf", 1, &descriptor)
    }

    pub(in crate::boot) fn pvh_note(entry: u64) -> Vec<u8> {
        note("Xen", 18, &entry.to_le_bytes())
    }

    /// Builds a 64-bit file with these segments (address, bytes in memory, content) and notes.
    pub(in crate::boot) fn elf(segments: &[(u64, u64, &[u8])], notes: &[u8]) -> Vec<u8> {
        elf_of(&ELF64, 62, segments, notes)
    }

    /// Builds a 32-bit file for a 386, with segments and notes as in [`elf`].
    fn elf32(segments: &[(u64, u64, &[u8])], notes: &[u8]) -> Vec<u8> {
        elf_of(&ELF32, 3, segments, notes)
    }

    fn elf_of(layout: &ElfLayout, machine: u16, segments: &[(u64, u64, &[u8])], notes: &[u8]) -> Vec<u8> {
        let count = segments.len() + 1;
        let mut file = vec![0; layout.header_bytes + count * layout.program_header_bytes];
        let content_start = file.len();
        file[..4].copy_from_slice(b"\x7fELF");
        file[4..8].copy_from_slice(&[if *layout == ELF64 { 2 } else { 1 }, 1, 1, 0]);
        file[16] = 2;
        file[18..20].copy_from_slice(&machine.to_le_bytes());
        file[layout.table_at] = layout.header_bytes as u8;
        file[layout.stride_at] = layout.program_header_bytes as u8;
        file[layout.count_at] = count as u8;
        let mut content_at = content_start as u64;
        let contents = segments.iter().map(|(address, memory, content)| (1, *address, *memory, *content));
        for (index, (kind, address, memory, content)) in contents.chain([(4, 0, 0, notes)]).enumerate() {
            let header = layout.header_bytes + index * layout.program_header_bytes;
            file[header] = kind;
            let words = [
                (layout.file_at, content_at),
                (layout.address_at, address),
                (layout.file_bytes_at, content.len() as u64),
                (layout.memory_bytes_at, memory),
            ];
            for (at, word) in words {
                file[header + at..][..layout.word_bytes].copy_from_slice(&word.to_le_bytes()[..layout.word_bytes]);
            }
            content_at += content.len() as u64;
        }
        segments.iter().for_each(|(_, _, content)| file.extend(*content));
        file.extend(notes);
        file
    }

    pub(in crate::boot) fn direct_image() -> Vec<u8> {
        elf(&[(0x20_0000, 0x1000, b"code")], &direct_note(1, 0x20_0000))
    }

    fn reject(bytes: &[u8]) -> ImageError {
        identify(bytes, EntryChoice::Best).unwrap_err()
    }

    #[test]
    fn an_image_with_both_notes_starts_directly_unless_pvh_is_asked_for() {
        let both = elf(&[(0x20_0000, 0x1000, b"code")], &[pvh_note(0x20_0008), direct_note(1, 0x20_0000)].concat());
        assert!(matches!(identify(&both, EntryChoice::Best), Ok(Image::Direct { entry: 0x20_0000, .. })));
        assert!(matches!(identify(&both, EntryChoice::Pvh), Ok(Image::Pvh { entry: 0x20_0008, .. })));
    }

    #[test]
    fn a_32_bit_file_starts_at_its_pvh_entry() {
        // Xen writes a 32-bit address there; Linux and wideleaf write 64 bits.
        for note in [pvh_note(0x20_0008), note("Xen", 18, &0x20_0008_u32.to_le_bytes())] {
            let bytes = elf32(&[(0x30_0000, 16, b"data"), (0x20_0000, 0x1000, b"code")], &note);
            for choice in [EntryChoice::Best, EntryChoice::Pvh] {
                let image = identify(&bytes, choice);
                let Ok(Image::Pvh { entry: 0x20_0008, segments }) = image else { panic!("{image:?}") };
                assert_eq!(
                    (&bytes[segments[0].file.clone()], segments[0].memory.start().get()),
                    (&b"code"[..], 0x20_0000)
                );
                assert_eq!(
                    (&bytes[segments[1].file.clone()], segments[1].memory.start().get()),
                    (&b"data"[..], 0x30_0000)
                );
                assert_eq!(segments[1].memory.bytes(), Bytes::new(16));
            }
        }
        // The x32 ABI: 32-bit files for 64-bit CPUs.
        let x32 = elf_of(&ELF32, 62, &[(0x20_0000, 0x1000, b"code")], &pvh_note(0x20_0000));
        assert!(matches!(identify(&x32, EntryChoice::Best), Ok(Image::Pvh { .. })));
    }

    #[test]
    fn a_32_bit_file_has_no_direct_entry() {
        let both = [direct_note(1, 0x20_0000), pvh_note(0x20_0000)].concat();
        let image = identify(&elf32(&[(0x20_0000, 0x1000, b"code")], &both), EntryChoice::Best);
        assert!(matches!(image, Ok(Image::Pvh { .. })), "{image:?}");
        let error = reject(&elf32(&[(0x20_0000, 0x1000, b"code")], &direct_note(1, 0x20_0000)));
        assert_eq!(error, ImageError::NoEntryNote { wanted: "PVH (Xen, type 18)" });
    }

    #[test]
    fn a_32_bit_file_is_checked_like_a_64_bit_file() {
        let note = pvh_note(0x20_0000);
        let whole = elf32(&[(0x20_0000, 0x1000, b"code")], &note);
        for bytes in 4..whole.len() {
            let error = reject(&whole[..bytes]);
            assert!(matches!(error, ImageError::Truncated { .. } | ImageError::NoEntryNote { .. }), "{bytes}: {error}");
        }
        assert_eq!(reject(&whole[..51]).to_string(), "is truncated: the ELF header ends at byte 52, the file has 51");
        assert_eq!(reject(&whole[..83]).to_string(), "is truncated: a program header ends at byte 84, the file has 83");
        let overlap = elf32(&[(0x20_0000, 0x2000, b"a"), (0x20_1000, 8, b"b")], &note);
        assert!(matches!(reject(&overlap), ImageError::Overlap { .. }));
        let longer = elf32(&[(0x20_0000, 1, b"long")], &note);
        assert!(matches!(reject(&longer), ImageError::MalformedElf(_)));
        assert_eq!(reject(&elf32(&[], &note)), ImageError::NothingToLoad);
        let outside = elf32(&[(0x20_0000, 0x1000, b"a")], &pvh_note(0x20_1000));
        assert_eq!(reject(&outside), ImageError::EntryOutside { entry: 0x20_1000 });
        let mut short_stride = whole;
        short_stride[ELF32.stride_at] = 31;
        assert!(matches!(reject(&short_stride), ImageError::MalformedElf(_)));
        // No guest has RAM at this place, which is past 4 GiB.
        let past = elf32(&[(0xffff_f000, 0x2000, b"a")], &pvh_note(0xffff_f000));
        let Ok(Image::Pvh { segments, .. }) = identify(&past, EntryChoice::Best) else { panic!("it is an image") };
        assert!(matches!(check_placement(&segments, &ram_ranges(gib(8))), Err(ImageError::InHole { .. })));
    }

    #[test]
    fn a_segment_names_the_place_of_its_bytes() {
        let bytes = elf(&[(0x30_0000, 16, b"data"), (0x20_0000, 4, b"code")], &pvh_note(0x20_0000));
        let Ok(Image::Pvh { segments, .. }) = identify(&bytes, EntryChoice::Best) else { panic!("it has a PVH note") };
        assert_eq!(&bytes[segments[0].file.clone()], b"code");
        assert_eq!(&bytes[segments[1].file.clone()], b"data");
        assert_eq!(segments[1].memory.bytes(), Bytes::new(16));
    }

    #[test]
    fn a_file_that_is_not_an_image_is_described_by_its_first_bytes() {
        assert_eq!(reject(b"").to_string(), "is empty");
        let gzip = reject(b"\x1f\x8b\x08").to_string();
        assert_eq!(
            gzip,
            "is neither an ELF file nor a bzImage: it looks like a gzip file \
             (unpack it; a kernel inside may be a vmlinux)"
        );
        assert_eq!(reject(b"hello\n"), ImageError::Unknown { looks_like: "text" });
        assert_eq!(reject(&[0; 100]), ImageError::Unknown { looks_like: "zeroes" });
        assert_eq!(reject(b"\x01\x02\x00\xff"), ImageError::Unknown { looks_like: "unknown data" });
    }

    #[test]
    fn other_architectures_are_named() {
        let i386 = elf_of(&ELF64, 3, &[], &[]);
        assert_eq!(reject(&i386).to_string(), "is an ELF file for 32-bit x86: build it for x86_64");
        let arm32 = elf_of(&ELF32, 40, &[], &[]);
        assert_eq!(reject(&arm32).to_string(), "is an ELF file for 32-bit ARM: build it for x86_64");
        let mut other_end = direct_image();
        other_end[5] = 2;
        assert_eq!(reject(&other_end), ImageError::WrongMachine { machine: "a big-endian CPU" });
        let mut no_class = direct_image();
        no_class[4] = 3;
        assert!(matches!(reject(&no_class), ImageError::MalformedElf(_)));
        let mut arm = direct_image();
        arm[18..20].copy_from_slice(&183u16.to_le_bytes());
        assert_eq!(reject(&arm).to_string(), "is an ELF file for aarch64: build it for x86_64");
    }

    #[test]
    fn a_file_cut_at_any_byte_gives_an_error_and_no_panic() {
        let whole = direct_image();
        for bytes in 4..whole.len() {
            let error = reject(&whole[..bytes]);
            assert!(
                matches!(
                    error,
                    ImageError::Truncated { .. }
                        | ImageError::NoEntryNote { .. }
                        | ImageError::DirectNoteVersion { .. }
                ),
                "{bytes}: {error}"
            );
        }
        assert_eq!(reject(&whole[..63]).to_string(), "is truncated: the ELF header ends at byte 64, the file has 63");
    }

    #[test]
    fn an_ordinary_program_is_not_an_image() {
        let error = reject(&elf(&[(0x40_0000, 4, b"main")], &note("GNU", 3, b"id__")));
        assert!(error.to_string().contains("without a wideleaf or PVH (Xen, type 18) note"), "{error}");
    }

    #[test]
    fn a_note_of_another_version_asks_for_a_rebuild() {
        let error = reject(&elf(&[(0x20_0000, 4, b"code")], &direct_note(2, 0x20_0000)));
        assert_eq!(error, ImageError::DirectNoteVersion { found: 2 });
    }

    #[test]
    fn segments_and_entry_must_make_sense() {
        let overlap = elf(&[(0x20_0000, 0x2000, b"a"), (0x20_1000, 8, b"b")], &direct_note(1, 0x20_0000));
        assert!(matches!(reject(&overlap), ImageError::Overlap { .. }));
        let outside = elf(&[(0x20_0000, 0x1000, b"a")], &direct_note(1, 0x20_1000));
        assert_eq!(reject(&outside), ImageError::EntryOutside { entry: 0x20_1000 });
        let wrapping = elf(&[(u64::MAX - 2, 8, b"a")], &direct_note(1, 0x20_1000));
        assert!(matches!(reject(&wrapping), ImageError::MalformedElf(_)));
        let longer = elf(&[(0x20_0000, 1, b"long")], &direct_note(1, 0x20_0000));
        assert!(matches!(reject(&longer), ImageError::MalformedElf(_)));
        assert_eq!(reject(&elf(&[], &direct_note(1, 0))), ImageError::NothingToLoad);
    }

    fn segment(start: u64, bytes: Bytes) -> Segment {
        Segment { file: 0..0, memory: GpaRange::new(Gpa::new(start), bytes).unwrap() }
    }

    #[test]
    fn an_image_that_does_not_fit_ram_is_refused_with_numbers() {
        let ram = ram_ranges(mib(64));
        assert_eq!(check_placement(&[segment(0x20_0000, mib(2))], &ram), Ok(Gpa::new(0x40_0000)));
        let large = check_placement(&[segment(0x20_0000, mib(100))], &ram).unwrap_err();
        assert_eq!(
            large.to_string(),
            "needs memory up to 0x6600000, guest RAM ends at 0x4000000: use at least 102 MiB of --memory"
        );
        let low = check_placement(&[segment(0x8000, mib(2))], &ram).unwrap_err();
        assert!(matches!(low, ImageError::TooLow { .. }));
        let hole = check_placement(&[segment(0xc000_0000, mib(2))], &ram_ranges(gib(4))).unwrap_err();
        assert!(matches!(hole, ImageError::InHole { .. }));
    }

    /// Builds the front of a bzImage: a setup header with these fields, then `kernel_bytes` of kernel.
    fn bzimage(version: u16, xloadflags: u16, kernel_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; 1024 + kernel_bytes];
        bytes[0x1f1] = 1;
        bytes[0x1f4..0x1f8].copy_from_slice(&64u32.to_le_bytes());
        bytes[0x201] = 0x6a;
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        bytes[0x206..0x208].copy_from_slice(&version.to_le_bytes());
        bytes[0x211] = 1;
        bytes[0x236..0x238].copy_from_slice(&xloadflags.to_le_bytes());
        bytes
    }

    #[test]
    fn a_bzimage_is_known_by_its_header() {
        let image = identify(&bzimage(0x20f, 0x3f, 1024), EntryChoice::Best).unwrap();
        assert!(matches!(image, Image::BzImage { setup_bytes: 1024, .. }));
        assert_eq!(reject(&bzimage(0x20f, 0, 1024)), ImageError::BzImage32);
        let old = reject(&bzimage(0x20a, 1, 1024)).to_string();
        assert_eq!(old, "is a bzImage of boot protocol 2.10: Linux has had the 64-bit entry since 2.12 (Linux 3.8)");
        let mut low = bzimage(0x20f, 1, 1024);
        low[0x211] = 0;
        assert_eq!(reject(&low), ImageError::ZImage);
    }

    #[test]
    fn the_last_paragraph_of_a_bzimage_may_be_short() {
        // The header says 64 paragraphs.
        for whole in [1024, 1023, 1010, 1009, 1025, 4096] {
            assert!(identify(&bzimage(0x20f, 1, whole), EntryChoice::Best).is_ok(), "{whole}");
        }
        for cut in [1008, 1000, 1, 0] {
            let error = reject(&bzimage(0x20f, 1, cut));
            assert_eq!(error, ImageError::Truncated { what: "the kernel", needs: 2033, has: 1024 + cut });
        }
        let mut empty = bzimage(0x20f, 1, 0);
        empty[0x1f4] = 0;
        assert_eq!(reject(&empty), ImageError::Truncated { what: "the kernel", needs: 1025, has: 1024 });
    }

    #[test]
    fn bytes_behind_a_short_header_are_not_its_fields() {
        let offset = |header_end: u8| {
            let mut bytes = bzimage(0x20c, 1, 1024);
            bytes[0x201] = header_end - 2;
            bytes[0x268..0x26c].fill(0x8c);
            let Ok(Image::BzImage { header, .. }) = identify(&bytes, EntryChoice::Best) else { panic!("a bzImage") };
            header.kernel_info_offset
        };
        // Protocol 2.12, as in memtest86+, and 2.15.
        assert_eq!((offset(0x68), offset(0x6c)), (0, 0x8c8c_8c8c));
    }
}
