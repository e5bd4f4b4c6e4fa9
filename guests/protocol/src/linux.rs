//! A kernel, or any static program, as a process of a Linux guest: the initramfs and the words of the command line.
//!
//! ```text
//!   wideleaf-lab image linux ──▶ initramfs          Linux                    /init, process 1
//!                            /init          ──▶ starts it           ──▶  reads /proc/cmdline: wideleaf.page=2m …
//!                            /wideleaf/…                                 reads what the image asks to run
//!                                               console, a serial line ◀── the lines of [`message`](crate::message)
//!                                               off                  ◀── after `exit`
//! ```
//!
//! A program instead of a kernel prints freely; /init frames its output with our lines:
//!
//! ```text
//! @wideleaf begin phase=program tsc=81250000000
//! …whatever the program wrote to standard output and standard error…
//! @wideleaf end phase=program tsc=86412000000
//! @wideleaf result name=exit_status value=0.0 unit=status
//! @wideleaf exit code=0
//! ```
//!
//! If a line of the program begins like ours, /init puts a space before it, so that it is not ours.

use crate::Name;

/// Every word of the Linux command line with this prefix is ours. Linux takes a word with a dot for a module's and
/// ignores it (Documentation/admin-guide/kernel-parameters.rst).
pub const KEY_PREFIX: &str = "wideleaf.";
/// Kernel to run, with its parameters, in quotes: `wideleaf.kernel="npb.cg class=S"`. Default: the kernel that the
/// image was made for.
pub const KEY_KERNEL: &str = "wideleaf.kernel";
/// Number of threads. Default: one on every CPU, as far as the kernel can use them. For kernels only, like the keys
/// below.
pub const KEY_THREADS: &str = "wideleaf.threads";
/// Backing of the kernel's memory: `4k`, `thp`, `2m` or `1g`; default `thp`.
pub const KEY_PAGE: &str = "wideleaf.page";
/// Size of the kernel's memory. Default: the size it needs. A kernel that takes all memory gets half of the
/// available memory, or all free pages of the hugetlb pool.
pub const KEY_MEMORY: &str = "wideleaf.memory";

/// In the initramfs: the kernel line that the image was made for, one line.
pub const KERNEL_FILE: &str = "/wideleaf/kernel";
/// In the initramfs: a program to run instead of a kernel.
pub const PROGRAM_FILE: &str = "/wideleaf/program";
/// In the initramfs: the program's arguments, each ended by a zero byte.
pub const ARGUMENTS_FILE: &str = "/wideleaf/arguments";

/// The phase that frames the output of a program.
pub const PROGRAM_PHASE: Name<'static> = Name::literal("program");
/// The result with a program's exit status: its own, or 128 plus the number of the signal that ended it, as in a
/// shell.
pub const EXIT_STATUS: Name<'static> = Name::literal("exit_status");
/// The unit of that result.
pub const STATUS: Name<'static> = Name::literal("status");
