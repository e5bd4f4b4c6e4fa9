//! What a policy would have done on a recording, and the cost of that.
//!
//! ```text
//!   recording ─┬─ snapshot ──▶ simulated host ──▶ snapshot as this policy would have made it ──▶ Policy::plan
//!              │                    ▲                                                             │ plan
//!              ├─ plan: its moment  └── actions done ── outcomes ──▶ settle, learn ◀──────────────┘
//!              └─ outcomes: their medians are the costs of actions
//! ```
//!
//! The guest is the recorded one: its touches and their times. The pages are those that the replayed policy would
//! have made. Windows that the recording's own policy promoted are base pages again, with their earlier residency.
//! Windows that the replayed policy promotes stay large for as long as the recording has a page there.
//!
//! An action that the recording's own policy requested at the same tick, for a window in the same state, has its
//! recorded outcome. So a replay of the recording's own policy repeats its actions. Any other feasible action is
//! done, at the median cost of the recorded ones. That includes a promotion where huge pages are short: policies see
//! how many were free in the recording, and none is refused beyond those that the recording refused.
//!
//! Reservations are kept as on a live host; pages that appeared between two snapshots arrive at once. Reserved
//! frames that hold no page are in no snapshot.
//!
//! Data that a recording cannot know about stays as recorded: accesses, writes, KVM's totals, memory that its
//! policy released or split. Ages of samples are not in a recording, so each counts as just taken. A hold applies to a
//! window, since a recording has no memslots. Promotion does not make the guest faster, so only the recording's own
//! policy has the readings of the guest's progress: any other one would measure that it gained nothing.

use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;

use wideleaf_policies::action::{Action, Plan};
use wideleaf_policies::budget::Budget;
use wideleaf_policies::outcome::Outcome;
use wideleaf_policies::policy::Policy;
use wideleaf_policies::recording::{DecodeError, Decoder, Frame, Header, RecordedOutcome};
use wideleaf_policies::snapshot::{Snapshot, VmSnapshot};
use wideleaf_policies::units::{Moment, PageSize, WindowIndex};

mod costs;
pub(crate) mod feasible;
mod host;
mod tally;

pub use costs::Costs;
pub use tally::{Tally, action_name};

use host::SimulatedHost;

/// A recording that was read once from beginning to end, so later uses find no error.
#[derive(Clone, Debug)]
pub struct Recording<'a> {
    decoder: Decoder<'a>,
    /// Costs of its actions.
    pub costs: Costs,
    /// Number of its ticks.
    pub ticks: u64,
    /// Time from the first snapshot to the last.
    pub length: Duration,
    /// Offset at which it was cut off; `None` if it is complete.
    pub cut_off_at: Option<usize>,
    /// Whether the loop closed it; otherwise its end may be missing.
    pub is_closed: bool,
}

