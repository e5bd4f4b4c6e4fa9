//! The control socket of one VM, `wideleaf run --control-socket SOCKET`: lines like the daemon's
//! ([`crate::protocol`]), with their own requests and version. `client` sends them; the rest of this file is data.
//!
//! ```text
//!   wideleaf vm SOCKET pause | resume | stop | status |     ── VmRequest ───────▶ SOCKET ──▶ wideleaf run
//!                      statistics | windows | explain |     ◀── Reply<VmAnswer> ──
//!                      set-policy | balloon | snapshot | migrate |
//!                      recover
//! ```

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

use serde::{Deserialize, Serialize};

use crate::protocol::Envelope;
use crate::units::ByteCount;
use crate::view::{Explanation, VmView, WindowMap};

mod client;
mod saves;

pub use client::{VM_FILES_TIMEOUT, VmClientError, ask, ask_with_files};
pub use saves::{
    BeforePauseView, MigratedView, PastSavesView, PostCopyView, RemappedView, RestoringView, SavedView, SavingView,
};

/// Version of the protocol on the socket of a VM. A run refuses any other, and names its own in the text.
pub const VM_VERSION: u32 = 1;

impl From<VmRequest> for Envelope<VmRequest> {
    fn from(request: VmRequest) -> Envelope<VmRequest> {
        Envelope { version: VM_VERSION, request }
    }
}

/// Request of a client to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum VmRequest {
    /// Asks for the program and its capabilities. Answer: [`VmAnswer::Hello`].
    Hello,
    /// Takes all vCPUs out of the guest. One pause is as good as many. Answer: [`VmAnswer::Status`], when all of
    /// them have left.
    Pause,
    /// Lets the vCPUs go on, after any number of pauses. Answer: [`VmAnswer::Status`].
    Resume,
    /// Ends the VM. Answer: [`VmAnswer::Status`]. The answer to a kill comes when the VM has ended, or with
    /// [`VmState::Ending`] some seconds later.
    Stop {
        /// Way of ending it.
        how: StopHow,
        /// Whether to refuse a kill of a VM that is not paused: it may have worked on since it was saved.
        #[serde(default, skip_serializing_if = "is_false")]
        if_paused: bool,
    },
    /// Resets the machine, which boots again. Answer: [`VmAnswer::Status`], when that has begun. Only where
    /// [`VmHello::capabilities`] has `reset`.
    Reset,
    /// Asks whether it runs. Answer: [`VmAnswer::Status`].
    Status,
    /// Asks what backs its memory, what its manager has done and what its devices count. Answer:
    /// [`VmAnswer::Statistics`].
    Statistics,
    /// Asks for what backs and maps every window, and its state. Answer: [`VmAnswer::Windows`]. Only where
    /// [`VmHello::capabilities`] has `windows`.
    Windows,
    /// Asks why windows are not huge. Answer: [`VmAnswer::Explanation`]. Only where [`VmHello::capabilities`] has
    /// `explain`.
    Explain,
    /// Sets the policy, in the form of `--policy`, or `off`. Answer: [`VmAnswer::Status`], when it has taken over.
    SetPolicy {
        /// Policy to set.
        policy: String,
    },
    /// Sets the size of the balloon. Answer: [`VmAnswer::Device`], once the guest has the new size; it then does
    /// what it can. Only where [`VmHello::capabilities`] has `balloon`.
    Balloon {
        /// Guest RAM to take, in bytes, rounded down to whole pages of 4 KiB.
        target_bytes: ByteCount,
    },
    /// Saves the VM into the open files that come with the request: `memory`, `windows`, `machine.json`, and the
    /// reading end of a pipe that the client closes to cancel. Then come the files of the base, if there is one. The
    /// guest goes on meanwhile. Answer: [`VmAnswer::Saved`], when all is written; the client makes the files durable
    /// and gives them their names. Only where [`VmHello::capabilities`] has `snapshot`.
    Snapshot {
        /// Longest pause of the guest, in milliseconds.
        pause_ms_max: u64,
        /// Whether the VM stays paused at the instant that is saved, for a client that then stops or resumes it. If the
        /// client closes the pipe before, as its end does, the VM goes on.
        #[serde(default, skip_serializing_if = "is_false")]
        stays_paused: bool,
        /// Snapshot of which only the changes are saved.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<BaseView>,
    },
    /// Moves the VM to a `wideleaf run --incoming` at the other end of the connection that comes with the request: its
    /// reading end, its writing end, which must not block, and the reading end of a pipe that the client closes to
    /// cancel. Answer: [`VmAnswer::Migrated`], when the guest runs there; this VM then ends. Only where
    /// [`VmHello::capabilities`] has `migrate`.
    Migrate {
        /// Name of the target in messages and in the report.
        to: String,
        /// Longest time without a running guest, in milliseconds.
        pause_ms_max: u64,
        /// Most bytes of RAM that are sent per second while the guest runs; as fast as possible if it is left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second_max: Option<NonZeroU64>,
        /// When the guest moves before all of its RAM has, if that is needed; never if it is left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        post_copy: Option<PostCopyFrom>,
    },
    /// Continues a migration that lost its connection while pages followed the guest, over another connection that
    /// comes with the request: its reading end, its writing end, which must not block, and the reading end of a pipe
    /// that the client closes to cancel. Asked of both sides, the target first. Answer, when all pages have come:
    /// [`VmAnswer::Recovered`] of the target, [`VmAnswer::Migrated`] of the source, which then ends. Only where
    /// [`VmHello::capabilities`] has `recover`.
    Recover {
        /// Name of the other side in messages and in the report.
        with: String,
        /// Whether it is asked of the target.
        is_target: bool,
    },
}

