//! Time of one second-level fault, measured in the running guest: the CPU time of its vCPUs in the kernel over KVM's
//! count of faults. A sensor that causes faults pays for them at this price.
//!
//! ```text
//!   tick to tick   faults, exits, time in the kernel          few faults, or mostly other exits ─▶ left out
//!                            │
//!                            ├─ a new base page for nearly each ▶ first touches ▶ batches ─▶ median │ an upper limit
//!                            └─ a new page for nearly none ─────▶ refaults ──────▶ batches ─▶ median │ preferred
//!   no median yet, or this KVM has no such counts: the assumed price
//! ```
//!
//! A window that comes back may need fewer faults than it has pages: under shadow paging KVM maps up to seven
//! neighbours at a fault where the guest's table has them (512 pages of a guest on 4 KiB pages: 64 faults), and a
//! guest does not touch all of them again. The meter counts that too: refaults over the mappings of touched windows.
//!
//! The time of the guest itself is not in the price. The kernel charges time by ticks of its timer, to the mode that
//! each tick finds: some ticks make a batch, and the median of batches drops those that contain something else. A
//! first touch also allocates and clears a page of the host. It is the first that every guest has, and costs more than
//! a refault. One that makes a huge page clears 512 times as much, and no refault is like it: it is left out.

use std::collections::VecDeque;
use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use crate::second_level::{FaultCounters, Paging};

/// Assumed time of a fault for which KVM combines both tables into one: GUPS in a window of base pages lost 2.1 ms
/// each time the window was aside, 0.3 ms of it the wait (kvm_pvm on a fourth-generation EPYC). On an Intel Xeon it
/// takes 25 us.
const SHADOW_FAULT: Duration = Duration::from_micros(5);
/// Assumed time of a fault that only fills an EPT or NPT entry, exit and entry included; not measured on hardware yet.
const TDP_FAULT: Duration = Duration::from_micros(1);

/// Minimum number of faults between two ticks: with fewer, other work in the kernel counts for too much.
const INTERVAL_FAULTS_MIN: u64 = 128;
/// Maximum number of exits for each fault. Under shadow paging a fault may need a second exit, for the guest's table.
const EXITS_PER_FAULT_MAX: u64 = 3;
/// Maximum number of new host pages for each fault at a first touch: the faults make base pages, not larger ones.
const NEW_PAGES_PER_FAULT_MAX: u64 = 2;
/// Minimum number of faults in a batch: those of a sample of four windows in base pages.
const BATCH_FAULTS_MIN: u64 = 2_048;
/// Minimum time of a batch: three ticks of a timer of 250 Hz, two of 100 Hz.
const BATCH_TIME_MIN: Duration = Duration::from_millis(12);
/// Number of faults that make a batch however short its time. At the minimum price they take 13 ms.
const BATCH_FAULTS_MAX: u64 = 131_072;
/// Number of batches from which on their median is the price. An interval that is long enough for several batches
/// counts as that number of them, at most as this one: a guest that fills its memory between two ticks has a price at
/// once, and later batches outvote one such interval.
const BATCHES_MIN: usize = 3;
/// Maximum number of latest batches. With more the price would follow a change more slowly.
const BATCHES_KEPT: usize = 9;
/// Number of mappings in base pages that [`FaultPrice::faults_per_512`] relates to: those of a window.
const MAPPINGS: u16 = BASE_PAGES_PER_WINDOW;
/// Number of mappings of touched windows from which on their refaults are related to them: eight windows.
const REFILLED_MIN: u64 = 8 * MAPPINGS as u64;
/// Plausible prices. No exit and entry is faster; a fault that takes longer waited for something else.
const PRICES: std::ops::RangeInclusive<Duration> = Duration::from_nanos(100)..=Duration::from_millis(1);

