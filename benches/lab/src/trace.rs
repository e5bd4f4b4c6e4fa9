//! `wideleaf-lab trace`: every load and store of a kernel, recorded, for the TLB simulator and for inspection.
//!
//! ```text
//!   wideleaf-lab trace record npb.cg --class A -o cg.A.trace ─▶ a separate process, instrumented ─▶ FILE
//!   wideleaf-lab trace info cg.A.trace ─▶ header, phases, totals, touched memory ─▶ table | JSON
//! ```

use std::path::PathBuf;

use clap::{Args, Subcommand};
use wideleaf::options::FormatArg;
use wideleaf_policies::Bytes;
use wideleaf_run::failure::Failure;

mod info;
mod record;

/// Arguments of `wideleaf-lab trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Action on a trace
    #[command(subcommand)]
    pub command: TraceCommand,
}

/// Subcommands of `wideleaf-lab trace`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Run a built-in kernel natively and write every load and store of one thread to a file
    Record(RecordArgs),
    /// Show the contents of a trace, and whether it is complete
    Info(InfoArgs),
}

const RECORD_EXAMPLES: &str = "\
A trace has every access to the kernel's memory by line of 64 bytes, in program order, without accesses to its stack and
code. Recording slows a kernel down about a hundred times, and one second of it can be gigabytes: shorten it.

Examples:
  CG of class A, the first two of its 15 iterations:
    wideleaf-lab trace record npb.cg --class A --iterations 2 --output cg.A.trace

  Only the timed part of GUPS, and at most 100 MiB of it:
    wideleaf-lab trace record gups --cmdline log2_words=24 --phase update --limit 100M --output gups.trace
    wideleaf-lab trace info gups.trace";

/// Arguments of `wideleaf-lab trace record`.
#[derive(Args, Debug)]
#[command(after_long_help = RECORD_EXAMPLES)]
pub struct RecordArgs {
    /// Built-in kernel to record; `wideleaf kernels` lists them
    #[arg(value_name = "KERNEL")]
    pub kernel: String,

    /// Problem size, for kernels that have classes; the same as class= in --cmdline
    #[arg(long, value_name = "LETTER")]
    pub class: Option<String>,

    /// Parameters of the kernel, for example `log2_words=25`; none that depends on time, so that recordings can be
    /// repeated
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub cmdline: String,

    /// File for the trace; it is put in place when it is complete
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,

    /// Run the kernel on this number of threads, 1 to 16, and record the first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub threads: u16,

    /// Run at most this number of iterations of the timed part; the kernel's result is then not checked [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub iterations: Option<u32>,

    /// Record only this phase of the kernel: `init`, `compute`, `verify`, or one that `wideleaf-lab trace info` shows
    /// [default: all]
    #[arg(long, value_name = "NAME")]
    pub phase: Option<String>,

    /// End the recording at this length of the trace: a number with K, M, G or T (powers of 1024), or bytes
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    pub limit: Option<Bytes>,

    /// Format of the summary
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

/// Arguments of `wideleaf-lab trace info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// Trace that `wideleaf-lab trace record` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Runs the subcommand `trace`.
///
/// # Errors
/// [`Failure`]; nothing is left behind.
pub fn main(args: &TraceArgs) -> Result<(), Failure> {
    match &args.command {
        TraceCommand::Record(args) => record::main(args),
        TraceCommand::Info(args) => info::main(args),
    }
}
