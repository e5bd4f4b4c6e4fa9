//! How a guest that was not booted came here: from a snapshot, or from another run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wideleaf_control::vm::{BeforePauseView, PostCopyView};

use crate::spec::{RestorePages, RestoreReads};

/// RAM of a restored guest, in the report.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RestoredReport {
    /// Folder of the snapshot.
    pub folder: PathBuf,
    /// Guest RAM in the snapshot, without pages of zeroes, in bytes.
    pub stored_bytes: u64,
    /// Guest RAM that was filled until the end of the run, in bytes.
    pub filled_bytes: u64,
    /// Number of windows that were filled because the guest waited for them.
    pub windows_by_touch: u64,
    /// Number of windows that were filled before the guest touched them.
    pub windows_in_background: u64,
    /// Number of windows that got a huge page as they were filled, or by a collapse soon after.
    pub windows_huge: u64,
    /// Number of windows that got base pages because no huge page was to be had.
    pub windows_not_huge: u64,
    /// Waits of the guest for a window, from when a thread of the restore has read of its touch: 50 of 100 were at most
    /// this long, in microseconds.
    pub wait_p50_us: f64,
    /// The same for 99 of 100.
    pub wait_p99_us: f64,
    /// Longest wait, in microseconds.
    pub wait_max_us: f64,
    /// Number of windows in the order of first touches that `--prefetch record` has written.
    #[serde(default)]
    pub touches_recorded: u64,
    /// Time before the guest could run in which its RAM was prepared, in milliseconds.
    pub prepared_ms: f64,
    /// Time from the start of the process until a vCPU entered the guest, in milliseconds; its first instruction may
    /// wait for its window then, which the waits count. Left out if none entered it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_entry_ms: Option<f64>,
    /// Way in which its RAM was filled: `auto`, `4k` or `mapped`.
    #[serde(default)]
    pub pages: RestorePages,
    /// Way in which the snapshot was read: `cached` or `direct`.
    #[serde(default)]
    pub reads: RestoreReads,
    /// Number of pages of 4 KiB that were copied alone because the guest waited for them.
    #[serde(default)]
    pub pages_by_touch: u64,
    /// Progress marks since the guest continued: seconds since this process began, by the host's clock, and units of
    /// work done.
    #[serde(default)]
    pub progress: Vec<(f64, u64)>,
    /// Threads of the restore that panicked or did not come back from a read, with what they were doing; others have
    /// done their work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost_threads: Vec<String>,
    /// Time until all of it was filled, in seconds; left out if the guest ended before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filled_s: Option<f64>,
}

/// Figures of the source, once the target's guest runs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Left {
    /// Time for which no guest ran, in milliseconds.
    pub downtime_ms: f64,
    /// Number of passes over RAM, with the one during the pause.
    pub rounds: u32,
    /// Source's RAM in pages of 2 MiB and more when the migration began, in bytes.
    pub huge_bytes_before: u64,
    /// The same at the switch.
    pub huge_bytes_at_switch: u64,
    /// Time in which the source switched its dirty logs on, in milliseconds.
    #[serde(default)]
    pub logs_start_ms: f64,
    /// What KVM did for the guest at the source before the pause; left out where KVM does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_pause: Option<BeforePauseView>,
}

/// Arrival of a VM, in the report.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ArrivedReport {
    /// Address of the source.
    pub from: String,
    /// Bytes that came until the guest ran here. What came after is in `post_copy`, as for the figures below.
    pub received_bytes: u64,
    /// Number of pages of 4 KiB with content that came, those that came again too.
    pub pages: u64,
    /// Number of windows of which most came, and which were marked for a huge page.
    pub windows_marked_huge: u64,
    /// Time from the connection until the guest ran here, in seconds.
    pub seconds: f64,
    /// Guest RAM in pages of 2 MiB and more at the switch, in bytes.
    pub huge_bytes: u64,
    /// Guest RAM in base pages at the switch, in bytes.
    pub base_bytes: u64,
    /// Figures of the source; left out if they did not come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Left>,
    /// Pages that came after the switch; left out if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyView>,
}
