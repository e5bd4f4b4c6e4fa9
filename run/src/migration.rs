//! Live migration: a VM leaves one `wideleaf run` and continues in another, of the same host or another one.
//!
//! ```text
//!   wideleaf vm SOCKET migrate ADDRESS            wideleaf run --incoming ADDRESS
//!     connects, passes the connection
//!              │                                    accepts one connection
//!   source     ▼                                               ▼     target
//!     hello: release, specification ────────────▶ maps RAM, enters no sandbox yet
//!                                   ◀──────────── welcome
//!     pages, round by round         ────────────▶ into RAM, on huge pages where they were
//!     pause; last pages; flushes
//!     its disks and unlocks them;
//!     machine                       ────────────▶ locks the disks; builds the machine, held; its sandbox; its manager
//!                                   ◀──────────── ready
//!     go                            ────────────▶ lets the guest run
//!     ends its guest                ◀──────────── running
//!     figures of both sides         ◀───────────▶ for their reports
//! ```
//!
//! `frames` has the form of the messages, `link` sends and receives them with time limits, `handover` decides which of
//! the two may run the guest, `source` and `target` are the two sides, `placing` fills RAM, `address` connects them.

use serde::{Deserialize, Serialize};

use crate::spec::RunSpec;

mod address;
mod frames;
mod handover;
mod link;
mod placing;
pub(crate) mod source;
mod target;

pub use address::{Address, AddressError, Ends};
pub use target::Incoming;

/// First message of the source.
#[derive(Debug, Deserialize, Serialize)]
pub struct Hello {
    /// Release of the source.
    pub wideleaf: String,
    /// Specification of its run.
    pub spec: RunSpec,
}

/// Figures of the target, once its guest runs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Arrived {
    /// Target's RAM in pages of 2 MiB and more at the switch, in bytes.
    pub huge_bytes: u64,
    /// Target's RAM in base pages at the switch, in bytes.
    pub base_bytes: u64,
}
