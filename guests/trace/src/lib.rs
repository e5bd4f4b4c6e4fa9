//! The file of a recorded run: every load and store of a kernel, by cache line, in the order of the program.
//!
//! ```text
//!   TraceWriter ◀── push(Access) ── recorder            TraceReader ──▶ next_block(&mut Vec<Access>) ──▶ simulator
//!        │                                                   ▲
//!        └──▶ header │ phase "init" │ records │ records │ phase "compute" │ records │ … │ end (totals) ──▶┘
//!                      each block: kind, counts, lengths, checksum, payload; it can be read without those before it
//! ```
//!
//! Both sides stream: neither holds more than one block, however long the trace. Every byte is described in this package's README.

pub mod block;
mod error;
mod header;
mod reader;
pub mod records;
mod writer;

pub use error::TraceError;
pub use reader::TraceReader;
pub use writer::TraceWriter;

/// The version that is written and read. A change of a byte's meaning is a new version.
pub const VERSION: u32 = 1;
/// Bytes of a granule: a cache line of every x86-64 CPU, and the unit of every address in a trace.
pub const GRANULE_BYTES: u32 = 64;

/// Accesses of one granule that follow each other: the same line, and all loads or all stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Where the line begins, in bytes from the arena's start: a multiple of [`GRANULE_BYTES`].
    pub address: u64,
    /// Whether they are stores.
    pub is_write: bool,
    /// How many: at least 1.
    pub repeats: u32,
}

/// What was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the kernel, as the command line has it.
    pub kernel: String,
    /// Letter of its class; empty for a kernel that has none.
    pub class: String,
    /// The parameters it was given, as the command line has them.
    pub parameters: String,
    /// Length of the memory it worked on. Every address is below it.
    pub arena_bytes: u64,
    /// Iterations of the timed part that were asked for; 0 where the kernel does not say.
    pub iterations: u32,
    /// Iterations that the class has; 0 where the kernel does not say. Where the two differ, the kernel's result was not checked.
    pub class_iterations: u32,
}

/// What a trace amounts to: the last block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Records: [`Access`]es.
    pub records: u64,
    /// Loads: the repeats of all records that are not writes.
    pub reads: u64,
    /// Stores.
    pub writes: u64,
    /// Whether the recording was ended before the kernel was.
    pub is_cut: bool,
}

impl Totals {
    /// Counts one record. No count that a file could make up overflows.
    pub const fn count(&mut self, access: &Access) {
        self.records += 1;
        let accesses = if access.is_write { &mut self.writes } else { &mut self.reads };
        *accesses = accesses.saturating_add(access.repeats as u64);
    }

    /// Loads and stores.
    pub const fn accesses(&self) -> u64 {
        self.reads.saturating_add(self.writes)
    }
}
