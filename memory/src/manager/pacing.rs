//! Decides when the next tick comes.
//!
//! ```text
//!   something done, a recovery, or a          after `tick_shortest`, or 4 times what the tick took without its scan
//!   measurement that promotions wait for
//!   much new in a sample                      after `tick_shortest`, or 50 times that
//!   nothing                                   after twice the time, up to `tick_longest`
//!     and memory came into use since          at the next pulse, or twenty times what a scan took after the last one
//!     and a gate opened or closed             at the next pulse
//!     and a huge page is free that a window   at the next pulse, or twenty times what the tick took
//!     waits for, or a sample is urgent
//! ```
//!
//! What a tick took is the CPU time of sensing, deciding and publishing: all of them look at each window. Actions,
//! samples and scans have budgets of their own.
//!
//! A tick scans every window only if that is due ([`super::latest_scan`]). A pulse between ticks costs one read of a
//! small file, and a call for each VM on a memfd. Fifty idle external guests with a second between pulses cost fifty
//! such reads a second. A loop in the guest's own process makes no pulses while that hardly runs ([`super::quiet`]).

use std::time::Duration;

use wideleaf_policies::Moment;

use super::ManagerConfig;
use crate::host::Host;

/// Interval at which an idle loop checks whether memory came into use: the longest delay for a hot phase that
/// begins with an allocation. Waking up and checking takes 0.1 ms in a virtual machine, 0.2 % of a core.
pub(super) const PULSE: Duration = Duration::from_millis(50);

const ACTING_PART: u32 = 4;
/// A tick in which a sample begins and nothing else takes 2 ms for 10,000 windows, and the sample half of that.
const SAMPLING_PART: u32 = 50;
const PULSE_PART: u32 = 20;

/// What the next tick is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// Actions, or what they wait for.
    Acting,
    /// The next share of a sample in which much is new.
    Sampling,
    /// To look whether something has changed.
    Idle,
}

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

/// CPU time of a tick, without its actions and the samples, which have budgets of their own.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overhead {
    pub whole: Duration,
    /// Part of it in which all windows were looked at; zero in most ticks. Scans have a budget too.
    pub scan: Duration,
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

    /// Records a tick.
    pub fn ticked(&mut self, host: &dyn Host, config: &ManagerConfig, overhead: Overhead, pace: Pace) {
        let pause = match pace {
            Pace::Acting => config.tick_shortest.max((overhead.whole - overhead.scan) * ACTING_PART),
            Pace::Sampling => config.tick_shortest.max((overhead.whole - overhead.scan) * SAMPLING_PART),
            Pace::Idle => self.pause * 2,
        };
        self.pause = pause.min(config.tick_longest);
        self.latest = Sensed { at: host.now(), took: overhead.whole };
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
    fn pauses_double_while_idle_and_otherwise_follow_what_a_tick_takes() {
        let (host, config) = (FakeHost::default(), ManagerConfig::default());
        let mut pacing = Pacing::new(&config, host.now());
        let mut after = |overhead_us, pace| {
            let overhead = Overhead { whole: Duration::from_micros(overhead_us), scan: Duration::ZERO };
            pacing.ticked(&host, &config, overhead, pace);
            pacing.pause().as_millis()
        };
        assert_eq!([after(1000, Pace::Idle), after(1000, Pace::Idle)], [20, 40]);
        assert_eq!([1, 80, 400].map(|overhead_ms| after(overhead_ms * 1000, Pace::Acting)), [10, 320, 1000]);
        assert_eq!([after(1000, Pace::Idle), after(1000, Pace::Acting)], [1000, 10]);
        assert_eq!([100, 2_000, 80_000].map(|overhead_us| after(overhead_us, Pace::Sampling)), [10, 100, 1000]);
        let overhead = Overhead { whole: Duration::from_millis(90), scan: Duration::from_millis(88) };
        pacing.ticked(&host, &config, overhead, Pace::Sampling);
        assert_eq!(pacing.pause().as_millis(), 100, "a scan does not put off the next sample");
        pacing.ticked(&host, &config, overhead, Pace::Acting);
        assert_eq!(pacing.pause().as_millis(), 10, "nor the next actions");
    }
}
