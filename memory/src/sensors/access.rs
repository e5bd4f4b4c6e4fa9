//! Which windows of anonymous RAM the guest touches, reads and writes alike: a few windows at a time are taken aside, the first touch of each
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

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Moment, WindowIndex};

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
    /// How long a window was watched: until its first touch, or to the end if there was none. Empty where the sampler does
    /// not take the time.
    pub watched_for: BTreeMap<WindowIndex, Duration>,
    /// What it cost.
    pub cost: AccessCost,
}

/// Something that tells which windows of one VM are touched, one sample at a time.
pub trait AccessSampler: Send {
    /// Begins a sample of these windows; one that is under way is finished and forgotten. What is not backed is not taken,
    /// nor what is beyond its means: at most [`ASIDE_SLOTS`] windows.
    fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]);

    /// Ends the sample: every window is in place again. Says what was touched.
    fn finish(&mut self, host: &dyn Host) -> AccessSample;

    /// Why it sees nothing any more, if it has ended before it was dropped.
    fn why_it_ended(&self) -> Option<String> {
        None
    }
}

/// Takes samples of one VM's anonymous RAM.
#[derive(Debug)]
pub struct AccessSensor {
    aside: Arc<Aside>,
    config: AccessConfig,
    /// The present sample: since when each window is aside, or why it is not.
    taken: Vec<(WindowIndex, Result<Moment, &'static str>)>,
    cost: AccessCost,
}

impl AccessSensor {
    /// No sample is under way.
    pub fn new(aside: Arc<Aside>, config: AccessConfig) -> AccessSensor {
        AccessSensor { aside, config, taken: Vec::new(), cost: AccessCost::default() }
    }

    /// Since when it is aside, or why it is not.
    fn take(&self, host: &dyn Host, window: WindowIndex) -> Result<Moment, &'static str> {
        if self.aside.is_aside(window) {
            return Err("busy"); // it would look like a hole
        }
        match self.aside.mover().look(Place::Guest(window)) {
            Ok(look) if look.resident == 0 => return Err("not_resident"),
            Ok(_) => {}
            Err(_) => return Err("refused"),
        }
        self.aside.set_aside(window).map_err(|error| reason(&error))?;
        Ok(host.now())
    }

    /// What was seen of a window, and at what time: of its touch, or now.
    fn bring_back(&self, host: &dyn Host, window: WindowIndex) -> (Seen, Moment) {
        match self.aside.bring_back(window) {
            Ok(Some(touched_at)) => (Seen::Touched, touched_at),
            Ok(None) => (Seen::Untouched, host.now()),
            Err(error) => (Seen::Unknown(reason(&error)), host.now()),
        }
    }

    fn give_back(&mut self) {
        self.cost = AccessCost::default();
        for (window, _) in std::mem::take(&mut self.taken).into_iter().filter(|(_, taken)| taken.is_ok()) {
            let _ = self.aside.bring_back(window); // is stuck then, and tried again
        }
    }
}

impl AccessSampler for AccessSensor {
    /// Takes [`AccessConfig::pace`] a window, and fewer windows while a swap is under way.
    fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]) {
        self.give_back();
        let began_cpu = host.thread_cpu_time();
        let used = || host.thread_cpu_time().saturating_sub(began_cpu);
        for (number, window) in windows.iter().enumerate() {
            let is_paid = number < usize::from(ASIDE_SLOTS) && used() < self.config.cpu_max;
            let taken = if is_paid { self.take(host, *window) } else { Err("over_budget") };
            self.taken.push((*window, taken));
            if taken.is_ok() {
                self.cost.windows += 1;
                host.sleep(self.config.pace);
            }
        }
        self.cost.cpu += used();
    }

    fn finish(&mut self, host: &dyn Host) -> AccessSample {
        let began_cpu = host.thread_cpu_time();
        let mut cost = std::mem::take(&mut self.cost);
        let (mut rows, mut watched_for) = (Vec::with_capacity(self.taken.len()), BTreeMap::new());
        for (window, taken) in std::mem::take(&mut self.taken) {
            let seen = taken.map_or_else(Seen::Unknown, |since| {
                let (seen, until) = self.bring_back(host, window);
                watched_for.insert(window, until.since(since));
                seen
            });
            rows.push((window, seen));
        }
        cost.events = rows.iter().filter(|(_, seen)| *seen == Seen::Touched).count() as u64;
        cost.cpu += host.thread_cpu_time().saturating_sub(began_cpu);
        AccessSample { rows, watched_for, cost }
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
