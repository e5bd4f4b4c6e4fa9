//! The treatment of memory that a guest gives back (balloon, free page reporting), which depends on the page that
//! the memory is part of.
//!
//! ```text
//!                 base pages        a huge page                                  a giant page, a page of the pool
//!   a piece       release           keep, until the rest follows                 keep
//!                                   split, where the host is short of memory
//!   all of it     release           release                                      keep
//!
//!   reserved frames (policy `reservation`): release; a huge page is demoted first
//! ```
//!
//! Guests give back 4 KiB at a time. Releasing each at once breaks a huge page for 1/512 of it, and from then on
//! every access to the other 511 costs more. (HawkEye and Ingens call the opposite, filling unused memory, bloat.)
//! Both have a price, and the host's memory decides which is higher. Keeping a piece loses nothing: the manager
//! records it, and releases it when its window is free or the host is short of memory.
//!
//! A window of reserved frames becomes large by itself when its guest uses all of it again, so it loses a given-back
//! piece at once, as a reservation of FreeBSD does.

use crate::snapshot::Backing;
use crate::units::BASE_PAGES_PER_WINDOW;

/// Rules for memory that a guest has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenBackRules {
    /// Largest number of given-back base pages in a window that may still be promoted: a large page would take
    /// them all again.
    pub tolerated: u16,
    /// Fewest given-back base pages for which a huge page is split while the host is short.
    pub split_from: u16,
    /// Share of its memory in use from which on the host is short, in percent.
    pub short_from_percent: u16,
    /// Share of its memory in use below which the host is no longer short, in percent.
    pub short_below_percent: u16,
}

impl Default for GivenBackRules {
    /// No given-back page is taken again. The marks are those at which `auto` and `coverage` release zero pages
    /// (HawkEye). A split gives up the whole gain of a huge page: 64 pages are an eighth of it, the fewest for
    /// which Quicksilver (ATC '20) keeps a page large.
    fn default() -> GivenBackRules {
        GivenBackRules { tolerated: 0, split_from: 64, short_from_percent: 85, short_below_percent: 70 }
    }
}

/// Origin of the frames of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// The host's memory, page by page or as huge pages.
    Ordinary,
    /// The hugetlb pool. A page released there may be gone when the guest touches it again, and that kills the guest.
    OfPool,
    /// Reserved 2 MiB at a time, with a service that maps them page by page and promotes and demotes the window.
    Reserved,
}

/// A window with memory that the guest has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenBackWindow {
    /// Host backing of the window.
    pub backing: Backing,
    /// Origin of its frames.
    pub frames: Frames,
    /// Number of given-back base pages that may be released now.
    pub pages: u16,
}

/// Decision about the given-back pages of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Release them to the host, now.
    Release,
    /// Release them to the host, and split the huge page for that.
    Split,
    /// Keep them until something changes.
    Keep,
}

impl GivenBackRules {
    /// Decides about one window.
    pub fn decide(&self, window: GivenBackWindow, is_short: bool) -> Verdict {
        match window.backing {
            _ if window.frames == Frames::OfPool => Verdict::Keep,
            Backing::Giant1G => Verdict::Keep,
            _ if window.frames == Frames::Reserved => Verdict::Release,
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
        GivenBackRules::default().decide(GivenBackWindow { backing, frames: Frames::Ordinary, pages }, is_short)
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
    fn a_window_of_reserved_frames_loses_each_piece_at_once() {
        let decide = |backing, pages, is_short| {
            GivenBackRules::default().decide(GivenBackWindow { backing, frames: Frames::Reserved, pages }, is_short)
        };
        for backing in [Backing::Unbacked, Backing::Base4K, Backing::Huge2M] {
            assert_eq!([1, 512].map(|pages| decide(backing, pages, false)), [Verdict::Release; 2], "{backing:?}");
        }
        assert_eq!(decide(Backing::Giant1G, 512, true), Verdict::Keep);
    }

    #[test]
    fn a_page_of_the_pool_stays_even_when_all_of_it_is_given_back() {
        let of_pool = GivenBackWindow { backing: Backing::Huge2M, frames: Frames::OfPool, pages: 512 };
        assert_eq!(GivenBackRules::default().decide(of_pool, true), Verdict::Keep);
        assert_eq!(decide(Backing::Giant1G, 512, true), Verdict::Keep);
    }
}
