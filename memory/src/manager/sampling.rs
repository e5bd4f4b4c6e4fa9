//! The slower sensors of one VM. Each runs as often as its budget allows, and only if the policy asks for it.
//! Access, zero pages and writes are sampled for a rotating share of the windows; the guest's own tables are read
//! whole but rarely. A new sensor is one file, and one line in [`SENSORS`].
//!
//! ```text
//!   tick:  finish ─▶ sense (host backing, all windows) ─▶ decide ─▶ act ─▶ start
//!            │ what was touched or written since                             │ the next share goes aside, or is logged
//!            └─────────────── between two ticks the guest runs ──────────────┘
//! ```
//!
//! A window that is aside looks unbacked, and a slot that is logged looks held, so no sample is under way while the
//! loop senses and acts.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::{Backing, Moment, PerTenThousand, VmId, VmSnapshot, WindowIndex, WindowRow};

use super::fault_price::{FaultMeter, FaultPrice};
use super::managed_vm::ManagedVm;
use super::report::ManagerReport;
use crate::host::Host;
use crate::kernel::Kernel;
use crate::second_level::SecondLevelError;
use crate::sensors::share::{Share, ShareLimits};

mod access;
mod guest_clock;
mod guest_ran;
mod guest_tables;
mod outside_heat;
mod urgent_turns;
mod written;
mod zero;

pub(super) use access::SharedAccess;
use guest_clock::GuestClock;

/// Part of a core that all samples of one VM may use: twenty VMs on a host cost a tenth of a core. At a third of a
/// millisecond for each window that is 15 windows a second. The guest's losses count too
/// ([`RefaultCost`](super::refault_cost::RefaultCost)).
pub(super) const SAMPLING_BUDGET: PerTenThousand = PerTenThousand::new(50);

/// Core time that the access samples of one VM may use beyond that when much is new, as after a change of phase. That
/// is 300 windows, or 600 MiB of RAM, at once. It is earned in twenty seconds, also at first: a guest that ends earlier
/// never gains as much by what the samples say.
pub(super) const SAMPLING_BURST: Duration = Duration::from_millis(100);

/// All slower sensors, in the order in which they start and in which reports name the missing ones.
const SENSORS: [&Kind; 4] = [&access::KIND, &zero::KIND, &written::KIND, &guest_tables::KIND];

/// A kind of slower sensor.
struct Kind {
    /// What the policy learns from it, for reports.
    question: &'static str,
    /// Position among the sensors that begin and end their samples at a tick.
    turn: u8,
    /// Whether a policy with these needs asks for it.
    is_needed: fn(&Needs) -> bool,
    /// Whether it uses an equal part of the budget. A sensor with a pace of its own does not.
    shares_budget: bool,
    /// Whether the guest pays second-level faults for its samples.
    causes_faults: bool,
    /// Starts the sensor, or says why this VM or host cannot have it.
    start: fn(&Starting<'_>) -> Result<Box<dyn SlowSensor>, String>,
}

/// Everything that a sensor needs when it starts.
struct Starting<'a> {
    host: &'a Arc<dyn Kernel>,
    vm: &'a ManagedVm,
    /// All windows of the VM, by row.
    windows: &'a [WindowIndex],
    /// Part of a core for this sensor.
    budget: PerTenThousand,
    /// Core time for bursts beyond the budget.
    burst: Duration,
}

/// Everything that a sensor needs at the end of a tick, when it runs or begins its next sample.
struct EndOfTick<'a> {
    host: &'a dyn Host,
    vm: &'a ManagedVm,
    /// All windows of the VM, by row.
    windows: &'a [WindowIndex],
    /// Snapshot of this tick.
    rows: &'a VmSnapshot,
    /// Windows that can be sampled one by one.
    backed: &'a [WindowIndex],
    /// Use of a sample of the accesses to each of some windows, given by row.
    wishes: &'a dyn Fn(&[usize]) -> Vec<Wish>,
    /// Whether counts of zero pages are of use.
    uses_zero: bool,
    /// Whether the host has no huge page for all that ask.
    is_short: bool,
    /// Windows of the plan: the guest has just waited for them, and must not wait for a sample as well.
    acted_on: &'a BTreeSet<WindowIndex>,
    /// Pages present at the tick before, by row.
    resident_before: &'a [u16],
    /// Price of a second-level fault of this VM.
    fault: FaultPrice,
}

