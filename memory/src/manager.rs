//! The loop: sense → decide → act → check, for all VMs of a host, in a thread of its own.
//!
//! ```text
//!        ┌────────────────────────────── tick ──────────────────────────────┐
//!        │ sense    host backing per window, slot states, KVM's totals      │
//!        │ decide   Policy::plan within the budget                          │
//!        │ act      one action at a time, no lock held, stop flag between   │
//!        │ check    host backing of that window at once (in the actuator),  │
//!        │          KVM's totals at the next tick: they rise on re-touch    │
//!        └───────────────────────────────────────────────────────────────────┘
//!   nothing done? the next tick comes after twice the time, up to `tick_longest`; something done: after `tick_shortest`
//! ```
//!
//! Nothing that fails ends the loop: it is counted under its own name, and the window or the sensor is asked again
//! later.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hdrhistogram::Histogram;
use wideleaf_policies::account::{self, HostBacking};
use wideleaf_policies::policy::Needs;
use wideleaf_policies::recording::TooManyWindows;
use wideleaf_policies::window::WindowState;
use wideleaf_policies::{
    Action, Backing, Budget, BudgetLimits, Bytes, HostMemory, MappingStats, Moment, Outcome, OutcomeResult, PageSize,
    Plan, PlannedAction, Policy, Refusal, Skip, Snapshot, VmId, VmSnapshot, WindowIndex, WindowRow,
};

use crate::actuators::collapse::collapse_window;
use crate::actuators::hold::{Hold, hold_cost, set_hold};
use crate::actuators::release::release_window;
use crate::actuators::swap::{Swap, Swapper};
use crate::backing::BackingConfig;
use crate::first_touch::{FirstTouch, FirstTouchError, FirstTouchReport};
use crate::host::Host;
use crate::recorder::{RecordTo, Recorder, RecorderReport};
use crate::region::{GuestRam, RamRange};
use crate::reserved_frames::{ReservedFrames, ReservedFramesError, ReservedFramesReport};
use crate::second_level::SecondLevel;
use crate::sensors::host_backing::HostBackingSensor;
use crate::sensors::host_memory::host_memory;

mod sampling;

use sampling::{Sampling, SharedAccess};
pub use sampling::{SensorCost, SensorCosts};

/// How the loop runs.
#[derive(Clone, Copy, Debug)]
pub struct ManagerConfig {
    /// What actions may cost, over all VMs.
    pub limits: BudgetLimits,
    /// Time to the next tick after one that did something.
    pub tick_shortest: Duration,
    /// Time to the next tick when nothing has happened for long.
    pub tick_longest: Duration,
}

impl Default for ManagerConfig {
    /// 10 ms while there is work: a fraction of the budget's burst, and ten times what sensing a gibibyte costs. One
    /// second when idle: a window that becomes resident waits at most that long.
    fn default() -> ManagerConfig {
        ManagerConfig {
            limits: BudgetLimits::default(),
            tick_shortest: Duration::from_millis(10),
            tick_longest: Duration::from_secs(1),
        }
    }
}

/// One VM under the manager, or one native kernel (which has no second level).
pub struct ManagedVm {
    /// Its name towards the policy.
    pub id: VmId,
    /// Where its RAM is.
    pub ranges: Vec<RamRange>,
    /// What backs its RAM.
    pub backing: BackingConfig,
    /// KVM's side, if there is one.
    pub second_level: Option<Arc<dyn SecondLevel>>,
    /// Keeps the mapping alive for as long as the manager may act on it; tests on a fake host have none.
    pub ram: Option<Arc<GuestRam>>,
}

impl ManagedVm {
    /// A VM whose RAM is `ram`.
    pub fn new(id: VmId, ram: Arc<GuestRam>, second_level: Option<Arc<dyn SecondLevel>>) -> ManagedVm {
        ManagedVm { id, ranges: ram.ranges().to_vec(), backing: ram.backing(), second_level, ram: Some(ram) }
    }
}

