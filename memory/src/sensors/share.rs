//! Number of windows that a sensor may sample now, so that over time it keeps to its part of a core. The cost of a
//! window is measured, not assumed, and the sensor slows down while nothing changes.
//!
//! ```text
//!   credit   += time × budget × tempo         at most what the largest sample costs; one that cost more leaves a debt
//!   sample   when the credit pays for the least share: as many windows as it pays for, up to the most
//!   tempo    1 after a change ──▶ ½ ──▶ ¼ ──▶ ⅛        a step for each round of all windows without a change
//!   burst    when much is new: the credit for bursts, until a round of all windows brought nothing new
//!   begin    the credit of the largest sample and of a burst; nothing, if samples cost the guest too
//! ```

use std::time::Duration;

use wideleaf_policies::{Moment, PerTenThousand};

/// Limits on a sensor's sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLimits {
    /// Part of one core.
    pub budget: PerTenThousand,
    /// Core time that may be used beyond that when much is new. Earned back at the rate of the budget.
    pub burst: Duration,
    /// Windows of the smallest sample. Fewer are not worth the fixed cost of a sample, so credit is saved for it.
    pub least: usize,
    /// Windows of the largest sample.
    pub most: usize,
}

/// Number of steps of tempo, down to an eighth: a round of ten seconds then takes eighty, within which a guest that
/// wakes up is noticed.
const STEPS_MAX: u32 = 3;

/// Account of one sensor.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    limits: ShareLimits,
    /// Cost of one window: half from the latest sample, half from before.
    cost: Duration,
    credit_ns: i64,
    burst_ns: i64,
    /// Windows without news since the latest burst began; `None` outside a burst.
    bursting: Option<usize>,
    credited_at: Moment,
    /// Number of times the tempo was halved.
    steps: u32,
    /// Windows sampled since the latest change or step.
    quiet: usize,
}

impl Share {
    /// An account that can pay for one largest sample at once, at the expected cost of a window.
    pub fn new(limits: ShareLimits, expected: Duration, now: Moment) -> Share {
        let mut share = Share {
            limits,
            cost: expected,
            credit_ns: 0,
            burst_ns: nanoseconds(limits.burst),
            bursting: None,
            credited_at: now,
            steps: 0,
            quiet: 0,
        };
        share.credit_ns = nanoseconds(share.largest());
        share
    }

    /// Without any credit at the beginning, nor for bursts: for samples that cost the guest too. Whenever the guest
    /// ends, it has then lost no more than the budget, twice with a burst.
    #[must_use]
    pub fn beginning_with_nothing(self) -> Share {
        Share { credit_ns: 0, burst_ns: 0, ..self }
    }

    /// Another account with these limits, that begins at the same moment.
    #[must_use]
    pub fn with_limits(&self, limits: ShareLimits, expected: Duration) -> Share {
        Share::new(limits, expected, self.credited_at)
    }

    /// Sets the expected cost of a window, where it is known better than by the samples so far. Credit and debt stay.
    pub fn expect(&mut self, cost: Duration) {
        self.cost = cost;
    }

    /// Sets the part of a core from now on; credit and debt stay.
    pub fn set_budget(&mut self, budget: PerTenThousand) {
        self.limits.budget = budget;
    }

    /// Number of windows, out of `all`, that may be sampled now; 0 until there is enough credit.
    pub fn next(&mut self, now: Moment, all: usize) -> usize {
        let time = now.since(self.credited_at);
        self.credited_at = now;
        let earned = part(time, self.limits.budget);
        let at_tempo = nanoseconds(earned / (1 << self.steps));
        self.credit_ns = self.credit_ns.saturating_add(at_tempo).min(nanoseconds(self.largest()));
        self.burst_ns = self.burst_ns.saturating_add(nanoseconds(earned)).min(nanoseconds(self.limits.burst));
        let of_burst = if self.is_bursting() { self.burst_ns.max(0) } else { 0 };
        let affordable = self.credit_ns.max(0).saturating_add(of_burst) / nanoseconds(self.cost).max(1);
        let affordable = usize::try_from(affordable).unwrap_or(usize::MAX).min(self.limits.most).min(all);
        if affordable < self.limits.least.min(all) { 0 } else { affordable }
    }

    /// Number of windows that the budget pays for in this time, without any slower tempo.
    pub fn windows_in(&self, time: Duration) -> usize {
        let windows = nanoseconds(part(time, self.limits.budget)) / nanoseconds(self.cost).max(1);
        usize::try_from(windows).unwrap_or(usize::MAX)
    }

    /// Whether the credit suffices for the largest sample, out of `all` windows.
    pub fn pays_for_largest(&self, now: Moment, all: usize) -> bool {
        let mut then = *self;
        then.next(now, all) == self.limits.most.min(all)
    }