/// Time of one second-level fault, and how it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPrice {
    /// Time of one fault.
    pub time: Duration,
    /// Source of that time.
    pub source: PriceSource,
    /// Number of faults that it was measured from; 0 if it is assumed.
    pub faults: u64,
    /// Number of faults by which 512 mappings come back; 512 until it is known.
    pub faults_per_512: u16,
}

/// Source of a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriceSource {
    /// Measured on another machine; here there were not enough faults, or KVM does not count them.
    Assumed,
    /// Measured here while the guest touched memory for the first time: with the host's work for a new page.
    FirstTouches,
    /// Measured here while the guest touched memory again.
    Refaults,
}

impl PriceSource {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            PriceSource::Assumed => "assumed",
            PriceSource::FirstTouches => "measured at first touches",
            PriceSource::Refaults => "measured at refaults",
        }
    }
}

impl FaultPrice {
    /// Assumed price for guests with this paging. A process without a second level has no such faults.
    pub(super) const fn assumed(paging: Option<Paging>) -> FaultPrice {
        let time = match paging {
            None => Duration::ZERO,
            Some(Paging::Shadow) => SHADOW_FAULT,
            Some(Paging::Ept | Paging::Npt) => TDP_FAULT,
        };
        FaultPrice { time, source: PriceSource::Assumed, faults: 0, faults_per_512: MAPPINGS }
    }

    /// Time until that number of mappings has come back, at most.
    pub(super) fn of_mappings(self, mappings: u64) -> Duration {
        let faults = (mappings * u64::from(self.faults_per_512)).div_ceil(u64::from(MAPPINGS));
        self.time.saturating_mul(u32::try_from(faults).unwrap_or(u32::MAX))
    }

    /// Whether a budget that counts with `before` should count anew: a quarter more or less for a whole window.
    pub(super) fn differs_from(self, before: FaultPrice) -> bool {
        let [now, before] = [self, before].map(|price| price.of_mappings(u64::from(MAPPINGS)));
        now.abs_diff(before) > before / 4
    }
}

/// Measures the price of a fault of one VM.
#[derive(Debug)]
pub(super) struct FaultMeter {
    assumed: FaultPrice,
    before: Option<FaultCounters>,
    first_touches: Batches,
    refaults: Batches,
    /// Number of mappings of windows that were aside and touched.
    refilled: u64,
    /// Number of faults without a new host page since the first such window was aside.
    refaulted: u64,
}

impl FaultMeter {
    pub(super) fn new(paging: Option<Paging>) -> FaultMeter {
        let (first_touches, refaults) = (Batches::default(), Batches::default());
        FaultMeter {
            assumed: FaultPrice::assumed(paging),
            before: None,
            first_touches,
            refaults,
            refilled: 0,
            refaulted: 0,
        }
    }

    /// Records the counters at a tick. Since the tick before, `new_pages` host pages came into use, and windows with
    /// `refilled` mappings came back because they were touched.
    pub(super) fn record(&mut self, now: FaultCounters, new_pages: u64, refilled: u64) {
        let Some(before) = self.before.replace(now) else { return };
        // Counters that went back are those of fewer vCPUs: one has ended.
        let Some(since) = now.since(before) else { return };
        tracing::debug!(
            "since the last tick: {since:?}, {new_pages} new pages, {refilled} mappings of touched windows"
        );
        let FaultCounters { faults, exits, system_time, .. } = since;
        self.refilled += refilled;
        if self.refilled > 0 {
            self.refaulted += faults.saturating_sub(new_pages);
        }
        if faults < INTERVAL_FAULTS_MIN || exits > faults.saturating_mul(EXITS_PER_FAULT_MAX) {
            return;
        }
        if new_pages.saturating_mul(10) <= faults {
            self.refaults.add(faults, system_time);
        } else if new_pages.saturating_mul(10) >= faults.saturating_mul(8)
            && new_pages <= faults.saturating_mul(NEW_PAGES_PER_FAULT_MAX)
        {
            self.first_touches.add(faults, system_time);
        }
    }

