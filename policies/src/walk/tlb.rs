//! TLBs: a level is a few arrays, chosen by page size and by load or store.
//!
//! ```text
//!   (address, size) ─▶ first level ──hit───────────────────────────────▶ no cost
//!                          │ miss          ┌──hit──▶ a few cycles
//!                          └──▶ second ────┤
//!                                          └─miss──▶ a walk; both levels hold the page then
//! ```

use alloc::vec::Vec;

use super::machine::{Fill, TlbArray, TlbLevel};
use super::sets::{Found, Sets};
use super::space::page_shift;
use crate::units::PageSize;

/// The bit of a page number that chooses between two arrays that hold the same size. It is above those that choose the
/// set within any array there is, so that both arrays use all of their sets.
const CHOOSING_BIT: u32 = 8;

/// Bits of a page number within a key: 4 TiB of 4 KiB pages.
const PAGE_BITS: u32 = 30;

/// What stands for the size in the key of a PDE.
const PDE: u64 = 3;

/// No array.
const NONE: u8 = u8::MAX;

/// Where an access found its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Translated {
    FirstLevel,
    SecondLevel,
    /// Nowhere: a walk, after which an entry of this size holds it.
    Missed(PageSize),
}

/// Looks a page of `size` up in both levels and puts it in where it was missing.
#[inline]
pub(crate) fn translate(
    first: &mut Level,
    second: Option<&mut Level>,
    address: u64,
    size: PageSize,
    is_store: bool,
) -> Translated {
    let size = first.kept_as(size);
    match first.access(address, size, is_store) {
        Found::Hit => Translated::FirstLevel,
        Found::Miss { evicted } => {
            if second.is_some_and(|second| second.after_first(address, size, is_store, evicted)) {
                Translated::SecondLevel
            } else {
                Translated::Missed(size)
            }
        }
    }
}

/// One level.
pub(crate) struct Level {
    arrays: Vec<Sets>,
    /// By kind of access (load, store), size, and the bit that chooses: the array, or `NONE`.
    routes: [[[u8; 2]; 3]; 2],
    kept_as: [PageSize; 3],
    takes_victims: bool,
    /// Cycles of a hit.
    pub(crate) cycles: u64,
}

impl Level {
    pub(crate) fn new(level: &TlbLevel, is_first: bool, is_halved: bool, seed: u64) -> Level {
        let mut arrays = Vec::new();
        let loads = routes(level.arrays, &mut arrays, is_halved, seed);
        let stores = match level.store_arrays {
            [] => loads,
            own => routes(own, &mut arrays, is_halved, seed),
        };
        let is_held = |size: PageSize| loads[size as usize][0] != NONE && stores[size as usize][0] != NONE;
        assert!(!is_first || is_held(PageSize::Base4K), "a first level without an array for 4 KiB pages");
        let mut kept_as = PageSize::ALL;
        for size in [PageSize::Huge2M, PageSize::Giant1G] {
            if (is_first && !is_held(size)) || level.smashed.contains(&size) {
                kept_as[size as usize] = kept_as[size as usize - 1];
            }
        }
        Level {
            arrays,
            routes: [loads, stores],
            kept_as,
            takes_victims: level.fill.value == Fill::Victims,
            cycles: u64::from(level.cycles.value),
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.arrays.iter_mut().for_each(Sets::clear);
    }

    /// What a page of `size` is kept as.
    #[inline]
    fn kept_as(&self, size: PageSize) -> PageSize {
        self.kept_as[size as usize]
    }

    /// Looks for the PDE of an address among the 4 KiB pages, and puts it in where it was missing; whether it was there.
    pub(crate) fn access_pde(&mut self, address: u64) -> bool {
        let key = address >> page_shift(PageSize::Huge2M) | PDE << PAGE_BITS;
        self.array(key, PageSize::Base4K, false).is_some_and(|array| array.access(key) == Found::Hit)
    }

    #[inline]
    fn access(&mut self, address: u64, size: PageSize, is_store: bool) -> Found {
        let key = key(address, size);
        match self.array(key, size, is_store) {
            Some(array) => array.access(key),
            None => Found::Miss { evicted: None },
        }
    }

    /// As the second level, after the first missed and evicted what it did; whether it hit.
    fn after_first(&mut self, address: u64, size: PageSize, is_store: bool, evicted: Option<u64>) -> bool {
        if !self.takes_victims {
            return self.access(address, self.kept_as(size), is_store) == Found::Hit;
        }
        let sought = key(address, size);
        let is_hit = self.array(sought, size, is_store).is_some_and(|array| array.take(sought));
        if let Some(victim) = evicted {
            let size = PageSize::ALL[(victim >> PAGE_BITS) as usize];
            if let Some(array) = self.array(victim, size, false) {
                array.access(victim);
            }
        }
        is_hit
    }

    #[inline]
    fn array(&mut self, key: u64, size: PageSize, is_store: bool) -> Option<&mut Sets> {
        let choice = (key >> CHOOSING_BIT & 1) as usize;
        self.arrays.get_mut(self.routes[is_store as usize][size as usize][choice] as usize)
    }
}

/// The page of `size` at an address, with its size: unique over sizes.
#[inline]
pub(crate) fn key(address: u64, size: PageSize) -> u64 {
    address >> page_shift(size) | (size as u64) << PAGE_BITS
}

fn routes(list: &[TlbArray], arrays: &mut Vec<Sets>, is_halved: bool, seed: u64) -> [[u8; 2]; 3] {
    let mut routes = [[NONE; 2]; 3];
    for TlbArray { pages, array } in list {
        let index = arrays.len() as u8;
        for size in *pages {
            let route = &mut routes[*size as usize];
            *route = if route[0] == NONE { [index; 2] } else { [route[0], index] };
        }
        arrays.push(Sets::new(array, is_halved, seed + u64::from(index)));
    }
    routes
}
