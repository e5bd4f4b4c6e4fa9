//! Why a trace cannot be written or read. Each says at which byte of the file.

use std::io;

use crate::VERSION;

/// What is wrong, in one line.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The first bytes are not those of a trace.
    #[error("no trace: the file does not begin with \"wl-trace\"; record one with \"wideleaf trace record\"")]
    NotATrace,
    /// The file is of another version.
    #[error("a trace of version {found}; this program reads version {VERSION}: record it again")]
    Version {
        /// Its version.
        found: u32,
    },
    /// The file ends before its last block.
    #[error("the trace ends at byte {at}, before its end: the recording or a copy was interrupted")]
    Truncated {
        /// Where it ends.
        at: u64,
    },
    /// Some bytes cannot be what a recorder wrote.
    #[error("the trace is damaged at byte {at}: {what}")]
    Damaged {
        /// Where the header or block begins that is not right.
        at: u64,
        /// What is not right.
        what: &'static str,
    },
    /// Something that the format has no room for.
    #[error("cannot be recorded: {0}")]
    Unrecordable(&'static str),
    /// The file cannot be read.
    #[error("cannot be read at byte {at}: {source}")]
    Read {
        /// How far it was read.
        at: u64,
        /// Why not.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot be written at byte {at}: {source}")]
    Write {
        /// How far it was written.
        at: u64,
        /// Why not.
        source: io::Error,
    },
}
