//! The manager's access to KVM's side of one VM, built from memslots, statistics and the run loop's pause. The devices'
//! writes are part of each dirty log, and a pause stops devices as well as vCPUs: neither writes RAM before it is
//! resumed.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use wideleaf_memory::Paging;
use wideleaf_memory::actuators::giant::SwapLimits;
use wideleaf_memory::second_level::{FaultCounters, PagingMode, SecondLevel, SecondLevelError, Slot, SlotId};
use wideleaf_policies::MappingStats;

use super::stats::{StatsError, VcpuCounts};
use super::{KvmError, KvmStats, Vcpu, VcpuStats, Vm};
use crate::dma::{DeviceMemory, Gate};
use crate::run_loop::RunControl;

/// Time limit for a device's transfer while the vCPUs run: one piece of a slow disk, a megabyte at 10 MB/s.
const DEVICE_WAIT_RUNNING: Duration = Duration::from_millis(100);

/// Time limit for a vCPU to leave the guest while devices wait at the gate. A slower vCPU may itself wait for such
/// a device: a driver that resets it waits until its thread has ended.
const VCPU_WAIT_AT_GATE: Duration = Duration::from_millis(50);

/// Time limit for a device's transfer while the vCPUs are paused: the pause that the move of a giant
/// promises the guest.
const DEVICE_WAIT_STOPPED: Duration = SwapLimits::DEFAULT.pause_max;

/// KVM's side of one VM. It may outlive the [`crate::Machine`]: a finished VM still has its statistics.
#[derive(Debug)]
pub struct KvmSecondLevel {
    paging: Paging,
    vm: Arc<Vm>,
    /// Statistics file, opened at the first use: nothing before the guest's first byte needs it.
    stats: OnceLock<Result<KvmStats, StatsError>>,
    control: Arc<RunControl>,
    /// Access of the devices to the same RAM.
    devices: DeviceMemory,
    /// Statistics of the vCPUs that are asked for their faults, in order.
    vcpus: Vec<Result<VcpuStats, StatsError>>,
}

/// Maximum number of vCPUs that are asked for their faults. They all pay the same for one, and each costs the manager
/// some microseconds at a tick.
const VCPUS_WATCHED_MAX: usize = 16;

impl KvmSecondLevel {
    /// Access to `vm`: `control` runs its vCPUs, and its devices reach its RAM through `devices`.
    pub fn new(paging: Paging, vm: Arc<Vm>, control: Arc<RunControl>, devices: DeviceMemory) -> KvmSecondLevel {
        KvmSecondLevel { paging, vm, stats: OnceLock::new(), control, devices, vcpus: Vec::new() }
    }

    /// The same access, which also counts the faults of these vCPUs: all of the VM in their order, before they run.
    #[must_use]
    pub fn watching(mut self, vcpus: &[Vcpu]) -> KvmSecondLevel {
        self.vcpus = vcpus.iter().take(VCPUS_WATCHED_MAX).map(Vcpu::open_stats).collect();
        self
    }

    /// The VM's statistics, including those beyond the counts of mappings.
    ///
    /// # Errors
    /// [`StatsError`], the same one each time: a statistic that KVM lacks does not appear later.
    pub fn stats(&self) -> Result<&KvmStats, &StatsError> {
        self.stats.get_or_init(|| self.vm.open_stats()).as_ref()
    }

    fn slot(&self, id: SlotId) -> Result<Slot, SecondLevelError> {
        self.vm.slots().into_iter().find(|slot| slot.id == id).ok_or(SecondLevelError::NoSuchSlot(id))
    }

    /// Pauses the VM ([`SecondLevel::pause`]), and returns when the first vCPU was asked to leave the guest: the
    /// guest's pause begins there.
    ///
    /// # Errors
    /// As for [`SecondLevel::pause`].
    pub fn pause_since(&self) -> Result<Instant, SecondLevelError> {
        pause_all(&self.control, self.devices.gate())
    }

    /// Ends the devices of a VM that the caller has paused, and that never goes on here: none does anything more, and
    /// their threads can end. The vCPUs stay paused.
    pub fn end_devices(&self) {
        self.devices.gate().end();
    }

    /// A slot's log with the bits of the devices, which are cleared.
    fn with_devices(&self, slot: Slot, mut log: Vec<u64>) -> Vec<u64> {
        let of_devices = self.devices.memory().take_device_log(slot.range);
        log.iter_mut().zip(of_devices).for_each(|(word, of_devices)| *word |= of_devices);
        log
    }
}

