//! Parses and runs a command. Everything else is in the library.

use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory as _, Parser as _};
use wideleaf::guardian::{giant_pages, path, pool};
use wideleaf::run::config_file::said_by_clap;
use wideleaf::{manual, program, run, stderr, tlbcost};
use wideleaf_lab::args::{Cli, Command};
use wideleaf_lab::experiment::host_state::{fragmentation, khugepaged};
use wideleaf_lab::{experiment, image, predict, simulate, trace};
use wideleaf_run::failure::Failure;

fn main() -> ExitCode {
    program::run("wideleaf-lab", command)
}

#[inline(never)]
fn command() -> Result<(), Failure> {
    let process_start = Instant::now();
    let cli = Cli::try_parse().or_else(said_by_clap)?;
    program::start_log()?;
    if matches!(cli.command, Command::Experiment(_) | Command::Predict(_) | Command::TlbCost(_)) {
        // Kernels and managers run in this process.
        stderr::start();
    }
    match cli.command {
        Command::Experiment(args) => experiment::main(&args),
        Command::Simulate(args) => simulate::main(&args),
        Command::Predict(args) => predict::main(&args),
        Command::Trace(args) => trace::main(&args),
        Command::Image(args) => image::main(&args),
        Command::Completions(args) => manual::completions(&mut Cli::command(), &args),
        Command::Man(args) => manual::pages(Cli::command(), &args),
        Command::Run(args) => run::main(*args, process_start),
        Command::TlbCost(args) => tlbcost::main(&args),
        Command::HoldPool(args) => pool::main(&args),
        Command::HoldPath(args) => path::main(&args),
        Command::MakeGiantPages(args) => giant_pages::main(&args),
        Command::HoldKhugepaged(args) => khugepaged::main(&args),
        Command::HoldFragments(args) => fragmentation::main(&args),
        Command::HoldBlocks(args) => fragmentation::hog(&args),
    }
}
