//! The state of vCPUs and interrupt controllers, taken while no vCPU runs, and restored in this or another VM.
//!
//! ```text
//!   reset     boot ─▶ taken ─▶ the guest runs ─▶ it resets ─▶ out of KVM_RUN, all of them ─▶ put back ─▶ it runs
//!   snapshot  the guest runs ─▶ out of KVM_RUN, all of them ─▶ taken ─▶ it runs
//!                                                                └─ another VM ─▶ restored ─▶ it runs
//! ```
//!
//! A reset of the machine for KVM, which has no such call, is the restoration of the state before the first
//! instruction. Only model-specific registers that differ are written: most are never touched, and some cannot be
//! written. The time stamp counter is not part of a reset: it continues ([`tsc`]). Registers by which KVM itself
//! writes into guest RAM (its clock, stolen time) must be set back at a reset, or KVM would write into the next
//! kernel's memory.
#![expect(unsafe_code, reason = "only KVM knows the length of the floating-point state")]

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, Msrs, kvm_debugregs, kvm_irqchip,
    kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use kvm_ioctls::KvmNestedStateBuffer;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{KvmError, Vcpu, Vm};

mod plain;
pub mod tsc;

pub use plain::{Digits, Plain};
pub use tsc::SavedTsc;

/// The two interrupt controllers of a PC, and its IOAPIC.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// Memory types of physical memory (SDM vol. 3, 11.11.2): KVM has them but does not list them
/// (`msrs_to_save_base` in arch/x86/kvm/x86.c).
const MTRRS: [u32; 28] = {
    const FIXED: [u32; 11] = [0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f];
    const DEFAULT: u32 = 0x2ff;
    const FIRST_VARIABLE: u32 = 0x200;
    let mut all = [DEFAULT; 28];
    let mut i = 0;
    while i < FIXED.len() {
        all[i] = FIXED[i];
        i += 1;
    }
    let mut variable = 0;
    while variable < 16 {
        all[FIXED.len() + variable as usize] = FIRST_VARIABLE + variable;
        variable += 1;
    }
    all
};

/// The time stamp counter, which counts by itself. All vCPUs share it; setting the counter of a single vCPU breaks
/// that.
const TSC: u32 = 0x10;

/// Time of the guest's boot, which KVM writes into guest RAM once, when the guest writes this register, and never
/// later (Documentation/virt/kvm/x86/msr.rst). The memory may have another use since then, so the register is not
/// restored: a guest that wants the time writes the register again.
const WALL_CLOCKS: [u32; 2] = [0x11, 0x4b56_4d00];

/// KVM's clock in guest RAM. KVM looks for the page, and so waits for its content, when the register is written
/// (`kvm_write_system_time` in arch/x86/kvm/x86.c): where RAM is still filled, only a vCPU's thread may wait for it.
const CLOCKS: [u32; 2] = [0x12, 0x4b56_4d01];

/// Counters of the host's CPU and KVM that a guest can only read: system management interrupts, and the microcode's
/// revision.
const READ_ONLY: [u32; 2] = [0x34, 0x8b];

/// Whether KVM writes into guest RAM at the address in this register: clocks, stolen time, acknowledged interrupts,
/// late pages (Documentation/virt/kvm/x86/msr.rst).
const fn is_paravirtual(index: u32) -> bool {
    matches!(index, 0x11 | 0x12 | 0x4b56_4d00..=0x4b56_4dff)
}

/// A vCPU that is not in `KVM_RUN`, without its time stamp counter.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVcpu {
    /// State of a nested guest, as far as KVM fills the buffer; `None` where KVM has no nested guests.
    nested: Option<Digits>,
    sregs: Plain<kvm_sregs>,
    regs: Plain<kvm_regs>,
    xsave: Box<Plain<kvm_xsave>>,
    xcrs: Plain<kvm_xcrs>,
    debug: Plain<kvm_debugregs>,
    /// Local APIC; `None` in a VM without interrupt controllers.
    lapic: Option<Box<Plain<kvm_lapic_state>>>,
    events: Plain<kvm_vcpu_events>,
    mp_state: Plain<kvm_mp_state>,
    /// Numbers and values of model-specific registers, ordered by number.
    msrs: Vec<(u32, u64)>,
}

