//! The table of kernels: what each is, takes and needs; finding one, running it, turning its end into lines and an exit code.
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
use crate::text::{FixedText, Size};
use crate::{Arena, Platform, amr, balloon, disk, gups, latency, net, npb, pattern, phases, stream, sweep3d, vsock};

/// Every kernel there is.
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
    latency::KERNEL,
];

/// Those that run only in a guest with the right device: found by their name, but not among the kernels that run anywhere.
pub const DEVICE_KERNELS: &[Kernel] = &[disk::KERNEL, net::KERNEL, vsock::KERNEL, balloon::KERNEL];

/// A kernel: all that anybody who starts it, or writes about it, has to know, and its entry.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Its name on the command line and in the `hello` line.
    pub name: Name<'static>,
    /// What it does, one line.
    pub summary: &'static str,
    /// The sizes it comes in, the smallest first; none for a kernel that has no classes. One that has them takes
    /// [`Class::PARAMETER`].
    pub classes: &'static [Class],
    /// The parameters it takes.
    pub parameters: &'static [Parameter],
    /// Parameters of a run that is over in a moment on at most some MiB: what is tested of every kernel, and an example.
    pub quick: &'static str,
    /// Which of its results stands for the run.
    pub figure: Figure,
    /// Most vCPUs that can share its work.
    pub vcpus_max: usize,
    /// The memory that a run with these parameters and so many vCPUs needs. It is computed by what lays the run's memory out, so
    /// the two cannot differ.
    pub memory: for<'a> fn(&Parameters<'a>, usize) -> Result<MemoryNeed, KernelError<'a>>,
    /// Runs it in this arena. Prints its own results and its own verification.
    pub run: for<'a> fn(&dyn Platform, &Arena<'_>, &Parameters<'a>) -> Result<(), KernelError<'a>>,
}

impl Kernel {
    /// What a run with this command line and so many vCPUs needs. Whoever starts a kernel asks first: what cannot run is refused
    /// here, before there is a guest.
    pub fn memory_for<'a>(&self, line: &'a str, vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
        let line = CommandLine::new(line).map_err(KernelError::CommandLine)?;
        (self.memory)(&self.checked(line, vcpus)?, vcpus)
    }

    /// The parameters on `line`, for a run with so many vCPUs.
    fn checked<'a>(&self, line: CommandLine<'a>, vcpus: usize) -> Result<Parameters<'a>, KernelError<'a>> {
        if vcpus > self.vcpus_max {
            return Err(KernelError::TooManyVcpus { vcpus, most: self.vcpus_max });
        }
        Parameters::new(line, self.parameters)
    }
}

/// The number that stands for a run: one of the results that it prints when the counter's frequency is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name of the result.
    pub name: Name<'static>,
    /// Its unit.
    pub unit: Name<'static>,
}

impl Figure {
    /// A figure of this name and unit.
    ///
    /// # Panics
    /// When one of them is no [`Name`].
    pub const fn literal(name: &'static str, unit: &'static str) -> Self {
        Self { name: Name::literal(name), unit: Name::literal(unit) }
    }

    /// Prints it.
    pub fn emit(&self, platform: &dyn Platform, value: f64) {
        platform.emit(&Message::Result { name: self.name, value, unit: self.unit });
    }
}

/// How much memory a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryNeed {
    /// So many bytes, in an arena that begins at a 2 MiB border; more is left alone.
    Bytes(u64),
    /// As much as there is: more memory is more work.
    AllThereIs,
}

impl MemoryNeed {
    /// What the slices take that `place` puts into a layout.
    pub fn of_layout<P>(place: impl FnOnce(&mut Layout) -> P) -> Self {
        let mut layout = Layout::at(0);
        place(&mut layout);
        Self::Bytes(layout.needed())
    }
}

/// What the `hello` line says about how the kernel was started.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    /// Through which door.
    pub entry: Entry,
    /// Page size of the tables the kernel runs on.
    pub guest_page: GuestPage,
}

