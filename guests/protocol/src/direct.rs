//! The direct entry: how our VMM starts an image in 64-bit ring 3, without any boot code.
//!
//! ```text
//!   VMM, before the first KVM_RUN                         image
//!   ─────────────────────────────                         ─────
//!   load the ELF's segments at their physical addresses
//!   build identity page tables, guest_page_bytes wide
//!   write DirectBoot and the command line ───────────▶  vCPU 0 reads them, leads
//!   start every vCPU at entry64 (RDI, RSI below)  ────▶  vCPUs 1… wait for the leader's jobs
//!                                        ◀────────────  out `line_port` (pieces of lines) or out 0x3f8 (bytes),
//!                                                       out 0xf4 (exit code)
//! ```
//!
//! What the VMM gives to every vCPU, all of them runnable from the start:
//!
//! | register | value |
//! |---|---|
//! | RIP | `entry64` of the image's `wideleaf` note ([`elf_note`](crate::elf_note)) |
//! | RDI | GPA of a [`DirectBoot`], 8-byte aligned |
//! | RSI | index of the vCPU, 0 to `vcpus` − 1 |
//! | CS, SS, DS, ES | [`USER_CODE_SELECTOR`] (64-bit code, DPL 3), [`USER_DATA_SELECTOR`] (DPL 3) |
//! | RFLAGS | IOPL 3, IF, and the bit that is always one: [`RFLAGS`]. Nothing raises interrupts |
//! | CR0 | PE, PG, MP, NE, ET, WP; EM and TS clear |
//! | CR4 | PAE, OSFXSR, OSXMMEXCPT; OSXSAVE if CPUID has AVX |
//! | XCR0 | the 387, SSE and AVX if OSXSAVE is set: ring 3 cannot enable them |
//! | EFER | LME, LMA |
//! | CR3 | the VMM's identity tables: every byte of RAM, user-accessible and writable |
//!
//! The image brings no IDT and needs none: the VMM decides what a fault does. Ours has gates that report a fault
//! with its registers; without them it is a triple fault. The image takes its stacks from its own `.bss`, which the
//! VMM leaves zero. A VMM need only provide the serial port and the exit port; a line port ([`LinePiece`]) spares the
//! guest an exit for each byte, and a power button lets a user end a timed run early. Further devices are virtio
//! devices behind memory without interrupts: the image polls.

use core::fmt;

use crate::{GuestPage, VCPUS_MAX};

/// First word of a [`DirectBoot`]: "wideleaf" in little-endian ASCII.
pub const DIRECT_BOOT_MAGIC: u64 = u64::from_le_bytes(*b"wideleaf");
/// Version of the contract; the image refuses any other.
pub const DIRECT_BOOT_VERSION: u32 = 4;
/// Capacity of a [`DirectBoot`] in RAM ranges: below and above the 32-bit hole, and room for six more memslots with
/// gaps.
pub const RAM_RANGES_MAX: usize = 8;
/// Distance from the registers of one device to those of the next, in bytes.
pub const DEVICE_STRIDE: u64 = 0x1000;
/// Selector of the 64-bit code segment: entry 3 of the table, privilege level 3.
pub const USER_CODE_SELECTOR: u16 = 0x1b;
/// Selector of the data segment: entry 4 of the table, privilege level 3.
pub const USER_DATA_SELECTOR: u16 = 0x23;
/// RFLAGS at the entry: bit 1 is always one, bit 9 is IF, bits 12 and 13 are IOPL 3 (SDM volume 1, 3.4.3). The guest
/// gets no interrupts; with IF clear some hypervisors' emulators (Bochs 2.7) keep the host's away from a guest that
/// never exits.
pub const RFLAGS: u64 = 0x3202;

/// A half-open range of guest-physical RAM, `[gpa, gpa + bytes)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RamRange {
    /// First address of the range.
    pub gpa: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl RamRange {
    /// First address after the range; `None` if it does not fit 64 bits.
    pub const fn end(self) -> Option<u64> {
        self.gpa.checked_add(self.bytes)
    }
}

