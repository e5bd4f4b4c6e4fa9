//! The pages of a window on base pages that a sample takes from the guest: a few of those present, others each time.
//!
//! ```text
//!   present pages in order   [ first quarter | second | third | last ]
//!                                     x         x          x    x        one of each, at random
//! ```
//!
//! A sample of all pages costs the guest up to 512 second-level faults, one of four pages no more than four. It also
//! says more. The policies count the time to the first touch as that of a pass over all pages
//! ([`crate::walk::share`]). For a stream this holds for any number of pages. For touches of random pages
//! the first touch of one among 512 comes 512 times too soon, and of one among four 4 times. A page that is touched all
//! the time beside 511 idle ones costs no misses, and is rarely among the four. For windows with few pages in use the
//! result differs from sample to sample: the share of samples with a touch is that of the pages in use.

use alloc::vec::Vec;
use core::ops::Range;

/// Largest number of base pages of a window that a sample takes from the guest.
pub const SAMPLED_PAGES: u16 = 4;

/// Pages for the sample with this number, ascending. `present`: the runs of pages to choose from, ascending.
pub fn choose(present: &[Range<u16>], sample: u64) -> Vec<u16> {
    let pages = present.iter().map(|run| run.len() as u64).sum::<u64>();
    let parts = pages.min(SAMPLED_PAGES.into());
    let rank = |part: u64| {
        let (first, end) = (part * pages / parts, (part + 1) * pages / parts);
        first + mixed(sample * u64::from(SAMPLED_PAGES) + part) % (end - first)
    };
    (0..parts).filter_map(|part| page_of_rank(present, rank(part))).collect()
}

/// The page before which there are `rank` others.
fn page_of_rank(present: &[Range<u16>], mut rank: u64) -> Option<u16> {
    for run in present {
        if rank < run.len() as u64 {
            return Some(run.start + rank as u16);
        }
        rank -= run.len() as u64;
    }
    None
}

/// A number that looks random and depends on `number` alone (SplitMix64: Steele, Lea and Flood, OOPSLA '14).
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Range<u16> = 0..512;

    #[test]
    fn a_full_window_has_one_page_of_each_quarter_and_over_time_every_page() {
        let mut seen = [0_u32; 512];
        for sample in 0..4_000 {
            let pages = choose(core::slice::from_ref(&ALL), sample);
            assert!(pages.iter().map(|page| page / 128).eq(0..4), "{pages:?}");
            pages.into_iter().for_each(|page| seen[usize::from(page)] += 1);
        }
        // 31 samples of each page are expected; five standard deviations are 28.
        assert!(seen.iter().all(|times| (3..60).contains(times)), "{seen:?}");
    }

    #[test]
    fn only_present_pages_are_chosen_and_all_of_them_where_there_are_few() {
        assert_eq!(choose(&[], 7), []);
        assert_eq!(choose(&[5..6, 9..11], 7), [5, 9, 10]);
        let present = [1..2, 40..42, 100..350, 511..512];
        for sample in 0..100 {
            let pages = choose(&present, sample);
            assert_eq!(pages.len(), 4, "{pages:?}");
            assert!(pages.iter().all(|page| present.iter().any(|run| run.contains(page))), "{pages:?}");
        }
    }
}
