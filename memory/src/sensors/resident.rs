//! How much memory guests have come to use, in the read of some bytes and a call for each file behind their RAM: the
//! process's own pages (`/proc/self/statm`, proc_pid_statm(5)), and what the files hold (`stat(2)`). Not the pages of files that
//! are mapped: samples of accesses take these mappings away and the guest brings them back, with no memory more in use than
//! before. The first number may be off by some dozen pages a thread, since the kernel counts in batches; hugetlb pages are in
//! neither.

use wideleaf_policies::PageSize;

use crate::backing::BackingKind;
use crate::host::Host;
use crate::region::GuestRam;

/// All base pages a process has mapped, those of files too: for a process in which no sample unmaps any. `None` where the host does
/// not say.
pub fn resident_pages(host: &dyn Host) -> Option<u64> {
    let statm = host.read_text("/proc/self/statm").ok()?;
    statm.split_whitespace().nth(1)?.parse().ok()
}

/// Base pages; `None` where the host does not say.
pub fn pages_in_use<'a>(host: &dyn Host, rams: impl IntoIterator<Item = &'a GuestRam>) -> Option<u64> {
    let statm = host.read_text("/proc/self/statm").ok()?;
    let mut fields = statm.split_whitespace().map(str::parse::<u64>).skip(1);
    let (resident, of_files) = (fields.next()?.ok()?, fields.next()?.ok()?);
    let in_file = |ram: &GuestRam| ram.file_bytes().map(|bytes| bytes.pages(PageSize::Base4K)).ok();
    let memfds = rams.into_iter().filter(|ram| ram.backing().kind() == BackingKind::Memfd);
    Some(resident.saturating_sub(of_files) + memfds.map(in_file).sum::<Option<u64>>()?)
}
