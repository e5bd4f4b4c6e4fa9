//! Reasons why a trace cannot be written or read, each with the byte offset in the file.

use std::io;

use crate::VERSION;

/// An error, as one line.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file does not begin like a trace.
    #[error("not a trace: the file does not begin with \"wl-trace\"; record one with \"wideleaf-lab trace record\"")]
    NotATrace,
    /// The file has another version.
    #[error("a trace of version {found}; this program reads version {VERSION}: record it again")]
    Version {
        /// Version of the file.
        found: u32,
    },
    /// The file ends before its last block.
    #[error("the trace ends at byte {at}, before its end: the recording or a copy was interrupted")]
    Truncated {
        /// Offset at which the file ends.
        at: u64,
    },
    /// Some bytes are not what a recorder writes.
    #[error("the trace is damaged at byte {at}: {what}")]
    Damaged {
        /// Offset of the damaged header or block.
        at: u64,
        /// Description of the damage.
        what: &'static str,
    },
    /// A value that does not fit the format.
    #[error("cannot be recorded: {0}")]
    Unrecordable(&'static str),
    /// The file cannot be read.
    #[error("cannot be read at byte {at}: {source}")]
    Read {
        /// Offset up to which it was read.
        at: u64,
        /// Underlying I/O error.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot be written at byte {at}: {source}")]
    Write {
        /// Offset up to which it was written.
        at: u64,
        /// Underlying I/O error.
        source: io::Error,
    },
}