/// Boot data from the VMM to the image. All numbers are little-endian; the layout is fixed by `repr(C)` and has no
/// padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DirectBoot {
    /// Magic number, [`DIRECT_BOOT_MAGIC`].
    pub magic: u64,
    /// Version of the contract, [`DIRECT_BOOT_VERSION`].
    pub version: u32,
    /// Number of started vCPUs, 1 to [`VCPUS_MAX`].
    pub vcpus: u32,
    /// Ticks of the guest's time stamp counter per second; 0 if the VMM does not know.
    pub tsc_hz: u64,
    /// Page size of the tables in CR3: 4 KiB, 2 MiB or 1 GiB.
    pub guest_page_bytes: u64,
    /// GPA of the command line; its grammar is in [`arguments`](crate::arguments). No terminating zero is needed.
    pub cmdline_gpa: u64,
    /// Length of the command line in bytes.
    pub cmdline_len: u64,
    /// First GPA the image may use for itself and its arena: after the image, the tables, this structure and the
    /// command line. All RAM at or above it belongs to the image.
    pub free_start: u64,
    /// Address of the registers of the first virtio device, behind memory (Virtual I/O Device 1.2, 4.2.2), mapped
    /// user-accessible like RAM. Those of the next device are [`DEVICE_STRIDE`] further.
    pub devices_gpa: u64,
    /// Number of devices.
    pub device_count: u64,
    /// Port that takes the address of a [`LinePiece`]; 0 if the VMM has none.
    pub line_port: u64,
    /// Port of ACPI's PM1a status register; 0 if the VMM has none. The image polls it: see
    /// [`ACPI_POWER_BUTTON`](crate::port::ACPI_POWER_BUTTON).
    pub power_port: u64,
    /// Number of valid entries of `ram_ranges`.
    pub ram_range_count: u64,
    /// The guest's RAM, disjoint and ascending.
    pub ram_ranges: [RamRange; RAM_RANGES_MAX],
}

/// Bytes a [`DirectBoot`] takes in guest memory.
pub const DIRECT_BOOT_BYTES: usize = 96 + 16 * RAM_RANGES_MAX;
const _: () = assert!(size_of::<DirectBoot>() == DIRECT_BOOT_BYTES, "repr(C) added padding to the contract");

impl Default for DirectBoot {
    /// One vCPU, 2 MiB pages, no RAM yet, and the right magic and version: the starting point of a VMM.
    fn default() -> Self {
        Self {
            magic: DIRECT_BOOT_MAGIC,
            version: DIRECT_BOOT_VERSION,
            vcpus: 1,
            tsc_hz: 0,
            guest_page_bytes: GuestPage::Huge2M.bytes(),
            cmdline_gpa: 0,
            cmdline_len: 0,
            free_start: 0,
            devices_gpa: 0,
            device_count: 0,
            line_port: 0,
            power_port: 0,
            ram_range_count: 0,
            ram_ranges: [RamRange::default(); RAM_RANGES_MAX],
        }
    }
}

impl DirectBoot {
    /// The valid RAM ranges.
    pub fn ram(&self) -> &[RamRange] {
        let count = usize::try_from(self.ram_range_count).unwrap_or(usize::MAX);
        &self.ram_ranges[..count.min(RAM_RANGES_MAX)]
    }

    /// Appends a range; returns it if all [`RAM_RANGES_MAX`] are in use.
    pub fn push_ram(&mut self, range: RamRange) -> Result<(), RamRange> {
        let count = self.ram().len();
        let slot = self.ram_ranges.get_mut(count).ok_or(range)?;
        *slot = range;
        self.ram_range_count = count as u64 + 1;
        Ok(())
    }

    /// Checks everything that a reader relies on.
    pub fn validate(&self) -> Result<(), DirectBootError> {
        if self.magic != DIRECT_BOOT_MAGIC {
            return Err(DirectBootError::Magic { found: self.magic });
        }
        if self.version != DIRECT_BOOT_VERSION {
            return Err(DirectBootError::Version { found: self.version });
        }
        if self.vcpus == 0 || self.vcpus as usize > VCPUS_MAX {
            return Err(DirectBootError::Vcpus { found: self.vcpus });
        }
        if GuestPage::from_bytes(self.guest_page_bytes).is_none() {
            return Err(DirectBootError::GuestPage { bytes: self.guest_page_bytes });
        }
        if self.ram_range_count == 0 || self.ram_range_count > RAM_RANGES_MAX as u64 {
            return Err(DirectBootError::RamRangeCount { found: self.ram_range_count });
        }
        let mut end_before = 0;
        for (index, range) in self.ram().iter().enumerate() {
            let end = range.end().filter(|end| range.gpa >= end_before && *end > range.gpa);
            end_before = end.ok_or(DirectBootError::RamRange { index })?;
        }
        Ok(())
    }

