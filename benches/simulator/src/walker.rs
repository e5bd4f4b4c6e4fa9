//! The walk: level by level through the guest's tables. The host's tables must find each of these entries first.
//!
//! ```text
//!             host ▶ 4 3 2 1        for a walk of 4 + 4 levels, cold: 4 x (4 + 1) + 4 = 24 references
//!   guest 4          ▪ ▪ ▪ ▪ ◆       ▪ host entry     ◆ guest entry
//!         3          ▪ ▪ ▪ ▪ ◆       guest walk caches skip rows from the top,
//!         2          ▪ ▪ ▪ ▪ ◆       host walk caches the left of a row,
//!         1          ▪ ▪ ▪ ▪ ◆       the nested TLB all ▪ of a row
//!         page       ▪ ▪ ▪ ▪
//! ```
//!
//! Guest walk caches that hold host-physical addresses (Intel's combined entries) also skip the ▪ of the
//! first remaining row.

use alloc::vec::Vec;

use super::caches::{Caches, OF_AN_ACCESS, Reference};
use super::counts::{Counts, References};
use super::machine::{Machine, WalkCache};
use super::options::{Lines, Options};
use super::purpose::Purpose;
use super::sets::{FewWays, Found, Sets};
use super::space::{AddressSpace, shift_of_level};
use super::tlb::{Level, key};

/// Caches that a walk looks into before it reads tables.
pub(crate) struct Walker {
    guest: WalkCaches,
    host: WalkCaches,
    nested_tlb: Option<Sets>,
    /// Whether the guest's walk caches hold host-physical addresses.
    guest_is_combined: bool,
    pub(crate) second_level_holds_pdes: bool,
    /// Cycles of a walk besides its reads.
    cycles: u64,
}

impl Walker {
    pub(crate) fn new(machine: &Machine, options: Options, seed: u64) -> Walker {
        let is_halved = options.is_core_shared;
        Walker {
            guest: WalkCaches::new(machine.walk_caches, is_halved, seed),
            host: WalkCaches::new(machine.host_walk_caches, is_halved, seed + 16),
            nested_tlb: machine.nested_tlb.map(|array| Sets::new(&array, is_halved, KEYS, seed + 32)),
            guest_is_combined: machine.walk_caches_are_combined.value,
            second_level_holds_pdes: machine.second_level_holds_pdes.value,
            cycles: if options.lines == Lines::None { 0 } else { machine.walk_cycles.value.into() },
        }
    }

    /// Drops all entries.
    pub(crate) fn clear(&mut self) {
        self.guest.clear();
        self.host.clear();
        if let Some(sets) = &mut self.nested_tlb {
            sets.clear();
        }
    }

    /// Whether the second level of a TLB holds the PDE of an address. Afterwards it does, if PDEs
    /// are allowed there.
    #[inline]
    pub(crate) fn finds_pde(&self, address: u64, space: &AddressSpace, second: Option<&mut Level>) -> bool {
        self.second_level_holds_pdes
            && space.pages(address).guest_leaf() < PDE_LEVEL
            && second.is_some_and(|level| level.access_pde(address))
    }

    /// Walks to the page at an address. `has_pde` is the result of [`Walker::finds_pde`].
    #[inline(always)]
    pub(crate) fn walk(
        &mut self,
        address: u64,
        has_pde: bool,
        space: &AddressSpace,
        caches: &mut Caches,
        counts: &mut Counts,
    ) {
        let written = self.write_walk(address, has_pde, space, caches.room_for_walk(), counts);
        caches.refer_walk(written);
    }

