//! What actions cost: as in the recording, or as measured elsewhere.

use alloc::vec::Vec;
use core::time::Duration;

use wideleaf_policies::action::Action;
use wideleaf_policies::budget::Cost;
use wideleaf_policies::median::median;
use wideleaf_policies::outcome::OutcomeResult;
use wideleaf_policies::recording::RecordedOutcome;
use wideleaf_policies::units::{Bytes, PageSize};

/// What an action costs, by what has to be done for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A window to a huge page.
    pub promote_2m: Cost,
    /// A giant to a giant page.
    pub promote_1g: Cost,
    /// A window that was held at 4 KiB back to what it was.
    pub recover: Cost,
    /// A window to base pages.
    pub demote: Cost,
    /// Looking for zero pages, and giving them back.
    pub release: Cost,
}

impl Default for Costs {
    /// For what was not done in a recording. Measured on a shared two-core machine: `MADV_COLLAPSE` at 3.5 GiB/s, fault
    /// and copy into hugetlb pages at 3.3 GiB/s, 0.2 ms to split a huge page. The others are estimates: switching a
    /// dirty log is one ioctl and a walk over its memslot's entries; a release reads the window once at 10 GiB/s and
    /// makes one call.
    fn default() -> Costs {
        let cost = |copied, us| Cost { copied, cpu: Duration::from_micros(us) };
        Costs {
            promote_2m: cost(PageSize::Huge2M.bytes(), 560),
            promote_1g: cost(PageSize::Giant1G.bytes(), 303_000),
            recover: cost(Bytes::ZERO, 100),
            demote: cost(Bytes::ZERO, 200),
            release: cost(Bytes::ZERO, 250),
        }
    }
}

/// Costs of recorded actions that were done.
#[derive(Default)]
pub(super) struct Samples {
    promote_2m: Vec<Cost>,
    promote_1g: Vec<Cost>,
    recover: Vec<Cost>,
    demote: Vec<Cost>,
    release: Vec<Cost>,
}

impl Samples {
    pub fn add(&mut self, recorded: &RecordedOutcome) {
        if recorded.outcome.result != OutcomeResult::Done {
            return;
        }
        let samples = match recorded.outcome.action {
            Action::Promote { .. } if recorded.mechanism == "recover" => &mut self.recover,
            Action::Promote { to: PageSize::Giant1G, .. } => &mut self.promote_1g,
            Action::Promote { .. } => &mut self.promote_2m,
            Action::Demote { .. } => &mut self.demote,
            Action::Release { .. } => &mut self.release,
        };
        samples.push(recorded.outcome.cost);
    }

    pub fn medians(self) -> Costs {
        let otherwise = Costs::default();
        Costs {
            promote_2m: median_cost(&self.promote_2m, otherwise.promote_2m),
            promote_1g: median_cost(&self.promote_1g, otherwise.promote_1g),
            recover: median_cost(&self.recover, otherwise.recover),
            demote: median_cost(&self.demote, otherwise.demote),
            release: median_cost(&self.release, otherwise.release),
        }
    }
}

/// The median of each part of the cost, the upper one of two: a cost that was really paid.
fn median_cost(costs: &[Cost], otherwise: Cost) -> Cost {
    let mut copied: Vec<_> = costs.iter().map(|cost| cost.copied).collect();
    let mut cpu: Vec<_> = costs.iter().map(|cost| cost.cpu).collect();
    match (median(&mut copied, Ord::cmp, |_, upper| upper), median(&mut cpu, Ord::cmp, |_, upper| upper)) {
        (Some(copied), Some(cpu)) => Cost { copied, cpu },
        _ => otherwise,
    }
}
