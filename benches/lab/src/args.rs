//! What a person types after `wideleaf-lab`, as types. Parsing starts nothing and opens no file, so that `--help` and
//! every message about a wrong argument work anywhere.

use clap::{Parser, Subcommand};
use wideleaf::guardian::giant_pages::MakeGiantPagesArgs;
use wideleaf::guardian::path::HoldPathArgs;
use wideleaf::guardian::pool::HoldPoolArgs;
use wideleaf::manual::{CompletionsArgs, ManArgs};
use wideleaf::run::args::RunArgs;
use wideleaf::tlbcost::TlbCostArgs;

use crate::experiment::ExperimentArgs;
use crate::experiment::host_state::fragmentation::{HoldBlocksArgs, HoldFragmentsArgs};
use crate::experiment::host_state::khugepaged::HoldKhugepagedArgs;
use crate::image::ImageArgs;
use crate::predict::PredictArgs;
use crate::simulate::SimulateArgs;
use crate::trace::TraceArgs;

/// Measures, simulates and records what page sizes are worth to guests.
#[derive(Debug, Parser)]
#[command(name = "wideleaf-lab", version, max_term_width = 110, after_long_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
First steps:
  wideleaf-lab experiment list     the experiments, and how long each takes on this host
  wideleaf-lab simulate --help     policies on recorded and generated accesses
  wideleaf-lab predict gups        what 2 MiB pages should gain, and what they gain

Exit codes are those of `wideleaf` (wideleaf --help).

Environment:
    WIDELEAF_LOG  what to log on standard error, for instance `debug` or `wideleaf_memory=trace`";

/// Subcommands of `wideleaf-lab`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the experiments: whole comparisons with their statistics, reports and pictures
    Experiment(ExperimentArgs),
    /// Show what policies would have done in a recorded run, or with the accesses of a kernel on machines of your
    /// choice
    Simulate(SimulateArgs),
    /// Predict from its accesses what 2 MiB pages should gain for a kernel, then measure it
    Predict(PredictArgs),
    /// Record every load and store of a kernel, or show what such a trace has
    Trace(TraceArgs),
    /// Run a kernel or a program as a Linux guest: make its initramfs, read what it printed
    Image(ImageArgs),
    /// Print what a shell completes: wideleaf-lab completions bash > /etc/bash_completion.d/wideleaf-lab
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder, for a package
    #[command(hide = true)]
    Man(ManArgs),
    /// A run of an experiment: `wideleaf run`
    #[command(hide = true)]
    Run(Box<RunArgs>),
    /// A measurement of an experiment: `wideleaf tlbcost`
    #[command(hide = true, name = "tlbcost")]
    TlbCost(TlbCostArgs),
    /// Hold room in the hugetlb pool until standard input ends: an experiment starts this, so that it cannot keep the
    /// room
    #[command(hide = true)]
    HoldPool(HoldPoolArgs),
    /// Remove a cgroup when standard input ends: a run in a new one starts this, so that it cannot leave the cgroup
    /// behind
    #[command(hide = true)]
    HoldPath(HoldPathArgs),
    /// Make pages of 1 GiB for a run until standard input ends: a run of an experiment may start this
    #[command(hide = true)]
    MakeGiantPages(MakeGiantPagesArgs),
    /// Hold settings of khugepaged until standard input ends: an experiment starts this, so that it cannot leave them
    /// behind
    #[command(hide = true)]
    HoldKhugepaged(HoldKhugepagedArgs),
    /// Keep free memory fragmented until standard input ends: an experiment starts this, so that it cannot leave it so
    #[command(hide = true)]
    HoldFragments(HoldFragmentsArgs),
    /// Take free huge pages until standard input ends: the hog of an experiment
    #[command(hide = true)]
    HoldBlocks(HoldBlocksArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
