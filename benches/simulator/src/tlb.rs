//! TLBs: a level consists of a few arrays, chosen by page size and by load or store.
//!
//! ```text
//!   (address, size) ─▶ first level ──hit───────────────────────────────▶ no cost
//!                          │ miss          ┌──hit──▶ a few cycles
//!                          └──▶ second ────┤
//!                                          └─miss──▶ a walk; then both levels hold the page
//! ```

use alloc::vec::Vec;

use super::machine::{Fill, TlbArray, TlbLevel};
use super::sets::{Avx2, Found, Sets, keep};
use super::space::page_shift;
use wideleaf_policies::units::PageSize;

/// The bit of a page number that chooses between two arrays for the same size. It is above the bits that choose the
/// set within any array, so that both arrays use all of their sets.
const CHOOSING_BIT: u32 = 8;

/// Number of bits of a page number within a key: 4 TiB of 4 KiB pages.
const PAGE_BITS: u32 = 30;

/// Value in place of the size in the key of a PDE.
const PDE: u64 = 3;

/// Bound of all keys.
const KEYS: u64 = (PDE + 1) << PAGE_BITS;

/// Key that no page has.
const NO_KEY: u32 = u32::MAX;

/// Array number that stands for none.
const NONE: u8 = u8::MAX;

/// Level at which an access found its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Translated {
    FirstLevel,
    SecondLevel,
    /// No level: a walk follows, after which an entry of this size holds the page.
    Missed(PageSize),
}

/// An access that looks up its page.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seeker {
    /// Key of the page in the next level.
    key: u32,
    /// Index of the access in its block.
    pub(crate) access: u8,
    /// Page size as stored in the first level, and above these two bits the page's own.
    sizes: u8,
    is_store: bool,
    /// Whether the second level had the PDE: see [`super::walker::Walker::finds_pde`].
    pub(crate) has_pde: bool,
}

impl Seeker {
    /// Size of the entry in the first level; after a miss of the second level, of the larger of the new entries.
    pub(crate) fn size(self) -> PageSize {
        PageSize::ALL[usize::from(self.sizes & 3)]
    }

    /// Size of the page itself, which the first level may store in pieces.
    fn whole(self) -> PageSize {
        PageSize::ALL[usize::from(self.sizes >> 2)]
    }
}

/// Looks up a page of `size` in both levels, and inserts it if it is missing.
#[inline(always)]
pub(crate) fn translate(
    first: &mut Level,
    second: Option<&mut Level>,
    address: u64,
    size: PageSize,
    is_store: bool,
) -> Translated {
    match first.seek(address, size as usize, is_store) {
        (_, true) => Translated::FirstLevel,
        (seeker, false) => find(first, second, address, seeker),
    }
}

/// Does the same as [`translate`], for accesses that [`Level::seek`] did not find.
pub(crate) fn find(first: &mut Level, second: Option<&mut Level>, address: u64, seeker: Seeker) -> Translated {
    let mut seeker = seeker;
    match first.first(seeker) {
        Found::Hit => Translated::FirstLevel,
        Found::Miss { evicted } => {
            if second.is_some_and(|second| second.after_first(address, &mut seeker, evicted)) {
                Translated::SecondLevel
            } else {
                Translated::Missed(seeker.size())
            }
        }
    }
}

/// One level of a TLB.
pub(crate) struct Level {
    arrays: Vec<Sets>,
    /// Arrays by kind of access (load, store), size, and the bit that chooses.
    routes: [[[Route; 2]; 3]; 2],
    /// Newest key of each set, array after array: a first level that gets it again has it, and its state
    /// does not change.
    newest: Vec<u32>,
    /// One bit for each array that accesses of the present block may use, as a first level.
    used: u64,
    /// By kind of access and size; the fourth is unused, and makes an index of two bits valid.
    entries: [[Entry; 4]; 2],
    kept_as: [PageSize; 3],
    takes_victims: bool,
    /// Cycles of a hit.
    pub(crate) cycles: u64,
}

/// Array that stores pages of a size.
#[derive(Clone, Copy)]
struct Route {
    /// Index of the array, or `NONE`.
    array: u8,
    /// Start of its keys within `newest`, and the bits of a key that choose among them: those of its set,
    /// or of several.
    newest: u32,
    mask: u32,
}