impl SavedVcpu {
    /// Takes the state of a vCPU that is not in `KVM_RUN` and has completed its last exit; `msrs` are those that KVM
    /// lists ([`super::KvmSystem::msrs`]).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn take(vcpu: &Vcpu, msrs: &[u32]) -> Result<SavedVcpu, KvmError> {
        let fd = vcpu.fd();
        let wanted: Vec<u32> = msrs.iter().chain(&MTRRS).copied().filter(|index| *index != TSC).collect();
        // These two reads change state that the others return. The first one carries out a waiting INIT or SIPI, for
        // which a nested guest may end (`kvm_apic_accept_events` in arch/x86/kvm/lapic.c); the second one may put the
        // payload of a pending exception into CR2 or DR6 (`kvm_vcpu_ioctl_x86_get_vcpu_events` in arch/x86/kvm/x86.c).
        let mp_state = Plain(fd.get_mp_state().map_err(KvmError::ioctl("KVM_GET_MP_STATE"))?);
        let events = Plain(fd.get_vcpu_events().map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?);
        Ok(SavedVcpu {
            nested: take_nested(vcpu),
            sregs: Plain(vcpu.sregs()?),
            regs: Plain(vcpu.regs()?),
            xsave: Box::new(Plain(fd.get_xsave().map_err(KvmError::ioctl("KVM_GET_XSAVE"))?)),
            xcrs: Plain(fd.get_xcrs().map_err(KvmError::ioctl("KVM_GET_XCRS"))?),
            debug: Plain(fd.get_debug_regs().map_err(KvmError::ioctl("KVM_GET_DEBUGREGS"))?),
            lapic: take_lapic(vcpu)?,
            events,
            mp_state,
            msrs: read_msrs(vcpu, &wanted)?.iter().map(|msr| (msr.index, msr.data)).collect(),
        })
    }

    /// Puts the state of the same vCPU back at a reset of the machine. The vCPU must not be in `KVM_RUN`, and the
    /// pending work of its last exit must be complete: it was entered once more, with a kick on its way (KVM API, 5,
    /// "The kvm_run structure").
    ///
    /// # Errors
    /// [`KvmError`]; then the vCPU is in an undefined state, and must not run.
    pub fn put_back(&self, vcpu: &Vcpu) -> Result<(), KvmError> {
        for (index, data) in self.set_all(vcpu, &[])? {
            if is_paravirtual(index) {
                return Err(KvmError::MsrStays { index });
            }
            // Counters that only KVM sets.
            tracing::debug!("KVM does not set MSR {index:#x} back to {data:#x}");
        }
        Ok(())
    }

    /// Restores the state in a new vCPU that has its CPUID and its time stamp counter and never ran. No page of RAM is
    /// touched. The vCPU's own thread then sets the result, before it runs the vCPU.
    ///
    /// # Errors
    /// [`KvmError`]; then the vCPU is in an undefined state, and must not run.
    pub fn restore(&self, vcpu: &Vcpu) -> Result<LateState, KvmError> {
        let refused = self.set_all(vcpu, &CLOCKS)?;
        match refused.into_iter().find(|(index, _)| !READ_ONLY.contains(index)) {
            Some((index, data)) => Err(KvmError::MsrNotSet { index, data }),
            None => Ok(LateState(self.msrs.iter().filter(|(index, _)| CLOCKS.contains(index)).copied().collect())),
        }
    }

    /// Whether KVM reads guest RAM when it sets this state: the first tables of 32-bit paging with PAE
    /// (`load_pdptrs` in arch/x86/kvm/x86.c). A restore could wait for that RAM for ever.
    pub fn needs_ram(&self) -> bool {
        const PAGED: u64 = 1 << 31;
        const PAE: u64 = 1 << 5;
        const LONG_MODE: u64 = 1 << 10;
        let kvm_sregs { cr0, cr4, efer, .. } = self.sregs.0;
        cr0 & PAGED != 0 && cr4 & PAE != 0 && efer & LONG_MODE == 0
    }

    /// Whether the vCPU has a local APIC.
    pub fn has_lapic(&self) -> bool {
        self.lapic.is_some()
    }

    /// Sets everything but the registers `later`, and returns the model-specific registers that KVM refused.
    ///
    /// The order is: out of a nested guest; the mode of the local APIC before its registers; these before the
    /// deadline of its timer; events and the run state last, because the earlier steps may set them.
    fn set_all(&self, vcpu: &Vcpu, later: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
        let fd = vcpu.fd();
        if let Some(nested) = self.nested.as_ref().and_then(nested_buffer) {
            fd.set_nested_state(&nested).map_err(KvmError::ioctl("KVM_SET_NESTED_STATE"))?;
        }
        vcpu.set_sregs(&self.sregs.0)?;
        // A host without XSAVE has none of these registers, and KVM refuses an empty list.
        if self.xcrs.0.nr_xcrs > 0 {
            fd.set_xcrs(&self.xcrs.0).map_err(KvmError::ioctl("KVM_SET_XCRS"))?;
        }
        // KVM refuses this where a guest's state is larger than the struct (KVM API, 4.42).
        fd.get_xsave().map_err(KvmError::ioctl("KVM_GET_XSAVE"))?;
        // SAFETY: KVM reads as many bytes as its guests' state has. They are no more than this struct's, since the
        // call before succeeded on this vCPU. The state only grows by features that a process asks for
        // (ARCH_REQ_XCOMP_GUEST_PERM), which no code here does.
        unsafe { fd.set_xsave(&self.xsave.0) }.map_err(KvmError::ioctl("KVM_SET_XSAVE"))?;
        vcpu.set_regs(&self.regs.0)?;
        fd.set_debug_regs(&self.debug.0).map_err(KvmError::ioctl("KVM_SET_DEBUGREGS"))?;
        if let Some(lapic) = &self.lapic {
            fd.set_lapic(&lapic.0).map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        }
        let refused = self.set_msrs(vcpu, later)?;
        fd.set_vcpu_events(&self.events.0).map_err(KvmError::ioctl("KVM_SET_VCPU_EVENTS"))?;
        fd.set_mp_state(self.mp_state.0).map_err(KvmError::ioctl("KVM_SET_MP_STATE"))?;
        Ok(refused)
    }

    fn set_msrs(&self, vcpu: &Vcpu, later: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
        let indices: Vec<u32> = self.msrs.iter().map(|(index, _)| *index).collect();
        let mut refused = Vec::new();
        for (index, data) in changed(&self.msrs, &read_msrs(vcpu, &indices)?) {
            let is_left_out = index == TSC || later.contains(&index) || WALL_CLOCKS.contains(&index) && data != 0;
            if !is_left_out && !set_msr(vcpu, index, data)? {
                refused.push((index, data));
            }
        }
        Ok(refused)
    }
}

