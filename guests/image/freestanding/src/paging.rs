//! The page tables of the requested size: all RAM, one to one, and the registers of local APIC and devices. Ring 3
//! builds them, because a host that emulates ring 0 would need seconds for it.
//!
//! ```text
//!   image │ root, tables …  │ free RAM
//!         ▲ end_of_image    ▲ end
//! ```
#![expect(unsafe_code, reason = "page tables are words at physical addresses")]

use wideleaf_protocol::{ExitCode, GuestPage, RamRange};

use crate::console::fail;
use crate::machine::{cpuid, read_u64, write_u64};

/// Bytes of one table: 512 entries.
const TABLE_BYTES: u64 = 4096;
/// Present, writable, user, accessed, dirty. With the last two set, the CPU need not set them while a kernel is
/// timed.
const ENTRY: u64 = 0x67;
/// Flag of an entry above the lowest level: it maps a page instead of a table.
const IS_PAGE: u64 = 0x80;
/// Write-through and cache-disable, for registers.
const UNCACHED: u64 = 0x18;
/// Address bits of an entry.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Size of the lower half of the addresses of four levels.
const MAPPABLE: u64 = 1 << 47;

/// Tables that are ready to be loaded.
pub struct Tables {
    /// Address of the top table, for CR3.
    pub root: u64,
    /// First address after all of them.
    pub end: u64,
}

/// Builds tables with pages of one size for all of `ram`, and one uncached 2 MiB page at each address of `registers`.
/// They begin at `start`, and may grow within the RAM range and up to `mapped_end`, the limit of the current tables.
/// Ends the program if the CPU lacks such pages or if the room is too small.
pub fn build(guest_page: GuestPage, ram: &[RamRange], registers: &[u64], start: u64, mapped_end: u64) -> Tables {
    if guest_page == GuestPage::Giant1G && !has_giant_pages() {
        fail(
            ExitCode::Unsupported,
            format_args!("guest_pages=1g: this CPU has no 1 GiB pages (CPUID 0x80000001, EDX bit 26)"),
        );
    }
    let around = ram.iter().find(|range| range.gpa <= start && range.end().is_some_and(|end| start < end));
    let room_end = around.and_then(|range| range.end()).unwrap_or(start).min(mapped_end);
    let mut builder = Builder { next: start, room_end };
    let root = builder.new_table();

    let page_bytes = guest_page.bytes();
    // The first MiB has holes in the memory map, and the parts in use there must stay mapped.
    let low = RamRange { gpa: 0, bytes: 1 << 20 };
    for range in ram.iter().chain([&low]) {
        let end = range.end().and_then(|end| end.checked_next_multiple_of(page_bytes)).filter(|end| *end <= MAPPABLE);
        let Some(end) = end else {
            fail(ExitCode::Unsupported, format_args!("RAM at {:#x} is beyond four-level tables", range.gpa));
        };
        let mut address = range.gpa / page_bytes * page_bytes;
        while address < end {
            builder.map(root, address, guest_page, ENTRY);
            address += page_bytes;
        }
    }
    for address in registers {
        builder.map(root, *address, GuestPage::Huge2M, ENTRY | UNCACHED);
    }
    Tables { root, end: builder.next }
}

fn has_giant_pages() -> bool {
    let [.., edx] = cpuid(0x8000_0001);
    edx >> 26 & 1 == 1
}

struct Builder {
    next: u64,
    room_end: u64,
}

impl Builder {
    /// Allocates an empty table.
    fn new_table(&mut self) -> u64 {
        let table = self.next;
        if table + TABLE_BYTES > self.room_end {
            fail(
                ExitCode::Unsupported,
                format_args!(
                    "no room for page tables between {table:#x} and {:#x}; use larger pages or more RAM",
                    self.room_end
                ),
            );
        }
        self.next += TABLE_BYTES;
        for slot in (table..table + TABLE_BYTES).step_by(8) {
            // SAFETY: the table lies in RAM behind the image, mapped one to one and not used by other code.
            unsafe { write_u64(slot, 0) };
        }
        table
    }

    /// Maps one page, unless a larger page maps the address already.
    fn map(&mut self, root: u64, address: u64, page: GuestPage, flags: u64) {
        let lowest = match page {
            GuestPage::Base4K => 1,
            GuestPage::Huge2M => 2,
            GuestPage::Giant1G => 3,
        };
        let mut table = root;
        for level in (lowest + 1..=4).rev() {
            let slot = slot_of(table, address, level);
            // SAFETY: the slot lies in a table that `new_table` made.
            let entry = unsafe { read_u64(slot) };
            if entry & IS_PAGE != 0 {
                return;
            }
            table = entry & ADDRESS;
            if entry == 0 {
                table = self.new_table();
                // SAFETY: likewise.
                unsafe { write_u64(slot, table | ENTRY) };
            }
        }
        let frame = address / page.bytes() * page.bytes();
        let size = if lowest == 1 { 0 } else { IS_PAGE };
        // SAFETY: likewise.
        unsafe { write_u64(slot_of(table, address, lowest), frame | flags | size) };
    }
}

/// Address of the entry for `address` in a table of that level (1 = lowest).
fn slot_of(table: u64, address: u64, level: u32) -> u64 {
    table + (address >> (12 + 9 * (level - 1)) & 511) * 8
}
