//! `memcpy` and its family: the compiler calls them, and there is no C library. String instructions are fast
//! enough. Timed code calls them too: CG, IS, MG and Sweep3D clear and copy whole arrays at each step, which may differ
//! from a process with its C library. What is copied in small pieces, or is the measurement itself, is a loop of moves
//! instead (`wideleaf_kernels::copy`).
#![expect(unsafe_code, reason = "these functions have C's contracts, and their names are part of the ABI")]

use core::arch::asm;

/// Implementation of C's `memcpy`.
///
/// # Safety
/// As in C: both ranges are valid and do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    // SAFETY: the ranges are valid by the contract, and the direction flag is clear by the ABI.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
    to
}

/// Implementation of C's `memmove`.
///
/// # Safety
/// As in C: both ranges are valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if to.addr().wrapping_sub(from.addr()) >= bytes {
        // SAFETY: going upwards, no byte of the source is overwritten before it is read.
        return unsafe { memcpy(to, from, bytes) };
    }
    let last = bytes.wrapping_sub(1);
    // SAFETY: the ranges are valid by the contract; the target lies above the source, so going downwards reads each
    // byte before it is overwritten; the direction flag is cleared again.
    unsafe {
        asm!(
            "std",
            "rep movsb",
            "cld",
            inout("rcx") bytes => _,
            inout("rdi") to.wrapping_add(last) => _,
            inout("rsi") from.wrapping_add(last) => _,
            options(nostack),
        );
    }
    to
}

/// Implementation of C's `memset`.
///
/// # Safety
/// As in C: the range is valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
    // SAFETY: the range is valid by the contract, and the direction flag is clear by the ABI.
    unsafe {
        asm!(
            "rep stosb",
            inout("rcx") bytes => _,
            inout("rdi") to => _,
            in("al") value as u8,
            options(nostack, preserves_flags),
        );
    }
    to
}

/// Implementation of C's `memcmp`.
///
/// # Safety
/// As in C: both ranges are valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, bytes: usize) -> i32 {
    for index in 0..bytes {
        // SAFETY: the index is inside the range, which is valid by the contract.
        let a = unsafe { one.wrapping_add(index).read() };
        // SAFETY: likewise.
        let b = unsafe { other.wrapping_add(index).read() };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// C's `bcmp`, which compilers use if only equality counts.
///
/// # Safety
/// As in C: both ranges are valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, bytes: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(one, other, bytes) }
}
