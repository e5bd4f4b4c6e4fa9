//! How much memory of this process is resident, in one read of some bytes (`/proc/self/statm`, proc_pid_statm(5)). It may be
//! off by some dozen pages a thread, since the kernel counts in batches; hugetlb pages are not in it.

use crate::host::Host;

/// Base pages; `None` where the host does not say.
pub fn resident_pages(host: &dyn Host) -> Option<u64> {
    let statm = host.read_text("/proc/self/statm").ok()?;
    statm.split_whitespace().nth(1)?.parse().ok()
}
