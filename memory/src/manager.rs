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
//!   when the next one comes: pacing.rs, quiet.rs, and scans all windows: latest_scan.rs
//!   what readers see: live.rs, report.rs      its thread: thread.rs, orders.rs
//! ```
//!
//! No failure ends the loop. It is counted under its own name, and the loop asks the window or the sensor again
//! later.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_policies::policy::Needs;
use wideleaf_policies::recording::TooManyWindows;
use wideleaf_policies::watermark::Watermark;
use wideleaf_policies::{
    Budget, BudgetLimits, GivenBackRules, HugePagePrice, HugePages, Moment, PageSize, PerTenThousand, Plan, Policy,
    Snapshot, VmId, WindowIndex,
};

use crate::block_supply::{BlockSupply, SupplyRules};
use crate::faults::Counted;
use crate::first_touch::{FirstTouch, FirstTouchError};
use crate::kernel::Kernel;
use crate::panicked::Panicked;
use crate::recorder::{RecordTo, Recorder};
use crate::region::GuestRam;
use crate::reserved_frames::{ReservedFrames, ReservedFramesError, ReservedFramesReport};
use crate::sensors::host_backing::HostBackingSensor;

mod acting;
mod attempt;
mod collapsing;
mod fault_price;
mod giant_making;
mod giants;
mod guards;
mod guest_freed;
mod huge_page_backoff;
mod kernel_work;
mod latest_scan;
mod live;
mod managed_vm;
mod mechanisms;
mod node_sight;
mod nodes;
mod orders;
mod pacing;
mod quiet;
mod reach;
mod recoveries;
mod recovering;
mod refault_cost;
mod releasing;
mod report;
mod sampling;
mod sensing;
mod sensor_cost;
mod stall_budget;
mod steering;
mod supplying;
mod swaps;
mod switching;
mod thread;
mod trades;
mod vm_state;

pub use fault_price::{FaultPrice, PriceSource};
use giants::{GiantVm, Giants};
use huge_page_backoff::HugePageBackoff;
pub use kernel_work::KernelWork;
use latest_scan::LatestScan;
use live::Publisher;
pub use live::{ActionSeen, LATEST_ACTIONS_MAX, Live, LiveNodes, LiveVm, RESERVATION};
pub use managed_vm::{AccessesBefore, ManagedVm};
use node_sight::HostSight;
use pacing::{Overhead, PULSE, Pace};
pub use reach::{OutOfReach, OutOfReachError};
pub use recoveries::{RecoveriesByCause, RecoveryCounts, SharedRecovery};
pub use report::{KvmCheck, ManagerReport, Sample};
use report::{SAMPLES_KEPT, SAMPLES_KEPT_OUTSIDE};
use sampling::{SharedAccess, Wish, Wishes};
pub use sensor_cost::{SensorCost, SensorCosts};
use steering::Steering;
pub use switching::SwitchError;
pub use thread::{Manager, ManagerError, PolicyAnswer, RestAnswer, Resting};
use vm_state::VmState;

/// Settings of the loop.
#[derive(Clone, Copy, Debug)]
pub struct ManagerConfig {
    /// Limits on the cost of actions, over all VMs together.
    pub limits: BudgetLimits,
    /// Time to the next tick after one that did something.
    pub tick_shortest: Duration,
    /// Time to the next tick after a long time without work.
    pub tick_longest: Duration,
    /// Interval at which the loop checks between ticks whether memory came into use; `None`: only ticks check. While
    /// the loop's own process, with a guest in it, hardly runs, there are no such checks.
    pub pulse: Option<Duration>,
    /// Maximum number of threads that copy windows at the same time; fewer when the budget has less work.
    pub copy_threads: u16,
    /// Part of a core that the slower sensors of one VM may use (those that do not run at every tick).
    pub sampling: PerTenThousand,
    /// Core time that the samples of one VM may use beyond that when much is new. It is earned back at the same rate.
    pub sampling_burst: Duration,
    /// Largest part of any 100 ms for which windows of one VM may be out of the guest's reach while they are copied,
    /// split or released.
    pub out_of_reach: OutOfReach,
    /// Rules for memory that guests give back: what becomes of it, and how much of it a promoted window may have.
    pub given_back: GivenBackRules,
    /// Bounds on a thread of the loop's own that makes free blocks of 2 MiB while windows wait for them; `None`: there
    /// is no such thread, and huge pages come from the host as it is.
    pub supply: Option<SupplyRules>,
    /// Maximum number of samples of each VM in the report. When it is reached, every second one is dropped.
    pub samples_kept: usize,
}