/// What was seen of one VM at one tick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When.
    pub at: Moment,
    /// Host backing of all its windows together.
    pub host: HostBacking,
    /// KVM's totals.
    pub mapping: Option<MappingStats>,
}

/// The second check of promotion: KVM's own totals. They rise only when the guest touches a window again, so what is
/// missing may still come; what is too much can not be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmCheck {
    /// Large mappings (2 MiB, or 1 GiB as 512 of them) at the first look.
    pub large_at_first: u64,
    /// The most there were at any later look.
    pub large_at_most: u64,
    /// Looks at which KVM had more large mappings than the host had large windows that are not held. KVM maps no
    /// window larger than its backing: such a look means that one of the two sensors is wrong. A difference of
    /// two is allowed, since the guest runs on between the two readings.
    pub contradictions: u64,
}

/// Everything the loop counted.
#[derive(Clone, Debug)]
pub struct ManagerReport {
    /// The policy's name.
    pub policy: &'static str,
    /// Ticks.
    pub ticks: u64,
    /// Actions by mechanism and result.
    pub outcomes: BTreeMap<(&'static str, &'static str), u64>,
    /// Sensors that failed, by name.
    pub sensor_failures: BTreeMap<&'static str, u64>,
    /// Times the budget said no.
    pub budget_refusals: u64,
    /// Guest memory copied by promotions.
    pub copied: Bytes,
    /// CPU time of the actions.
    pub action_cpu: Duration,
    /// CPU time of the whole loop, sensing and deciding included.
    pub total_cpu: Duration,
    /// How long each acted-on window was unavailable at most, in nanoseconds.
    pub unavailable_ns: Histogram<u64>,
    /// Became resident only because the page is large.
    pub bloat: Bytes,
    /// KVM's totals against the host's backing, by VM in the order given; `None` without a second level.
    pub kvm_checks: Vec<Option<KvmCheck>>,
    /// When the first action was done.
    pub first_done_at: Option<Moment>,
    /// When the last action was done.
    pub last_done_at: Option<Moment>,
    /// What was seen, by VM in the order given; at most [`SAMPLES_KEPT`] each, thinned out evenly.
    pub samples: Vec<(VmId, Vec<Sample>)>,
    /// What was decided at the fault, if the policy decides there.
    pub first_touch: Option<FirstTouchReport>,
    /// What was done with reserved frames, if the policy reserves some.
    pub reserved_frames: Option<ReservedFramesReport>,
    /// What became of the recording, if there is one.
    pub recording: Option<RecorderReport>,
    /// What the sensors that are not asked at every tick did, and what that cost.
    pub sensor_costs: SensorCosts,
    /// Questions of the policy that nothing here can answer, each with the reason.
    pub unanswered: Vec<String>,
    /// Memory the host got back.
    pub released: Bytes,
    /// What the policy counted of its own decisions.
    pub policy_figures: Vec<(&'static str, u64)>,
}

/// A window that was out of reach for longer is counted as this long: a minute is a hung host.
const UNAVAILABLE_NS_MAX: u64 = 60_000_000_000;

/// More samples than this say nothing more in a report; when reached, every second one is dropped.
pub const SAMPLES_KEPT: usize = 2048;

impl ManagerReport {
    fn new(policy: &'static str, vms: &[ManagedVm]) -> ManagerReport {
        ManagerReport {
            policy,
            ticks: 0,
            outcomes: BTreeMap::new(),
            sensor_failures: BTreeMap::new(),
            budget_refusals: 0,
            copied: Bytes::ZERO,
            action_cpu: Duration::ZERO,
            total_cpu: Duration::ZERO,
            unavailable_ns: Histogram::new_with_bounds(1, UNAVAILABLE_NS_MAX, 3).expect("the bounds are literals"),
            bloat: Bytes::ZERO,
            kvm_checks: vec![None; vms.len()],
            first_done_at: None,
            last_done_at: None,
            samples: vms.iter().map(|vm| (vm.id, Vec::new())).collect(),
            first_touch: None,
            reserved_frames: None,
            recording: None,
            sensor_costs: SensorCosts::new(),
            unanswered: Vec::new(),
            released: Bytes::ZERO,
            policy_figures: Vec::new(),
        }
    }

