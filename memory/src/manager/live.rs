//! State of a manager while it runs: a value made at the end of each tick. A reader may keep it as long as it
//! likes; the loop never waits for a reader.
//!
//! ```text
//!   loop    tick ── publish ──── tick ── publish ──── tick …
//!                      │                    │
//!                      ▼  Arc<Live>         ▼  the next one
//!   readers           look            (still looking at the first one, which they keep)
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::recovery::Progress;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::window::WindowState;
use wideleaf_policies::{
    Action, Backing, Bids, BudgetLimits, Bytes, HugePages, Moment, NodeSet, OutcomeResult, PageSize, Refusal, Skip,
    Snapshot, VmId, VmSnapshot, WindowIndex,
};

use super::attempt::{Attempt, Mechanism};
use super::kernel_work::KernelWork;
use super::node_sight::HostSight;
use super::recoveries::RecoveriesByCause;
use super::sensing::has_hole;
use super::vm_state::VmState;
use super::{KvmCheck, ManagerLoop, NEVER, OutOfReach};
use crate::explain::{CannotBeHuge, WhyNot};
use crate::gate::{GateState, KeptHoles};
use crate::numa::seen::NodesSeen;
use crate::reserved_frames::ReservedFramesReport;
use crate::sensors::swapped::Swapped;

/// Maximum number of actions kept: some seconds of a busy VM, a screenful for an operator.
pub const LATEST_ACTIONS_MAX: usize = 64;

/// Mechanism under which changes of reservations are counted; the results are `reserved`, `promoted`, `demoted`,
/// `p_failures`, `ended` and `broken`.
pub const RESERVATION: &str = "reservation";

/// State of a manager at the end of a tick.
#[derive(Clone, Debug)]
pub struct Live {
    /// Name of the policy.
    pub policy: &'static str,
    /// Sensor data that the policy asks for.
    pub needs: Needs,
    /// Limits on the cost of actions.
    pub limits: BudgetLimits,
    /// Largest part of any 100 ms for which windows of one VM may be out of the guest's reach.
    pub out_of_reach: OutOfReach,
    /// End of the tick, as time since the host was opened.
    pub at: Moment,
    /// Number of ticks so far.
    pub ticks: u64,
    /// Snapshot of the tick, updated with the promotions since.
    pub snapshot: Snapshot,
    /// State of each VM, in the order of the snapshot.
    pub vms: Vec<LiveVm>,
    /// Number of actions by mechanism and result; with those of the service that maps reserved frames, if there is
    /// one, under [`RESERVATION`].
    pub outcomes: BTreeMap<(&'static str, &'static str), u64>,
    /// Guest memory copied by promotions.
    pub copied: Bytes,
    /// Bytes that became resident only because the page is large.
    pub bloat: Bytes,
    /// Guest memory released to the host, in bytes.
    pub released: Bytes,
    /// CPU time of the actions.
    pub action_cpu: Duration,
    /// CPU time of the whole loop, sensing and deciding included.
    pub total_cpu: Duration,
    /// Number of requests that the budget refused.
    pub budget_refusals: u64,
    /// Longest time that each window was unavailable during an action, in nanoseconds, to one per cent.
    pub unavailable_ns: Arc<Histogram<u64>>,
    /// Number of failures of each sensor, by name.
    pub sensor_failures: BTreeMap<&'static str, u64>,
    /// Recoveries by event.
    pub recoveries: RecoveriesByCause,
    /// Panics during actions, one line each.
    pub panics: Vec<String>,
    /// Questions of the policy that no sensor here can answer, each with the reason.
    pub unanswered: Vec<String>,
    /// Supply of huge pages, as the requests of this manager found it: never [`HugePages::Priced`].
    pub huge_pages: HugePages,
    /// NUMA nodes of the host; `None` where memory is in one place.
    pub nodes: Option<Arc<NodesSeen>>,
    /// Bids of the policy; `None` while there are plenty of huge pages, and from a policy that does not bid.
    pub bids: Option<Arc<Bids>>,
    /// The latest actions that were tried, oldest first, at most [`LATEST_ACTIONS_MAX`].
    pub latest: VecDeque<ActionSeen>,
}

impl Live {
    /// Begin of the earliest of the VMs' latest scans: no row is older. `None` where one of them was never scanned.
    pub fn scanned_at(&self) -> Option<Moment> {
        self.vms.iter().map(|vm| vm.scanned_at).min().flatten()
    }
}

