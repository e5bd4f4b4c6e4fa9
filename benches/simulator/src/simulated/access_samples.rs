//! Access samples of a simulated host: some windows at a time are watched for an interval, until their first touch.
//!
//! A live host detaches pages of the windows of a sample and counts the faults on them (`memory`'s access sensor). Here
//! the touch is visible in the stream. Both use the same code for the rotation, for the choice of pages and for the
//! touch frequency.

use alloc::vec;
use alloc::vec::Vec;

use wideleaf_policies::rotation::{Rotation, TouchFrequency};
use wideleaf_policies::sampled_pages::choose;
use wideleaf_policies::snapshot::AccessHistory;
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, Moment, WindowIndex};

/// Number of windows in one sample: a live host has that number of places for detached windows.
const WINDOWS_PER_LOOK: usize = 64;

/// One bit for each base page of a window.
pub(super) type PageBits = [u64; 8];

/// The sensor, and its data on each window.
pub(super) struct AccessSamples {
    rotation: Rotation,
    histories: Vec<AccessHistory>,
    frequencies: Vec<TouchFrequency>,
    /// Windows of the current sample, and the moment of the first touch of each.
    watched: Vec<(WindowIndex, Option<Moment>)>,
    /// Pages of each window with touches that the current sample waits for.
    watched_pages: Vec<PageBits>,
    /// Number of windows sampled so far.
    turns: u64,
    began_at: Moment,
}

impl AccessSamples {
    pub fn new(windows: usize) -> AccessSamples {
        AccessSamples {
            rotation: Rotation::default(),
            histories: vec![AccessHistory::default(); windows],
            frequencies: vec![TouchFrequency::default(); windows],
            watched: Vec::new(),
            watched_pages: vec![PageBits::default(); windows],
            turns: 0,
            began_at: Moment::START,
        }
    }

    /// Whether the sample is waiting for the next touch of that page of a window.
    #[inline]
    pub fn is_watched(&self, row: usize, word: usize, bit: u64) -> bool {
        self.watched_pages[row][word] & bit != 0
    }

    pub fn history(&self, row: usize) -> AccessHistory {
        self.histories[row]
    }

    /// Records the touch of a watched window.
    pub fn touched(&mut self, row: usize, now: Moment) {
        self.watched_pages[row] = PageBits::default();
        let window = WindowIndex::new(row as u64);
        if let Some(entry) = self.watched.iter_mut().find(|(watched, _)| *watched == window) {
            entry.1 = Some(now);
        }
    }

    /// Begins a sample. `present` tells the pages of a window that are present on base pages; `None` on a large page,
    /// which is sampled whole.
    pub fn start(&mut self, backed: &[WindowIndex], present: impl Fn(usize) -> Option<PageBits>, now: Moment) {
        self.began_at = now;
        for window in self.rotation.next_share(backed, WINDOWS_PER_LOOK) {
            let row = window.get() as usize;
            self.watched_pages[row] = present(row).map_or([u64::MAX; 8], |present| pages_to_watch(present, self.turns));
            self.turns += 1;
            self.watched.push((window, None));
        }
    }

    pub fn finish(&mut self, now: Moment) {
        for (window, touched_at) in self.watched.drain(..) {
            let row = window.get() as usize;
            self.watched_pages[row] = PageBits::default();
            let watched_for = touched_at.unwrap_or(now).since(self.began_at);
            self.frequencies[row].add(touched_at.is_some(), watched_for);
            let per_second = self.frequencies[row].per_second();
            self.histories[row] = self.histories[row].with(touched_at.is_some()).with_touches_per_s(per_second);
        }
    }
}

/// A few of the present pages, and all missing ones: a live host sees touches of both.
fn pages_to_watch(present: PageBits, sample: u64) -> PageBits {
    let is_present = |page: u16| present[usize::from(page) / 64] >> (page % 64) & 1 == 1;
    let runs: Vec<_> = (0..BASE_PAGES_PER_WINDOW).filter(|page| is_present(*page)).map(|page| page..page + 1).collect();
    let mut watched = present.map(|word| !word);
    for page in choose(&runs, sample) {
        watched[usize::from(page) / 64] |= 1 << (page % 64);
    }
    watched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_present_pages_are_watched_and_all_missing_ones() {
        let present = [0xff, 0, 0, 0, 0, 0, 0, u64::MAX];
        let watched = pages_to_watch(present, 3);
        let both = watched.iter().zip(present).map(|(watched, present)| (watched & present).count_ones()).sum::<u32>();
        assert_eq!(both, 4, "{watched:x?}");
        assert!(watched.iter().zip(present).all(|(watched, present)| watched | present == u64::MAX));
    }
}
