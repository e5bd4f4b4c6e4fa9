//! The table of kernels with their parameters and memory needs. It finds a kernel, runs it, and turns its result
//! into lines and an exit code.
//!
//! ```text
//!              ┌─ command line: names, classes, memory where none is given, refusals before anything starts
//!   KERNELS ───┼─ help and tables for people
//!              ├─ tests: each kernel in each class
//!              └─ run, in a guest or natively
//! ```

use core::fmt;

use wideleaf_protocol::arguments::{CommandLineError, KEY_KERNEL, Repeated};
use wideleaf_protocol::{CommandLine, Entry, ExitCode, GuestPage, Message, Name, PROTOCOL_VERSION};

use crate::arena::Layout;
use crate::npb::classes::Class;
use crate::parameters::{Parameter, Parameters};
use crate::report;
use crate::text::{FixedText, Size};
use crate::{
    Arena, Platform, amr, balloon, disk, eos, gups, latency, net, npb, pattern, phases, stream, sweep3d, vsock,
};

/// Every kernel that runs anywhere.
pub const KERNELS: &[Kernel] = &[
    gups::KERNEL,
    pattern::KERNEL,
    phases::KERNEL,
    npb::bt::KERNEL,
    npb::cg::KERNEL,
    npb::ep::KERNEL,
    npb::ft::KERNEL,
    npb::is::KERNEL,
    npb::lu::KERNEL,
    npb::mg::KERNEL,
    npb::sp::KERNEL,
    stream::KERNEL,
    sweep3d::KERNEL,
    amr::KERNEL,
    eos::KERNEL,
    latency::KERNEL,
];

/// Kernels that need a guest with the right device. They are found by name, but are not among the kernels that run
/// anywhere.
pub const DEVICE_KERNELS: &[Kernel] = &[disk::KERNEL, net::KERNEL, vsock::KERNEL, balloon::KERNEL];

/// A kernel: its entry point, and everything that its callers and its documentation need.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Name on the command line and in the `hello` line.
    pub name: Name<'static>,
    /// Purpose of the kernel, one line.
    pub summary: &'static str,
    /// Available sizes, smallest first; empty for a kernel without classes. A kernel with classes takes
    /// [`Class::PARAMETER`].
    pub classes: &'static [Class],
    /// Parameters of the kernel.
    pub parameters: &'static [Parameter],
    /// Parameters of a short run on at most some MiB: used to test every kernel, and as an example.
    pub quick: &'static str,
    /// The result that stands for the run.
    pub figure: Figure,
    /// Maximum number of vCPUs that can share its work.
    pub vcpus_max: usize,
    /// Memory that a run with these parameters and vCPUs needs. The same code lays out the run's memory, so the two
    /// cannot differ.
    pub memory: for<'a> fn(&Parameters<'a>, usize) -> Result<MemoryNeed, KernelError<'a>>,
    /// Runs the kernel in this arena. It prints its own results and verification.
    pub run: for<'a> fn(&dyn Platform, &Arena<'_>, &Parameters<'a>) -> Result<(), KernelError<'a>>,
}

impl Kernel {
    /// Memory that a run with this command line and this number of vCPUs needs. A caller asks first: a run that is
    /// impossible is refused here, before there is a guest.
    pub fn memory_for<'a>(&self, line: &'a str, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
        let line = CommandLine::new(line).map_err(KernelError::CommandLine)?;
        (self.memory)(&self.checked(line, vcpus)?, vcpus)
    }

    /// The parameters on `line`, for a run with this number of vCPUs.
    fn checked<'a>(&self, line: CommandLine<'a>, vcpus: usize) -> Result<Parameters<'a>, KernelError<'a>> {
        if vcpus > self.vcpus_max {
            return Err(KernelError::TooManyVcpus { vcpus, most: self.vcpus_max });
        }
        Parameters::new(line, self.parameters)
    }
}

/// The number that stands for a run: a result that the kernel prints if the counter's frequency is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name of the result.
    pub name: Name<'static>,
    /// Unit of the result.
    pub unit: Name<'static>,
}

