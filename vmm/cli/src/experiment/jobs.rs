//! How each kind of work is done: one file a kind, from a job to what it measured.

use std::time::Duration;

use wideleaf_experiments::definition::{Job, Work};
use wideleaf_experiments::results::Measured;

use crate::environment;
use crate::experiment::host_state::{HeldState, KeptState};
use crate::failure::Failure;
use crate::interrupts::Interrupts;

mod prediction;
mod qemu;
mod simulation;
pub(super) mod together;
mod wideleaf_run;

/// A run that takes so many times longer than guessed hangs.
const TIMES_TOO_LONG: f64 = 20.0;
/// No run is given up sooner.
const TIMEOUT_MIN: Duration = Duration::from_secs(300);

/// Brings the host into the job's state, does the work, puts the host back.
pub(super) fn run(job: &Job, kept: &mut KeptState, interrupts: &Interrupts) -> Result<Measured, Failure> {
    let host = HeldState::take(&job.host, kept)?;
    let timeout =
        Duration::try_from_secs_f64(job.seconds_guess * TIMES_TOO_LONG).unwrap_or(TIMEOUT_MIN).max(TIMEOUT_MIN);
    let stolen_before = environment::stolen_ms();
    let mut measured = match &job.work {
        Work::Run { arguments } => wideleaf_run::run(job, arguments, timeout, interrupts),
        Work::Simulation { accesses, machine, page } => {
            simulation::run(accesses, &simulation::Place::parse(machine, page)?, timeout, interrupts)
        }
        Work::TlbCost { arguments } => prediction::run(arguments, timeout, interrupts),
        Work::Qemu { guest, ram } => qemu::run(guest, *ram, timeout, interrupts),
        Work::Together { guests, budget } => together::run(guests, *budget, timeout, interrupts),
    }?;
    let stolen = environment::stolen_ms().saturating_sub(stolen_before);
    measured.metrics.insert(wideleaf_experiments::metric::Metric::StolenMs, stolen as f64);
    host.tell(&mut measured);
    Ok(measured)
}