    #[inline(always)]
    fn write_walk(
        &mut self,
        address: u64,
        has_pde: bool,
        space: &AddressSpace,
        references: &mut [Reference; OF_AN_ACCESS],
        counts: &mut Counts,
    ) -> [usize; 3] {
        let leaf = space.pages(address).guest_leaf();
        let top = u32::from(space.paging().guest_levels);
        let from = if has_pde { PDE_LEVEL - 1 } else { self.guest.first_to_read(address, leaf, top) };
        counts.guest.skipped_by_walk_cache += u64::from(top - from);
        counts.cycles_of_walks += self.cycles;
        let (mut len, mut level) = (0, from + 1);
        while level > leaf {
            level -= 1;
            let entry = space.guest_entry(level, address);
            if !space.is_nested() {
            } else if self.guest_is_combined && level == from && from < top {
                let levels = space.paging().host_levels as u32 - space.pages(entry).host_leaf() + 1;
                counts.host_of_tables.skipped_by_walk_cache += u64::from(levels);
            } else {
                len = self.find(entry, space, references, len, Purpose::HostOfTables, &mut counts.host_of_tables);
            }
            references[len] = Reference::to(entry, Purpose::Guest);
            len += 1;
        }
        let guest = (from + 1 - leaf) as usize;
        let without_data = len;
        if space.is_nested() {
            len = self.find(address, space, references, len, Purpose::HostOfData, &mut counts.host_of_data);
        }
        [guest, without_data - guest, len - without_data]
    }

    /// Finds the host's page of a guest-physical address. Returns the new number of references.
    #[inline(always)]
    fn find(
        &mut self,
        gpa: u64,
        space: &AddressSpace,
        references: &mut [Reference; OF_AN_ACCESS],
        mut len: usize,
        purpose: Purpose,
        counts: &mut References,
    ) -> usize {
        let pages = space.pages(gpa);
        let (leaf, top) = (pages.host_leaf(), u32::from(space.paging().host_levels));
        if let Some(nested_tlb) = &mut self.nested_tlb
            && nested_tlb.access(key(gpa, pages.host())) == Found::Hit
        {
            counts.skipped_by_nested_tlb += u64::from(top - leaf + 1);
            return len;
        }
        let mut level = self.host.first_to_read(gpa, leaf, top) + 1;
        counts.skipped_by_walk_cache += u64::from(top + 1 - level);
        while level > leaf {
            level -= 1;
            references[len] = Reference::to(space.host_entry(level, gpa), purpose);
            len += 1;
        }
        len
    }
}

/// The level with the entries that point to tables of PTEs.
const PDE_LEVEL: u32 = 2;

/// The walk caches of one dimension.
struct WalkCaches {
    arrays: Vec<Array>,
    /// Index of the array that holds the entries, by level of table.
    by_level: [u8; 8],
}

/// Array number that stands for none.
const NONE: u8 = u8::MAX;

/// A walk cache: most have few ways, and every walk looks into them.
enum Array {
    Few(FewWays),
    Many(Sets),
}

/// Bound of the keys of walk caches and of the nested TLB.
const KEYS: u64 = 1 << 32;

/// Position of the level in a key, above all address bits that choose an entry.
const LEVEL_SHIFT: u32 = 28;

impl WalkCaches {
    fn new(caches: &[WalkCache], is_halved: bool, seed: u64) -> WalkCaches {
        let mut by_level = [NONE; 8];
        let mut arrays = Vec::new();
        for cache in caches {
            for level in cache.levels {
                by_level[*level as usize] = arrays.len() as u8;
            }
            let sets = Sets::new(&cache.array, is_halved, KEYS, seed + arrays.len() as u64);
            arrays.push(sets.into_few_ways().map_or_else(Array::Many, Array::Few));
        }
        WalkCaches { arrays, by_level }
    }

    /// The first level that must be read: the one below the lowest cached. Entries looked up without success are
    /// inserted, because the walk reads them.
    #[inline(always)]
    fn first_to_read(&mut self, address: u64, leaf: u32, top: u32) -> u32 {
        let mut level = leaf;
        while level < top {
            level += 1;
            let key = address >> shift_of_level(level) | u64::from(level) << LEVEL_SHIFT;
            let is_missing = match self.arrays.get_mut(self.by_level[level as usize % 8] as usize) {
                None => true,
                Some(Array::Few(sets)) => sets.access(key),
                Some(Array::Many(sets)) => sets.access(key) != Found::Hit,
            };
            if !is_missing {
                return level - 1;
            }
        }
        top
    }

    fn clear(&mut self) {
        for array in &mut self.arrays {
            match array {
                Array::Few(sets) => sets.clear(),
                Array::Many(sets) => sets.clear(),
            }
        }
    }
}
