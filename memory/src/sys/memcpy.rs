//! The machine's copy speed, to put beside a promotion's: the C library's `memcpy` between two warm buffers.

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
