//! A kernel, or any static program, as a process of a Linux guest: the initramfs and the words of the command line.
//!
//! ```text
//!   wideleaf image linux ──▶ initramfs          Linux                    /init, process 1
//!                            /init          ──▶ starts it           ──▶  reads /proc/cmdline: wideleaf.page=2m …
//!                            /wideleaf/…                                 reads what the image says is to be run
//!                                               console, a serial line ◀── the lines of [`message`](crate::message)
//!                                               off                  ◀── after `exit`
//! ```
//!
//! A program in place of a kernel prints what it likes; /init frames it with lines of ours:
//!
//! ```text
//! @wideleaf begin phase=program tsc=81250000000
//! …whatever the program wrote to standard output and standard error…
//! @wideleaf end phase=program tsc=86412000000
//! @wideleaf result name=exit_status value=0.0 unit=status
//! @wideleaf exit code=0
//! ```
//!
//! A line of the program's that begins like ours has a space put before it, which makes it anybody's.

use crate::Name;

/// Every word of the Linux command line with this beginning is ours. Linux takes a word with a dot for a module's and leaves it
/// alone (Documentation/admin-guide/kernel-parameters.rst).
pub const KEY_PREFIX: &str = "wideleaf.";
/// Which kernel to run, with its parameters, in quotes: `wideleaf.kernel="npb.cg class=S"`. Default: what the image was made for.
pub const KEY_KERNEL: &str = "wideleaf.kernel";
/// How many threads take part. Default: one on every CPU, as far as the kernel can use them. For kernels only, like what follows.
pub const KEY_THREADS: &str = "wideleaf.threads";
/// What backs the kernel's memory: `4k`, `thp`, `2m` or `1g`; default `thp`.
pub const KEY_PAGE: &str = "wideleaf.page";
/// How much memory the kernel gets, a size. Default: what it needs; for one that takes all there is, half of what is available, or
/// all that is free in the hugetlb pool.
pub const KEY_MEMORY: &str = "wideleaf.memory";

/// In the initramfs: the kernel with its parameters that the image was made for, one line.
pub const KERNEL_FILE: &str = "/wideleaf/kernel";
/// In the initramfs: a program to run in place of a kernel.
pub const PROGRAM_FILE: &str = "/wideleaf/program";
/// In the initramfs: the program's arguments, each ended by a zero byte.
pub const ARGUMENTS_FILE: &str = "/wideleaf/arguments";

/// The phase that frames what a program wrote.
pub const PROGRAM_PHASE: Name<'static> = Name::literal("program");
/// The result that says how a program ended: its status, or 128 and the number of the signal that ended it, as a shell says it.
pub const EXIT_STATUS: Name<'static> = Name::literal("exit_status");
/// The unit of that result.
pub const STATUS: Name<'static> = Name::literal("status");
