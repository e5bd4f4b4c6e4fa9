//! The daemon's own use of the host.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use wideleaf_policies::{Bytes, PageSize};

/// CPU time of all its threads (getrusage(2)); zero where the kernel does not report it.
pub fn cpu() -> Duration {
    getrusage(UsageWho::RUSAGE_SELF).map_or(Duration::ZERO, |usage| {
        [usage.user_time(), usage.system_time()]
            .map(|time| Duration::new(time.tv_sec().max(0) as u64, time.tv_usec().max(0) as u32 * 1_000))
            .iter()
            .sum()
    })
}

/// Resident memory in bytes: the second field of `/proc/self/statm` (proc_pid_statm(5)), in base pages.
pub fn resident() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(Bytes::new(pages * PageSize::Base4K.bytes().get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::mib;

    #[test]
    fn a_process_that_runs_takes_time_and_memory() {
        assert!(cpu() > Duration::ZERO);
        let resident = resident().expect("/proc is there");
        assert!(resident > mib(1) && resident < mib(4096), "{resident}");
    }
}
