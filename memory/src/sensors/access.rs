//! Which windows the guest touches, reads and writes alike: a few windows at a time are taken aside, the first touch of each
//! brings it back whole and is counted, and what nobody touched is brought back at the end. Exact, for any anonymous RAM,
//! and huge pages stay whole; a touch of a window that is in a sample takes 0.1 to 0.3 ms longer.
//!
//! ```text
//!   Rotation       [ 0  1  2  3 | 4  5  6  7 | 8  9 … ]     a share of the guest in each interval, never all of it
//!                    └─ start ─┘
//!   in a sample      away  away  away  away                 1 ms between two, so that no stall follows the next
//!   the guest              touches 1
//!   finish           no    yes   no    no
//! ```

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::WindowIndex;

use crate::aside::{Aside, AsideError};
use crate::host::Host;
use crate::mover::{ASIDE_SLOTS, Place};

/// How gently a sample is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessConfig {
    /// Pause between two windows. Without one, a guest that uses all its RAM stalled for 86 ms in a row; with one
    /// millisecond no stall was longer than one.
    pub pace: Duration,
    /// A sample takes no more windows once starting it has used so much CPU time.
    pub cpu_max: Duration,
}

impl Default for AccessConfig {
    /// One millisecond, and the CPU time of 64 windows in base pages.
    fn default() -> AccessConfig {
        AccessConfig { pace: Duration::from_millis(1), cpu_max: Duration::from_millis(10) }
    }
}

/// What a sample says of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It was touched between start and finish.
    Touched,
    /// It was not.
    Untouched,
    /// It was not looked at: by the name of the reason.
    Unknown(&'static str),
}

/// What a sample cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCost {
    /// Windows taken aside.
    pub windows: u64,
    /// Of these, touched: so often the guest waited.
    pub events: u64,
    /// CPU time of taking them and bringing them back, what the answering thread used not counted.
    pub cpu: Duration,
}

/// A finished sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessSample {
    /// Every window that was asked for, in that order.
    pub rows: Vec<(WindowIndex, Seen)>,
    /// What it cost.
    pub cost: AccessCost,
}

/// Takes samples of one VM, one at a time.
#[derive(Debug)]
pub struct AccessSensor {
    aside: Arc<Aside>,
    config: AccessConfig,
    /// The present sample; windows that are aside have no reason yet.
    taken: Vec<(WindowIndex, Option<&'static str>)>,
    cost: AccessCost,
}

impl AccessSensor {
    /// No sample is under way.
    pub fn new(aside: Arc<Aside>, config: AccessConfig) -> AccessSensor {
        AccessSensor { aside, config, taken: Vec::new(), cost: AccessCost::default() }
    }

    /// Begins a sample of these windows; one that is under way is finished and forgotten. What is not backed is not taken.
    /// Takes [`AccessConfig::pace`] a window. At most [`ASIDE_SLOTS`] windows are taken, fewer while a swap is under way.
    pub fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]) {
        self.give_back();
        let began_cpu = host.thread_cpu_time();
        let used = || host.thread_cpu_time().saturating_sub(began_cpu);
        for (number, window) in windows.iter().enumerate() {
            let is_paid = number < usize::from(ASIDE_SLOTS) && used() < self.config.cpu_max;
            let reason = if is_paid { self.take(*window) } else { Some("over_budget") };
            self.taken.push((*window, reason));
            if reason.is_none() {
                self.cost.windows += 1;
                host.sleep(self.config.pace);
            }
        }
        self.cost.cpu += used();
    }

    /// Ends the sample: brings everything back and says what was touched.
    pub fn finish(&mut self, host: &dyn Host) -> AccessSample {
        let began_cpu = host.thread_cpu_time();
        let mut cost = std::mem::take(&mut self.cost);
        let rows: Vec<_> = std::mem::take(&mut self.taken)
            .into_iter()
            .map(|(window, reason)| (window, reason.map_or_else(|| self.bring_back(window), Seen::Unknown)))
            .collect();
        cost.events = rows.iter().filter(|(_, seen)| *seen == Seen::Touched).count() as u64;
        cost.cpu += host.thread_cpu_time().saturating_sub(began_cpu);
        AccessSample { rows, cost }
    }

    /// Why it was not taken, if it was not.
    fn take(&self, window: WindowIndex) -> Option<&'static str> {
        if self.aside.is_aside(window) {
            return Some("busy"); // it would look like a hole
        }
        match self.aside.mover().look(Place::Guest(window)) {
            Ok(look) if look.resident == 0 => return Some("not_resident"),
            Ok(_) => {}
            Err(_) => return Some("refused"),
        }
        self.aside.set_aside(window).err().map(|error| reason(&error))
    }

    fn bring_back(&self, window: WindowIndex) -> Seen {
        match self.aside.bring_back(window) {
            Ok(true) => Seen::Touched,
            Ok(false) => Seen::Untouched,
            Err(error) => Seen::Unknown(reason(&error)),
        }
    }

    fn give_back(&mut self) {
        self.cost = AccessCost::default();
        for (window, _) in std::mem::take(&mut self.taken).into_iter().filter(|(_, reason)| reason.is_none()) {
            self.bring_back(window);
        }
    }
}

