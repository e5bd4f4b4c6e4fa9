//! Decisions of `auto` by NUMA node: on which node a promotion takes its page, which huge windows move home, and which
//! are split because several nodes fight over them.
//!
//! ```text
//!   promotion     a page of the node that touches the window; none is left ─▶ that of a cold window of this node, if
//!                 it saves twice as much as that; or else it waits (KeptSmall::NoneOnNode), unless it is remote
//!                 already: then it becomes huge where it is
//!   huge, remote  misses/s × cycles of a remote reference × horizon  ≥  cost of a move × hysteresis   ─▶ move
//!   huge, shared  touched from several nodes, and by at least `split_shared` % of the VM's touches     ─▶ split
//! ```
//!
//! A miss of the TLB makes at least one reference to the window's memory, so each saves at least the remote part of one
//! reference once the window is local. A node has one page more than it has free blocks: the kernel may make one by
//! compaction, and a refusal says that it cannot.
//!
//! The last rule is Carrefour-LP's (Gaud et al., ATC '14): a huge page that several nodes share cannot be local to all
//! of them, and a hot one loads the memory controller of one node. Its base pages can be placed one by one, which is
//! the work of the kernel's NUMA balancing. Split windows stay small for as long as several nodes share them.

use alloc::vec::Vec;
use core::ops::ControlFlow;

use super::Auto;
use super::judge::{Judge, Prices};
use super::memory::Memory;
use crate::action::{Action, Plan};
use crate::bucket::bucket_of;
use crate::budget::Budget;
use crate::candidates::is_demotable;
use crate::locality::{self, FreePages, Placing};
use crate::node::NodeId;
use crate::policy::KeptSmall;
use crate::rank::Ranking;
use crate::snapshot::{Snapshot, VmId, VmSnapshot};
use crate::units::Moment;
use crate::window_node::TouchedFrom;

/// Largest number of windows that one plan moves to other nodes, or splits because nodes share them: each waits for its
/// next sample before it is moved again.
const MOVES_IN_A_PLAN: usize = 64;

/// What `auto` knows about nodes as of one plan.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    /// Least share of a VM's touches in percent from which a shared window is split; 0: none is.
    split_shared_percent: u64,
    free: FreePages,
    /// Number of the present plan: a window that waited in it waits now.
    plan: u32,
    remote: Ranking,
    /// Sum of the touches per second of each VM at the latest plan, in the order of the snapshot; empty where no shared
    /// window is split.
    touches: Vec<u64>,
    /// Number of windows that the latest plan left on base pages because their node had no huge page.
    pub waiting: u64,
    /// Number of promotions that were to bring a window home.
    pub promoted_home: u64,
    /// Number of huge windows to be moved home.
    pub moved: u64,
    /// Number of shared windows to be split.
    pub split: u64,
}

impl Nodes {
    /// Nothing is known yet.
    pub fn new(split_shared_percent: u64) -> Nodes {
        Nodes { split_shared_percent, ..Nodes::default() }
    }

    /// Begins a plan.
    pub fn open(&mut self, snapshot: &Snapshot) {
        let with_nodes = snapshot.vms.iter().find(|vm| locality::has_nodes(vm));
        self.free = with_nodes.map(FreePages::of).unwrap_or_default();
        self.plan = self.plan.wrapping_add(1);
        self.waiting = 0;
        let touches = |vm: &VmSnapshot| vm.access.iter().filter_map(|access| access.touches_per_s()).sum::<u64>();
        self.touches.clear();
        if self.split_shared_percent > 0 {
            self.touches.extend(snapshot.vms.iter().map(touches));
        }
    }

    /// Node of the huge page for this window, which gets it: `None` if the host may choose. `Break` if it has to wait
    /// for one.
    pub fn place(&mut self, memory: &mut Memory, vm: &VmSnapshot, row: usize) -> ControlFlow<(), Option<NodeId>> {
        match locality::placing(vm, row, &self.free) {
            Placing::Anywhere => ControlFlow::Continue(None),
            Placing::On(node) => {
                self.free.take(node);
                self.promoted_home += u64::from(locality::is_remote(vm, row) && locality::home(vm, row) == Some(node));
                ControlFlow::Continue(Some(node))
            }
            Placing::NoneFree(_) => {
                memory.waited_in = self.plan;
                self.waiting += 1;
                ControlFlow::Break(())
            }
        }
    }

