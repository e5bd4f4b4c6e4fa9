//! The contract between a wideleaf guest and its host, for both sides.
//!
//! ```text
//!   guest image, native run                          wideleaf command, experiments, tests
//!   ───────────────────────                          ────────────────────────────────────
//!   Message  ── Display ──▶  "@wideleaf begin …"  ── parse ──▶  Message
//!   ExitCode ── out 0xf4 ─▶  VMM / isa-debug-exit ── from_* ──▶ ExitCode
//!   DirectBoot ◀─ from_bytes ──  guest RAM  ◀── to_bytes ──     DirectBoot
//!   CommandLine ◀── "kernel=gups log2_words=25 …" ◀──           what the user typed
//! ```
//!
//! | module | the agreement |
//! |---|---|
//! | [`message`] | the lines a guest prints on its serial port (a native run: on standard output) |
//! | [`exit`] | the exit codes, and how QEMU and our VMM carry them |
//! | [`port`] | the x86 I/O ports a guest writes to |
//! | [`arguments`] | the grammar of the guest's command line |
//! | [`direct`] | how our VMM starts an image in 64-bit ring 3, without any boot code |
//! | [`elf`] | offsets of the fields of an image's file |
//! | [`elf_note`] | the notes with an image's entries |
//! | [`recording`] | the output of a recorded kernel to its recorder |
//! | [`linux`] | contents of a Linux guest's initramfs, and our words on the Linux command line |
//!
//! The crate has no dependency, no `std`, no allocation and no `unsafe`, so that the freestanding image can use it.
#![no_std]
#![forbid(unsafe_code)]

pub mod arguments;
pub mod direct;
pub mod elf;
pub mod elf_note;
pub mod exit;
pub mod linux;
pub mod message;
mod name;
pub mod port;
pub mod recording;

pub use arguments::{Argument, CommandLine};
pub use direct::{DirectBoot, RamRange};
pub use exit::ExitCode;
pub use message::{Entry, GuestPage, Message, Mismatch, ProtocolError, Status, parse};
pub use name::Name;

/// Version in every `hello` line. A host refuses a guest with any other version.
pub const PROTOCOL_VERSION: u32 = 1;

/// The most vCPUs of an image. Each has a stack, an interrupt stack and a task segment of its own in the image's
/// `.bss`, so the number is fixed when the image is linked. Sixteen is twice the experiments' maximum.
pub const VCPUS_MAX: usize = 16;