    /// Books the cost of a sample of `windows` windows.
    pub fn paid(&mut self, windows: u64, cost: Duration) {
        let of_burst = if self.is_bursting() {
            (nanoseconds(cost) - self.credit_ns.max(0)).clamp(0, self.burst_ns.max(0))
        } else {
            0
        };
        self.burst_ns -= of_burst;
        self.credit_ns = self.credit_ns.saturating_sub(nanoseconds(cost) - of_burst);
        if let Some(measured) = u32::try_from(windows).ok().and_then(|windows| cost.checked_div(windows)) {
            self.cost = (self.cost + measured) / 2;
        }
    }

    /// Records a change: what was known of the windows is outdated.
    pub fn changed(&mut self) {
        (self.steps, self.quiet) = (0, 0);
    }

    /// Records a change so large that all windows should be sampled again soon.
    pub fn burst(&mut self) {
        self.changed();
        self.bursting = Some(0);
    }

    /// Records that `windows` windows, out of the `wanted` ones of a burst, were unchanged: it ends after a
    /// round of them.
    pub fn unchanged_in_burst(&mut self, windows: usize, wanted: usize) {
        self.bursting = self.bursting.map(|quiet| quiet + windows).filter(|quiet| *quiet < wanted);
    }

    /// Whether a burst is under way and has credit for a sample.
    pub fn is_bursting(&self) -> bool {
        self.bursting.is_some() && self.burst_ns > nanoseconds(self.cost) * self.limits.least as i64
    }

    /// Records that `windows` windows, out of `all`, were unchanged.
    pub fn unchanged(&mut self, windows: usize, all: usize) {
        self.quiet += windows;
        if self.quiet >= all.max(1) {
            self.quiet = 0;
            self.steps = (self.steps + 1).min(STEPS_MAX);
        }
    }

    /// Cost of the largest sample, and at least of two smallest ones: otherwise it could not be saved for.
    fn largest(&self) -> Duration {
        let windows = self.limits.most.max(self.limits.least * 2);
        self.cost.saturating_mul(u32::try_from(windows).unwrap_or(u32::MAX))
    }
}

