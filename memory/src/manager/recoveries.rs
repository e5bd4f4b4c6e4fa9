//! What recoveries share between managers, and how many there were.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_policies::recovery::Recovery;

/// Recoveries of a VM. Managers that follow each other share them, so that a change of policy forgets nothing.
pub type SharedRecovery = Arc<Mutex<Recovery>>;

/// Recoveries after events of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryCounts {
    /// Number of recoveries that reached 99 %.
    pub done: u64,
    /// Number of recoveries that were cut off before.
    pub cut_off: u64,
    /// Duration of the latest recovery that reached 99 %.
    pub last: Option<Duration>,
    /// Sum of these durations.
    pub sum: Duration,
    /// Longest of these durations.
    pub longest: Duration,
}

impl RecoveryCounts {
    pub(super) fn count(&mut self, took: Option<Duration>) {
        let Some(took) = took else {
            self.cut_off += 1;
            return;
        };
        self.done += 1;
        self.last = Some(took);
        self.sum += took;
        self.longest = self.longest.max(took);
    }
}

/// Counts by name of the event.
pub type RecoveriesByCause = BTreeMap<&'static str, RecoveryCounts>;