/// The part of a restored vCPU's state that its own thread sets.
#[derive(Debug)]
pub struct LateState(Vec<(u32, u64)>);

impl LateState {
    /// Sets it, and marks the guest's clock as stopped. KVM may wait for the content of a page of RAM.
    ///
    /// # Errors
    /// [`KvmError`]; then the vCPU must not run.
    pub fn set(&self, vcpu: &Vcpu) -> Result<(), KvmError> {
        for (index, data) in self.0.iter().copied().filter(|(_, data)| *data != 0) {
            if !set_msr(vcpu, index, data)? {
                return Err(KvmError::MsrNotSet { index, data });
            }
        }
        vcpu.mark_clock_stopped();
        Ok(())
    }
}

/// Sets a register. Returns whether KVM accepted it.
fn set_msr(vcpu: &Vcpu, index: u32, data: u64) -> Result<bool, KvmError> {
    let one = Msrs::from_entries(&[kvm_msr_entry { index, data, ..Default::default() }]);
    Ok(vcpu.set_msrs(&one.expect("a list has room for one"))? == 1)
}

/// A KVM without nested guests has no such state, and reports that in different ways.
fn take_nested(vcpu: &Vcpu) -> Option<Digits> {
    let mut nested = Box::new(KvmNestedStateBuffer::empty());
    vcpu.fd().nested_state(&mut nested).ok()?;
    let bytes = nested.as_bytes();
    Some(Digits(bytes[..bytes.len().min(nested.size as usize)].to_vec()))
}

/// The buffer that KVM reads, with a size that lies within it whatever the bytes say; `None` where there are none.
fn nested_buffer(saved: &Digits) -> Option<Box<KvmNestedStateBuffer>> {
    let mut bytes = vec![0; size_of::<KvmNestedStateBuffer>()];
    let filled = saved.0.len().min(bytes.len());
    bytes[..filled].copy_from_slice(&saved.0[..filled]);
    let mut buffer = Box::new(KvmNestedStateBuffer::read_from_bytes(&bytes).ok()?);
    buffer.size = u32::try_from(filled).ok()?;
    (filled > 0).then_some(buffer)
}

fn take_lapic(vcpu: &Vcpu) -> Result<Option<Box<Plain<kvm_lapic_state>>>, KvmError> {
    match vcpu.fd().get_lapic() {
        Ok(lapic) => Ok(Some(Box::new(Plain(lapic)))),
        // The answer of a VM without interrupt controllers (`KVM_GET_LAPIC` in arch/x86/kvm/x86.c).
        Err(error) if error.errno() == libc::EINVAL => Ok(None),
        Err(error) => Err(KvmError::ioctl("KVM_GET_LAPIC")(error)),
    }
}