impl Default for ManagerConfig {
    /// 10 ms while there is work: a fraction of the budget's burst, and ten times what sensing a gibibyte costs. One
    /// second when idle: a window that becomes resident waits at most that long. One thread copies, the loop's own.
    fn default() -> ManagerConfig {
        ManagerConfig {
            limits: BudgetLimits::default(),
            tick_shortest: Duration::from_millis(10),
            tick_longest: Duration::from_secs(1),
            pulse: Some(PULSE),
            copy_threads: 1,
            sampling: sampling::SAMPLING_BUDGET,
            sampling_burst: sampling::SAMPLING_BURST,
            out_of_reach: OutOfReach::default(),
            given_back: GivenBackRules::default(),
            supply: None,
            samples_kept: SAMPLES_KEPT,
        }
    }
}

impl ManagerConfig {
    /// For an external guest, one of many on a host. While the guest is idle, the loop wakes every two seconds to
    /// read one small file, and scans the windows every ten seconds at most.
    pub fn for_external_guests() -> ManagerConfig {
        ManagerConfig {
            tick_longest: Duration::from_secs(10),
            pulse: Some(Duration::from_secs(2)),
            samples_kept: SAMPLES_KEPT_OUTSIDE,
            ..ManagerConfig::default()
        }
    }
}

/// `ready_at` of a window that the manager may not act on.
const NEVER: Moment = Moment::after_start(Duration::MAX);

/// Shared by the loop, which plans with it, and by the thread that answers first touches. Locked only while it
/// decides or learns, never during an action. A panic in the policy ends only its own thread; the other one continues.
type SharedPolicy = Arc<Mutex<Box<dyn Policy>>>;

/// State of the loop. [`Manager::spawn`] runs it in a thread; tests call [`ManagerLoop::tick`] themselves.
pub struct ManagerLoop {
    host: Arc<dyn Kernel>,
    /// The VMs, in the order given; a snapshot has the same order.
    vms: Vec<VmState>,
    policy: SharedPolicy,
    /// Name of the first policy.
    began_with: &'static str,
    config: ManagerConfig,
    budget: Budget,
    sensor: HostBackingSensor,
    /// Of the latest tick; while one is under way, of its sensing.
    overhead: Overhead,
    scan: LatestScan,
    plan: Plan,
    report: ManagerReport,
    recorder: Option<Recorder>,
    needs: Needs,
    /// The access sensors of all VMs, for callers that need every window in its place.
    access: Arc<Mutex<Vec<SharedAccess>>>,
    giants: Giants,
    /// NUMA nodes of the host; `None` where it has one.
    nodes: Option<HostSight>,
    should_stop: Arc<AtomicBool>,
    /// Panics during the actions of this tick.
    panics: Mutex<Vec<(VmId, Panicked)>>,
    /// Whether the host is short of memory; decides about memory that guests gave back.
    shortage: Watermark,
    /// Whether the host has huge pages.
    huge_pages: HugePageBackoff,
    /// Maker of free blocks, if this loop has one of its own.
    supply: Option<BlockSupply>,
    /// Number of the supply's blocks that are in no counted block, as far as the loop knows them.
    known_unseen: u64,
    /// Whether the policy ever promotes.
    promotes: bool,
    steering: Arc<Steering>,
    publisher: Publisher,
    /// Counters of the service that maps reserved frames, if there is one.
    reservations: Option<Counted<ReservedFramesReport>>,
}

