//! What the source keeps of a migration that lost its connection.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use wideleaf_policies::WindowIndex;

use super::serving::Missing;
use crate::report::Left;

/// Why the guest is paused here after a migration, until an operator acts.
#[derive(Clone)]
pub struct Doubt {
    /// The reason, and what to do.
    pub why: String,
    /// What the target may still need; `None` if it needs nothing.
    pub kept: Option<Arc<Kept>>,
}

impl Doubt {
    /// The target needs nothing.
    pub fn new(why: String) -> Doubt {
        Doubt { why, kept: None }
    }
}

/// The rest of a migration that lost its connection. RAM must not change while this exists.
pub struct Kept {
    /// What is known of it.
    pub departed: Departed,
    /// Pages that were missing at the switch.
    pub missing: Missing,
    /// Windows on large pages when the migration began.
    pub huge: BTreeSet<WindowIndex>,
}

/// A migration after the switch: its guest is at the target.
#[derive(Clone)]
pub struct Departed {
    /// Name of the migration.
    pub id: String,
    /// Beginning of the migration.
    pub began: Instant,
    /// Figures for the target's report.
    pub left: Left,
    /// Number of dirty logs that were switched on without a change of KVM's mappings.
    pub logs_began_set: u32,
    /// Bytes that were sent over connections that are lost.
    pub sent_bytes: u64,
}
