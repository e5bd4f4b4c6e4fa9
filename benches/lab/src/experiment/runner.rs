//! Makes one run after the other. Each is in the file of results when the next begins, also one that failed. Only an
//! interrupt, or a file that cannot be written, ends the experiment early.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use wideleaf_experiments::definition::Job;
use wideleaf_experiments::results::{Run, RunOutcome};
use wideleaf_experiments::schedule::{self, Turn};

use crate::experiment::failures::is_of_guest;
use crate::experiment::host_state::warm_memory;
use crate::experiment::jobs::{self, KeptBetweenJobs};
use crate::experiment::store::Store;
use wideleaf::progress::visible_bar;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

/// The remaining runs of an experiment.
pub(super) struct Runner<'a> {
    /// File that receives the runs.
    pub store: &'a mut Store,
    /// Time limit of this call.
    pub budget: Option<Duration>,
    /// Interrupts by Ctrl-C or a signal.
    pub interrupts: &'a Interrupts,
}

/// A run that was made.
enum MadeRun {
    /// Measured, or failed for a reason of the host.
    Run(Run),
    /// Failed for a reason of the guest, such as wrong words.
    GuestFailed(Run),
}

impl Runner<'_> {
    /// Makes the missing runs, as far as the budget allows.
    pub(super) fn run(&mut self) -> Result<(), Failure> {
        let began = Instant::now();
        let ran_before = self.store.results().elapsed_s;
        let left = schedule::left(&self.store.results().experiment, &self.store.results().runs).len();
        let bar = visible_bar(left as u64, "{bar:30} {pos}/{len} runs, {msg} [{elapsed}]");
        bar.enable_steady_tick(Duration::from_millis(200));
        let mut kept = KeptBetweenJobs::default();
        let budget_left = |budget: Duration| budget.saturating_sub(began.elapsed());
        while let Some(turn) = self.next(self.budget.map(budget_left)) {
            self.interrupts.check()?;
            self.show(&bar, turn, self.budget.map(budget_left));
            let made = self.make(turn, &mut kept, ran_before + began.elapsed().as_secs_f64())?;
            let elapsed_s = ran_before + began.elapsed().as_secs_f64();
            match made {
                MadeRun::Run(run) => self.store.add(run, elapsed_s)?,
                MadeRun::GuestFailed(run) => self.store.add_guest_failure(run, elapsed_s)?,
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(())
    }

    fn next(&self, budget_left: Option<Duration>) -> Option<Turn> {
        let results = self.store.results();
        schedule::next(&results.experiment, &results.runs, budget_left)
    }

    fn show(&self, bar: &ProgressBar, turn: Turn, budget_left: Option<Duration>) {
        let results = self.store.results();
        let experiment = &results.experiment;
        let left = schedule::left(experiment, &results.runs);
        bar.set_length(bar.position() + left.len() as u64);
        let time = schedule::expected_of_all(experiment, &results.runs, &left);
        let minutes = budget_left.map_or(time, |budget| time.min(budget)).as_secs_f64() / 60.0;
        let (case, arm) = (&experiment.cases[turn.case].name, &experiment.arms[turn.arm].name);
        bar.set_message(format!("round {}: {case}, {arm}; about {minutes:.1} min left", turn.round));
    }

    /// Makes one run. A failed run is a result too; the experiment ends only for a failure that would affect all
    /// other runs.
    fn make(&self, turn: Turn, kept: &mut KeptBetweenJobs, at_s: f64) -> Result<MadeRun, Failure> {
        let experiment = &self.store.results().experiment;
        let (case, arm) = (&experiment.cases[turn.case], &experiment.arms[turn.arm]);
        let job = experiment.job(turn.case, turn.arm).expect("only jobs have turns");
        // A map of one round suffices, because recording has a cost.
        let job = Job { wants_map: job.wants_map && turn.round == 1, ..job.clone() };
        let load_1m = wideleaf_measure::environment::Environment::capture().load_1m;
        let began = Instant::now();
        let (outcome, did_guest_fail) = match self.measure(&job, kept, case.working_set_mib) {
            Ok(measured) => (RunOutcome::Measured(measured), false),
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(failure) => (RunOutcome::Failed(failure.to_string()), is_of_guest(&failure)),
        };
        self.interrupts.check()?;
        let (case, arm) = (case.name.clone(), arm.name.clone());
        let run = Run { case, arm, round: turn.round, at_s, took_s: began.elapsed().as_secs_f64(), load_1m, outcome };
        Ok(if did_guest_fail { MadeRun::GuestFailed(run) } else { MadeRun::Run(run) })
    }

    fn measure(
        &self,
        job: &Job,
        kept: &mut KeptBetweenJobs,
        working_set_mib: u64,
    ) -> Result<wideleaf_experiments::results::Measured, Failure> {
        warm_memory(working_set_mib)?;
        jobs::run(job, kept, self.interrupts)
    }
}
