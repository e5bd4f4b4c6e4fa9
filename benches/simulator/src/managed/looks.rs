//! Which windows the guest uses: some at a time are watched for an interval, until their first touch.
//!
//! A live host takes the windows of a look aside and counts who comes for them (`memory`'s access sensor); here the touch is
//! seen in the stream. The turns and what the time to a touch is worth are the same code.

use alloc::vec;
use alloc::vec::Vec;

use wideleaf_policies::sampled::{Rotation, TouchFrequency};
use wideleaf_policies::snapshot::AccessHistory;
use wideleaf_policies::units::{Moment, WindowIndex};

/// Windows of one look: a live host has places for so many that are aside.
const WINDOWS_PER_LOOK: usize = 64;

/// The sensor, and what it knows of each window.
pub(super) struct Looks {
    rotation: Rotation,
    histories: Vec<AccessHistory>,
    frequencies: Vec<TouchFrequency>,
    /// Windows of the look under way, and when each was touched first.
    watched: Vec<(WindowIndex, Option<Moment>)>,
    is_watched: Vec<bool>,
    began_at: Moment,
}

impl Looks {
    pub fn new(windows: usize) -> Looks {
        Looks {
            rotation: Rotation::default(),
            histories: vec![AccessHistory::default(); windows],
            frequencies: vec![TouchFrequency::default(); windows],
            watched: Vec::new(),
            is_watched: vec![false; windows],
            began_at: Moment::START,
        }
    }

    /// Whether the next touch of that window is waited for.
    pub fn is_watched(&self, row: usize) -> bool {
        self.is_watched[row]
    }

    pub fn history(&self, row: usize) -> AccessHistory {
        self.histories[row]
    }

    /// A watched window is touched.
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
