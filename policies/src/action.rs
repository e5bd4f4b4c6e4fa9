//! What a policy may ask for. It states the intent; `memory` chooses the mechanism by measured cost.

use alloc::vec::Vec;

use crate::budget::Cost;
use crate::snapshot::VmId;
use crate::units::{PageSize, WindowIndex};

/// One request about one window. The set is closed: an actuator that gets one knows all there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Serve the window with a page of this size, larger than now.
    Promote {
        /// Whose window.
        vm: VmId,
        /// Which window; for 1 GiB the first of its giant.
        window: WindowIndex,
        /// The size to reach.
        to: PageSize,
    },
    /// Serve the window with pages of this size, smaller than now.
    Demote {
        /// Whose window.
        vm: VmId,
        /// Which window; from 1 GiB the first of its giant.
        window: WindowIndex,
        /// The size to reach.
        to: PageSize,
    },
    /// Give the window's base pages that hold only zeroes back to the host.
    Release {
        /// Whose window.
        vm: VmId,
        /// Which window.
        window: WindowIndex,
    },
}

impl Action {
    /// Whose window is asked about.
    pub const fn vm(self) -> VmId {
        match self {
            Action::Promote { vm, .. } | Action::Demote { vm, .. } | Action::Release { vm, .. } => vm,
        }
    }

    /// Which window is asked about.
    pub const fn window(self) -> WindowIndex {
        match self {
            Action::Promote { window, .. } | Action::Demote { window, .. } | Action::Release { window, .. } => window,
        }
    }
}

/// An action and what its policy expects it to cost; that much was taken from the budget for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedAction {
    /// The request.
    pub action: Action,
    /// The estimate.
    pub cost: Cost,
}

/// An ordered, bounded list of requests: the first is done first, and what no longer fits is not in it.
#[derive(Clone, Debug)]
pub struct Plan {
    actions: Vec<PlannedAction>,
    bound: usize,
}

impl Plan {
    /// More than this many actions in one interval are never useful: at the fastest collapse measured (0.3 ms) they
    /// already take a second.
    pub const BOUND_DEFAULT: usize = 4096;

    /// An empty plan that takes at most `bound` actions.
    pub fn with_bound(bound: usize) -> Plan {
        Plan { actions: Vec::new(), bound }
    }

    /// Whether no further action fits.
    pub fn is_full(&self) -> bool {
        self.actions.len() >= self.bound
    }

    /// Appends an action the budget was already asked for.
    ///
    /// # Panics
    /// Where the plan is full: ask [`Plan::is_full`] before asking the budget.
    pub fn push(&mut self, action: Action, cost: Cost) {
        assert!(!self.is_full(), "a plan holds at most {} actions", self.bound);
        self.actions.push(PlannedAction { action, cost });
    }

    /// The actions, first to be done first.
    pub fn actions(&self) -> &[PlannedAction] {
        &self.actions
    }

    /// Forgets the actions and keeps the room.
    pub fn clear(&mut self) {
        self.actions.clear();
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::with_bound(Plan::BOUND_DEFAULT)
    }
}
