//! One VM of KVM: memslots and their dirty logs, interrupt controllers, clock. The RAM stays mapped as long as the VM
//! exists, memslots do not overlap, and the table of slots here is always the one that KVM has.
#![expect(unsafe_code, reason = "KVM receives host addresses as numbers; nothing checks that they stay mapped")]

use std::sync::Arc;

use kvm_bindings::{
    KVM_MEM_LOG_DIRTY_PAGES, KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_clock_data,
    kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, VmFd};
use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use wideleaf_memory::GuestRam;
use wideleaf_memory::second_level::{Slot, SlotId};
use wideleaf_policies::{Bytes, Gpa, PageSize};

use super::memslot::{Memslot, cut};
use super::{KvmError, KvmStats, KvmSystem};

/// A VM and its RAM. Every vCPU holds it, so the RAM stays mapped as long as any guest code can run.
#[derive(Debug)]
pub struct Vm {
    // Declared before `ram`, so that the VM is closed first.
    fd: VmFd,
    slots: Mutex<Vec<Memslot>>,
    ram: Arc<GuestRam>,
    /// Whether a fetch of a dirty log clears nothing (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`), and a log begins set.
    has_manual_logs: bool,
}

/// `KVM_CLEAR_DIRTY_LOG` (linux/kvm.h).
const CLEAR_DIRTY_LOG: libc::c_ulong = nix::request_code_readwrite!(KVMIO, 0xc0, size_of::<kvm_clear_dirty_log>());

impl Vm {
    /// Creates a VM with the RAM `ram`, in memslots cut at multiples of `slot_bytes`.
    ///
    /// The memslots are created first: each one waits for a grace period of KVM's readers, which is short while
    /// there are no interrupt controllers and no vCPUs (0.5 ms against 8 ms for 32 slots).
    ///
    /// # Errors
    /// [`KvmError::RamHasOwner`] where a kernel in this process owns the RAM exclusively; [`KvmError::Ioctl`].
    pub fn create(system: &KvmSystem, ram: Arc<GuestRam>, slot_bytes: Bytes) -> Result<Arc<Vm>, KvmError> {
        ram.share()?;
        let fd = system.create_vm()?;
        let has_manual_logs = system.manual_logs().is_some_and(|logs| fd.enable_cap(&logs).is_ok());
        let vm = Vm { fd, slots: Mutex::new(cut(ram.ranges(), slot_bytes)), ram, has_manual_logs };
        for memslot in vm.lock_slots().iter() {
            vm.set_memslot(memslot)?;
        }
        Ok(Arc::new(vm))
    }

    pub(super) fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// RAM of the guest.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// All memslots, ascending.
    pub fn slots(&self) -> Vec<Slot> {
        self.lock_slots().iter().map(|memslot| memslot.slot).collect()
    }