/// Use of samples for the policy, and their limits.
#[derive(Clone, Copy)]
pub(super) struct Wishes<'a> {
    /// Of the accesses to each of some windows, given by row: all at once, since the policy is locked for it.
    pub access: &'a dyn Fn(&[usize]) -> Vec<Wish>,
    /// Whether counts of zero pages are of use.
    pub uses_zero: bool,
    /// Whether the host has no huge page for all that ask: samples must not ask for more.
    pub is_short: bool,
}

/// Use of one more sample of a window for the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// It changes no decision.
    Useless,
    /// It is of use.
    Useful,
    /// It is worth more than the usual budget.
    Urgent,
}

impl Wish {
    /// Of a sample of the accesses to a row.
    pub(super) fn of(policy: &dyn Policy, rows: &VmSnapshot, row: usize) -> Wish {
        match policy.uses_access(rows, row) {
            true if policy.hurries(rows, row) => Wish::Urgent,
            true => Wish::Useful,
            false => Wish::Useless,
        }
    }
}

/// A sensor that does not run at every tick. It keeps its latest values, by row of the VM's snapshot.
trait SlowSensor: Send {
    /// Runs, or begins the next sample, if it is due.
    fn start(&mut self, tick: &EndOfTick<'_>, report: &mut ManagerReport);

    /// Ends the sample that is under way, if any. Afterwards every window is where the guest sees it, and no slot is
    /// logged for a sample.
    fn finish(&mut self, _host: &dyn Host, _windows: &[WindowIndex], _report: &mut ManagerReport) {}

    /// Completes all rows of a snapshot, taken now, by the latest values.
    fn fill(&self, rows: &mut [WindowRow], now: Moment);

    /// Forgets all values: they belong to another guest. No sample is under way. The cost of samples and the time of
    /// the next ones stay.
    fn forget(&mut self);

    /// Takes note of the guest's clock, at each tick at which that stands still and at the one after. The sensor is not
    /// started at those.
    fn follow(&mut self, _clock: GuestClock) {}

    /// Continues with this part of a core.
    fn set_budget(&mut self, _budget: PerTenThousand) {}

    /// Whether much is new, so that the next share should be sampled soon.
    fn is_bursting(&self) -> bool {
        false
    }

    /// Whether windows wait for an urgent sample that could begin now.
    fn is_urgent(&self, _now: Moment) -> bool {
        false
    }

    /// Mappings of windows that came back because the guest touched them, since the last call.
    fn take_refilled(&mut self) -> u64 {
        0
    }

    /// The access sensor itself, if it is that.
    fn access(&self) -> Option<SharedAccess> {
        None
    }
}

/// The slower sensors of one VM.
pub(super) struct Sampling {
    windows: Vec<WindowIndex>,
    /// Pages present at the latest tick, by row.
    resident: Vec<u16>,
    /// The running sensors with their kinds, by turn.
    sensors: Vec<(&'static Kind, Box<dyn SlowSensor>)>,
    /// Price of a second-level fault of this VM.
    fault_meter: FaultMeter,
    /// Whether KVM counts the faults of this VM.
    counts_faults: bool,
    clock: GuestClock,
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

impl Starting<'_> {
    /// Share of the windows that one sample has: between `least` and `most` windows, each expected to cost `cost`.
    fn share(&self, least: usize, most: usize, cost: Duration, burst: Duration) -> Share {
        Share::new(ShareLimits { budget: self.budget, burst, least, most }, cost, self.host.now())
    }
}

impl EndOfTick<'_> {
    fn has_acted(&self) -> bool {
        !self.acted_on.is_empty()
    }

