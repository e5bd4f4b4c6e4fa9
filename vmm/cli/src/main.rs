//! Parses the command line, runs the command, prints one line if it failed, and sets the exit code. Everything else
//! is in the library.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Instant;

use wideleaf::args::Command;
use wideleaf::experiment::host_state::{fragmentation, khugepaged};
use wideleaf::failure::Failure;
use wideleaf::guests::tables;
use wideleaf::{
    attach, demo, doctor, experiment, guests, held_path, held_pool, hook, image, kernels, limits, manual, pool, run,
    simulate, stderr, tlbcost, top, trace, vm,
};

fn main() -> ExitCode {
    let process_start = Instant::now();
    // Its stack frame is small, so that a stack that is too small still suffices to print the error.
    match limits::prepare() {
        Ok(()) => parsed(process_start),
        Err(failure) => failed(&failure),
    }
}

#[inline(never)]
fn parsed(process_start: Instant) -> ExitCode {
    let cli = match run::config_file::command_line(std::env::args_os()) {
        Ok(cli) => cli,
        Err(failure) => return failed(&failure),
    };
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_env_var("WIDELEAF_LOG")
        .with_default_directive(tracing::level_filters::LevelFilter::WARN.into())
        .from_env_lossy();
    // When standard error is closed, the subscriber would try to report that there, and panic.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| stderr::Log).without_time();
    log.with_ansi(std::io::stderr().is_terminal()).log_internal_errors(false).init();
    if matches!(cli.command, Command::Attach(_) | Command::Demo(_) | Command::Experiment(_) | Command::TlbCost(_)) {
        // Guests and managers run in this process.
        stderr::start();
    }
    let result = match cli.command {
        Command::Run(args) => run::main(*args, process_start),
        Command::Demo(args) => demo::main(&args),
        Command::Experiment(args) => experiment::main(&args),
        Command::Kernels(args) => kernels::main(&args),
        Command::Simulate(args) => simulate::main(&args),
        Command::Trace(args) => trace::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::TlbCost(args) => tlbcost::main(&args),
        Command::Image(args) => image::main(&args),
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
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::pages(&args),
        Command::HoldPool(args) => held_pool::main(&args),
        Command::HoldPath(args) => held_path::main(&args),
        Command::HoldKhugepaged(args) => khugepaged::main(&args),
        Command::HoldFragments(args) => fragmentation::main(&args),
    };
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failed(&failure),
    };
    stderr::end();
    code
}

fn failed(failure: &Failure) -> ExitCode {
    // A failure may quote the guest's output or a file name.
    let text = failure.to_string();
    let lines: Vec<String> = text.lines().map(tables::clean).collect();
    stderr::say(format_args!("wideleaf: {}", lines.join("\n")));
    ExitCode::from(failure.exit_code())
}