/// Time in nanoseconds, for accounts that may go below zero.
pub(crate) fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// Part of a time.
pub(crate) fn part(time: Duration, part: PerTenThousand) -> Duration {
    time.saturating_mul(part.get()) / PerTenThousand::ALL.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: ShareLimits =
        ShareLimits { budget: PerTenThousand::new(50), burst: Duration::from_millis(100), least: 4, most: 32 };
    const COST: Duration = Duration::from_micros(250);
    const ALL: usize = 256;

    fn at(seconds: u64) -> Moment {
        Moment::after_start(Duration::from_secs(seconds))
    }

    /// Sizes of the samples of each second, at this cost for each window.
    fn samples(share: &mut Share, seconds: std::ops::Range<u64>, cost: Duration) -> Vec<usize> {
        let sample = |second| {
            let windows = share.next(at(second), ALL);
            share.paid(windows as u64, cost * windows as u32);
            windows
        };
        seconds.map(sample).collect()
    }

    #[test]
    fn the_first_sample_is_the_largest_and_then_the_budget_holds() {
        let mut share = Share::new(LIMITS, COST, at(0));
        // Half a per cent of a second is 5 ms: 20 windows of 250 us.
        assert_eq!(samples(&mut share, 0..4, COST), [32, 20, 20, 20]);
    }

    #[test]
    fn a_minute_pays_for_as_many_windows_as_they_cost() {
        let mut share = Share::new(LIMITS, COST, at(0));
        assert_eq!(share.windows_in(Duration::from_secs(60)), 1_200);
        share.expect(COST * 4);
        assert_eq!(share.windows_in(Duration::from_secs(60)), 300);
        share.set_budget(PerTenThousand::new(0));
        assert_eq!(share.windows_in(Duration::from_secs(60)), 0);
    }

    #[test]
    fn beginning_with_nothing_it_earns_its_first_sample_and_its_bursts() {
        let mut share = Share::new(LIMITS, COST, at(0)).beginning_with_nothing();
        assert_eq!(samples(&mut share, 0..4, COST), [0, 20, 20, 20]);
        share.burst();
        // Now the budget counts twice, up to the largest sample.
        assert_eq!(samples(&mut share, 4..7, COST), [32, 32, 32]);
        let mut share = Share::new(LIMITS, COST, at(0)).beginning_with_nothing();
        share.burst();
        assert_eq!(samples(&mut share, 0..2, COST), [0, 32], "a burst at once has no credit either");
    }

    #[test]
    fn a_window_that_is_expected_to_cost_five_times_as_much_is_sampled_five_times_less() {
        let mut share = Share::new(LIMITS, COST, at(0)).beginning_with_nothing();
        samples(&mut share, 0..2, COST);
        share.expect(COST * 5);
        assert_eq!(samples(&mut share, 2..7, COST * 5), [4, 4, 4, 4, 4]);
    }

    #[test]
    fn expensive_windows_wait_until_the_least_share_is_paid_for() {
        let mut share = Share::new(LIMITS, COST * 20, at(0));
        samples(&mut share, 0..1, COST * 20);
        // A window costs 5 ms, a second earns 5 ms.
        assert_eq!(samples(&mut share, 1..9, COST * 20), [0, 0, 0, 4, 0, 0, 0, 4]);
    }

    #[test]
    fn the_measured_cost_of_windows_counts() {
        let mut share = Share::new(LIMITS, COST, at(0));
        assert_eq!(samples(&mut share, 0..1, COST / 2), [32]);
        let later = samples(&mut share, 1..10, COST / 2);
        assert_eq!(later[8], 32, "half the cost, 40 windows a second could be paid: {later:?}");
    }

    #[test]
    fn without_a_change_it_slows_to_an_eighth_and_a_change_brings_it_back() {
        let mut share = Share::new(LIMITS, COST, at(0));
        samples(&mut share, 0..1, COST);
        (0..5).for_each(|_| share.unchanged(ALL, ALL));
        // An eighth of 20 windows a second: four of them every other second.
        let steady = samples(&mut share, 1..17, COST);
        assert_eq!(steady.iter().sum::<usize>(), 40, "{steady:?}");
        share.changed();
        assert_eq!(samples(&mut share, 17..20, COST), [20, 20, 20]);
    }

    #[test]
    fn a_burst_uses_what_was_saved_for_it_and_ends_with_a_quiet_round() {
        let tenths = |share: &mut Share, range: std::ops::Range<u64>| -> usize {
            let sample = |tenth| {
                let windows = share.next(Moment::after_start(Duration::from_millis(tenth * 100)), ALL);
                share.paid(windows as u64, COST * windows as u32);
                windows
            };
            range.map(sample).sum()
        };
        let mut share = Share::new(LIMITS, COST, at(0));
        tenths(&mut share, 0..1);
        share.burst();
        // 100 ms of burst are 400 windows, and the budget pays for 2 in a tenth of a second, in both accounts.
        let burst = tenths(&mut share, 1..21);
        assert!((400..=480).contains(&burst), "{burst}");
        assert!(!share.is_bursting(), "all is used up");
        let mut share = Share::new(LIMITS, COST, at(0));
        share.burst();
        share.unchanged_in_burst(2, 3);
        assert!(share.is_bursting());
        share.unchanged_in_burst(1, 3);
        assert!(!share.is_bursting(), "nothing new in those it was for");
    }

    #[test]
    fn part_of_a_round_is_no_step() {
        let mut share = Share::new(LIMITS, COST, at(0));
        samples(&mut share, 0..1, COST);
        share.unchanged(ALL - 1, ALL);
        assert_eq!(samples(&mut share, 1..2, COST), [20]);
        share.unchanged(1, ALL);
        assert_eq!(samples(&mut share, 2..3, COST), [10]);
    }

    #[test]
    fn a_guest_of_fewer_windows_than_the_least_share_is_sampled_whole() {
        let mut share = Share::new(LIMITS, COST, at(0));
        assert_eq!(share.next(at(0), 2), 2);
        assert_eq!(share.next(at(1), 0), 0);
    }

    proptest! {
        #[test]
        fn no_more_is_spent_than_was_earned_and_one_largest_sample(
            costs_us in prop::collection::vec(1u64..5000, 1..50), tick_ms in 1u64..2000
        ) {
            let mut share = Share::new(LIMITS, COST, at(0));
            let mut spent = Duration::ZERO;
            let (first, mut overshoot) = (share.largest(), Duration::ZERO);
            for (tick, cost_us) in costs_us.iter().enumerate() {
                let now = Moment::after_start(Duration::from_millis(tick_ms * tick as u64));
                let windows = share.next(now, ALL);
                prop_assert!(windows == 0 || (LIMITS.least..=LIMITS.most).contains(&windows));
                // A sample may cost more than expected; the next ones wait until that is paid.
                let cost = Duration::from_micros(*cost_us) * windows as u32;
                overshoot = overshoot.max(cost.saturating_sub(share.cost * windows as u32));
                share.paid(windows as u64, cost);
                spent += cost;
            }
            let earned = part(Duration::from_millis(tick_ms * costs_us.len() as u64), LIMITS.budget);
            prop_assert!(spent <= first + earned + overshoot, "{spent:?} of {first:?}, {earned:?} and {overshoot:?}");
        }
    }
}
