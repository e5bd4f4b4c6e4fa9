//! vCPUs and interrupt controllers in their state before a guest's first instruction, and the way back to it. This
//! is a reset of the machine for KVM, which has no such call.
//!
//! ```text
//!   boot ── registers set ─▶ taken ─▶ the guest runs ─▶ it resets ─▶ out of KVM_RUN, all of them ─▶ put back
//!                                     ─▶ the guest runs
//! ```
//!
//! Only changed model-specific registers are written back: most are never touched, some cannot be written, and the
//! time stamp counter continues. Registers by which KVM itself writes into guest RAM (its clock, stolen time) must
//! be set back, or KVM would write into the next kernel's memory.
#![expect(unsafe_code, reason = "only KVM knows the length of the floating-point state")]

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, Msrs, kvm_debugregs, kvm_irqchip,
    kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};

use kvm_ioctls::KvmNestedStateBuffer;

use super::{KvmError, Vcpu, Vm};

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

/// The time stamp counter, which counts by itself and must continue. All vCPUs share it; setting the counter of a
/// single vCPU breaks that.
const GOES_ON: [u32; 1] = [0x10];

/// Whether KVM writes into guest RAM at the address in this register: clocks, stolen time, acknowledged interrupts,
/// late pages (Documentation/virt/kvm/x86/msr.rst).
const fn is_paravirtual(index: u32) -> bool {
    matches!(index, 0x11 | 0x12 | 0x4b56_4d00..=0x4b56_4dff)
}

/// A vCPU before its first instruction.
pub struct FreshVcpu {
    nested: Option<Box<KvmNestedStateBuffer>>,
    sregs: kvm_sregs,
    regs: kvm_regs,
    xsave: Box<kvm_xsave>,
    xcrs: kvm_xcrs,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    mp_state: kvm_mp_state,
    /// Model-specific registers, ordered by number.
    msrs: Vec<kvm_msr_entry>,
}