    /// Gives Intel's KVM three free pages and one more below 4 GiB, which it needs to run real mode and unpaged
    /// guests on CPUs without unrestricted guest mode (KVM API, 4.35 and 4.41). Other CPUs ignore it. Called before
    /// any vCPU exists.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn set_identity_map_and_tss(&self, identity_map: Gpa, tss: Gpa) -> Result<(), KvmError> {
        self.fd.set_identity_map_address(identity_map.get()).map_err(KvmError::ioctl("KVM_SET_IDENTITY_MAP_ADDR"))?;
        self.fd.set_tss_address(tss.get() as usize).map_err(KvmError::ioctl("KVM_SET_TSS_ADDR"))
    }

    /// Creates the interrupt controllers (two PICs, IOAPIC, a local APIC per vCPU), before any vCPU and
    /// after all memslots.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn create_irqchip(&self) -> Result<(), KvmError> {
        self.fd.create_irq_chip().map_err(KvmError::ioctl("KVM_CREATE_IRQCHIP"))
    }

    /// Creates the interval timer, which Linux uses for calibration. The speaker port answers, silently.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn create_pit(&self) -> Result<(), KvmError> {
        let config = kvm_pit_config { flags: kvm_bindings::KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        self.fd.create_pit2(config).map_err(KvmError::ioctl("KVM_CREATE_PIT2"))
    }

    /// Time of the guest's KVM clock, in nanoseconds (KVM API, `KVM_GET_CLOCK`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn clock_ns(&self) -> Result<u64, KvmError> {
        Ok(self.fd.get_clock().map_err(KvmError::ioctl("KVM_GET_CLOCK"))?.clock)
    }

    /// Sets the guest's KVM clock, in nanoseconds; no vCPU has run (KVM API, `KVM_SET_CLOCK`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn set_clock_ns(&self, clock: u64) -> Result<(), KvmError> {
        let clock = kvm_clock_data { clock, ..Default::default() };
        self.fd.set_clock(&clock).map_err(KvmError::ioctl("KVM_SET_CLOCK"))
    }

    /// Lets `event` raise the interrupt `gsi` inside the kernel, without this process.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn register_irqfd(&self, event: &EventFd, gsi: u32) -> Result<(), KvmError> {
        self.fd.register_irqfd(event, gsi).map_err(KvmError::ioctl("KVM_IRQFD"))
    }

    /// Holds the line of the level-triggered interrupt `gsi` high or low.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn set_interrupt_line(&self, gsi: u32, is_high: bool) -> Result<(), KvmError> {
        self.fd.set_irq_line(gsi, is_high).map_err(KvmError::ioctl("KVM_IRQ_LINE"))
    }

    /// Lets a guest's write of `value` to `address` signal `event` inside the kernel, without this process.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn register_ioeventfd(&self, event: &EventFd, address: Gpa, value: u32) -> Result<(), KvmError> {
        let address = IoEventAddress::Mmio(address.get());
        self.fd.register_ioevent(event, &address, value).map_err(KvmError::ioctl("KVM_IOEVENTFD"))
    }

    /// Opens the VM's statistics.
    ///
    /// # Errors
    /// [`super::stats::StatsError`] where they cannot be read.
    pub fn open_stats(&self) -> Result<KvmStats, super::stats::StatsError> {
        KvmStats::open(&self.fd)
    }

    /// Switches dirty logging of a slot on or off. `Ok(None)` where the slot does not exist.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`]; then the slot is unchanged.
    pub fn set_dirty_log(&self, id: SlotId, is_on: bool) -> Result<Option<()>, KvmError> {
        let mut slots = self.lock_slots();
        let Some(memslot) = slots.iter_mut().find(|memslot| memslot.slot.id == id) else { return Ok(None) };
        if memslot.slot.is_dirty_logged == is_on {
            return Ok(Some(()));
        }
        self.switch_log(memslot, is_on)?;
        if is_on && self.has_manual_logs {
            // Until then KVM keeps its large mappings.
            let all = vec![u64::MAX; page_count(memslot.slot).div_ceil(u64::BITS.into()) as usize];
            if let Err(error) = self.clear_dirty_log(memslot.slot, 0, &all) {
                self.switch_log(memslot, false)?;
                return Err(error);
            }
        }
        Ok(Some(()))
    }

    /// Switches dirty logging of a slot on, with all its pages set and no mapping changed (KVM API,
    /// `KVM_DIRTY_LOG_INITIALLY_SET`). Returns whether this KVM can. `Ok(None)` where there is no slot with logging
    /// off.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`]; then the slot is unchanged.
    pub fn start_dirty_log_set(&self, id: SlotId) -> Result<Option<bool>, KvmError> {
        let mut slots = self.lock_slots();
        let is_off = |memslot: &&mut Memslot| memslot.slot.id == id && !memslot.slot.is_dirty_logged;
        let Some(memslot) = slots.iter_mut().find(is_off) else { return Ok(None) };
        if self.has_manual_logs {
            self.switch_log(memslot, true)?;
        }
        Ok(Some(self.has_manual_logs))
    }

    fn switch_log(&self, memslot: &mut Memslot, is_on: bool) -> Result<(), KvmError> {
        let mut changed = *memslot;
        changed.slot.is_dirty_logged = is_on;
        self.set_memslot(&changed)?;
        *memslot = changed;
        Ok(())
    }

    /// Fetches and clears the dirty log of a slot (KVM API, 4.8 `KVM_GET_DIRTY_LOG`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`], also where logging is off.
    pub fn take_dirty_log(&self, slot: Slot) -> Result<Vec<u64>, KvmError> {
        let log = self.read_dirty_log(slot)?;
        if self.has_manual_logs && log.iter().any(|word| *word != 0) {
            // A page written since the fetch is among these, or stays in the log.
            self.clear_dirty_log(slot, 0, &log)?;
        }
        Ok(log)
    }

    /// Fetches the dirty log of a slot. Where KVM cannot start logs set, this clears it as well.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`], also where logging is off.
    pub fn read_dirty_log(&self, slot: Slot) -> Result<Vec<u64>, KvmError> {
        self.fd.get_dirty_log(slot.id.0, slot.range.bytes().as_usize()).map_err(KvmError::ioctl("KVM_GET_DIRTY_LOG"))
    }

    /// Clears bits of a slot's dirty log, from the page `first_page` of the slot on, a multiple of 64: the next write
    /// of such a page is logged (KVM API, 4.114 `KVM_CLEAR_DIRTY_LOG`). Words behind the slot's end are ignored.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`], also where logging is off.
    pub fn clear_dirty_log(&self, slot: Slot, first_page: u64, pages: &[u64]) -> Result<(), KvmError> {
        let left = page_count(slot).saturating_sub(first_page);
        let clear = kvm_clear_dirty_log {
            slot: slot.id.0,
            num_pages: left.min(pages.len() as u64 * u64::from(u64::BITS)) as u32,
            first_page,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap: pages.as_ptr().cast_mut().cast() },
        };
        // SAFETY: the descriptor is a VM's. KVM reads `num_pages` bits, rounded up to whole words, from `pages`, which
        // has at least as many and lives until the call returns; KVM writes nothing (KVM API, 4.114).
        let cleared = unsafe { ioctl_with_ref(&self.fd, CLEAR_DIRTY_LOG, &clear) };
        if cleared == 0 { Ok(()) } else { Err(KvmError::ioctl("KVM_CLEAR_DIRTY_LOG")(kvm_ioctls::Error::last())) }
    }

    fn set_memslot(&self, memslot: &Memslot) -> Result<(), KvmError> {
        let Slot { id, range, is_dirty_logged } = memslot.slot;
        let region = kvm_userspace_memory_region {
            slot: id.0,
            flags: if is_dirty_logged { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: range.start().get(),
            memory_size: range.bytes().get(),
            userspace_addr: memslot.hva.get(),
        };
        // SAFETY: [userspace_addr, + memory_size) is a piece of the mapping of `self.ram`, cut by `memslot::cut`; it
        // stays mapped while this `Vm` lives, and guest code runs only through a `Vcpu`, which holds this `Vm`. Slots
        // do not overlap, and this process has no Rust reference into the RAM but atomic ones (`GuestRam::share`).
        unsafe { self.fd.set_user_memory_region(region) }.map_err(KvmError::ioctl("KVM_SET_USER_MEMORY_REGION"))
    }

    fn lock_slots(&self) -> MutexGuard<'_, Vec<Memslot>> {
        // A slot is changed only after KVM agreed, so the table is valid after a panic elsewhere.
        self.slots.lock()
    }
}

