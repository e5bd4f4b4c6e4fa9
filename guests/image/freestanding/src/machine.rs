//! Wrappers for single instructions and raw memory: ports, CR3, CPUID, memory at a physical address.
#![expect(unsafe_code, reason = "the module exists to wrap single instructions and physical addresses")]

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use wideleaf_protocol::Entry;

global_asm!(include_str!("boot.s"), options(att_syntax));

// SAFETY: all are defined in boot.s with these sizes and alignments, live in .data or .bss or (the labels) nowhere,
// and those that more than one vCPU or the exception handler touches are atomics.
unsafe extern "C" {
    /// Physical address of the PVH start info.
    pub safe static start_info_gpa: AtomicU32;
    /// Index that the next vCPU to start takes; 0 if no index is on offer.
    pub safe static vcpu_index: AtomicU32;
    /// Root of the tables that a starting vCPU loads.
    pub safe static vcpu_cr3: AtomicU64;
    /// Vector of the exception that ended the program.
    pub safe static exception_vector: AtomicU64;
    /// Error code of the exception.
    pub safe static exception_error: AtomicU64;
    /// Instruction pointer of the exception.
    pub safe static exception_rip: AtomicU64;
    /// Stack pointer of the exception.
    pub safe static exception_rsp: AtomicU64;
    /// Address of the last page fault.
    pub safe static exception_cr2: AtomicU64;
    safe static trampoline: Label;
    safe static trampoline_end: Label;
    safe static image_end: Label;
}

/// A symbol that stands for its address only.
#[repr(C)]
struct Label(u8);

/// First address after the image, a multiple of 4 KiB.
pub fn end_of_image() -> u64 {
    (&raw const image_end).addr() as u64
}

/// Address and length of the real-mode code for starting a vCPU.
pub fn trampoline_code() -> (u64, u64) {
    let start = (&raw const trampoline).addr();
    (start as u64, ((&raw const trampoline_end).addr() - start) as u64)
}

/// Whether ports are accessed by system call. Set once, before the first port access.
static HAS_SYSTEM_CALLS: AtomicBool = AtomicBool::new(false);

/// Records how the program was started.
pub fn set_entry(entry: Entry) {
    HAS_SYSTEM_CALLS.store(entry == Entry::Pvh, Ordering::Relaxed);
}

/// Entry by which the program was started.
pub fn entry() -> Entry {
    if HAS_SYSTEM_CALLS.load(Ordering::Relaxed) { Entry::Pvh } else { Entry::Direct }
}

/// The system calls of boot.s. The upper half is "wl", to distinguish them from a stray `ud2`.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Call {
    Out8 = 0x776c_0000,
    Out16 = 0x776c_0001,
    In8 = 0x776c_0002,
    LoadCr3 = 0x776c_0003,
}

fn call(call: Call, port: u16, value: u64) -> u32 {
    let result;
    // SAFETY: only after `set_entry(Pvh)`, so the gates of boot.s are in place: the #UD handler runs on its own
    // stack, changes nothing but EAX, and returns behind the ud2.
    unsafe {
        asm!("ud2", inlateout("eax") call as u32 => result, in("edx") u32::from(port), in("rcx") value);
    }
    result
}

/// Writes a byte to a port.
pub fn out8(port: u16, value: u8) {
    if HAS_SYSTEM_CALLS.load(Ordering::Relaxed) {
        call(Call::Out8, port, u64::from(value));
    } else {
        // SAFETY: started directly, the program has IOPL 3; the ports it writes have no effect on memory.
        unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags)) };
    }
}

/// Writes 16 bits to a port.
pub fn out16(port: u16, value: u16) {
    if HAS_SYSTEM_CALLS.load(Ordering::Relaxed) {
        call(Call::Out16, port, u64::from(value));
    } else {
        // SAFETY: as for `out8`.
        unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack, preserves_flags)) };
    }
}