/// The entries of `before` that differ from `now`, in which some may be missing.
fn changed(before: &[(u32, u64)], now: &[kvm_msr_entry]) -> Vec<(u32, u64)> {
    let is_as_before = |msr: &(u32, u64)| now.iter().any(|now| (now.index, now.data) == *msr);
    before.iter().filter(|msr| !is_as_before(msr)).copied().collect()
}

/// Largest number of registers that KVM reads in one call (`MAX_IO_MSRS` in arch/x86/kvm/x86.c).
const MSRS_AT_ONCE: usize = 256;

/// The registers that KVM returns. `KVM_GET_MSRS` stops at the first one that it does not know (KVM API, 4.18).
fn read_msrs(vcpu: &Vcpu, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let (mut read, mut left) = (Vec::new(), indices);
    while !left.is_empty() {
        let now = left.iter().take(MSRS_AT_ONCE);
        let wanted: Vec<_> = now.map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&wanted).expect("a list has room for as many as KVM reads at once");
        let count = vcpu.fd().get_msrs(&mut msrs).map_err(KvmError::ioctl("KVM_GET_MSRS"))?;
        read.extend_from_slice(&msrs.as_slice()[..count]);
        // A register that stopped it is left out.
        let done = if count < wanted.len() { count + 1 } else { count };
        left = left.get(done..).unwrap_or_default();
    }
    Ok(read)
}

/// The interrupt controllers and the timer of a VM.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedInterrupts {
    chips: [Plain<kvm_irqchip>; CHIPS.len()],
    pit: Plain<kvm_pit_state2>,
}

impl SavedInterrupts {
    /// Takes the state of both.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn take(vm: &Vm) -> Result<SavedInterrupts, KvmError> {
        let mut chips = CHIPS.map(|chip_id| Plain(kvm_irqchip { chip_id, ..Default::default() }));
        for Plain(chip) in &mut chips {
            vm.fd().get_irqchip(chip).map_err(KvmError::ioctl("KVM_GET_IRQCHIP"))?;
        }
        let pit = vm.fd().get_pit2().map_err(KvmError::ioctl("KVM_GET_PIT2"))?;
        Ok(SavedInterrupts { chips, pit: Plain(pit) })
    }

    /// Puts the state back; no vCPU may run. Interrupts that wait in a controller reach the local APICs now, so these
    /// are restored before.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn put_back(&self, vm: &Vm) -> Result<(), KvmError> {
        for (chip_id, Plain(chip)) in CHIPS.into_iter().zip(&self.chips) {
            let chip = kvm_irqchip { chip_id, ..*chip };
            vm.fd().set_irqchip(&chip).map_err(KvmError::ioctl("KVM_SET_IRQCHIP"))?;
        }
        vm.fd().set_pit2(&self.pit.0).map_err(KvmError::ioctl("KVM_SET_PIT2"))
    }
}

