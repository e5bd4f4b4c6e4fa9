//! How each kind of work is done: one file a kind, from a job to what it measured.

use std::time::Duration;

use wideleaf_experiments::definition::{Job, Work};
use wideleaf_experiments::results::Measured;

use crate::environment;
use crate::failure::Failure;
use crate::held_pool::HeldPool;
use crate::interrupts::Interrupts;

mod wideleaf_run;

/// A run that takes so many times longer than guessed hangs.
const TIMES_TOO_LONG: f64 = 20.0;
/// No run is given up sooner.
const TIMEOUT_MIN: Duration = Duration::from_secs(300);

/// Brings the host into the job's state, does the work, puts the host back.
pub(super) fn run(job: &Job, interrupts: &Interrupts) -> Result<Measured, Failure> {
    let _pool = match job.host.pool_pages_2m {
        0 => None,
        pages => Some(HeldPool::lease(pages).map_err(Failure::Host)?),
    };
    let timeout =
        Duration::try_from_secs_f64(job.seconds_guess * TIMES_TOO_LONG).unwrap_or(TIMEOUT_MIN).max(TIMEOUT_MIN);
    let stolen_before = environment::stolen_ms();
    let mut measured = match &job.work {
        Work::Run { arguments } => wideleaf_run::run(job, arguments, timeout, interrupts),
    }?;
    let stolen = environment::stolen_ms().saturating_sub(stolen_before);
    measured.metrics.insert(wideleaf_experiments::metric::Metric::StolenMs, stolen as f64);
    Ok(measured)
}
