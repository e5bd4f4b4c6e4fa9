//! The slower sensors of one VM. Each runs as often as its budget allows, and only if the policy asks for it.
//! Access, zero pages and writes are sampled for a rotating share of the windows; the guest's own tables are read
//! whole but rarely.
//!
//! ```text
//!   tick:  finish ──▶ sense (host backing, all windows) ──▶ decide ──▶ act ──▶ start
//!            │ what was touched or written since                                 │ the next share goes aside, or is logged
//!            └───────────────── between two ticks the guest runs ────────────────┘
//! ```
//!
//! A window that is aside looks unbacked, and a slot that is logged looks held, so no sample is under way while the
//! loop senses and acts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use wideleaf_policies::policy::Needs;
use wideleaf_policies::rotation::{Rotation, TouchFrequency};
use wideleaf_policies::{
    AccessHistory, Backing, GuestMapping, Moment, PageSize, PerTenThousand, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use super::refills::Refills;
use super::{ManagedVm, ManagerReport};
use crate::actuators::swap::Swapper;
use crate::aside::WindowMover;
use crate::backing::BackingKind;
use crate::host::Host;
use crate::mover::ASIDE_SLOTS;
use crate::region::{GuestRam, RamRange};
use crate::second_level::SecondLevel;
use crate::sensors::access::{AccessConfig, AccessCost, AccessSampler, AccessSensor, Seen};
use crate::sensors::damon::DamonSensor;
use crate::sensors::guest_tables::{NoTables, OwnTables, TableSource, Walked};
use crate::sensors::minor_faults::MinorFaultSensor;
use crate::sensors::share::{Share, ShareLimits};
use crate::sensors::written::WriteSensor;
use crate::sensors::zero_pages::window_zero_pages;

/// Part of a core that all samples of one VM may use: twenty VMs on a host cost a tenth of a core. At a third of a
/// millisecond for each window that is 15 windows a second. The guest's losses count too ([`Refills`]).
pub(super) const SAMPLING_BUDGET: PerTenThousand = PerTenThousand::new(50);

/// Core time that the access samples of one VM may use beyond that when much is new, as after a change of phase. That
/// is 300 windows, or 600 MiB of RAM, at once. It is earned back in twenty seconds.
pub(super) const SAMPLING_BURST: Duration = Duration::from_millis(100);

/// Assumed cost of taking a window aside and bringing it back, before it is measured.
const ACCESS_COST: Duration = Duration::from_micros(330);
/// Minimum number of windows in a sample; fewer are not worth the switch to another thread and back.
const ACCESS_LEAST: usize = 4;
/// A burst starts when at least one in `NEWS_IN` sampled windows, and at least `ACCESS_LEAST`, is small and is new or
/// has changed. The minimum is there since a guest at rest touches a few windows now and then.
const NEWS_IN: usize = 4;
/// Maximum number of windows in a sample, since each costs the guest a wait; half of the slots, since swaps
/// need slots too.
const ACCESS_MOST: usize = ASIDE_SLOTS as usize / 2;

/// Assumed cost of a search for zero pages before it is measured: 0.7 ms where all is zero, microseconds
/// in ordinary memory.
const ZERO_COST: Duration = Duration::from_micros(100);
const ZERO_LEAST: usize = 1;
/// 64 windows full of zeroes, found at once, take 45 ms of the loop's thread.
const ZERO_MOST: usize = 64;

/// Assumed cost of a slot's interval before it is measured: a thousand written pages.
const WRITTEN_COST: Duration = Duration::from_millis(22);
/// Cost of the first write to each page of a logged slot, a fault: 22 us on the build machine.
const WRITE_FAULT: Duration = Duration::from_micros(22);
/// Maximum number of slots logged at the same time.
const WRITTEN_MOST: usize = 2;

/// Work of a sensor, and its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SensorCost {
    /// Number of samples.
    pub samples: u64,
    /// Number of windows sampled.
    pub windows: u64,
    /// Windows of the latest sample: the share that the budget allowed then.
    pub latest_windows: u64,
    /// Number of ticks without a sample because the budget did not pay for one.
    pub ticks_without: u64,
    /// Number of times it skipped memory because its giant was being moved; not a failure, and tried again later.
    pub claimed: u64,
    /// Number of times the guest waited: touches of windows that were aside, first writes to logged pages, pauses.
    pub waits: u64,
    /// CPU time in the manager's thread.
    pub cpu: Duration,
}

