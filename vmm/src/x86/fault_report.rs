//! The way in which a fault of a directly started guest reaches the VMM with all its registers.
//!
//! Such a guest has no kernel. Without an IDT every fault is a triple fault, and SVM does not even keep its
//! registers: KVM resets the vCPU (arch/x86/kvm/svm/svm.c, `shutdown_interception`). The VMM therefore gives the
//! guest 32 gates; their stubs push the vector and write one byte to a port of ours. The VMM then reads the frame
//! from the stack.
//!
//! ```text
//!   fault at ring 3 ─▶ CPU switches to the vCPU's fault stack, pushes SS RSP RFLAGS CS RIP (error code)
//!                   ─▶ stub pushes 0 where there is no error code, then the vector, then `out PORT, al`
//!                   ─▶ KVM_EXIT_IO; every other register is still the guest's
//! ```
//!
//! The stubs are three plain instructions because hosts that emulate ring 0 know those.

use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend, GuestMemoryError};
use wideleaf_policies::{Bytes, Gpa};

use super::gdt::DIRECT_KERNEL_CODE;
use super::layout::{
    EXCEPTION_VECTORS, FAULT_STUB_BYTES, FAULT_STUBS, IDT, TASK_SEGMENT_BYTES, TASK_SEGMENT_STRIDE, TASK_SEGMENTS,
    TASK_STATE_BYTES, fault_stack_top,
};

/// Port that a stub writes to: a legacy range that is no longer used (the 80287's), and small enough for the short
/// form of `out`.
pub const PORT: u16 = 0xf8;
const _: () = assert!(PORT <= 0xff, "`out imm8, al` changes no register");

/// Vectors for which the CPU pushes an error code: #DF, #TS, #NP, #SS, #GP, #PF, #AC, #CP, and AMD's #VC and #SX
/// (SDM vol. 3, table 6-1; APM vol. 2, table 8-1).
const WITH_ERROR_CODE: [usize; 10] = [8, 10, 11, 12, 13, 14, 17, 21, 29, 30];

/// A fault frame, as the CPU and the stub pushed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultFrame {
    /// Vector of the exception.
    pub vector: u64,
    /// Error code; zero where the exception has none.
    pub error_code: u64,
    /// Address of the faulting instruction.
    pub rip: u64,
    /// Code segment; its low bits are the ring.
    pub cs: u64,
    /// Flags register (RFLAGS).
    pub rflags: u64,
    /// Stack pointer of the guest.
    pub rsp: u64,
    /// Stack segment of the guest.
    pub ss: u64,
}

impl FaultFrame {
    /// Reads the frame that a stub left at its stack pointer.
    ///
    /// # Errors
    /// If `rsp` is not in RAM.
    pub fn read(memory: &impl GuestMemoryBackend, rsp: u64) -> Result<FaultFrame, GuestMemoryError> {
        let words: [u64; 7] = memory.read_obj(GuestAddress(rsp))?;
        let [vector, error_code, rip, cs, rflags, rsp, ss] = words;
        Ok(FaultFrame { vector, error_code, rip, cs, rflags, rsp, ss })
    }
}

/// Writes gates, stubs and one task segment per vCPU.
///
/// # Errors
/// If the layout's addresses are not RAM.
pub fn write(memory: &impl GuestMemoryBackend, vcpus: u32) -> Result<(), GuestMemoryError> {
    let mut gates = [0u8; EXCEPTION_VECTORS * 16];
    let mut stubs = [0u8; EXCEPTION_VECTORS * FAULT_STUB_BYTES as usize];
    for (vector, (gate, stub)) in
        gates.chunks_exact_mut(16).zip(stubs.chunks_exact_mut(FAULT_STUB_BYTES as usize)).enumerate()
    {
        gate.copy_from_slice(&gate_bytes(stub_address(vector)));
        write_stub(vector, stub);
    }
    memory.write_slice(&gates, GuestAddress(IDT.get()))?;
    memory.write_slice(&stubs, GuestAddress(FAULT_STUBS.get()))?;

    let mut segments = vec![0u8; vcpus as usize * TASK_SEGMENT_STRIDE as usize];
    for (vcpu, segment) in segments.chunks_exact_mut(TASK_SEGMENT_STRIDE as usize).enumerate() {
        segment[..TASK_SEGMENT_BYTES as usize].copy_from_slice(&task_segment_bytes(fault_stack_top(vcpu as u32)));
    }
    memory.write_slice(&segments, GuestAddress(TASK_SEGMENTS.get()))
}

