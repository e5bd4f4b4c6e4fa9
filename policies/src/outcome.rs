//! What became of a request. Refusals are classes, not errno values: a policy reacts to "no huge page was to be had",
//! not to a number; `memory` does the translation, `madvise(2)` is its source.

use core::fmt;
use core::time::Duration;

use crate::action::Action;
use crate::budget::Cost;
use crate::units::Moment;

/// A request that was looked at, and the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The request.
    pub action: Action,
    /// When it ended.
    pub at: Moment,
    /// What it really cost.
    pub cost: Cost,
    /// How long the window may have been out of the guest's reach: the time of the kernel's call, an upper bound.
    pub unavailable: Duration,
    /// What happened.
    pub result: OutcomeResult,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OutcomeResult {
    /// Done, and seen in the host's page tables afterwards.
    Done,
    /// The kernel was asked and did not do it.
    Refused(Refusal),
    /// The kernel was not asked.
    Skipped(Skip),
}

/// Why the kernel did not do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Refusal {
    /// No free page of the size (`ENOMEM`).
    NoHugePage,
    /// A page of the window was locked, pinned or moving, or a cgroup limit was met (`EAGAIN`, `EBUSY`).
    Busy,
    /// The window can not be that size: a hole, a `MADV_NOHUGEPAGE` mapping, a misaligned file (`EINVAL`).
    NotEligible,
    /// We may not (`EPERM`, `EACCES`).
    NotPermitted,
    /// The call said yes, the page tables say no.
    NotObserved,
    /// The guest wrote faster than its memory could be copied, or stopped too slowly: swapping the memory would have taken a
    /// longer pause than allowed.
    OutrunByWrites,
    /// Pages of the window are merged with equal ones (KSM), and a large page would take the memory again that this saves.
    Merged,
    /// The process whose memory it is has ended (`ESRCH`).
    Gone,
    /// Any other errno.
    Other(i32),
}

/// Why the kernel was not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Skip {
    /// It already has that size.
    AlreadyDone,
    /// Nothing is present there any more.
    NotResident,
    /// This host or this backing has no mechanism for it.
    NoMechanism,
    /// The window backs off after a refusal.
    BackingOff,
    /// The host had no huge page when it was asked last, and no block that would be one has become free since.
    NoHugePage,
    /// A giant is being moved: this one, or another, and they are moved one at a time.
    GiantUnderWay,
    /// Pages are absent from the window that the guest gave back on purpose, and a large page would bring them back.
    Hole,
    /// More of it is given back by the guest than is tolerated: a large page would take it again.
    GivenBack,
    /// The whole VM is left alone for now, a migration perhaps.
    LeftAlone,
    /// The manager was told to stop.
    Stopping,
}

impl OutcomeResult {
    /// The name under which this is counted and reported.
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
            OutcomeResult::Skipped(Skip::Hole) => "skipped_hole",
            OutcomeResult::Skipped(Skip::GivenBack) => "skipped_given_back",
            OutcomeResult::Skipped(Skip::LeftAlone) => "skipped_left_alone",
            OutcomeResult::Skipped(Skip::Stopping) => "skipped_stopping",
        }
    }
}

impl fmt::Display for OutcomeResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
