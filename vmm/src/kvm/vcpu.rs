//! One vCPU: registers, CPUID, `KVM_RUN`. A vCPU keeps its VM, and thereby the guest's RAM, alive. Once it runs, its
//! registers belong to its own thread; other threads only kick it ([`super::kick`]).
#![expect(unsafe_code, reason = "KVM reports an internal error in a C union")]

use std::fmt;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, Msrs, kvm_fpu, kvm_regs, kvm_run, kvm_sregs, kvm_xcrs,
};
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::stats::StatsError;
use super::{Kicker, KvmError, VcpuStats, Vm};

/// A vCPU. It keeps its VM, and thereby the guest's RAM, alive.
#[derive(Debug)]
pub struct Vcpu {
    // Declared before `_vm`, so that the vCPU is closed first.
    fd: VcpuFd,
    index: u32,
    _vm: Arc<Vm>,
}

/// KVM's report when it cannot continue (KVM API, 5, `KVM_EXIT_INTERNAL_ERROR`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InternalError {
    /// Kind of the error: 1 is an instruction that KVM cannot emulate, 3 an event that it could not deliver.
    pub suberror: u32,
    /// Bytes of the instruction, as far as KVM gave them.
    pub instruction: Vec<u8>,
    /// Further data of KVM's report.
    pub data: Vec<u64>,
}

impl InternalError {
    /// Whether KVM reports that the guest accessed a device, or other memory that KVM emulates, while an event was
    /// delivered.
    pub fn is_delivery(&self) -> bool {
        self.suberror == KVM_INTERNAL_ERROR_DELIVERY_EV
    }

    /// The usual cause of the error, if it is known.
    pub fn hint(&self) -> Option<&'static str> {
        (self.suberror == KVM_INTERNAL_ERROR_EMULATION).then_some(
            "KVM could not emulate this instruction; on hosts without VT-x or SVM (kvm_pvm) it emulates all guest \
             kernel code and lacks many instructions: a kernel such as Linux needs a host with EPT or NPT; an image of \
             your own can be started in ring 3 (its wideleaf note)",
        )
    }
}

impl fmt::Display for InternalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "suberror {}", self.suberror)?;
        if !self.instruction.is_empty() {
            f.write_str(", instruction")?;
            for byte in &self.instruction {
                write!(f, " {byte:02x}")?;
            }
        }
        for word in &self.data {
            write!(f, ", {word:#x}")?;
        }
        Ok(())
    }
}

impl Vcpu {
    /// Creates the vCPU with this number in `vm`.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn create(vm: &Arc<Vm>, index: u32) -> Result<Vcpu, KvmError> {
        let fd = vm.fd().create_vcpu(u64::from(index)).map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?;
        Ok(Vcpu { fd, index, _vm: Arc::clone(vm) })
    }

    pub(super) fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// Number of the vCPU, from zero.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// A handle by which other threads take the vCPU out of the guest.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where its page cannot be mapped.
    pub fn kicker(&self) -> Result<Kicker, KvmError> {
        Kicker::new(self.fd.as_raw_fd()).map_err(|source| KvmError::Ioctl { what: "mmap of kvm_run", source })
    }

    /// Opens the vCPU's statistics, before its first run.
    ///
    /// # Errors
    /// [`StatsError`] where KVM has no statistics.
    pub fn open_stats(&self) -> Result<VcpuStats, StatsError> {
        VcpuStats::open(&self.fd)
    }

    /// Sets the answers of CPUID (KVM API, `KVM_SET_CPUID2`), before the first run.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn set_cpuid(&self, cpuid: &CpuId) -> Result<(), KvmError> {
        self.fd.set_cpuid2(cpuid).map_err(KvmError::ioctl("KVM_SET_CPUID2"))
    }

    /// Frequency of the guest's time stamp counter, in kHz.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`], where the host's counter is not stable.
    pub fn tsc_khz(&self) -> Result<u32, KvmError> {
        self.fd.get_tsc_khz().map_err(KvmError::ioctl("KVM_GET_TSC_KHZ"))
    }

    /// Lets the guest's time stamp counter count at this frequency, in kHz (KVM API, `KVM_SET_TSC_KHZ`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`], where the host's counter has another frequency and the CPU cannot scale it.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<(), KvmError> {
        self.fd.set_tsc_khz(khz).map_err(KvmError::ioctl("KVM_SET_TSC_KHZ"))
    }

    /// Marks the guest's clock as stopped by the host for a while, so that its watchdogs do not take the jump of time
    /// for a hang (KVM API, `KVM_KVMCLOCK_CTRL`). A guest without KVM's clock does not learn it.
    pub fn mark_clock_stopped(&self) {
        // It fails where the guest does not use the clock, and only then.
        let _ = self.fd.kvmclock_ctrl();
    }

    /// Reads the general registers.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn regs(&self) -> Result<kvm_regs, KvmError> {
        self.fd.get_regs().map_err(KvmError::ioctl("KVM_GET_REGS"))
    }

    /// Sets the general registers.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<(), KvmError> {
        self.fd.set_regs(regs).map_err(KvmError::ioctl("KVM_SET_REGS"))
    }

    /// Reads the system registers.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn sregs(&self) -> Result<kvm_sregs, KvmError> {
        self.fd.get_sregs().map_err(KvmError::ioctl("KVM_GET_SREGS"))
    }

    /// Sets the system registers.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`]; `EINVAL` for a state that no CPU can be in.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), KvmError> {
        self.fd.set_sregs(sregs).map_err(KvmError::ioctl("KVM_SET_SREGS"))
    }

    /// Sets the floating-point and SSE state.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<(), KvmError> {
        self.fd.set_fpu(fpu).map_err(KvmError::ioctl("KVM_SET_FPU"))
    }

    /// Sets XCR0, which enables registers such as those of AVX. CPUID and CR4 must be set before.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`]; `EINVAL` for registers that the guest's CPUID lacks.
    pub fn set_xcr0(&self, value: u64) -> Result<(), KvmError> {
        let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
        xcrs.xcrs[0].value = value;
        self.fd.set_xcrs(&xcrs).map_err(KvmError::ioctl("KVM_SET_XCRS"))
    }

    /// Sets model-specific registers in order, and returns the number that KVM accepted.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn set_msrs(&self, msrs: &Msrs) -> Result<usize, KvmError> {
        self.fd.set_msrs(msrs).map_err(KvmError::ioctl("KVM_SET_MSRS"))
    }

    /// The guest-physical address that a guest-virtual one is mapped to, if it is (KVM API, `KVM_TRANSLATE`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn translate(&self, gva: u64) -> Result<Option<u64>, KvmError> {
        let translation = self.fd.translate_gva(gva).map_err(KvmError::ioctl("KVM_TRANSLATE"))?;
        Ok((translation.valid != 0).then_some(translation.physical_address))
    }

    /// Whether KVM has an exception or interrupt that the latest exit interrupted on its way to the guest: KVM delivers
    /// it at the next entry.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn is_event_in_delivery(&self) -> Result<bool, KvmError> {
        let events = self.fd.get_vcpu_events().map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?;
        Ok([events.exception.injected, events.interrupt.injected, events.nmi.injected].contains(&1))
    }

    /// Runs guest code until KVM needs the VMM.
    ///
    /// # Errors
    /// The error number of `KVM_RUN`: `EINTR` and `EAGAIN` mean that there was a kick or a signal.
    pub fn run(&mut self) -> Result<VcpuExit<'_>, kvm_ioctls::Error> {
        self.fd.run()
    }

    /// KVM's report about the last exit, which was an internal error.
    pub fn internal_error(&mut self) -> InternalError {
        internal_error(self.fd.get_kvm_run())
    }
}