fn stub_address(vector: usize) -> Gpa {
    FAULT_STUBS + Bytes::new(vector as u64 * FAULT_STUB_BYTES)
}

/// An interrupt gate of 64-bit mode that ring 3 cannot call by itself: offset in three pieces, kernel code, present.
fn gate_bytes(stub: Gpa) -> [u8; 16] {
    const INTERRUPT_GATE: u64 = 0xe;
    const PRESENT: u64 = 0x80;
    let offset = stub.get();
    let low = (offset & 0xffff)
        | u64::from(DIRECT_KERNEL_CODE) << 16
        | (INTERRUPT_GATE | PRESENT) << 40
        | (offset >> 16 & 0xffff) << 48;
    let mut gate = [0; 16];
    gate[..8].copy_from_slice(&low.to_le_bytes());
    gate[8..].copy_from_slice(&(offset >> 32).to_le_bytes());
    gate
}

fn write_stub(vector: usize, stub: &mut [u8]) {
    const PUSH_IMM8: u8 = 0x6a;
    const OUT_IMM8_AL: u8 = 0xe6;
    const JMP_SELF: [u8; 2] = [0xeb, 0xfe];
    let push_vector = [PUSH_IMM8, vector as u8];
    let mut code = Vec::with_capacity(8);
    if !WITH_ERROR_CODE.contains(&vector) {
        code.extend([PUSH_IMM8, 0]);
    }
    code.extend(push_vector);
    code.extend([OUT_IMM8_AL, PORT as u8]);
    code.extend(JMP_SELF);
    stub[..code.len()].copy_from_slice(&code);
}

/// A 64-bit task segment: RSP0 at byte 4, and the offset of the port map at byte 102 (SDM vol. 3, 7.7).
///
/// The map allows every port. A CPU ignores it while IOPL is 3, but kvm_pvm runs the guest in the host's ring 3
/// with the host's flags: there its emulator finds IOPL 0 and reads the map.
fn task_segment_bytes(stack_top: Gpa) -> [u8; TASK_SEGMENT_BYTES as usize] {
    let mut segment = [0; TASK_SEGMENT_BYTES as usize];
    segment[4..12].copy_from_slice(&stack_top.get().to_le_bytes());
    segment[102..104].copy_from_slice(&(TASK_STATE_BYTES as u16).to_le_bytes());
    segment[TASK_SEGMENT_BYTES as usize - 1] = 0xff;
    segment
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestMemoryMmap;

    #[test]
    fn a_stub_pushes_two_words_in_all() {
        let mut divide = [0; 16];
        write_stub(0, &mut divide);
        assert_eq!(divide[..8], [0x6a, 0, 0x6a, 0, 0xe6, 0xf8, 0xeb, 0xfe]);
        let mut page_fault = [0; 16];
        write_stub(14, &mut page_fault);
        assert_eq!(page_fault[..6], [0x6a, 14, 0xe6, 0xf8, 0xeb, 0xfe]);
    }

    #[test]
    fn a_gate_points_to_its_stub() {
        let gate = gate_bytes(Gpa::new(0x1234_5678_9abc));
        assert_eq!(gate[..2], [0xbc, 0x9a]);
        assert_eq!(gate[2..4], [0x08, 0x00]);
        assert_eq!(gate[4..6], [0, 0x8e]);
        assert_eq!(gate[6..8], [0x78, 0x56]);
        assert_eq!(gate[8..12], [0x34, 0x12, 0, 0]);
    }

    #[test]
    fn all_structures_lie_at_the_addresses_of_the_layout() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory, 2).unwrap();
        let first_byte: u8 = memory.read_obj(GuestAddress(FAULT_STUBS.get() + 14 * 16)).unwrap();
        assert_eq!(first_byte, 0x6a);
        let stack: u64 = memory.read_obj(GuestAddress(TASK_SEGMENTS.get() + TASK_SEGMENT_STRIDE + 4)).unwrap();
        assert_eq!(stack, fault_stack_top(1).get());
    }

    #[test]
    fn a_frame_is_read_in_the_order_it_was_pushed() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let rsp = fault_stack_top(0).get() - 56;
        memory.write_obj([14u64, 4, 0x20_0000, 0x1b, 0x3202, 0x7000, 0x23], GuestAddress(rsp)).unwrap();
        let frame = FaultFrame::read(&memory, rsp).unwrap();
        assert_eq!((frame.vector, frame.error_code, frame.rip, frame.rsp), (14, 4, 0x20_0000, 0x7000));
        assert!(FaultFrame::read(&memory, u64::MAX - 8).is_err());
    }
}
