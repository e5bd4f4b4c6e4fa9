//! Samples of the windows that a guest touches, whatever takes them.

use std::collections::BTreeMap;
use std::time::Duration;

use wideleaf_policies::WindowIndex;

use crate::host::Host;

/// Limits on the disturbance by a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessConfig {
    /// Pause between two windows. Without one, a guest that uses all its RAM stalled for 86 ms in a row; with one
    /// millisecond no stall was longer than one.
    pub pace: Duration,
    /// CPU time after which the start of a sample takes no more windows.
    pub cpu_max: Duration,
}

impl Default for AccessConfig {
    /// One millisecond, and the CPU time of 64 windows in base pages.
    fn default() -> AccessConfig {
        AccessConfig { pace: Duration::from_millis(1), cpu_max: Duration::from_millis(10) }
    }
}

/// Result of a sample for one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It was touched between start and finish.
    Touched,
    /// It was not touched in that time.
    Untouched,
    /// It was not sampled, for the reason with this name.
    Unknown(&'static str),
}

/// Cost of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCost {
    /// Number of windows taken aside.
    pub windows: u64,
    /// Number of those that were touched, which is how often the guest waited.
    pub events: u64,
    /// CPU time of taking windows and bringing them back, without the answering thread.
    pub cpu: Duration,
}

/// A finished sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessSample {
    /// Results of all requested windows, in the order requested.
    pub rows: Vec<(WindowIndex, Seen)>,
    /// Time that each window was watched: until its first touch, or to the end without one. Empty if the sampler does
    /// not measure it.
    pub watched_for: BTreeMap<WindowIndex, Duration>,
    /// Number of neighbouring windows with the result of a window. One that is not in it has a result of its own.
    pub shared_by: BTreeMap<WindowIndex, u64>,
    /// Cost of the sample.
    pub cost: AccessCost,
}

/// A source that detects which windows of one VM are touched, one sample at a time.
pub trait AccessSampler: Send {
    /// Begins a sample of these windows; one that is under way is finished and dropped. It skips windows that are not
    /// backed or beyond its means, and takes at most [`ASIDE_SLOTS`](crate::mover::ASIDE_SLOTS).
    fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]);

    /// Takes note whether the host has huge pages for all that ask, for the samples from now on.
    fn note_shortage(&mut self, _is_short: bool) {}

    /// Ends the sample, so that every window is in place again. Returns which were touched.
    fn finish(&mut self, host: &dyn Host) -> AccessSample;

    /// The reason why the sensor ended before it was dropped, if it did.
    fn why_it_ended(&self) -> Option<String> {
        None
    }
}
