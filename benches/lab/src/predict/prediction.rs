//! The gain of 2 MiB pages, first predicted and then measured. The prediction uses only the kernel's own loads and
//! stores: recorded once, replayed on base and on 2 MiB pages without the kernel's arithmetic, and scaled to the
//! pace at which the kernel makes them.
//!
//! ```text
//!   one iteration ─ recorder ─▶ visits of lines ────────┐
//!   round: kernel on base │ on huge │ visits replayed on both, 1 chain … asked ─▶ median time of a visit on both ──┐
//!                 │        └▶ time saved within the round: median and interval                                     │
//!                 └─▶ median time of a visit in the kernel: its pace ──────────────────▶ saved_at_most ÷ pace = bound
//! ```
//!
//! Odd rounds run the kernel on base pages first, even ones on huge pages.
//!
//! A count of misses times the cost of a miss in a chase is not such a bound. Misses overlap with other work and
//! with each other, so that the product can exceed the whole time (12.7 % was gained of 17.8 % predicted in "Huge
//! pages part 5", LWN 2010). It also leaves out effects of page sizes other than walks: prefetchers stop at the end
//! of a page. A replay has the overlaps, the caches of the page tables of that very footprint, and the prefetchers
//! of this machine. Its assumptions are printed with it.

use indicatif::ProgressBar;
use serde::Serialize;
use wideleaf_measure::statistics::{MedianInterval, median, median_interval};
use wideleaf_policies::PageSize;
use wideleaf_recorder::{Progress, Request};

use super::hull::{is_bounded, saved_at_most};
use super::replay::{Pace, medians, replay};
use super::sample::{self, Sample};
use super::work::{Timed, Work};
use wideleaf::tlbcost::counters::{WalkEvents, Walks};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

/// Length of a run, in seconds; it has at least one iteration. Long compared with the disturbance on a busy host,
/// and short enough that the rounds of a comparison take minutes.
const RUN_SECONDS: f64 = 4.0;

/// Prediction and measurement, side by side.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    /// Name of the kernel, run natively.
    pub kernel: String,
    /// Parameters of the kernel.
    pub cmdline: String,
    /// Iterations of its measured part in each run, and its total; 0 if it has none that can be omitted.
    pub iterations: (u32, u32),
    /// Number of recorded visits of lines: of one iteration, or of the whole measured part.
    pub visits: u64,
    /// Number of these visits that were replayed.
    pub replayed: u64,
    /// Cost of a visit without the kernel around it.
    pub paces: Vec<Pace>,
    /// Nanoseconds from one visit to the next in the kernel on base pages, the median of its runs.
    pub pace_ns: f64,
    /// Upper bound of the saving by 2 MiB pages, as a part of the time on base pages.
    pub share_bound: f64,
    /// Whether that is a bound: a kernel that is faster than all of its replays overlaps more than any of them shows.
    pub is_bound: bool,
    /// PMU counts in the measured part of one more run on base pages, if there is a PMU.
    pub counted: Option<Walks>,
    /// Time that 2 MiB pages saved, as a part of the time on base pages.
    pub saved: MedianInterval,
    /// Number of rounds of one run on each page size, and one replay.
    pub rounds: usize,
    /// Windows of its RAM that were large in the last run on 2 MiB pages, and all of them.
    pub large_windows: (u64, u64),
}

/// Steps of a prediction besides its rounds, for a progress bar: a first run, and the recording.
pub const BESIDE_ROUNDS: u64 = 2;

/// Steps of each round: a run on each page size, and a replay on both.
pub const IN_A_ROUND: u64 = 3;

/// Records, then in turn runs on base and on 2 MiB pages and replays.
///
/// # Errors
/// [`Failure`]: a run or the recording failed, or an interrupt came.
pub fn predict(
    work: &Work,
    events: Option<&'static WalkEvents>,
    rounds: usize,
    interrupts: &Interrupts,
    bar: &ProgressBar,
) -> Result<Prediction, Failure> {
    let name = work.kernel.name;
    let step = |what: String| bar.set_message(format!("{name}: {what}"));
    step("a first run".into());
    let first = work.run(PageSize::Base4K, Some(1), None, interrupts)?;
    bar.inc(1);
    let sample = record(work, &first, interrupts, &step)?;
    bar.inc(1);
    let most = iterations_of(&first);
    let (mut runs, mut replays) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        step(format!("round {round} of {rounds}"));
        runs.push(both(round, |page| {
            let run = work.run(page, most, None, interrupts)?;
            bar.inc(1);
            Ok(run)
        })?);
        step(format!("round {round} of {rounds}, its accesses alone"));
        replays.push(replay(work, &sample, round, interrupts)?);
        bar.inc(1);
    }
    let counted = events.map(|_| work.run(PageSize::Base4K, most, events, interrupts)).transpose()?;

    let paces = medians(&replays);
    let visits = sample.visits as f64 * runs[0].0.steps.against_one();
    let pace_ns = median(runs.iter().map(|(base, _)| base.seconds).collect()) * 1e9 / visits;
    let saved: Vec<f64> = runs.iter().map(|(base, huge)| 1.0 - huge.seconds / base.seconds).collect();
    Ok(Prediction {
        kernel: name.to_string(),
        cmdline: work.cmdline.clone(),
        iterations: (runs[0].0.steps.made, runs[0].0.steps.all),
        visits: sample.visits,
        replayed: sample.kept(),
        share_bound: (saved_at_most(&paces, pace_ns) / pace_ns).min(1.0),
        is_bound: is_bounded(&paces, pace_ns),
        paces,
        pace_ns,
        counted: counted.and_then(|run| run.walks),
        saved: median_interval(&saved),
        rounds,
        large_windows: runs[rounds - 1].1.large_windows,
    })
}

