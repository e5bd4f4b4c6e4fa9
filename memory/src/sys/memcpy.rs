//! Copies: of pages that nobody touches meanwhile, past the cache; and the machine's copy speed, to put beside a
//! promotion's.

use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use wideleaf_policies::Bytes;

use crate::sys::mapping::Piece;

/// Copies `from` to `to`, of equal size, with stores that do not pass through the cache (`MOVNTI`; Intel SDM vol. 1,
/// 10.4.6.2): a window is as large as a core's cache, and the guest needs it more. They also spare the read of each
/// line that is overwritten.
///
/// All of `from` must be there and `to` populated, or the copy takes the faults it meets.
pub(crate) fn copy_past_the_cache(from: Piece<'_>, to: Piece<'_>) {
    assert_eq!(from.bytes(), to.bytes(), "as much goes as comes");
    for (source, target) in from.words().iter().zip(to.words()) {
        let word = source.load(Ordering::Relaxed) as i64;
        // SAFETY: the pointer is of an `AtomicU64`, so it is aligned and may be written through at any time.
        unsafe { _mm_stream_si64(AtomicU64::as_ptr(target).cast(), word) };
    }
    // SAFETY: a fence touches nothing. Such stores are ordered by it alone; whoever learns that the copy is done must see
    // it.
    unsafe { _mm_sfence() };
}

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
