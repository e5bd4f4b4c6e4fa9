//! The file of a recorded run: every load and store of a kernel, by cache line, in the order of the program.
//!
//! ```text
//!   TraceWriter ◀── push(Access) ── recorder            TraceReader ──▶ next_block(&mut Vec<Access>) ──▶ simulator
//!        │                                                   ▲
//!        └──▶ header │ phase "init" │ records │ records │ phase "compute" │ records │ … │ end (totals) ──▶┘
//!                      each block: kind, counts, lengths, checksum, payload; readable without those before it
//! ```
//!
//! Both sides stream: neither holds more than one block, however long the trace. This package's README describes
//! every byte.

pub mod block;
mod error;
mod header;
mod reader;
pub mod records;
mod writer;

pub use error::TraceError;
pub use reader::TraceReader;
pub use writer::TraceWriter;

/// Version that is written and read. Any change of a byte's meaning needs a new version.
pub const VERSION: u32 = 1;
/// Bytes of a granule: a cache line of every x86-64 CPU, and the unit of every address in a trace.
pub const GRANULE_BYTES: u32 = 64;

/// Consecutive accesses of one granule: the same line, and all loads or all stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Offset of the line from the arena's start, in bytes: a multiple of [`GRANULE_BYTES`].
    pub address: u64,
    /// Whether the accesses are stores.
    pub is_write: bool,
    /// Number of accesses, at least 1.
    pub repeats: u32,
}

/// Description of the recorded run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the kernel, as the command line has it.
    pub kernel: String,
    /// Letter of its class; empty for a kernel without classes.
    pub class: String,
    /// Parameters of the kernel, as on the command line.
    pub parameters: String,
    /// Length of the kernel's memory in bytes. Every address is below it.
    pub arena_bytes: u64,
    /// Requested iterations of the timed part; 0 if the kernel does not report them.
    pub iterations: u32,
    /// Iterations of the class; 0 if the kernel does not report them. If the two differ, the kernel's result was
    /// not checked.
    pub class_iterations: u32,
}

/// Totals of a trace: the last block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of records ([`Access`]es).
    pub records: u64,
    /// Number of loads: the repeats of all records that are not writes.
    pub reads: u64,
    /// Number of stores.
    pub writes: u64,
    /// Whether the recording ended before the kernel did.
    pub is_cut: bool,
}

impl Totals {
    /// Counts one record. It saturates, so that no count in a file overflows it.
    pub const fn count(&mut self, access: &Access) {
        self.records += 1;
        let accesses = if access.is_write { &mut self.writes } else { &mut self.reads };
        *accesses = accesses.saturating_add(access.repeats as u64);
    }

    /// Number of loads and stores.
    pub const fn accesses(&self) -> u64 {
        self.reads.saturating_add(self.writes)
    }
}
