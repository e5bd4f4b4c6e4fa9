//! Hosts, and results by formula, for tests of reports and tables.

use crate::definition::{Experiment, HostFacts};
use crate::metric::Metric;
use crate::results::{Environment, FORMAT, Measured, Results, Run, RunOutcome};
use crate::schedule;

/// A host with all features and two CPUs.
pub(super) fn host() -> HostFacts {
    HostFacts { memory_available_mib: 24 << 10, paging: "ept".into(), ..HostFacts::of_a_test() }
}

/// Results in which `metric` gives the measurement of each run by case, arm and round; `None` is a failed run.
pub(crate) fn results_of(experiment: Experiment, metric: impl Fn(&str, &str, u32) -> Option<(Metric, f64)>) -> Results {
    let runs = schedule::turns(&experiment).into_iter().map(|turn| {
        let (case, arm) = (experiment.cases[turn.case].name.clone(), experiment.arms[turn.arm].name.clone());
        let outcome = match metric(&case, &arm, turn.round) {
            Some(one) => RunOutcome::Measured(Measured { metrics: [one].into(), ..Measured::default() }),
            None => RunOutcome::Failed("no made-up value".into()),
        };
        Run { case, arm, round: turn.round, at_s: 0.0, took_s: 1.0, load_1m: 0.0, outcome }
    });
    Results {
        wideleaf_experiment: FORMAT,
        environment: Environment::default(),
        started: String::new(),
        ended: String::new(),
        elapsed_s: 0.0,
        is_complete: true,
        runs: runs.collect(),
        experiment,
    }
}