impl ManagerLoop {
    /// Makes a loop over `vms` that has done nothing yet.
    pub fn new(
        host: Arc<dyn Kernel>,
        vms: Vec<ManagedVm>,
        policy: Box<dyn Policy>,
        config: ManagerConfig,
    ) -> ManagerLoop {
        let mut report = ManagerReport::new(policy.name(), &vms);
        let nodes = HostSight::of(host.as_ref(), &mut report);
        let giants = Giants::of_this_machine();
        // A promoted giant would leave behind the userfaultfd that such a policy has on the RAM. It may demote those
        // that its first touches brought.
        let has_giants = !policy.decides_at_first_touch() || policy.largest_page() == PageSize::Giant1G;
        if policy.largest_page() == PageSize::Giant1G && !are_all_on_giant_pages(&vms) {
            report.unanswered.extend(giants.why_no_page());
        }
        // A policy that decides at the fault has the RAM's userfaultfd; there can be only one.
        let needs = Needs { access: policy.needs().access && !policy.decides_at_first_touch(), ..policy.needs() };
        let firsts = sensing::firsts_of_second_levels(&vms);
        let nodes_of_guests = supplying::nodes_of(&vms);
        let state = |(vm, first): (ManagedVm, usize)| {
            let giants = |vm: &mut ManagedVm, guard| has_giants.then(|| GiantVm::new(vm, guard, &giants)).flatten();
            VmState::new(&host, vm, first, giants, needs, &config, &mut report.unanswered)
        };
        let vms: Vec<_> = vms.into_iter().zip(firsts).map(state).collect();
        let access = Arc::new(Mutex::new(vms.iter().filter_map(|vm| vm.sampling.access()).collect()));
        let limits = config.out_of_reach.shorten(config.limits);
        ManagerLoop {
            budget: Budget::new(limits, host.now()),
            report,
            needs,
            access,
            giants,
            nodes,
            sensor: HostBackingSensor::default(),
            overhead: Overhead::default(),
            scan: LatestScan::default(),
            plan: Plan::default(),
            recorder: None,
            should_stop: Arc::default(),
            panics: Mutex::default(),
            shortage: shortage(config.given_back),
            huge_pages: HugePageBackoff::default(),
            supply: supplying::supply_for(&host, &config, nodes_of_guests),
            known_unseen: 0,
            promotes: policy.promotes(),
            began_with: policy.name(),
            steering: Arc::default(),
            publisher: Publisher::new(policy.name(), limits, config.out_of_reach),
            reservations: None,
            host,
            vms,
            policy: Arc::new(Mutex::new(policy)),
            config,
        }
    }

    /// Sets the price of huge pages, as [`Manager::set_huge_page_price`] does while a thread runs the loop.
    pub fn set_huge_page_price(&self, price: Option<HugePagePrice>) {
        self.steering.set_price(price);
    }

    /// Changes the part of the time out of reach, as [`Manager::set_out_of_reach`] does while a thread runs the loop.
    pub fn set_out_of_reach(&self, part: OutOfReach) {
        self.steering.set_out_of_reach(part);
    }

    /// Records the loop from its first tick on.
    ///
    /// # Errors
    /// [`TooManyWindows`] where the VMs have more windows than a recording can hold.
    pub fn recorded(mut self, to: RecordTo) -> Result<ManagerLoop, TooManyWindows> {
        let vms = self.managed_vms().map(ManagedVm::recorded_header).collect();
        self.recorder = Some(Recorder::start(to, self.report.policy, self.limits(), vms)?);
        Ok(self)
    }

    /// The VMs as they were given, in that order.
    fn managed_vms(&self) -> impl Iterator<Item = &ManagedVm> {
        self.vms.iter().map(|vm| &vm.managed)
    }

