//! The real host: this process's own address space under Linux.

use std::fs::File;
use std::time::{Duration, Instant};

use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, Moment, PageSize};

use super::{Advice, Host, HostError, PageRun};
use crate::backing::{BackingConfig, BackingKind};
use crate::region::{GuestRam, RamError};
use crate::sys;

/// This process's address space.
#[derive(Debug)]
pub struct LinuxHost {
    pagemap: File,
    opened_at: Instant,
}

impl LinuxHost {
    /// Opens `/proc/self/pagemap`. No privilege is needed: page frame numbers, which would need one, are not read.
    ///
    /// # Errors
    /// [`HostError`] where `/proc` is not mounted.
    pub fn open() -> Result<LinuxHost, HostError> {
        let pagemap =
            File::open("/proc/self/pagemap").map_err(|source| HostError { what: "open /proc/self/pagemap", source })?;
        Ok(LinuxHost { pagemap, opened_at: Instant::now() })
    }
}

impl Host for LinuxHost {
    fn now(&self) -> Moment {
        Moment::after_start(self.opened_at.elapsed())
    }

    fn thread_cpu_time(&self) -> Duration {
        sys::clock::thread_cpu_time()
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        let what = match advice {
            Advice::HugePage => "madvise(MADV_HUGEPAGE)",
            Advice::NoHugePage => "madvise(MADV_NOHUGEPAGE)",
            Advice::Collapse => "madvise(MADV_COLLAPSE)",
            Advice::PopulateWrite => "madvise(MADV_POPULATE_WRITE)",
            Advice::Cold => "madvise(MADV_COLD)",
        };
        sys::madvise::madvise(start, bytes, advice).map_err(|source| HostError { what, source })
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        sys::pagemap::scan(&self.pagemap, start, bytes, runs)
            .map_err(|source| HostError { what: "PAGEMAP_SCAN of /proc/self/pagemap", source })
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        std::fs::read_to_string(path).map_err(|source| HostError { what: "read a kernel file", source })
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// The machine's warm copy speed in bytes per second: what a promotion's speed is put beside. Allocates twice `bytes`
/// and frees it.
pub fn warm_copy_bytes_per_second(bytes: Bytes) -> f64 {
    const ROUNDS: u32 = 3;
    bytes.get() as f64 / sys::memcpy::fastest_copy(bytes, ROUNDS).as_secs_f64()
}

/// Makes the machine's free memory fast again: touches `bytes` of it and gives them back. Frames that a hypervisor
/// took back while they were free cost ten times as much at their first touch; without this, the first of two
/// measurements pays for both.
///
/// # Errors
/// [`RamError`] where there is not that much memory.
pub fn warm_host_memory(bytes: Bytes) -> Result<(), RamError> {
    let bytes = bytes.checked_round_up(PageSize::Huge2M).unwrap_or(bytes);
    let range = GpaRange::new(Gpa::new(0), bytes).ok_or(RamError::EmptyLayout)?;
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages");
    let ram = GuestRam::map(&[range], backing)?;
    let advise = |source| RamError::Advise { size: PageSize::Huge2M, source };
    LinuxHost::open().and_then(|host| host.advise(ram.base(), bytes, Advice::PopulateWrite)).map_err(advise)
}