fn internal_error(run: &kvm_run) -> InternalError {
    // SAFETY: plain numbers, every bit pattern is one; KVM filled this member, or it is zeroes.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let count = (internal.ndata as usize).min(internal.data.len());
    if internal.suberror != KVM_INTERNAL_ERROR_EMULATION {
        let data = internal.data[..count].to_vec();
        return InternalError { suberror: internal.suberror, instruction: Vec::new(), data };
    }
    // SAFETY: as above; this member overlays `internal` word by word, and is what suberror 1 fills.
    let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
    let has_bytes = count > 0 && failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0;
    let instruction = if has_bytes {
        // SAFETY: plain bytes. The inner union has this one member.
        let bytes = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        bytes.insn_bytes[..usize::from(bytes.insn_size).min(bytes.insn_bytes.len())].to_vec()
    } else {
        Vec::new()
    };
    InternalError { suberror: internal.suberror, instruction, data: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroed_run() -> kvm_run {
        kvm_run::default()
    }

    #[test]
    fn an_emulation_failure_carries_the_instruction() {
        let mut run = zeroed_run();
        let mut data = [0u64; 16];
        // flags = 1 (instruction bytes follow); then size 3 and the bytes of `popcnt`'s prefix, little-endian.
        data[0] = 1;
        data[1] = u64::from_le_bytes([3, 0xf3, 0x0f, 0xb8, 0, 0, 0, 0]);
        run.__bindgen_anon_1.internal.suberror = 1;
        run.__bindgen_anon_1.internal.ndata = 3;
        run.__bindgen_anon_1.internal.data = data;
        let error = internal_error(&run);
        assert_eq!(error.instruction, [0xf3, 0x0f, 0xb8]);
        assert_eq!(error.to_string(), "suberror 1, instruction f3 0f b8");
        assert!(error.hint().unwrap().contains("ring 3"));
    }

    #[test]
    fn an_emulation_failure_of_an_older_kernel_has_no_instruction_bytes() {
        let mut run = zeroed_run();
        run.__bindgen_anon_1.internal.suberror = 1;
        assert!(internal_error(&run).instruction.is_empty());
    }

    #[test]
    fn other_errors_carry_their_data_and_no_hint() {
        let mut run = zeroed_run();
        let mut data = [0u64; 16];
        data[..2].copy_from_slice(&[0x30, 7]);
        run.__bindgen_anon_1.internal.suberror = 3;
        run.__bindgen_anon_1.internal.ndata = 2;
        run.__bindgen_anon_1.internal.data = data;
        let error = internal_error(&run);
        assert_eq!(error.to_string(), "suberror 3, 0x30, 0x7");
        assert_eq!(error.hint(), None);
    }

    #[test]
    fn data_beyond_the_room_is_cut() {
        let mut run = zeroed_run();
        run.__bindgen_anon_1.internal.suberror = 4;
        run.__bindgen_anon_1.internal.ndata = u32::MAX;
        assert_eq!(internal_error(&run).data.len(), 16);
    }
}