/// Writes the address of memory to a port; the device behind it reads that memory. Only after a direct start.
pub fn out_address(port: u16, address: u32) {
    assert!(entry() == Entry::Direct, "a device that reads memory is there only after a direct start");
    // SAFETY: as for `out8`. The device reads memory during the instruction, so the compiler may not move writes behind
    // it: no `nomem`.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") address, options(readonly, nostack, preserves_flags)) };
}

/// Reads a byte from a port. Only with system calls: after a direct start no port has bytes to read.
pub fn in8(port: u16) -> u8 {
    assert!(entry() == Entry::Pvh, "ports are read only after a PVH start");
    call(Call::In8, port, 0) as u8
}

/// Reads 16 bits from a port. Only after a direct start.
pub fn in16(port: u16) -> u16 {
    assert!(entry() == Entry::Direct, "16 bits are read only after a direct start");
    let word;
    // SAFETY: as for `out8`; reading them changes no memory either.
    unsafe { asm!("in ax, dx", in("dx") port, out("ax") word, options(nomem, nostack, preserves_flags)) };
    word
}

/// Loads the page tables at `root`.
///
/// # Safety
/// The tables map everything the program uses at the same address as before.
pub unsafe fn load_cr3(root: u64) {
    assert!(entry() == Entry::Pvh, "a direct start brings its own tables");
    call(Call::LoadCr3, 0, root);
}

/// One CPUID leaf as EAX, EBX, ECX, EDX; all zero if the CPU has no such leaf in that range.
pub fn cpuid(leaf: u32) -> [u32; 4] {
    let range = leaf & 0xffff_0000;
    let highest = core::arch::x86_64::__cpuid(range).eax;
    if highest < leaf || highest & 0xffff_0000 != range {
        return [0; 4];
    }
    let result = core::arch::x86_64::__cpuid(leaf);
    [result.eax, result.ebx, result.ecx, result.edx]
}

/// Copies bytes from a physical address.
///
/// # Safety
/// `[address, address + bytes.len())` is mapped one to one, and no vCPU or device writes it during the call.
pub unsafe fn read_physical(address: u64, bytes: &mut [u8]) {
    let source = core::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the caller vouches for the source; the destination is a slice of its own, not that memory.
    unsafe { core::ptr::copy(source, bytes.as_mut_ptr(), bytes.len()) };
}

/// Copies bytes within physical memory.
///
/// # Safety
/// Both ranges are mapped one to one, the target is not used by anything else, and no vCPU or device writes the
/// source during the call.
pub unsafe fn copy_physical(from: u64, to: u64, bytes: u64) {
    let source = core::ptr::with_exposed_provenance::<u8>(from as usize);
    let target = core::ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: the caller vouches for both.
    unsafe { core::ptr::copy(source, target, bytes as usize) };
}

/// Reads a 64-bit word, such as a table entry or a device register.
///
/// # Safety
/// The address is 8-byte aligned and mapped one to one.
pub unsafe fn read_u64(address: u64) -> u64 {
    // SAFETY: the caller vouches for the address.
    unsafe { core::ptr::with_exposed_provenance::<u64>(address as usize).read_volatile() }
}

/// Writes a 64-bit word.
///
/// # Safety
/// The address is 8-byte aligned and mapped one to one, and no Rust object lives there.
pub unsafe fn write_u64(address: u64, value: u64) {
    // SAFETY: the caller vouches for the address.
    unsafe { core::ptr::with_exposed_provenance_mut::<u64>(address as usize).write_volatile(value) };
}

/// Reads a 32-bit device register.
///
/// # Safety
/// The address is 4-byte aligned and mapped one to one.
pub unsafe fn read_u32(address: u64) -> u32 {
    // SAFETY: the caller vouches for the address.
    unsafe { core::ptr::with_exposed_provenance::<u32>(address as usize).read_volatile() }
}

/// Writes a 32-bit device register.
///
/// # Safety
/// The address is 4-byte aligned and mapped one to one, and the device's reaction changes no memory that Rust owns.
pub unsafe fn write_u32(address: u64, value: u32) {
    // SAFETY: the caller vouches for the address.
    unsafe { core::ptr::with_exposed_provenance_mut::<u32>(address as usize).write_volatile(value) };
}
