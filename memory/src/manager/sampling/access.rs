//! Samples which windows the guest uses: a rotating share of them goes aside, and the touched ones come back.
//!
//! ```text
//!   share of the windows ── aside ─▶ touched: back at once ─▶ history and frequency of each, by row
//!                              └───── untouched: back at the next tick
//! ```
//!
//! Windows that the policy hurries for have turns and a budget of their own. A large window goes aside and comes back
//! as one huge page. Of a guest so large that all windows would take longer than [`EACH_WITHIN`], a share has a window
//! of each region instead ([`AccessRegions`]), so that all of the guest is seen once a minute.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};
use wideleaf_policies::rotation::{Rotation, TouchFrequency};
use wideleaf_policies::{
    AccessHistory, Backing, Moment, PageSize, PerTenThousand, SampleQuality, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use super::guest_ran::GuestRan;
use super::outside_heat::OutsideHeat;
use super::urgent_turns::UrgentTurns;
use super::{EndOfTick, Kind, SlowSensor, Starting};
use crate::actuators::swap::Swapper;
use crate::backing::BackingKind;
use crate::detached::WindowMover;
use crate::host::Host;
use crate::kernel::Kernel;
use crate::manager::fault_price::FaultPrice;
use crate::manager::managed_vm::AccessesBefore;
use crate::manager::refault_cost::RefaultCost;
use crate::manager::report::ManagerReport;
use crate::manager::sensor_cost::SensorCost;
use crate::mover::ASIDE_SLOTS;
use crate::region::GuestRam;
use crate::sensors::access::{AccessConfig, AccessCost, AccessSampler, AccessSensor, Seen};
use crate::sensors::access_regions::{AccessRegions, RegionSample};
use crate::sensors::damon::DamonSensor;
use crate::sensors::minor_faults::MinorFaultSensor;
use crate::sensors::share::{Share, ShareLimits};

pub(super) const KIND: Kind = Kind {
    question: "which windows are used",
    // Last, since a window that is aside cannot be scanned.
    turn: 3,
    is_needed: |needs| needs.access,
    shares_budget: true,
    causes_faults: true,
    start: |starting| {
        if let Some(source) = &starting.vm.heat {
            return Ok(Box::new(OutsideHeat::start(source, starting)));
        }
        let share = starting.share(ACCESS_LEAST, ACCESS_MOST, ACCESS_COST, starting.burst);
        let sampling = AccessSampling::start(starting, share.beginning_with_nothing())?;
        Ok(Box::new(SharedAccess::new(sampling)))
    },
};

/// Assumed cost of taking a window aside and bringing it back, before it is measured.
const ACCESS_COST: Duration = Duration::from_micros(330);
/// Minimum number of windows in a sample; fewer are not worth the switch to another thread and back.
const ACCESS_LEAST: usize = 4;
/// A burst starts when at least one in `NEWS_IN` sampled windows, and at least `ACCESS_LEAST`, is small and is new or
/// has changed. The minimum is there since a guest at rest touches a few windows now and then.
const NEWS_IN: usize = 4;
/// Part of a core for urgent samples: at the 0.1 ms that an idle huge page takes, 400 windows a second, so that all of
/// a guest of 512 MiB have two samples after 1.3 s. Urgent samples end when a policy knows enough: a larger budget has
/// the same samples sooner.
const URGENT_BUDGET: PerTenThousand = PerTenThousand::new(400);
/// Maximum number of windows in a sample, since each costs the guest a wait; half of the slots, since swaps
/// need slots too.
const ACCESS_MOST: usize = ASIDE_SLOTS as usize / 2;

/// Maximum number of windows in an urgent sample: with fewer than in others, the first results come sooner.
const URGENT_MOST: usize = ACCESS_MOST / 2;

/// Time within which each window has to be sampled: with a longer one, regions are sampled instead. By then a guest
/// has often changed what it uses.
const EACH_WITHIN: Duration = Duration::from_secs(600);

/// Time within which each region is sampled.
const REGIONS_WITHIN: Duration = Duration::from_secs(60);

const URGENT_LIMITS: ShareLimits =
    ShareLimits { budget: URGENT_BUDGET, burst: Duration::ZERO, least: ACCESS_LEAST, most: URGENT_MOST };

/// Access sensor of a VM, shared with callers that need every window in its place.
#[derive(Clone)]
pub(in crate::manager) struct SharedAccess(Arc<AccessAndSwaps>);

struct AccessAndSwaps {
    /// Shared by swaps, exclusive for callers that need every window in its place. Taken before `sampling`.
    swaps: RwLock<()>,
    sampling: Mutex<AccessSampling>,
}

/// End of a window's latest sample.
#[derive(Clone, Copy)]
struct Sampled {
    /// Moment from which its age is counted.
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

/// While this exists, no window is aside or on its way.
pub(in crate::manager) struct InPlace<'a> {
    sampling: MutexGuard<'a, AccessSampling>,
    _no_swap: RwLockWriteGuard<'a, ()>,
}

impl SharedAccess {
    fn new(sampling: AccessSampling) -> SharedAccess {
        SharedAccess(Arc::new(AccessAndSwaps { swaps: RwLock::default(), sampling: Mutex::new(sampling) }))
    }

    /// A sensor that samples nothing, for tests of the swaps beside it.
    #[cfg(test)]
    pub(in crate::manager) fn of_no_windows(aside: Arc<crate::detached::Aside>) -> SharedAccess {
        let sampler = Box::new(AccessSensor::new(aside, AccessConfig::default()));
        let share = Share::new(URGENT_LIMITS, ACCESS_COST, Moment::START);
        SharedAccess::new(AccessSampling::of_sampler(VmId(0), "access", sampler, Vec::new(), share))
    }

    /// Brings every window back. No window is aside while the returned value exists.
    pub(in crate::manager) fn in_place(&self, host: &dyn Host) -> InPlace<'_> {
        let no_swap = self.0.swaps.write();
        let mut sampling = self.lock();
        sampling.finish(host);
        InPlace { sampling, _no_swap: no_swap }
    }

    /// Swappers, one for each thread. `None` where windows are not moved.
    pub(in crate::manager) fn swappers(&self, threads: u16) -> Option<Vec<Swapper>> {
        Some(Swapper::several(self.lock().mover.as_ref()?.aside(), threads))
    }

    /// Calls `swap` while no caller needs every window in its place. Several threads may swap at the same time.
    pub(in crate::manager) fn unseen<T>(&self, swap: impl FnOnce() -> T) -> T {
        let _turn = self.0.swaps.read();
        swap()
    }

    fn lock(&self) -> MutexGuard<'_, AccessSampling> {
        // A thread that panicked half-way leaves windows aside. The mover brings them back, and no
        // sample reports them.
        self.0.sampling.lock()
    }
}