impl SensorCost {
    fn add_sample(&mut self, windows: u64, waits: u64, cpu: Duration) {
        self.samples += 1;
        self.windows += windows;
        self.latest_windows = windows;
        self.waits += waits;
        self.cpu += cpu;
    }
}

/// Work and cost of the slower sensors, by name.
pub type SensorCosts = BTreeMap<&'static str, SensorCost>;

/// The slower sensors of one VM and their latest values, by row of its snapshot.
pub(super) struct Sampling {
    windows: Vec<WindowIndex>,
    /// Pages present at the latest tick, by row.
    resident: Vec<u16>,
    access: Option<SharedAccess>,
    zero: Option<ZeroSampling>,
    written: Option<WrittenSampling>,
    guest_tables: Option<GuestTables>,
}

/// Access sensor of a VM, shared with callers that need every window in its place.
#[derive(Clone)]
pub(super) struct SharedAccess(Arc<AccessAndSwaps>);

struct AccessAndSwaps {
    /// Shared by swaps, exclusive for callers that need every window in its place. Taken before `sampling`.
    swaps: RwLock<()>,
    sampling: Mutex<AccessSampling>,
}

/// While this exists, no window is aside or on its way.
pub(super) struct InPlace<'a> {
    sampling: MutexGuard<'a, AccessSampling>,
    _no_swap: RwLockWriteGuard<'a, ()>,
}

impl SharedAccess {
    fn new(sampling: AccessSampling) -> SharedAccess {
        SharedAccess(Arc::new(AccessAndSwaps { swaps: RwLock::default(), sampling: Mutex::new(sampling) }))
    }

    /// Brings every window back. No window is aside while the returned value exists.
    pub(super) fn in_place(&self, host: &dyn Host) -> InPlace<'_> {
        let no_swap = self.0.swaps.write().unwrap_or_else(PoisonError::into_inner);
        let mut sampling = self.lock();
        sampling.finish(host);
        InPlace { sampling, _no_swap: no_swap }
    }

    /// Swappers, one for each thread. `None` where windows are not moved.
    pub(super) fn swappers(&self, threads: u16) -> Option<Vec<Swapper>> {
        Some(Swapper::several(self.lock().mover.as_ref()?.aside(), threads))
    }

    /// Calls `swap` while no caller needs every window in its place. Several threads may swap at the same time.
    pub(super) fn unseen<T>(&self, swap: impl FnOnce() -> T) -> T {
        let _turn = self.0.swaps.read().unwrap_or_else(PoisonError::into_inner);
        swap()
    }

    fn lock(&self) -> MutexGuard<'_, AccessSampling> {
        // A thread that panicked half-way leaves windows aside. The mover brings them back, and no
        // sample reports them.
        self.0.sampling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct AccessSampling {
    vm: VmId,
    /// Name in reports, which says whether it sees every touch.
    name: &'static str,
    // Dropped before the mover: it brings back the windows that it took.
    sampler: Box<dyn AccessSampler>,
    /// Moves windows for samples and swaps; `None` where windows are not moved.
    mover: Option<WindowMover>,
    rotation: Rotation,
    share: Share,
    windows: Vec<WindowIndex>,
    histories: Vec<AccessHistory>,
    frequencies: Vec<TouchFrequency>,
    /// Number of windows that could be sampled at the latest start.
    backed: usize,
    /// Those of them that were on base pages.
    small: Vec<WindowIndex>,
    is_under_way: bool,
    /// Whether the report already says why the sensor has ended.
    is_end_told: bool,
    /// Cost that is not reported yet.
    cost: SensorCost,
    failures: u64,
    refills: Refills,
}