/// Data needed to look up a page of a size in a first level.
#[derive(Clone, Copy)]
struct Entry {
    /// Size under which the pages are stored, and above these two bits their own.
    sizes: u8,
    /// Shift from an address to the page number.
    shift: u8,
    /// Size bits of the key, above the page number.
    size_bits: u32,
    /// Start within `newest`, by the bit that chooses; see [`Route`].
    starts: [u32; 2],
    masks: [u32; 2],
    /// The bits of the arrays in [`Level::used`].
    arrays: [u64; 2],
}

impl Entry {
    fn new(whole: PageSize, size: PageSize, routes: [Route; 2]) -> Entry {
        Entry {
            sizes: size as u8 | (whole as u8) << 2,
            shift: page_shift(size) as u8,
            size_bits: key(0, size) as u32,
            starts: routes.map(|route| route.newest),
            masks: routes.map(|route| route.mask),
            arrays: routes.map(|route| 1_u64.wrapping_shl(route.array.into())),
        }
    }
}

impl Level {
    pub(crate) fn new(level: &TlbLevel, is_first: bool, is_halved: bool, seed: u64) -> Level {
        let (mut arrays, mut newest) = (Vec::new(), Vec::new());
        let mut routes = |list| routes(list, &mut arrays, &mut newest, is_halved, seed);
        let loads = routes(level.arrays);
        let stores = if level.store_arrays.is_empty() { loads } else { routes(level.store_arrays) };
        let is_held = |size: PageSize| [loads, stores].iter().all(|routes| routes[size as usize][0].array != NONE);
        assert!(!is_first || is_held(PageSize::Base4K), "a first level without an array for 4 KiB pages");
        let mut kept_as = PageSize::ALL;
        for size in [PageSize::Huge2M, PageSize::Giant1G] {
            if (is_first && !is_held(size)) || level.smashed.contains(&size) {
                kept_as[size as usize] = kept_as[size as usize - 1];
            }
        }
        Level {
            arrays,
            entries: [loads, stores].map(|routes: [[Route; 2]; 3]| {
                core::array::from_fn(|index| {
                    let (whole, size) = (PageSize::ALL[index.min(2)], kept_as[index.min(2)]);
                    Entry::new(whole, size, routes[size as usize])
                })
            }),
            routes: [loads, stores],
            newest,
            used: 0,
            kept_as,
            takes_victims: level.fill.value == Fill::Victims,
            cycles: u64::from(level.cycles.value),
        }
    }

    /// Drops all entries.
    pub(crate) fn clear(&mut self) {
        self.arrays.iter_mut().for_each(Sets::clear);
        self.newest.fill(NO_KEY);
    }

    /// Looks up the PDE of an address among the 4 KiB pages, and inserts it if it is missing. Returns whether
    /// it was present.
    pub(crate) fn access_pde(&mut self, address: u64) -> bool {
        let key = address >> page_shift(PageSize::Huge2M) | PDE << PAGE_BITS;
        self.array(key, PageSize::Base4K, false).is_some_and(|array| array.access(key) == Found::Hit)
    }

    /// Accesses this level as a first level, from which no entry is removed.
    fn first(&mut self, seeker: Seeker) -> Found {
        let key = seeker.key.into();
        self.array(key, seeker.size(), seeker.is_store).expect("a first level holds all sizes").access(key)
    }

    /// Begins an access in this level as a first level. `size` is a page size as a number. Returns the seeker, and
    /// whether its key is the newest of its set.
    #[inline(always)]
    pub(crate) fn seek(&mut self, address: u64, size: usize, is_store: bool) -> (Seeker, bool) {
        let entry = &self.entries[is_store as usize][size & 3];
        let key = (address >> entry.shift) as u32 | entry.size_bits;
        let choice = (key >> CHOOSING_BIT & 1) as usize;
        let newest = &mut self.newest[(entry.starts[choice] + (key & entry.masks[choice])) as usize];
        let is_newest = core::mem::replace(newest, key) == key;
        self.used |= entry.arrays[choice];
        (Seeker { key, access: 0, sizes: entry.sizes, is_store, has_pde: false }, is_newest)
    }

    /// Moves the seekers that miss the first level to the front. Returns their number.
    pub(crate) fn sift_first(&mut self, seekers: &mut [Seeker], avx2: Option<Avx2>) -> usize {
        let used = core::mem::take(&mut self.used);
        if used.is_power_of_two() {
            let array = &mut self.arrays[used.trailing_zeros() as usize];
            return array.keep_missing(seekers, avx2, |seeker| Some(seeker.key.into()));
        }
        keep(seekers, |seeker| self.first(*seeker) != Found::Hit)
    }