    /// Starts the service for a policy that decides at the fault; `None` for all others.
    fn first_touch(&self) -> Result<Option<FirstTouch>, FirstTouchError> {
        if !self.policy.lock().decides_at_first_touch() {
            return Ok(None);
        }
        let mapped = |vm: &ManagedVm| Ok((vm.id, vm.ram.clone().ok_or(FirstTouchError::NotMapped(vm.id))?));
        let vms = self.managed_vms().map(mapped).collect::<Result<_, FirstTouchError>>()?;
        let policy = self.policy.clone();
        let rams: Vec<_> = self.managed_vms().filter_map(|vm| Some((vm.id, vm.ram.clone()?))).collect();
        let is_given_back = move |vm, window| {
            let ram = rams.iter().find(|(id, _)| *id == vm).map(|(_, ram)| ram);
            ram.is_some_and(|ram| ram.given_back().book().is_given_back(window))
        };
        let decide = move |vm, window| match is_given_back(vm, window) {
            true => PageSize::Base4K,
            false => policy.lock().first_touch(vm, window),
        };
        let has_giants = self.policy.lock().largest_page() == PageSize::Giant1G;
        FirstTouch::start(self.host.clone(), vms, has_giants.then(|| self.giants.source()), decide).map(Some)
    }

    /// Starts the service for a policy that reserves frames; `None` for all others.
    fn reserved_frames(&self) -> Result<Option<ReservedFrames>, ReservedFramesError> {
        let Some(rules) = self.policy.lock().reserves() else {
            return Ok(None);
        };
        let mapped = |vm: &ManagedVm| Ok((vm.id, vm.ram.clone().ok_or(ReservedFramesError::NotMapped(vm.id))?));
        let vms = self.managed_vms().map(mapped).collect::<Result<_, ReservedFramesError>>()?;
        ReservedFrames::start(self.host.clone(), vms, rules).map(Some)
    }

    /// Runs one round. Returns the number of actions done or begun.
    pub fn tick(&mut self) -> u64 {
        let began_cpu = self.host.thread_cpu_time();
        let began_at = self.host.now();
        self.take_limits();
        self.budget.refill(began_at);
        self.huge_pages.begin_tick(self.host.as_ref());
        self.take_promises();
        self.ask_gates();
        self.ask_pauses();
        self.ask_events();
        let is_giant_over = self.finish_giant();
        self.finish_samples();
        let mut snapshot = self.sense_in_turn();
        let decides_from = self.host.thread_cpu_time();
        self.sense_nodes(&mut snapshot);
        let mut plan = std::mem::take(&mut self.plan);
        plan.clear();
        let now = self.host.now();
        let refusals_before = self.budget.refusals();
        self.recover(&mut snapshot, &mut plan);
        self.policy.lock().plan(&snapshot, now, &mut self.budget, &mut plan);
        let decided_in = self.host.thread_cpu_time().saturating_sub(decides_from);
        if let Some(recorder) = &mut self.recorder {
            recorder.snapshot(began_at, &snapshot);
            recorder.plan(now, plan.actions());
        }
        let done = self.act(plan.actions(), &snapshot) + u64::from(is_giant_over);
        if is_giant_over {
            self.scan.forget();
        }
        self.plan = plan;
        self.look_again_at_given_back();
        if let Some(recorder) = &mut self.recorder {
            recorder.end_of_tick();
        }
        self.start_samples(&snapshot);
        self.report.ticks += 1;
        self.report.budget_refusals = self.budget.refusals();
        let publishes_from = self.host.thread_cpu_time();
        self.report.total_cpu += publishes_from.saturating_sub(began_cpu);
        self.publish(snapshot, self.report.budget_refusals - refusals_before);
        self.tell_supply();
        let published_in = self.host.thread_cpu_time().saturating_sub(publishes_from);
        self.report.total_cpu += published_in;
        self.overhead.whole += decided_in + published_in;
        done
    }

