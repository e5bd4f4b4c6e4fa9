//! Samples of one VM's windows: which come next, whether the budget pays for them, and what each has told.
//!
//! ```text
//!   next share, by turns ─┬─ paid for ─▶ the sampler watches it ─▶ finish: touched or not ─▶ history, frequency, age
//!   windows in a hurry ───┘                                          │                       of each window and region
//!                          cost, news, the guest's refaults ◀────────┘
//! ```
//!
//! A window that nothing touched while the guest did not run has no result. A sampler that has ended is not used again,
//! and the report says why.

use std::time::Duration;

use wideleaf_policies::rotation::{Rotation, TouchFrequency};
use wideleaf_policies::{
    AccessHistory, Backing, Moment, PerTenThousand, SampleQuality, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use super::samplers::{exact_sampler, kernel_sampler};
use crate::actuators::swap::Swapper;
use crate::detached::WindowMover;
use crate::host::Host;
use crate::manager::fault_price::FaultPrice;
use crate::manager::managed_vm::AccessesBefore;
use crate::manager::refault_cost::RefaultCost;
use crate::manager::report::ManagerReport;
use crate::manager::sampling::guest_clock::GuestClock;
use crate::manager::sampling::guest_ran::GuestRan;
use crate::manager::sampling::urgent_turns::UrgentTurns;
use crate::manager::sampling::{EndOfTick, Starting};
use crate::manager::sensor_cost::SensorCost;
use crate::mover::ASIDE_SLOTS;
use crate::sensors::access::{AccessCost, AccessSampler, Seen};
use crate::sensors::access_regions::{AccessRegions, RegionSample};
use crate::sensors::share::{Share, ShareLimits};

/// Assumed cost of taking a window aside and bringing it back, before it is measured.
pub(super) const ACCESS_COST: Duration = Duration::from_micros(330);
/// Minimum number of windows in a sample; fewer are not worth the switch to another thread and back.
pub(super) const ACCESS_LEAST: usize = 4;
/// A burst starts when at least one in `NEWS_IN` sampled windows, and at least `ACCESS_LEAST`, is small and is new or
/// has changed. The minimum is there since a guest at rest touches a few windows now and then.
const NEWS_IN: usize = 4;
/// Part of a core for urgent samples: at the 0.1 ms that an idle huge page takes, 400 windows a second, so that all of
/// a guest of 512 MiB have two samples after 1.3 s. Urgent samples end when a policy knows enough: a larger budget has
/// the same samples sooner.
const URGENT_BUDGET: PerTenThousand = PerTenThousand::new(400);
/// Maximum number of windows in a sample, since each costs the guest a wait; half of the slots, since swaps
/// need slots too.
pub(super) const ACCESS_MOST: usize = ASIDE_SLOTS as usize / 2;

/// Maximum number of windows in an urgent sample: with fewer than in others, the first results come sooner.
const URGENT_MOST: usize = ACCESS_MOST / 2;

/// Time within which each window has to be sampled: with a longer one, regions are sampled instead. By then a guest
/// has often changed what it uses.
const EACH_WITHIN: Duration = Duration::from_secs(600);

/// Time within which each region is sampled.
const REGIONS_WITHIN: Duration = Duration::from_secs(60);

const URGENT_LIMITS: ShareLimits =
    ShareLimits { budget: URGENT_BUDGET, burst: Duration::ZERO, least: ACCESS_LEAST, most: URGENT_MOST };

/// End of a window's latest sample.
#[derive(Clone, Copy)]
struct Sampled {
    /// Moment of the guest's clock from which its age is counted.
    at: Moment,
    /// Age at that moment: not zero for a sample that another process took.
    age_then: Duration,
    /// Number of windows that share its result.
    windows: u64,
}

impl Sampled {
    fn quality(self, now: Moment) -> SampleQuality {
        SampleQuality::new(now.since(self.at) + self.age_then, self.windows)
    }
}

/// Samples of one VM: what to sample next, the sample under way, and the results by window.
pub(super) struct AccessSampling {
    vm: VmId,
    /// Name in reports, which says whether it sees every touch.
    name: &'static str,
    // Dropped before the mover: it brings back the windows that it took.
    sampler: Box<dyn AccessSampler>,
    /// Moves windows for samples and swaps; `None` where windows are not moved.
    mover: Option<WindowMover>,
    rotation: Rotation,
    /// Regions, while the guest is too large for samples of each window.
    regions: Option<AccessRegions>,
    pub(super) share: Share,
    /// Turns, budget and number of the windows that the policy hurries for.
    urgent_turns: UrgentTurns,
    urgent_share: Share,
    urgent: usize,
    windows: Vec<WindowIndex>,
    histories: Vec<AccessHistory>,
    frequencies: Vec<TouchFrequency>,
    /// End of each window's latest sample.
    sampled: Vec<Option<Sampled>>,
    /// Number of windows that could be sampled at the latest start.
    backed: usize,
    /// Those of them that were on base pages.
    small: Vec<WindowIndex>,
    is_under_way: bool,
    /// Whether the guest ran during samples.
    guest: GuestRan,
    /// The guest's clock, by which samples grow older.
    pub(super) clock: GuestClock,
    /// Whether the sample under way is an urgent one.
    is_urgent: bool,
    /// Whether the report already says why the sensor has ended.
    is_end_told: bool,
    /// Cost that is not reported yet.
    cost: SensorCost,
    failures: u64,
    refills: RefaultCost,
    /// Whether windows go aside, so that touches of them cause faults.
    takes_aside: bool,
    /// Price of a fault that the expected cost of a window contains; `None` before the first sample.
    priced_at: Option<FaultPrice>,
    /// Mappings of windows that came back because they were touched, and were not asked for yet.
    pub(super) refilled: u64,
}

impl AccessSampling {
    pub(super) fn start(starting: &Starting<'_>, share: Share) -> Result<AccessSampling, String> {
        let Starting { host, vm, windows, .. } = *starting;
        let ram = vm.ram.clone().ok_or("only RAM that is mapped in this process can be sampled")?;
        let (name, sampler, mover) = match exact_sampler(host, ram.clone()) {
            Ok((sampler, mover)) => ("access", sampler, mover),
            Err(exact) => ("access_damon", kernel_sampler(&ram).map_err(|why| format!("{exact}; {why}"))?, None),
        };
        // The kernel's monitor takes nothing aside.
        let takes_aside = name == "access";
        let mut sampling = AccessSampling {
            mover,
            takes_aside,
            guest: GuestRan::new(vm.second_level.clone()),
            ..AccessSampling::of_sampler(vm.id, name, sampler, windows.to_vec(), share)
        };
        sampling.begin_with(&vm.accesses_before);
        Ok(sampling)
    }

    /// Begins with samples that another process took of the same guest.
    fn begin_with(&mut self, before: &[AccessesBefore]) {
        for AccessesBefore { window, history, age } in before {
            if let Ok(row) = self.windows.binary_search(window) {
                self.histories[row] = *history;
                self.sampled[row] = Some(Sampled { at: Moment::START, age_then: *age, windows: 1 });
            }
        }
    }

    /// A sensor that samples nothing, for tests of the swaps beside it.
    #[cfg(test)]
    pub(super) fn of_no_windows(aside: std::sync::Arc<crate::detached::Aside>) -> AccessSampling {
        use crate::sensors::access::{AccessConfig, AccessSensor};

        let sampler = Box::new(AccessSensor::new(aside, AccessConfig::default()));
        let share = Share::new(URGENT_LIMITS, ACCESS_COST, Moment::START);
        AccessSampling::of_sampler(VmId(0), "access", sampler, Vec::new(), share)
    }

    /// A sensor that has sampled nothing yet and moves no windows.
    pub(super) fn of_sampler(
        vm: VmId,
        name: &'static str,
        sampler: Box<dyn AccessSampler>,
        windows: Vec<WindowIndex>,
        share: Share,
    ) -> AccessSampling {
        AccessSampling {
            vm,
            name,
            sampler,
            mover: None,
            refills: RefaultCost::of_nothing(),
            takes_aside: false,
            priced_at: None,
            refilled: 0,
            rotation: Rotation::default(),
            regions: None,
            urgent_turns: UrgentTurns::default(),
            urgent_share: share.with_limits(URGENT_LIMITS, ACCESS_COST).beginning_with_nothing(),
            urgent: 0,
            share,
            histories: vec![AccessHistory::default(); windows.len()],
            frequencies: vec![TouchFrequency::default(); windows.len()],
            sampled: vec![None; windows.len()],
            windows,
            backed: 0,
            small: Vec::new(),
            is_under_way: false,
            guest: GuestRan::new(None),
            clock: GuestClock::default(),
            is_urgent: false,
            is_end_told: false,
            cost: SensorCost::default(),
            failures: 0,
        }
    }

    pub(super) fn forget(&mut self) {
        self.histories.fill(AccessHistory::default());
        self.frequencies.fill(TouchFrequency::default());
        self.sampled.fill(None);
        self.regions = None;
        self.small.clear();
        self.backed = 0;
        self.guest.forget();
    }

    /// Begins the next sample, if it is paid for: of the windows that the policy hurries for, or of the next share.
    pub(super) fn start_next(&mut self, tick: &EndOfTick<'_>) {
        let (all, urgent) = tick.to_sample();
        self.sampler.note_shortage(tick.is_short);
        if !self.start_urgent(tick.host, &urgent, tick.rows, tick.fault) {
            self.start_share(tick.host, &all, tick.rows, tick.has_acted(), tick.fault);
        }
    }

    /// Whether a sample of windows that the policy hurries for is paid for and waits for a tick.
    pub(super) fn is_urgent(&self, now: Moment) -> bool {
        self.urgent > 0 && !self.is_end_told && self.urgent_share.pays_for_largest(now, self.urgent)
    }

    /// Swappers, one for each thread. `None` where windows are not moved.
    pub(super) fn swappers(&self, threads: u16) -> Option<Vec<Swapper>> {
        Some(Swapper::several(self.mover.as_ref()?.aside(), threads))
    }

    /// Bursts are for windows that are still small, since their decisions come soon. For the others it is enough to
    /// learn in the end that they are idle.
    fn start_share(
        &mut self,
        host: &dyn Host,
        backed: &[WindowIndex],
        rows: &VmSnapshot,
        has_acted: bool,
        fault: FaultPrice,
    ) {
        if self.is_end_told {
            return;
        }
        if has_acted {
            self.share.changed();
        }
        self.backed = backed.len();
        let is_small = |window: &WindowIndex| rows.row(*window).is_some_and(|row| rows.backing[row] == Backing::Base4K);
        self.small = backed.iter().copied().filter(is_small).collect();
        if self.small.is_empty() {
            self.share.unchanged_in_burst(0, 0);
        }
        let fault = if self.takes_aside { fault } else { FaultPrice::assumed(None) };
        self.begin_or_end_regions();
        let wanted = if self.share.is_bursting() { &self.small } else { backed };
        if self.priced_at.is_none_or(|before| fault.differs_from(before)) {
            self.share.expect(ACCESS_COST + RefaultCost::of_each(wanted, rows, fault));
            self.priced_at = self.priced_at.map(|_| fault);
        }
        let number = self.share.next(host.now(), wanted.len());
        let share = match &mut self.regions {
            // All of them, also in a burst: a region without a small window would lose its turn.
            Some(regions) => regions.next_share(&self.windows, backed, number),
            None => self.rotation.next_share(wanted, number),
        };
        if share.is_empty() {
            self.cost.ticks_without += u64::from(!backed.is_empty());
            return;
        }
        self.refills.expect(&share, rows, fault);
        self.priced_at.get_or_insert(fault);
        self.begin(host, &share);
    }

    /// Samples by region where the budget cannot pay for each window in time. Regions stay until half as many windows
    /// are left: the cost of a sample varies.
    fn begin_or_end_regions(&mut self) {
        let windows_most = self.share.windows_in(EACH_WITHIN);
        let stay_most = if self.regions.is_some() { windows_most / 2 } else { windows_most };
        if self.backed <= stay_most {
            self.regions = None;
            return;
        }
        let most = self.share.windows_in(REGIONS_WITHIN);
        self.regions.get_or_insert_with(|| AccessRegions::new(self.windows.len(), most)).set_most(most);
        // No slower tempo: a round is what the budget pays for in a minute.
        self.share.changed();
    }

    /// Completes rows by the results of their windows, and of their regions.
    pub(super) fn fill(&self, rows: &mut [WindowRow], now: Moment) {
        let now = self.clock.at(now);
        for ((row, history), sampled) in rows.iter_mut().zip(&self.histories).zip(&self.sampled) {
            row.access = *history;
            row.access_quality = sampled.map(|sampled| sampled.quality(now)).unwrap_or_default();
        }
        self.fill_by_region(rows, now);
    }

    /// Completes rows by the results of their regions, where these tell more than samples of the windows themselves.
    fn fill_by_region(&self, rows: &mut [WindowRow], now: Moment) {
        for heat in self.regions.iter().flat_map(AccessRegions::heat) {
            let quality = SampleQuality::new(now.since(heat.newest), heat.rows.len() as u64);
            for row in heat.rows.clone() {
                let own = self.histories[row].was_touched().zip(self.sampled[row].map(|sampled| sampled.at));
                if heat.is_better_than(own) {
                    (rows[row].access, rows[row].access_quality) = (heat.history, quality);
                }
            }
        }
    }

    /// Result that a sample of this window would confirm or change.
    fn was_touched(&self, row: usize) -> Option<bool> {
        self.regions.as_ref().map_or(self.histories[row].was_touched(), |regions| regions.was_touched(row))
    }

    /// Begins a sample of windows that the policy hurries for, once there is credit for the largest: each ends with a
    /// tick. Returns whether it did.
    fn start_urgent(&mut self, host: &dyn Host, urgent: &[WindowIndex], rows: &VmSnapshot, fault: FaultPrice) -> bool {
        self.urgent = urgent.len();
        if urgent.is_empty() || self.is_end_told || !self.urgent_share.pays_for_largest(host.now(), urgent.len()) {
            return false;
        }
        let windows = self.urgent_share.next(host.now(), urgent.len());
        let share = self.urgent_turns.next_share(urgent, windows, rows);
        let fault = if self.takes_aside { fault } else { FaultPrice::assumed(None) };
        self.refills.expect(&share, rows, fault);
        self.begin(host, &share);
        self.is_urgent = true;
        true
    }

    fn begin(&mut self, host: &dyn Host, share: &[WindowIndex]) {
        self.sampler.start(host, share);
        // All windows are watched from now on.
        self.guest.begin(self.clock.at(host.now()));
        self.is_under_way = true;
    }

    pub(super) fn finish(&mut self, host: &dyn Host) {
        if !std::mem::take(&mut self.is_under_way) {
            return;
        }
        let is_urgent = std::mem::take(&mut self.is_urgent);
        let has_run = self.guest.has_run(self.clock.at(host.now()));
        let sample = self.sampler.finish(host);
        let (mut unchanged, mut news) = (0, 0);
        let mut refilling = Duration::ZERO;
        let (looked_at, now) = (sample.rows.len(), self.clock.at(host.now()));
        for (window, seen) in sample.rows {
            let Ok(row) = self.windows.binary_search(&window) else { continue };
            let was_touched = match seen {
                Seen::Touched => true,
                Seen::Untouched if has_run => false,
                Seen::Untouched => {
                    self.cost.not_run += 1;
                    continue;
                }
                Seen::Unknown("refused" | "service_ended") => {
                    self.failures += 1;
                    continue;
                }
                Seen::Unknown(_) => continue,
            };
            if was_touched {
                refilling += self.refills.cost(window);
                self.refilled += if self.takes_aside { self.refills.mappings(window) } else { 0 };
            }
            let is_small = self.small.binary_search(&window).is_ok();
            if is_small && self.was_touched(row) != Some(was_touched) {
                news += 1;
                self.share.changed();
            } else {
                unchanged += 1;
            }
            let windows = sample.shared_by.get(&window).copied().unwrap_or(1);
            self.sampled[row] = Some(Sampled { at: now, age_then: Duration::ZERO, windows });
            let watched_for = sample.watched_for.get(&window).copied();
            // Urgent samples are not spread over their region.
            if let Some(regions) = self.regions.as_mut().filter(|_| !is_urgent) {
                regions.add(RegionSample { row, was_touched, watched_for, at: now });
            }
            let frequency = &mut self.frequencies[row];
            if let Some(watched_for) = watched_for {
                frequency.add(was_touched, watched_for);
            }
            self.histories[row] = self.histories[row].with(was_touched).with_touches_per_s(frequency.per_second());
        }
        let AccessCost { windows, events, cpu } = sample.cost;
        if is_urgent {
            self.urgent_share.paid(windows, cpu + refilling);
        } else {
            let round = |windows: usize| self.regions.as_ref().map_or(windows, |of| of.number().min(windows));
            self.share.unchanged_in_burst(unchanged, round(self.small.len()));
            self.share.unchanged(unchanged, self.backed);
            if news >= ACCESS_LEAST && news * NEWS_IN >= looked_at {
                self.share.burst();
            }
            self.share.paid(windows, cpu + refilling);
        }
        self.cost.add_sample(windows, events, cpu);
    }

    /// Adds to the report what it does not have yet.
    pub(super) fn tell(&mut self, report: &mut ManagerReport) {
        let SensorCost { samples, windows, latest_windows, ticks_without, claimed, not_run, waits, cpu } =
            std::mem::take(&mut self.cost);
        let cost = report.sensor_costs.entry(self.name).or_default();
        cost.samples += samples;
        cost.windows += windows;
        cost.latest_windows = if samples > 0 { latest_windows } else { cost.latest_windows };
        cost.ticks_without += ticks_without;
        cost.claimed += claimed;
        cost.not_run += not_run;
        cost.waits += waits;
        cost.cpu += cpu;
        if let failures @ 1.. = std::mem::take(&mut self.failures) {
            *report.sensor_failures.entry(self.name).or_default() += failures;
        }
        if let Some(why) = self.sampler.why_it_ended()
            && !std::mem::replace(&mut self.is_end_told, true)
        {
            report.unanswered.push(format!("{}: which windows are used, from then on: {why}", self.vm));
        }
    }
}

#[cfg(test)]
mod tests;
