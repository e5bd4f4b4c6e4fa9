//! Snapshots, migrations and restores of a VM in figures: progress, results, and what they cost the guest.

use serde::{Deserialize, Serialize};

use crate::units::ByteCount;

/// A snapshot that was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedView {
    /// Guest RAM in the snapshot, without pages of zeroes, in bytes.
    pub stored_bytes: ByteCount,
    /// Bytes written to `memory`; more than stored where the guest wrote pages again meanwhile.
    pub written_bytes: ByteCount,
    /// Number of passes over what the guest had written since the one before, the first over all of it.
    pub rounds: u32,
    /// Length of the guest's pause, in milliseconds.
    pub pause_ms: f64,
    /// Duration of the whole save, in seconds.
    pub seconds: f64,
    /// Whether a VM that stays paused was paused before, so that a client without a snapshot leaves it so.
    #[serde(default)]
    pub was_paused: bool,
    /// What KVM did for the guest before the pause; left out where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_pause: Option<BeforePauseView>,
}

/// What KVM did for a guest that ran while it was saved or migrated. The first write to each page after the page was
/// saved leaves the guest, so this is the price of the rounds, and with it all that the guest needs of KVM anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BeforePauseView {
    /// Time from before the dirty logs were switched on until right before the pause, or until it failed, in seconds.
    pub seconds: f64,
    /// CPU time of the vCPUs' threads in the kernel in that time, in milliseconds: a part of their exact CPU time, as
    /// ticks of the kernel's timer tell it. Of a VM with more than 16 vCPUs this and the counts are those of the first
    /// 16.
    pub system_ms: f64,
    /// Number of faults in that time after which KVM had entered a mapping.
    pub faults: u64,
    /// Number of times in that time that a vCPU left the guest, for any reason.
    pub exits: u64,
}

/// KVM's large mappings of a guest that goes on here after a snapshot or a migration: the rounds make them small, and
/// KVM maps large again where the guest touches its memory. The host's pages stay as large as they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RemappedView {
    /// Guest RAM that KVM had mapped by pages of 2 MiB and more before the rounds, in bytes. Under shadow paging it
    /// counts once for each address space of the guest.
    pub large_before_bytes: ByteCount,
    /// The same right after the rounds, in bytes.
    pub large_after_bytes: ByteCount,
    /// Time from then until nine tenths of what was large before were large again, in seconds; left out until then. The
    /// guest is watched for a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

/// Snapshots and migrations of a VM that are over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PastSavesView {
    /// Number of snapshots that were written.
    pub snapshots: u64,
    /// Number of snapshots that failed, were refused or were cancelled.
    pub snapshots_failed: u64,
    /// Number of migrations that were done: 1 where the VM has come from another run. The run that it leaves ends.
    #[serde(default)]
    pub migrations: u64,
    /// Number of migrations, and of attempts to recover one, that failed, were refused or cancelled, or left the VM in
    /// doubt.
    pub migrations_failed: u64,
    /// Length of the pause of the latest snapshot that was written, in milliseconds; left out before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_pause_ms: Option<f64>,
    /// What KVM did for the guest before that pause; left out where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_before_pause: Option<BeforePauseView>,
    /// What KVM did for the guest during the latest snapshot or migration that failed, until it failed; left out where
    /// it failed before it read RAM, and where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failed: Option<BeforePauseView>,
    /// KVM's large mappings after the latest snapshot, or migration that failed, after which the guest went on here;
    /// left out where KVM mapped nothing large before it, and where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_remapped: Option<RemappedView>,
    /// Time for which no guest ran when it came here from another run, in milliseconds; left out if it did not come, or
    /// the source did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival_downtime_ms: Option<f64>,
    /// What KVM did for the guest there before that; left out as that is, and where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival_before_pause: Option<BeforePauseView>,
}

/// A VM that has moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigratedView {
    /// Name of the target, as in the request.
    pub to: String,
    /// Bytes sent over the connection.
    pub sent_bytes: ByteCount,
    /// Number of passes over what the guest had written since the one before, the last one during the pause.
    pub rounds: u32,
    /// Time for which no guest ran, in milliseconds.
    pub downtime_ms: f64,
    /// Duration of the whole migration, in seconds.
    pub seconds: f64,
    /// Guest RAM here in pages of 2 MiB and more when the migration began, in bytes.
    pub huge_bytes_before: ByteCount,
    /// Guest RAM here in pages of 2 MiB and more at the switch, in bytes.
    pub huge_bytes_at_switch: ByteCount,
    /// Guest RAM at the target in pages of 2 MiB and more once it has arrived, in bytes; left out if it did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_bytes_at_target: Option<ByteCount>,
    /// Guest RAM at the target in base pages once it has arrived, in bytes; left out if it did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_bytes_at_target: Option<ByteCount>,
    /// Time in which the dirty logs of all memslots were switched on, in milliseconds.
    #[serde(default)]
    pub logs_start_ms: f64,
    /// Number of dirty logs that were switched on without a change of KVM's mappings; these are split window by window.
    #[serde(default)]
    pub logs_began_set: u32,
    /// What KVM did for the guest before the pause; left out where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_pause: Option<BeforePauseView>,
    /// Pages that followed the guest; left out if none did, or the target did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyView>,
}

/// RAM that followed a guest which had moved before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PostCopyView {
    /// Time from the switch until all of it was there, in seconds; left out if the guest ended before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Pages that were missing at the switch, in bytes.
    pub missing_bytes: ByteCount,
    /// Those of them that have come, in bytes.
    pub filled_bytes: ByteCount,
    /// Number of windows that came because a thread of the guest waited for them.
    pub windows_by_touch: u64,
    /// Number of windows that came before the guest touched them.
    pub windows_in_background: u64,
    /// Number of windows that came onto a huge page, or were on one again afterwards.
    pub windows_huge: u64,
    /// Number of windows that were to be on a huge page, and are on base pages.
    pub windows_not_huge: u64,
    /// Waits of the guest for a window: 50 of 100 were at most this long, in microseconds.
    pub wait_p50_us: f64,
    /// The same for 99 of 100.
    pub wait_p99_us: f64,
    /// Longest wait, in microseconds.
    pub wait_max_us: f64,
    /// Number of connections that were lost and followed by another one.
    #[serde(default)]
    pub connections_lost: u32,
}

/// Progress of a restore: the guest runs, and its RAM comes from the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoringView {
    /// Guest RAM that has come from the snapshot, in bytes.
    pub filled_bytes: ByteCount,
    /// Guest RAM that the snapshot has, without its pages of zeroes, in bytes.
    pub stored_bytes: ByteCount,
}

/// Progress of a save, or of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavingView {
    /// Number of the pass over RAM, from 1 on: each one saves what the guest wrote during the one before.
    pub round: u32,
    /// Guest RAM that this pass has saved, in bytes.
    pub done_bytes: ByteCount,
    /// Guest RAM of this pass, in bytes.
    pub total_bytes: ByteCount,
}