impl SecondLevel for KvmSecondLevel {
    fn paging(&self) -> Paging {
        self.paging
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.stats().map_err(from_stats)?.mapping_stats().map_err(|error| from_stats(&error))
    }

    fn fault_counters(&self) -> Result<FaultCounters, SecondLevelError> {
        if self.vcpus.is_empty() {
            return Err(SecondLevelError::NoSuchStatistic("pf_fixed"));
        }
        let mut all = FaultCounters::default();
        for (index, stats) in self.vcpus.iter().enumerate() {
            let Some((ticked, cpu_time)) = self.control.times_of(index) else { continue };
            let stats = stats.as_ref().map_err(from_stats)?;
            let offsets = stats.offsets().map_err(from_stats)?;
            let VcpuCounts { faults, exits } = stats.counts(offsets).map_err(|error| from_stats(&error))?;
            all.faults += faults;
            all.exits += exits;
            all.system_time += ticked.system;
            all.ticked_time += ticked.all;
            all.cpu_time += cpu_time;
        }
        Ok(all)
    }

    fn vcpu_time(&self) -> Result<Duration, SecondLevelError> {
        Ok(self.control.vcpu_time())
    }

    fn slots(&self) -> Vec<Slot> {
        self.vm.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        self.vm.set_dirty_log(slot, is_on).map_err(from_kvm)?.ok_or(SecondLevelError::NoSuchSlot(slot))?;
        if is_on {
            // A log begins empty; the devices' log is always on.
            self.devices.memory().take_device_log(self.slot(slot)?.range);
        }
        Ok(())
    }

    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let slot = self.slot(slot)?;
        if !slot.is_dirty_logged {
            return Err(SecondLevelError::WrongState("dirty logging of this memslot is off: switch it on first"));
        }
        self.vm.take_dirty_log(slot).map(|log| self.with_devices(slot, log)).map_err(from_kvm)
    }

    fn start_dirty_log_set(&self, slot: SlotId) -> Result<bool, SecondLevelError> {
        let started = self.vm.start_dirty_log_set(slot).map_err(from_kvm)?;
        let is_on = || SecondLevelError::WrongState("dirty logging of this memslot is on already");
        let can = started.ok_or_else(is_on)?;
        if can {
            // All pages are in the log; the devices' log is always on.
            self.devices.memory().take_device_log(self.slot(slot)?.range);
        }
        Ok(can)
    }

    fn read_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let slot = self.slot(slot)?;
        self.vm.read_dirty_log(slot).map(|log| self.with_devices(slot, log)).map_err(from_kvm)
    }

    fn clear_dirty_log(&self, slot: SlotId, first_page: u64, pages: &[u64]) -> Result<(), SecondLevelError> {
        self.vm.clear_dirty_log(self.slot(slot)?, first_page, pages).map_err(from_kvm)
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        self.pause_since().map(drop)
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        self.control.resume()?;
        self.devices.gate().open();
        Ok(())
    }

    fn is_paused(&self) -> bool {
        self.control.is_paused()
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        self.control.paging_modes()
    }
}

/// Stops devices and vCPUs. Devices come first, because their transfers take longer and the guest need not stand
/// still for that. Returns when it began to stop the vCPUs.
///
/// ```text
///   close the gate ── a transfer does not end ─▶ DeviceBusy, no vCPU was asked
///     └▶ stop the vCPUs ─▶ done
///   └ one waits, perhaps for a device: open the gate ─▶ stop the vCPUs ─▶ close the gate, quickly ─▶ done, or
///   DeviceBusy
/// ```
fn pause_all(control: &RunControl, gate: &Gate) -> Result<Instant, SecondLevelError> {
    close(gate, DEVICE_WAIT_RUNNING)?;
    let since = Instant::now();
    if control.pause_within(VCPU_WAIT_AT_GATE).is_ok() {
        return Ok(since);
    }
    gate.open();
    control.pause()?;
    close(gate, DEVICE_WAIT_STOPPED).or_else(|busy| {
        control.resume()?;
        Err(busy)
    })?;
    // Since the first attempt: the vCPUs that had left the guest went on for a moment only.
    Ok(since)
}

