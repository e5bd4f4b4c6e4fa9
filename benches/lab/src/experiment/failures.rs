//! Failed runs, and others that were made again, which a file of results keeps however often its experiment is resumed.
//!
//! ```text
//!   a run fails ─▶ its outcome in the results ── --resume makes it again ──▶ earlier_failures ─▶ lead of the report
//!        └ its guest failed: guest_failures + 1, for good ─▶ lead, and exit code 1
//!   a run of a round that another session completes ── is made again in that session ──▶ set_aside ─▶ lead
//! ```

use serde::{Deserialize, Serialize};
use wideleaf_experiments::results::{Run, RunOutcome};
use wideleaf_run::failure::Failure;

/// Most failures that a report names; the file has all.
const NAMED_MAX: usize = 10;

/// Failed runs of all sessions and runs that were set aside, beside the results.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(super) struct Failures {
    /// Failed runs that were removed from the results to be made again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    earlier_failures: Vec<Run>,
    /// Measured runs that were removed from the results to be made again in the same session as the others of a round.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    set_aside: Vec<Run>,
    /// Number of runs in which the guest failed its verification or crashed.
    #[serde(default)]
    guest_failures: u64,
}

/// Whether the guest is the reason: it found wrong words, reported a failure, or crashed.
pub(super) fn is_of_guest(failure: &Failure) -> bool {
    matches!(failure, Failure::GuestFailed(_) | Failure::GuestCrashed(_))
}

impl Failures {
    /// Counts a run in which the guest failed.
    pub(super) fn count_guest(&mut self) {
        self.guest_failures += 1;
    }

    /// Takes the failed runs out of the results, so that they are made again. Returns whether there was one.
    pub(super) fn take(&mut self, runs: &mut Vec<Run>) -> bool {
        let (measured, failed): (Vec<Run>, Vec<Run>) = runs.drain(..).partition(|run| run.measured().is_some());
        *runs = measured;
        let has_failed = !failed.is_empty();
        self.earlier_failures.extend(failed);
        has_failed
    }

    /// Keeps measured runs that are made again.
    pub(super) fn set_aside(&mut self, runs: Vec<Run>) {
        self.set_aside.extend(runs);
    }

    /// Whether no run of an earlier session failed.
    pub(super) fn is_empty(&self) -> bool {
        self.earlier_failures.is_empty() && self.guest_failures == 0
    }

    /// First paragraphs of a report. Failures that are still in the results are named by the report itself.
    pub(super) fn lead(&self) -> Vec<String> {
        let of_guest = (self.guest_failures > 0).then(|| {
            let what = "the guest found wrong words, reported a failure, or crashed";
            format!("In {} {what}: find the reason before you use these results.", runs(self.guest_failures))
        });
        let earlier = (!self.earlier_failures.is_empty()).then(|| {
            let count = runs(self.earlier_failures.len() as u64);
            format!("{count} failed before a --resume, which makes failed runs again: {}.", self.named())
        });
        let again = (!self.set_aside.is_empty()).then(|| {
            let count = self.set_aside.len() as u64;
            let were = if count == 1 { "was" } else { "were" };
            let why = "so that each round is of one session; the file has the replaced results under `set_aside`";
            format!("{} {were} made again after a --resume, {why}.", runs(count))
        });
        of_guest.into_iter().chain(earlier).chain(again).collect()
    }

    fn named(&self) -> String {
        let named = self.earlier_failures.iter().take(NAMED_MAX).filter_map(|run| match &run.outcome {
            RunOutcome::Failed(why) => Some(format!("{}, {}, round {}: {why}", run.case, run.arm, run.round)),
            RunOutcome::Measured(_) => None,
        });
        let more = self.earlier_failures.len().saturating_sub(NAMED_MAX);
        let more = (more > 0).then(|| format!("{more} more are in the file"));
        named.chain(more).collect::<Vec<_>>().join("; ")
    }

    /// Checks that every guest was found intact.
    ///
    /// # Errors
    /// [`Failure::GuestFailed`] if one was not, in any session.
    pub(super) fn check_guests(&self) -> Result<(), Failure> {
        if self.guest_failures == 0 {
            return Ok(());
        }
        let count = runs(self.guest_failures);
        Err(Failure::GuestFailed(format!(
            "cannot vouch for these results: the guest failed in {count}; see the begin of the report for the reasons"
        )))
    }
}

fn runs(count: u64) -> String {
    if count == 1 { "1 run".to_owned() } else { format!("{count} runs") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(round: u32) -> Run {
        let outcome = RunOutcome::Failed("no pages".into());
        Run { case: "c".into(), arm: "a".into(), round, at_s: 0.0, took_s: 0.0, load_1m: 0.0, outcome }
    }

    #[test]
    fn a_report_names_the_first_earlier_failures_and_the_number_of_the_others() {
        let mut failures = Failures::default();
        assert!(failures.lead().is_empty() && failures.is_empty());
        assert!(failures.take(&mut vec![failed(1)]));
        assert!(failures.lead()[0].starts_with("1 run failed before a --resume"), "{:?}", failures.lead());
        assert!(failures.lead()[0].ends_with(": c, a, round 1: no pages."), "{:?}", failures.lead());
        assert!(failures.take(&mut (2..=12).map(failed).collect()));
        let lead = failures.lead().concat();
        assert!(lead.starts_with("12 runs failed") && lead.ends_with("round 10: no pages; 2 more are in the file."));
        assert!(failures.check_guests().is_ok(), "no guest is the reason");
    }

    #[test]
    fn only_a_guest_that_failed_or_crashed_is_the_reason() {
        assert!(is_of_guest(&Failure::GuestFailed("3 wrong words".into())));
        assert!(is_of_guest(&Failure::GuestCrashed("triple fault".into())));
        assert!(!is_of_guest(&Failure::Host("no memory".into())));
        let mut failures = Failures::default();
        failures.count_guest();
        assert_eq!(failures.check_guests().map_err(|failure| failure.exit_code()), Err(1));
        assert!(failures.lead()[0].starts_with("In 1 run the guest found wrong words"), "{:?}", failures.lead());
    }
}
