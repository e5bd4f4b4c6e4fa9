//! The results of requests. Refusals are classes, not errno values: a policy reacts to "no huge page was
//! available", not to a number. `memory` translates them, with `madvise(2)` as the source.

use core::fmt;
use core::time::Duration;

use crate::action::Action;
use crate::budget::Cost;
use crate::units::Moment;

/// A request that was handled, and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The request that was handled.
    pub action: Action,
    /// Time at which the request ended.
    pub at: Moment,
    /// Actual cost of the request.
    pub cost: Cost,
    /// Longest time for which the guest may have been unable to reach the window: the duration of the kernel's
    /// call, an upper bound.
    pub unavailable: Duration,
    /// Result of the request.
    pub result: OutcomeResult,
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OutcomeResult {
    /// Done, and seen in the host's page tables afterwards.
    Done,
    /// The kernel was asked and did not do it.
    Refused(Refusal),
    /// The kernel was not asked.
    Skipped(Skip),
}

/// Reason why the kernel did not do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Refusal {
    /// No free page of the size (`ENOMEM`).
    NoHugePage,
    /// A page of the window was locked, pinned or moving, or a cgroup limit was met (`EAGAIN`, `EBUSY`).
    Busy,
    /// The window cannot be that size: a hole, a `MADV_NOHUGEPAGE` mapping, a misaligned file (`EINVAL`).
    NotEligible,
    /// The manager lacks the permission (`EPERM`, `EACCES`).
    NotPermitted,
    /// The call succeeded, but the page tables do not show the change.
    NotObserved,
    /// The guest wrote faster than its memory could be copied, or stopped too slowly. Swapping the memory would
    /// have taken a longer pause than allowed.
    OutrunByWrites,
    /// Pages of the window are merged with equal ones (KSM). A large page would take the memory again
    /// that merging saves.
    Merged,
    /// The process that owns the memory has ended (`ESRCH`).
    Gone,
    /// Any other errno.
    Other(i32),
}

/// Reason why the kernel was not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Skip {
    /// The window already has that size.
    AlreadyDone,
    /// No page is present in the window any more.
    NotResident,
    /// This host or this backing has no mechanism for the action.
    NoMechanism,
    /// The window backs off after a refusal.
    BackingOff,
    /// The host had no huge page at the last request, and no block of that size has become free since.
    NoHugePage,
    /// A giant is being moved, this one or another; giants are moved one at a time.
    GiantUnderWay,
    /// A page of 1 GiB is being made for the giant. The next plan may name it again.
    PageBeingMade,
    /// The window lacks pages that the guest gave back on purpose, and a large page would bring them back.
    Hole,
    /// The guest has given back more of the window than is tolerated, and a large page would take it again.
    GivenBack,
    /// The whole guest would stall, and its share of stalls is spent.
    StallBudget,
    /// The manager leaves the whole VM alone for now, for example during a migration.
    LeftAlone,
    /// The manager was asked to stop.
    Stopping,
    /// The actions before it took all of the tick's time. The next plan may name it again.
    NextTick,
}

impl OutcomeResult {
    /// The name under which this result is counted and reported.
    pub const fn name(self) -> &'static str {
        match self {
            OutcomeResult::Done => "done",
            OutcomeResult::Refused(Refusal::NoHugePage) => "refused_no_huge_page",
            OutcomeResult::Refused(Refusal::Busy) => "refused_busy",
            OutcomeResult::Refused(Refusal::NotEligible) => "refused_not_eligible",
            OutcomeResult::Refused(Refusal::NotPermitted) => "refused_not_permitted",
            OutcomeResult::Refused(Refusal::NotObserved) => "refused_not_observed",
            OutcomeResult::Refused(Refusal::OutrunByWrites) => "refused_outrun_by_writes",
            OutcomeResult::Refused(Refusal::Merged) => "refused_merged",
            OutcomeResult::Refused(Refusal::Gone) => "refused_gone",
            OutcomeResult::Refused(Refusal::Other(_)) => "refused_other",
            OutcomeResult::Skipped(Skip::AlreadyDone) => "skipped_already_done",
            OutcomeResult::Skipped(Skip::NotResident) => "skipped_not_resident",
            OutcomeResult::Skipped(Skip::NoMechanism) => "skipped_no_mechanism",
            OutcomeResult::Skipped(Skip::BackingOff) => "skipped_backing_off",
            OutcomeResult::Skipped(Skip::NoHugePage) => "skipped_no_huge_page",
            OutcomeResult::Skipped(Skip::GiantUnderWay) => "skipped_giant_under_way",
            OutcomeResult::Skipped(Skip::PageBeingMade) => "skipped_page_being_made",
            OutcomeResult::Skipped(Skip::Hole) => "skipped_hole",
            OutcomeResult::Skipped(Skip::GivenBack) => "skipped_given_back",
            OutcomeResult::Skipped(Skip::StallBudget) => "skipped_stall_budget",
            OutcomeResult::Skipped(Skip::LeftAlone) => "skipped_left_alone",
            OutcomeResult::Skipped(Skip::Stopping) => "skipped_stopping",
            OutcomeResult::Skipped(Skip::NextTick) => "skipped_next_tick",
        }
    }
}

impl fmt::Display for OutcomeResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
