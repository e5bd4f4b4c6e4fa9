//! What is said over the control socket of one VM, `wideleaf run --control-socket PATH`: lines as the daemon's ([`crate::protocol`]), with
//! requests and a version of their own.
//!
//! ```text
//!   wideleaf vm PATH pause | resume | stop | status | statistics | set-policy | balloon ── VmRequest ──▶ PATH ──▶ wideleaf run
//!                                                                                      ◀── Reply<VmAnswer> ──
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::protocol::Envelope;
use crate::view::{ByteCount, VmView};

pub use crate::vm_client::{VmClientError, ask};

/// Of what is written on the socket of a VM. A run refuses any other, with its own in the text.
pub const VM_VERSION: u32 = 1;

impl From<VmRequest> for Envelope<VmRequest> {
    fn from(request: VmRequest) -> Envelope<VmRequest> {
        Envelope { version: VM_VERSION, request }
    }
}

/// What a client wants of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum VmRequest {
    /// Who answers, and what it can do. Answer: [`VmAnswer::Hello`].
    Hello,
    /// Takes all vCPUs out of the guest. One pause is as good as many. Answer: [`VmAnswer::Status`], when none is in the guest any more.
    Pause,
    /// Lets them go on, however often somebody paused. Answer: [`VmAnswer::Status`].
    Resume,
    /// Ends the VM. Answer: [`VmAnswer::Status`]; where it is killed, when it has ended, or with [`VmState::Ending`]
    /// some seconds later.
    Stop {
        /// In which way.
        how: StopHow,
    },
    /// Resets the machine, which boots again. Answer: [`VmAnswer::Status`], when that has begun. Only where [`VmHello::capabilities`] has `reset`.
    Reset,
    /// Whether it runs. Answer: [`VmAnswer::Status`].
    Status,
    /// What backs its memory, what its manager has done, what its devices count. Answer: [`VmAnswer::Statistics`].
    Statistics,
    /// Sets the policy, in the form of `--policy`, or `off`. Answer: [`VmAnswer::Status`], when it has taken over.
    SetPolicy {
        /// Which.
        policy: String,
    },
    /// Has the balloon take so much of the guest's RAM. Answer: [`VmAnswer::Device`], when the guest is told; it does what it can. Only
    /// where [`VmHello::capabilities`] has `balloon`.
    Balloon {
        /// In whole pages of 4 KiB, rounded down.
        target_bytes: ByteCount,
    },
}

/// How a VM is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopHow {
    /// The guest is asked to switch itself off by its power button; only where [`VmHello::capabilities`] has `stop.ask`.
    Ask,
    /// At once: what the guest has not written to its disks is lost.
    Kill,
}

/// What a run replies where all is well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmAnswer {
    /// To [`VmRequest::Hello`].
    Hello(VmHello),
    /// To what changes the VM, as it is afterwards, and to [`VmRequest::Status`].
    Status(VmStatus),
    /// To [`VmRequest::Statistics`].
    Statistics(Box<VmStatistics>),
    /// To what is said to one device, as it is afterwards.
    Device(DeviceView),
}

/// Who answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmHello {
    /// [`VM_VERSION`].
    pub version: u32,
    /// The release of wideleaf.
    pub wideleaf: String,
    /// The process that runs the VM.
    pub pid: u32,
    /// What may be asked for now, by the names of the requests; a request that takes a choice has one for each, as `stop.kill`.
    pub capabilities: Vec<String>,
}

/// Whether the VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Its vCPUs may be in the guest. The manager takes them out for a moment now and then: `vcpus` tells.
    Running,
    /// Somebody has paused it.
    Paused,
    /// It is to end, and some vCPU's thread has not left it yet: [`VmStatus::waits_for`] says which.
    Ending,
    /// It is over: no vCPU will enter the guest again.
    Ended,
}

/// Where the thread of a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VcpuView {
    /// In the guest, or about to be.
    Running,
    /// Out of the guest until somebody resumes it.
    Paused,
    /// It will not enter the guest again.
    Finished,
}

/// How far the guest has come with a device (Virtual I/O Device 1.2, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverView {
    /// It has not looked for devices, or has left this one.
    None,
    /// It has found it, and no driver took it.
    Found,
    /// A driver is about to take it.
    Probing,
    /// A driver works with it.
    Ready,
    /// The driver gave up, or broke it: it needs a reset.
    Failed,
}

/// A virtio device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceView {
    /// What it is: `disk FILE`, `rng`.
    pub device: String,
    /// Whether the guest has a driver for it.
    pub driver: DriverView,
    /// What it counted, by the names of the run's report; left out of a status. A name that ends in `_bytes`, `_s` or `_ms` says its unit,
    /// others are counts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

/// How the VM is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStatus {
    /// Whether it runs.
    pub state: VmState,
    /// What it was started with: a built-in kernel or an image.
    pub workload: String,
    /// The process that runs it.
    pub pid: u32,
    /// Since it was started, pauses included.
    pub uptime_s: f64,
    /// By their numbers.
    pub vcpus: Vec<VcpuView>,
    /// How often its guest reset it and booted again.
    #[serde(default)]
    pub resets: u64,
    /// As given with `--policy` or set since; `off` where that was set.
    pub policy: String,
    /// Its virtio devices, in the order in which the guest finds them, without counters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub virtio: Vec<DeviceView>,
    /// How it ended, or why it is to end; left out until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<String>,
    /// What its end waits for; left out where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// What is counted of the VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStatistics {
    /// Its memory by what backs and maps it, and what its manager has done: what wideleafd would be told of it.
    pub vm: VmView,
    /// Counters of what every VM has, by device and name.
    pub devices: BTreeMap<String, BTreeMap<String, u64>>,
    /// Its virtio devices, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub virtio: Vec<DeviceView>,
}