    /// How many actions of a mechanism were done.
    pub fn done(&self, mechanism: &str) -> u64 {
        self.outcomes.iter().filter(|((m, result), _)| *m == mechanism && *result == "done").map(|(_, n)| n).sum()
    }

    /// Bytes copied per second of the time the kernel's copying calls took.
    pub fn copy_bytes_per_second(&self) -> Option<f64> {
        let busy_ns: u64 =
            self.unavailable_ns.iter_recorded().map(|v| v.value_iterated_to() * v.count_at_value()).sum();
        (busy_ns > 0).then(|| self.copied.get() as f64 / (busy_ns as f64 / 1e9))
    }
}

/// Mechanisms an action is done with; the name is what reports count under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mechanism {
    Collapse,
    Swap,
    HoldAt4K,
    Recover,
    Release,
    None,
}

impl Mechanism {
    const fn name(self) -> &'static str {
        match self {
            Mechanism::Collapse => "collapse",
            Mechanism::Swap => "swap",
            Mechanism::HoldAt4K => "hold_at_4k",
            Mechanism::Recover => "recover",
            Mechanism::Release => "release",
            Mechanism::None => "none",
        }
    }
}

/// The swapping of one VM's windows, for as long as this host turns out to be able to.
struct Swaps {
    access: SharedAccess,
    swapper: Swapper,
    /// Refusals in a row that say that the kernel or the RAM is not made for it.
    refusals: u32,
}

/// So many such refusals in a row are no accident: a kernel before 6.14 keeps the page table and splits what is moved in.
const SWAP_REFUSALS_MAX: u32 = 3;

/// The loop plans with it, and the thread that answers first touches asks it. Locked for as long as it takes to decide
/// or to learn, never while anything is done.
type SharedPolicy = Arc<Mutex<Box<dyn Policy>>>;

/// A policy that panicked has ended the thread it panicked in; the other one goes on.
fn lock(policy: &SharedPolicy) -> MutexGuard<'_, Box<dyn Policy>> {
    policy.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The loop's state; [`Manager::spawn`] runs it in a thread, tests call [`ManagerLoop::tick`] themselves.
pub struct ManagerLoop {
    host: Arc<dyn Host>,
    vms: Vec<ManagedVm>,
    policy: SharedPolicy,
    config: ManagerConfig,
    budget: Budget,
    /// By VM in the order given, by row of its snapshot.
    states: Vec<Vec<WindowState>>,
    sensor: HostBackingSensor,
    plan: Plan,
    report: ManagerReport,
    recorder: Option<Recorder>,
    needs: Needs,
    /// By VM in the order given.
    sampling: Vec<Sampling>,
    /// By VM in the order given, where windows can be swapped.
    swaps: Vec<Option<Swaps>>,
    should_stop: Arc<AtomicBool>,
}

impl ManagerLoop {
    /// A loop over `vms` that has done nothing yet.
    pub fn new(
        host: Arc<dyn Host>,
        vms: Vec<ManagedVm>,
        policy: Box<dyn Policy>,
        config: ManagerConfig,
    ) -> ManagerLoop {
        let windows = |vm: &ManagedVm| vm.ranges.iter().map(|range| range.gpa.windows().len()).sum();
        let mut report = ManagerReport::new(policy.name(), &vms);
        // A policy that decides at the fault has the RAM's userfaultfd; nobody else can have one there.
        let needs = Needs { access: policy.needs().access && !policy.decides_at_first_touch(), ..policy.needs() };
        let sampling: Vec<_> = vms.iter().map(|vm| Sampling::new(&host, vm, needs, &mut report.unanswered)).collect();
        let swaps = |access: SharedAccess| Swaps { swapper: access.swapper(), access, refusals: 0 };
        let swaps = sampling.iter().map(|sampling| sampling.access().map(swaps)).collect();
        ManagerLoop {
            budget: Budget::new(config.limits, host.now()),
            states: vms.iter().map(|vm| vec![WindowState::Ready; windows(vm)]).collect(),
            report,
            needs,
            sampling,
            swaps,
            sensor: HostBackingSensor::default(),
            plan: Plan::default(),
            recorder: None,
            should_stop: Arc::default(),
            host,
            vms,
            policy: Arc::new(Mutex::new(policy)),
            config,
        }
    }

