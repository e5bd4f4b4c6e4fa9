//! `wideleaf-lab predict`: the gain of 2 MiB pages for a kernel, predicted from its accesses and measured.
//!
//! ```text
//!   a kernel's accesses, recorded ─▶ in turn it runs on both page sizes, and they are replayed ─▶ gain beside bound
//! ```

pub mod hull;
pub mod laps;
pub mod prediction;
pub mod replay;
pub mod sample;
mod tables;
pub mod work;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wideleaf::options::FormatArg;
use wideleaf::output::Output;
use wideleaf::progress::visible_bar;
use wideleaf::tlbcost::counters::{LinuxPmu, describe, select};
use wideleaf_measure::environment::Environment;
use wideleaf_memory::walk_cost::CpuModel;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

use prediction::{BESIDE_ROUNDS, IN_A_ROUND, Prediction, predict};
use work::Work;

const EXAMPLES: &str = "\
The loads and stores of one iteration of the kernel are recorded. Each round then runs the kernel on 4 KiB and on
2 MiB pages (only some iterations if all would take long), and replays the loads and stores alone on both: one after
another, in 2 to 16 chains, all at once, and prefetched. No mix of these that is as fast as the kernel saves more than
the prediction; a kernel that is faster than all of them may, and the result says so. Times are the thread's CPU times.
It needs twice the kernel's memory.

Examples:
  The predicted and the measured gain of 2 MiB pages:
    wideleaf-lab predict gups --log2-words 26
    wideleaf-lab predict npb.cg --class B";

/// `wideleaf-lab predict`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct PredictArgs {
    /// A built-in kernel, run natively (`wideleaf kernels` lists them)
    #[arg(value_name = "KERNEL")]
    kernel: String,

    /// Problem size, for kernels that have classes
    #[arg(long, value_name = "LETTER")]
    class: Option<String>,

    /// Parameters of the kernel
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    cmdline: String,

    /// The same as log2_words= in --cmdline
    #[arg(long, value_name = "N")]
    log2_words: Option<u8>,

    /// Number of rounds of the comparison, one run on each page size; with fewer than 6 the median has no 95 %
    /// interval
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=100))]
    rounds: u8,

    /// Format of the result
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,

    /// Write the result there instead of to standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// A prediction, and where it was made.
#[derive(Debug, Serialize)]
pub struct PredictReport {
    /// Events of the CPU's counters, or the reason why they are missing.
    pub pmu: String,
    /// Model of the CPU.
    pub cpu: CpuModel,
    /// Prediction and measurement.
    pub prediction: Prediction,
    /// Machine of the measurement.
    pub environment: Environment,
}

/// Runs the subcommand.
///
/// # Errors
/// [`Failure`]; no process and no file is left.
pub fn main(args: &PredictArgs) -> Result<(), Failure> {
    let work = args.work()?;
    let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
    let output = Output::open(args.format, args.output.as_deref())?;
    let cpu = CpuModel::read(Path::new("/"));
    let events = select(&LinuxPmu, &cpu);
    let (pmu, environment) = (describe(&events), Environment::capture());
    let bar = visible_bar(
        BESIDE_ROUNDS + IN_A_ROUND * u64::from(args.rounds),
        "{bar:30} {pos} of about {len} steps, {msg} [{elapsed}]",
    );
    bar.enable_steady_tick(Duration::from_millis(200));
    let prediction = predict(&work, events.ok(), usize::from(args.rounds), &interrupts, &bar);
    bar.finish_and_clear();
    let report = PredictReport { pmu, cpu, prediction: prediction?, environment };
    output.write(&report, PredictReport::to_table)
}

impl PredictArgs {
    fn work(&self) -> Result<Work, Failure> {
        let words = self.log2_words.map(|log2| format!("log2_words={log2} {}", self.cmdline));
        let cmdline = words.as_ref().unwrap_or(&self.cmdline).trim_end();
        Work::new(&self.kernel, self.class.as_deref(), cmdline)
    }
}
