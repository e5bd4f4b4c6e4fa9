//! Loops compiled twice: for the vector registers of every x86-64 CPU, which hold two numbers, and for those of AVX2,
//! which hold four. A run takes the wider ones where CPU and system allow it, in a guest and in a process alike.
//!
//! ```text
//!   work ── run ──▶ AVX2 in CPUID and YMM in XCR0? ─┬─ yes ─▶ work.run::<4>, in a function compiled for AVX2
//!                                                   └─ no ──▶ work.run::<2>, compiled as all other code
//! ```
//!
//! Both make the same operations for each number, and no multiplication is fused with an addition: the results are
//! the same bit by bit.
#![expect(unsafe_code, reason = "code compiled for AVX2 may run only where AVX2 is")]

use core::sync::atomic::{AtomicBool, Ordering};

cpufeatures::new!(avx2, "avx2");

/// Whether only the narrow registers are used.
static IS_NARROW: AtomicBool = AtomicBool::new(false);

/// Numbers in a vector register of every x86-64 CPU.
pub const NARROW: usize = 2;
/// Numbers in a vector register of AVX2.
pub const WIDE: usize = 4;

/// Work with loops that become vector instructions.
pub trait Vectorized {
    /// Does the work with vector registers of `W` numbers. An implementation is `#[inline(always)]`, and so are the
    /// loops that it calls: only code that is inlined here is compiled for the wider registers.
    fn run<const W: usize>(self);
}

/// Uses only the registers of every x86-64 CPU from now on. A recording of accesses then is the same on every CPU.
pub fn stay_narrow() {
    IS_NARROW.store(true, Ordering::Relaxed);
}

/// Does the work with the widest vector registers of [`WIDE`] and [`NARROW`] that are available.
pub fn run(work: impl Vectorized) {
    if avx2::get() && !IS_NARROW.load(Ordering::Relaxed) {
        // SAFETY: CPUID reports AVX2, and XCR0 that the registers are enabled.
        unsafe { run_wide(work) }
    } else {
        work.run::<NARROW>();
    }
}

#[target_feature(enable = "avx2")]
fn run_wide(work: impl Vectorized) {
    work.run::<WIDE>();
}