fn close(gate: &Gate, at_most: Duration) -> Result<(), SecondLevelError> {
    let busy = SecondLevelError::DeviceBusy { waited_ms: at_most.as_millis() as u64 };
    if gate.close(at_most) { Ok(()) } else { Err(busy) }
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
            // An `io::Error` cannot be cloned; its number contains everything.
            let source = source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
            SecondLevelError::Ioctl { what, source }
        }
        malformed @ StatsError::Malformed { .. } => SecondLevelError::Ioctl {
            what: "parsing KVM's statistics",
            source: io::Error::new(io::ErrorKind::InvalidData, malformed.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::{GuestMemory, KvmSystem};
    use crate::run_loop::control::threadless::{control, is_pause_wanted, set_state};
    use crate::run_loop::{OnReset, VcpuState};
    use std::sync::atomic::{AtomicBool, Ordering};
    use vm_memory::{Bytes as _, GuestAddress};
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    #[test]
    fn a_device_that_does_not_finish_its_transfer_stops_no_vcpu() {
        let (control, gate, is_over) = (control(1), Gate::default(), AtomicBool::new(false));
        let _transfer = gate.enter();
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut was_wanted = false;
                while !is_over.load(Ordering::Relaxed) {
                    was_wanted |= is_pause_wanted(&control);
                    std::thread::yield_now();
                }
                was_wanted
            });
            let busy = pause_all(&control, &gate).unwrap_err();
            is_over.store(true, Ordering::Relaxed);
            assert!(matches!(busy, SecondLevelError::DeviceBusy { .. }), "{busy}");
            assert!(!watcher.join().unwrap(), "the vCPU continued to run");
        });
        drop(gate.enter()); // it is open
    }

    #[test]
    fn a_vcpu_that_waits_for_a_device_at_the_gate_gets_its_answer_and_leaves() {
        let (control, gate) = (control(1), Gate::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The vCPU handles an exit: it waits for a device's thread, which has one more access to make.
                while !is_pause_wanted(&control) {
                    std::thread::yield_now();
                }
                drop(gate.enter());
                set_state(&control, 0, VcpuState::Paused);
            });
            pause_all(&control, &gate).unwrap();
        });
        assert!(!gate.is_open_within(Duration::ZERO) && is_pause_wanted(&control));
    }

    #[test]
    fn a_pause_counts_from_before_the_last_vcpu_has_left_the_guest() {
        let (control, gate) = (control(1), Gate::default());
        std::thread::scope(|scope| {
            let pausing = scope.spawn(|| pause_all(&control, &gate).unwrap());
            while !is_pause_wanted(&control) {
                std::thread::yield_now();
            }
            let leaves = Instant::now();
            set_state(&control, 0, VcpuState::Paused);
            assert!(pausing.join().unwrap() <= leaves);
        });
    }

    /// A VM of 4 MiB in memslots of half of it, and the access to it.
    fn second_level() -> Option<(KvmSecondLevel, DeviceMemory)> {
        let system = KvmSystem::open_or_skip()?;
        let layout = [GpaRange::new(Gpa::new(0), mib(4)).unwrap()];
        let ram = GuestRam::map(&layout, BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
        let devices = DeviceMemory::new(Arc::new(GuestMemory::new(ram.clone()).unwrap()));
        let vm = Vm::create(&system, ram, mib(2)).unwrap();
        let control = RunControl::new(Vec::new(), OnReset::Stop);
        Some((KvmSecondLevel::new(Paging::Shadow, vm, control, devices.clone()), devices))
    }

    #[test]
    fn a_device_write_is_once_in_the_dirty_log_of_its_memslot() {
        let Some((second_level, devices)) = second_level() else { return };
        let [first, second] = second_level.slots()[..] else { panic!("4 MiB are two slots of 2 MiB") };
        let write = |at: u64| devices.access().write_obj(7_u64, GuestAddress(at)).unwrap();
        write(0x5000); // before the log: it begins empty
        [first, second].iter().for_each(|slot| second_level.set_dirty_log(slot.id, true).unwrap());
        let log = |slot: Slot| second_level.take_dirty_log(slot.id).unwrap();
        assert!(log(first).iter().chain(&log(second)).all(|word| *word == 0));
        write(0x3000);
        write((2 << 20) + 0x41_000);
        assert_eq!((log(first)[0], log(second)[1]), (1 << 3, 1 << 1));
        assert!(log(first).iter().chain(&log(second)).all(|word| *word == 0), "it was fetched");
    }
}