/// The kernel a command line names.
pub fn find<'a>(line: CommandLine<'a>) -> Result<&'static Kernel, KernelError<'a>> {
    let name = line.value(KEY_KERNEL).ok_or(KernelError::NoKernel)?;
    by_name(name).ok_or(KernelError::UnknownKernel { name })
}

/// The kernel of this name.
pub fn by_name(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().chain(DEVICE_KERNELS).find(|kernel| kernel.name == *name)
}

/// A whole run: finds the kernel that `line` names, says hello, runs it, and says how it ended. The last line is `exit` with
/// the code that is returned; writing it to the exit port, or exiting the process with it, is the caller's.
pub fn run(platform: &dyn Platform, arena: &Arena<'_>, line: &str, started: Started) -> ExitCode {
    let code = match try_run(platform, arena, line, started) {
        Ok(()) => ExitCode::Success,
        Err(error) => {
            // The verify line has already said all about a failed verification.
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

/// Why a kernel did not run, or did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelError<'a> {
    /// The command line has not the right form.
    CommandLine(CommandLineError<'a>),
    /// The command line names no kernel.
    NoKernel,
    /// The command line names a kernel that does not exist.
    UnknownKernel {
        /// The name.
        name: &'a str,
    },
    /// The kernel has no such parameter.
    UnknownParameter {
        /// The name.
        name: &'a str,
        /// Those it has.
        known: &'static [Parameter],
    },
    /// A value is no number or not in its range.
    BadValue {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: &'a str,
        /// What it must be.
        what: &'static str,
        /// Least value.
        least: u64,
        /// Greatest value.
        most: u64,
    },
    /// A value is none of the words that the parameter takes.
    BadChoice {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: &'a str,
        /// What it may be.
        choices: &'static [&'static str],
    },
    /// Two parameters exclude each other.
    Conflict {
        /// One.
        one: &'static str,
        /// The other.
        other: &'static str,
    },
    /// The arena cannot hold what was asked for.
    ArenaTooSmall {
        /// Bytes it would take.
        needed: u64,
        /// Bytes there are.
        bytes: u64,
    },
    /// There are more vCPUs than the kernel can share its work between.
    TooManyVcpus {
        /// How many there are.
        vcpus: usize,
        /// How many it takes.
        most: usize,
    },
    /// The parameter is in seconds, and nobody knows the frequency of the counter.
    NeedsClock {
        /// Name of the parameter.
        name: &'static str,
    },
    /// There is no device that the kernel works on, or it does not do what it says.
    Device {
        /// What is wrong.
        what: &'static str,
    },
    /// The kernel's verification failed.
    VerificationFailed {
        /// Words, or results, that are wrong.
        errors: u64,
        /// How many were looked at.
        checked: u64,
    },
}

impl KernelError<'_> {
    /// The exit code for it.
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
            Self::NoKernel => write!(f, "no kernel named; say kernel=NAME, where NAME is {}", KernelNames::ALL),
            Self::UnknownKernel { name } => {
                write!(f, "unknown kernel \"{}\"; there is {}", Repeated(name), KernelNames::ALL)
            }
            Self::UnknownParameter { name, known } => {
                write!(f, "unknown parameter {}=; there is ", Repeated(name))?;
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
                write!(f, "needs {needed} of memory, there are {there}; give the guest more RAM or ask for less")
            }
            Self::TooManyVcpus { vcpus, most } => write!(f, "{vcpus} vCPUs are more than the {most} it can use"),
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
    /// Every kernel's.
    pub const ALL: Self = Self(|_| true);
    /// Those of the kernels that have classes.
    pub const WITH_CLASSES: Self = Self(|kernel| !kernel.classes.is_empty());
}

impl fmt::Display for KernelNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, KERNELS.iter().filter(|kernel| self.0(kernel)).map(|kernel| kernel.name.as_str()))
    }
}
