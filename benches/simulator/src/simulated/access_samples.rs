//! Access samples of a simulated host: some windows at a time are watched for an interval, until their first touch.
//!
//! A live host detaches the windows of a sample and counts the faults on them (`memory`'s access sensor). Here the
//! touch is visible in the stream. Both use the same code for the rotation and for the touch frequency.

use alloc::vec;
use alloc::vec::Vec;

use wideleaf_policies::rotation::{Rotation, TouchFrequency};
use wideleaf_policies::snapshot::AccessHistory;
use wideleaf_policies::units::{Moment, WindowIndex};

/// Number of windows in one sample: a live host has that number of places for detached windows.
const WINDOWS_PER_LOOK: usize = 64;

/// The sensor, and its data on each window.
pub(super) struct AccessSamples {
    rotation: Rotation,
    histories: Vec<AccessHistory>,
    frequencies: Vec<TouchFrequency>,
    /// Windows of the current sample, and the moment of the first touch of each.
    watched: Vec<(WindowIndex, Option<Moment>)>,
    is_watched: Vec<bool>,
    began_at: Moment,
}

impl AccessSamples {
    pub fn new(windows: usize) -> AccessSamples {
        AccessSamples {
            rotation: Rotation::default(),
            histories: vec![AccessHistory::default(); windows],
            frequencies: vec![TouchFrequency::default(); windows],
            watched: Vec::new(),
            is_watched: vec![false; windows],
            began_at: Moment::START,
        }
    }

    /// Whether the sample is waiting for the next touch of that window.
    pub fn is_watched(&self, row: usize) -> bool {
        self.is_watched[row]
    }

    pub fn history(&self, row: usize) -> AccessHistory {
        self.histories[row]
    }

    /// Records the touch of a watched window.
    pub fn touched(&mut self, row: usize, now: Moment) {
        self.is_watched[row] = false;
        let window = WindowIndex::new(row as u64);
        if let Some(entry) = self.watched.iter_mut().find(|(watched, _)| *watched == window) {
            entry.1 = Some(now);
        }
    }

    pub fn start(&mut self, backed: &[WindowIndex], now: Moment) {
        self.began_at = now;
        for window in self.rotation.next_share(backed, WINDOWS_PER_LOOK) {
            self.is_watched[window.get() as usize] = true;
            self.watched.push((window, None));
        }
    }

    pub fn finish(&mut self, now: Moment) {
        for (window, touched_at) in self.watched.drain(..) {
            let row = window.get() as usize;
            self.is_watched[row] = false;
            let watched_for = touched_at.unwrap_or(now).since(self.began_at);
            self.frequencies[row].add(touched_at.is_some(), watched_for);
            let per_second = self.frequencies[row].per_second();
            self.histories[row] = self.histories[row].with(touched_at.is_some()).with_touches_per_s(per_second);
        }
    }
}
