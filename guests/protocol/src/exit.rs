//! How a guest ends, in one small number: the codes of the exit port, and QEMU's status for each. Both sides of the
//! protocol use these numbers.

use core::fmt;

/// Reason why the guest ended. The guest writes the number to [`port::EXIT`](crate::port::EXIT); a native run exits
/// with it.
///
/// An exit code alone does not prove success: QEMU itself ends with status 1 if it cannot start, which is also the
/// status of [`ExitCode::Success`]. A host believes a success only if it has also read the `exit` line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// The kernel ran and its verification passed.
    Success = 0,
    /// The kernel ran and found memory with other contents than it had written.
    VerificationFailed = 1,
    /// The command line names an unknown kernel, an unknown parameter, or a value out of its range.
    BadArguments = 2,
    /// A bug in the guest: a Rust panic.
    Panic = 3,
    /// The CPU raised an unexpected exception.
    Exception = 4,
    /// The machine lacks a requested feature: 1 GiB guest pages, enough RAM, another vCPU.
    Unsupported = 5,
    /// The program that a Linux guest ran instead of a kernel ended by a signal or with a status other than 0.
    ProgramFailed = 6,
}

impl ExitCode {
    /// Every exit code, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Success,
        Self::VerificationFailed,
        Self::BadArguments,
        Self::Panic,
        Self::Exception,
        Self::Unsupported,
        Self::ProgramFailed,
    ];

    /// The byte written to the exit port.
    pub const fn port_value(self) -> u8 {
        self as u8
    }

    /// The exit code of a byte written to the exit port; `None` for an undefined number.
    pub fn from_port_value(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.port_value() == value)
    }

    /// QEMU's exit status after the guest wrote this code to `isa-debug-exit`: `(value << 1) | 1`
    /// (hw/misc/debugexit.c).
    pub const fn qemu_status(self) -> i32 {
        ((self.port_value() as i32) << 1) | 1
    }

    /// The exit code of a QEMU status; `None` if the status cannot come from `isa-debug-exit`.
    pub fn from_qemu_status(status: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.qemu_status() == status)
    }
}

impl fmt::Display for ExitCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::VerificationFailed => "verification failed",
            Self::BadArguments => "bad arguments",
            Self::Panic => "panic",
            Self::Exception => "unexpected CPU exception",
            Self::Unsupported => "the machine lacks a requested feature",
            Self::ProgramFailed => "the program failed",
        })
    }
}
