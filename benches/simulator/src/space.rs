//! The mappings of an arena of guest-virtual memory: the tables that map it, and the page sizes of both dimensions.
//!
//! ```text
//!   guest-virtual   [0 ··············· arena )              the guest maps window w to w, each with its own size
//!   guest-physical  [0 ··············· arena )[ guest's tables )         the host maps all of it in the same way
//!   host-physical   [0 ··············· arena )[ guest's tables )[ host's tables )
//!                                                1: ▪▪▪▪▪▪ 2: ▪▪ 3: ▪     entry i of a level: at its start + 8 i bytes
//! ```
//!
//! Both maps are the identity, so the address of a table's entry follows from arithmetic, and only one byte a
//! window grows with the arena. Real tables are scattered page by page; here they lie in a row, level by level,
//! which spreads them evenly over the sets of the caches.
//!
//! Native memory is the same without the host's half.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use wideleaf_policies::units::{Bytes, PageSize, WindowIndex};

/// Size of the largest arena: 2 TiB, so that a page number and a page size fit 32 bits together.
pub const ARENA_MAX: Bytes = Bytes::new(2 << 40);

/// Largest number of table levels; level 1 holds the entries of 4 KiB pages.
pub(crate) const LEVELS_MAX: usize = 5;

const WINDOW_SHIFT: u32 = 21;
const GIANT: u64 = 1 << 30;
const WINDOWS_PER_GIANT: usize = 512;
const ENTRY_BYTES: u64 = 8;
/// Number of entries of a table.
const ENTRIES: u64 = 512;

/// Number of table levels walked for a 4 KiB page: 4, or 5 (LA57); 3 is PAE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// Number of levels of the guest's tables.
    pub guest_levels: u8,
    /// Number of levels of the host's tables.
    pub host_levels: u8,
}

impl Paging {
    /// Four levels in both dimensions.
    pub const FOUR_LEVELS: Paging = Paging { guest_levels: 4, host_levels: 4 };
}

/// The page sizes over one window, in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pages(u8);

impl Pages {
    const fn new(guest: PageSize, host: Option<PageSize>) -> Pages {
        let of_host = match host {
            Some(size) => size,
            None => guest,
        };
        let entry = if (guest as u8) < of_host as u8 { guest } else { of_host };
        Pages(guest as u8 | (of_host as u8) << 2 | (entry as u8) << 4)
    }

    pub(crate) const fn guest(self) -> PageSize {
        PageSize::ALL[(self.0 & 3) as usize]
    }

    pub(crate) const fn host(self) -> PageSize {
        PageSize::ALL[(self.0 >> 2 & 3) as usize]
    }

    /// The level of the guest's tables that maps the pages.
    pub(crate) const fn guest_leaf(self) -> u32 {
        (self.0 & 3) as u32 + 1
    }

    /// The level of the host's tables that maps the pages.
    pub(crate) const fn host_leaf(self) -> u32 {
        (self.0 >> 2 & 3) as u32 + 1
    }

    /// The size that a TLB entry covers: the smaller of the two, because a TLB caches
    /// guest-virtual to host-physical.
    pub(crate) const fn entry(self) -> PageSize {
        PageSize::ALL[self.entry_index()]
    }

    /// The size that a TLB entry covers, as a number of two bits.
    #[inline(always)]
    pub(crate) const fn entry_index(self) -> usize {
        (self.0 >> 4 & 3) as usize
    }
}

/// Number of address bits within a page of `size`.
pub(crate) const fn page_shift(size: PageSize) -> u32 {
    12 + 9 * size as u32
}

/// An arena and its mappings.
#[derive(Clone, Debug)]
pub struct AddressSpace {
    bytes: Bytes,
    /// Page sizes of each window of guest-physical memory: arena, then the guest's tables. Whole giants.
    pages: Vec<Pages>,
    arena_windows: usize,
    is_nested: bool,
    paging: Paging,
    guest_tables: Tables,
    host_tables: Tables,
}

/// Start addresses of the entries of each level.
#[derive(Clone, Copy, Debug, Default)]
struct Tables {
    starts: [u64; 8],
    end: u64,
}

impl Tables {
    /// Makes tables at `at` that map `[0, mapped)`: level 1 first, each level beginning on a new page.
    fn new(at: u64, mapped: u64, levels: u8) -> Tables {
        let mut tables = Tables { starts: [0; 8], end: at };
        for level in 1..=levels as usize {
            tables.starts[level] = tables.end;
            let entries = mapped.div_ceil(1 << shift_of_level(level as u32));
            tables.end = (tables.end + entries * ENTRY_BYTES).next_multiple_of(4096);
        }
        tables
    }

    fn entry(&self, level: u32, address: u64) -> u64 {
        self.starts[level as usize % 8] + (address >> shift_of_level(level)) * ENTRY_BYTES
    }
}