    /// The same loop, recorded from its first tick on.
    ///
    /// # Errors
    /// [`TooManyWindows`] where a recording does not hold so many.
    pub fn recorded(mut self, to: RecordTo) -> Result<ManagerLoop, TooManyWindows> {
        self.recorder = Some(Recorder::start(to, self.report.policy, self.config.limits, &self.vms)?);
        Ok(self)
    }

    /// The service for a policy that decides at the fault; `None` for all others.
    fn first_touch(&self) -> Result<Option<FirstTouch>, FirstTouchError> {
        if !lock(&self.policy).decides_at_first_touch() {
            return Ok(None);
        }
        let mapped = |vm: &ManagedVm| Ok((vm.id, vm.ram.clone().ok_or(FirstTouchError::NotMapped(vm.id))?));
        let vms = self.vms.iter().map(mapped).collect::<Result<_, FirstTouchError>>()?;
        let policy = self.policy.clone();
        let decide = move |vm, window| lock(&policy).first_touch(vm, window);
        FirstTouch::start(self.host.clone(), vms, decide).map(Some)
    }

    /// The service for a policy that reserves frames; `None` for all others.
    fn reserved_frames(&self) -> Result<Option<ReservedFrames>, ReservedFramesError> {
        let Some(rules) = lock(&self.policy).reserves() else {
            return Ok(None);
        };
        let mapped = |vm: &ManagedVm| Ok((vm.id, vm.ram.clone().ok_or(ReservedFramesError::NotMapped(vm.id))?));
        let vms = self.vms.iter().map(mapped).collect::<Result<_, ReservedFramesError>>()?;
        ReservedFrames::start(self.host.clone(), vms, rules).map(Some)
    }

    /// One round. Returns how many actions were done.
    pub fn tick(&mut self) -> u64 {
        let began_cpu = self.host.thread_cpu_time();
        let began_at = self.host.now();
        self.budget.refill(began_at);
        self.finish_samples();
        let snapshot = self.sense();
        let mut plan = std::mem::take(&mut self.plan);
        plan.clear();
        let now = self.host.now();
        lock(&self.policy).plan(&snapshot, now, &mut self.budget, &mut plan);
        if let Some(recorder) = &mut self.recorder {
            recorder.snapshot(began_at, &snapshot);
            recorder.plan(now, plan.actions());
        }
        let done = plan.actions().iter().filter(|planned| self.act(planned, &snapshot) == OutcomeResult::Done).count();
        self.plan = plan;
        if let Some(recorder) = &mut self.recorder {
            recorder.end_of_tick();
        }
        for ((sampling, vm), rows) in self.sampling.iter_mut().zip(&self.vms).zip(&snapshot.vms) {
            sampling.start(self.host.as_ref(), vm, rows, &mut self.report.sensor_costs);
        }
        self.report.ticks += 1;
        self.report.budget_refusals = self.budget.refusals();
        self.report.total_cpu += self.host.thread_cpu_time().saturating_sub(began_cpu);
        done as u64
    }

    /// What has been counted so far.
    pub fn report(&self) -> &ManagerReport {
        &self.report
    }

    /// Takes a last look at all VMs, so that the report ends with the state at the end.
    pub fn finish(mut self) -> ManagerReport {
        let at = self.host.now();
        self.finish_samples();
        let snapshot = self.sense();
        self.report.policy_figures = lock(&self.policy).figures();
        self.report.recording = self.recorder.take().map(|mut recorder| {
            recorder.snapshot(at, &snapshot);
            recorder.finish()
        });
        self.report
    }

