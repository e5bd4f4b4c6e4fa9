//! What a policy may request. It states the intent; `memory` chooses the mechanism by measured cost.

use alloc::vec::Vec;

use crate::budget::Cost;
use crate::node::NodeId;
use crate::snapshot::VmId;
use crate::units::{PageSize, WindowIndex};

/// One request about one window. The set is closed, so an actuator can handle every kind of action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Serve the window with a page of this size, larger than now.
    Promote {
        /// VM of the window.
        vm: VmId,
        /// The window; for 1 GiB, the first window of its giant.
        window: WindowIndex,
        /// Page size to reach.
        to: PageSize,
    },
    /// Serve the window with pages of this size, smaller than now.
    Demote {
        /// VM of the window.
        vm: VmId,
        /// The window; from 1 GiB, the first window of its giant.
        window: WindowIndex,
        /// Page size to reach.
        to: PageSize,
    },
    /// Give the window's base pages that hold only zeroes back to the host.
    Release {
        /// VM of the window.
        vm: VmId,
        /// The window itself.
        window: WindowIndex,
    },
    /// Move the contents of a large window to base pages elsewhere, and give its huge page back whole: a promotion
    /// later in the plan gets it, or else the host. Nothing of the window is released.
    Vacate {
        /// VM of the window.
        vm: VmId,
        /// The window itself.
        window: WindowIndex,
    },
    /// Move the window's memory to another NUMA node, on pages of the size that it has.
    Move {
        /// VM of the window.
        vm: VmId,
        /// The window itself.
        window: WindowIndex,
        /// Node to reach.
        node: NodeId,
    },
}

impl Action {
    /// VM that the action is about.
    pub const fn vm(self) -> VmId {
        match self {
            Action::Promote { vm, .. }
            | Action::Demote { vm, .. }
            | Action::Release { vm, .. }
            | Action::Vacate { vm, .. }
            | Action::Move { vm, .. } => vm,
        }
    }

    /// Window that the action is about.
    pub const fn window(self) -> WindowIndex {
        match self {
            Action::Promote { window, .. }
            | Action::Demote { window, .. }
            | Action::Release { window, .. }
            | Action::Vacate { window, .. }
            | Action::Move { window, .. } => window,
        }
    }
}

/// An action and its expected cost, which was taken from the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedAction {
    /// The requested action.
    pub action: Action,
    /// Expected cost of the action.
    pub cost: Cost,
    /// NUMA node that a promotion should take its page from; `None`: the host chooses.
    pub node: Option<NodeId>,
}

/// An ordered, bounded list of requests. The manager does the first one first; requests that no longer fit
/// are left out.
#[derive(Clone, Debug)]
pub struct Plan {
    actions: Vec<PlannedAction>,
    bound: usize,
}

impl Plan {
    /// Largest useful number of actions in one interval: at the fastest collapse measured (0.3 ms) they already
    /// take a second.
    pub const BOUND_DEFAULT: usize = 4096;

    /// An empty plan that takes at most `bound` actions.
    pub fn with_bound(bound: usize) -> Plan {
        Plan { actions: Vec::new(), bound }
    }

    /// Whether no further action fits.
    pub fn is_full(&self) -> bool {
        self.room() == 0
    }

    /// Number of actions that still fit.
    pub fn room(&self) -> usize {
        self.bound - self.actions.len()
    }

    /// Appends an action. Its cost was already taken from the budget.
    ///
    /// # Panics
    /// If the plan is full: ask [`Plan::is_full`] before asking the budget.
    pub fn push(&mut self, action: Action, cost: Cost) {
        self.push_on(None, action, cost);
    }

    /// As [`Plan::push`], for a promotion with a page of this NUMA node.
    ///
    /// # Panics
    /// If the plan is full.
    pub fn push_on(&mut self, node: Option<NodeId>, action: Action, cost: Cost) {
        assert!(!self.is_full(), "a plan holds at most {} actions", self.bound);
        self.actions.push(PlannedAction { action, cost, node });
    }

    /// The actions, in the order in which the manager does them.
    pub fn actions(&self) -> &[PlannedAction] {
        &self.actions
    }

    /// Removes the actions and keeps the capacity.
    pub fn clear(&mut self) {
        self.actions.clear();
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::with_bound(Plan::BOUND_DEFAULT)
    }
}
