//! Everything that the loop keeps for one VM, from its first tick to its last.
//!
//! ```text
//!   ManagedVm ──▶ guard of its second level ─┬─ claiming ──────▶ sensors ──▶ swappers
//!                                            └─ without claims ─▶ giants
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use wideleaf_policies::policy::Needs;
use wideleaf_policies::recovery::Events;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::window::WindowState;
use wideleaf_policies::{Moment, PlannedAction, VmSnapshot, WindowIndex};

use super::ManagerConfig;
use super::collapsing::Collapsing;
use super::giants::GiantVm;
use super::kernel_work::KernelWorkCounter;
use super::managed_vm::ManagedVm;
use super::node_sight::VmSight;
use super::reach::Reach;
use super::releasing::Releasing;
use super::report::ManagerReport;
use super::sampling::{Sampling, Wishes};
use super::stall_budget::StallBudget;
use super::swaps::{SwapHand, Swaps};
use crate::explain::CannotBeHuge;
use crate::gate::GateState;
use crate::host::Host;
use crate::kernel::Kernel;
use crate::second_level::guard::SecondLevelGuard;
use crate::sensors::host_backing::WindowBacking;
use crate::sensors::swapped::Swapped;

/// State of one VM under the loop.
pub(super) struct VmState {
    /// The VM as it was given, with a guarded second level.
    pub managed: ManagedVm,
    /// State of every window, by row of the VM's snapshot.
    pub windows: Vec<WindowState>,
    /// Backing of every window as it was last seen, by row; empty before the first scan and after a failed one.
    pub backing: Vec<WindowBacking>,
    /// Begin of the latest scan of all windows that succeeded; `None` before the first.
    pub scanned_at: Option<Moment>,
    /// The slower sensors of the VM.
    pub sampling: Sampling,
    /// Swappers of the VM's windows; `None` where windows cannot be swapped.
    pub swaps: Option<Swaps>,
    /// State for releases.
    pub releasing: Releasing,
    /// State for collapses.
    pub collapsing: Collapsing,
    /// Account of stalls of the whole guest.
    pub stalls: StallBudget,
    /// Account of the time for which windows were out of the guest's reach.
    pub reach: Reach,
    /// Means of moving the VM's giants; `None` where giants cannot be moved.
    pub giants: Option<GiantVm>,
    /// Guard of the dirty logs; `None` without a second level.
    pub second_level_guard: Option<Arc<SecondLevelGuard>>,
    /// Index of the first VM with the same second level, in the order given.
    pub first_of_second_level: usize,
    /// Whether an action of the VM has panicked. Such a VM gets no more actions and samples.
    pub is_left_alone: bool,
    /// State of the gate at this tick.
    pub gate: GateState,
    /// Pages that are swapped out, at this tick.
    pub swapped: Swapped,
    /// Largest number of swapped pages in a window that may be promoted.
    pub swapped_max: u16,
    /// Changes of windows that the manager did not make.
    pub kernel_work: KernelWorkCounter,
    /// NUMA nodes of its windows and vCPUs; empty on a host with one node.
    pub node_sight: VmSight,
    /// Events of the guest as of this tick.
    pub events: Events,
    /// Windows that can never be huge, by row; see [`ManagedVm::barred_windows`].
    pub barred: Vec<Option<CannotBeHuge>>,
    /// Sensors with a failed latest sample: the log gets one line for each run of failures.
    pub failing: BTreeSet<&'static str>,
    /// Window from which the next check of given-back memory continues.
    pub given_back_from: WindowIndex,
}

/// The parts of a VM that all acting threads share.
#[derive(Clone, Copy)]
pub(super) struct SharedParts<'a> {
    /// The VM as the loop knows it.
    pub managed: &'a ManagedVm,
    /// State for releases.
    pub releasing: &'a Releasing,
    /// State for collapses.
    pub collapsing: &'a Collapsing,
    /// Account of stalls of the whole guest.
    pub stalls: &'a StallBudget,
    /// Account of the time for which windows were out of the guest's reach.
    pub reach: &'a Reach,
}

