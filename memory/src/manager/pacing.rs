//! Decides when the next tick comes.
//!
//! ```text
//!   something done, or much new in a sample   after `tick_shortest`, or four times what the tick took
//!   nothing                                   after twice the time, up to `tick_longest`
//!     and memory came into use since          at the next pulse, or twenty times what a scan took after the last one
//!     and a gate opened or closed             at the next pulse
//!     and a huge page is free that a window   at the next pulse, or twenty times what the tick took
//!     waits for, or a sample is urgent
//! ```
//!
//! What a tick took is the CPU time of sensing, deciding and publishing: all of them look at each window. Actions and
//! samples have budgets of their own.
//!
//! A tick scans every window only if that is due ([`super::latest_scan`]). A pulse between ticks costs one read of a
//! small file, and a call for each VM on a memfd. Fifty idle external guests with a second between pulses cost fifty
//! such reads a second.

use std::time::Duration;

use wideleaf_policies::Moment;

use super::ManagerConfig;
use crate::host::Host;

/// Interval at which an idle loop checks whether memory came into use: the longest delay for a hot phase that
/// begins with an allocation. Waking up and checking takes 0.1 ms in a virtual machine, 0.2 % of a core.
pub(super) const PULSE: Duration = Duration::from_millis(50);

const BUSY_PART: u32 = 4;
const PULSE_PART: u32 = 20;

/// Sensing of one tick, or all of its work beside actions and samples.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sensed {
    pub at: Moment,
    /// CPU time of the thread.
    pub took: Duration,
}

impl Sensed {
    /// Whether that many times its CPU time have passed since.
    pub fn is_at_least(self, times: u32, now: Moment) -> bool {
        now.since(self.at) >= self.took * times
    }
}

/// The time between ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacing {
    pause: Duration,
    latest: Sensed,
}

impl Pacing {
    pub fn new(config: &ManagerConfig, now: Moment) -> Pacing {
        let latest = Sensed { at: now, took: Duration::ZERO };
        Pacing { pause: config.tick_shortest, latest }
    }

    /// Time to the next tick, unless it is urgent.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Records a tick. `overhead`: its CPU time, without actions and samples.
    pub fn ticked(&mut self, host: &dyn Host, config: &ManagerConfig, overhead: Duration, is_busy: bool) {
        self.pause = if is_busy {
            config.tick_shortest.max(overhead * BUSY_PART).min(config.tick_longest)
        } else {
            (self.pause * 2).min(config.tick_longest)
        };
        self.latest = Sensed { at: host.now(), took: overhead };
    }

    /// Whether one more tick now would keep to its part of a core.
    pub fn is_rested(&self, host: &dyn Host) -> bool {
        self.latest.is_at_least(PULSE_PART, host.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;

    #[test]
    fn pauses_double_while_idle_and_follow_the_cost_of_sensing_while_busy() {
        let (host, config) = (FakeHost::default(), ManagerConfig::default());
        let mut pacing = Pacing::new(&config, host.now());
        let mut after = |overhead_ms, is_busy| {
            pacing.ticked(&host, &config, Duration::from_millis(overhead_ms), is_busy);
            pacing.pause().as_millis()
        };
        let pauses = [after(1, false), after(1, false), after(1, true), after(80, true), after(400, true)];
        assert_eq!(pauses, [20, 40, 10, 320, 1000]);
        assert_eq!([after(1, false), after(1, true)], [1000, 10]);
    }
}