    /// Brings every window back that is aside.
    fn finish_samples(&mut self) {
        for sampling in &mut self.sampling {
            sampling.finish(self.host.as_ref(), &mut self.report.sensor_costs);
        }
    }

    fn sense(&mut self) -> Snapshot {
        let mut snapshot = Snapshot { host: self.sense_host(), ..Snapshot::default() };
        for (index, vm) in self.vms.iter().enumerate() {
            let states = &self.states[index];
            let mut rows = VmSnapshot::with_capacity(vm.id, states.len());
            let slots = vm.second_level.as_ref().map(|kvm| kvm.slots()).unwrap_or_default();
            let is_held = |gpa| slots.iter().any(|slot| slot.is_dirty_logged && slot.range.contains(gpa));
            for range in &vm.ranges {
                match self.sensor.sample(self.host.as_ref(), *range, vm.backing.fixed_page()) {
                    Err(error) => {
                        tracing::warn!("{}: host backing of {}: {error}", vm.id, range.gpa.start());
                        *self.report.sensor_failures.entry("host_backing").or_default() += 1;
                        // Rows of one VM must cover all its windows or the row numbers would shift: what was not
                        // seen is reported as unbacked, which no policy acts on.
                        for window in range.gpa.windows() {
                            let ready = states[rows.len()].ready_at();
                            rows.push(WindowRow { ready_at: ready, ..WindowRow::new(window, 0, Backing::Unbacked) });
                        }
                    }
                    Ok(seen) => {
                        for row in seen {
                            let ready = states[rows.len()].ready_at();
                            let row = WindowRow {
                                is_held: is_held(row.window.start()),
                                ready_at: ready,
                                ..WindowRow::new(row.window, row.resident, row.backing)
                            };
                            rows.push(self.sampling[index].fill(rows.len(), row));
                        }
                    }
                }
            }
            rows.mapping = vm.second_level.as_ref().and_then(|kvm| match kvm.mapping_stats() {
                Ok(stats) => Some(stats),
                Err(error) => {
                    tracing::warn!("{}: KVM statistics: {error}", vm.id);
                    *self.report.sensor_failures.entry("kvm_stats").or_default() += 1;
                    None
                }
            });
            if let Some(stats) = rows.mapping {
                check_totals(&mut self.report.kvm_checks[index], stats, &rows);
            }
            let sample = Sample { at: self.host.now(), host: account::host_backing(&rows), mapping: rows.mapping };
            keep_sample(&mut self.report.samples[index].1, sample);
            snapshot.vms.push(rows);
        }
        snapshot
    }

    fn sense_host(&mut self) -> Option<HostMemory> {
        if !self.needs.host_memory {
            return None;
        }
        let memory = host_memory(self.host.as_ref());
        memory
            .inspect_err(|error| {
                tracing::warn!("the host's memory: {error}");
                *self.report.sensor_failures.entry("host_memory").or_default() += 1;
            })
            .ok()
    }

    fn act(&mut self, planned: &PlannedAction, snapshot: &Snapshot) -> OutcomeResult {
        let (action, now) = (planned.action, self.host.now());
        let Some((index, row)) = self.find(action, snapshot) else {
            // A policy that names what is not there is broken; the guest must not suffer for it.
            tracing::error!("the policy named {action:?}, which is not in its snapshot");
            return self.record(planned, Mechanism::None, OutcomeResult::Skipped(Skip::NotResident), Duration::ZERO);
        };
        if self.should_stop.load(Ordering::Relaxed) {
            return self.record(planned, Mechanism::None, OutcomeResult::Skipped(Skip::Stopping), Duration::ZERO);
        }
        let Ok(acting) = self.states[index][row].begin(now) else {
            return self.record(planned, Mechanism::None, OutcomeResult::Skipped(Skip::BackingOff), Duration::ZERO);
        };
        let result = self.perform(planned, index, snapshot.vms[index].is_held[row]);
        let next = match result {
            OutcomeResult::Refused(refusal) => acting.refused(refusal, self.host.now()),
            OutcomeResult::Done | OutcomeResult::Skipped(_) => acting.done(),
        };
        self.states[index][row] = next.expect("a window that is being acted on may be done or refused");
        result
    }