    /// Takes over the limits that were set since the latest tick.
    fn take_limits(&mut self) {
        let (limits, out_of_reach) = (self.steering.take_limits(), self.steering.take_out_of_reach());
        if let Some(part) = out_of_reach {
            self.config.out_of_reach = part;
            self.vms.iter_mut().for_each(|vm| vm.reach.set_part(part));
        }
        if limits.is_some() || out_of_reach.is_some() {
            self.config.limits = limits.unwrap_or(self.config.limits);
            self.budget.set_limits(self.limits());
        }
    }

    /// Limits of the budget, outside of recoveries.
    fn limits(&self) -> BudgetLimits {
        self.config.out_of_reach.shorten(self.config.limits)
    }

    /// Begins the next samples of the VMs that may be disturbed by them and are not paused.
    fn start_samples(&mut self, snapshot: &Snapshot) {
        let uses_zero = self.policy.lock().uses_zero();
        let is_short = snapshot.host.is_some_and(|host| host.huge_pages != HugePages::Plenty);
        let now = self.host.now();
        for (vm, rows) in self.vms.iter_mut().zip(&snapshot.vms).filter(|(vm, _)| vm.may_be_sampled(now)) {
            let access = |of: &[usize]| {
                let policy = self.policy.lock();
                of.iter().map(|row| Wish::of(policy.as_ref(), rows, *row)).collect()
            };
            let wishes = Wishes { access: &access, uses_zero, is_short };
            vm.start_samples(self.host.as_ref(), rows, wishes, self.plan.actions(), &mut self.report);
        }
    }

    /// Whether the gate of a VM has opened or closed since the latest tick.
    fn has_gate_changed(&self) -> bool {
        let mut vms = self.vms.iter().filter(|vm| vm.is_there());
        vms.any(|vm| vm.gate != self.steering.gate_state(&vm.managed))
    }

    /// Whether all its VMs are gone, so that the loop has no work any more.
    pub fn has_ended(&self) -> bool {
        !self.vms.is_empty() && !self.vms.iter().any(VmState::is_there)
    }

    /// State at the end of the latest tick.
    pub fn live(&self) -> Arc<Live> {
        live::latest(&self.publisher.slot())
    }

    /// How soon the next tick should come, after one that did `done` actions.
    fn pace(&self, done: u64) -> Pace {
        let now = self.host.now();
        if done > 0 || self.is_recovering() || self.policy.lock().is_measuring() {
            Pace::Acting
        } else if self.vms.iter().any(|vm| vm.may_be_sampled(now) && vm.sampling.is_bursting()) {
            Pace::Sampling
        } else {
            Pace::Idle
        }
    }

    /// Whether memory came into use that a scan would see now.
    fn has_new_memory(&mut self) -> bool {
        self.scan.is_urgent(self.host.as_ref(), self.vms.iter().map(|vm| &vm.managed))
    }

    /// Whether windows wait for an urgent sample that could begin now.
    fn has_urgent_sample(&self) -> bool {
        let now = self.host.now();
        self.vms.iter().any(|vm| vm.may_be_sampled(now) && vm.sampling.is_urgent(now))
    }

    /// Counts so far.
    pub fn report(&self) -> &ManagerReport {
        &self.report
    }

    /// Senses all VMs one last time, so that the report ends with the final state.
    pub fn finish(mut self) -> ManagerReport {
        self.end_supply();
        self.finish_last_giant();
        self.end_giant_making();
        let at = self.host.now();
        self.finish_samples();
        let mut snapshot = self.sense();
        self.sense_nodes(&mut snapshot);
        self.report.policy_figures = self.policy.lock().figures();
        self.report.recording = self.recorder.take().map(|mut recorder| {
            recorder.snapshot(at, &snapshot);
            recorder.finish()
        });
        self.report
    }

    /// Brings back every window that is aside.
    fn finish_samples(&mut self) {
        for vm in &mut self.vms {
            vm.sampling.finish(self.host.as_ref(), &mut self.report);
        }
    }
}