    /// The counters of a tick are unknown: the next ones begin an interval of their own, because the host pages that
    /// came into use are those of one tick.
    pub(super) fn forget_latest(&mut self) {
        self.before = None;
    }

    /// The best price known.
    pub(super) fn price(&self) -> FaultPrice {
        let faults_per_512 = match self.refilled {
            // Faults have other causes too, so there may be more of them than mappings.
            REFILLED_MIN.. => (self.refaulted * u64::from(MAPPINGS)).div_ceil(self.refilled).clamp(1, MAPPINGS.into()),
            _ => MAPPINGS.into(),
        } as u16;
        let measured = |batches: &Batches, source| {
            let faults = batches.faults();
            batches.median().map(|time| FaultPrice { time, source, faults, faults_per_512 })
        };
        measured(&self.refaults, PriceSource::Refaults)
            .or_else(|| measured(&self.first_touches, PriceSource::FirstTouches))
            .unwrap_or(FaultPrice { faults_per_512, ..self.assumed })
    }
}

/// Intervals put together until they are long enough to be measured, and the latest of these.
#[derive(Debug, Default)]
struct Batches {
    faults: u64,
    time: Duration,
    /// Price and number of faults of each batch, oldest first.
    latest: VecDeque<(Duration, u64)>,
}

impl Batches {
    fn add(&mut self, faults: u64, time: Duration) {
        let parts = (faults / BATCH_FAULTS_MIN).min((time.as_nanos() / BATCH_TIME_MIN.as_nanos()) as u64);
        let parts = parts.clamp(1, BATCHES_MIN as u64);
        self.faults = self.faults.saturating_add(faults);
        self.time += time;
        let is_long = self.faults >= BATCH_FAULTS_MIN && self.time >= BATCH_TIME_MIN;
        if !is_long && self.faults < BATCH_FAULTS_MAX {
            return;
        }
        let (faults, time) = (std::mem::take(&mut self.faults), std::mem::take(&mut self.time));
        let price_ns = time.as_nanos() / u128::from(faults);
        let price = Duration::from_nanos(u64::try_from(price_ns).unwrap_or(u64::MAX));
        if !PRICES.contains(&price) {
            tracing::debug!("{faults} faults in {time:?} are no price");
            return;
        }
        for _ in 0..parts {
            self.latest.push_back((price, faults / parts));
        }
        let excess = self.latest.len().saturating_sub(BATCHES_KEPT);
        self.latest.drain(..excess);
    }

    fn median(&self) -> Option<Duration> {
        if self.latest.len() < BATCHES_MIN {
            return None;
        }
        let mut prices: Vec<_> = self.latest.iter().map(|(price, _)| *price).collect();
        prices.sort_unstable();
        Some(prices[prices.len() / 2])
    }

