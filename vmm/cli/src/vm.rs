//! `wideleaf vm PATH …`: says one thing to the VM whose control socket that is, and shows the answer.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use wideleaf_control::vm::{
    StopHow, VcpuView, VmAnswer, VmClientError, VmRequest, VmState, VmStatistics, VmStatus, ask,
};

use crate::args::FormatArg;
use crate::failure::Failure;
use crate::guests::tables;
use crate::output::Output;

const EXAMPLES: &str = "\
Examples:
  A VM with a control socket, and what may be said to it:
    wideleaf run pattern --cmdline 'seconds=600' --control-socket /run/vm.sock &
    wideleaf vm /run/vm.sock status
    wideleaf vm /run/vm.sock pause
    wideleaf vm /run/vm.sock resume
    wideleaf vm /run/vm.sock set-policy off

  What backs its memory and what its manager has done, for programs:
    wideleaf vm /run/vm.sock statistics --format json

  End it: its guest is asked to shut down, or at once:
    wideleaf vm /run/vm.sock stop --how ask
    wideleaf vm /run/vm.sock stop --how kill";

/// `wideleaf vm`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct VmSocketArgs {
    /// What --control-socket of its `wideleaf run` named
    #[arg(value_name = "PATH")]
    socket: PathBuf,

    /// What to say to it
    #[command(subcommand)]
    command: VmCommand,

    /// Form of the answer
    #[arg(long, value_enum, default_value = "table", global = true)]
    format: FormatArg,
}

#[derive(Debug, Subcommand)]
enum VmCommand {
    /// Take its vCPUs out of the guest until it is resumed; memory, devices and connections stay
    Pause,
    /// Let its vCPUs go on
    Resume,
    /// End it
    Stop {
        /// In which way
        #[arg(long, value_enum)]
        how: StopArg,
    },
    /// Show whether it runs
    Status,
    /// Show what backs its memory, what its manager has done, what its devices count
    Statistics,
    /// Switch its policy off, or on again
    SetPolicy {
        /// off, or the policy that it was started with
        #[arg(value_name = "NAME[:KEY=VALUE,...]")]
        policy: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StopArg {
    /// Press its power button: a guest that listens to it switches itself off, when it is ready
    Ask,
    /// At once; what the guest has not written to its disks is lost
    Kill,
}

impl From<VmClientError> for Failure {
    fn from(error: VmClientError) -> Failure {
        match error {
            VmClientError::Refused(_) => Failure::Usage(error.to_string()),
            _ => Failure::Host(error.to_string()),
        }
    }
}

/// Runs the subcommand.
///
/// # Errors
/// [`Failure`], one line.
pub fn main(args: &VmSocketArgs) -> Result<(), Failure> {
    let answer = ask(&args.socket, request(&args.command))?;
    let output = Output::open(args.format, None)?;
    match answer {
        VmAnswer::Status(status) => output.write(&status, status_table),
        VmAnswer::Statistics(statistics) => output.write(&statistics, |all| statistics_table(all)),
        VmAnswer::Hello(_) => Err(Failure::Host(format!("{} answers another question", args.socket.display()))),
    }
}

fn request(command: &VmCommand) -> VmRequest {
    match command {
        VmCommand::Pause => VmRequest::Pause,
        VmCommand::Resume => VmRequest::Resume,
        VmCommand::Stop { how: StopArg::Ask } => VmRequest::Stop { how: StopHow::Ask },
        VmCommand::Stop { how: StopArg::Kill } => VmRequest::Stop { how: StopHow::Kill },
        VmCommand::Status => VmRequest::Status,
        VmCommand::Statistics => VmRequest::Statistics,
        VmCommand::SetPolicy { policy } => VmRequest::SetPolicy { policy: policy.clone() },
    }
}

fn status_table(status: &VmStatus) -> String {
    let VmStatus { state, workload, pid, uptime_s, vcpus, policy, exit } = status;
    let state = match state {
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Ended => "ended",
    };
    let of = |wanted| vcpus.iter().filter(|vcpu| **vcpu == wanted).count();
    let mut out = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "{name:<16} {}", tables::clean(value));
    };
    line("state", state);
    line("workload", workload);
    line("process", &pid.to_string());
    line("up for", &format!("{uptime_s:.1} s"));
    let (running, paused, finished) = (of(VcpuView::Running), of(VcpuView::Paused), of(VcpuView::Finished));
    line("vCPUs", &format!("{running} running, {paused} paused, {finished} finished"));
    line("policy", policy);
    if let Some(exit) = exit {
        line("exit", exit);
    }
    out
}

fn statistics_table(all: &VmStatistics) -> String {
    let mut out = tables::vm(&all.vm);
    for (device, counters) in &all.devices {
        for (name, count) in counters {
            let _ = writeln!(out, "{} {}: {count}", tables::clean(device), tables::clean(name).replace('_', " "));
        }
    }
    out
}