/// One VM of a [`Live`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveVm {
    /// Identifier of the VM.
    pub vm: VmId,
    /// Whether it may be acted on.
    pub gate: GateState,
    /// Begin of the latest scan of all its windows; `None` before the first. Rows of windows that were acted on are
    /// newer.
    pub scanned_at: Option<Moment>,
    /// Number of windows that are not large, by reason.
    pub why_not: BTreeMap<WhyNot, u64>,
    /// Memory that is swapped out; `None` where that is not known, and for a guest of this process.
    pub swapped: Option<Bytes>,
    /// Changes of windows that the manager did not make; zero for a guest of this process.
    pub kernel_work: KernelWork,
    /// The same for each window, in the order of the snapshot's rows: consecutive rows with one reason, as their
    /// number and the reason; `None` for windows on large pages.
    pub reasons: Vec<(u32, Option<WhyNot>)>,
    /// KVM's totals compared with the host's backing; `None` without a second level.
    pub kvm_check: Option<KvmCheck>,
    /// The recovery under way.
    pub recovering: Option<Progress>,
    /// What limits it to some NUMA nodes; `None` on a host with one node.
    pub nodes: Option<LiveNodes>,
}

/// Limits of a VM by NUMA node, and the state of its sensor. Nodes of windows and vCPUs are columns of the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveNodes {
    /// Nodes that the cpuset of its process permits (`Mems_allowed_list`); empty where that is not known.
    pub cpuset: NodeSet,
    /// Nodes to which the policy of its memory binds it; `None`: not bound, or not known.
    pub bound_to: Option<NodeSet>,
    /// Whether the node of every present window was asked for at least once.
    pub is_complete: bool,
}

/// An action that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionSeen {
    /// VM of the action.
    pub vm: VmId,
    /// Window of the action, or the first one of a giant.
    pub window: WindowIndex,
    /// Name of the mechanism.
    pub mechanism: &'static str,
    /// Result of the action.
    pub result: OutcomeResult,
    /// Moment at which it was over.
    pub at: Moment,
}

/// Holds the latest [`Live`].
pub(super) type LiveSlot = Arc<Mutex<Arc<Live>>>;

/// The latest published value.
pub(super) fn latest(slot: &LiveSlot) -> Arc<Live> {
    slot.lock().clone()
}

/// Publishes the values; the loop's side.
pub(super) struct Publisher {
    slot: LiveSlot,
    latest: VecDeque<ActionSeen>,
    /// Windows that became large at this tick, as VM (in the order given) and row.
    promoted: Vec<(usize, usize)>,
    /// VMs of which a window was left as it is at this tick because the host has no huge page.
    short_of_pages: BTreeSet<VmId>,
}

impl Publisher {
    /// Publishes a state in which nothing has happened yet.
    pub fn new(policy: &'static str, limits: BudgetLimits, out_of_reach: OutOfReach) -> Publisher {
        let nothing = Live {
            policy,
            needs: Needs::default(),
            limits,
            out_of_reach,
            at: Moment::START,
            ticks: 0,
            snapshot: Snapshot::default(),
            vms: Vec::new(),
            outcomes: BTreeMap::new(),
            copied: Bytes::ZERO,
            bloat: Bytes::ZERO,
            released: Bytes::ZERO,
            action_cpu: Duration::ZERO,
            total_cpu: Duration::ZERO,
            budget_refusals: 0,
            unavailable_ns: Arc::new(Histogram::new(2).expect("two digits are in its range")),
            sensor_failures: BTreeMap::new(),
            recoveries: BTreeMap::new(),
            panics: Vec::new(),
            unanswered: Vec::new(),
            huge_pages: HugePages::Plenty,
            nodes: None,
            bids: None,
            latest: VecDeque::new(),
        };
        let slot = Arc::new(Mutex::new(Arc::new(nothing)));
        Publisher { slot, latest: VecDeque::new(), promoted: Vec::new(), short_of_pages: BTreeSet::new() }
    }

    /// The slot that readers take the latest value from.
    pub fn slot(&self) -> LiveSlot {
        self.slot.clone()
    }

    /// Remembers an action, if it was tried.
    pub fn remember(&mut self, attempt: &Attempt) {
        let Attempt { planned, target, mechanism, result, at, .. } = *attempt;
        let action = planned.action;
        if result == OutcomeResult::Skipped(Skip::NoHugePage) {
            self.short_of_pages.insert(action.vm());
        }
        if mechanism == Mechanism::None {
            return;
        }
        if self.latest.len() == LATEST_ACTIONS_MAX {
            self.latest.pop_front();
        }
        let (vm, window) = (action.vm(), action.window());
        self.latest.push_back(ActionSeen { vm, window, mechanism: mechanism.name(), result, at });
        if result != OutcomeResult::Done {
            return;
        }
        if matches!(action, Action::Promote { to: PageSize::Huge2M, .. }) {
            self.promoted.extend(target.map(|target| (target.vm, target.row)));
        }
    }

