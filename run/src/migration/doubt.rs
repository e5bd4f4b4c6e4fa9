//! Why a guest stays paused after a migration that lost its connection, and what the source needs to complete that
//! migration. Plain data: nothing here sends, and nothing here touches the guest.

use std::collections::BTreeSet;
use std::time::Instant;

use wideleaf_policies::WindowIndex;

use super::handover::Source;
use super::serving::Missing;
use crate::report::Left;

/// Why the guest is paused here after a migration, until an operator acts.
pub struct Doubt {
    /// The reason, and what to do.
    pub why: String,
    /// What the target may still need; `None` if it needs nothing, or while it is sent.
    pub kept: Option<UnfinishedMigration>,
}

impl Doubt {
    /// The target needs nothing.
    pub fn new(why: String) -> Doubt {
        Doubt { why, kept: None }
    }
}

/// The rest of a migration that lost its connection. RAM must not change while this exists.
pub struct UnfinishedMigration {
    /// Which side may run the guest, as far as the source knows.
    pub turn: Source,
    /// What is known of it.
    pub departed: Departed,
    /// Pages that were missing at the switch.
    pub missing: Missing,
    /// Windows on large pages when the migration began.
    pub huge: BTreeSet<WindowIndex>,
}

/// A migration after the switch: its guest is at the target.
pub struct Departed {
    /// Name of the migration.
    pub id: String,
    /// Beginning of the migration.
    pub began: Instant,
    /// Figures for the target's report.
    pub left: Left,
    /// Number of dirty logs that were switched on without a change of KVM's mappings.
    pub logs_began_set: u32,
    /// Bytes that were sent, over all connections.
    pub sent_bytes: u64,
}