/// When a guest moves before all of its RAM has. It never does where what is left fits into the pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PostCopyFrom {
    /// When more passes over RAM do not help.
    WhenNeeded,
    /// After this number of passes.
    AfterRounds(NonZeroU32),
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Way to end a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopHow {
    /// The power button asks the guest to switch itself off. Only where [`VmHello::capabilities`] has `stop.ask`.
    Ask,
    /// At once. Data that the guest has not written to its disks is lost.
    Kill,
}

/// Content of a run's reply to a request that succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmAnswer {
    /// Reply to [`VmRequest::Hello`].
    Hello(VmHello),
    /// Reply to a change of the VM, with its state afterwards, and to [`VmRequest::Status`].
    Status(VmStatus),
    /// Reply to [`VmRequest::Statistics`].
    Statistics(Box<VmStatistics>),
    /// Reply to [`VmRequest::Windows`].
    Windows(Box<WindowMap>),
    /// Reply to [`VmRequest::Explain`].
    Explanation(Box<Explanation>),
    /// Reply to a request to one device, with its state afterwards.
    Device(DeviceView),
    /// Reply to [`VmRequest::Snapshot`].
    Saved(SavedView),
    /// Reply to [`VmRequest::Migrate`], and to [`VmRequest::Recover`] of the source.
    Migrated(MigratedView),
    /// Reply to [`VmRequest::Recover`] of the target.
    Recovered(PostCopyView),
}

/// The base of a snapshot. Its files are `machine.json`, then `windows` and `memory` of each folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseView {
    /// Path of its folder, relative to the folder of the new snapshot.
    pub path: String,
    /// Names of its folder and of those of its own bases, for messages.
    pub layers: Vec<String>,
}

/// Program that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmHello {
    /// Version of the protocol, [`VM_VERSION`].
    pub version: u32,
    /// Release of wideleaf.
    pub wideleaf: String,
    /// The process that runs the VM.
    pub pid: u32,
    /// Requests that are possible now, by name. A request with a choice has one name for each, as `stop.kill`.
    pub capabilities: Vec<String>,
}

/// Whether the VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Its vCPUs may be in the guest. The manager takes them out for a moment now and then, which `vcpus` shows.
    Running,
    /// A client has paused it.
    Paused,
    /// It is about to end, and some vCPU's thread has not left it yet: [`VmStatus::waits_for`] names the thread.
    Ending,
    /// It is over: no vCPU will enter the guest again.
    Ended,
}

/// State of a vCPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VcpuView {
    /// In the guest, or about to be.
    Running,
    /// Out of the guest until a client resumes it.
    Paused,
    /// It will not enter the guest again.
    Finished,
}

/// Progress of the guest's driver for a device (Virtual I/O Device 1.2, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverView {
    /// The guest has not looked for devices, or has left this one.
    None,
    /// The guest has found it, and no driver took it.
    Found,
    /// A driver is about to take it.
    Probing,
    /// A driver works with it.
    Ready,
    /// The driver gave up, or broke it: it needs a reset.
    Failed,
}

/// One virtio device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceView {
    /// Kind of device: `disk FILE`, `rng`.
    pub device: String,
    /// State of the guest's driver for it.
    pub driver: DriverView,
    /// Counters by the names of the run's report; left out of a status. A name that ends in `_bytes`, `_s` or `_ms`
    /// gives its unit. Others are counts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

/// State of the VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStatus {
    /// Whether it runs.
    pub state: VmState,
    /// Workload that it was started with: a built-in kernel or an image.
    pub workload: String,
    /// The process that runs it.
    pub pid: u32,
    /// Time since its start in seconds, pauses included.
    pub uptime_s: f64,
    /// State of each vCPU, by number.
    pub vcpus: Vec<VcpuView>,
    /// Number of times that its guest reset it and booted again.
    #[serde(default)]
    pub resets: u64,
    /// Policy as given with `--policy` or set since; `off` after it was set to that.
    pub policy: String,
    /// Latest phase that its guest has begun and not ended, by its own words; left out otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<PhaseView>,
    /// Its virtio devices, in the order in which the guest finds them, without counters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub virtio: Vec<DeviceView>,
    /// Progress of the snapshot that is being saved, of the migration, or of pages that follow a guest which came here;
    /// left out otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saving: Option<SavingView>,
    /// Progress of the restore by which it continues a snapshot; left out once all of its RAM has come, and otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restoring: Option<RestoringView>,
    /// Snapshots and migrations that are over; left out before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub past_saves: Option<Box<PastSavesView>>,
    /// Why it is paused after a migration: whether it runs at the target is unknown. Left out otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
    /// Why pages that follow a guest which came here do not come any more, and what to do; left out otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_off: Option<String>,
    /// How it ended, or why it is about to end; left out until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<String>,
    /// Cause of a delay of its end; left out otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// Phase of a guest's work that is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseView {
    /// Name of the phase.
    pub name: String,
    /// Time since it began in this process in seconds, pauses included.
    pub since_s: f64,
    /// Units of work done, as of the latest mark of progress.
    pub done: u64,
}

/// Statistics of the VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStatistics {
    /// Its memory by what backs and maps it, and the work of its manager: the view that wideleafd would receive.
    pub vm: VmView,
    /// Counters of the parts that every VM has, by device and name.
    pub devices: BTreeMap<String, BTreeMap<String, u64>>,
    /// Its virtio devices, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub virtio: Vec<DeviceView>,
}