struct ZeroSampling {
    ram: Arc<GuestRam>,
    rotation: Rotation,
    share: Share,
    pages: Vec<Option<u16>>,
}

struct WrittenSampling {
    second_level: Arc<dyn SecondLevel>,
    sensor: WriteSensor,
    share: Share,
    /// Number of slots with a running interval.
    slots: usize,
    began_cpu: Duration,
    pages: Vec<Option<u16>>,
}

struct GuestTables {
    source: Arc<dyn TableSource>,
    next_at: Moment,
    mappings: Vec<GuestMapping>,
}

/// Known values of every row beside its host backing. No window goes aside while this exists.
pub(super) struct Columns<'a> {
    sampling: &'a Sampling,
    access: Option<MutexGuard<'a, AccessSampling>>,
}

/// A question of a policy that no sensor here can answer.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub question: &'static str,
    pub why: String,
}

impl Unanswered {
    /// Line for the report.
    pub(super) fn line(&self, vm: VmId) -> String {
        format!("{vm}: {}: {}", self.question, self.why)
    }
}

impl Sampling {
    /// Starts the sensors that `needs` names and that this VM and host have. Each missing one adds a line to
    /// `unanswered`. All together use at most `budget` of a core, except for bursts of the access sensor.
    pub(super) fn new(
        host: &Arc<dyn Host>,
        vm: &ManagedVm,
        needs: Needs,
        budget: (PerTenThousand, Duration),
        unanswered: &mut Vec<String>,
    ) -> Sampling {
        let windows: Vec<_> = vm.ranges.iter().flat_map(|range| range.gpa.windows()).collect();
        let resident = vec![0; windows.len()];
        let mut sampling = Sampling { windows, resident, access: None, zero: None, written: None, guest_tables: None };
        let missing = sampling.start_sensors(host, vm, needs, budget);
        unanswered.extend(missing.iter().map(|missing| missing.line(vm.id)));
        sampling
    }

    /// Starts the sensors that `needs` names and that are not running yet. Returns those that are not available here.
    pub(super) fn start_sensors(
        &mut self,
        host: &Arc<dyn Host>,
        vm: &ManagedVm,
        needs: Needs,
        (budget, burst): (PerTenThousand, Duration),
    ) -> Vec<Unanswered> {
        let (rows, budget) = (self.windows.len(), part_of_each(budget, needs));
        let share = |least, most, cost, burst| Share::new(ShareLimits { budget, burst, least, most }, cost, host.now());
        let mut missing = Vec::new();
        let mut told = |question, why| missing.push(Unanswered { question, why });
        if needs.access && self.access.is_none() {
            let share = share(ACCESS_LEAST, ACCESS_MOST, ACCESS_COST, burst).beginning_with_the_least();
            let access = AccessSampling::start(host, vm, self.windows.clone(), share);
            self.access = access.map(SharedAccess::new).map_err(|why| told("which windows are used", why)).ok();
        }
        if needs.zero && self.zero.is_none() {
            let zero = ZeroSampling::start(vm, rows, share(ZERO_LEAST, ZERO_MOST, ZERO_COST, Duration::ZERO));
            self.zero = zero.map_err(|why| told("which pages are zero", why)).ok();
        }
        if needs.written && self.written.is_none() {
            let written = WrittenSampling::start(vm, rows, share(1, WRITTEN_MOST, WRITTEN_COST, Duration::ZERO));
            self.written = written.map_err(|why| told("which pages are written", why)).ok();
        }
        if needs.guest_mapping && self.guest_tables.is_none() {
            let tables = GuestTables::start(vm, rows);
            self.guest_tables = tables.map_err(|why| told("which pages the guest itself uses", why)).ok();
        }
        missing
    }

    /// Ends the sensors that `needs` does not name, none of which is at work. The others share the budget from now on.
    pub(super) fn keep_sensors(&mut self, needs: Needs, budget: PerTenThousand) {
        let Sampling { access, zero, written, guest_tables, .. } = self;
        access.take_if(|_| !needs.access);
        zero.take_if(|_| !needs.zero);
        written.take_if(|_| !needs.written);
        guest_tables.take_if(|_| !needs.guest_mapping);
        let budget = part_of_each(budget, needs);
        access.iter().for_each(|access| access.lock().share.set_budget(budget));
        zero.iter_mut().for_each(|zero| zero.share.set_budget(budget));
        written.iter_mut().for_each(|written| written.share.set_budget(budget));
    }