    /// Windows with accesses that the policy would use. The guest has not waited for them at this tick, nor fills them.
    /// A window that it is filling is plainly in use, but would count as idle if no touch were seen in the next moment.
    /// Returns all of them, and those that are urgent.
    fn to_sample(&self) -> (Vec<WindowIndex>, Vec<WindowIndex>) {
        let is_settled = |row: &usize| self.rows.resident[*row] == self.resident_before[*row];
        let rested = self.backed.iter().filter(|window| !self.acted_on.contains(window));
        let settled: Vec<_> = rested.filter_map(|window| self.rows.row(*window)).filter(is_settled).collect();
        let wishes = (self.wishes)(&settled);
        let those = |is_one: fn(Wish) -> bool| {
            let some = settled.iter().zip(&wishes).filter(|(_, wish)| is_one(**wish));
            some.map(|(row, _)| self.rows.windows[*row]).collect()
        };
        (those(|wish| wish != Wish::Useless), those(|wish| wish == Wish::Urgent))
    }
}

impl Sampling {
    /// Starts the sensors that `needs` names and that this VM and host have. Each missing one adds a line to
    /// `unanswered`. All together use at most `budget` of a core, except for bursts of the access sensor.
    pub(super) fn new(
        host: &Arc<dyn Kernel>,
        vm: &ManagedVm,
        needs: Needs,
        budget: (PerTenThousand, Duration),
        unanswered: &mut Vec<String>,
    ) -> Sampling {
        let windows: Vec<_> = vm.ranges.iter().flat_map(|range| range.gpa.windows()).collect();
        let mut sampling = Sampling {
            resident: vec![0; windows.len()],
            windows,
            sensors: Vec::new(),
            fault_meter: FaultMeter::new(vm.second_level.as_ref().map(|kvm| kvm.paging())),
            counts_faults: vm.second_level.is_some(),
            clock: GuestClock::default(),
        };
        let missing = sampling.start_sensors(host, vm, needs, budget);
        unanswered.extend(missing.iter().map(|missing| missing.line(vm.id)));
        sampling
    }

    /// Starts the sensors that `needs` names and that are not running yet. Returns those that are not available here.
    pub(super) fn start_sensors(
        &mut self,
        host: &Arc<dyn Kernel>,
        vm: &ManagedVm,
        needs: Needs,
        (budget, burst): (PerTenThousand, Duration),
    ) -> Vec<Unanswered> {
        let starting = Starting { host, vm, windows: &self.windows, budget: part_of_each(budget, needs), burst };
        let mut missing = Vec::new();
        for kind in SENSORS {
            let is_running = self.sensors.iter().any(|(running, _)| running.turn == kind.turn);
            if is_running || !(kind.is_needed)(&needs) {
                continue;
            }
            match (kind.start)(&starting) {
                Ok(sensor) => self.sensors.push((kind, sensor)),
                Err(why) => missing.push(Unanswered { question: kind.question, why }),
            }
        }
        self.sensors.sort_by_key(|(kind, _)| kind.turn);
        missing
    }

    /// Ends the sensors that `needs` does not name, none of which is at work. The others share the budget from now on.
    pub(super) fn keep_sensors(&mut self, needs: Needs, budget: PerTenThousand) {
        self.sensors.retain(|(kind, _)| (kind.is_needed)(&needs));
        let budget = part_of_each(budget, needs);
        self.sensors.iter_mut().for_each(|(_, sensor)| sensor.set_budget(budget));
    }

    /// Ends all samples under way. Afterwards every window is where the guest sees it, and no slot is logged
    /// for a sample.
    pub(super) fn finish(&mut self, host: &dyn Host, report: &mut ManagerReport) {
        for (_, sensor) in &mut self.sensors {
            sensor.finish(host, &self.windows, report);
        }
    }

    /// Forgets all values: they belong to another guest. No sample is under way. The cost of samples and the time of
    /// the next ones stay.
    pub(super) fn forget(&mut self) {
        self.resident.fill(0);
        self.sensors.iter_mut().for_each(|(_, sensor)| sensor.forget());
    }

    /// Takes note, at the begin of a tick, of whether the guest is paused. While it is, nothing that samples tell grows
    /// older.
    pub(super) fn note_pause(&mut self, is_paused: bool, now: Moment) {
        if !is_paused && !self.clock.is_paused() {
            return;
        }
        self.clock.tick(is_paused, now);
        self.sensors.iter_mut().for_each(|(_, sensor)| sensor.follow(self.clock));
    }