    /// Moves the seekers that miss the second level to the front. Returns their number.
    pub(crate) fn sift_second(&mut self, seekers: &mut [Seeker], addresses: &[u64], avx2: Option<Avx2>) -> usize {
        if let [array] = &mut self.arrays[..] {
            let (routes, kept_as) = (&self.routes, &self.kept_as);
            return array.keep_missing(seekers, avx2, |seeker| {
                let size = sought(routes, kept_as, seeker);
                let is_held = routes[seeker.is_store as usize][size as usize][0].array != NONE;
                is_held.then(|| key(addresses[seeker.access as usize], size))
            });
        }
        let mut used = 0_u64;
        for seeker in seekers.iter_mut() {
            let size = sought(&self.routes, &self.kept_as, seeker);
            let key = key(addresses[seeker.access as usize], size);
            used |= 1_u64.wrapping_shl(self.route(key, size, seeker.is_store).array.into());
            seeker.key = key as u32;
        }
        if used.is_power_of_two() && used < 1 << self.arrays.len() {
            let array = &mut self.arrays[used.trailing_zeros() as usize];
            return array.keep_missing(seekers, avx2, |seeker| Some(seeker.key.into()));
        }
        keep(seekers, |seeker| !self.second(addresses[seeker.access as usize], seeker))
    }

    /// Accesses this level as a second level that takes no victims. Returns whether it has the page.
    pub(crate) fn second(&mut self, address: u64, seeker: &mut Seeker) -> bool {
        let size = sought(&self.routes, &self.kept_as, seeker);
        self.access(address, size, seeker.is_store) == Found::Hit
    }

    /// Whether it is filled by entries that the first level evicts.
    pub(crate) fn takes_victims(&self) -> bool {
        self.takes_victims
    }

    fn access(&mut self, address: u64, size: PageSize, is_store: bool) -> Found {
        let key = key(address, size);
        self.array(key, size, is_store).map_or(Found::Miss { evicted: None }, |array| array.access(key))
    }

    /// Accesses this level as a second level, after the first level missed and evicted `evicted`. Returns
    /// whether it hit.
    fn after_first(&mut self, address: u64, seeker: &mut Seeker, evicted: Option<u64>) -> bool {
        if !self.takes_victims {
            return self.second(address, seeker);
        }
        let (size, is_store) = (seeker.size(), seeker.is_store);
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

    #[inline(always)]
    fn route(&self, key: u64, size: PageSize, is_store: bool) -> Route {
        self.routes[is_store as usize][size as usize][(key >> CHOOSING_BIT & 1) as usize]
    }

    #[inline]
    fn array(&mut self, key: u64, size: PageSize, is_store: bool) -> Option<&mut Sets> {
        let route = self.route(key, size, is_store);
        self.arrays.get_mut(route.array as usize)
    }
}

/// Size under which a second level stores the page: whole, if it can. Otherwise it gets the first level's piece.
#[inline(always)]
fn sought(routes: &[[[Route; 2]; 3]; 2], kept_as: &[PageSize; 3], seeker: &mut Seeker) -> PageSize {
    let whole = kept_as[seeker.whole() as usize];
    if routes[seeker.is_store as usize][whole as usize][0].array == NONE {
        return kept_as[seeker.size() as usize];
    }
    seeker.sizes = seeker.sizes & !3 | (seeker.sizes & 3).max(whole as u8);
    whole
}

/// The page of `size` at an address, with its size: unique over all sizes.
#[inline]
pub(crate) fn key(address: u64, size: PageSize) -> u64 {
    address >> page_shift(size) | (size as u64) << PAGE_BITS
}

fn routes(
    list: &[TlbArray],
    arrays: &mut Vec<Sets>,
    newest: &mut Vec<u32>,
    is_halved: bool,
    seed: u64,
) -> [[Route; 2]; 3] {
    let mut routes = [[Route { array: NONE, newest: 0, mask: 0 }; 2]; 3];
    for TlbArray { pages, array } in list {
        let sets = Sets::new(array, is_halved, KEYS, seed + arrays.len() as u64);
        let to = Route { array: arrays.len() as u8, newest: newest.len() as u32, mask: sets.mask() };
        for size in *pages {
            let route = &mut routes[*size as usize];
            *route = if route[0].array == NONE { [to; 2] } else { [route[0], to] };
        }
        newest.resize(newest.len() + to.mask as usize + 1, NO_KEY);
        arrays.push(sets);
    }
    routes
}