    /// Ends all samples under way. Afterwards every window is where the guest sees it, and no slot is logged
    /// for a sample.
    pub(super) fn finish(&mut self, host: &dyn Host, report: &mut ManagerReport) {
        if let Some(written) = &mut self.written {
            written.finish(host, &self.windows, report);
        }
        if let Some(access) = &self.access {
            access.in_place(host).sampling.tell(report);
        }
    }

    /// Forgets all values: they belong to another guest. No sample is under way. The cost of samples and the time of
    /// the next ones stay.
    pub(super) fn forget(&mut self) {
        let Sampling { windows: _, resident, access, zero, written, guest_tables } = self;
        resident.fill(0);
        access.iter().for_each(|access| access.lock().forget());
        zero.iter_mut().for_each(|zero| zero.pages.fill(None));
        written.iter_mut().for_each(|written| written.pages.fill(None));
        guest_tables.iter_mut().for_each(|tables| tables.mappings.fill(GuestMapping::Unknown));
    }

    /// Access sensor, if there is one.
    pub(super) fn access(&self) -> Option<SharedAccess> {
        self.access.clone()
    }

    /// Runs the sensors that are due and begins the next samples. `rows` is the snapshot of this tick, `acted_on` the
    /// windows of its plan: the guest has just waited for them, and must not wait for a sample as well. A window that
    /// the guest is filling is not sampled either. It is plainly in use, but would count as idle if no touch were
    /// seen in the next moment.
    pub(super) fn start(
        &mut self,
        host: &dyn Host,
        vm: &ManagedVm,
        rows: &VmSnapshot,
        acted_on: &BTreeSet<WindowIndex>,
        report: &mut ManagerReport,
    ) {
        let has_acted = !acted_on.is_empty();
        let mut backed = backed_by_pages_of_their_own(rows);
        if let Some(zero) = &mut self.zero {
            zero.look(host, vm, &backed, has_acted, &self.windows, report);
        }
        if let Some(tables) = &mut self.guest_tables {
            tables.look(host, &self.windows, report.sensor_costs.entry("guest_tables").or_default());
        }
        if let Some(written) = &mut self.written {
            written.start_slots(host, has_acted, report);
        }
        // Last, since a window that is aside cannot be scanned.
        if let Some(access) = &self.access {
            let is_settled =
                |window: &WindowIndex| rows.row(*window).is_some_and(|row| rows.resident[row] == self.resident[row]);
            backed.retain(|window| !acted_on.contains(window) && is_settled(window));
            access.lock().start_share(host, &backed, rows, has_acted);
        }
        self.resident.clone_from(&rows.resident);
    }

    /// Whether much is new, so that the next share should be sampled soon.
    pub(super) fn is_bursting(&self) -> bool {
        self.access.as_ref().is_some_and(|access| access.lock().share.is_bursting())
    }

    /// Known values of every row.
    pub(super) fn columns(&self) -> Columns<'_> {
        Columns { sampling: self, access: self.access.as_ref().map(SharedAccess::lock) }
    }
}

impl Columns<'_> {
    /// Completes a row by its values beside the host backing.
    pub(super) fn fill(&self, index: usize, row: WindowRow) -> WindowRow {
        let Sampling { zero, written, guest_tables, .. } = self.sampling;
        let is_present = row.backing != Backing::Unbacked;
        WindowRow {
            access: self.access.as_ref().map_or_else(AccessHistory::default, |access| access.histories[index]),
            // Pages may have gone since they were counted.
            zero: zero.as_ref().and_then(|zero| zero.pages[index]).filter(|zero| is_present && *zero <= row.resident),
            written: written.as_ref().and_then(|written| written.pages[index]).filter(|_| is_present),
            guest_mapping: guest_tables.as_ref().map_or(row.guest_mapping, |tables| tables.mappings[index]),
            ..row
        }
    }
}

