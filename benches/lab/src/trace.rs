//! `wideleaf trace`: every load and store of a kernel, recorded, for the TLB simulator and for whoever wants to look at one.
//!
//! ```text
//!   wideleaf trace record npb.cg --class A -o cg.A.trace ─▶ a process of its own, compiled to tell ─▶ FILE
//!   wideleaf trace info cg.A.trace ─▶ header, phases, totals, what was touched ─▶ table | JSON
//! ```

use std::path::PathBuf;

use clap::{Args, Subcommand};
use wideleaf::args::FormatArg;
use wideleaf::failure::Failure;
use wideleaf_policies::Bytes;

mod info;
mod record;

/// `wideleaf trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TraceCommand,
}

/// The subcommands of `wideleaf trace`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Run a built-in kernel natively, on one thread, and write every load and store of its memory to a file
    Record(RecordArgs),
    /// Show what is in a trace, and whether it is whole
    Info(InfoArgs),
}

const RECORD_EXAMPLES: &str = "\
A trace has every access of the kernel's memory by line of 64 bytes, in the order of the program; not those of its stack and
code. A kernel takes about a hundred times as long, and a second of it can be gigabytes: shorten it.

Examples:
  CG of class A, the first two of its 15 iterations:
    wideleaf trace record npb.cg --class A --iterations 2 --output cg.A.trace

  Only the timed part of GUPS, and at most 100 MiB of it:
    wideleaf trace record gups --cmdline log2_words=24 --phase update --limit 100M --output gups.trace
    wideleaf trace info gups.trace";

/// `wideleaf trace record`.
#[derive(Args, Debug)]
#[command(after_long_help = RECORD_EXAMPLES)]
pub struct RecordArgs {
    /// A built-in kernel; `wideleaf kernels` lists them
    #[arg(value_name = "KERNEL")]
    pub kernel: String,

    /// Size of the problem, for kernels that have classes; the same as class= in --cmdline
    #[arg(long, value_name = "LETTER")]
    pub class: Option<String>,

    /// The kernel's parameters, like `log2_words=25`; none that goes by time, so that two recordings are the same
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub cmdline: String,

    /// Where to write the trace: it is there when it is whole
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,

    /// Run no more than so many iterations of the timed part; the kernel's result is then not checked [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub iterations: Option<u32>,

    /// Record only this phase of the kernel: `init`, `compute`, `verify`, or what `wideleaf trace info` shows [default: all]
    #[arg(long, value_name = "NAME")]
    pub phase: Option<String>,

    /// End the recording where the trace is so long: a number with K, M, G or T behind it (powers of 1024), or bytes
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    pub limit: Option<Bytes>,

    /// Form of the summary
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

/// `wideleaf trace info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// What `wideleaf trace record` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result there instead of to standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// [`Failure`], with nothing left behind.
pub fn main(args: &TraceArgs) -> Result<(), Failure> {
    match &args.command {
        TraceCommand::Record(args) => record::main(args),
        TraceCommand::Info(args) => info::main(args),
    }
}