/// Runs on base and on huge pages, base first in odd rounds and huge in even ones.
fn both<T>(round: usize, mut run: impl FnMut(PageSize) -> Result<T, Failure>) -> Result<(T, T), Failure> {
    if round.is_multiple_of(2) {
        let huge = run(PageSize::Huge2M)?;
        Ok((run(PageSize::Base4K)?, huge))
    } else {
        Ok((run(PageSize::Base4K)?, run(PageSize::Huge2M)?))
    }
}

/// Records the accesses of one iteration, or of the measured part of a kernel without iterations.
fn record(work: &Work, first: &Timed, interrupts: &Interrupts, step: &dyn Fn(String)) -> Result<Sample, Failure> {
    let request = Request {
        kernel: work.kernel,
        parameters: &work.cmdline,
        threads: 1,
        iterations: (first.steps.begun > 0).then_some(1),
        phase: Some(&first.phase),
        bytes_max: None,
    };
    step("recording".into());
    let sample = sample::take(&request, &mut |progress: &Progress<'_>| {
        let millions = progress.totals.records / 1_000_000;
        if millions > 0 {
            step(format!("recording, {millions} million accesses"));
        }
        !interrupts.is_set()
    })?;
    if sample.visits == 0 {
        let name = work.kernel.name;
        return Err(Failure::GuestFailed(format!(
            "cannot predict {name}: it makes no access to its memory in its measured part"
        )));
    }
    Ok(sample)
}

/// Number of iterations of a run, from the duration of one; `None` for a kernel that has none to omit.
fn iterations_of(first: &Timed) -> Option<u32> {
    let there_are = first.steps.all / first.steps.begun.max(1);
    let wanted = (RUN_SECONDS / first.seconds).ceil() as u32;
    (first.steps.begun > 0).then_some(wanted.min(there_are).max(1))
}

#[cfg(test)]
mod tests {
    use super::super::work::Steps;
    use super::*;

    #[test]
    fn a_run_has_iterations_for_four_seconds_and_at_most_all() {
        let first =
            |seconds, begun, all| Timed { seconds, steps: Steps { begun, made: begun, all }, ..Timed::default() };
        assert_eq!(iterations_of(&first(0.5, 1, 75)), Some(8));
        assert_eq!(iterations_of(&first(0.001, 1, 75)), Some(75));
        assert_eq!(iterations_of(&first(30.0, 1, 75)), Some(1));
        assert_eq!(iterations_of(&first(3.0, 0, 0)), None, "it has none");
        // Two loops of ten each.
        assert_eq!(iterations_of(&first(0.001, 2, 20)), Some(10));
    }

    #[test]
    fn each_page_size_is_first_in_every_other_round_and_an_error_ends_the_round() {
        let order = |round| {
            let mut order = Vec::new();
            let sizes = both(round, |page| {
                order.push(page);
                Ok(page)
            });
            assert_eq!(sizes.expect("no run fails"), (PageSize::Base4K, PageSize::Huge2M));
            order
        };
        assert_eq!(order(1), [PageSize::Base4K, PageSize::Huge2M]);
        assert_eq!(order(2), [PageSize::Huge2M, PageSize::Base4K]);
        let mut runs = 0;
        let ended = both(1, |_| -> Result<(), Failure> {
            runs += 1;
            Err(Failure::Host("too little memory".into()))
        });
        assert!(ended.is_err() && runs == 1);
    }

    #[test]
    fn a_run_of_more_iterations_repeats_the_recorded_one() {
        assert_eq!(Steps { begun: 1, made: 8, all: 75 }.against_one(), 8.0);
        assert_eq!(Steps { begun: 2, made: 16, all: 20 }.against_one(), 8.0);
        assert_eq!(Steps::default().against_one(), 1.0);
    }
}
