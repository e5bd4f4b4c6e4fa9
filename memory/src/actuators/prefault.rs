//! Prefault: every page of guest RAM is faulted in before the guest starts, in parallel. The advice that decides the
//! page size was given when the RAM was mapped: advice after the fault changes nothing. A page that is not available
//! is an error here instead of a SIGBUS later.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};

use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Hva};

use crate::host::{Advice, Host, HostError};
use crate::region::RamRange;

/// Bytes that a thread takes at a time: enough to make a call's overhead negligible, and few enough for threads
/// to end together.
const CHUNK: Bytes = mib(64);

/// Populates all ranges with up to `threads` threads. `progress` is called for every finished chunk and can stop the
/// work by breaking: the RAM of a whole machine takes minutes, and the user may not want to wait.
///
/// # Errors
/// The first [`HostError`]; other threads stop after their chunk.
pub fn prefault(
    host: &dyn Host,
    ranges: &[RamRange],
    threads: usize,
    progress: &(dyn Fn(Bytes) -> ControlFlow<()> + Sync),
) -> Result<(), HostError> {
    let chunks: Vec<(Hva, Bytes)> = ranges.iter().flat_map(|range| chunks_of(*range)).collect();
    let next = AtomicU64::new(0);
    let work = || -> Result<(), HostError> {
        while let Some((start, bytes)) = chunks.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            if let Err(error) = host.advise(*start, *bytes, Advice::PopulateWrite) {
                next.store(chunks.len() as u64, Ordering::Relaxed);
                return Err(error);
            }
            if progress(*bytes).is_break() {
                next.store(chunks.len() as u64, Ordering::Relaxed);
                return Ok(());
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..threads.clamp(1, chunks.len().max(1))).map(|_| scope.spawn(work)).collect();
        let own = work();
        let joined = workers.into_iter().map(|worker| worker.join().expect("a prefault thread does not panic"));
        joined.fold(own, |first, result| first.and(result))
    })
}

fn chunks_of(range: RamRange) -> impl Iterator<Item = (Hva, Bytes)> {
    let count = range.gpa.bytes().get().div_ceil(CHUNK.get());
    (0..count).map(move |i| {
        let offset = CHUNK * i;
        let left = range.gpa.bytes() - offset;
        (range.hva + offset, if left < CHUNK { left } else { CHUNK })
    })
}
