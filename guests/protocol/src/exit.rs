//! How a guest ends, in one small number.

use core::fmt;

/// Why the guest ended. The number is what the guest writes to [`port::EXIT`](crate::port::EXIT) and what a native run
/// gives to its parent.
///
/// An exit code alone is not proof of success: QEMU itself ends with status 1 when it cannot start, which is also what
/// [`ExitCode::Success`] becomes. A host believes a success when it has also read the `exit` line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// The kernel ran and its verification passed.
    Success = 0,
    /// The kernel ran and found memory it had not written so.
    VerificationFailed = 1,
    /// The command line names an unknown kernel, an unknown parameter, or a value out of its range.
    BadArguments = 2,
    /// The guest's own mistake: a Rust panic.
    Panic = 3,
    /// The CPU raised an exception nobody expected.
    Exception = 4,
    /// The machine lacks something that was asked for: 1 GiB guest pages, enough RAM, another vCPU.
    Unsupported = 5,
    /// The program that a Linux guest ran in place of a kernel ended with another status than 0, or by a signal.
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

    /// The exit code that a byte written to the exit port stands for; `None` for a number nobody defined.
    pub fn from_port_value(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.port_value() == value)
    }

    /// The status QEMU ends with after the guest wrote this code to `isa-debug-exit`: `(value << 1) | 1`
    /// (hw/misc/debugexit.c).
    pub const fn qemu_status(self) -> i32 {
        ((self.port_value() as i32) << 1) | 1
    }

    /// The exit code behind a QEMU status; `None` when the status cannot come from `isa-debug-exit`.
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
            Self::Unsupported => "the machine lacks something that was asked for",
            Self::ProgramFailed => "the program failed",
        })
    }
}
