//! The reasons why a guest ends, and its registers at the end, as text. Plain data: nothing here reads a vCPU.

use std::fmt;

use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::kvm::vcpu::InternalError;

/// Vector of a page fault (SDM vol. 3, 7.15).
const PAGE_FAULT: u64 = 14;

/// The registers of a vCPU, formatted for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegisterDump {
    /// Instruction pointer at the exit.
    pub rip: u64,
    /// Flags register (RFLAGS).
    pub rflags: u64,
    /// General registers: RAX RBX RCX RDX RSI RDI RBP RSP R8 … R15.
    pub general: [u64; 16],
    /// Control registers: CR0, CR2, CR3, CR4.
    pub control: [u64; 4],
    /// Extended feature register (EFER).
    pub efer: u64,
    /// Selectors of CS and SS.
    pub segments: [u16; 2],
    /// Bytes at RIP, as far as they could be read.
    pub code: Vec<u8>,
}

impl RegisterDump {
    pub(super) fn new(regs: &kvm_regs, sregs: &kvm_sregs) -> RegisterDump {
        let kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags } =
            *regs;
        RegisterDump {
            rip,
            rflags,
            general: [rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15],
            control: [sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4],
            efer: sregs.efer,
            segments: [sregs.cs.selector, sregs.ss.selector],
            code: Vec::new(),
        }
    }

    /// Stack pointer at the exit.
    pub fn rsp(&self) -> u64 {
        self.general[7]
    }

    /// Address of the last page fault.
    pub fn cr2(&self) -> u64 {
        self.control[1]
    }

    /// Whether these are the registers of a CPU after its reset, as SVM leaves them after a triple fault.
    fn is_reset(&self) -> bool {
        self.rip == 0xfff0 && self.segments[0] == 0xf000
    }
}

impl fmt::Display for RegisterDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 16] = [
            "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", "r8 ", "r9 ", "r10", "r11", "r12", "r13", "r14",
            "r15",
        ];
        let [cr0, cr2, cr3, cr4] = self.control;
        let [cs, ss] = self.segments;
        write!(f, "rip={:#018x} rflags={:#x} cs={cs:#x} ss={ss:#x}", self.rip, self.rflags)?;
        for (index, (name, value)) in NAMES.into_iter().zip(self.general).enumerate() {
            f.write_str(if index % 4 == 0 { "\n" } else { " " })?;
            write!(f, "{name}={value:#018x}")?;
        }
        write!(f, "\ncr0={cr0:#x} cr2={cr2:#x} cr3={cr3:#x} cr4={cr4:#x} efer={:#x}", self.efer)?;
        if !self.code.is_empty() {
            f.write_str("\ncode at rip:")?;
            for byte in &self.code {
                write!(f, " {byte:02x}")?;
            }
        }
        Ok(())
    }
}

/// The reasons why a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestExit {
    /// The guest wrote this code to the exit port.
    ExitPort(u32),
    /// The guest reset the machine. Where that leads to another boot, all vCPUs are paused, and nothing has ended.
    Reset,
    /// The guest reset the machine, and a vCPU could not be restored.
    NotPutBack {
        /// Number of the vCPU.
        vcpu: u32,
        /// Reason of the failure.
        why: String,
    },
    /// A part of a restored guest's RAM cannot be read.
    RamLost(String),
    /// A vCPU could not continue from a snapshot.
    NotContinued {
        /// Number of the vCPU.
        vcpu: u32,
        /// Reason of the failure.
        why: String,
    },
    /// The guest switched the machine off.
    PowerOff,
    /// The CPU refused an instruction or access of a directly started guest.
    Fault {
        /// Number of the vCPU.
        vcpu: u32,
        /// Vector of the exception.
        vector: u64,
        /// Error code of the exception.
        error_code: u64,
        /// Registers at the fault.
        registers: Box<RegisterDump>,
    },
    /// The guest caused a triple fault.
    Shutdown {
        /// Number of the vCPU.
        vcpu: u32,
        /// Registers, as far as the CPU kept them.
        registers: Box<RegisterDump>,
    },
    /// KVM could not continue.
    InternalError {
        /// Number of the vCPU.
        vcpu: u32,
        /// KVM's report of the error.
        error: InternalError,
        /// Registers at the error.
        registers: Box<RegisterDump>,
    },
    /// The CPU refused to enter the guest.
    FailEntry {
        /// Number of the vCPU.
        vcpu: u32,
        /// Reason code of the hardware.
        reason: u64,
        /// Number of the host CPU.
        host_cpu: u32,
        /// Registers at the failed entry.
        registers: Box<RegisterDump>,
    },
    /// The call `KVM_RUN` failed.
    RunFailed {
        /// Number of the vCPU.
        vcpu: u32,
        /// Error number of the call.
        errno: i32,
        /// Registers at the failure.
        registers: Box<RegisterDump>,
    },
    /// The guest halted where nothing can wake it.
    Halted {
        /// Number of the vCPU.
        vcpu: u32,
    },
    /// An exit that the VMM does not expect.
    Unexpected {
        /// Number of the vCPU.
        vcpu: u32,
        /// Description of the exit.
        exit: String,
    },
    /// The thread of a vCPU panicked, most likely in a serial sink.
    ThreadLost {
        /// Number of the vCPU.
        vcpu: u32,
    },
    /// The thread of a vCPU could not be restricted, and therefore did not run it.
    NoSandbox {
        /// Number of the vCPU.
        vcpu: u32,
        /// Reason of the failure.
        why: String,
    },
    /// A caller stopped the VM.
    Stopped,
    /// The guest did not end in time.
    TimedOut,
}

