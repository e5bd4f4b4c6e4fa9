//! Errors of a run: what the kernel, its parameters, its memory or its device lacked, as one line for a person and an
//! exit code for the host. An error allocates nothing and repeats at most a part of the command line.

use core::fmt;

use wideleaf_protocol::arguments::{CommandLineError, Repeated};
use wideleaf_protocol::{ExitCode, Name};

use crate::parameter::Parameter;
use crate::text::Size;

/// Reason why a kernel did not run, or did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelError<'a> {
    /// The command line is malformed.
    CommandLine(CommandLineError<'a>),
    /// The command line names no kernel.
    NoKernel {
        /// Names of the kernels.
        known: &'static [Name<'static>],
    },
    /// The command line names a kernel that does not exist.
    UnknownKernel {
        /// Name on the command line.
        name: &'a str,
        /// Names of the kernels.
        known: &'static [Name<'static>],
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
            | Self::NoKernel { .. }
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
            Self::NoKernel { known } => {
                f.write_str("no kernel named; give kernel=NAME, where NAME is ")?;
                write_list(f, known.iter().copied().map(Name::as_str))
            }
            Self::UnknownKernel { name, known } => {
                write!(f, "unknown kernel \"{}\"; choose one of ", Repeated(name))?;
                write_list(f, known.iter().copied().map(Name::as_str))
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

/// Writes names with commas between them.
pub(crate) fn write_list(f: &mut fmt::Formatter<'_>, names: impl Iterator<Item = &'static str>) -> fmt::Result {
    for (index, name) in names.enumerate() {
        write!(f, "{}{name}", if index == 0 { "" } else { ", " })?;
    }
    Ok(())
}
