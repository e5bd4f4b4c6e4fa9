//! A set of base pages of one window: a bit for each of its 512 pages, page 0 in the lowest bit of the first word.
//! The same layout as KVM's dirty log (KVM API, `KVM_GET_DIRTY_LOG`) and as the masks in a snapshot's file.

use alloc::vec::Vec;
use core::ops::Range;

use crate::GpaRange;
use crate::units::{BASE_PAGES_PER_WINDOW, PageSize, WindowIndex};

const WORDS: usize = BASE_PAGES_PER_WINDOW as usize / u64::BITS as usize;

/// A set of base pages of a window. Pages have the numbers 0 to 511; a larger number panics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageSet([u64; 8]);

const _: () = assert!(WORDS == 8, "a set has a bit for each base page of a window");

impl PageSet {
    /// The empty set of pages.
    pub const EMPTY: PageSet = PageSet([0; 8]);

    /// All pages of a window.
    pub const ALL: PageSet = PageSet([u64::MAX; 8]);

    /// The pages of `range` that lie wholly in `window`.
    pub fn of_range(window: WindowIndex, range: GpaRange) -> PageSet {
        let page = PageSize::Base4K.bytes();
        let is_inside = |number: &u16| {
            let start = window.start() + page * u64::from(*number);
            range.start() <= start && start + page <= range.end()
        };
        (0..BASE_PAGES_PER_WINDOW).filter(is_inside).collect()
    }

    /// Adds a page. Returns whether it is new.
    pub fn insert(&mut self, page: u16) -> bool {
        let (word, bit) = place(page);
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }

    /// Removes a page. Returns whether it was in the set.
    pub fn remove(&mut self, page: u16) -> bool {
        let (word, bit) = place(page);
        let was_there = self.0[word] & bit != 0;
        self.0[word] &= !bit;
        was_there
    }

    /// Whether the page is in the set.
    pub fn contains(&self, page: u16) -> bool {
        let (word, bit) = place(page);
        self.0[word] & bit != 0
    }

    /// Number of pages in the set.
    pub fn len(&self) -> u16 {
        self.0.iter().map(|word| word.count_ones() as u16).sum()
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        *self == PageSet::EMPTY
    }

    /// The pages of either set.
    #[must_use]
    pub fn with(self, other: PageSet) -> PageSet {
        PageSet(core::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    /// The pages of both sets.
    #[must_use]
    pub fn and(self, other: PageSet) -> PageSet {
        PageSet(core::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    /// The pages of this set that are not in the other one.
    #[must_use]
    pub fn without(self, other: PageSet) -> PageSet {
        PageSet(core::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    /// Numbers of the pages, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> + use<> {
        let words = self.0;
        (0..8_u16).flat_map(move |word| {
            let without_lowest = |rest: &u64| Some(rest & rest.wrapping_sub(1));
            core::iter::successors(Some(words[usize::from(word)]), without_lowest)
                .take_while(|rest| *rest != 0)
                .map(move |rest| word * 64 + rest.trailing_zeros() as u16)
        })
    }

    /// Runs of neighbours, ascending, as half-open ranges of page numbers.
    pub fn runs(&self) -> impl Iterator<Item = Range<u16>> + use<> {
        let set = *self;
        let mut at = 0;
        core::iter::from_fn(move || {
            let start = set.next_from(at, true)?;
            at = set.next_from(start, false).unwrap_or(BASE_PAGES_PER_WINDOW);
            Some(start..at)
        })
    }

    /// Runs of neighbours, ascending, at their addresses in `window`.
    pub fn ranges(&self, window: WindowIndex) -> Vec<GpaRange> {
        let page = PageSize::Base4K.bytes();
        let range = |run: Range<u16>| {
            let bytes = page * u64::from(run.end - run.start);
            GpaRange::new(window.start() + page * u64::from(run.start), bytes)
        };
        self.runs().map(|run| range(run).expect("a window ends before the last address")).collect()
    }

    /// The first page from `at` on that is in the set (or, for `false`, is not).
    fn next_from(&self, at: u16, is_in: bool) -> Option<u16> {
        let mut at = at;
        while at < BASE_PAGES_PER_WINDOW {
            let word = self.0[usize::from(at / 64)];
            let wanted = if is_in { word } else { !word } >> (at % 64);
            if wanted != 0 {
                return Some(at + wanted.trailing_zeros() as u16);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

impl FromIterator<u16> for PageSet {
    fn from_iter<I: IntoIterator<Item = u16>>(pages: I) -> PageSet {
        pages.into_iter().fold(PageSet::EMPTY, |mut set, page| {
            set.insert(page);
            set
        })
    }
}

impl From<[u64; 8]> for PageSet {
    fn from(words: [u64; 8]) -> PageSet {
        PageSet(words)
    }
}

impl From<PageSet> for [u64; 8] {
    fn from(set: PageSet) -> [u64; 8] {
        set.0
    }
}

fn place(page: u16) -> (usize, u64) {
    (usize::from(page / 64), 1 << (page % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gpa;
    use crate::units::kib;
    use alloc::vec;

    fn set(pages: &[u16]) -> PageSet {
        pages.iter().copied().collect()
    }

    #[test]
    fn a_set_has_the_pages_that_were_inserted_in_order() {
        let pages = [511, 0, 64, 63, 200];
        let set = set(&pages);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 64, 200, 511]);
        assert_eq!((set.len(), set.contains(63), set.contains(62)), (5, true, false));
        assert_eq!(PageSet::from(<[u64; 8]>::from(set)), set);
        assert_eq!((PageSet::ALL.len(), PageSet::EMPTY.len()), (512, 0));
    }

    #[test]
    fn runs_cross_words_and_end_with_the_window() {
        // page 0   62 63 64 65   127   510 511
        let runs: Vec<_> = set(&[0, 62, 63, 64, 65, 127, 510, 511]).runs().collect();
        assert_eq!(runs, [0..1, 62..66, 127..128, 510..512]);
        assert_eq!(PageSet::ALL.runs().collect::<Vec<_>>(), vec![0..512]);
        assert_eq!(PageSet::EMPTY.runs().count(), 0);
    }

    #[test]
    fn only_pages_that_lie_wholly_in_the_range_are_of_it() {
        // window 1: [2M ... 4M)     range [2M + 2K ... 2M + 12K)
        let window = WindowIndex::new(1);
        let range = GpaRange::new(window.start() + kib(2), kib(10)).expect("fits");
        let inside = PageSet::of_range(window, range);
        assert_eq!(inside, set(&[1, 2]));
        let second = Gpa::new(0x20_1000);
        assert_eq!(inside.ranges(window), [GpaRange::new(second, kib(8)).expect("fits")]);
    }

    #[test]
    fn sets_are_united_cut_and_subtracted() {
        let (left, right) = (set(&[1, 2, 300]), set(&[2, 3]));
        assert_eq!(left.with(right), set(&[1, 2, 3, 300]));
        assert_eq!(left.and(right), set(&[2]));
        assert_eq!(left.without(right), set(&[1, 300]));
        let mut left = left;
        assert!(left.remove(300) && !left.remove(300) && left.insert(0) && !left.insert(0));
        assert_eq!(left, set(&[0, 1, 2]));
    }
}
