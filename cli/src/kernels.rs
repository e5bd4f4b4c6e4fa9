//! `wideleaf kernels`: the table of built-in kernels, for people and for programs. The kernels themselves report
//! their memory.

use std::fmt::Write as _;

use clap::Args;
use comfy_table::Cell;
use serde::Serialize;
use wideleaf_kernels::parameters::Parameter;
use wideleaf_kernels::registry::{KernelNames, MemoryNeed, by_name};
use wideleaf_kernels::{KERNELS, Kernel};
use wideleaf_run::failure::Failure;
use wideleaf_run::kernel::{self, meant};

use crate::options::FormatArg;
use crate::output::Output;
use crate::table::{number, prose_table};

const KERNELS_EXAMPLES: &str = "\
Examples:
  List all of them:
    wideleaf kernels

  Show one, with its parameters:
    wideleaf kernels npb.is

  All details of all of them, for programs:
    wideleaf kernels --format json";

/// Arguments of `wideleaf kernels`.
#[derive(Args, Debug)]
#[command(after_long_help = KERNELS_EXAMPLES)]
pub struct KernelsArgs {
    /// Show only this kernel, with its parameters
    #[arg(value_name = "KERNEL")]
    pub kernel: Option<String>,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

/// List of some kernels.
#[derive(Debug, Serialize)]
pub struct KernelList {
    /// Facts about each kernel.
    pub kernels: Vec<KernelInfo>,
}

/// Facts about a built-in kernel.
#[derive(Debug, Serialize)]
pub struct KernelInfo {
    /// Name for `wideleaf run`.
    pub name: &'static str,
    /// Summary of its work.
    pub summary: &'static str,
    /// Name of the result that stands for a run.
    pub figure: &'static str,
    /// Unit of that result.
    pub unit: &'static str,
    /// Most vCPUs that can share its work.
    pub vcpus_max: usize,
    /// Memory by class; one entry without a class for a kernel that has none.
    pub memory: Vec<MemoryInfo>,
    /// Parameters in `--cmdline`.
    pub parameters: Vec<ParameterInfo>,
    /// Parameters of a run that takes only a moment.
    pub quick: &'static str,
}

/// Memory that a run on one vCPU needs, with default values of all other parameters.
#[derive(Debug, Serialize)]
pub struct MemoryInfo {
    /// Size of the problem.
    pub class: Option<&'static str>,
    /// Number of bytes; `None` if the kernel takes all memory.
    pub bytes: Option<u64>,
}

/// A parameter of a kernel.
#[derive(Debug, Serialize)]
pub struct ParameterInfo {
    /// Key of the parameter.
    pub name: &'static str,
    /// Value if it is not given.
    pub default: &'static str,
    /// Unit of its value.
    pub unit: &'static str,
    /// Meaning of the parameter.
    pub meaning: &'static str,
}

/// Runs the subcommand `kernels`.
///
/// # Errors
/// [`Failure`] if there is no such kernel, or the result could not be written.
pub fn main(args: &KernelsArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    match args.kernel.as_deref() {
        None => output.write(&KernelList::new(KERNELS), KernelList::to_table),
        Some(name) => {
            let hint = || meant(name);
            let unknown = || {
                Failure::Usage(format!(
                    "cannot find the kernel {name:?}; the kernels are {}{}",
                    KernelNames::ALL,
                    hint()
                ))
            };
            let kernel = by_name(name).ok_or_else(unknown)?;
            output.write(&KernelInfo::new(kernel), KernelInfo::to_details)
        }
    }
}

/// A line for each kernel, for the help.
pub fn one_line_each() -> String {
    let line = |info: KernelInfo| format!("  {}: {} ({})\n", info.name, info.summary, info.memory_text());
    KERNELS.iter().map(KernelInfo::new).map(line).collect()
}

impl KernelList {
    fn new(kernels: &[Kernel]) -> KernelList {
        KernelList { kernels: kernels.iter().map(KernelInfo::new).collect() }
    }

    /// The list as a table for people.
    pub fn to_table(&self) -> String {
        let mut rows = prose_table(&["kernel", "what it does", "figure", "memory of one vCPU, by class", "vCPUs"]);
        for info in &self.kernels {
            rows.add_row([
                Cell::new(info.name),
                Cell::new(info.summary),
                Cell::new(info.unit),
                Cell::new(info.memory_text()),
                number(format!("1 - {}", info.vcpus_max)),
            ]);
        }
        format!("{rows}\n`wideleaf kernels NAME` shows the parameters of one.\n")
    }
}

impl KernelInfo {
    fn new(kernel: &Kernel) -> KernelInfo {
        let memory_of = |class: Option<&'static str>| MemoryInfo { class, bytes: bytes_needed(kernel, class) };
        let memory = match kernel.classes {
            [] => vec![memory_of(None)],
            classes => classes.iter().map(|class| memory_of(Some(class.letter()))).collect(),
        };
        KernelInfo {
            name: kernel.name.as_str(),
            summary: kernel.summary,
            figure: kernel.figure.name.as_str(),
            unit: kernel.figure.unit.as_str(),
            vcpus_max: kernel.vcpus_max,
            memory,
            parameters: kernel.parameters.iter().map(ParameterInfo::new).collect(),
            quick: kernel.quick,
        }
    }

    /// `S 2, W 11, A 29 MiB`, `256 MiB` or `all memory`.
    fn memory_text(&self) -> String {
        let each = self.memory.iter().map(|MemoryInfo { class, bytes }| {
            let mebibytes = bytes.map(|bytes| bytes.div_ceil(1 << 20).to_string());
            class.map(str::to_owned).into_iter().chain(mebibytes).collect::<Vec<_>>().join(" ")
        });
        match each.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => "all memory".to_owned(),
            each => each + " MiB",
        }
    }

    /// All details of one kernel, for people.
    pub fn to_details(&self) -> String {
        let mut out = format!("{}: {}\n", self.name, self.summary);
        let _ = writeln!(out, "  figure: {} in {}", self.figure, self.unit);
        let _ = writeln!(out, "  memory of one vCPU: {}", self.memory_text());
        let _ = writeln!(out, "  vCPUs: 1 to {}", self.vcpus_max);
        let _ = writeln!(out, "  a quick run: wideleaf run {} --cmdline '{}'", self.name, self.quick);
        let mut rows = prose_table(&["parameter", "default", "unit", "meaning"]);
        for ParameterInfo { name, default, unit, meaning } in &self.parameters {
            rows.add_row([format!("{name}="), (*default).to_owned(), (*unit).to_owned(), (*meaning).to_owned()]);
        }
        let _ = writeln!(out, "{rows}");
        out
    }
}

impl ParameterInfo {
    const fn new(parameter: &Parameter) -> ParameterInfo {
        let Parameter { name, default, unit, meaning } = *parameter;
        ParameterInfo { name, default, unit, meaning }
    }
}

fn bytes_needed(kernel: &Kernel, class: Option<&str>) -> Option<u64> {
    let cmdline = kernel::with_class(kernel, class, "").expect("the class is the kernel's own");
    match kernel.memory_for(&cmdline, 1).expect("every kernel runs with its defaults on one vCPU") {
        MemoryNeed::Bytes(bytes) => Some(bytes),
        MemoryNeed::AllThereIs => None,
    }
}