    /// Whether a window needs a page of a node that has no free block.
    pub fn lacks_block(&self, node: Option<NodeId>) -> bool {
        node.is_some_and(|node| !self.free.has_block(node))
    }

    /// Whether the window waits for a page of its node.
    pub fn waits(&self, memory: &Memory) -> bool {
        self.plan > 0 && memory.waited_in == self.plan
    }

    /// Whether several nodes share the window, and it has as large a part of the VM's touches as the parameter says.
    pub fn is_fought_over(&self, index: usize, vm: &VmSnapshot, row: usize) -> bool {
        let is_shared = matches!(vm.touched_from[row], TouchedFrom::Several { .. })
            && vm.touched_from[row].mainly().is_none()
            && locality::has_nodes(vm);
        let (Some(touches), all) = (vm.access[row].touches_per_s(), self.touches.get(index).copied().unwrap_or(0))
        else {
            return false;
        };
        self.split_shared_percent > 0
            && is_shared
            && touches > 0
            && u128::from(touches) * 100 >= u128::from(all) * u128::from(self.split_shared_percent)
    }

    /// Reason to keep the window small, if nodes are one.
    pub fn why_small(&self, memory: &Memory) -> Option<KeptSmall> {
        self.waits(memory).then_some(KeptSmall::NoneOnNode)
    }
}

impl Prices {
    /// Cycles per second that remote memory costs a window at least: one reference of each miss.
    fn remote_per_s(&self, vm: &VmSnapshot, row: usize) -> u64 {
        self.misses.per_s(vm.access[row], vm.resident[row]).saturating_mul(self.walk().remote_extra())
    }
}

impl Judge {
    /// Return of a move in percent, if it suffices.
    fn return_of_move(&self, window: &Memory, vm: &VmSnapshot, row: usize) -> Option<u64> {
        let hot_for_ms = self.hot_for_ms(window)?;
        let percent = self.prices.return_percent(self.prices.remote_per_s(vm, row), hot_for_ms, self.move_2m);
        (percent >= self.asked_percent).then_some(percent)
    }
}

impl Auto {
    /// Moves huge windows home, the best return first, and splits those that nodes fight over.
    pub(super) fn go_home(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        if !snapshot.vms.iter().any(locality::has_nodes) {
            return;
        }
        let judge = self.judge(now);
        let named: Vec<(VmId, crate::units::WindowIndex)> =
            plan.actions().iter().map(|planned| (planned.action.vm(), planned.action.window())).collect();
        let is_named = |vm: &VmSnapshot, row: usize| named.contains(&(vm.vm, vm.windows[row]));
        let Auto { nodes, memory, turns, .. } = self;
        let mut remote = core::mem::take(&mut nodes.remote);
        remote.clear();
        let mut shared = Vec::new();
        turns.visit(snapshot, |place| {
            let (vm, row) = place.of(snapshot);
            let window = &memory.of_vm(place.vm as usize)[row];
            if is_demotable(vm, row, now) {
                if nodes.is_fought_over(place.vm as usize, vm, row) {
                    shared.push(place);
                } else if locality::is_remote(vm, row)
                    && let Some(percent) = judge.return_of_move(window, vm, row)
                {
                    remote.push(bucket_of(percent), place);
                }
            }
            ControlFlow::Continue(())
        });
        let best = remote.best_first().filter(|place| {
            let (vm, row) = place.of(snapshot);
            !is_named(vm, row)
        });
        let best: Vec<_> = best.take(MOVES_IN_A_PLAN).collect();
        self.nodes.remote = remote;
        let _full_or_spent = best.into_iter().try_for_each(|place| {
            let (vm, row) = place.of(snapshot);
            let Some(node) = locality::home(vm, row).filter(|node| self.nodes.free.has_block(*node)) else {
                return ControlFlow::Continue(());
            };
            let action = Action::Move { vm: vm.vm, window: vm.windows[row], node };
            self.expectations.request(action, false, budget, plan)?;
            self.nodes.free.take(node);
            self.nodes.moved += 1;
            ControlFlow::Continue(())
        });
        let shared = shared.into_iter().filter(|place| {
            let (vm, row) = place.of(snapshot);
            !is_named(vm, row)
        });
        let shared: Vec<_> = shared.take(MOVES_IN_A_PLAN).collect();
        self.split_shared(&shared, snapshot, budget, plan);
    }
}
