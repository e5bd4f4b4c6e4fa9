//! How each kind of work is done: one file per kind, from a job to its measurements. The host is in the job's state
//! meanwhile; what the next job does not need of it is undone, and at the end of this process all of it.

use std::time::Duration;

use crate::experiment::host_state::{HeldState, KeptState};
use ::wideleaf_run::failure::Failure;
use ::wideleaf_run::interrupts::Interrupts;
use wideleaf_experiments::definition::{Job, Work};
use wideleaf_experiments::results::Measured;
use wideleaf_measure::environment;

mod disturbed;
mod prediction;
mod qemu;
mod restored;
mod simulation;
pub(super) mod together;
mod wideleaf_run;

use restored::SavedGuests;

/// A run that takes this many times its estimate hangs.
const TIMES_TOO_LONG: f64 = 20.0;
/// Shortest time after which a run is stopped.
const TIMEOUT_MIN: Duration = Duration::from_secs(300);

/// What is kept from one job to the next.
#[derive(Debug, Default)]
pub(super) struct KeptBetweenJobs {
    /// State of the host.
    host: KeptState,
    /// Saved guests that several jobs continue.
    guests: SavedGuests,
}

/// Brings the host into the job's state, does the work, and restores the host.
pub(super) fn run(job: &Job, kept: &mut KeptBetweenJobs, interrupts: &Interrupts) -> Result<Measured, Failure> {
    let host = HeldState::take(&job.host, &mut kept.host)?;
    let timeout =
        Duration::try_from_secs_f64(job.seconds_guess * TIMES_TOO_LONG).unwrap_or(TIMEOUT_MIN).max(TIMEOUT_MIN);
    let stolen_before = environment::stolen_ms();
    let mut measured = match &job.work {
        Work::Run { arguments } => wideleaf_run::run(job, arguments, timeout, interrupts),
        Work::Simulation { accesses, machine, page, host_page } => {
            let place = simulation::Place::parse(machine, page, host_page.as_deref())?;
            simulation::run(accesses, &place, timeout, interrupts)
        }
        Work::TlbCost { arguments } => prediction::run(arguments, timeout, interrupts),
        Work::Qemu { guest, ram } => qemu::run(guest, *ram, timeout, interrupts),
        Work::Together { guests, budget } => together::run(guests, *budget, timeout, interrupts),
        Work::TogetherInQemu { guests } => together::in_qemu::run(guests, timeout, interrupts),
        Work::Disturbed(guests) => disturbed::run(guests, timeout, interrupts),
        Work::Restored(guest) => restored::run(guest, &mut kept.guests, interrupts),
    }?;
    let stolen = environment::stolen_ms().saturating_sub(stolen_before);
    measured.metrics.insert(wideleaf_experiments::metric::Metric::StolenMs, stolen as f64);
    host.tell(&mut measured);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use wideleaf_experiments::catalogue;
    use wideleaf_experiments::definition::{Cell, HostFacts, NodeFacts};
    use wideleaf_kernels::registry::{MemoryNeed, by_name};

    use super::*;
    use wideleaf::args::{Cli, Command};

    fn host_with_everything() -> HostFacts {
        let node = |id: u16| NodeFacts { id, cpus: id.to_string(), memory_available_mib: 8 << 10 };
        HostFacts {
            cpus: 4,
            memory_available_mib: 16 << 10,
            why_no_kvm: None,
            paging: "npt".into(),
            has_qemu: true,
            has_daemon: true,
            why_no_pool_2m: None,
            free_pages_1g: 2,
            can_make_1g: false,
            is_root: true,
            wants_long_runs: true,
            nodes: vec![node(0), node(1)],
        }
    }

    /// The arguments of every `wideleaf run` in a job, each with a flag that says whether its figure counts.
    fn runs(job: &Job) -> Vec<(Vec<String>, bool)> {
        match &job.work {
            Work::Run { arguments } => vec![(arguments.clone(), true)],
            Work::Together { guests, .. } => {
                guests.iter().map(|guest| (guest.arguments.clone(), guest.is_judged)).collect()
            }
            Work::Restored(of) => vec![(of.guest.arguments(), false)],
            _ => vec![],
        }
    }

    #[test]
    fn every_run_of_every_experiment_parses_has_enough_memory_and_gives_the_figure_that_its_case_names() {
        let mut tried = 0;
        for known in catalogue::ALL {
            for case in known.define(&host_with_everything()).cases {
                let jobs = case.cells.iter().filter_map(|cell| match cell {
                    Cell::Job(job) => Some(job),
                    Cell::Absent(_) => None,
                });
                for (arguments, is_judged) in jobs.flat_map(|job| runs(job)) {
                    let what = format!("{}, {}: {}", known.name(), case.name, arguments.join(" "));
                    let words = ["wideleaf", "run"].into_iter().chain(arguments.iter().map(String::as_str));
                    let Command::Run(run) = Cli::try_parse_from(words).expect(&what).command else { panic!("{what}") };
                    let kernel = by_name(run.workload.as_deref().unwrap_or_default()).expect(&what);
                    if is_judged {
                        assert_eq!(kernel.figure.unit.as_str(), case.unit, "{what}");
                    }
                    let cmdline = ::wideleaf_run::kernel::with_class(kernel, run.class.as_deref(), &run.cmdline);
                    let need = kernel.memory_for(&cmdline.expect(&what), usize::from(run.vcpus)).expect(&what);
                    if let (MemoryNeed::Bytes(bytes), Some(memory)) = (need, run.memory) {
                        assert!(bytes < memory.get(), "{what}: it needs {bytes} bytes");
                    }
                    tried += 1;
                }
            }
        }
        assert!(tried > 100, "{tried}");
    }
}