    /// Whether no sample is to begin, because the guest is paused or has just gone on.
    pub(super) fn is_at_rest(&self, now: Moment) -> bool {
        self.clock.is_at_rest(now)
    }

    /// Access sensor, if there is one.
    pub(super) fn access(&self) -> Option<SharedAccess> {
        self.sensors.iter().find_map(|(_, sensor)| sensor.access())
    }

    /// Runs the sensors that are due and begins the next samples. `rows` is the snapshot of this tick, `acted_on` the
    /// windows of its plan. `wishes` says of what use samples are to the policy.
    pub(super) fn start(
        &mut self,
        host: &dyn Host,
        vm: &ManagedVm,
        rows: &VmSnapshot,
        wishes: Wishes<'_>,
        acted_on: &BTreeSet<WindowIndex>,
        report: &mut ManagerReport,
    ) {
        self.measure_faults(vm, rows, report);
        let (backed, fault) = (backed_by_pages_of_their_own(rows), self.fault_meter.price());
        let Sampling { windows, resident, sensors, .. } = self;
        let Wishes { access, uses_zero, is_short } = wishes;
        let tick = EndOfTick {
            host,
            vm,
            windows,
            rows,
            backed: &backed,
            wishes: access,
            uses_zero,
            is_short,
            acted_on,
            resident_before: resident,
            fault,
        };
        sensors.iter_mut().for_each(|(_, sensor)| sensor.start(&tick, report));
        resident.clone_from(&rows.resident);
    }

    /// Measures the price of the faults since the latest tick, where a sensor has to know it.
    fn measure_faults(&mut self, vm: &ManagedVm, rows: &VmSnapshot, report: &mut ManagerReport) {
        let Some(kvm) = vm.second_level.as_ref().filter(|_| self.sensors.iter().any(|(kind, _)| kind.causes_faults))
        else {
            return;
        };
        if self.counts_faults {
            let new_pages = rows.resident.iter().zip(&self.resident);
            let new_pages = new_pages.map(|(now, before)| u64::from(now.saturating_sub(*before))).sum();
            let refilled = self.sensors.iter_mut().map(|(_, sensor)| sensor.take_refilled()).sum();
            match kvm.fault_counters() {
                Ok(counters) => self.fault_meter.record(counters, new_pages, refilled),
                Err(why @ SecondLevelError::NoSuchStatistic(_)) => {
                    tracing::debug!("{}: faults keep their assumed price: {why}", vm.id);
                    self.counts_faults = false;
                }
                Err(error) => {
                    tracing::debug!("{}: price of a fault: {error}", vm.id);
                    self.fault_meter.forget_latest();
                    *report.sensor_failures.entry("fault_price").or_default() += 1;
                }
            }
        }
        report.fault_prices.insert(vm.id, self.fault_meter.price());
    }

    /// Whether much is new, so that the next share should be sampled soon.
    pub(super) fn is_bursting(&self) -> bool {
        self.sensors.iter().any(|(_, sensor)| sensor.is_bursting())
    }

    /// Whether windows wait for an urgent sample that could begin now.
    pub(super) fn is_urgent(&self, now: Moment) -> bool {
        self.sensors.iter().any(|(_, sensor)| sensor.is_urgent(now))
    }

    /// Completes all rows of a snapshot by their known values beside the host backing.
    pub(super) fn fill(&self, rows: &mut [WindowRow], now: Moment) {
        self.sensors.iter().for_each(|(_, sensor)| sensor.fill(rows, now));
    }
}

/// The sensors that count windows share the budget; one with a pace of its own does not.
fn part_of_each(budget: PerTenThousand, needs: Needs) -> PerTenThousand {
    let sharers = SENSORS.iter().filter(|kind| kind.shares_budget && (kind.is_needed)(&needs)).count();
    PerTenThousand::new(budget.get() / sharers.max(1) as u32)
}

/// Windows that can be sampled one by one: those on a giant page can neither be taken aside nor given back.
fn backed_by_pages_of_their_own(rows: &VmSnapshot) -> Vec<WindowIndex> {
    let is_own = |row: &usize| !matches!(rows.backing[*row], Backing::Unbacked | Backing::Giant1G);
    (0..rows.len()).filter(is_own).map(|row| rows.windows[row]).collect()
}
