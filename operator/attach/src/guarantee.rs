//! Whether a VM meets its guarantee. A VM that has just started, or has just touched new memory, is below its
//! guarantee for a while without anything wrong. One that stays there is pursued, and after the grace time reported,
//! once.
//!
//! ```text
//!   below ── PURSUIT_AFTER ──▶ pursued ── grace ──▶ reported
//!                                 └── met for PURSUIT_KEPT ──▶ left to its policy again
//! ```

use std::time::Duration;

use wideleaf_control::view::{Guarantee, policy_name};

/// Time below the guarantee after which a VM is pursued. A policy that promotes by itself has most of it by then.
const PURSUIT_AFTER: Duration = Duration::from_secs(3);
/// Time at the guarantee for which a VM stays pursued. A guest that still takes new memory falls below it again.
const PURSUIT_KEPT: Duration = Duration::from_secs(10);

/// Policy while a guarantee is pursued: everything in use, at once.
const PURSUIT_POLICY: &str = "greedy";
/// Policies that weigh whether a promotion pays, or wait until it may. Others stay while a guarantee is pursued: those
/// that promote all they can, and those that also demote, which would undo the pursuit afterwards.
const WEIGHING: [&str; 4] = ["auto", "thp", "utilization", "coverage"];

/// Policy of a VM while its guarantee is pursued; `own` is its policy at other times.
pub fn pursuit_policy(own: &str) -> &str {
    if WEIGHING.contains(&policy_name(own)) { PURSUIT_POLICY } else { own }
}

/// Whether a VM under this policy gets large pages at all. One that gets none leaves no guarantee to pursue.
pub fn may_promote(policy: &str) -> bool {
    !matches!(policy_name(policy), "off" | "never")
}

/// Time that a VM has been below its guarantee.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuaranteeWatch {
    under_since: Option<Duration>,
    is_missed: bool,
    /// Time at which it was last below its guarantee while pursued.
    pursued_at: Option<Duration>,
}

/// Event that is worth a line in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuaranteeEvent {
    /// The VM has been below its guarantee for longer than the grace time.
    Missed,
    /// The VM meets its guarantee again after a miss.
    MetAgain,
}

impl GuaranteeWatch {
    /// Takes the present coverage into account, `now` being the time since some start. A VM without resident
    /// memory misses nothing.
    pub fn update(
        &mut self,
        guarantee: Guarantee,
        coverage: Option<u32>,
        now: Duration,
        grace: Duration,
    ) -> Option<GuaranteeEvent> {
        let is_under = match (guarantee.share(), coverage) {
            (Some(wanted), Some(coverage)) => coverage < wanted,
            _ => false,
        };
        let was_missed = self.is_missed;
        self.under_since = is_under.then(|| self.under_since.unwrap_or(now));
        self.is_missed = self.under_for(now).is_some_and(|under_for| under_for > grace);
        if self.under_for(now).is_some_and(|under_for| under_for >= PURSUIT_AFTER.min(grace)) {
            self.pursued_at = Some(now);
        }
        let is_kept = |at| guarantee.share().is_some() && now.saturating_sub(at) <= PURSUIT_KEPT;
        self.pursued_at = self.pursued_at.filter(|at| is_kept(*at));
        match (was_missed, self.is_missed) {
            (false, true) => Some(GuaranteeEvent::Missed),
            (true, false) => Some(GuaranteeEvent::MetAgain),
            _ => None,
        }
    }

    /// Whether it has been reported as below its guarantee, and still is.
    pub fn is_missed(&self) -> bool {
        self.is_missed
    }

    /// Whether it is to be promoted at once until it meets its guarantee.
    pub fn is_pursued(&self) -> bool {
        self.pursued_at.is_some()
    }

    /// Time that it has been below its guarantee.
    pub fn under_for(&self, now: Duration) -> Option<Duration> {
        self.under_since.map(|since| now.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_vm_below_it_for_longer_than_the_grace_time_is_reported_and_once() {
        let mut watch = GuaranteeWatch::default();
        let mut at = |second, coverage| {
            let (now, grace) = (Duration::from_secs(second), Duration::from_secs(10));
            watch.update(Guarantee::Coverage(9_000), coverage, now, grace)
        };
        let events = [at(0, Some(0)), at(9, Some(8_999)), at(10, Some(9_000)), at(11, Some(0)), at(21, Some(0))];
        assert_eq!(events, [None; 5]); // below it from 0 to 9 and from 11 to 21: never for more than ten seconds
        assert_eq!([at(22, Some(0)), at(23, Some(0))], [Some(GuaranteeEvent::Missed), None]);
        assert_eq!([at(24, Some(9_000)), at(25, Some(9_000))], [Some(GuaranteeEvent::MetAgain), None]);
    }

    #[test]
    fn a_vm_is_pursued_from_three_seconds_below_until_it_has_met_it_for_ten() {
        let mut watch = GuaranteeWatch::default();
        let mut at = |second, coverage| {
            watch.update(
                Guarantee::Coverage(9_000),
                Some(coverage),
                Duration::from_secs(second),
                Duration::from_secs(30),
            );
            watch.is_pursued()
        };
        assert_eq!([at(0, 0), at(2, 0), at(3, 0), at(4, 9_000), at(13, 9_000)], [false, false, true, true, true]);
        assert_eq!([at(14, 9_000), at(15, 0), at(18, 0)], [false, false, true]);
        watch.update(Guarantee::BestEffort, Some(0), Duration::from_secs(19), Duration::ZERO);
        assert!(!watch.is_pursued());
    }

    #[test]
    fn only_policies_that_weigh_are_replaced_in_a_pursuit() {
        let due = ["auto", "coverage:x=1", "aligned", "never", "greedy"].map(pursuit_policy);
        assert_eq!(due, ["greedy", "greedy", "aligned", "never", "greedy"]);
    }

    #[test]
    fn best_effort_and_an_empty_vm_miss_nothing() {
        let mut watch = GuaranteeWatch::default();
        let hour = Duration::from_secs(3600);
        for (guarantee, coverage) in [(Guarantee::BestEffort, Some(0)), (Guarantee::Coverage(10_000), None)] {
            assert_eq!(watch.update(guarantee, coverage, hour, Duration::ZERO), None);
            assert!(!watch.is_missed());
        }
    }
}
