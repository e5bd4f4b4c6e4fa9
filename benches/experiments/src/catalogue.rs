//! The experiments there are, a file each: what is run, and what its report says beyond what every report does.

use std::time::Duration;

use crate::definition::{Experiment, HostFacts};
use crate::report::Section;
use crate::results::Results;

mod a64fx;
mod beside;
mod by_policy;
mod consolidation;
mod evidence;
mod fragmented;
mod freebsd;
mod lwn;
#[cfg(test)]
mod made_up;
mod openmp;
mod policies;
mod programs;
mod quick;
mod shimizu;
mod two_dimensional;

/// An experiment of ours.
pub trait Catalogued: Sync {
    /// What somebody types.
    fn name(&self) -> &'static str;

    /// What it shows, in a line.
    fn summary(&self) -> &'static str;

    /// What is run on such a host. What the host cannot show is an absent cell, with the reason.
    fn define(&self, host: &HostFacts) -> Experiment;

    /// What its report has first, before what every report has: its own tables and pictures, its seed's figures beside ours.
    fn sections(&self, results: &Results) -> Vec<Section>;

    /// How long it takes where nobody says how often or how long: as many whole rounds as fit, which are then all of it. Without this it takes as long
    /// as its rounds do.
    fn budget(&self) -> Option<Duration> {
        None
    }

    /// What the figure of its runs is, where that is not all that ran.
    fn figure(&self) -> &'static str {
        "the figure"
    }

    /// Paragraphs that stand before all others: what did not come as promised.
    fn lead(&self, _results: &Results) -> Vec<String> {
        vec![]
    }
}

/// All of them, in the order of the list.
pub const ALL: [&dyn Catalogued; 11] = [
    &quick::Quick,
    &two_dimensional::TwoDimensional,
    &policies::Policies,
    &fragmented::Fragmented,
    &consolidation::Consolidation,
    &freebsd::FreeBsd,
    &shimizu::Shimizu,
    &openmp::OpenMp,
    &a64fx::A64fx,
    &lwn::Lwn,
    &evidence::Evidence,
];

/// The one of that name.
pub fn by_name(name: &str) -> Option<&'static dyn Catalogued> {
    ALL.into_iter().find(|experiment| experiment.name() == name)
}
