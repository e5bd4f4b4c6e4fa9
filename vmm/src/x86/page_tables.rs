//! Identity page tables: every byte of RAM at its own address, in pages of one size.
//!
//! ```text
//!   root (512 GiB per entry) ─▶ giants (1 GiB) ─▶ huge (2 MiB) ─▶ base (4 KiB)
//!                               1g: leaves here   2m: leaves here  4k: leaves here
//! ```
//!
//! Leaves are created accessed and dirty: the CPU then never writes to the tables, which would be a second walk
//! under nested paging, and an exit per page under shadow paging (SDM vol. 3, 4.8). The hole below 4 GiB is not
//! mapped, so a stray access there is a page fault that names its address.

use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend, GuestMemoryError};
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

/// Size of a table in bytes, at every level.
const TABLE_BYTES: u64 = 4096;
const ENTRIES: usize = 512;

/// Present, writable, user-accessible, accessed. Every level allows everything: protection is not the tables' job here.
const LINK: u64 = 0b10_0111;
/// Flags of a link, and dirty.
const LEAF_BASE: u64 = LINK | 1 << 6;
/// Flags of a leaf, and "page size": the entry maps a huge or giant page.
const LEAF_LARGE: u64 = LEAF_BASE | 1 << 7;

/// Tables in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityTables {
    /// Value for CR3, the address of the root table.
    pub root: Gpa,
    /// Size of the tables, from the root on.
    pub bytes: Bytes,
}

/// Size of the tables that map this RAM.
pub fn bytes_needed(ram: &[GpaRange], page: PageSize) -> Bytes {
    let counts = Levels::of(ram, page);
    Bytes::new((1 + counts.giants.len() + counts.huge.len() + counts.base.len()) as u64 * TABLE_BYTES)
}

/// Writes the tables, contiguous from `root` on, which is 4 KiB aligned. RAM must be a whole number of pages.
///
/// # Errors
/// If the tables are not in RAM.
pub fn write(
    memory: &impl GuestMemoryBackend,
    root: Gpa,
    ram: &[GpaRange],
    page: PageSize,
) -> Result<IdentityTables, GuestMemoryError> {
    assert!(root.is_aligned_to(PageSize::Base4K), "CR3 has no room for low bits");
    for range in ram {
        assert!(range.start().is_aligned_to(page) && range.end().is_aligned_to(page), "RAM is whole pages of {page}");
        assert!(range.end().get() <= 1 << 47, "identity mappings end where user addresses do");
    }
    let levels = Levels::of(ram, page);
    let table_at = |index: usize| root.get() + index as u64 * TABLE_BYTES;
    let giants_first = 1;
    let huge_first = giants_first + levels.giants.len();
    let base_first = huge_first + levels.huge.len();

    let mut table = Table::new();
    table.link(&levels.giants, 0, |index| table_at(giants_first + index));
    table.write(memory, root.get())?;
    for (index, number) in levels.giants.iter().enumerate() {
        let mut table = Table::new();
        if page == PageSize::Giant1G {
            table.map(ram, *number, PageSize::Giant1G, LEAF_LARGE);
        } else {
            table.link(&levels.huge, *number, |index| table_at(huge_first + index));
        }
        table.write(memory, table_at(giants_first + index))?;
    }
    for (index, number) in levels.huge.iter().enumerate() {
        let mut table = Table::new();
        if page == PageSize::Huge2M {
            table.map(ram, *number, PageSize::Huge2M, LEAF_LARGE);
        } else {
            table.link(&levels.base, *number, |index| table_at(base_first + index));
        }
        table.write(memory, table_at(huge_first + index))?;
    }
    for (index, number) in levels.base.iter().enumerate() {
        let mut table = Table::new();
        table.map(ram, *number, PageSize::Base4K, LEAF_BASE);
        table.write(memory, table_at(base_first + index))?;
    }
    Ok(IdentityTables { root, bytes: bytes_needed(ram, page) })
}

/// The tables below the root, each by the number of the range that it covers; ascending.
struct Levels {
    /// Tables of giants: numbers of 512 GiB ranges.
    giants: Vec<u64>,
    /// Tables of huge pages: numbers of 1 GiB ranges.
    huge: Vec<u64>,
    /// Tables of base pages: numbers of 2 MiB ranges.
    base: Vec<u64>,
}

impl Levels {
    fn of(ram: &[GpaRange], page: PageSize) -> Levels {
        let covering = |bytes: u64| {
            let mut numbers: Vec<u64> =
                ram.iter().flat_map(|range| range.start().get() / bytes..range.end().get().div_ceil(bytes)).collect();
            numbers.dedup();
            numbers
        };
        let giants = covering(512 << 30);
        let huge = if page < PageSize::Giant1G { covering(1 << 30) } else { Vec::new() };
        let base = if page < PageSize::Huge2M { covering(2 << 20) } else { Vec::new() };
        Levels { giants, huge, base }
    }
}

struct Table([u64; ENTRIES]);

impl Table {
    fn new() -> Table {
        Table([0; ENTRIES])
    }

    /// Links the tables among `children` (of the next level) that belong to the table with this number.
    fn link(&mut self, children: &[u64], number: u64, address: impl Fn(usize) -> u64) {
        let first = children.partition_point(|child| child / (ENTRIES as u64) < number);
        for (index, child) in children.iter().enumerate().skip(first) {
            if child / ENTRIES as u64 != number {
                break;
            }
            self.0[(child % ENTRIES as u64) as usize] = address(index) | LINK;
        }
    }

