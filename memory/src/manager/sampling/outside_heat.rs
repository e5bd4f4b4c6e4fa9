//! Takes the heat of RAM that another process has mapped from a source outside of it, as soon as a reading is new.
//!
//! ```text
//!   source ── reading n ──▶ each window in use: 3 of 10 looks ─▶ history: - - - x        four samples a reading
//!                           nothing new for five minutes      ─▶ all windows unknown again
//!   the guest is paused ── readings are passed over, and so is the first one after it: a part of that is of the pause
//! ```

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{AccessHistory, Hva, Moment, PerTenThousand, SampleQuality, WindowRow};

use super::guest_clock::GuestClock;
use super::{EndOfTick, SlowSensor, Starting};
use crate::manager::report::ManagerReport;
use crate::sensors::outside_heat::{Heat, HeatSource, LatestHeat};

/// Name in reports.
const NAME: &str = "access_outside";
/// Samples that a reading adds to a history: a history is four readings long, so that a window counts as idle after
/// twenty seconds, and its share of samples with an access has steps of a sixteenth.
const SAMPLES_FOR_EACH_READING: u32 = 4;
/// Age from which a reading says nothing: with turns of a minute, fifty guests are all seen within it.
const AGE_MAX: Duration = Duration::from_secs(300);

/// Heat of one VM, from a source outside.
pub(super) struct OutsideHeat {
    source: Arc<dyn HeatSource>,
    /// Address of each window, by row.
    addresses: Vec<Hva>,
    histories: Vec<AccessHistory>,
    /// Number of windows that share a result, by row; 0 without one.
    shared_by: Vec<u64>,
    /// Number of the latest reading taken.
    number: Option<u64>,
    /// Time of it, on the guest's clock.
    read_at: Moment,
    clock: GuestClock,
    /// Whether a part of the next reading is of a pause.
    is_cut: bool,
}

impl OutsideHeat {
    pub(super) fn start(source: &Arc<dyn HeatSource>, starting: &Starting<'_>) -> OutsideHeat {
        let of_range = |range: &crate::region::RamRange| {
            let (gpa, hva) = (range.gpa, range.hva);
            gpa.windows().map(move |window| hva + (window.start() - gpa.start()))
        };
        let addresses: Vec<_> = starting.vm.ranges.iter().flat_map(of_range).collect();
        OutsideHeat {
            source: Arc::clone(source),
            histories: vec![AccessHistory::default(); addresses.len()],
            shared_by: vec![0; addresses.len()],
            addresses,
            number: None,
            read_at: Moment::START,
            clock: GuestClock::default(),
            is_cut: false,
        }
    }

    /// Passes over a new reading if a part of it is of a pause. Returns whether it did.
    fn passes_over(&mut self, number: u64) -> bool {
        let is_cut = std::mem::take(&mut self.is_cut);
        self.number = if is_cut { Some(number) } else { self.number };
        is_cut
    }

    /// Adds a reading to the histories of the windows in use. Returns their number.
    fn add(&mut self, heat: &Heat, resident: &[u16]) -> u64 {
        let mut windows = 0;
        for row in (0..self.addresses.len()).filter(|row| resident[*row] > 0) {
            let Some(seen) = heat.of_window(self.addresses[row]) else { continue };
            self.histories[row] = with_reading(self.histories[row], seen.rate);
            self.shared_by[row] = seen.windows;
            windows += 1;
        }
        windows
    }
}

/// The history with a reading of which this share of looks saw an access. The samples with an access are the newest,
/// since they are the newest of what is known; a reading with any access adds at least one.
fn with_reading(history: AccessHistory, rate: PerTenThousand) -> AccessHistory {
    let samples = u64::from(SAMPLES_FOR_EACH_READING);
    let all = u64::from(PerTenThousand::ALL.get());
    let rounded = (u64::from(rate.get()) * samples + all / 2) / all;
    let touched = if rate.get() > 0 { rounded.max(1) } else { 0 };
    (0..samples).fold(history, |history, sample| history.with(sample + touched >= samples))
}

impl SlowSensor for OutsideHeat {
    fn start(&mut self, tick: &EndOfTick<'_>, report: &mut ManagerReport) {
        // The report names the sensor also before its first reading.
        let cost = report.sensor_costs.entry(NAME).or_default();
        let Some(LatestHeat { number, age, heat }) = self.source.latest() else { return };
        if age > AGE_MAX {
            self.forget();
        } else if self.number != Some(number) && !self.passes_over(number) {
            let began = tick.host.thread_cpu_time();
            let windows = self.add(&heat, &tick.rows.resident);
            self.number = Some(number);
            let now = self.clock.at(tick.host.now());
            self.read_at = Moment::after_start(now.since_start().saturating_sub(age));
            cost.add_sample(windows, 0, tick.host.thread_cpu_time().saturating_sub(began));
        }
    }

    fn fill(&self, rows: &mut [WindowRow], now: Moment) {
        let age = self.clock.at(now).since(self.read_at);
        for (row, (history, shared_by)) in rows.iter_mut().zip(self.histories.iter().zip(&self.shared_by)) {
            row.access = *history;
            if history.samples() > 0 {
                row.access_quality = SampleQuality::new(age, *shared_by);
            }
        }
    }

    fn forget(&mut self) {
        self.histories.fill(AccessHistory::default());
        self.shared_by.fill(0);
    }

    fn follow(&mut self, clock: GuestClock) {
        self.clock = clock;
        self.is_cut = true;
        if let Some(latest) = self.source.latest() {
            self.number = Some(latest.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_four_samples_of_which_any_access_makes_the_newest_a_touch() {
        let after = |rate| {
            let history = with_reading(AccessHistory::default(), PerTenThousand::new(rate));
            (history.samples(), history.touched())
        };
        let expected =
            [(0, 0), (1, 0b1), (1_000, 0b1), (5_000, 0b11), (7_000, 0b111), (9_000, 0b1111), (10_000, 0b1111)];
        for (rate, touched) in expected {
            assert_eq!(after(rate), (4, touched), "{rate}");
        }
    }

    #[test]
    fn four_readings_without_an_access_make_a_window_idle() {
        let busy = with_reading(AccessHistory::default(), PerTenThousand::ALL);
        let idle = |readings| (0..readings).fold(busy, |history, _| with_reading(history, PerTenThousand::new(0)));
        assert_eq!([1, 3, 4, 9].map(|readings| idle(readings).idle_samples()), [4, 12, 16, 16]);
    }
}