    /// Encodes the structure for guest memory.
    pub fn to_bytes(&self) -> [u8; DIRECT_BOOT_BYTES] {
        let mut bytes = [0; DIRECT_BOOT_BYTES];
        let words = [
            self.magic,
            u64::from(self.version) | u64::from(self.vcpus) << 32,
            self.tsc_hz,
            self.guest_page_bytes,
            self.cmdline_gpa,
            self.cmdline_len,
            self.free_start,
            self.devices_gpa,
            self.device_count,
            self.line_port,
            self.power_port,
            self.ram_range_count,
        ];
        let ranges = self.ram_ranges.iter().flat_map(|range| [range.gpa, range.bytes]);
        for (slot, word) in bytes.chunks_exact_mut(8).zip(words.into_iter().chain(ranges)) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the structure from guest memory, without checking its contents: see [`Self::validate`].
    pub fn from_bytes(bytes: &[u8; DIRECT_BOOT_BYTES]) -> Self {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            magic: word(0),
            version: word(1) as u32,
            vcpus: (word(1) >> 32) as u32,
            tsc_hz: word(2),
            guest_page_bytes: word(3),
            cmdline_gpa: word(4),
            cmdline_len: word(5),
            free_start: word(6),
            devices_gpa: word(7),
            device_count: word(8),
            line_port: word(9),
            power_port: word(10),
            ram_range_count: word(11),
            ram_ranges: core::array::from_fn(|index| RamRange {
                gpa: word(12 + 2 * index),
                bytes: word(13 + 2 * index),
            }),
        }
    }
}

/// Bytes that a [`LinePiece`] has room for.
pub const LINE_PIECE_BYTES_MAX: usize = 252;

/// A piece of the serial port's output that costs one exit: the guest fills it, and writes its address as 32 bits to
/// [`DirectBoot::line_port`]. The VMM has read it when the instruction ends. A longer line is several pieces.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(256))]
pub struct LinePiece {
    /// Number of bytes in use, little-endian; the VMM ignores a piece of more than [`LINE_PIECE_BYTES_MAX`].
    pub length: u32,
    /// Output, with line ends.
    pub bytes: [u8; LINE_PIECE_BYTES_MAX],
}

/// Reason why a [`DirectBoot`] is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectBootError {
    /// The first word is not [`DIRECT_BOOT_MAGIC`].
    Magic {
        /// First word that was found.
        found: u64,
    },
    /// The version of the contract differs.
    Version {
        /// Version that was found.
        found: u32,
    },
    /// No vCPU, or more than [`VCPUS_MAX`].
    Vcpus {
        /// Number that was found.
        found: u32,
    },
    /// x86-64 has no pages of that size.
    GuestPage {
        /// Size that was found, in bytes.
        bytes: u64,
    },
    /// No RAM range, or more than [`RAM_RANGES_MAX`].
    RamRangeCount {
        /// Number that was found.
        found: u64,
    },
    /// A range is empty, wraps around, or does not lie after the one before.
    RamRange {
        /// Index of the range, from 0.
        index: usize,
    },
}

impl fmt::Display for DirectBootError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic { found } => write!(f, "boot data begin with {found:#x}, expected {DIRECT_BOOT_MAGIC:#x}"),
            Self::Version { found } => write!(f, "boot data have version {found}, expected {DIRECT_BOOT_VERSION}"),
            Self::Vcpus { found } => write!(f, "{found} vCPUs, expected 1 to {VCPUS_MAX}"),
            Self::GuestPage { bytes } => write!(f, "no page has {bytes} bytes; use 4 KiB, 2 MiB or 1 GiB"),
            Self::RamRangeCount { found } => write!(f, "{found} RAM ranges, expected 1 to {RAM_RANGES_MAX}"),
            Self::RamRange { index } => write!(f, "RAM range {index} is empty, wraps, or overlaps the one before"),
        }
    }
}

impl core::error::Error for DirectBootError {}