    /// VM (in the order given) and row of the window an action is about.
    fn find(&self, action: Action, snapshot: &Snapshot) -> Option<(usize, usize)> {
        let index = self.vms.iter().position(|vm| vm.id == action.vm())?;
        Some((index, snapshot.vms[index].row(action.window())?))
    }

    /// Chooses the mechanism and uses it. The cheapest that reaches the size comes first: lifting a hold copies
    /// nothing; swap and collapse copy 2 MiB at the same cost, and swap keeps the window from the guest for a third of
    /// the time (0.22 against 0.62 ms, `cargo bench --bench swap`).
    fn perform(&mut self, planned: &PlannedAction, index: usize, is_held: bool) -> OutcomeResult {
        let vm = &self.vms[index];
        let no_mechanism = OutcomeResult::Skipped(Skip::NoMechanism);
        match (planned.action, vm.second_level.clone()) {
            (Action::Promote { window, to: PageSize::Huge2M, .. }, Some(kvm)) if is_held => {
                self.switch_hold(planned, kvm.as_ref(), window, Hold::Recover)
            }
            (Action::Promote { window, to: PageSize::Huge2M, .. }, _) if vm.backing.fixed_page().is_none() => {
                let Some(range) = vm.ranges.iter().find(|range| range.gpa.contains(window.start())).copied() else {
                    return self.record(planned, Mechanism::None, no_mechanism, Duration::ZERO);
                };
                if let Some(swap) = self.swap(index, window) {
                    self.report.bloat += swap.bloat;
                    return self.record_cost(planned, Mechanism::Swap, swap.result, swap.cost, swap.unavailable);
                }
                let collapse = collapse_window(self.host.as_ref(), range, window);
                self.report.bloat += collapse.bloat;
                self.record_cost(planned, Mechanism::Collapse, collapse.result, collapse.cost, collapse.unavailable)
            }
            (Action::Demote { window, to: PageSize::Base4K, .. }, Some(kvm)) => {
                self.switch_hold(planned, kvm.as_ref(), window, Hold::At4K)
            }
            (Action::Release { window, .. }, _) => self.release(planned, index, window),
            _ => self.record(planned, Mechanism::None, no_mechanism, Duration::ZERO),
        }
    }

    /// Swaps a window, where that is possible here; otherwise somebody else may try.
    fn swap(&mut self, index: usize, window: WindowIndex) -> Option<Swap> {
        let Swaps { access, swapper, refusals } = self.swaps[index].as_mut()?;
        let swap = access.unseen(|| swapper.swap(self.host.as_ref(), window));
        match swap.result {
            OutcomeResult::Refused(Refusal::NotObserved | Refusal::NotEligible | Refusal::Other(_)) => {
                *refusals += 1;
                *self.report.outcomes.entry((Mechanism::Swap.name(), swap.result.name())).or_default() += 1;
                if *refusals >= SWAP_REFUSALS_MAX {
                    self.swaps[index] = None;
                }
                None
            }
            _ => {
                *refusals = 0;
                Some(swap)
            }
        }
    }

    fn release(&mut self, planned: &PlannedAction, index: usize, window: WindowIndex) -> OutcomeResult {
        let vm = &self.vms[index];
        let range = vm.ranges.iter().find(|range| range.gpa.contains(window.start())).copied();
        let (Some(range), Some(ram)) = (range, vm.ram.clone()) else {
            let no_mechanism = OutcomeResult::Skipped(Skip::NoMechanism);
            return self.record(planned, Mechanism::None, no_mechanism, Duration::ZERO);
        };
        let release = release_window(self.host.as_ref(), &ram, range, window);
        self.report.released += release.freed;
        self.record_cost(planned, Mechanism::Release, release.result, release.cost, release.unavailable)
    }

