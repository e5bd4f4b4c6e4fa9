//! Copies of guest memory and zeroes that bypass the caches, and the machine's copy speed, for comparison with a
//! promotion's.

use std::arch::asm;
use std::time::{Duration, Instant};

use wideleaf_policies::Bytes;

/// Copies `bytes` from one buffer to another `rounds` times, after one round that is not timed, and returns the time
/// of the fastest. The buffers are ordinary memory in the page size the kernel chooses.
pub(crate) fn fastest_copy(bytes: Bytes, rounds: u32) -> Duration {
    let source = vec![0x5a_u8; bytes.as_usize()];
    let mut target = vec![0_u8; bytes.as_usize()];
    (0..=rounds)
        .map(|round| {
            let began = Instant::now();
            target.copy_from_slice(std::hint::black_box(&source));
            std::hint::black_box(&mut target);
            (round, began.elapsed())
        })
        .filter(|(round, _)| *round > 0)
        .map(|(_, took)| took)
        .min()
        .unwrap_or(Duration::ZERO)
}

/// Number of bytes that [`stream`] copies at a time: a cache line.
const LINE_BYTES: usize = 64;

/// Copies with stores that bypass the caches (`movntdq`): the copy is not read soon, and the guest keeps its cache.
/// In assembly, because the guest may write to `from` at the same time, for which Rust has no copy.
///
/// # Safety
/// `from` and `to` are the starts of `bytes` bytes of this process's own that do not overlap, and there is no Rust
/// reference into `to` other than to atomic words.
///
/// # Panics
/// If anything is not a multiple of a cache line.
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    let is_whole_lines = |number: usize| number.is_multiple_of(LINE_BYTES);
    assert!(is_whole_lines(from.addr()) && is_whole_lines(to.addr()) && is_whole_lines(bytes), "whole cache lines");
    if bytes == 0 {
        return;
    }
    // SAFETY: reads and writes exactly the bytes that the caller vouches for, aligned as asserted; SSE2 is part of
    // x86-64; the fence orders the streamed stores before everything behind.
    unsafe {
        asm!(
            "2:",
            "movdqa {a}, [{from}]",
            "movdqa {b}, [{from} + 16]",
            "movdqa {c}, [{from} + 32]",
            "movdqa {d}, [{from} + 48]",
            "movntdq [{to}], {a}",
            "movntdq [{to} + 16], {b}",
            "movntdq [{to} + 32], {c}",
            "movntdq [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "sub {left}, 64",
            "jnz 2b",
            "sfence",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) bytes => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// Fills memory with zeroes by stores that bypass the caches, as [`stream`] does.
///
/// # Safety
/// `to` is the start of `bytes` bytes of this process's own, and there is no Rust reference into them other than to
/// atomic words.
///
/// # Panics
/// If anything is not a multiple of a cache line.
pub(crate) unsafe fn stream_zeroes(to: *mut u8, bytes: usize) {
    let is_whole_lines = |number: usize| number.is_multiple_of(LINE_BYTES);
    assert!(is_whole_lines(to.addr()) && is_whole_lines(bytes), "whole cache lines");
    if bytes == 0 {
        return;
    }
    // SAFETY: writes exactly the bytes that the caller vouches for, aligned as asserted; SSE2 is part of x86-64; the
    // fence orders the streamed stores before everything behind.
    unsafe {
        asm!(
            "pxor {zero}, {zero}",
            "2:",
            "movntdq [{to}], {zero}",
            "movntdq [{to} + 16], {zero}",
            "movntdq [{to} + 32], {zero}",
            "movntdq [{to} + 48], {zero}",
            "add {to}, 64",
            "sub {left}, 64",
            "jnz 2b",
            "sfence",
            to = inout(reg) to => _,
            left = inout(reg) bytes => _,
            zero = out(xmm_reg) _,
            options(nostack),
        );
    }
}
