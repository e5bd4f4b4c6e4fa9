//! Parses and runs a command. Everything else is in the library.

use std::process::ExitCode;
use std::time::Instant;

use clap::CommandFactory as _;
use wideleaf::args::{Cli, Command};
use wideleaf::guardian::{giant_pages, path, pool as pool_pages};
use wideleaf::{attach, demo, doctor, guests, hook, kernels, manual, pool, program, run, stderr, tlbcost, top, vm};
use wideleaf_run::failure::Failure;

fn main() -> ExitCode {
    program::run("wideleaf", command)
}

#[inline(never)]
fn command() -> Result<(), Failure> {
    let process_start = Instant::now();
    let cli = run::config_file::command_line(std::env::args_os())?;
    program::start_log()?;
    if matches!(cli.command, Command::Attach(_) | Command::Demo(_) | Command::TlbCost(_)) {
        // Guests and managers run in this process.
        stderr::start();
    }
    match cli.command {
        Command::Run(args) => run::main(*args, process_start),
        Command::Demo(args) => demo::main(&args),
        Command::Kernels(args) => kernels::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::TlbCost(args) => tlbcost::main(&args),
        Command::List(args) => guests::list(&args),
        Command::Info(args) => guests::info(&args),
        Command::Explain(args) => guests::explain(&args),
        Command::Set(args) => guests::set(&args),
        Command::Vm(args) => vm::main(&args),
        Command::Attach(args) => attach::main(&args),
        Command::Detach(args) => guests::detach(&args),
        Command::Reload(args) => guests::reload(&args),
        Command::Top(args) => top::main(&args),
        Command::Hook(args) => hook::main(&args),
        Command::Pool(args) => pool::main(&args),
        Command::Completions(args) => manual::completions(&mut Cli::command(), &args),
        Command::Man(args) => manual::pages(Cli::command(), &args),
        Command::HoldPool(args) => pool_pages::main(&args),
        Command::HoldPath(args) => path::main(&args),
        Command::MakeGiantPages(args) => giant_pages::main(&args),
    }
}