    fn faults(&self) -> u64 {
        self.latest.iter().map(|(_, faults)| faults).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest with counters that grow by each step.
    struct Guest {
        meter: FaultMeter,
        counters: FaultCounters,
    }

    impl Guest {
        fn new(paging: Paging) -> Guest {
            let mut meter = FaultMeter::new(Some(paging));
            meter.record(FaultCounters::default(), 0, 0);
            Guest { meter, counters: FaultCounters::default() }
        }

        fn step(&mut self, faults: u64, exits: u64, system_us: u64, new_pages: u64) -> FaultPrice {
            self.counters.faults += faults;
            self.counters.exits += exits;
            self.counters.system_time += Duration::from_micros(system_us);
            self.meter.record(self.counters, new_pages, 0);
            self.meter.price()
        }

        /// The same step several times.
        fn steps(&mut self, steps: u64, faults: u64, exits: u64, system_us: u64, new_pages: u64) -> FaultPrice {
            for _ in 0..steps {
                self.step(faults, exits, system_us, new_pages);
            }
            self.meter.price()
        }

        /// Steps of 2,048 faults that take `fault_us` each.
        fn batches(&mut self, steps: u64, fault_us: u64, new_pages: u64) -> FaultPrice {
            self.steps(steps, 2_048, 2_100, 2_048 * fault_us, new_pages)
        }
    }

    fn assumed(paging: Paging) -> FaultPrice {
        FaultPrice::assumed(Some(paging))
    }

    #[test]
    fn the_assumed_price_counts_until_there_are_three_batches() {
        let mut guest = Guest::new(Paging::Shadow);
        assert_eq!(guest.batches(2, 25, 0), assumed(Paging::Shadow));
        let measured = FaultPrice {
            time: Duration::from_micros(25),
            source: PriceSource::Refaults,
            faults: 3 * 2_048,
            faults_per_512: 512,
        };
        assert_eq!(guest.batches(1, 25, 0), measured);
        assert_eq!(FaultMeter::new(None).price().time, Duration::ZERO);
    }

    #[test]
    fn an_interval_as_long_as_three_batches_is_a_price() {
        let mut guest = Guest::new(Paging::Shadow);
        let first = guest.step(16_000, 16_000, 16_000 * 3, 16_000);
        let expected = (Duration::from_micros(3), PriceSource::FirstTouches, 15_999);
        assert_eq!((first.time, first.source, first.faults), expected);
        assert_eq!(guest.batches(4, 6, 2_048).time, Duration::from_micros(6), "later batches outvote it");
    }

    #[test]
    fn refaults_are_preferred_to_first_touches_and_a_mixture_is_neither() {
        let mut guest = Guest::new(Paging::Shadow);
        assert_eq!(guest.batches(20, 10, 1_000), assumed(Paging::Shadow), "half of the pages are new");
        let first = guest.batches(3, 30, 2_048);
        assert_eq!((first.time, first.source), (Duration::from_micros(30), PriceSource::FirstTouches));
        let again = guest.batches(3, 20, 100);
        assert_eq!((again.time, again.source), (Duration::from_micros(20), PriceSource::Refaults));
    }

    #[test]
    fn first_touches_that_make_huge_pages_are_no_price_of_a_fault() {
        let mut guest = Guest::new(Paging::Npt);
        // A guest of 16 GiB on pages of 2 MiB is filled between two ticks: 80 us for each page.
        assert_eq!(guest.step(8_192, 8_192, 8_192 * 80, 512 * 8_192), assumed(Paging::Npt));
        assert_eq!(guest.batches(9, 40, 16 * 2_048), assumed(Paging::Npt), "nor are those that make 64 KiB");
        let base = guest.batches(3, 7, 2_048);
        assert_eq!((base.time, base.source), (Duration::from_micros(7), PriceSource::FirstTouches));
    }

    #[test]
    fn after_a_tick_with_unknown_counters_an_interval_begins_anew() {
        let mut guest = Guest::new(Paging::Shadow);
        guest.counters.faults += 3 * 4_096;
        guest.counters.exits += 3 * 4_096;
        guest.counters.system_time += Duration::from_millis(300);
        guest.meter.forget_latest();
        // Its first touches were before the tick that was lost: the interval since then has few new pages.
        assert_eq!(guest.step(4_096, 4_096, 4_096 * 25, 0), assumed(Paging::Shadow));
        assert_eq!(guest.step(8_192, 8_192, 8_192 * 20, 0).time, Duration::from_micros(20));
    }

    #[test]
    fn cheap_faults_are_put_together_until_their_time_is_measurable() {
        let mut guest = Guest::new(Paging::Npt);
        // 500 ns each, in ticks of 4 ms: one of four steps has one.
        let mut step = |number: u64| guest.step(2_000, 2_000, if number.is_multiple_of(4) { 4_000 } else { 0 }, 0);
        assert_eq!((1..36).map(&mut step).last(), Some(assumed(Paging::Npt)), "three batches take nine ticks");
        let price = (36..200).map(&mut step).last().expect("steps");
        assert_eq!(price.source, PriceSource::Refaults);
        assert!((Duration::from_nanos(400)..Duration::from_nanos(600)).contains(&price.time), "{price:?}");
    }

    #[test]
    fn absurd_prices_are_dropped() {
        let mut guest = Guest::new(Paging::Ept);
        assert_eq!(guest.batches(10, 1_001, 0), assumed(Paging::Ept), "too long");
        // No time at all: the kernel does not charge it.
        assert_eq!(guest.steps(1_000, 2_048, 2_048, 0, 0), assumed(Paging::Ept));
        assert_eq!(guest.batches(3, 1_000, 0).time, Duration::from_millis(1), "the limit itself counts");
    }

    #[test]
    fn one_batch_with_other_work_in_it_does_not_move_the_price() {
        let mut guest = Guest::new(Paging::Shadow);
        guest.batches(4, 20, 0);
        guest.batches(1, 900, 0);
        assert_eq!(guest.meter.price().time, Duration::from_micros(20));
        // A lasting change does, with five of nine.
        assert_eq!(guest.batches(9, 40, 0).time, Duration::from_micros(40));
    }

    #[test]
    fn intervals_with_few_faults_or_mostly_other_exits_are_left_out() {
        let mut guest = Guest::new(Paging::Shadow);
        assert_eq!(guest.steps(1_000, INTERVAL_FAULTS_MIN - 1, 200, 100_000, 0), assumed(Paging::Shadow));
        assert_eq!(guest.steps(100, 2_048, 3 * 2_048 + 1, 100_000, 0), assumed(Paging::Shadow));
    }

    #[test]
    fn counters_that_go_back_begin_anew() {
        let mut guest = Guest::new(Paging::Shadow);
        guest.batches(3, 20, 0);
        for lower in [FaultCounters::default(), FaultCounters { faults: u64::MAX, ..guest.counters }] {
            guest.counters = lower;
            guest.meter.record(guest.counters, 0, 0);
            assert_eq!(guest.meter.price().faults, 3 * 2_048, "such an interval has no price");
        }
        guest.counters = FaultCounters::default();
        guest.meter.record(guest.counters, 0, 0);
        assert_eq!(guest.batches(1, 20, 0).faults, 4 * 2_048);
    }

    #[test]
    fn mappings_that_come_back_by_fewer_faults_cost_less() {
        let mut guest = Guest::new(Paging::Shadow);
        let mut samples = |faults: u64, windows: u64| {
            guest.counters.faults += faults;
            guest.counters.exits += faults;
            guest.meter.record(guest.counters, 0, windows * 512);
            guest.meter.price()
        };
        assert_eq!(samples(100_000, 0).faults_per_512, 512, "nothing was aside before");
        assert_eq!(samples(7 * 64, 7).faults_per_512, 512, "too few to tell");
        let prefetched = samples(64, 1);
        assert_eq!(prefetched.faults_per_512, 64);
        assert_eq!(
            [0, 1, 300, 512].map(|pages| prefetched.of_mappings(pages)),
            [0, 1, 38, 64].map(|n| prefetched.time * n)
        );
        assert_eq!(samples(0, 100_000).faults_per_512, 1, "it is never free");
        assert_eq!(samples(u64::MAX / 1_000_000, 1).faults_per_512, 512, "other faults add no cost to a mapping");
    }

    #[test]
    fn a_budget_counts_anew_from_a_quarter_on() {
        let of = |ns: u64, faults_per_512: u16| FaultPrice {
            time: Duration::from_nanos(ns),
            faults_per_512,
            ..assumed(Paging::Shadow)
        };
        let price = assumed(Paging::Shadow);
        let before = [of(5_000, 512), of(4_100, 512), of(7_000, 512), of(40_000, 64), of(5_000, 64)];
        assert_eq!(before.map(|before| price.differs_from(before)), [false, false, true, false, true]);
        assert!(price.differs_from(FaultPrice::assumed(None)));
    }
}
