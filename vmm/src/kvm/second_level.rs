//! The manager's door to KVM's side of one VM, made of memslots, statistics and the run loop's pause.

use std::io;
use std::sync::{Arc, OnceLock};

use wideleaf_memory::Paging;
use wideleaf_memory::second_level::{SecondLevel, SecondLevelError, Slot, SlotId};
use wideleaf_policies::MappingStats;

use super::stats::StatsError;
use super::{KvmError, KvmStats, Vm};
use crate::dma::DeviceMemory;
use crate::run_loop::{PAUSE_WAIT_MAX, RunControl};

/// KVM's side of one VM. It may outlive the [`crate::Machine`]: a finished VM still has its statistics.
#[derive(Debug)]
pub struct KvmSecondLevel {
    paging: Paging,
    vm: Arc<Vm>,
    /// Opened when first asked for: nothing on the way to the guest's first byte needs it.
    stats: OnceLock<Result<KvmStats, StatsError>>,
    control: Arc<RunControl>,
    /// What devices do to the same RAM.
    devices: DeviceMemory,
}

impl KvmSecondLevel {
    /// The door to `vm`, whose vCPUs `control` runs, and whose devices reach its RAM through `devices`.
    pub fn new(paging: Paging, vm: Arc<Vm>, control: Arc<RunControl>, devices: DeviceMemory) -> KvmSecondLevel {
        KvmSecondLevel { paging, vm, stats: OnceLock::new(), control, devices }
    }

    /// The VM's statistics, with those beyond the count of mappings.
    ///
    /// # Errors
    /// [`StatsError`], the same one each time: what KVM lacks it goes on to lack.
    pub fn stats(&self) -> Result<&KvmStats, &StatsError> {
        self.stats.get_or_init(|| self.vm.open_stats()).as_ref()
    }

    fn slot(&self, id: SlotId) -> Result<Slot, SecondLevelError> {
        self.vm.slots().into_iter().find(|slot| slot.id == id).ok_or(SecondLevelError::NoSuchSlot(id))
    }
}

impl SecondLevel for KvmSecondLevel {
    fn paging(&self) -> Paging {
        self.paging
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.stats().map_err(from_stats)?.mapping_stats().map_err(|error| from_stats(&error))
    }

    fn slots(&self) -> Vec<Slot> {
        self.vm.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        self.vm.set_dirty_log(slot, is_on).map_err(from_kvm)?.ok_or(SecondLevelError::NoSuchSlot(slot))?;
        if is_on {
            // A log begins empty; that of devices is never off.
            self.devices.memory().take_device_log(self.slot(slot)?.range);
        }
        Ok(())
    }

    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let slot = self.slot(slot)?;
        if !slot.is_dirty_logged {
            return Err(SecondLevelError::WrongState("dirty logging of this memslot is off: switch it on first"));
        }
        let mut log = self.vm.take_dirty_log(slot).map_err(from_kvm)?;
        let of_devices = self.devices.memory().take_device_log(slot.range);
        log.iter_mut().zip(of_devices).for_each(|(word, of_devices)| *word |= of_devices);
        Ok(log)
    }

    /// vCPUs first: one that waits for a device holds the gate open until it has its answer.
    fn pause(&self) -> Result<(), SecondLevelError> {
        self.control.pause()?;
        if self.devices.gate().close(PAUSE_WAIT_MAX) {
            return Ok(());
        }
        self.control.resume()?;
        Err(SecondLevelError::DeviceBusy { waited_ms: PAUSE_WAIT_MAX.as_millis() as u64 })
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        self.control.resume()?;
        self.devices.gate().open();
        Ok(())
    }

    fn page_table_roots(&self) -> Result<Vec<u64>, SecondLevelError> {
        self.control.page_table_roots()
    }
}

fn from_kvm(error: KvmError) -> SecondLevelError {
    match error {
        KvmError::Ioctl { what, source } => SecondLevelError::Ioctl { what, source },
        other => SecondLevelError::Ioctl { what: "KVM", source: io::Error::other(other) },
    }
}

fn from_stats(error: &StatsError) -> SecondLevelError {
    match error {
        StatsError::NoSuchStatistic(name) => SecondLevelError::NoSuchStatistic(name),
        StatsError::Kernel { what, source } => {
            // An `io::Error` cannot be cloned; its number says all there is.
            let source = source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
            SecondLevelError::Ioctl { what, source }
        }
        malformed @ StatsError::Malformed { .. } => SecondLevelError::Ioctl {
            what: "parsing KVM's statistics",
            source: io::Error::new(io::ErrorKind::InvalidData, malformed.to_string()),
        },
    }
}