/// Number of address bits below those that select an entry of `level`.
pub(crate) const fn shift_of_level(level: u32) -> u32 {
    12 + 9 * (level - 1)
}

/// Memory of tables of `levels` levels over windows, ascending, with pages of these sizes.
fn tables_of(windows: impl Iterator<Item = (usize, PageSize)>, levels: u8) -> Bytes {
    let (mut tables, mut giants) = (0, 0);
    let (mut giant, mut is_split) = (usize::MAX, false);
    for (window, size) in windows {
        if window / WINDOWS_PER_GIANT != giant {
            (giant, is_split) = (window / WINDOWS_PER_GIANT, false);
            giants += 1;
        }
        tables += u64::from(size == PageSize::Base4K);
        if size != PageSize::Giant1G && !is_split {
            is_split = true;
            tables += 1;
        }
    }
    let mut entries: u64 = giants;
    for _ in 3..=levels {
        entries = entries.div_ceil(ENTRIES);
        tables += entries;
    }
    Bytes::new(tables * ENTRIES * ENTRY_BYTES)
}

impl AddressSpace {
    /// Makes memory without a second dimension, all in pages of `size`, under four levels of table.
    pub fn native(bytes: Bytes, size: PageSize) -> AddressSpace {
        AddressSpace::native_with_levels(bytes, size, 4)
    }

    /// Does the same as [`AddressSpace::native`], under `levels` levels of table.
    ///
    /// # Panics
    /// If the arena is empty or above [`ARENA_MAX`], or the number of levels is not 3 to 5.
    pub fn native_with_levels(bytes: Bytes, size: PageSize, levels: u8) -> AddressSpace {
        AddressSpace::new(bytes, size, None, Paging { guest_levels: levels, host_levels: levels })
    }

    /// Makes a guest's memory: the guest maps all of it in pages of `guest`. The host backs all of it, the guest's
    /// tables included, by pages of `host`.
    ///
    /// # Panics
    /// If the arena is empty or above [`ARENA_MAX`], or the number of levels is not 3 to 5.
    pub fn nested(bytes: Bytes, guest: PageSize, host: PageSize, paging: Paging) -> AddressSpace {
        AddressSpace::new(bytes, guest, Some(host), paging)
    }

    fn new(bytes: Bytes, guest: PageSize, host: Option<PageSize>, paging: Paging) -> AddressSpace {
        assert!(bytes > Bytes::ZERO && bytes <= ARENA_MAX, "an arena of {bytes}, of at most {ARENA_MAX}");
        for levels in [paging.guest_levels, paging.host_levels] {
            assert!((3..=LEVELS_MAX as u8).contains(&levels), "{levels} levels of table, of 3 to {LEVELS_MAX}");
        }
        let arena = bytes.get().next_multiple_of(GIANT);
        let guest_tables = Tables::new(arena, arena, paging.guest_levels);
        let physical = guest_tables.end.next_multiple_of(GIANT);
        let host_tables = Tables::new(physical, physical, paging.host_levels);
        AddressSpace {
            bytes,
            pages: vec![Pages::new(guest, host); (physical >> WINDOW_SHIFT) as usize],
            arena_windows: (arena >> WINDOW_SHIFT) as usize,
            is_nested: host.is_some(),
            paging,
            guest_tables,
            host_tables,
        }
    }

    /// Size of the arena.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Whether there is a second dimension.
    pub fn is_nested(&self) -> bool {
        self.is_nested
    }

    /// Number of table levels in both dimensions.
    pub fn paging(&self) -> Paging {
        self.paging
    }

    /// The guest's page size over a window of the arena.
    pub fn guest(&self, window: WindowIndex) -> PageSize {
        self.at(window).guest()
    }

    /// The host's page size under a window of the arena or of [`AddressSpace::table_windows`]. In a native space it is
    /// the guest's page size.
    pub fn host(&self, window: WindowIndex) -> PageSize {
        self.at(window).host()
    }

    /// The windows of guest-physical memory that hold the guest's tables.
    pub fn table_windows(&self) -> Range<u64> {
        self.arena_windows as u64..self.guest_tables.end.div_ceil(1 << WINDOW_SHIFT)
    }

    /// The window of guest-physical memory that holds the PTEs of a window of the arena: the hottest of its tables.
    pub fn window_of_table(&self, window: WindowIndex) -> WindowIndex {
        WindowIndex::new(self.guest_entry(1, window.get() << WINDOW_SHIFT) >> WINDOW_SHIFT)
    }

    /// Makes the host back a window, of the arena or of [`AddressSpace::table_windows`], by pages of `size`. 1 GiB
    /// includes the window's whole giant. A smaller size within a 1 GiB page leaves the giant's other windows at 2
    /// MiB, as KVM does.
    ///
    /// # Panics
    /// If the window is outside, or the space is native.
    pub fn set_host(&mut self, window: WindowIndex, size: PageSize) {
        assert!(self.is_nested, "a native space has no host pages");
        self.set(window, |pages, size| Pages::new(pages.guest(), Some(size)), Pages::host, size);
    }