impl fmt::Display for GuestExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestExit::ExitPort(code) => write!(f, "the guest ended with code {code}"),
            GuestExit::Reset => f.write_str("the guest asked for a reset"),
            GuestExit::RamLost(why) => write!(f, "the guest cannot continue: {why}"),
            GuestExit::NotPutBack { vcpu, why } => {
                write!(f, "vcpu {vcpu}: cannot restore this vCPU after the guest reset its machine: {why}")
            }
            GuestExit::NotContinued { vcpu, why } => {
                write!(f, "vcpu {vcpu}: cannot continue from the snapshot: {why}")
            }
            GuestExit::PowerOff => f.write_str("the guest switched itself off"),
            GuestExit::Fault { vcpu, vector, error_code, registers } => {
                write!(f, "vcpu {vcpu}: {} (error code {error_code:#x})", exception_name(*vector))?;
                if *vector == PAGE_FAULT {
                    write!(f, " at address {:#x}", registers.cr2())?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::Shutdown { vcpu, registers } => {
                write!(f, "vcpu {vcpu}: triple fault")?;
                if registers.is_reset() {
                    f.write_str(
                        " (this CPU keeps no registers of a triple fault: below is the state after its reset)",
                    )?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::InternalError { vcpu, error, registers } => {
                write!(f, "vcpu {vcpu}: KVM cannot continue: {error}")?;
                if let Some(hint) = error.hint() {
                    write!(f, "\n{hint}")?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::FailEntry { vcpu, reason, host_cpu, registers } => {
                write!(
                    f,
                    "vcpu {vcpu}: the CPU refused to enter the guest: reason {reason:#x} on CPU {host_cpu}\n{registers}"
                )
            }
            GuestExit::RunFailed { vcpu, errno, registers } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(f, "vcpu {vcpu}: KVM_RUN failed: {error}")?;
                if *errno == libc::EFAULT {
                    f.write_str(
                        "\nguest RAM is not accessible on the host: no huge page left in the pool, or it was unmapped",
                    )?;
                }
                write!(f, "\n{registers}")
            }
            GuestExit::Halted { vcpu } => write!(f, "vcpu {vcpu}: halted where no interrupt can wake it"),
            GuestExit::Unexpected { vcpu, exit } => write!(f, "vcpu {vcpu}: unexpected exit {exit}"),
            GuestExit::ThreadLost { vcpu } => write!(f, "vcpu {vcpu}: its thread panicked"),
            GuestExit::NoSandbox { vcpu, why } => write!(f, "vcpu {vcpu}: cannot restrict its thread: {why}"),
            GuestExit::Stopped => f.write_str("stopped"),
            GuestExit::TimedOut => f.write_str("the guest did not end in time"),
        }
    }
}

/// The name of an exception (SDM vol. 3, table 6-1).
const fn exception_name(vector: u64) -> &'static str {
    match vector {
        0 => "#DE divide error",
        1 => "#DB debug",
        2 => "NMI",
        3 => "#BP breakpoint",
        4 => "#OF overflow",
        5 => "#BR bound range exceeded",
        6 => "#UD invalid opcode",
        7 => "#NM device not available",
        8 => "#DF double fault",
        10 => "#TS invalid TSS",
        11 => "#NP segment not present",
        12 => "#SS stack fault",
        13 => "#GP general protection",
        14 => "#PF page fault",
        16 => "#MF x87 floating-point error",
        17 => "#AC alignment check",
        18 => "#MC machine check",
        19 => "#XM SIMD floating-point error",
        20 => "#VE virtualisation",
        21 => "#CP control protection",
        _ => "reserved exception",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_fault_names_its_address() {
        let registers = RegisterDump { rip: 0x20_0010, control: [0, 0xdead_0000, 0, 0], ..Default::default() };
        let exit = GuestExit::Fault { vcpu: 1, vector: 14, error_code: 6, registers: Box::new(registers) };
        let text = exit.to_string();
        assert!(text.starts_with("vcpu 1: #PF page fault (error code 0x6) at address 0xdead0000\nrip=0x"), "{text}");
    }

    #[test]
    fn a_triple_fault_without_registers_says_so() {
        let registers = RegisterDump { rip: 0xfff0, segments: [0xf000, 0], ..Default::default() };
        let text = GuestExit::Shutdown { vcpu: 0, registers: Box::new(registers) }.to_string();
        assert!(text.contains("keeps no registers"), "{text}");
    }
}
