//! Detects which windows of anonymous RAM the guest touches, for reading or writing. A few windows at a time are
//! taken aside: a huge page whole, and a few pages of a window on base pages ([`wideleaf_policies::sampled_pages`]).
//! The first touch of each brings them back and is counted; the untouched ones come back at the end. For any anonymous
//! RAM, and huge pages stay whole.
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

use wideleaf_policies::{Moment, WindowIndex, sampled_pages};

use crate::detached::{Aside, AsideError};
use crate::host::Host;
use crate::mover::{ASIDE_SLOTS, Place, runs_of};
pub use crate::sensors::access_sample::{AccessConfig, AccessCost, AccessSample, AccessSampler, Seen};

/// Takes samples of one VM's anonymous RAM.
#[derive(Debug)]
pub struct AccessSensor {
    aside: Arc<Aside>,
    config: AccessConfig,
    /// Windows of the present sample: the moment since which each is aside, or why it is not.
    taken: Vec<(WindowIndex, Result<Moment, &'static str>)>,
    cost: AccessCost,
    /// Number of windows taken so far.
    turns: u64,
}

impl AccessSensor {
    /// A sensor without a sample under way.
    pub fn new(aside: Arc<Aside>, config: AccessConfig) -> AccessSensor {
        AccessSensor { aside, config, taken: Vec::new(), cost: AccessCost::default(), turns: 0 }
    }

    /// The moment since which it is aside, or why it is not.
    fn take(&self, host: &dyn Host, window: WindowIndex) -> Result<Moment, &'static str> {
        if self.aside.is_aside(window) {
            return Err("busy"); // it would look like a hole
        }
        match self.aside.mover().look(Place::Guest(window)) {
            Ok(look) if look.resident == 0 => return Err("not_resident"),
            Ok(look) if look.is_huge => self.aside.set_aside(window).map_err(|error| reason(&error))?,
            Ok(_) => self.take_some_pages(window)?,
            Err(_) => return Err("refused"),
        }
        Ok(host.now())
    }

    fn take_some_pages(&self, window: WindowIndex) -> Result<(), &'static str> {
        let held = self.aside.mover().held(Place::Guest(window)).map_err(|_| "refused")?;
        let pages = runs_of(sampled_pages::choose(&held, self.turns));
        self.aside.set_pages_aside(window, &pages).map_err(|error| reason(&error))
    }

    /// Result for a window, and its moment: of the touch, or now.
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
            let _ = self.aside.bring_back(window); // on an error the window is stuck, and tried again
        }
    }
}

impl AccessSampler for AccessSensor {
    /// Takes [`AccessConfig::pace`] for each window, and fewer windows while a swap is under way.
    fn start(&mut self, host: &dyn Host, windows: &[WindowIndex]) {
        self.give_back();
        let began_cpu = host.thread_cpu_time();
        let used = || host.thread_cpu_time().saturating_sub(began_cpu);
        for (number, window) in windows.iter().enumerate() {
            let is_paid = number < usize::from(ASIDE_SLOTS) && used() < self.config.cpu_max;
            let taken = if is_paid { self.take(host, *window) } else { Err("over_budget") };
            self.taken.push((*window, taken));
            if taken.is_ok() {
                self.turns += 1;
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