struct AccessSampling {
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
    share: Share,
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
    refilled: u64,
}

impl SlowSensor for SharedAccess {
    fn start(&mut self, tick: &EndOfTick<'_>, _: &mut ManagerReport) {
        let (all, urgent) = tick.to_sample();
        let mut sampling = self.lock();
        sampling.sampler.note_shortage(tick.is_short);
        if !sampling.start_urgent(tick.host, &urgent, tick.rows, tick.fault) {
            sampling.start_share(tick.host, &all, tick.rows, tick.has_acted(), tick.fault);
        }
    }

    fn finish(&mut self, host: &dyn Host, _: &[WindowIndex], report: &mut ManagerReport) {
        self.in_place(host).sampling.tell(report);
    }

    fn fill(&self, rows: &mut [WindowRow], now: Moment) {
        let sampling = self.lock();
        for ((row, history), sampled) in rows.iter_mut().zip(&sampling.histories).zip(&sampling.sampled) {
            row.access = *history;
            row.access_quality = sampled.map(|sampled| sampled.quality(now)).unwrap_or_default();
        }
        sampling.fill_by_region(rows, now);
    }

    fn forget(&mut self) {
        self.lock().forget();
    }

    fn set_budget(&mut self, budget: PerTenThousand) {
        self.lock().share.set_budget(budget);
    }

    fn is_bursting(&self) -> bool {
        self.lock().share.is_bursting()
    }