    /// Makes the host back all of the guest's tables by pages of `size`.
    pub fn set_host_of_tables(&mut self, size: PageSize) {
        for window in self.table_windows() {
            self.set_host(WindowIndex::new(window), size);
        }
    }

    /// Makes the guest map a window of the arena by pages of `size`; 1 GiB as for [`AddressSpace::set_host`].
    ///
    /// # Panics
    /// If the window is outside.
    pub fn set_guest(&mut self, window: WindowIndex, size: PageSize) {
        let is_nested = self.is_nested;
        self.set(window, |pages, size| Pages::new(size, is_nested.then_some(pages.host())), Pages::guest, size);
    }

    fn set(
        &mut self,
        window: WindowIndex,
        with: impl Fn(Pages, PageSize) -> Pages,
        now: impl Fn(Pages) -> PageSize,
        size: PageSize,
    ) {
        let index = window.get() as usize;
        assert!(index < self.pages.len(), "window {index} of {}", self.pages.len());
        let was_giant = now(self.pages[index]) == PageSize::Giant1G;
        if was_giant || size == PageSize::Giant1G {
            let start = index / WINDOWS_PER_GIANT * WINDOWS_PER_GIANT;
            for pages in &mut self.pages[start..start + WINDOWS_PER_GIANT] {
                *pages = with(*pages, size.max(PageSize::Huge2M));
            }
        }
        self.pages[index] = with(self.pages[index], size);
    }

    /// Memory of the tables that map the arena: those of the guest (or of a process), and those of the host, which
    /// also map the guest's tables. A table exists where anything below it has smaller pages.
    pub fn table_bytes(&self) -> [Bytes; 2] {
        let arena = self.bytes.get().div_ceil(1 << WINDOW_SHIFT) as usize;
        let guest = tables_of((0..arena).map(|window| (window, self.pages[window].guest())), self.paging.guest_levels);
        if !self.is_nested {
            return [guest, Bytes::ZERO];
        }
        let of_tables = self.arena_windows + guest.get().div_ceil(1 << WINDOW_SHIFT) as usize;
        let physical = (0..arena).chain(self.arena_windows..of_tables);
        [guest, tables_of(physical.map(|window| (window, self.pages[window].host())), self.paging.host_levels)]
    }

    fn at(&self, window: WindowIndex) -> Pages {
        self.pages[window.get() as usize]
    }

    /// The address above all memory, tables included.
    pub(crate) fn end(&self) -> u64 {
        self.host_tables.end
    }

    /// The sizes at an address of guest-physical memory.
    #[inline]
    pub(crate) fn pages(&self, address: u64) -> Pages {
        self.pages[(address >> WINDOW_SHIFT) as usize]
    }

    /// Guest-physical address of the guest's entry of `level` for an address.
    #[inline]
    pub(crate) fn guest_entry(&self, level: u32, address: u64) -> u64 {
        self.guest_tables.entry(level, address)
    }

    /// Address of the host's entry of `level` for a guest-physical address.
    #[inline]
    pub(crate) fn host_entry(&self, level: u32, address: u64) -> u64 {
        self.host_tables.entry(level, address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::gib;

    /// Tables of the guest and of the host, in number.
    fn tables(space: &AddressSpace) -> [u64; 2] {
        space.table_bytes().map(|bytes| bytes.get() / 4096)
    }

    #[test]
    fn larger_pages_need_fewer_tables_on_their_own_side() {
        let nested = |guest, host| AddressSpace::nested(gib(4), guest, host, Paging::FOUR_LEVELS);
        let (base, huge, giant) = (PageSize::Base4K, PageSize::Huge2M, PageSize::Giant1G);
        // Four levels over 4 GiB: one table of each of the upper two, a table for each GiB, a table for each window.
        let guest = 1 + 1 + 4 + 4 * 512;
        // The guest's tables are five windows more, in a GiB of their own.
        assert_eq!(tables(&nested(base, base)), [guest, 1 + 1 + 5 + 4 * 512 + 5]);
        assert_eq!(tables(&nested(base, huge)), [guest, 1 + 1 + 5]);
        assert_eq!(tables(&nested(huge, giant)), [1 + 1 + 4, 1 + 1]);
        assert_eq!(tables(&AddressSpace::native(gib(4), giant)), [1 + 1, 0]);
    }

    #[test]
    fn a_promoted_window_gives_back_its_table() {
        let mut space = AddressSpace::nested(gib(1), PageSize::Huge2M, PageSize::Base4K, Paging::FOUR_LEVELS);
        let [guest, host] = tables(&space);
        space.set_host(WindowIndex::new(7), PageSize::Huge2M);
        assert_eq!(tables(&space), [guest, host - 1]);
    }
}
