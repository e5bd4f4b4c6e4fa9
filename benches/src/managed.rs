//! A manager for one guest of a bench, the CPU time of its threads, and a policy that can be paused.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wideleaf_memory::manager::ManagedVm;
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_memory::{LinuxHost, Manager, ManagerConfig, ManagerReport};
use wideleaf_policies::parameters::PolicyChoice;
use wideleaf_policies::policy::{KeptSmall, Needs};
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{
    Bids, Budget, BudgetLimits, Bytes, Moment, Outcome, PageSize, PerTenThousand, Plan, Policy, Snapshot, VmId,
    VmSnapshot,
};

use crate::cpu::Threads;
use crate::guest::Guest;

/// The policy with this name and its defaults. It uses the TLB miss cost that wideleaf's own runs
/// use on this machine.
///
/// # Panics
/// If there is no such policy.
pub fn policy(name: &str) -> Box<dyn Policy> {
    let walk = ChosenWalkCost::read(Path::new("/"));
    PolicyChoice::parse(name).expect("a policy of ours").make_for(&walk.cost)
}

/// A manager with its default configuration.
pub struct Managed {
    manager: Manager,
    threads: Threads,
}

impl Managed {
    /// Creates a manager with a loop that waits for [`Managed::activate`].
    ///
    /// # Panics
    /// If its thread cannot be created.
    pub fn prepare(guest: &Guest, policy: Box<dyn Policy>) -> Managed {
        let host = Arc::new(LinuxHost::open().expect("/proc is mounted"));
        let vm = ManagedVm::new(VmId(0), Arc::clone(guest.ram()), Some(Arc::clone(guest.second_level())));
        let start = || Manager::spawn(host, vec![vm], policy, ManagerConfig::default());
        let (manager, threads) = Threads::started_by(start);
        Managed { manager: manager.expect("a thread for the manager"), threads }
    }

    /// Like [`Managed::prepare`], and active at once.
    ///
    /// # Panics
    /// Like [`Managed::prepare`].
    pub fn start(guest: &Guest, policy: Box<dyn Policy>) -> Managed {
        let managed = Managed::prepare(guest, policy);
        managed.activate();
        managed
    }

    /// Lets the manager act.
    pub fn activate(&self) {
        self.manager.activate();
    }

    /// Threads of the loop and of its sensors.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Calls `look` while no window is detached.
    pub fn with_all_in_place<T>(&self, look: impl FnOnce() -> T) -> T {
        self.manager.with_all_in_place(look)
    }

    /// Ends the manager and returns its report.
    pub fn stop(self) -> ManagerReport {
        self.manager.stop()
    }
}

/// Switch by which a policy may act or not.
#[derive(Clone, Debug)]
pub struct Permission(Arc<AtomicBool>);

impl Permission {
    /// Permits actions from the next plan on.
    pub fn give(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Forbids actions from the next plan on.
    pub fn take(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A policy that receives all snapshots and acts only with permission. Without it, the policy plans
/// with an empty budget.
pub struct WithPermission {
    policy: Box<dyn Policy>,
    leave: Permission,
}

impl WithPermission {
    /// The given policy, with permission to act at first.
    pub fn new(policy: Box<dyn Policy>) -> (WithPermission, Permission) {
        let leave = Permission(Arc::new(AtomicBool::new(true)));
        (WithPermission { policy, leave: leave.clone() }, leave)
    }
}

impl Policy for WithPermission {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        if self.leave.0.load(Ordering::Relaxed) {
            return self.policy.plan(snapshot, now, budget, plan);
        }
        let nothing =
            BudgetLimits { copy_per_second: Bytes::ZERO, cpu_share: PerTenThousand::new(0), ..BudgetLimits::default() };
        self.policy.plan(snapshot, now, &mut Budget::new(nothing, now), plan);
    }

    fn needs(&self) -> Needs {
        self.policy.needs()
    }

    fn uses_access(&self, vm: &VmSnapshot, row: usize) -> bool {
        self.policy.uses_access(vm, row)
    }

    fn uses_zero(&self) -> bool {
        self.policy.uses_zero()
    }

    fn hurries(&self, vm: &VmSnapshot, row: usize) -> bool {
        self.policy.hurries(vm, row)
    }

    fn is_measuring(&self) -> bool {
        self.policy.is_measuring()
    }

    fn gains_nothing(&self, index: usize, vm: &VmSnapshot, row: usize) -> bool {
        self.policy.gains_nothing(index, vm, row)
    }

    fn largest_page(&self) -> PageSize {
        self.policy.largest_page()
    }

    fn bids(&self) -> Option<&Bids> {
        self.policy.bids()
    }

    fn why_small(&self, vm: VmId, row: usize) -> Option<KeptSmall> {
        self.policy.why_small(vm, row)
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        self.policy.figures()
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.policy.learn(outcome);
    }

    fn take_walk_cost(&mut self, cost: &WalkCost) {
        self.policy.take_walk_cost(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::{Backing, WindowIndex, WindowRow};

    #[test]
    fn a_policy_without_permission_plans_nothing_and_resumes_afterwards() {
        let mut vm = VmSnapshot::with_capacity(VmId(0), 1);
        vm.push(WindowRow::new(WindowIndex::new(0), 512, Backing::Base4K));
        let snapshot = Snapshot { vms: vec![vm], ..Snapshot::default() };
        let (mut greedy, leave) = WithPermission::new(policy("greedy"));
        let mut planned = || {
            let (mut budget, mut plan) = (Budget::new(BudgetLimits::default(), Moment::START), Plan::default());
            greedy.plan(&snapshot, Moment::START, &mut budget, &mut plan);
            plan.actions().len()
        };
        leave.take();
        assert_eq!(planned(), 0);
        leave.give();
        assert_eq!(planned(), 1);
    }

    #[test]
    fn a_policy_that_may_ask_for_giant_pages_says_so() {
        let of = |choice| WithPermission::new(policy(choice)).0.largest_page();
        assert_eq!(["greedy", "giant"].map(of), [PageSize::Huge2M, PageSize::Giant1G]);
    }
}
