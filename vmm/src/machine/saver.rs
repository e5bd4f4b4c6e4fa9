//! Takes the state of a running machine, for a snapshot: everything but RAM. The caller has paused the VM; a save that
//! fails changes nothing, and the guest continues when the VM is resumed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::CpuId;

use crate::devices::bus::FlushError;
use crate::devices::serial::SerialPort;
use crate::devices::virtio::transport::DriverSeen;
use crate::devices::{Bus, PowerButton};
use crate::dma::DeviceMemory;
use crate::kvm::Vm;
use crate::kvm::saved::SavedInterrupts;
use crate::run_loop::{RunControl, SaveVcpusError};
use crate::state::{Entry, MachineState, REST_WAIT_MAX, STATE_VERSION, SaveError, SavedRange, VcpuRecord, kind_name};

/// The means to save a machine. It keeps the VM and its RAM alive.
pub struct MachineSaver {
    pub(super) vm: Arc<Vm>,
    pub(super) memory: DeviceMemory,
    pub(super) control: Arc<RunControl>,
    pub(super) bus: Arc<Bus>,
    pub(super) serial: SerialPort,
    pub(super) power_button: PowerButton,
    pub(super) drivers: Vec<DriverSeen>,
    pub(super) cpuids: Vec<CpuId>,
    pub(super) entry_name: &'static str,
    pub(super) tsc_hz: Option<u64>,
}

impl MachineSaver {
    /// Takes the state of everything but RAM, within about that time and [`REST_WAIT_MAX`]. The caller has paused the
    /// VM ([`wideleaf_memory::SecondLevel::pause`]) and the manager rests; the VM stays paused.
    ///
    /// Devices finish the requests that they have begun, which **writes guest RAM**: so the caller reads the last
    /// changes of RAM, and the log of the devices' writes, after this call and before it resumes the VM. Disks make all
    /// their writes durable; [`MachineSaver::flush_disks`] before the pause makes that short. The sockets' connections
    /// of this VM continue; those of the restored one end.
    ///
    /// # Errors
    /// [`SaveError`]: nothing has changed, and the guest continues when the VM is resumed. Called on a vCPU's own
    /// thread, it fails.
    pub fn save_state(&self, within: Duration) -> Result<MachineState, SaveError> {
        self.control.may_be_saved()?;
        let gate = self.memory.gate();
        if !gate.drain() {
            return Err(SaveError::Gate);
        }
        let until = Instant::now() + within.min(REST_WAIT_MAX);
        let devices = self.bus.save_devices(until);
        // Every device rests, or the save fails: then one may be inside until the VM is resumed.
        let is_closed = gate.drained(until.saturating_duration_since(Instant::now()));
        let (devices, _resting) = devices.map_err(|(number, source)| SaveError::Device {
            number,
            kind: kind_name(self.drivers[number].kind()),
            source,
        })?;
        if !is_closed {
            return Err(SaveError::Gate);
        }
        let vcpus = self.control.save_vcpus()?;
        if let Some(vcpu) = vcpus.iter().position(|(cpu, _)| cpu.needs_ram()) {
            return Err(SaveError::Pae { vcpu });
        }
        let is_direct = Entry::of_name(self.entry_name) == Some(Entry::Direct);
        Ok(MachineState {
            version: STATE_VERSION,
            entry: Entry::of_name(self.entry_name).expect("an entry of an image"),
            ram: self.ram_ranges(),
            tsc_khz: self.tsc_hz.and_then(|hz| u32::try_from(hz / 1000).ok()),
            clock_ns: self.vm.clock_ns()?,
            interrupts: (!is_direct).then(|| SavedInterrupts::take(&self.vm)).transpose()?,
            vcpus: self.cpuids.iter().zip(vcpus).map(|(cpuid, vcpu)| VcpuRecord::new(cpuid, vcpu)).collect(),
            serial: self.serial.saved(),
            power: self.power_button.saved(),
            bus: self.bus.counters(),
            devices,
        })
    }

    /// Whether the guest has reset its machine and stands still until the manager lets it boot again: it cannot be
    /// saved before.
    pub fn waits_for_boot(&self) -> bool {
        matches!(self.control.may_be_saved(), Err(SaveVcpusError::Resetting))
    }

    /// Makes the guest's writes to its disks durable while it runs, so that [`MachineSaver::save_state`] has little
    /// left. Returns whether it has disks. Gives up after that time, and when `keep_on` does not say so any more.
    ///
    /// # Errors
    /// [`FlushError`], with the kernel's error (`fdatasync(2)`) of the first disk that has one.
    pub fn flush_disks(&self, within: Duration, keep_on: &dyn Fn() -> bool) -> Result<bool, FlushError> {
        self.bus.flush_disks(within, keep_on)
    }

    fn ram_ranges(&self) -> Vec<SavedRange> {
        let range = |range: &wideleaf_memory::RamRange| SavedRange {
            start: range.gpa.start().get(),
            bytes: range.gpa.bytes().get(),
        };
        self.vm.ram().ranges().iter().map(range).collect()
    }
}

impl fmt::Debug for MachineSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineSaver").field("entry", &self.entry_name).finish_non_exhaustive()
    }
}
