//! All experiments, one file each: their runs, and the parts of their reports that other reports do not have.

use std::time::Duration;

use crate::definition::{Experiment, HostFacts};
use crate::report::Section;
use crate::results::Results;

mod a64fx;
mod by_policy;
mod consolidation;
mod counters;
mod evidence;
#[cfg(test)]
pub(crate) mod fixture;
mod fragmented;
mod freebsd;
mod grid;
mod in_guests;
mod lwn;
mod openmp;
pub mod page_tables;
mod policies;
mod programs;
mod quick;
mod restore;
mod scarce;
mod shimizu;
mod stock;
mod two_dimensional;
mod versus_published;
pub mod walks;

/// An experiment of the catalogue.
pub trait Catalogued: Sync {
    /// Name of the experiment on the command line.
    fn name(&self) -> &'static str;

    /// Summary of the experiment in one line.
    fn summary(&self) -> &'static str;

    /// Definition of the experiment for a host. A cell that the host cannot run is absent, with the reason.
    fn define(&self, host: &HostFacts) -> Experiment;

    /// First sections of the report: tables and pictures of this experiment, with published
    /// figures beside measured ones.
    fn sections(&self, results: &Results) -> Vec<Section>;

    /// Default time limit when neither rounds nor a budget is given: the experiment runs as many complete rounds as
    /// fit, and is then complete. `None` runs all rounds.
    fn budget(&self) -> Option<Duration> {
        None
    }

    /// Meaning of the figure, if it does not cover the whole run.
    fn figure(&self) -> &'static str {
        "the figure"
    }

    /// Whether its own sections have the figures of all cells, so that the report does not list them again.
    fn has_all_figures(&self) -> bool {
        false
    }

    /// Paragraphs before all others, for results that differ from what is claimed.
    fn lead(&self, _results: &Results) -> Vec<String> {
        vec![]
    }
}

/// All experiments, in the order of the list.
pub const ALL: [&dyn Catalogued; 16] = [
    &quick::Quick,
    &two_dimensional::TwoDimensional,
    &policies::Policies,
    &fragmented::Fragmented,
    &consolidation::Consolidation,
    &scarce::Scarce,
    &stock::Stock,
    &restore::Restore,
    &freebsd::FreeBsd,
    &shimizu::Shimizu,
    &openmp::OpenMp,
    &a64fx::A64fx,
    &lwn::Lwn,
    &counters::Counters,
    &grid::Grid,
    &evidence::Evidence,
];

/// Experiments that repeat a published form.
#[cfg(test)]
pub(crate) const PUBLISHED: [&dyn Catalogued; 5] =
    [&freebsd::FreeBsd, &shimizu::Shimizu, &openmp::OpenMp, &a64fx::A64fx, &lwn::Lwn];

/// Experiment with this name.
pub fn by_name(name: &str) -> Option<&'static dyn Catalogued> {
    ALL.into_iter().find(|experiment| experiment.name() == name)
}

#[cfg(test)]
mod tests {
    use super::fixture::results_of;
    use super::*;
    use crate::metric::Metric;
    use crate::report::Report;
    use crate::schedule::{expected_of_all, turns};

    /// `experiment run --arm` makes such results.
    #[test]
    fn every_experiment_has_a_report_of_its_first_arm_and_one_other_alone() {
        for known in ALL {
            let whole = Experiment { rounds: 1, ..known.define(&HostFacts::of_a_test()) };
            let last = whole.arms.last().expect("an arm").name.clone();
            let experiment = whole.with_arms(&[last]);
            assert!(experiment.cases.iter().all(|case| case.cells.len() == experiment.arms.len()), "{}", known.name());
            let results = results_of(experiment, |_, _, round| Some((Metric::Figure, f64::from(round))));
            assert!(!Report::of(&results).sections.is_empty(), "{}", known.name());
        }
    }

    /// A limit of time instead would end them after fewer rounds than an interval needs.
    #[test]
    fn a_published_form_takes_at_most_half_an_hour_with_all_its_rounds() {
        for known in PUBLISHED {
            let experiment = known.define(&HostFacts::of_a_test());
            let takes = expected_of_all(&experiment, &[], &turns(&experiment));
            assert!(takes <= Duration::from_mins(30), "{}: {takes:?}", known.name());
            assert!(known.budget().is_none() && experiment.rounds >= 6, "{}", known.name());
        }
    }
}