impl Drop for AccessSensor {
    fn drop(&mut self) {
        self.give_back();
    }
}

fn reason(error: &AsideError) -> &'static str {
    match error {
        AsideError::Closed | AsideError::NotAside(_) => "service_ended",
        AsideError::Full | AsideError::AlreadyAside(_) | AsideError::Claimed(..) => "busy",
        AsideError::Host(_) => "refused",
    }
}

/// Whose turn it is: each interval the next so many windows, round and round. Windows come and go between intervals, so
/// it remembers the last one it gave, not a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    share: usize,
    last: Option<WindowIndex>,
}

impl Rotation {
    /// `share` windows an interval, at least one and no more than can be aside at once.
    pub fn new(share: usize) -> Rotation {
        Rotation { share: share.clamp(1, usize::from(ASIDE_SLOTS)), last: None }
    }

    /// The next share of `windows`, which ascend: those behind the last one given, then from the beginning again, none
    /// twice.
    pub fn next_share(&mut self, windows: &[WindowIndex]) -> Vec<WindowIndex> {
        let first = windows.partition_point(|window| Some(*window) <= self.last);
        let (done, due) = windows.split_at(first);
        let share: Vec<WindowIndex> = due.iter().chain(done).copied().take(self.share).collect();
        self.last = share.last().copied().or(self.last);
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(rotation: &mut Rotation, windows: &[u64]) -> Vec<u64> {
        let windows: Vec<_> = windows.iter().copied().map(WindowIndex::new).collect();
        rotation.next_share(&windows).into_iter().map(WindowIndex::get).collect()
    }

    #[test]
    fn every_window_has_its_turn_before_any_has_a_second() {
        let mut rotation = Rotation::new(3);
        let windows = [0, 1, 2, 5, 6, 7, 9];
        assert_eq!(share(&mut rotation, &windows), [0, 1, 2]);
        assert_eq!(share(&mut rotation, &windows), [5, 6, 7]);
        assert_eq!(share(&mut rotation, &windows), [9, 0, 1]);
        assert_eq!(share(&mut rotation, &windows), [2, 5, 6]);
    }

    #[test]
    fn windows_that_come_and_go_do_not_disturb_the_turns() {
        let mut rotation = Rotation::new(2);
        assert_eq!(share(&mut rotation, &[0, 4, 8]), [0, 4]);
        // 4 is gone, 3 and 6 are new: 3 has to wait for the next round.
        assert_eq!(share(&mut rotation, &[0, 3, 6, 8]), [6, 8]);
        assert_eq!(share(&mut rotation, &[]), [0; 0]);
        assert_eq!(share(&mut rotation, &[0, 3]), [0, 3]);
    }

    #[test]
    fn a_share_is_never_the_whole_guest_twice_nor_more_than_can_be_aside() {
        assert_eq!(share(&mut Rotation::new(5), &[1, 2]), [1, 2]);
        let all: Vec<u64> = (0..1000).collect();
        assert_eq!(share(&mut Rotation::new(1000), &all).len(), usize::from(ASIDE_SLOTS));
        assert_eq!(share(&mut Rotation::new(0), &all), [0]);
    }
}
