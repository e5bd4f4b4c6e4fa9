//! `wideleaf-lab image`: a kernel, or any static program, as a Linux guest for any VMM, and the evaluation of such a
//! guest's output.
//!
//! ```text
//!   wideleaf-lab image linux --bench cg.S -o cg.cpio.gz        an initramfs: /init, and the workload
//!        │
//!        ▼  QEMU, wideleaf, any other VMM, with a distribution's kernel
//!   serial console ──▶ file ──▶ wideleaf-lab image results FILE ──▶ table | JSON, exit code
//! ```
//!
//! Both read files and write only that of `--output`, which is complete or unchanged. Equal arguments give equal
//! initramfs.
//!
//! | module | what it is |
//! |---|---|
//! | [`archive`] | the initramfs as bytes |
//! | [`workload`] | the guest's workload, checked before anything is written |
//! | [`results`] | the log of a serial console, read |

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use wideleaf::options::FormatArg;
use wideleaf::output::{Output, end_of_both};
use wideleaf_memory::input_file::InputFile;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::output_file::OutputFile;

use crate::image::results::GuestReport;
use crate::image::workload::Workload;

pub mod archive;
pub mod results;
pub mod workload;

/// Arguments of `wideleaf-lab image`.
#[derive(Args, Debug)]
pub struct ImageArgs {
    /// Action on the image
    #[command(subcommand)]
    pub command: ImageCommand,
}

/// Subcommands of `wideleaf-lab image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Make an initramfs with which Linux runs a built-in kernel, or any static program, and then powers off
    Linux(LinuxArgs),
    /// Read a guest's output on its serial console: figures, verification and exit code as from `wideleaf run`
    Results(ResultsArgs),
}

const LINUX_EXAMPLES: &str = "\
Words for the Linux command line. All are optional; all except the first are for kernels only:
  wideleaf.kernel=\"NAME KEY=VALUE ...\"
      run another kernel than that of the image
  wideleaf.threads=N
      number of threads [default: one per CPU, as far as the kernel can use them]
  wideleaf.page=4k|thp|2m|1g
      backing of the kernel's memory: base pages, transparent huge pages, or the hugetlb pool,
      which Linux fills with hugepages=N (1g: hugepagesz=1G hugepages=N) [default: thp]
  wideleaf.memory=SIZE
      memory for the kernel [default: what it needs; for a kernel that takes all memory,
      half of what is available, or the pool]

Examples:
  CG of class A, under QEMU:
    wideleaf-lab image linux --bench cg.A --output cg.cpio.gz
    qemu-system-x86_64 -accel kvm -cpu host -m 1G -nographic -no-reboot \\
        -kernel vmlinuz -initrd cg.cpio.gz -append 'console=ttyS0 quiet panic=-1' | tee cg.log
    wideleaf-lab image results cg.log

  GUPS on hugetlb pages, under `wideleaf run`:
    wideleaf-lab image linux --bench 'gups log2_words=24' --output gups.cpio.gz
    wideleaf run ./vmlinuz --initrd gups.cpio.gz --memory 1G \\
        --cmdline 'console=ttyS0 quiet panic=-1 hugepages=80 wideleaf.page=2m'

  Another program, with two arguments:
    wideleaf-lab image linux --output stream.cpio.gz --exec ./stream -n 10";

/// Arguments of `wideleaf-lab image linux`.
#[derive(Args, Debug)]
#[command(after_long_help = LINUX_EXAMPLES)]
pub struct LinuxArgs {
    /// Kernel to run: NAME.CLASS, like `cg.A`, or its name and parameters, like `gups log2_words=22`
    #[arg(long, value_name = "KERNEL", required_unless_present = "exec", conflicts_with = "exec")]
    pub bench: Option<String>,

    /// Program to run instead, static and for x86-64, with its arguments; must be the last option
    #[arg(long, num_args = 1.., allow_hyphen_values = true, value_names = ["FILE", "ARGUMENT"])]
    pub exec: Vec<OsString>,

    /// File for the initramfs: a newc archive, packed with gzip; equal arguments give equal files
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

/// Arguments of `wideleaf-lab image results`.
#[derive(Args, Debug)]
pub struct ResultsArgs {
    /// Log of the console; it may have other lines [default: standard input, also with -]
    #[arg(value_name = "FILE")]
    pub log: Option<PathBuf>,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Runs the subcommand `image`.
///
/// # Errors
/// [`Failure`]; no file is left behind.
pub fn main(args: &ImageArgs) -> Result<(), Failure> {
    match &args.command {
        ImageCommand::Linux(args) => make(args),
        ImageCommand::Results(args) => read(args),
    }
}

fn make(args: &LinuxArgs) -> Result<(), Failure> {
    let workload = Workload::new(args.bench.as_deref(), &args.exec)?;
    // In this order: once the temporary file exists, a signal no longer ends this process without removing it.
    let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
    let place = OutputFile::open("--output", &args.output)?;
    let archive = archive::initramfs(&workload)?;
    interrupts.check()?;
    place.put(&archive)
}

fn read(args: &ResultsArgs) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
    let output = Output::open(args.format, args.output.as_deref())?;
    let report = GuestReport::of_log(&log_text(args.log.as_deref())?)?;
    interrupts.check()?;
    end_of_both("wideleaf-lab", report.judge(), output.write(&report, GuestReport::to_table))
}

/// The log, up to [`results::LOG_BYTES_MAX`]. Bytes that are not text are replaced: a serial line may damage some.
fn log_text(path: Option<&Path>) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let path = path.filter(|path| *path != Path::new("-"));
    let mut read = |from: &mut dyn Read| from.take(results::LOG_BYTES_MAX).read_to_end(&mut bytes);
    let read = match path {
        Some(path) => InputFile::open_stream(path).map_err(Into::into).and_then(|file| read(&mut file.into_file())),
        None => read(&mut std::io::stdin().lock()),
    };
    let name = || path.map_or_else(|| "standard input".to_owned(), |path| path.display().to_string());
    read.map_err(|error| Failure::Input(format!("cannot read the log {}: {error}", name())))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