    /// Enters a leaf for every page of RAM that the table with this number covers.
    fn map(&mut self, ram: &[GpaRange], number: u64, page: PageSize, flags: u64) {
        let bytes = page.bytes().get();
        let table_start = number * ENTRIES as u64 * bytes;
        let table_end = table_start + ENTRIES as u64 * bytes;
        for range in ram {
            let start = range.start().get().max(table_start);
            let end = range.end().get().min(table_end);
            for address in (start..end).step_by(bytes as usize) {
                self.0[((address - table_start) / bytes) as usize] = address | flags;
            }
        }
    }

    fn write(&self, memory: &impl GuestMemoryBackend, at: u64) -> Result<(), GuestMemoryError> {
        let mut bytes = [0u8; TABLE_BYTES as usize];
        for (slot, entry) in bytes.chunks_exact_mut(8).zip(self.0) {
            slot.copy_from_slice(&entry.to_le_bytes());
        }
        memory.write_slice(&bytes, GuestAddress(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::layout::ram_ranges;
    use vm_memory::GuestMemoryMmap;
    use wideleaf_policies::units::{gib, kib, mib};

    const ROOT: Gpa = Gpa::new(1 << 20);

    fn memory() -> GuestMemoryMmap<()> {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap()
    }

    /// Walks the tables like the CPU: returns the address that `address` is mapped to, and the size of the leaf.
    fn walk(memory: &GuestMemoryMmap<()>, root: Gpa, address: u64) -> Option<(u64, PageSize)> {
        let entry = |table: u64, shift: u32| -> u64 {
            memory.read_obj(GuestAddress((table & !0xfff) + (address >> shift & 511) * 8)).unwrap()
        };
        let giants = entry(root.get(), 39);
        let huge = (giants & 1 != 0).then(|| entry(giants, 30))?;
        if huge & 0x80 != 0 {
            return (huge & 0x67 == 0x67).then(|| ((huge & !0x3fff_ffff) + address % (1 << 30), PageSize::Giant1G));
        }
        let base = (huge & 1 != 0).then(|| entry(huge, 21))?;
        if base & 0x80 != 0 {
            return (base & 0x67 == 0x67).then(|| ((base & !0x1f_ffff) + address % (2 << 20), PageSize::Huge2M));
        }
        let leaf = (base & 1 != 0).then(|| entry(base, 12))?;
        (leaf & 0x67 == 0x67).then(|| ((leaf & !0xfff) + address % 4096, PageSize::Base4K))
    }

    #[test]
    fn every_size_maps_all_of_ram_to_itself_and_nothing_else() {
        let memory = memory();
        for page in PageSize::ALL {
            let ram = ram_ranges(gib(4));
            let tables = write(&memory, ROOT, &ram, page).unwrap();
            for address in [0, 4096, 0x1f_ffff, 0x20_0000, (1 << 30) + 7, (3 << 30) - 1, 4 << 30, (5 << 30) - 1] {
                assert_eq!(walk(&memory, tables.root, address), Some((address, page)), "{address:#x} in {page}");
            }
            for address in [3 << 30, 0xfee0_0000, (4 << 30) - 1, 5 << 30, 1 << 40] {
                assert_eq!(walk(&memory, tables.root, address), None, "{address:#x} in {page}");
            }
        }
    }

    #[test]
    fn a_range_can_end_inside_a_table() {
        let memory = memory();
        let ram = ram_ranges(mib(6));
        let tables = write(&memory, ROOT, &ram, PageSize::Huge2M).unwrap();
        assert_eq!(walk(&memory, tables.root, mib(6).get() - 1), Some((mib(6).get() - 1, PageSize::Huge2M)));
        assert_eq!(walk(&memory, tables.root, mib(6).get()), None);
    }

    #[test]
    fn the_size_is_that_of_all_tables() {
        // 1 GiB: root, one table of giants, one of huge pages, 512 of base pages.
        let ram = ram_ranges(gib(1));
        assert_eq!(bytes_needed(&ram, PageSize::Giant1G), kib(8));
        assert_eq!(bytes_needed(&ram, PageSize::Huge2M), kib(12));
        assert_eq!(bytes_needed(&ram, PageSize::Base4K), kib(12) + mib(2));
        // 600 GiB crosses into a second entry of the root.
        assert_eq!(bytes_needed(&ram_ranges(gib(600)), PageSize::Giant1G), kib(12));
    }

    #[test]
    fn nothing_is_written_behind_the_tables() {
        let memory = memory();
        let ram = ram_ranges(mib(64));
        let bytes = bytes_needed(&ram, PageSize::Base4K);
        let behind = GuestAddress((ROOT + bytes).get());
        memory.write_obj(0x5555_5555_5555_5555u64, behind).unwrap();
        let tables = write(&memory, ROOT, &ram, PageSize::Base4K).unwrap();
        assert_eq!(tables.bytes, bytes);
        assert_eq!(memory.read_obj::<u64>(behind).unwrap(), 0x5555_5555_5555_5555);
    }

    #[test]
    fn tables_outside_ram_are_an_error() {
        assert!(write(&memory(), Gpa::new(1 << 30), &ram_ranges(mib(64)), PageSize::Huge2M).is_err());
    }
}
