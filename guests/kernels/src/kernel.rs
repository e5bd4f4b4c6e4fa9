//! Description of a kernel: what the table of kernels holds for each, and what every kernel's file defines as `KERNEL`.
//!
//! ```text
//!   command line ──▶ checked by `vcpus_max` and `parameters` ─┬─▶ memory: bytes of the run, before there is a guest
//!                                                             └─▶ run: in an arena of that size, on any platform
//! ```

use wideleaf_protocol::{CommandLine, Name};

use crate::arena::Layout;
use crate::npb::classes::Class;
use crate::parameters::{Parameter, Parameters};
use crate::report::Figure;
use crate::{Arena, KernelError, Platform};

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
    pub(crate) fn checked<'a>(&self, line: CommandLine<'a>, vcpus: usize) -> Result<Parameters<'a>, KernelError<'a>> {
        if vcpus > self.vcpus_max {
            return Err(KernelError::TooManyVcpus { vcpus, most: self.vcpus_max });
        }
        Parameters::new(line, self.parameters)
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