    /// Updates the snapshot with the promotions of this tick.
    fn bring_up_to_date(&mut self, snapshot: &mut Snapshot) {
        for (index, row) in self.promoted.drain(..) {
            let rows = &mut snapshot.vms[index];
            rows.is_held[row] = false;
            if !rows.backing[row].is_large() {
                (rows.backing[row], rows.resident[row]) = (Backing::Huge2M, BASE_PAGES_PER_WINDOW);
            }
        }
    }
}

impl ManagerLoop {
    /// Publishes the state at the end of a tick. `budget_refusals`: of this tick.
    pub(super) fn publish(&mut self, mut snapshot: Snapshot, budget_refusals: u64) {
        self.publisher.bring_up_to_date(&mut snapshot);
        let of_vms = self.vms.iter().zip(&snapshot.vms).zip(&self.report.kvm_checks).enumerate();
        // A policy that answers faults is not kept from them, and has no reasons of its own.
        let policy = Some(self.policy.lock()).filter(|policy| !policy.decides_at_first_touch());
        let live_vm = |(index, ((vm, rows), check)): (usize, ((&VmState, &VmSnapshot), &Option<KvmCheck>))| {
            let own_reason = |row| policy.as_ref().and_then(|policy| own_reason(policy.as_ref(), index, rows, row));
            self.live_vm(vm, rows, *check, budget_refusals, &own_reason)
        };
        let vms = of_vms.map(live_vm).collect();
        drop(policy);
        let report = &self.report;
        let live = Live {
            policy: report.policy,
            needs: self.needs,
            limits: self.budget.limits(),
            out_of_reach: self.config.out_of_reach,
            at: self.host.now(),
            ticks: report.ticks,
            snapshot,
            vms,
            outcomes: self.outcomes_with_reservations(),
            copied: report.copied,
            bloat: report.bloat,
            released: report.released,
            action_cpu: report.action_cpu,
            total_cpu: report.total_cpu,
            budget_refusals: report.budget_refusals,
            unavailable_ns: report.unavailable_ns.clone(),
            sensor_failures: report.sensor_failures.clone(),
            recoveries: report.recoveries.clone(),
            panics: report.panics.clone(),
            unanswered: report.unanswered.clone(),
            huge_pages: self.huge_pages.shortage(self.host.as_ref()),
            nodes: self.nodes.as_ref().map(HostSight::seen),
            bids: self.policy.lock().bids().cloned().map(Arc::new),
            latest: self.publisher.latest.clone(),
        };
        self.publisher.short_of_pages.clear();
        *self.publisher.slot.lock() = Arc::new(live);
    }

    fn outcomes_with_reservations(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        let changes = self.reservations.iter().flat_map(|counted| counted.read(ReservedFramesReport::changes));
        let changes = changes.filter(|(_, count)| *count > 0).map(|(name, count)| ((RESERVATION, name), count));
        self.report.outcomes.iter().map(|(name, count)| (*name, *count)).chain(changes).collect()
    }

    fn live_vm(
        &self,
        vm: &VmState,
        rows: &VmSnapshot,
        kvm_check: Option<KvmCheck>,
        budget_refusals: u64,
        own_reason: &dyn Fn(usize) -> Option<WhyNot>,
    ) -> LiveVm {
        let otherwise = match (self.publisher.short_of_pages.contains(&rows.vm), budget_refusals) {
            (true, _) => WhyNot::BackingOff(Refusal::NoHugePage),
            (false, _) if vm.stalls.is_spent() => WhyNot::StallBudgetSpent,
            (false, 0) => WhyNot::NotChosen,
            (false, _) => WhyNot::BudgetSpent,
        };
        let explainer = Explainer {
            rows,
            states: &vm.windows,
            barred: &vm.barred,
            now: self.host.now(),
            of_vm: self.why_none_of(vm),
            keeps_holes: vm.managed.keeps_holes(),
            is_shared: vm.managed.is_shared(),
            swapped: &vm.swapped,
            swapped_max: vm.swapped_max,
            otherwise,
            own_reason,
        };
        let swapped = vm.swapped.bytes().filter(|_| !self.host.is_own());
        let (reasons, kernel_work) = (explainer.runs(), vm.kernel_work.work);
        LiveVm {
            vm: rows.vm,
            gate: vm.gate,
            scanned_at: vm.scanned_at,
            why_not: count(&reasons),
            reasons,
            swapped,
            kernel_work,
            kvm_check,
            recovering: vm.recovering(),
            nodes: self.nodes.as_ref().map(|_| LiveNodes {
                cpuset: vm.node_sight.allowed(),
                bound_to: vm.managed.bound_to,
                is_complete: vm.node_sight.is_complete(),
            }),
        }
    }

