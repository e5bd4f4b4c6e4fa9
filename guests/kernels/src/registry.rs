//! The table of kernels. It finds a kernel, runs it, and turns its result into lines and an exit code. No kernel's file
//! names this one: what a kernel is described by is in `kernel.rs`, and its errors are in `error.rs`.
//!
//! ```text
//!              ┌─ command line: names, classes, memory where none is given, refusals before anything starts
//!   KERNELS ───┼─ help and tables for people
//!              ├─ tests: each kernel in each class
//!              └─ run, in a guest or natively
//! ```

use core::fmt;

use wideleaf_protocol::arguments::KEY_KERNEL;
use wideleaf_protocol::{CommandLine, Entry, ExitCode, GuestPage, Message, Name, PROTOCOL_VERSION};

use crate::error::write_list;
pub use crate::kernel::{Kernel, MemoryNeed};
use crate::text::FixedText;
use crate::{
    Arena, KernelError, Platform, amr, balloon, devices, disk, eos, gups, latency, net, npb, pattern, phases, stream,
    sweep3d, vsock,
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
pub const DEVICE_KERNELS: &[Kernel] = &[disk::KERNEL, net::KERNEL, vsock::KERNEL, balloon::KERNEL, devices::KERNEL];

/// Names of [`KERNELS`], in their order.
const NAMES: &[Name<'static>] = &names();

const fn names() -> [Name<'static>; KERNELS.len()] {
    let mut names = [KERNELS[0].name; KERNELS.len()];
    let mut index = 1;
    while index < names.len() {
        names[index] = KERNELS[index].name;
        index += 1;
    }
    names
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
    let name = line.value(KEY_KERNEL).ok_or(KernelError::NoKernel { known: NAMES })?;
    by_name(name).ok_or(KernelError::UnknownKernel { name, known: NAMES })
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