    fn is_urgent(&self, now: Moment) -> bool {
        let sampling = self.lock();
        sampling.urgent > 0 && !sampling.is_end_told && sampling.urgent_share.pays_for_largest(now, sampling.urgent)
    }

    fn take_refilled(&mut self) -> u64 {
        std::mem::take(&mut self.lock().refilled)
    }

    fn access(&self) -> Option<SharedAccess> {
        Some(self.clone())
    }
}

impl AccessSampling {
    fn start(starting: &Starting<'_>, share: Share) -> Result<AccessSampling, String> {
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

    /// A sensor that has sampled nothing yet and moves no windows.
    fn of_sampler(
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
            is_urgent: false,
            is_end_told: false,
            cost: SensorCost::default(),
            failures: 0,
        }
    }

    fn forget(&mut self) {
        self.histories.fill(AccessHistory::default());
        self.frequencies.fill(TouchFrequency::default());
        self.sampled.fill(None);
        self.regions = None;
        self.small.clear();
        self.backed = 0;
        self.guest.forget();
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
        self.guest.begin(host.now());
        self.is_under_way = true;
    }

    fn finish(&mut self, host: &dyn Host) {
        if !std::mem::take(&mut self.is_under_way) {
            return;
        }
        let is_urgent = std::mem::take(&mut self.is_urgent);
        let has_run = self.guest.has_run(host.now());
        let sample = self.sampler.finish(host);
        let (mut unchanged, mut news) = (0, 0);
        let mut refilling = Duration::ZERO;
        let (looked_at, now) = (sample.rows.len(), host.now());
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
    fn tell(&mut self, report: &mut ManagerReport) {
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

/// The sensor that sees every touch of what it samples; its kind depends on the backing.
fn exact_sampler(
    host: &Arc<dyn Kernel>,
    ram: Arc<GuestRam>,
) -> Result<(Box<dyn AccessSampler>, Option<WindowMover>), String> {
    match ram.backing().kind() {
        BackingKind::Anon => {
            let mover = WindowMover::start(host.clone(), ram).map_err(|error| error.to_string())?;
            let sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
            Ok((Box::new(sensor), Some(mover)))
        }
        BackingKind::Memfd | BackingKind::Hugetlb => {
            let ranges = ram.ranges().to_vec();
            let faults = host.open_minor_faults(ram).map_err(|error| error.to_string())?;
            let sensor = MinorFaultSensor::start_on(faults, ranges, AccessConfig::default());
            let sensor = sensor.map_err(|error| error.to_string())?;
            Ok((Box::new(sensor), None))
        }
    }
}

/// The kernel's own monitor, which may miss touches, for VMs without an exact sensor.
fn kernel_sampler(ram: &GuestRam) -> Result<Box<dyn AccessSampler>, String> {
    if ram.backing().fixed_page().is_some_and(|page| page > PageSize::Huge2M) {
        return Err("the kernel has one accessed bit for each page of 1 GiB".into());
    }
    let sensor = DamonSensor::start(Path::new("/"), ram.ranges()).map_err(|error| error.to_string())?;
    Ok(Box::new(sensor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::sampled_pages::SAMPLED_PAGES;

    use crate::manager::fault_price::FaultMeter;
    use crate::manager::sampling::SAMPLING_BURST;
    use crate::second_level::{FaultCounters, Paging};
    use crate::sensors::access::AccessSample;
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_second_level::FakeSecondLevel;

    /// A sensor with a userfaultfd that can no longer be read.
    struct Ended;

    impl AccessSampler for Ended {
        fn start(&mut self, _: &dyn Host, _: &[WindowIndex]) {
            panic!("a sensor that has ended is not asked");
        }

        fn finish(&mut self, _: &dyn Host) -> AccessSample {
            AccessSample::default()
        }

        fn why_it_ended(&self) -> Option<String> {
            Some("read of a userfaultfd: i/o error".into())
        }
    }

    /// A sensor that sees the same of each window of its sample, and needs no CPU time.
    struct Always {
        seen: Seen,
        /// Number of windows that share each result.
        shared_by: u64,
        sample: Vec<WindowIndex>,
    }

    impl AccessSampler for Always {
        fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
            self.sample = windows.to_vec();
        }

        fn finish(&mut self, _: &dyn Host) -> AccessSample {
            let rows: Vec<_> = std::mem::take(&mut self.sample).into_iter().map(|window| (window, self.seen)).collect();
            let windows = rows.len() as u64;
            let events = if self.seen == Seen::Touched { windows } else { 0 };
            let shared_by = rows.iter().map(|(window, _)| (*window, self.shared_by)).collect();
            let cost = AccessCost { windows, events, cpu: Duration::ZERO };
            AccessSample { rows, shared_by, cost, ..AccessSample::default() }
        }

        fn why_it_ended(&self) -> Option<String> {
            None
        }
    }

    /// Windows with all base pages present, and their snapshot.
    fn on_base_pages(number: usize) -> (Vec<WindowIndex>, VmSnapshot) {
        let windows: Vec<_> = (0..number as u64).map(WindowIndex::new).collect();
        let mut rows = VmSnapshot::with_capacity(VmId(0), number);
        windows.iter().for_each(|window| rows.push(WindowRow::new(*window, 512, Backing::Base4K)));
        (windows, rows)
    }

    fn sampling_of(seen: Seen, windows: &[WindowIndex], share: Share) -> AccessSampling {
        AccessSampling::of_sampler(
            VmId(0),
            "access",
            Box::new(Always { seen, shared_by: 1, sample: Vec::new() }),
            windows.to_vec(),
            share,
        )
    }

    /// A sensor of windows that are always touched, as a manager starts it, but with this burst.
    fn earning(host: &FakeHost, windows: &[WindowIndex], burst: Duration) -> AccessSampling {
        let limits = ShareLimits { budget: PerTenThousand::new(50), burst, least: ACCESS_LEAST, most: ACCESS_MOST };
        let share = Share::new(limits, ACCESS_COST, host.now()).beginning_with_nothing();
        AccessSampling { takes_aside: true, ..sampling_of(Seen::Touched, windows, share) }
    }

    #[test]
    fn a_burst_lasts_until_every_window_was_sampled_once_without_news() {
        let host = FakeHost::default();
        let (windows, rows) = on_base_pages(4 * ACCESS_LEAST);
        // A sample is a quarter of the windows, and costs nothing.
        let limits = ShareLimits {
            budget: PerTenThousand::ALL,
            burst: Duration::from_secs(1),
            least: ACCESS_LEAST,
            most: ACCESS_LEAST,
        };
        let mut sampling = sampling_of(Seen::Untouched, &windows, Share::new(limits, ACCESS_COST, host.now()));
        let mut sample = || {
            sampling.start_share(&host, &windows, &rows, false, FaultPrice::assumed(None));
            sampling.finish(&host);
            sampling.share.is_bursting()
        };
        // The first sample of each window is news: four samples, each of which restarts the burst. The next four
        // bring none, and the burst ends with the last of them.
        let bursting: Vec<bool> = (0..8).map(|_| sample()).collect();
        assert_eq!(bursting, [true, true, true, true, true, true, true, false]);
    }

    /// Number of windows in base pages that are sampled in ten minutes, on a host on which a fault takes this time.
    /// The guest's first touches come before the first sample.
    fn sampled_where_a_fault_takes(fault: Duration) -> u64 {
        let host = FakeHost::default();
        let (windows, rows) = on_base_pages(64);
        let mut sampling = earning(&host, &windows, Duration::ZERO);
        let (mut meter, mut counters) = (FaultMeter::new(Some(Paging::Shadow)), FaultCounters::default());
        let mut touch = |faults: u64, new_pages: u64| {
            counters.faults += faults;
            counters.exits += faults;
            counters.system_time += fault * faults as u32;
            meter.record(counters, new_pages, faults - new_pages);
            meter.price()
        };
        touch(0, 0);
        (0..16).for_each(|_| {
            touch(2_048, 2_048);
        });
        let (mut sampled, mut refaults) = (0, 0);
        for _ in 0..600 {
            sampling.share.changed(); // no slower tempo
            sampling.start_share(&host, &windows, &rows, false, touch(refaults * u64::from(SAMPLED_PAGES), 0));
            host.sleep(Duration::from_secs(1));
            sampling.finish(&host);
            refaults = std::mem::take(&mut sampling.cost).windows;
            sampled += refaults;
        }
        sampled
    }

    #[test]
    fn where_a_fault_takes_five_times_as_long_five_times_fewer_windows_are_sampled() {
        let [fast, slow] = [100, 500].map(|us| sampled_where_a_fault_takes(Duration::from_micros(us)));
        // A window costs 0.4 or 2 ms of the 3 s that ten minutes earn.
        assert!((7_300..=7_600).contains(&fast), "{fast}");
        assert!((slow * 24 / 5..=slow * 26 / 5).contains(&fast), "{fast} and {slow}");
    }

    #[test]
    fn nothing_is_sampled_before_it_is_earned_at_the_price_of_its_faults() {
        let host = FakeHost::default();
        let (windows, rows) = on_base_pages(64);
        let mut sampling = earning(&host, &windows, SAMPLING_BURST);
        let began = host.now();
        while !sampling.is_under_way {
            sampling.start_share(&host, &windows, &rows, false, FaultPrice::assumed(Some(Paging::Shadow)));
            host.sleep(Duration::from_millis(10));
        }
        // Four windows of 4 faults of 5 us, and 330 us of the manager each: 1.4 ms, of which a second earns 5 ms.
        let earned_after = host.now().since(began);
        assert!((280..=300).contains(&earned_after.as_millis()), "{earned_after:?}");
    }

    #[test]
    fn windows_of_a_guest_that_waited_for_a_cpu_are_not_idle() {
        let (host, kvm) = (FakeHost::default(), Arc::new(FakeSecondLevel::new(&[])));
        let (windows, rows) = on_base_pages(ACCESS_LEAST);
        let limits = ShareLimits {
            budget: PerTenThousand::ALL,
            burst: Duration::from_secs(1),
            least: ACCESS_LEAST,
            most: ACCESS_MOST,
        };
        let samples_of = |seen, ran_ms: &[u64]| {
            let mut sampling = AccessSampling {
                guest: GuestRan::new(Some(kvm.clone())),
                ..sampling_of(seen, &windows, Share::new(limits, ACCESS_COST, host.now()))
            };
            let mut cpu = Duration::ZERO;
            for ran_ms in ran_ms {
                kvm.set_vcpu_time(cpu);
                sampling.start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
                host.sleep(Duration::from_millis(40));
                cpu += Duration::from_millis(*ran_ms);
                kvm.set_vcpu_time(cpu);
                sampling.finish(&host);
            }
            (sampling.histories[0].samples(), sampling.sampled[0].is_some(), sampling.cost.not_run)
        };
        let not_run = 2 * ACCESS_LEAST as u64;
        assert_eq!(samples_of(Seen::Untouched, &[40, 0, 0, 20]), (2, true, not_run));
        assert_eq!(samples_of(Seen::Touched, &[40, 0, 0, 20]), (4, true, 0), "a touch is a touch");
        assert_eq!(samples_of(Seen::Untouched, &[0, 0, 0, 0]), (4, true, 0), "it is halted");
    }

    #[test]
    fn samples_of_another_process_grow_older_until_a_window_is_sampled_here() {
        let host = FakeHost::default();
        let (windows, rows) = on_base_pages(ACCESS_LEAST);
        let limits =
            ShareLimits { budget: PerTenThousand::ALL, burst: Duration::ZERO, least: ACCESS_LEAST, most: ACCESS_LEAST };
        let mut sampling = sampling_of(Seen::Untouched, &windows, Share::new(limits, ACCESS_COST, host.now()));
        let history = AccessHistory::from_parts(0b1101, 4).with_touches_per_s(Some(100));
        let elsewhere = WindowIndex::new(1 << 20);
        let before = |window| AccessesBefore { window, history, age: Duration::from_secs(7) };
        sampling.begin_with(&[before(windows[1]), before(elsewhere)]);
        host.sleep(Duration::from_secs(3));
        let shared = SharedAccess::new(sampling);
        let filled = |shared: &SharedAccess| {
            let mut filled: Vec<_> =
                windows.iter().map(|window| WindowRow::new(*window, 512, Backing::Base4K)).collect();
            shared.fill(&mut filled, host.now());
            filled.iter().map(|row| (row.access, row.access_quality.age_s)).collect::<Vec<_>>()
        };
        let unknown = (AccessHistory::default(), 0);
        assert_eq!(filled(&shared), [unknown, (history, 10), unknown, unknown]);
        shared.lock().start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
        shared.lock().finish(&host);
        let seen = filled(&shared);
        assert_eq!((seen[1].0.touched(), seen[1].0.samples(), seen[1].1), (0b11010, 5, 0));
    }

    #[test]
    fn a_result_that_windows_share_has_their_number_as_its_error() {
        let host = FakeHost::default();
        let (windows, rows) = on_base_pages(ACCESS_LEAST);
        let limits =
            ShareLimits { budget: PerTenThousand::ALL, burst: Duration::ZERO, least: ACCESS_LEAST, most: ACCESS_LEAST };
        let share = Share::new(limits, ACCESS_COST, host.now());
        let sampler = Box::new(Always { seen: Seen::Untouched, shared_by: 80, sample: Vec::new() });
        let shared =
            SharedAccess::new(AccessSampling::of_sampler(VmId(0), "access_damon", sampler, windows.clone(), share));
        shared.lock().start_share(&host, &windows, &rows, false, FaultPrice::assumed(None));
        shared.lock().finish(&host);
        let mut filled: Vec<_> = (0..windows.len()).map(|row| rows.get(row)).collect();
        shared.fill(&mut filled, host.now());
        assert!(filled.iter().all(|row| row.access.samples() == 1 && row.access_quality.windows == 80), "{filled:?}");
    }

    #[test]
    fn urgent_windows_are_sampled_out_of_turn_once_their_own_budget_pays_for_a_large_sample() {
        let host = FakeHost::default();
        let (windows, rows) = on_base_pages(2 * URGENT_MOST);
        let limits =
            ShareLimits { budget: PerTenThousand::ALL, burst: Duration::ZERO, least: ACCESS_LEAST, most: ACCESS_MOST };
        let mut sampling = sampling_of(Seen::Untouched, &windows, Share::new(limits, ACCESS_COST, host.now()));
        let fault = FaultPrice::assumed(None);
        let samples = |sampling: &AccessSampling| sampling.histories.iter().map(|of| of.samples()).collect::<Vec<_>>();
        // 16 windows of 0.33 ms are 5.28 ms: 4 % of a core earn them in 132 ms.
        let mut begins_after = |ms| {
            host.sleep(Duration::from_millis(ms));
            let begins = sampling.start_urgent(&host, &windows, &rows, fault);
            sampling.finish(&host);
            (begins, samples(&sampling))
        };
        let once = |first: usize, second: usize| [vec![1; first], vec![0; second]].concat();
        assert_eq!(begins_after(130), (false, once(0, 2 * URGENT_MOST)), "and the usual budget is not used");
        assert_eq!(begins_after(3), (true, once(URGENT_MOST, URGENT_MOST)));
        assert_eq!(begins_after(133), (true, once(2 * URGENT_MOST, 0)), "each has its turn");
        assert!(!sampling.start_urgent(&host, &[], &rows, fault), "no window is urgent any more");
    }

    /// A sensor that sees a touch of these windows alone, and needs a third of a millisecond for each.
    struct Partly {
        hot: std::ops::Range<u64>,
        sample: Vec<WindowIndex>,
    }

    impl AccessSampler for Partly {
        fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
            self.sample = windows.to_vec();
        }

        fn finish(&mut self, _: &dyn Host) -> AccessSample {
            let seen = |window: &WindowIndex| match self.hot.contains(&window.get()) {
                true => Seen::Touched,
                false => Seen::Untouched,
            };
            let rows: Vec<_> = self.sample.iter().map(|window| (*window, seen(window))).collect();
            let watched = |(window, seen): &(WindowIndex, Seen)| {
                (*window, Duration::from_millis(if *seen == Seen::Touched { 1 } else { 100 }))
            };
            let windows = std::mem::take(&mut self.sample).len() as u64;
            let cost = AccessCost { windows, events: 0, cpu: ACCESS_COST * windows as u32 };
            let watched_for = rows.iter().map(watched).collect();
            AccessSample { rows, watched_for, cost, ..AccessSample::default() }
        }
    }

    #[test]
    fn of_64_gib_each_window_has_a_result_of_the_last_minutes_at_half_a_per_cent_of_a_core() {
        const WINDOWS: usize = 32 << 10;
        const HOT: std::ops::Range<u64> = 10_000..14_000;
        let host = FakeHost::default();
        let windows: Vec<_> = (0..WINDOWS as u64).map(WindowIndex::new).collect();
        let mut rows = VmSnapshot::with_capacity(VmId(0), WINDOWS);
        windows.iter().for_each(|window| rows.push(WindowRow::new(*window, 512, Backing::Huge2M)));
        let limits = ShareLimits {
            budget: PerTenThousand::new(50),
            burst: Duration::ZERO,
            least: ACCESS_LEAST,
            most: ACCESS_MOST,
        };
        let share = Share::new(limits, ACCESS_COST, host.now()).beginning_with_nothing();
        let sampler = Box::new(Partly { hot: HOT, sample: Vec::new() });
        let sampling = AccessSampling::of_sampler(VmId(0), "access", sampler, windows.clone(), share);
        let shared = SharedAccess::new(sampling);
        let cost_of_minutes = |minutes: u32| {
            let mut sampling = shared.lock();
            for _ in 0..minutes * 60 {
                sampling.start_share(&host, &windows, &rows, false, FaultPrice::assumed(None));
                host.sleep(Duration::from_secs(1));
                sampling.finish(&host);
            }
            std::mem::take(&mut sampling.cost)
        };
        let filled = || {
            let mut filled: Vec<_> = (0..WINDOWS).map(|row| rows.get(row)).collect();
            shared.fill(&mut filled, host.now());
            filled
        };
        let cost = cost_of_minutes(1);
        assert!((850..=910).contains(&cost.windows), "{cost:?}");
        let after_a_minute = filled();
        assert!(after_a_minute.iter().all(|row| row.access.samples() > 0 && row.access_quality.age_s <= 60));
        let of_one_window = after_a_minute.iter().filter(|row| row.access_quality.windows == 1).count();
        assert!(of_one_window <= 910, "{of_one_window}: the others share the result of their region");
        // Half a per cent of ten minutes, and what was saved for a largest sample.
        let cost = cost_of_minutes(10);
        assert!(cost.cpu <= Duration::from_millis(3_000 + 20), "{cost:?}");
        let is_right = |row: &&WindowRow| row.access.was_touched() == Some(HOT.contains(&row.window.get()));
        let right = filled().iter().filter(is_right).count();
        assert!(right >= WINDOWS * 99 / 100, "{right}");
        // Fewer windows, as after a balloon took most of them: each is sampled again.
        shared.lock().start_share(&host, &windows[..1_000], &rows, false, FaultPrice::assumed(None));
        assert!(shared.lock().regions.is_none());
    }

    #[test]
    fn a_sensor_that_has_ended_is_reported_once_with_its_reason_and_not_used_again() {
        let (host, windows) = (FakeHost::default(), vec![WindowIndex::new(0)]);
        let limits = ShareLimits {
            budget: PerTenThousand::ALL,
            burst: Duration::from_secs(1),
            least: ACCESS_LEAST,
            most: ACCESS_MOST,
        };
        let share = Share::new(limits, ACCESS_COST, host.now());
        let mut sampling = AccessSampling::of_sampler(VmId(3), "access", Box::new(Ended), windows.clone(), share);
        let mut report = ManagerReport::new("never", &[]);
        let mut rows = VmSnapshot::with_capacity(VmId(3), 1);
        rows.push(WindowRow::new(windows[0], 512, Backing::Base4K));
        for _ in 0..2 {
            sampling.finish(&host);
            sampling.tell(&mut report);
            sampling.start_share(&host, &windows, &rows, true, FaultPrice::assumed(None));
        }
        let told = "vm 3: which windows are used, from then on: read of a userfaultfd: i/o error";
        assert_eq!(report.unanswered, [told]);
    }
}