impl Figure {
    /// Creates a figure of this name and unit.
    ///
    /// # Panics
    /// Panics if one of them is not a valid [`Name`].
    pub const fn literal(name: &'static str, unit: &'static str) -> Self {
        Self { name: Name::literal(name), unit: Name::literal(unit) }
    }

    /// Prints the figure with its value.
    pub fn emit(&self, platform: &dyn Platform, value: f64) {
        report::result(platform, self.name, value, self.unit);
    }
}

/// Memory that a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryNeed {
    /// Number of bytes, in an arena that begins at a 2 MiB border; memory beyond them is not used.
    Bytes(u64),
    /// All available memory: more memory is more work.
    AllThereIs,
}

impl MemoryNeed {
    /// Memory of the slices that `place` puts into a layout.
    pub fn of_layout<P>(place: impl FnOnce(&mut Layout) -> P) -> Self {
        let mut layout = Layout::at(0);
        place(&mut layout);
        Self::Bytes(layout.needed())
    }
}

/// How the kernel was started, for the `hello` line.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    /// Boot protocol that was used.
    pub entry: Entry,
    /// Page size of the tables that the kernel runs on.
    pub guest_page: GuestPage,
}

/// Finds the kernel that a command line names.
pub fn find<'a>(line: CommandLine<'a>) -> Result<&'static Kernel, KernelError<'a>> {
    let name = line.value(KEY_KERNEL).ok_or(KernelError::NoKernel)?;
    by_name(name).ok_or(KernelError::UnknownKernel { name })
}

/// Finds the kernel of this name.
pub fn by_name(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().chain(DEVICE_KERNELS).find(|kernel| kernel.name == *name)
}

/// Runs a kernel from start to end: finds the kernel that `line` names, prints `hello`, runs it, and prints how it
/// ended. The last line is `exit` with the returned code. The caller writes the code to the exit port or exits with
/// it.
pub fn run(platform: &dyn Platform, arena: &Arena<'_>, line: &str, started: Started) -> ExitCode {
    let code = match try_run(platform, arena, line, started) {
        Ok(()) => ExitCode::Success,
        Err(error) => {
            // The verify line has already reported a failed verification.
            if error.exit_code() != ExitCode::VerificationFailed {
                let text = FixedText::new(format_args!("{error}"));
                platform.emit(&Message::Panic { message: text.as_str() });
            }
            error.exit_code()
        }
    };
    platform.emit(&Message::Exit { code });
    code
}

fn try_run<'a>(
    platform: &dyn Platform,
    arena: &Arena<'_>,
    line: &'a str,
    started: Started,
) -> Result<(), KernelError<'a>> {
    let line = CommandLine::new(line).map_err(KernelError::CommandLine)?;
    let kernel = find(line)?;
    let parameters = kernel.checked(line, platform.vcpus())?;
    platform.emit(&Message::Hello {
        version: PROTOCOL_VERSION,
        kernel: kernel.name,
        vcpus: platform.vcpus() as u32,
        guest_page: started.guest_page,
        tsc_hz: platform.tsc_hz(),
        entry: started.entry,
    });
    (kernel.run)(platform, arena, &parameters)
}

/// Reason why a kernel did not run, or did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelError<'a> {
    /// The command line is malformed.
    CommandLine(CommandLineError<'a>),
    /// The command line names no kernel.
    NoKernel,
    /// The command line names a kernel that does not exist.
    UnknownKernel {
        /// Name on the command line.
        name: &'a str,
    },
    /// The kernel has no such parameter.
    UnknownParameter {
        /// Name on the command line.
        name: &'a str,
        /// Parameters of the kernel.
        known: &'static [Parameter],
    },
    /// A value is not a number or not in its range.
    BadValue {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: &'a str,
        /// Expected kind of value.
        what: &'static str,
        /// Smallest allowed value.
        least: u64,
        /// Largest allowed value.
        most: u64,
    },
    /// A value is not one of the words that the parameter takes.
    BadChoice {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: &'a str,
        /// The allowed words.
        choices: &'static [&'static str],
    },
    /// Two parameters exclude each other.
    Conflict {
        /// Name of one parameter.
        one: &'static str,
        /// Name of the other.
        other: &'static str,
    },
    /// The arena is too small for the request.
    ArenaTooSmall {
        /// Bytes that are needed.
        needed: u64,
        /// Bytes of the arena.
        bytes: u64,
    },
    /// The guest has more vCPUs than the kernel can use.
    TooManyVcpus {
        /// Number of vCPUs of the guest.
        vcpus: usize,
        /// Maximum number of vCPUs of the kernel.
        most: usize,
    },
    /// The parameter is in seconds, and the frequency of the counter is unknown.
    NeedsClock {
        /// Name of the parameter.
        name: &'static str,
    },
    /// The device that the kernel needs is missing, or misbehaves.
    Device {
        /// Description of the fault.
        what: &'static str,
    },
    /// The kernel's verification failed.
    VerificationFailed {
        /// Number of wrong words or results.
        errors: u64,
        /// Number of words or results that were checked.
        checked: u64,
    },
}

