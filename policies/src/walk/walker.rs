//! The walk itself: level by level through the guest's tables, each of whose entries the host's tables must find first.
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
//! Guest walk caches that hold host-physical addresses (Intel's combined entries) skip the ▪ of the first row that is left, too.

use alloc::vec::Vec;

use super::caches::{Caches, Purpose};
use super::counts::{Counts, References};
use super::machine::{Machine, WalkCache};
use super::sets::{Found, Sets};
use super::space::{AddressSpace, LEVELS_MAX, shift_of_level};
use super::tlb::{Level, key};
use crate::units::PageSize;

/// What a walk looks into before it reads tables.
pub(crate) struct Walker {
    guest: WalkCaches,
    host: WalkCaches,
    nested_tlb: Option<Sets>,
    /// The guest's walk caches hold host-physical addresses.
    guest_is_combined: bool,
    second_level_holds_pdes: bool,
}

impl Walker {
    pub(crate) fn new(machine: &Machine, is_halved: bool, seed: u64) -> Walker {
        Walker {
            guest: WalkCaches::new(machine.walk_caches, is_halved, seed),
            host: WalkCaches::new(machine.host_walk_caches, is_halved, seed + 16),
            nested_tlb: machine.nested_tlb.map(|array| Sets::new(&array, is_halved, seed + 32)),
            guest_is_combined: machine.walk_caches_are_combined.value,
            second_level_holds_pdes: machine.second_level_holds_pdes.value,
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.guest.clear();
        self.host.clear();
        if let Some(sets) = &mut self.nested_tlb {
            sets.clear();
        }
    }

    /// Walks to the page at an address. `second` is the TLB's second level.
    pub(crate) fn walk(
        &mut self,
        address: u64,
        space: &AddressSpace,
        second: Option<&mut Level>,
        caches: &mut Caches,
        counts: &mut Counts,
    ) {
        let leaf = leaf_level(space.pages(address).guest());
        let top = u32::from(space.paging().guest_levels);
        let pdes = second.filter(|_| self.second_level_holds_pdes);
        let from = if leaf < PDE_LEVEL && pdes.is_some_and(|level| level.access_pde(address)) {
            PDE_LEVEL - 1
        } else {
            self.guest.first_to_read(address, leaf, top)
        };
        counts.guest.skipped_by_walk_cache += u64::from(top - from);
        for level in (leaf..=from).rev() {
            let entry = space.guest_entry(level, address);
            if space.is_nested() && self.guest_is_combined && level == from && from < top {
                counts.host_of_tables.skipped_by_walk_cache += host_levels(entry, space);
            } else if space.is_nested() {
                self.find(entry, space, caches, Purpose::HostOfTables, &mut counts.host_of_tables);
            }
            caches.refer(entry, Purpose::Guest);
        }
        if space.is_nested() {
            self.find(address, space, caches, Purpose::HostOfData, &mut counts.host_of_data);
        }
    }

    /// Finds the host's page of a guest-physical address.
    fn find(
        &mut self,
        gpa: u64,
        space: &AddressSpace,
        caches: &mut Caches,
        purpose: Purpose,
        references: &mut References,
    ) {
        let size = space.pages(gpa).host();
        let (leaf, top) = (leaf_level(size), u32::from(space.paging().host_levels));
        if let Some(nested_tlb) = &mut self.nested_tlb
            && nested_tlb.access(key(gpa, size)) == Found::Hit
        {
            references.skipped_by_nested_tlb += host_levels(gpa, space);
            return;
        }
        let from = self.host.first_to_read(gpa, leaf, top);
        references.skipped_by_walk_cache += u64::from(top - from);
        for level in (leaf..=from).rev() {
            caches.refer(space.host_entry(level, gpa), purpose);
        }
    }
}

/// How many entries of the host's tables lead to a guest-physical address.
fn host_levels(gpa: u64, space: &AddressSpace) -> u64 {
    u64::from(u32::from(space.paging().host_levels) - leaf_level(space.pages(gpa).host()) + 1)
}

/// The level whose entries point to tables of PTEs.
const PDE_LEVEL: u32 = 2;

/// The level whose entry maps a page of `size`.
const fn leaf_level(size: PageSize) -> u32 {
    size as u32 + 1
}

/// The walk caches of one dimension.
struct WalkCaches {
    arrays: Vec<Sets>,
    /// By level of table: the array that holds its entries.
    by_level: [Option<u8>; LEVELS_MAX + 1],
}

/// Above all bits of an address that choose an entry: where a key has its level.
const LEVEL_SHIFT: u32 = 28;

impl WalkCaches {
    fn new(caches: &[WalkCache], is_halved: bool, seed: u64) -> WalkCaches {
        let mut by_level = [None; LEVELS_MAX + 1];
        let mut arrays = Vec::new();
        for cache in caches {
            for level in cache.levels {
                by_level[*level as usize] = Some(arrays.len() as u8);
            }
            arrays.push(Sets::new(&cache.array, is_halved, seed + arrays.len() as u64));
        }
        WalkCaches { arrays, by_level }
    }

    /// The first level that must be read: the one below the lowest cached. What was looked for in vain is held afterwards,
    /// because the walk reads it.
    fn first_to_read(&mut self, address: u64, leaf: u32, top: u32) -> u32 {
        for level in leaf + 1..=top {
            let Some(array) = self.by_level[level as usize] else {
                continue;
            };
            let key = address >> shift_of_level(level) | u64::from(level) << LEVEL_SHIFT;
            if self.arrays[array as usize].access(key) == Found::Hit {
                return level - 1;
            }
        }
        top
    }

    fn clear(&mut self) {
        self.arrays.iter_mut().for_each(Sets::clear);
    }
}