impl<'a> Recording<'a> {
    /// Reads a recording. One that was cut off is read up to the cut.
    ///
    /// # Errors
    /// [`DecodeError`] if the bytes are not a recording, or damaged.
    pub fn read(bytes: &'a [u8]) -> Result<Recording<'a>, DecodeError> {
        let decoder = Decoder::open(bytes)?;
        let mut costs = costs::Samples::default();
        let (mut ticks, mut cut_off_at, mut is_closed) = (0, None, false);
        let mut seen: Option<(Moment, Moment)> = None;
        for frame in decoder.clone() {
            match frame {
                Err(DecodeError::CutOff { offset }) => cut_off_at = Some(offset),
                Err(error) => return Err(error),
                Ok(Frame::Snapshot { at, .. }) => seen = Some((seen.map_or(at, |(first, _)| first), at)),
                Ok(Frame::Plan { .. }) => ticks += 1,
                Ok(Frame::Outcome(recorded)) => costs.add(&recorded),
                Ok(Frame::End) => is_closed = true,
            }
        }
        let length = seen.map_or(Duration::ZERO, |(first, last)| last.since(first));
        Ok(Recording { decoder, costs: costs.medians(), ticks, length, cut_off_at, is_closed })
    }

    /// Header of the recording.
    pub fn header(&self) -> &Header {
        self.decoder.header()
    }

    /// Result of its own policy.
    pub fn recorded(&self) -> Tally {
        let mut tally = Tally::default();
        for Tick { at, snapshot, outcomes, .. } in self.ticks() {
            tally.observe(at, &snapshot);
            for RecordedOutcome { outcome, .. } in &outcomes {
                tally.count(outcome, &snapshot);
            }
        }
        tally
    }

    /// What `policy`, in its initial state, would have done with the same budget.
    pub fn replay(&self, policy: &mut dyn Policy) -> Tally {
        let mut tally = Tally::default();
        let mut host = SimulatedHost::new(self.header(), self.costs, policy.reserves());
        let mut budget = None;
        let mut plan = Plan::default();
        for tick in self.ticks() {
            let seen = host.see(tick.at, &tick.snapshot, policy, &mut tally);
            tally.observe(tick.at, &seen);
            if let Some(now) = tick.planned_at {
                let budget = budget.get_or_insert_with(|| Budget::new(self.header().limits, tick.at));
                budget.refill(tick.at);
                plan.clear();
                policy.plan(&seen, now, budget, &mut plan);
                let mut clock = now;
                for planned in plan.actions() {
                    let outcome = host.act(planned.action, &seen, &tick, clock);
                    clock = outcome.at;
                    budget.settle(planned.cost, outcome.cost);
                    tally.count(&outcome, &seen);
                    policy.learn(&outcome);
                }
                tally.budget_refusals = Some(budget.refusals());
            }
            host.remember(&tick);
        }
        tally
    }

    fn ticks(&self) -> Ticks<'a> {
        Ticks { frames: self.decoder.clone(), next: None }
    }
}

/// One round of the recorded loop.
struct Tick {
    /// Start of the round.
    at: Moment,
    snapshot: Snapshot,
    /// The moment that the policy was given; `None` for the last snapshot, on which the policy does not decide.
    planned_at: Option<Moment>,
    outcomes: Vec<RecordedOutcome>,
}

impl Tick {
    /// The recorded outcome of an action in this tick.
    fn outcome_of(&self, action: Action) -> Option<&Outcome> {
        self.outcomes.iter().map(|recorded| &recorded.outcome).find(|outcome| outcome.action == action)
    }
}

/// Frames, grouped into ticks. Frames before the first snapshot belong to no tick.
struct Ticks<'a> {
    frames: Decoder<'a>,
    /// Start of the next tick, already read.
    next: Option<(Moment, Snapshot)>,
}

impl Iterator for Ticks<'_> {
    type Item = Tick;

    fn next(&mut self) -> Option<Tick> {
        let mut tick: Option<Tick> =
            self.next.take().map(|(at, snapshot)| Tick { at, snapshot, planned_at: None, outcomes: Vec::new() });
        for frame in self.frames.by_ref().map_while(Result::ok) {
            match (frame, &mut tick) {
                (Frame::Snapshot { at, snapshot }, None) => {
                    tick = Some(Tick { at, snapshot, planned_at: None, outcomes: Vec::new() });
                }
                (Frame::Snapshot { at, snapshot }, Some(_)) => {
                    self.next = Some((at, snapshot));
                    break;
                }
                (Frame::Plan { now, .. }, Some(tick)) => tick.planned_at = Some(now),
                (Frame::Outcome(recorded), Some(tick)) => tick.outcomes.push(recorded),
                (_, None) | (Frame::End, _) => {}
            }
        }
        tick
    }
}

/// Number of windows in a giant.
pub(crate) const WINDOWS_PER_GIANT: u64 = PageSize::Giant1G.bytes().get() / PageSize::Huge2M.bytes().get();

/// Rows of the page of that size that contains `window`.
pub(crate) fn rows_of_page(vm: &VmSnapshot, window: WindowIndex, size: PageSize) -> Range<usize> {
    let (first, count) = match size {
        PageSize::Base4K | PageSize::Huge2M => (window.get(), 1),
        PageSize::Giant1G => (window.giant() * WINDOWS_PER_GIANT, WINDOWS_PER_GIANT),
    };
    let row = |index| vm.windows.partition_point(|window| window.get() < index);
    row(first)..row(first + count)
}