/// Whether the RAM has giants and all of them are on giant pages, so that no pool needs a page.
fn are_all_on_giant_pages(vms: &[ManagedVm]) -> bool {
    let is_on_page = |ram: &GuestRam, giant| ram.claims().is_on_giant_page(WindowIndex::containing(giant));
    let giants = || vms.iter().filter_map(|vm| vm.ram.as_deref()).flat_map(|ram| ram.giants().map(move |g| (ram, g)));
    giants().next().is_some() && giants().all(|(ram, giant)| is_on_page(ram, giant))
}

fn shortage(rules: GivenBackRules) -> Watermark {
    Watermark::of_percent(rules.short_from_percent.into(), rules.short_below_percent.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::host::Host as _;
    use crate::region::GuestRam;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Bytes, Gpa, GpaRange, policy};

    /// A policy with plans that take CPU time, as plans for terabytes do.
    struct Thinker(Arc<FakeHost>, Duration);

    impl Policy for Thinker {
        fn name(&self) -> &'static str {
            "thinker"
        }

        fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {
            self.0.sleep(self.1);
        }
    }

    #[test]
    fn the_next_tick_waits_for_what_the_plan_took_too() {
        let host = Arc::<FakeHost>::default();
        let plan = Duration::from_millis(30);
        let mut work =
            ManagerLoop::new(host.clone(), Vec::new(), Box::new(Thinker(host.clone(), plan)), ManagerConfig::default());
        work.tick();
        let mut pacing = pacing::Pacing::new(&work.config, host.now());
        pacing.ticked(host.as_ref(), &work.config, work.overhead, Pace::Acting);
        assert_eq!(pacing.pause(), plan * 4);
    }

    #[test]
    fn a_new_part_of_the_time_and_new_limits_hold_from_the_next_tick_on_whichever_comes_first() {
        let never = policy::by_name("never").expect("it is in the table").with_defaults();
        let mut work = ManagerLoop::new(Arc::<FakeHost>::default(), Vec::new(), never, ManagerConfig::default());
        let mut after_a_tick = |set: &dyn Fn(&ManagerLoop)| {
            set(&work);
            work.tick();
            let live = work.live();
            (live.out_of_reach, live.limits)
        };
        let (tenth, default) = (OutOfReach::nearest_to(PerTenThousand::new(1_000)), BudgetLimits::default());
        let slow = BudgetLimits { copy_per_second: mib(7), ..default };
        let third_of_the_burst = |limits: BudgetLimits| BudgetLimits { burst: default.burst / 3_000 * 1_000, ..limits };
        assert_eq!(after_a_tick(&|_| {}), (OutOfReach::default(), default));
        assert_eq!(after_a_tick(&|work| work.set_out_of_reach(tenth)), (tenth, third_of_the_burst(default)));
        assert_eq!(after_a_tick(&|work| work.steering.set_limits(slow)), (tenth, third_of_the_burst(slow)));
        let unlimited = OutOfReach::NO_LIMIT;
        assert_eq!(after_a_tick(&|work| work.set_out_of_reach(unlimited)), (unlimited, slow));
    }

    #[test]
    fn a_scan_during_a_giant_exchange_is_repeated() {
        // The giant's pages are not mapped until the exchange is over; it is over when the first scan has ended.
        let range = GpaRange::new(Gpa::new(0), mib(4)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[range], backing).expect("addresses");
        let host = Arc::<FakeHost>::default();
        let giant = ram.claims().giant(Gpa::new(0)).expect("free");
        let (start, exchanged) = (ram.base(), host.clone());
        host.when_scanned(move || giant.exchanging(|| exchanged.make_present(start, mib(4), false)));
        let never = policy::by_name("never").expect("it is in the table").with_defaults();
        let vm = ManagedVm::new(VmId(0), ram, None);
        let mut work = ManagerLoop::new(host, vec![vm], never, ManagerConfig::default());
        work.tick();
        let (_, samples) = &work.report().samples[0];
        assert_eq!((samples[0].host.base_4k, samples[0].host.unbacked), (mib(4), Bytes::ZERO));
    }
}