impl FreshVcpu {
    /// Takes the state of a vCPU that has not run; `msrs` are those that KVM lists ([`super::KvmSystem::msrs`]).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn take(vcpu: &Vcpu, msrs: &[u32]) -> Result<FreshVcpu, KvmError> {
        let fd = vcpu.fd();
        // A KVM without nested guests has no such state, and reports that in different ways.
        let mut nested = Box::new(KvmNestedStateBuffer::empty());
        let has_nested = fd.nested_state(&mut nested).is_ok();
        let wanted: Vec<u32> = msrs.iter().chain(&MTRRS).copied().filter(|index| !GOES_ON.contains(index)).collect();
        Ok(FreshVcpu {
            nested: has_nested.then_some(nested),
            sregs: vcpu.sregs()?,
            regs: vcpu.regs()?,
            xsave: Box::new(fd.get_xsave().map_err(KvmError::ioctl("KVM_GET_XSAVE"))?),
            xcrs: fd.get_xcrs().map_err(KvmError::ioctl("KVM_GET_XCRS"))?,
            debug: fd.get_debug_regs().map_err(KvmError::ioctl("KVM_GET_DEBUGREGS"))?,
            lapic: fd.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?,
            events: fd.get_vcpu_events().map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?,
            mp_state: fd.get_mp_state().map_err(KvmError::ioctl("KVM_GET_MP_STATE"))?,
            msrs: read_msrs(vcpu, &wanted)?,
        })
    }

    /// Puts all state back. The vCPU must not be in `KVM_RUN`, and the pending work of its last exit must be
    /// complete: it was entered once more, with a kick on its way (KVM API, 5, "The kvm_run structure").
    ///
    /// The order is: out of a nested guest; the mode of the local APIC before its registers; these before the
    /// deadline of its timer; events and the run state last, because the earlier steps may set them.
    ///
    /// # Errors
    /// [`KvmError`]; then the vCPU is in an undefined state, and must not run.
    pub fn put_back(&self, vcpu: &Vcpu) -> Result<(), KvmError> {
        let fd = vcpu.fd();
        if let Some(nested) = &self.nested {
            fd.set_nested_state(nested).map_err(KvmError::ioctl("KVM_SET_NESTED_STATE"))?;
        }
        vcpu.set_sregs(&self.sregs)?;
        // A host without XSAVE has none of these registers, and KVM refuses an empty list.
        if self.xcrs.nr_xcrs > 0 {
            fd.set_xcrs(&self.xcrs).map_err(KvmError::ioctl("KVM_SET_XCRS"))?;
        }
        // SAFETY: KVM reads as many bytes as its guests' state has, which it refuses to give by KVM_GET_XSAVE where
        // they are more than this struct's (KVM API, 4.42), and this struct came from there. It only grows by
        // features that a process asks for (ARCH_REQ_XCOMP_GUEST_PERM), which no code here does.
        unsafe { fd.set_xsave(&self.xsave) }.map_err(KvmError::ioctl("KVM_SET_XSAVE"))?;
        vcpu.set_regs(&self.regs)?;
        fd.set_debug_regs(&self.debug).map_err(KvmError::ioctl("KVM_SET_DEBUGREGS"))?;
        fd.set_lapic(&self.lapic).map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        self.put_back_msrs(vcpu)?;
        fd.set_vcpu_events(&self.events).map_err(KvmError::ioctl("KVM_SET_VCPU_EVENTS"))?;
        fd.set_mp_state(self.mp_state).map_err(KvmError::ioctl("KVM_SET_MP_STATE"))
    }

    fn put_back_msrs(&self, vcpu: &Vcpu) -> Result<(), KvmError> {
        let indices: Vec<u32> = self.msrs.iter().map(|msr| msr.index).collect();
        for changed in changed(&self.msrs, &read_msrs(vcpu, &indices)?) {
            let kvm_msr_entry { index, data, .. } = changed;
            let one = Msrs::from_entries(&[changed]).expect("a list has room for one");
            match vcpu.set_msrs(&one)? {
                0 if is_paravirtual(index) => return Err(KvmError::MsrStays { index }),
                // Counters that only KVM sets.
                0 => tracing::debug!("KVM does not set MSR {index:#x} back to {data:#x}"),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The entries of `before` that differ from `now`, in which some may be missing.
fn changed(before: &[kvm_msr_entry], now: &[kvm_msr_entry]) -> Vec<kvm_msr_entry> {
    let is_as_before = |msr: &kvm_msr_entry| now.iter().any(|now| now.index == msr.index && now.data == msr.data);
    before.iter().filter(|msr| !is_as_before(msr)).copied().collect()
}

/// The registers that KVM returns. `KVM_GET_MSRS` stops at the first one that it does not know (KVM API, 4.18).
fn read_msrs(vcpu: &Vcpu, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let (mut read, mut left) = (Vec::new(), indices);
    while !left.is_empty() {
        let wanted: Vec<_> = left.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&wanted).expect("KVM lists no more than a list has room for");
        let count = vcpu.fd().get_msrs(&mut msrs).map_err(KvmError::ioctl("KVM_GET_MSRS"))?;
        read.extend_from_slice(&msrs.as_slice()[..count]);
        // The register that stopped it is left out.
        left = left.get(count + 1..).unwrap_or_default();
    }
    Ok(read)
}

/// The interrupt controllers and the timer of a VM before its first instruction.
#[derive(Clone)]
pub struct FreshInterrupts {
    chips: [kvm_irqchip; CHIPS.len()],
    pit: kvm_pit_state2,
}

impl FreshInterrupts {
    /// Takes the state of both.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn take(vm: &Vm) -> Result<FreshInterrupts, KvmError> {
        let mut chips = CHIPS.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
        for chip in &mut chips {
            vm.fd().get_irqchip(chip).map_err(KvmError::ioctl("KVM_GET_IRQCHIP"))?;
        }
        let pit = vm.fd().get_pit2().map_err(KvmError::ioctl("KVM_GET_PIT2"))?;
        Ok(FreshInterrupts { chips, pit })
    }

    /// Puts the state back; no vCPU may run.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses a call.
    pub fn put_back(&self, vm: &Vm) -> Result<(), KvmError> {
        for chip in &self.chips {
            vm.fd().set_irqchip(chip).map_err(KvmError::ioctl("KVM_SET_IRQCHIP"))?;
        }
        vm.fd().set_pit2(&self.pit).map_err(KvmError::ioctl("KVM_SET_PIT2"))
    }
}

impl std::fmt::Debug for FreshVcpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FreshVcpu").field("regs", &self.regs).field("msrs", &self.msrs.len()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for FreshInterrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FreshInterrupts").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_registers_that_changed_are_written_back() {
        let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let before = [msr(0x1a0, 1), msr(0x277, 6), msr(0x4b56_4d01, 0)];
        let now = [msr(0x1a0, 1), msr(0x4b56_4d01, 0x1001)];
        // A register that KVM no longer returns may have changed as well.
        assert_eq!(changed(&before, &now), [msr(0x277, 6), msr(0x4b56_4d01, 0)]);
    }

    #[test]
    fn no_memory_type_is_named_twice() {
        let all: std::collections::BTreeSet<u32> = MTRRS.into_iter().collect();
        assert_eq!(all.len(), MTRRS.len());
        assert!(all.contains(&0x200) && all.contains(&0x20f) && all.contains(&0x26f) && all.contains(&0x2ff));
    }
}