impl std::fmt::Debug for SavedVcpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedVcpu").field("regs", &self.regs.0).field("msrs", &self.msrs.len()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for SavedInterrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedInterrupts").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_SIPI_RECEIVED, KVM_VCPUEVENT_VALID_SIPI_VECTOR};
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    use super::*;
    use crate::kvm::KvmSystem;

    #[test]
    fn only_registers_that_changed_are_written_back() {
        let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let before = [(0x1a0, 1), (0x277, 6), (0x4b56_4d01, 0)];
        let now = [msr(0x1a0, 1), msr(0x4b56_4d01, 0x1001)];
        // A register that KVM no longer returns may have changed as well.
        assert_eq!(changed(&before, &now), [(0x277, 6), (0x4b56_4d01, 0)]);
    }

    #[test]
    fn kvm_never_reads_beyond_the_buffer_of_a_nested_guest() {
        for (bytes, size) in [(1, 1), (128, 128), (8320, 8320), (8321, 8320), (100_000, 8320)] {
            let buffer = nested_buffer(&Digits(vec![0xff; bytes])).unwrap();
            assert_eq!((buffer.size as usize, buffer.flags), (size, if bytes == 1 { 0xff } else { 0xffff }));
            assert!(buffer.size as usize <= size_of_val(&*buffer));
        }
        assert!(nested_buffer(&Digits(Vec::new())).is_none());
    }

    /// A VM with interrupt controllers, 2 MiB of RAM and a vCPU; `None` where there is no KVM.
    fn vm() -> Option<(KvmSystem, std::sync::Arc<Vm>, Vcpu)> {
        let system = KvmSystem::open_or_skip()?;
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).unwrap()];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let vm = Vm::create(&system, GuestRam::map(&layout, backing).unwrap(), mib(2)).unwrap();
        vm.create_irqchip().unwrap();
        let vcpu = Vcpu::create(&vm, 0).unwrap();
        vcpu.set_cpuid(&system.supported_cpuid().unwrap()).unwrap();
        Some((system, vm, vcpu))
    }

    fn is_resident(vm: &Vm, page: u64) -> bool {
        let mut resident = [0_u8];
        let address = vm.ram().base().get() + page;
        // SAFETY: the page lies in the mapping of `vm`'s RAM, and the answer is one byte for it.
        let result = unsafe { libc::mincore(address as *mut libc::c_void, 4096, resident.as_mut_ptr()) };
        result == 0 && resident[0] & 1 == 1
    }

    #[test]
    fn a_restore_touches_no_ram_until_the_vcpus_thread_sets_the_clock() {
        const CLOCK: u32 = 0x4b56_4d01;
        const PAGE: u64 = 0x5000;
        let Some((system, _, vcpu)) = vm() else { return };
        let msrs = system.msrs().unwrap();
        for (index, value) in [(CLOCK, PAGE | 1), (WALL_CLOCKS[1], 0x6000), (0x277, 0x0606_0606)] {
            assert!(set_msr(&vcpu, index, value).unwrap());
        }
        let text = serde_json::to_string(&SavedVcpu::take(&vcpu, &msrs).unwrap()).unwrap();
        let saved: SavedVcpu = serde_json::from_str(&text).unwrap();
        let (_, other_vm, other) = vm().unwrap();
        let value = |index| read_msrs(&other, &[index]).unwrap()[0].data;
        let late = saved.restore(&other).unwrap();
        assert_eq!((value(CLOCK), value(0x277), value(WALL_CLOCKS[1])), (0, 0x0606_0606, 0));
        assert!(!is_resident(&other_vm, PAGE) && !is_resident(&other_vm, 0x6000));
        late.set(&other).unwrap();
        assert_eq!(value(CLOCK), PAGE | 1);
        assert!(!is_resident(&other_vm, 0x6000), "the time of the boot is not written again");
    }

    #[test]
    fn a_start_that_waits_is_in_all_of_the_state_and_not_in_a_part() {
        let Some((_, vm, _first)) = vm() else { return };
        let vcpu = Vcpu::create(&vm, 1).unwrap();
        let mut events = vcpu.fd().get_vcpu_events().unwrap();
        (events.sipi_vector, events.flags) = (0x12, KVM_VCPUEVENT_VALID_SIPI_VECTOR);
        vcpu.fd().set_vcpu_events(&events).unwrap();
        vcpu.fd().set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_SIPI_RECEIVED }).unwrap();
        let saved = SavedVcpu::take(&vcpu, &[]).unwrap();
        assert_eq!((saved.mp_state.0.mp_state, saved.sregs.0.cs.base), (KVM_MP_STATE_RUNNABLE, 0x1_2000));
    }

    #[test]
    fn all_counters_continue_in_step_from_their_values() {
        let Some((_, vm, first)) = vm() else { return };
        let vcpus = [first, Vcpu::create(&vm, 1).unwrap()];
        let saved = [(1_u64 << 50, 7_000), (1 << 50, 5_000)];
        let counters = saved.map(|(value, offset)| serde_json::json!({ "value": value, "offset": offset }));
        let counters = counters.map(|json| serde_json::from_value::<SavedTsc>(json).unwrap());
        match tsc::continue_all(&vcpus, &counters) {
            Err(KvmError::TscGoesBack { .. }) => return println!("skipped: this KVM does not shift guests' counters"),
            result => result.unwrap(),
        }
        let now = vcpus.iter().map(|vcpu| serde_json::to_value(SavedTsc::take(vcpu).unwrap()).unwrap());
        let now: Vec<_> = now.collect();
        match (now[0]["offset"].as_u64(), now[1]["offset"].as_u64()) {
            (Some(first), Some(second)) => assert_eq!(first.wrapping_sub(second), 2_000, "the distance stays"),
            _ => println!("skipped: this KVM does not tell the offsets of counters"),
        }
    }

    #[test]
    fn no_memory_type_is_named_twice() {
        let all: std::collections::BTreeSet<u32> = MTRRS.into_iter().collect();
        assert_eq!(all.len(), MTRRS.len());
        assert!(all.contains(&0x200) && all.contains(&0x20f) && all.contains(&0x26f) && all.contains(&0x2ff));
    }
}
