//! `wideleaf-lab trace record`: checks the kernel, then the place for the trace, then uses both.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount};
use serde::Serialize;
use wideleaf_kernels::registry::{KernelNames, by_name};
use wideleaf_recorder::{Progress, RecordError, Recorded, Request, record};
use wideleaf_trace::{Header, Totals};

use super::RecordArgs;
use wideleaf::output::Output;
use wideleaf::progress::visible_bar;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::kernel;
use wideleaf_run::output_file::{OutputFile, refuse_standard_output};

/// Interval at which the line on a terminal is updated.
const SHOWN_EVERY: Duration = Duration::from_millis(100);

/// Summary of a recording, with its speed.
#[derive(Debug, Serialize)]
pub struct RecordReport {
    /// Path of the trace.
    pub file: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Class of the kernel; empty if it has none.
    pub class: String,
    /// Number of iterations of the timed part that were run; 0 if the kernel does not report it.
    pub iterations: u32,
    /// Number of iterations of the class; 0 if the kernel does not report it.
    pub class_iterations: u32,
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// Number of records: consecutive accesses to one line are one record.
    pub records: u64,
    /// Number of loads.
    pub reads: u64,
    /// Number of stores.
    pub writes: u64,
    /// Whether the limit ended it before the kernel's end.
    pub is_cut: bool,
    /// The kernel's own verification; `None` if it was not to reach its result.
    pub is_verified: Option<bool>,
    /// Duration in seconds.
    pub seconds: f64,
    /// Loads and stores per second.
    pub accesses_per_s: f64,
}

/// Runs the subcommand `trace record`.
///
/// # Errors
/// [`Failure`]; nothing is left behind.
pub fn main(args: &RecordArgs) -> Result<(), Failure> {
    let there =
        || format!("cannot record {:?}: there is no such kernel; the kernels are {}", args.kernel, KernelNames::ALL);
    let kernel = by_name(&args.kernel).ok_or_else(|| Failure::Usage(there()))?;
    let parameters = kernel::with_class(kernel, args.class.as_deref(), &args.cmdline)?;
    let request = Request {
        kernel,
        parameters: &parameters,
        threads: usize::from(args.threads),
        iterations: args.iterations,
        phase: args.phase.as_deref(),
        bytes_max: args.limit.map(|limit| limit.get()),
    };
    refuse_standard_output("--output", &args.output)?;
    request.arena_bytes().map_err(|error| from_record_error(args, error))?;
    let output = Output::open(args.format, None)?;
    // In this order: once the temporary file exists, a signal no longer ends this process without removing it.
    let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
    let file = OutputFile::open("--output", &args.output)?.begin_new()?;

    let bar = visible_bar(0, "{spinner} {prefix} {msg}");
    bar.set_prefix(args.kernel.clone());
    let (start, mut shown) = (Instant::now(), Instant::now());
    let recorded = record(&request, file, &mut |progress| {
        if shown.elapsed() >= SHOWN_EVERY {
            shown = Instant::now();
            bar.set_message(line(progress));
            bar.tick();
        }
        !interrupts.is_set()
    });
    bar.finish_and_clear();
    let Recorded { header, totals, is_verified, out } = recorded.map_err(|error| from_record_error(args, error))?;
    let seconds = start.elapsed().as_secs_f64();
    interrupts.check()?;
    let bytes = out.written();
    out.put()?;
    let file = args.output.display().to_string();
    output.write(&report(file, header, &totals, bytes, is_verified, seconds), RecordReport::to_table)
}

/// The progress line on a terminal.
fn line(progress: &Progress<'_>) -> String {
    let accesses = HumanCount(progress.totals.accesses());
    let steps = progress.steps.filter(|(_, total)| *total > 0).map(|(done, total)| format!(" {done}/{total}"));
    let (phase, steps) = (progress.phase, steps.unwrap_or_default());
    format!("{phase}{steps}: {accesses} accesses, {}", HumanBytes(progress.bytes))
}

fn from_record_error(args: &RecordArgs, error: RecordError) -> Failure {
    let kernel = &args.kernel;
    match error {
        RecordError::ByTime => Failure::Usage(format!("cannot use --cmdline: {error}")),
        RecordError::Parameters(why) => Failure::Usage(format!("cannot record {kernel}: {why}")),
        RecordError::NoIterations => Failure::Usage(format!("cannot use --iterations: {error}")),
        RecordError::NoPhase(_) => Failure::Usage(format!("cannot use --phase: {error}")),
        RecordError::Trace(error) => Failure::Output(format!("cannot write {}: {error}", args.output.display())),
        RecordError::Interrupted => Failure::Interrupted,
        RecordError::Start(_) | RecordError::NoMemory | RecordError::Read(_) => {
            Failure::Host(format!("cannot record {kernel}: {error}"))
        }
        RecordError::Wrong => Failure::GuestFailed(format!("{kernel}: {error}")),
        RecordError::KernelFailed { .. } | RecordError::Killed(_) | RecordError::Garbled => {
            Failure::GuestCrashed(format!("cannot record {kernel}: {error}"))
        }
    }
}

fn report(
    file: String,
    header: Header,
    totals: &Totals,
    bytes: u64,
    is_verified: Option<bool>,
    seconds: f64,
) -> RecordReport {
    RecordReport {
        file,
        kernel: header.kernel,
        class: header.class,
        iterations: header.iterations,
        class_iterations: header.class_iterations,
        bytes,
        records: totals.records,
        reads: totals.reads,
        writes: totals.writes,
        is_cut: totals.is_cut,
        is_verified,
        seconds,
        accesses_per_s: totals.accesses() as f64 / seconds,
    }
}

impl RecordReport {
    /// The report as a table for people.
    pub fn to_table(&self) -> String {
        let RecordReport { file, kernel, bytes, records, seconds, .. } = self;
        let class = if self.class.is_empty() { String::new() } else { format!(".{}", self.class) };
        let (reads, writes) = (HumanCount(self.reads), HumanCount(self.writes));
        let mut out = format!("{file}: {kernel}{class}, {reads} loads and {writes} stores\n");
        let _ = writeln!(out, "  {} in {} records", HumanBytes(*bytes), HumanCount(*records));
        let _ = writeln!(out, "  {seconds:.1} s, {:.1} million accesses per second", self.accesses_per_s / 1e6);
        if self.class_iterations > 0 {
            let _ = writeln!(out, "  {} of {} iterations", self.iterations, self.class_iterations);
        }
        if self.is_cut {
            let _ = writeln!(out, "  cut at --limit");
        }
        let verified = match self.is_verified {
            Some(true) => "the kernel's result is correct",
            Some(false) => "the kernel's result is wrong",
            None => "the kernel's result was not checked",
        };
        let _ = writeln!(out, "  {verified}");
        out
    }
}