    /// The reason why no window of this VM is promoted at present, if so.
    fn why_none_of(&self, vm: &VmState) -> Option<WhyNot> {
        match vm.gate {
            _ if vm.is_left_alone => Some(WhyNot::Panicked),
            GateState::Closed(why) => Some(WhyNot::LeftAlone(why)),
            GateState::Open | GateState::Gone => (!self.promotes).then_some(WhyNot::PolicyNeverPromotes),
        }
    }
}

/// Finds the strongest reason of each window of a VM.
struct Explainer<'a> {
    rows: &'a VmSnapshot,
    states: &'a [WindowState],
    /// By row; empty where every window can be huge.
    barred: &'a [Option<CannotBeHuge>],
    now: Moment,
    of_vm: Option<WhyNot>,
    keeps_holes: Option<KeptHoles>,
    is_shared: bool,
    swapped: &'a Swapped,
    swapped_max: u16,
    /// Reason for windows that have none of their own.
    otherwise: WhyNot,
    /// The policy's own reason, by row.
    own_reason: &'a dyn Fn(usize) -> Option<WhyNot>,
}

/// Reason of the policy itself not to promote a row of the VM at `index`.
fn own_reason(policy: &dyn Policy, index: usize, rows: &VmSnapshot, row: usize) -> Option<WhyNot> {
    let gains_nothing = || policy.gains_nothing(index, rows, row).then_some(WhyNot::GainsNothing);
    policy.why_small(rows.vm, row).map(WhyNot::KeptSmall).or_else(gains_nothing)
}

impl Explainer<'_> {
    /// Reasons of all rows; neighbours mostly have the same one.
    fn runs(&self) -> Vec<(u32, Option<WhyNot>)> {
        let mut runs: Vec<(u32, Option<WhyNot>)> = Vec::new();
        for why in (0..self.rows.len()).map(|row| self.why_not(row)) {
            match runs.last_mut() {
                Some((rows, of_run)) if *of_run == why => *rows += 1,
                _ => runs.push((1, why)),
            }
        }
        runs
    }

    /// `None` for a window that is served with a large page.
    fn why_not(&self, row: usize) -> Option<WhyNot> {
        let VmSnapshot { backing, is_held, ready_at, resident, .. } = self.rows;
        let is_never = ready_at[row] == NEVER;
        if backing[row].is_large() && !is_held[row] {
            return None;
        }
        if let Some(Some(why)) = self.barred.get(row) {
            return Some(WhyNot::CannotBeHuge(*why));
        }
        let is_swapped = self.swapped.of_row(row) > self.swapped_max;
        if backing[row] == Backing::Unbacked && !is_swapped {
            return Some(WhyNot::NeverTouched);
        }
        Some(match self.of_vm {
            Some(why) => why,
            None if is_held[row] && is_never => WhyNot::HeldByOthers,
            None if is_held[row] => WhyNot::Held,
            None if is_swapped => WhyNot::Swapped,
            None => match self.why_kept(row, has_hole(resident[row])) {
                Some(why) => why,
                None if is_never => WhyNot::UnderWay,
                None => match self.states[row].backs_off_for(self.now) {
                    Some(refusal) => WhyNot::backing_off(refusal),
                    None => self.why_not_chosen(row),
                },
            },
        })
    }

    fn why_not_chosen(&self, row: usize) -> WhyNot {
        match self.otherwise {
            WhyNot::NotChosen => (self.own_reason)(row).unwrap_or(WhyNot::NotChosen),
            otherwise => otherwise,
        }
    }

    /// The reason to keep the window's absent pages absent, or a watched window as it is.
    fn why_kept(&self, row: usize, has_hole: bool) -> Option<WhyNot> {
        match self.keeps_holes {
            Some(KeptHoles::Watched) if self.is_shared => Some(WhyNot::SharedWatched),
            _ if self.rows.is_given_back(row) => Some(WhyNot::Holes(KeptHoles::GivenBack)),
            Some(why) if has_hole => Some(WhyNot::Holes(why)),
            _ => None,
        }
    }
}

/// Number of windows of each reason.
fn count(runs: &[(u32, Option<WhyNot>)]) -> BTreeMap<WhyNot, u64> {
    let mut counts = BTreeMap::new();
    for (windows, why) in runs {
        why.iter().for_each(|why| *counts.entry(*why).or_default() += u64::from(*windows));
    }
    counts
}
