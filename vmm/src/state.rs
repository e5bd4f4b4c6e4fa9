//! The state of a machine in a snapshot, beside its RAM: vCPUs, interrupt controllers, clocks and devices.
//!
//! ```text
//!   running ── paused by the caller ─▶ [`crate::Machine::save_state`]
//!                                        │ devices finish the requests that they have begun     this writes RAM
//!                                        ▼ then they rest, and the gate is closed again
//!                                      MachineState ─▶ the caller's last round of RAM ─▶ resumed
//!                                        │
//!                                        └─ JSON, another process ─▶ [`crate::Machine::start_restored`]
//! ```
//!
//! The state may come from a hostile file: serde checks every length, KVM checks what it receives, and queues are
//! checked as if a driver had set them up. A damaged state is an error, or a guest that crashes; it never reaches
//! memory of the host. docs/snapshot-machine.md describes the format.

use std::time::Duration;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};
use wideleaf_policies::{Bytes, Gpa, GpaRange};

use crate::boot::BootError;
use crate::config::VmConfig;
use crate::devices::BusCounters;
use crate::devices::power::SavedPower;
use crate::devices::serial::SavedSerial;
use crate::devices::virtio::{DeviceKind, NotAtRest, RestoreDeviceError, SavedDevice};
use crate::kvm::KvmError;
use crate::kvm::saved::{Plain, SavedInterrupts, SavedTsc, SavedVcpu};
use crate::run_loop::SaveVcpusError;
use crate::sandbox::SandboxError;
use crate::x86::cpuid::CpuMissing;

/// Version of the state. A change of any struct in it, or of what a value means, is another version.
pub const STATE_VERSION: u32 = 1;

/// Time limit for the devices to come to rest. A disk moves at most a megabyte between two looks, and the guest stands
/// still meanwhile.
pub const REST_WAIT_MAX: Duration = Duration::from_secs(2);

/// A machine while it stood still.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// [`STATE_VERSION`] of the program that saved it.
    pub version: u32,
    /// Entry of the image by which the guest started: it decides about the guest's interrupt controllers and ports.
    pub entry: Entry,
    /// Ranges of guest RAM, ascending.
    pub ram: Vec<SavedRange>,
    /// Frequency of the guest's time stamp counter, in kHz; `None` where the host had no stable one.
    pub tsc_khz: Option<u32>,
    /// Time of the guest's KVM clock, in nanoseconds.
    pub clock_ns: u64,
    /// Interrupt controllers and timer; `None` for the direct entry.
    pub interrupts: Option<SavedInterrupts>,
    /// All vCPUs, by number.
    pub vcpus: Vec<VcpuRecord>,
    /// The serial port.
    pub serial: SavedSerial,
    /// The power button and its interrupt.
    pub power: SavedPower,
    /// Accesses that no device answered.
    pub bus: BusCounters,
    /// Virtio devices, in the order of their places.
    pub devices: Vec<SavedDevice>,
}

/// The entries of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Entry {
    /// In ring 3, without interrupt controllers.
    Direct,
    /// The PVH entry.
    Pvh,
    /// Linux's 64-bit entry.
    BzImage,
}

impl Entry {
    /// All entries of images.
    const ALL: [Entry; 3] = [Entry::Direct, Entry::Pvh, Entry::BzImage];

    /// Name of the entry, as in [`crate::Machine::entry_name`].
    pub fn name(self) -> &'static str {
        match self {
            Entry::Direct => "direct",
            Entry::Pvh => "pvh",
            Entry::BzImage => "bzimage",
        }
    }

    pub(crate) fn of_name(name: &str) -> Option<Entry> {
        Entry::ALL.into_iter().find(|entry| entry.name() == name)
    }
}

/// A range of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedRange {
    /// First guest-physical address.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The state of a vCPU.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuRecord {
    /// Answers of CPUID.
    pub cpuid: Vec<Plain<kvm_cpuid_entry2>>,
    /// Time stamp counter.
    pub tsc: SavedTsc,
    /// Registers, local APIC and the rest.
    pub cpu: SavedVcpu,
}

impl VcpuRecord {
    pub(crate) fn new(cpuid: &CpuId, (cpu, tsc): (SavedVcpu, SavedTsc)) -> VcpuRecord {
        VcpuRecord { cpuid: cpuid.as_slice().iter().copied().map(Plain).collect(), tsc, cpu }
    }

    pub(crate) fn cpuid(&self) -> Result<CpuId, RestoreError> {
        let entries: Vec<_> = self.cpuid.iter().map(|Plain(entry)| *entry).collect();
        CpuId::from_entries(&entries).map_err(|_| RestoreError::Damaged("the CPUID of a vCPU"))
    }
}

/// The reasons why a machine's state cannot be taken. The guest continues when the caller resumes it.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The vCPUs do not stand still, or KVM did not give their state.
    #[error("cannot save the VM: {0}")]
    Vcpus(#[from] SaveVcpusError),
    /// The devices are not paused, or another part of the VMM has paused them too.
    #[error(
        "cannot save the VM: its devices are not paused by this snapshot alone; pause the VM, and let its manager rest"
    )]
    Gate,
    /// A device does not come to rest.
    #[error("cannot save the VM: device {number} ({kind}): {source}")]
    Device {
        /// Number of the device, from zero.
        number: usize,
        /// Kind of the device.
        kind: &'static str,
        /// Reason of the failure.
        source: NotAtRest,
    },
    /// A restore would have to read guest RAM before that may be there.
    #[error(
        "cannot save the VM: vcpu {vcpu} uses 32-bit paging with PAE, for which KVM needs RAM before a restored VM has \
         it; run a 64-bit kernel"
    )]
    Pae {
        /// Number of the vCPU.
        vcpu: usize,
    },
    /// KVM did not give its state.
    #[error("cannot save the VM: {0}")]
    Kvm(#[from] KvmError),
}