    fn switch_hold(
        &mut self,
        planned: &PlannedAction,
        kvm: &dyn SecondLevel,
        window: WindowIndex,
        hold: Hold,
    ) -> OutcomeResult {
        let mechanism = match hold {
            Hold::At4K => Mechanism::HoldAt4K,
            Hold::Recover => Mechanism::Recover,
        };
        let began_cpu = self.host.thread_cpu_time();
        let result = set_hold(kvm, window, hold);
        let cpu = self.host.thread_cpu_time().saturating_sub(began_cpu);
        self.record(planned, mechanism, result, cpu)
    }

    fn record(
        &mut self,
        planned: &PlannedAction,
        mechanism: Mechanism,
        result: OutcomeResult,
        cpu: Duration,
    ) -> OutcomeResult {
        self.record_cost(planned, mechanism, result, hold_cost(cpu), Duration::ZERO)
    }

    /// Counts an outcome, settles its cost with the budget and tells the policy.
    fn record_cost(
        &mut self,
        planned: &PlannedAction,
        mechanism: Mechanism,
        result: OutcomeResult,
        cost: wideleaf_policies::Cost,
        unavailable: Duration,
    ) -> OutcomeResult {
        let at = self.host.now();
        self.budget.settle(planned.cost, cost);
        let report = &mut self.report;
        *report.outcomes.entry((mechanism.name(), result.name())).or_default() += 1;
        report.action_cpu += cost.cpu;
        report.copied += cost.copied;
        if result == OutcomeResult::Done {
            report.first_done_at.get_or_insert(at);
            report.last_done_at = Some(at);
        }
        if unavailable > Duration::ZERO && result == OutcomeResult::Done {
            report.unavailable_ns.saturating_record(u64::try_from(unavailable.as_nanos()).unwrap_or(u64::MAX));
        }
        let outcome = Outcome { action: planned.action, at, cost, unavailable, result };
        if let Some(recorder) = &mut self.recorder {
            recorder.outcome(mechanism.name(), &outcome);
        }
        lock(&self.policy).learn(&outcome);
        result
    }
}

fn check_totals(check: &mut Option<KvmCheck>, stats: MappingStats, rows: &VmSnapshot) {
    /// The host is read before KVM, and the guest runs on in between: a window or two may have become large.
    const SLACK: u64 = 2;
    let large = stats.pages_2m + stats.pages_1g * 512;
    let possible = (0..rows.len()).filter(|row| rows.backing[*row].is_large() && !rows.is_held[*row]).count() as u64;
    let check = check.get_or_insert(KvmCheck { large_at_first: large, ..KvmCheck::default() });
    check.large_at_most = check.large_at_most.max(large);
    check.contradictions += u64::from(large > possible + SLACK);
}

fn keep_sample(samples: &mut Vec<Sample>, sample: Sample) {
    if samples.len() >= SAMPLES_KEPT {
        let mut number = 0;
        samples.retain(|_| {
            number += 1;
            number % 2 == 1
        });
    }
    samples.push(sample);
}

/// The loop in its thread.
pub struct Manager {
    shared: Arc<Shared>,
    should_stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<ManagerReport>>,
    first_touch: Option<FirstTouch>,
    reserved_frames: Option<ReservedFrames>,
    host: Arc<dyn Host>,
    access: Vec<SharedAccess>,
}

/// Why a manager does not start.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// No thread to be had.
    #[error("cannot start the manager's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The policy decides at the fault, and it can not be asked there.
    #[error("the policy {policy} decides at the first touch, which it can not here: {source}")]
    FirstTouch {
        /// The policy's name.
        policy: &'static str,
        /// Why not.
        source: FirstTouchError,
    },
    /// The policy reserves frames, and none can be reserved.
    #[error("the policy {policy} reserves frames, which it can not here: {source}")]
    ReservedFrames {
        /// The policy's name.
        policy: &'static str,
        /// Why not.
        source: ReservedFramesError,
    },
}

