//! Work and cost of the sensors that do not run at every tick, for reports.

use std::collections::BTreeMap;
use std::time::Duration;

/// Work of a sensor, and its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SensorCost {
    /// Number of samples.
    pub samples: u64,
    /// Number of windows sampled.
    pub windows: u64,
    /// Windows of the latest sample: the share that the budget allowed then.
    pub latest_windows: u64,
    /// Number of ticks without a sample because the budget did not pay for one.
    pub ticks_without: u64,
    /// Number of times it skipped memory because its giant was being moved; not a failure, and tried again later.
    pub claimed: u64,
    /// Number of windows without a touch that do not count as idle, because the guest hardly ran during their sample.
    pub not_run: u64,
    /// Number of times the guest waited: touches of windows that were aside, first writes to logged pages, pauses.
    pub waits: u64,
    /// CPU time in the manager's thread.
    pub cpu: Duration,
}

impl SensorCost {
    pub(super) fn add_sample(&mut self, windows: u64, waits: u64, cpu: Duration) {
        self.samples += 1;
        self.windows += windows;
        self.latest_windows = windows;
        self.waits += waits;
        self.cpu += cpu;
    }
}

/// Work and cost of the slower sensors, by name.
pub type SensorCosts = BTreeMap<&'static str, SensorCost>;
