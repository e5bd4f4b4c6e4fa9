//! The costs of actions: as in the recording, or as measured elsewhere.

use alloc::vec::Vec;
use core::time::Duration;

use wideleaf_policies::action::Action;
use wideleaf_policies::budget::Cost;
use wideleaf_policies::median::median;
use wideleaf_policies::outcome::OutcomeResult;
use wideleaf_policies::recording::RecordedOutcome;
use wideleaf_policies::units::{Bytes, PageSize};

/// Costs of actions, by the work that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Promotion of a window to a huge page.
    pub promote_2m: Cost,
    /// Promotion of a giant to a giant page.
    pub promote_1g: Cost,
    /// Move of a giant from its page back to huge pages.
    pub demote_1g: Cost,
    /// Release of a hold at 4 KiB, which restores the window's page size.
    pub recover: Cost,
    /// Demotion of a window to base pages.
    pub demote: Cost,
    /// Search for zero pages, and their release.
    pub release: Cost,
    /// Move of a window from its huge page to base pages.
    pub vacate: Cost,
    /// Move of a window to another node: of what is present, so it may be far less than a promotion.
    pub move_2m: Cost,
}

impl Default for Costs {
    /// Costs of actions that a recording does not contain. Measured on a shared two-core machine: `MADV_COLLAPSE` at
    /// 3.5 GiB/s, fault and copy into hugetlb pages at 3.3 GiB/s, 0.2 ms to split a huge page. The others are
    /// estimates: a giant goes back as fast as it came; switching a dirty log is one ioctl and a walk over its
    /// memslot's entries; a release reads the window once at 10 GiB/s and makes one call; to vacate a window is to make
    /// 512 base pages and to copy, and to move one copies as much as its promotion.
    fn default() -> Costs {
        let cost = |copied, us| Cost { copied, cpu: Duration::from_micros(us) };
        Costs {
            promote_2m: cost(PageSize::Huge2M.bytes(), 560),
            promote_1g: cost(PageSize::Giant1G.bytes(), 303_000),
            demote_1g: cost(PageSize::Giant1G.bytes(), 303_000),
            recover: cost(Bytes::ZERO, 100),
            demote: cost(Bytes::ZERO, 200),
            release: cost(Bytes::ZERO, 250),
            vacate: cost(PageSize::Huge2M.bytes(), 500),
            move_2m: cost(PageSize::Huge2M.bytes(), 560),
        }
    }
}

/// Costs of recorded actions that were done.
#[derive(Default)]
pub(super) struct Samples {
    promote_2m: Vec<Cost>,
    promote_1g: Vec<Cost>,
    demote_1g: Vec<Cost>,
    recover: Vec<Cost>,
    demote: Vec<Cost>,
    release: Vec<Cost>,
    vacate: Vec<Cost>,
    move_2m: Vec<Cost>,
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
            Action::Demote { to: PageSize::Huge2M, .. } => &mut self.demote_1g,
            Action::Demote { .. } => &mut self.demote,
            Action::Release { .. } => &mut self.release,
            Action::Move { .. } => &mut self.move_2m,
            Action::Vacate { .. } => &mut self.vacate,
        };
        samples.push(recorded.outcome.cost);
    }

    pub fn medians(self) -> Costs {
        let otherwise = Costs::default();
        Costs {
            promote_2m: median_cost(&self.promote_2m, otherwise.promote_2m),
            promote_1g: median_cost(&self.promote_1g, otherwise.promote_1g),
            demote_1g: median_cost(&self.demote_1g, otherwise.demote_1g),
            recover: median_cost(&self.recover, otherwise.recover),
            demote: median_cost(&self.demote, otherwise.demote),
            release: median_cost(&self.release, otherwise.release),
            vacate: median_cost(&self.vacate, otherwise.vacate),
            move_2m: median_cost(&self.move_2m, otherwise.move_2m),
        }
    }
}

/// The median of each part of the cost; of two middle values the upper one, so that it is an actual cost.
fn median_cost(costs: &[Cost], otherwise: Cost) -> Cost {
    let mut copied: Vec<_> = costs.iter().map(|cost| cost.copied).collect();
    let mut cpu: Vec<_> = costs.iter().map(|cost| cost.cpu).collect();
    match (median(&mut copied, Ord::cmp, |_, upper| upper), median(&mut cpu, Ord::cmp, |_, upper| upper)) {
        (Some(copied), Some(cpu)) => Cost { copied, cpu },
        _ => otherwise,
    }
}