#[derive(Default)]
struct Shared {
    state: Mutex<RunState>,
    changed: Condvar,
}

/// The thread senses from the start; it acts only while active.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RunState {
    #[default]
    Waiting,
    Active,
    Stopping,
}

impl Manager {
    /// Starts the loop's thread. It waits until [`Manager::activate`]. A policy that decides at the first touch is asked, and
    /// one that reserves frames is served, from now on: what is touched before could not be asked about later.
    ///
    /// # Errors
    /// [`ManagerError`] where no thread can be had, or first touches can not be decided, or no frames reserved.
    pub fn spawn(
        host: Arc<dyn Host>,
        vms: Vec<ManagedVm>,
        policy: Box<dyn Policy>,
        config: ManagerConfig,
    ) -> Result<Manager, ManagerError> {
        Manager::spawn_loop(ManagerLoop::new(host, vms, policy, config))
    }

    /// As [`Manager::spawn`], for a loop that was made before, for instance a recorded one.
    ///
    /// # Errors
    /// As [`Manager::spawn`].
    pub fn spawn_loop(mut work: ManagerLoop) -> Result<Manager, ManagerError> {
        let shared = Arc::<Shared>::default();
        let first_touch =
            work.first_touch().map_err(|source| ManagerError::FirstTouch { policy: work.report.policy, source })?;
        let reserved_frames = work
            .reserved_frames()
            .map_err(|source| ManagerError::ReservedFrames { policy: work.report.policy, source })?;
        let should_stop = work.should_stop.clone();
        let (host, access) = (work.host.clone(), work.sampling.iter().filter_map(Sampling::access).collect());
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new().name("manager".into()).spawn(move || {
                let mut pause = work.config.tick_shortest;
                while shared.wait(pause) == RunState::Active {
                    let done = work.tick();
                    pause = if done > 0 { work.config.tick_shortest } else { pause * 2 }.min(work.config.tick_longest);
                }
                work.finish()
            })?
        };
        Ok(Manager { shared, should_stop, thread: Some(thread), first_touch, reserved_frames, host, access })
    }

    /// Calls `look` while every window is where the guest sees it: between its ticks the access sensor has some aside,
    /// which look unbacked.
    pub fn with_all_in_place<T>(&self, look: impl FnOnce() -> T) -> T {
        let _in_place: Vec<_> = self.access.iter().map(|access| access.in_place(self.host.as_ref())).collect();
        look()
    }

    /// Lets the loop act.
    pub fn activate(&self) {
        self.shared.set(RunState::Active);
    }

    /// Ends the loop after the action it is at, and returns what it counted.
    pub fn stop(mut self) -> ManagerReport {
        self.end();
        let first_touch = self.first_touch.take().map(FirstTouch::stop);
        let reserved_frames = self.reserved_frames.take().map(ReservedFrames::stop);
        let thread = self.thread.take().expect("a manager is stopped once");
        let report = thread.join().expect("the manager's thread does not panic");
        ManagerReport { first_touch, reserved_frames, ..report }
    }

    fn end(&self) {
        self.should_stop.store(true, Ordering::Relaxed);
        self.shared.set(RunState::Stopping);
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn set(&self, state: RunState) {
        let mut current = self.state.lock().expect("nothing panics under this lock");
        if *current != RunState::Stopping {
            *current = state;
        }
        self.changed.notify_all();
    }

    /// Waits for the next tick, or until told to stop; while not active, until told anything.
    fn wait(&self, pause: Duration) -> RunState {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        let mut has_paused = false;
        loop {
            match *state {
                RunState::Waiting => {
                    state = self.changed.wait(state).expect("nothing panics under this lock");
                    has_paused = *state == RunState::Active; // the first tick comes at once
                }
                RunState::Active if !has_paused => {
                    (state, _) = self.changed.wait_timeout(state, pause).expect("nothing panics under this lock");
                    has_paused = true;
                }
                RunState::Active | RunState::Stopping => return *state,
            }
        }
    }
}