impl KernelError<'_> {
    /// The exit code of this error.
    pub const fn exit_code(&self) -> ExitCode {
        match self {
            Self::VerificationFailed { .. } => ExitCode::VerificationFailed,
            Self::ArenaTooSmall { .. } | Self::NeedsClock { .. } | Self::Device { .. } => ExitCode::Unsupported,
            Self::CommandLine(_)
            | Self::NoKernel
            | Self::UnknownKernel { .. }
            | Self::UnknownParameter { .. }
            | Self::BadValue { .. }
            | Self::BadChoice { .. }
            | Self::TooManyVcpus { .. }
            | Self::Conflict { .. } => ExitCode::BadArguments,
        }
    }
}

impl fmt::Display for KernelError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CommandLine(error) => write!(f, "command line: {error}"),
            Self::NoKernel => write!(f, "no kernel named; give kernel=NAME, where NAME is {}", KernelNames::ALL),
            Self::UnknownKernel { name } => {
                write!(f, "unknown kernel \"{}\"; choose one of {}", Repeated(name), KernelNames::ALL)
            }
            Self::UnknownParameter { name, known } => {
                write!(f, "unknown parameter {}=; choose one of ", Repeated(name))?;
                write_list(f, known.iter().map(|parameter| parameter.name))
            }
            Self::BadValue { name, value, what, least, most } => {
                write!(f, "{name}={}: expected {what} from {least} to {most}", Repeated(value))
            }
            Self::BadChoice { name, value, choices } => {
                write!(f, "{name}={}: expected one of ", Repeated(value))?;
                write_list(f, choices.iter().copied())
            }
            Self::Conflict { one, other } => write!(f, "{one}= and {other}= exclude each other"),
            Self::ArenaTooSmall { needed, bytes } => {
                let (needed, there) = (Size(*needed), Size(*bytes));
                write!(f, "needs {needed} of memory, but has {there}; give the guest more RAM or choose a smaller size")
            }
            Self::TooManyVcpus { vcpus, most } => write!(f, "the kernel can use at most {most} vCPUs, not {vcpus}"),
            Self::NeedsClock { name } => {
                write!(f, "{name}= needs the frequency of the time stamp counter; give it with tsc_hz=")
            }
            Self::Device { what } => write!(f, "{what}"),
            Self::VerificationFailed { errors, checked } => {
                write!(f, "{errors} of {checked} words or results are wrong")
            }
        }
    }
}

impl core::error::Error for KernelError<'_> {}

fn write_list(f: &mut fmt::Formatter<'_>, names: impl Iterator<Item = &'static str>) -> fmt::Result {
    for (index, name) in names.enumerate() {
        write!(f, "{}{name}", if index == 0 { "" } else { ", " })?;
    }
    Ok(())
}

/// The names of the kernels of some kind, separated by commas.
#[derive(Clone, Copy, Debug)]
pub struct KernelNames(fn(&Kernel) -> bool);

impl KernelNames {
    /// The names of every kernel.
    pub const ALL: Self = Self(|_| true);
    /// The names of the kernels that have classes.
    pub const WITH_CLASSES: Self = Self(|kernel| !kernel.classes.is_empty());
}

impl fmt::Display for KernelNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, KERNELS.iter().filter(|kernel| self.0(kernel)).map(|kernel| kernel.name.as_str()))
    }
}
