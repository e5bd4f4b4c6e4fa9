//! An action of a plan, from its request to its outcome.
//!
//! ```text
//!   plan ─▶ requested ─▶ guards ─▶ mechanism ─▶ ended ─▶ report, budget, policy
//!              └── result: skipped ──┴───────────────────────▲
//! ```

use std::time::Duration;

use wideleaf_policies::window::WindowState;
use wideleaf_policies::{Action, Bytes, Cost, Moment, NodeId, OutcomeResult, PlannedAction, Skip};

/// Mechanisms of actions; reports count under the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mechanism {
    Collapse,
    Swap,
    Vacate,
    Split,
    HoldAt4K,
    Recover,
    Release,
    MoveToNode,
    GiantPromote,
    GiantDemote,
    None,
}

impl Mechanism {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Mechanism::Collapse => "collapse",
            Mechanism::Swap => "swap",
            Mechanism::Vacate => "vacate",
            Mechanism::Split => "split",
            Mechanism::HoldAt4K => "hold_at_4k",
            Mechanism::Recover => "recover",
            Mechanism::Release => "release",
            Mechanism::MoveToNode => "move_to_node",
            Mechanism::GiantPromote => "giant_promote",
            Mechanism::GiantDemote => "giant_demote",
            Mechanism::None => "none",
        }
    }

    /// Whether a thread of the guest that touches the window meanwhile waits. Such an action waits for its turn.
    ///
    /// So do a split and a release, also on a host that is short of memory: the budget's half a CPU allows them less
    /// than twice as much time on average, so that memory is free a little later. In a row, they would stop the guest.
    /// A hold and its end change no page of the host, and the guest goes on with what KVM maps at its next touch.
    pub(super) const fn takes_out_of_reach(self) -> bool {
        !matches!(self, Mechanism::HoldAt4K | Mechanism::Recover | Mechanism::None)
    }
}

/// Window that an action is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// Index of the VM, in the order given.
    pub vm: usize,
    /// Row of the window in the VM's snapshot.
    pub row: usize,
    /// State of the window while it is being acted on.
    pub state: WindowState,
    /// Whether only a hold keeps the window from being large.
    pub is_held: bool,
}

/// An action of a plan: begins as a request and ends as an outcome.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    /// The action as the policy planned it.
    pub planned: PlannedAction,
    /// Position of the action in the plan.
    pub position: usize,
    /// Window that is being acted on; `None` for a giant, and where no window may be acted on.
    pub target: Option<Target>,
    /// Whether it vacates a window for which no promotion of the plan has use: the huge page goes back to the host.
    pub is_for_others: bool,
    /// Mechanism that was used, if any.
    pub mechanism: Mechanism,
    /// Result of the action.
    pub result: OutcomeResult,
    /// Moment at which it was over.
    pub at: Moment,
    /// Cost of all attempts together.
    pub cost: Cost,
    /// Longest time that the memory was out of the guest's reach.
    pub unavailable: Duration,
    /// Bytes that became resident only because the page is large.
    pub bloat: Bytes,
    /// Bytes given back to the host.
    pub freed: Bytes,
    /// Result of a swap that was tried first and that this host may not support at all.
    pub unswapped: Option<OutcomeResult>,
}

impl Attempt {
    /// Request of an action at which nothing was done yet.
    pub fn requested(planned: PlannedAction, position: usize, at: Moment) -> Attempt {
        Attempt {
            planned,
            position,
            target: None,
            is_for_others: false,
            mechanism: Mechanism::None,
            result: OutcomeResult::Skipped(Skip::NoMechanism),
            at,
            cost: Cost::default(),
            unavailable: Duration::ZERO,
            bloat: Bytes::ZERO,
            freed: Bytes::ZERO,
            unswapped: None,
        }
    }

    /// Ends with this result, without any cost.
    pub fn ended(self, mechanism: Mechanism, result: OutcomeResult) -> Attempt {
        Attempt { mechanism, result, ..self }
    }

    /// Ends at this moment for the next plan to name again.
    pub fn put_off(self, at: Moment) -> Attempt {
        Attempt { at, ..self.ended(Mechanism::None, OutcomeResult::Skipped(Skip::NextTick)) }
    }

    /// Whether it is a promotion that may copy, and so needs a huge page.
    pub fn needs_huge_page(&self) -> bool {
        let is_promotion = matches!(self.planned.action, Action::Promote { .. });
        is_promotion && self.target.is_some_and(|target| !target.is_held)
    }

    /// NUMA node from which it wants its huge page; `None`: from any.
    pub fn node_of_page(&self) -> Option<NodeId> {
        self.planned.node
    }

    /// Whether it vacates a window.
    pub fn is_vacate(&self) -> bool {
        matches!(self.planned.action, Action::Vacate { .. }) && self.target.is_some()
    }

    /// Whether it moves a window to another node.
    fn is_move(&self) -> bool {
        matches!(self.planned.action, Action::Move { .. }) && self.target.is_some()
    }

    /// Whether it may copy a window.
    pub fn is_copy(&self) -> bool {
        self.needs_huge_page() || self.is_vacate() || self.is_move()
    }
}
