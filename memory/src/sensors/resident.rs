//! Amount of memory that guests have come to use, for the cost of reading some bytes and a call for each file behind
//! their RAM: the process's own pages (`/proc/self/statm`, proc_pid_statm(5)), and the contents of the files
//! (`stat(2)`). Mapped pages of files do not count: access samples remove these mappings and the guest restores them,
//! without using more memory. The first number may be off by some dozen pages a thread, since the kernel counts in
//! batches; hugetlb pages are in neither.

use wideleaf_policies::PageSize;

use crate::backing::BackingKind;
use crate::host::Host;
use crate::region::GuestRam;

/// All base pages that a process has mapped, also those of files: for a process without samples that unmap pages.
/// `None` if the host does not report it.
pub fn resident_pages(host: &dyn Host) -> Option<u64> {
    let statm = host.read_text("/proc/self/statm").ok()?;
    statm.split_whitespace().nth(1)?.parse().ok()
}

/// Base pages in use; `None` if the host does not report them.
pub fn pages_in_use<'a>(host: &dyn Host, rams: impl IntoIterator<Item = &'a GuestRam>) -> Option<u64> {
    let statm = host.read_text("/proc/self/statm").ok()?;
    let mut fields = statm.split_whitespace().map(str::parse::<u64>).skip(1);
    let (resident, of_files) = (fields.next()?.ok()?, fields.next()?.ok()?);
    let in_file = |ram: &GuestRam| ram.file_bytes().map(|bytes| bytes.pages(PageSize::Base4K)).ok();
    let memfds = rams.into_iter().filter(|ram| ram.backing().kind() == BackingKind::Memfd);
    Some(resident.saturating_sub(of_files) + memfds.map(in_file).sum::<Option<u64>>()?)
}
