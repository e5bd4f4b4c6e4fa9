//! Memory that a guest gives back (a balloon, free page reporting), piece by piece, and what becomes of the page it is a piece of.
//!
//! ```text
//!                 base pages        a huge page                                  a giant page, a page of the pool
//!   a piece       release           keep, until the rest follows                 keep
//!                                   split, where the host is short of memory
//!   all of it     release           release                                      keep
//! ```
//!
//! Guests give back 4 KiB at a time. To release each at once breaks a huge page for 1/512 of it, and every access to the other 511 pays for
//! that from then on (HawkEye and Ingens call the other way round, filling what is not used, bloat: both are a price, and memory decides which is
//! the higher one). Who keeps a piece has lost nothing: it is in a book, and goes when its window is free or memory is dear.

use crate::snapshot::Backing;
use crate::units::BASE_PAGES_PER_WINDOW;

/// What a VM's memory that is given back is treated by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenBackRules {
    /// A window of which more base pages are given back is not promoted: a large page would take them all again.
    pub tolerated: u16,
    /// While the host is short, a huge page is split for so many of its base pages, and for no fewer.
    pub split_from: u16,
    /// The host is short from this percentage of its memory in use on...
    pub short_from_percent: u16,
    /// ...until it is below this one.
    pub short_below_percent: u16,
}

impl Default for GivenBackRules {
    /// Nothing is taken again, and the marks are those that `auto` and `coverage` release zero pages by (HawkEye). A split gives up the
    /// whole gain of a huge page: 64 pages are an eighth of it, the fewest for which Quicksilver (ATC '20) keeps a
    /// page large.
    fn default() -> GivenBackRules {
        GivenBackRules { tolerated: 0, split_from: 64, short_from_percent: 85, short_below_percent: 70 }
    }
}

/// A window of which something is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenBackWindow {
    /// What it is on.
    pub backing: Backing,
    /// Whether it is a page of the hugetlb pool, or its frames are set aside: what is released there may be gone when the guest
    /// touches it again, and then the guest is, too.
    pub is_of_pool: bool,
    /// Its base pages that are given back now, and may be released now.
    pub pages: u16,
}

/// What becomes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They go back to the host, now.
    Release,
    /// They go back to the host, and the huge page is split for it.
    Split,
    /// They stay, until something changes.
    Keep,
}

impl GivenBackRules {
    /// Decides over one window.
    pub fn decide(&self, window: GivenBackWindow, is_short: bool) -> Verdict {
        match window.backing {
            _ if window.is_of_pool => Verdict::Keep,
            Backing::Giant1G => Verdict::Keep,
            Backing::Unbacked | Backing::Base4K => Verdict::Release,
            Backing::Huge2M if window.pages >= BASE_PAGES_PER_WINDOW => Verdict::Release,
            Backing::Huge2M if is_short && window.pages >= self.split_from => Verdict::Split,
            Backing::Huge2M => Verdict::Keep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide(backing: Backing, pages: u16, is_short: bool) -> Verdict {
        GivenBackRules::default().decide(GivenBackWindow { backing, is_of_pool: false, pages }, is_short)
    }

    #[test]
    fn a_piece_breaks_no_huge_page_while_there_is_memory() {
        assert_eq!([1, 64, 511].map(|pages| decide(Backing::Huge2M, pages, false)), [Verdict::Keep; 3]);
        assert_eq!(decide(Backing::Huge2M, 512, false), Verdict::Release);
        assert_eq!([1, 512].map(|pages| decide(Backing::Base4K, pages, false)), [Verdict::Release; 2]);
    }

    #[test]
    fn a_host_that_is_short_splits_for_enough_pages() {
        assert_eq!(
            [63, 64, 512].map(|pages| decide(Backing::Huge2M, pages, true)),
            [Verdict::Keep, Verdict::Split, Verdict::Release]
        );
    }

    #[test]
    fn a_page_of_the_pool_stays_whatever_is_given_back_of_it() {
        let of_pool = GivenBackWindow { backing: Backing::Huge2M, is_of_pool: true, pages: 512 };
        assert_eq!(GivenBackRules::default().decide(of_pool, true), Verdict::Keep);
        assert_eq!(decide(Backing::Giant1G, 512, true), Verdict::Keep);
    }
}
