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
//! With post-copy, the guest moves before all of its RAM has:
//!
//! ```text
//!     pause; what is missing; machine ──────────▶ drops these pages, builds the machine
//!                    …  ready, go, running as above  …
//!     stays paused                  ◀──────────── requests: touched windows first, then the hottest
//!     missing pages                 ────────────▶ into place, on huge pages where they were
//!     ends its guest                ◀──────────── complete
//! ```
//!
//! A connection that breaks meanwhile may be followed by another one, which clients bring to both sides:
//!
//! ```text
//!   wideleaf vm SOCKET recover ADDRESS               wideleaf vm SOCKET recover --incoming ADDRESS
//!     again: name of the migration  ────────────▶ the right one?
//!                                   ◀──────────── welcome, requests for what has not come
//! ```
//!
//! `serving` sends what is missing, `remote_ram` asks for it, and `completing` puts it in place; `doubt` and
//! `recovering` are about another connection at the source, `offer` at the target. `frames` has the form of the
//! messages, `link` sends and receives them with time limits, `handover` decides which of the two may run the guest,
//! `source` and `target` are the two sides, `wire` is the source's connection, `placing` fills RAM, `address` connects
//! them.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use wideleaf_control::vm::PostCopyView;

use crate::spec::RunSpec;

mod address;
mod completing;
pub(crate) mod doubt;
mod frames;
mod handover;
mod link;
mod offer;
mod placing;
pub(crate) mod recovering;
mod remote_ram;
mod serving;
pub(crate) mod source;
mod target;
mod wire;

pub use address::{Address, AddressError, ConnectionEnds};
pub(crate) use offer::Offer;
pub use source::check_rate;
pub use target::Incoming;

/// Time without a byte after which the other side counts as gone while pages are missing: longer than a switch or a
/// router needs to start again, since the loss ends the guest.
const POST_COPY_SILENCE_MAX: Duration = Duration::from_secs(300);

/// First message of the source.
#[derive(Debug, Deserialize, Serialize)]
pub struct Hello {
    /// Release of the source.
    pub wideleaf: String,
    /// Specification of its run.
    pub spec: RunSpec,
    /// Whether the guest may move before all of its RAM has.
    pub may_post_copy: bool,
    /// Name of this migration, which no other one has.
    pub id: String,
}

/// Figures of the target, once its guest runs.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Arrived {
    /// Target's RAM in pages of 2 MiB and more at the switch, in bytes; once all of it was there, if pages came after.
    pub huge_bytes: u64,
    /// The same in base pages.
    pub base_bytes: u64,
    /// Pages that came after the switch, if some did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyView>,
}