/// The reasons why a machine does not continue from a state. Nothing runs then.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Another version of the program saved it.
    #[error(
        "cannot restore: its state has version {found}, and this program reads version {STATE_VERSION}; use the \
        program that saved it"
    )]
    Version {
        /// Version in the state.
        found: u32,
    },
    /// A reset would need the image, which is not part of the state.
    #[error(
        "cannot restore with --on-reset restart: the kernel that would boot again is not part of a snapshot; leave \
        the option out"
    )]
    OnReset,
    /// The configuration has another number of vCPUs or devices.
    #[error(
        "cannot restore: it was saved with {saved} {what}, and this VM has {here}; use the options of the saved VM"
    )]
    OtherNumber {
        /// Name of the counted thing.
        what: &'static str,
        /// Number in the snapshot.
        saved: usize,
        /// Number in the configuration.
        here: usize,
    },
    /// The configuration has another layout of RAM.
    #[error(
        "cannot restore: it was saved with {saved} of RAM, and this VM has {here}; use the --memory of the saved VM"
    )]
    OtherRam {
        /// Size of RAM in the snapshot.
        saved: Bytes,
        /// Size of RAM in the configuration.
        here: Bytes,
    },
    /// The host's CPU lacks what the guest uses.
    #[error("cannot restore: {0}; use a host with the CPU of the one that saved it")]
    Cpu(#[from] CpuMissing),
    /// The host's counter has another frequency.
    #[error(
        "cannot restore: the guest's time stamp counter has {saved_khz} kHz, the host's {here_khz} kHz, and this CPU \
         does not scale it; use a host with the CPU of the one that saved it"
    )]
    TscFrequency {
        /// Frequency in the snapshot, in kHz.
        saved_khz: u32,
        /// Frequency of this host, in kHz.
        here_khz: u32,
    },
    /// A part of the state is impossible.
    #[error("cannot restore: {0} is damaged in the snapshot; use another one")]
    Damaged(&'static str),
    /// A device does not continue.
    #[error("cannot restore device {number} ({kind}): {source}")]
    Device {
        /// Number of the device, from zero.
        number: usize,
        /// Kind of the device in the snapshot.
        kind: &'static str,
        /// Reason of the failure.
        source: RestoreDeviceError,
    },
    /// Guest RAM cannot be filled.
    #[error("{0}")]
    Ram(String),
    /// The VM cannot be built.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// KVM refused a part of the state.
    #[error("cannot restore: {0}")]
    Kvm(#[from] KvmError),
}

impl SaveError {
    /// Whether only time was missing: a request or a flush that was begun did not end.
    pub fn is_late(&self) -> bool {
        matches!(self, SaveError::Device { source: NotAtRest::Busy, .. })
    }
}

impl From<SandboxError> for RestoreError {
    fn from(error: SandboxError) -> RestoreError {
        RestoreError::Boot(error.into())
    }
}

/// Name of a kind of device in messages.
pub(crate) fn kind_name(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Net => "network card",
        DeviceKind::Block => "disk",
        DeviceKind::Entropy => "random bytes",
        DeviceKind::Balloon => "balloon",
        DeviceKind::Vsock => "sockets",
    }
}

impl MachineState {
    /// Whether the guest started directly in ring 3, without interrupt controllers.
    pub fn is_direct(&self) -> bool {
        self.entry == Entry::Direct
    }

    /// Layout of guest RAM; `None` where a range has no end.
    pub fn ram_layout(&self) -> Option<Vec<GpaRange>> {
        let range = |range: &SavedRange| GpaRange::new(Gpa::new(range.start), Bytes::new(range.bytes));
        self.ram.iter().map(range).collect()
    }

    /// Checks version, numbers and RAM against the configuration.
    pub(crate) fn check_fits(&self, config: &VmConfig, devices: usize) -> Result<(), RestoreError> {
        if self.version != STATE_VERSION {
            return Err(RestoreError::Version { found: self.version });
        }
        let numbers = [("vCPUs", self.vcpus.len(), config.vcpus() as usize), ("devices", self.devices.len(), devices)];
        if let Some((what, saved, here)) = numbers.into_iter().find(|(_, saved, here)| saved != here) {
            return Err(RestoreError::OtherNumber { what, saved, here });
        }
        if self.ram_layout().as_ref() != Some(&config.ram_layout()) {
            let saved = Bytes::new(self.ram.iter().fold(0, |sum, range| sum.saturating_add(range.bytes)));
            return Err(RestoreError::OtherRam { saved, here: config.memory() });
        }
        if self.vcpus.iter().any(|vcpu| vcpu.cpu.needs_ram()) {
            return Err(RestoreError::Damaged("the paging mode of a vCPU"));
        }
        let has_interrupts = self.interrupts.is_some() && self.vcpus.iter().all(|vcpu| vcpu.cpu.has_lapic());
        let has_none = self.interrupts.is_none() && !self.vcpus.iter().any(|vcpu| vcpu.cpu.has_lapic());
        if if self.is_direct() { has_none } else { has_interrupts } {
            Ok(())
        } else {
            Err(RestoreError::Damaged("the state of the interrupt controllers"))
        }
    }
}