impl AccessSampling {
    fn start(
        host: &Arc<dyn Host>,
        vm: &ManagedVm,
        windows: Vec<WindowIndex>,
        share: Share,
    ) -> Result<AccessSampling, String> {
        let ram = vm.ram.clone().ok_or("only RAM that is mapped in this process can be sampled")?;
        let (name, sampler, mover) = match exact_sampler(host, ram.clone()) {
            Ok((sampler, mover)) => ("access", sampler, mover),
            Err(exact) => ("access_damon", kernel_sampler(&ram).map_err(|why| format!("{exact}; {why}"))?, None),
        };
        // The kernel's monitor takes nothing aside.
        let refills = Refills::new(vm.second_level.as_ref().filter(|_| name == "access").map(|level| level.paging()));
        Ok(AccessSampling { mover, refills, ..AccessSampling::of_sampler(vm.id, name, sampler, windows, share) })
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
            refills: Refills::new(None),
            rotation: Rotation::default(),
            share,
            histories: vec![AccessHistory::default(); windows.len()],
            frequencies: vec![TouchFrequency::default(); windows.len()],
            windows,
            backed: 0,
            small: Vec::new(),
            is_under_way: false,
            is_end_told: false,
            cost: SensorCost::default(),
            failures: 0,
        }
    }

    fn forget(&mut self) {
        self.histories.fill(AccessHistory::default());
        self.frequencies.fill(TouchFrequency::default());
        self.small.clear();
        self.backed = 0;
    }

    /// Bursts are for windows that are still small, since their decisions come soon. For the others it is enough to
    /// learn in the end that they are idle.
    fn start_share(&mut self, host: &dyn Host, backed: &[WindowIndex], rows: &VmSnapshot, has_acted: bool) {
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
        let wanted = if self.share.is_bursting() { &self.small } else { backed };
        let share = self.rotation.next_share(wanted, self.share.next(host.now(), wanted.len()));
        if share.is_empty() {
            self.cost.ticks_without += u64::from(!backed.is_empty());
            return;
        }
        self.refills.expect(&share, rows);
        self.sampler.start(host, &share);
        self.is_under_way = true;
    }

    fn finish(&mut self, host: &dyn Host) {
        if !std::mem::take(&mut self.is_under_way) {
            return;
        }
        let sample = self.sampler.finish(host);
        let (mut unchanged, mut news) = (0, 0);
        let mut refilling = Duration::ZERO;
        let looked_at = sample.rows.len();
        for (window, seen) in sample.rows {
            let Ok(row) = self.windows.binary_search(&window) else { continue };
            let was_touched = match seen {
                Seen::Touched => true,
                Seen::Untouched => false,
                Seen::Unknown("refused" | "service_ended") => {
                    self.failures += 1;
                    continue;
                }
                Seen::Unknown(_) => continue,
            };
            if was_touched {
                refilling += self.refills.cost(window);
            }
            let is_small = self.small.binary_search(&window).is_ok();
            if is_small && self.histories[row].was_touched() != Some(was_touched) {
                news += 1;
                self.share.changed();
            } else {
                unchanged += 1;
            }
            let frequency = &mut self.frequencies[row];
            if let Some(watched_for) = sample.watched_for.get(&window) {
                frequency.add(was_touched, *watched_for);
            }
            self.histories[row] = self.histories[row].with(was_touched).with_touches_per_s(frequency.per_second());
        }
        self.share.unchanged_in_burst(unchanged, self.small.len());
        self.share.unchanged(unchanged, self.backed);
        if news >= ACCESS_LEAST && news * NEWS_IN >= looked_at {
            self.share.burst();
        }
        let AccessCost { windows, events, cpu } = sample.cost;
        self.share.paid(windows, cpu + refilling);
        self.cost.add_sample(windows, events, cpu);
    }

    /// Adds to the report what it does not have yet.
    fn tell(&mut self, report: &mut ManagerReport) {
        let SensorCost { samples, windows, latest_windows, ticks_without, claimed, waits, cpu } =
            std::mem::take(&mut self.cost);
        let cost = report.sensor_costs.entry(self.name).or_default();
        cost.samples += samples;
        cost.windows += windows;
        cost.latest_windows = if samples > 0 { latest_windows } else { cost.latest_windows };
        cost.ticks_without += ticks_without;
        cost.claimed += claimed;
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

/// The sensor that sees every touch; its kind depends on the backing.
fn exact_sampler(
    host: &Arc<dyn Host>,
    ram: Arc<GuestRam>,
) -> Result<(Box<dyn AccessSampler>, Option<WindowMover>), String> {
    match ram.backing().kind() {
        BackingKind::Anon => {
            let mover = WindowMover::start(host.clone(), ram).map_err(|error| error.to_string())?;
            let sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
            Ok((Box::new(sensor), Some(mover)))
        }
        BackingKind::Memfd | BackingKind::Hugetlb => {
            let door = |real| host.minor_faults_door(real);
            let sensor = MinorFaultSensor::start_through(door, ram, AccessConfig::default());
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

impl ZeroSampling {
    fn start(vm: &ManagedVm, rows: usize, share: Share) -> Result<ZeroSampling, String> {
        let ram = vm.ram.clone().ok_or("only RAM that is mapped in this process can be read")?;
        Ok(ZeroSampling { ram, rotation: Rotation::default(), share, pages: vec![None; rows] })
    }

    fn look(
        &mut self,
        host: &dyn Host,
        vm: &ManagedVm,
        backed: &[WindowIndex],
        has_acted: bool,
        windows: &[WindowIndex],
        report: &mut ManagerReport,
    ) {
        if has_acted {
            self.share.changed();
        }
        let cost = report.sensor_costs.entry("zero_pages").or_default();
        let share = self.rotation.next_share(backed, self.share.next(host.now(), backed.len()));
        if share.is_empty() {
            cost.ticks_without += u64::from(!backed.is_empty());
            return;
        }
        let began_cpu = host.thread_cpu_time();
        let mut unchanged = 0;
        for window in share.iter().copied() {
            let (Some(range), Ok(row)) = (range_of(vm, window), windows.binary_search(&window)) else { continue };
            let pages = match window_zero_pages(host, &self.ram, range, window) {
                Ok(zero) => Some(zero.pages()),
                Err(error) => {
                    tracing::warn!("{}: zero pages of {window}: {error}", vm.id);
                    *report.sensor_failures.entry("zero_pages").or_default() += 1;
                    None
                }
            };
            if self.pages[row] == pages {
                unchanged += 1;
            } else {
                self.share.changed();
            }
            self.pages[row] = pages;
        }
        self.share.unchanged(unchanged, backed.len());
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        self.share.paid(share.len() as u64, cpu);
        cost.add_sample(share.len() as u64, 0, cpu);
    }
}

impl WrittenSampling {
    fn start(vm: &ManagedVm, rows: usize, share: Share) -> Result<WrittenSampling, String> {
        let second_level = vm.second_level.clone().ok_or("a process has no dirty log")?;
        let sensor = WriteSensor::default();
        Ok(WrittenSampling {
            second_level,
            sensor,
            share,
            slots: 0,
            began_cpu: Duration::ZERO,
            pages: vec![None; rows],
        })
    }

    /// A slot that another part had claimed is not a failure: it is sampled another time.
    fn tell_claimed(&mut self, report: &mut ManagerReport) {
        if let claimed @ 1.. = self.sensor.take_claimed() {
            report.sensor_costs.entry("written").or_default().claimed += claimed;
        }
    }

    fn start_slots(&mut self, host: &dyn Host, has_acted: bool, report: &mut ManagerReport) {
        if has_acted {
            self.share.changed();
        }
        let all = self.second_level.slots().len();
        let slots = self.share.next(host.now(), all);
        if slots == 0 {
            report.sensor_costs.entry("written").or_default().ticks_without += u64::from(all > 0);
            return;
        }
        let began_cpu = host.thread_cpu_time();
        match self.sensor.begin(self.second_level.as_ref(), slots) {
            Ok(slots) => self.slots = slots,
            Err(error) => failed("written", &error, report),
        }
        self.tell_claimed(report);
        self.began_cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    }

    fn finish(&mut self, host: &dyn Host, windows: &[WindowIndex], report: &mut ManagerReport) {
        let slots = std::mem::take(&mut self.slots);
        if slots == 0 {
            return;
        }
        let began_cpu = host.thread_cpu_time();
        let rows = self.sensor.end(self.second_level.as_ref());
        let rows = rows.inspect_err(|error| failed("written", error, report)).unwrap_or_default();
        self.tell_claimed(report);
        let (mut faults, mut is_changed) = (0, false);
        for row in &rows {
            let Ok(index) = windows.binary_search(&row.window) else { continue };
            faults += u64::from(row.pages);
            is_changed |= self.pages[index].is_none_or(|before| (before > 0) != (row.pages > 0));
            self.pages[index] = Some(row.pages);
        }
        if is_changed {
            self.share.changed();
        } else {
            self.share.unchanged(slots, self.second_level.slots().len());
        }
        let cpu = self.began_cpu + host.thread_cpu_time().saturating_sub(began_cpu);
        let of_the_guest = WRITE_FAULT.saturating_mul(u32::try_from(faults).unwrap_or(u32::MAX));
        self.share.paid(slots as u64, cpu + of_the_guest);
        report.sensor_costs.entry("written").or_default().add_sample(rows.len() as u64, faults, cpu);
    }
}

impl Drop for WrittenSampling {
    fn drop(&mut self) {
        // A loop that is dropped half-way leaves no slot at 4 KiB. An error here can only mean the end of the VM.
        let _ = self.sensor.end(self.second_level.as_ref());
    }
}

fn failed(sensor: &'static str, error: &dyn std::error::Error, report: &mut ManagerReport) {
    tracing::warn!("{sensor}: {error}");
    *report.sensor_failures.entry(sensor).or_default() += 1;
}

impl GuestTables {
    fn start(vm: &ManagedVm, rows: usize) -> Result<GuestTables, String> {
        let source = match (&vm.guest_tables, &vm.ram, &vm.second_level) {
            (Some(source), ..) => Arc::clone(source),
            (None, None, _) => return Err("only RAM that is mapped in this process can be read".into()),
            (None, Some(_), None) => return Err("a process has no guest's tables".into()),
            (None, Some(ram), Some(second_level)) => {
                Arc::new(OwnTables { ram: ram.clone(), second_level: second_level.clone() })
            }
        };
        Ok(GuestTables { source, next_at: Moment::START, mappings: vec![GuestMapping::Unknown; rows] })
    }

    fn look(&mut self, host: &dyn Host, windows: &[WindowIndex], cost: &mut SensorCost) {
        let began_at = host.now();
        if began_at < self.next_at {
            return;
        }
        let began_cpu = host.thread_cpu_time();
        match self.source.sample() {
            Err(why @ NoTables::NotNow(_)) => tracing::debug!("the guest's tables: {why}"),
            Err(why @ (NoTables::NotThese(_) | NoTables::TooOld(_))) => {
                tracing::debug!("the guest's tables: {why}");
                self.mappings.fill(GuestMapping::Unknown);
            }
            Ok(Walked { tables, waits, cpu_elsewhere }) => {
                for (window, mapping) in tables.windows {
                    if let Ok(row) = windows.binary_search(&window) {
                        // A table that could not be read may map it.
                        let is_known = tables.is_complete || mapping != GuestMapping::Unmapped;
                        self.mappings[row] = if is_known { mapping } else { GuestMapping::Unknown };
                    }
                }
                let cpu = host.thread_cpu_time().saturating_sub(began_cpu) + cpu_elsewhere;
                cost.add_sample(windows.len() as u64, waits, cpu);
            }
        }
        // Elapsed time, not CPU time: the process that supplies the roots works as well, or makes the guest wait.
        let spent = host.now().since(began_at);
        let pause = spent.saturating_mul(PerTenThousand::ALL.get() / SAMPLING_BUDGET.get());
        self.next_at = host.now() + self.source.every().max(pause);
    }
}

/// The sensors that count windows share the budget; the guest's tables have a pace of their own.
fn part_of_each(budget: PerTenThousand, needs: Needs) -> PerTenThousand {
    let sharers = [needs.access, needs.zero, needs.written].into_iter().filter(|is_needed| *is_needed).count();
    PerTenThousand::new(budget.get() / sharers.max(1) as u32)
}

/// Windows that can be sampled one by one: those on a giant page can neither be taken aside nor given back.
fn backed_by_pages_of_their_own(rows: &VmSnapshot) -> Vec<WindowIndex> {
    let is_own = |row: &usize| !matches!(rows.backing[*row], Backing::Unbacked | Backing::Giant1G);
    (0..rows.len()).filter(is_own).map(|row| rows.windows[row]).collect()
}

fn range_of(vm: &ManagedVm, window: WindowIndex) -> Option<RamRange> {
    vm.ranges.iter().find(|range| range.gpa.contains(window.start())).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::FakeHost;
    use crate::sensors::access::AccessSample;

    /// A sensor with a userfaultfd that can no longer be read.
    struct Ended;

    impl AccessSampler for Ended {
        fn start(&mut self, _: &dyn Host, _: &[WindowIndex]) {
            panic!("a sensor that has ended is not asked");
        }

        fn finish(&mut self, _: &dyn Host) -> AccessSample {
            AccessSample { rows: Vec::new(), watched_for: BTreeMap::new(), cost: AccessCost::default() }
        }

        fn why_it_ended(&self) -> Option<String> {
            Some("read of a userfaultfd: i/o error".into())
        }
    }

    /// A sensor that sees no touch of any window of its sample.
    #[derive(Default)]
    struct Idle(Vec<WindowIndex>);

    impl AccessSampler for Idle {
        fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
            self.0 = windows.to_vec();
        }

        fn finish(&mut self, _: &dyn Host) -> AccessSample {
            let rows: Vec<_> =
                std::mem::take(&mut self.0).into_iter().map(|window| (window, Seen::Untouched)).collect();
            let cost = AccessCost { windows: rows.len() as u64, events: 0, cpu: Duration::ZERO };
            AccessSample { rows, watched_for: BTreeMap::new(), cost }
        }

        fn why_it_ended(&self) -> Option<String> {
            None
        }
    }

    #[test]
    fn a_burst_lasts_until_every_window_was_sampled_once_without_news() {
        const WINDOWS: usize = 4 * ACCESS_LEAST;
        let host = FakeHost::default();
        let windows: Vec<_> = (0..WINDOWS as u64).map(WindowIndex::new).collect();
        // A sample is a quarter of the windows, and costs nothing.
        let limits = ShareLimits {
            budget: PerTenThousand::ALL,
            burst: Duration::from_secs(1),
            least: ACCESS_LEAST,
            most: ACCESS_LEAST,
        };
        let share = Share::new(limits, ACCESS_COST, host.now());
        let mut sampling =
            AccessSampling::of_sampler(VmId(0), "access", Box::<Idle>::default(), windows.clone(), share);
        let mut rows = VmSnapshot::with_capacity(VmId(0), WINDOWS);
        windows.iter().for_each(|window| rows.push(WindowRow::new(*window, 512, Backing::Base4K)));
        let mut sample = || {
            sampling.start_share(&host, &windows, &rows, false);
            sampling.finish(&host);
            sampling.share.is_bursting()
        };
        // The first sample of each window is news: four samples, each of which restarts the burst. The next four
        // bring none, and the burst ends with the last of them.
        let bursting: Vec<bool> = (0..8).map(|_| sample()).collect();
        assert_eq!(bursting, [true, true, true, true, true, true, true, false]);
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
            sampling.start_share(&host, &windows, &rows, true);
        }
        let told = "vm 3: which windows are used, from then on: read of a userfaultfd: i/o error";
        assert_eq!(report.unanswered, [told]);
    }
}