impl VmState {
    /// A VM on which nothing was done yet. `giants` changes its second level, so it runs before the sensors start.
    /// Each missing sensor adds a line to `unanswered`.
    pub fn new(
        host: &Arc<dyn Kernel>,
        mut managed: ManagedVm,
        first_of_second_level: usize,
        giants: impl FnOnce(&mut ManagedVm, Arc<SecondLevelGuard>) -> Option<GiantVm>,
        needs: Needs,
        config: &ManagerConfig,
        unanswered: &mut Vec<String>,
    ) -> VmState {
        let second_level_guard = guard_second_level(&mut managed);
        if let Some(ram) = &managed.ram {
            ram.given_back().book().set_rules(config.given_back);
        }
        let giants = second_level_guard.clone().and_then(|guard| giants(&mut managed, guard));
        let budget = (config.sampling, config.sampling_burst);
        let sampling = Sampling::new(host, &managed, needs, budget, unanswered);
        unanswered.extend(managed.why_gains_are_assumed(needs));
        let windows = managed.ranges.iter().map(|range| range.gpa.windows().len()).sum();
        VmState {
            windows: vec![WindowState::Ready; windows],
            backing: Vec::new(),
            scanned_at: None,
            swaps: sampling.access().and_then(|access| Swaps::new(access, config.copy_threads)),
            sampling,
            releasing: Releasing::new(host.clone()),
            collapsing: Collapsing::new(host.clone()),
            stalls: StallBudget::default(),
            reach: Reach::new(config.out_of_reach),
            giants,
            second_level_guard,
            first_of_second_level,
            is_left_alone: false,
            gate: GateState::Open,
            swapped: Swapped::Nothing,
            swapped_max: BASE_PAGES_PER_WINDOW,
            kernel_work: KernelWorkCounter::default(),
            node_sight: VmSight::default(),
            events: Events::default(),
            barred: managed.barred_windows(),
            failing: BTreeSet::new(),
            given_back_from: WindowIndex::new(0),
            managed,
        }
    }

    /// Whether actions and the slower sensors may disturb the VM at this tick.
    pub fn may_be_disturbed(&self) -> bool {
        !self.is_left_alone && self.gate == GateState::Open
    }

    /// Whether a sample may begin: not while the guest is paused either.
    pub fn may_be_sampled(&self, now: Moment) -> bool {
        self.may_be_disturbed() && !self.sampling.is_at_rest(now)
    }

    /// Whether the guest has not ended yet.
    pub fn is_there(&self) -> bool {
        self.gate != GateState::Gone
    }

    /// The parts that all acting threads share.
    pub fn shared_parts(&self) -> SharedParts<'_> {
        let VmState { managed, releasing, collapsing, stalls, reach, .. } = self;
        SharedParts { managed, releasing, collapsing, stalls, reach }
    }

    /// The shared parts, and one means of swapping for each thread that copies.
    pub fn parts_for_copies(&mut self) -> (SharedParts<'_>, Option<impl Iterator<Item = SwapHand<'_>>>) {
        let VmState { managed, releasing, collapsing, stalls, reach, swaps, .. } = self;
        (SharedParts { managed, releasing, collapsing, stalls, reach }, swaps.as_mut().map(Swaps::hands))
    }

    /// Begins the next samples. `rows` is the snapshot of this tick, `wishes` says of what use samples are to the
    /// policy, `planned` is the tick's plan.
    pub fn start_samples(
        &mut self,
        host: &dyn Host,
        rows: &VmSnapshot,
        wishes: Wishes<'_>,
        planned: &[PlannedAction],
        report: &mut ManagerReport,
    ) {
        let vm = &self.managed;
        let acted_on = |planned: &PlannedAction| (planned.action.vm() == vm.id).then(|| planned.action.window());
        let acted_on = planned.iter().filter_map(acted_on).collect();
        self.sampling.start(host, vm, rows, wishes, &acted_on, report);
    }

    /// Forgets the guest: the RAM now holds another one. No sample is under way.
    pub fn forget(&mut self) {
        self.windows.fill(WindowState::Ready);
        self.sampling.forget();
        self.backing.clear();
        self.node_sight = VmSight::default();
        self.given_back_from = WindowIndex::new(0);
    }
}

/// Guards a VM's second level, so that the dirty logs of other programs are left alone.
fn guard_second_level(vm: &mut ManagedVm) -> Option<Arc<SecondLevelGuard>> {
    let claims = vm.ram.as_ref().map_or_else(Arc::default, |ram| ram.claims().clone());
    let guard = Arc::new(SecondLevelGuard::new(vm.second_level.take()?, claims));
    vm.second_level = Some(guard.clone());
    Some(guard)
}