fn page_count(slot: Slot) -> u64 {
    slot.range.bytes().pages(PageSize::Base4K)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_memory::{BackingConfig, BackingKind};
    use wideleaf_policies::GpaRange;
    use wideleaf_policies::units::mib;

    #[test]
    fn a_guest_and_an_owner_of_plain_words_exclude_each_other() {
        let Some(system) = KvmSystem::open_or_skip() else { return };
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).expect("fits")];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = || GuestRam::map(&layout, backing).expect("2 MiB can be mapped");

        let owned = ram();
        let _words = owned.exclusive_words(owned.ranges()[0]).expect("the words have no owner yet");
        let refused = Vm::create(&system, owned.clone(), mib(2)).expect_err("the RAM has an owner");
        assert!(matches!(refused, KvmError::RamHasOwner(_)), "{refused}");

        let vm = Vm::create(&system, ram(), mib(2)).expect("the RAM has no owner");
        assert!(vm.ram().exclusive_words(vm.ram().ranges()[0]).is_none());
    }

    #[test]
    fn a_kvm_that_cannot_begin_a_log_set_says_so_and_its_logs_are_cleared_by_each_fetch() {
        let Some(system) = KvmSystem::open_or_skip().map(KvmSystem::with_logs_cleared_at_fetch) else { return };
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).expect("fits")];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&layout, backing).expect("2 MiB can be mapped");
        let vm = Vm::create(&system, ram, mib(2)).expect("the RAM has no owner");
        let slot = vm.slots()[0];
        assert_eq!(vm.start_dirty_log_set(slot.id).expect("KVM is not asked"), Some(false));
        assert!(!vm.slots()[0].is_dirty_logged, "the slot is as it was");
        vm.set_dirty_log(slot.id, true).expect("it has logs");
        assert_eq!(vm.start_dirty_log_set(slot.id).expect("KVM is not asked"), None, "it is on");
        assert!(vm.take_dirty_log(slot).expect("it is on").iter().all(|word| *word == 0), "a log begins empty");
    }
}
