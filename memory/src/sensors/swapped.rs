//! Pages of guest RAM that are swapped out, by window. A huge page takes all of its memory, so a collapse reads these
//! pages back from the swap device. khugepaged does that for at most `max_ptes_swap` pages of a window; `MADV_COLLAPSE`
//! does it for any number (mm/khugepaged.c). The manager keeps khugepaged's limit.
//!
//! ```text
//!   VmSwap = 0 (proc_pid_status(5)) ─▶ none, without a scan
//!   else PAGEMAP_SCAN once more: present or swapped, less those present ─▶ pages swapped out, by window
//! ```
//!
//! Swapped pages of shared memory are in no page table. They are none where the host's swap is empty, else unknown. A
//! page on its way to another frame counts as swapped for that moment, as in the kernel's own interface.

use std::io::ErrorKind;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use crate::backing::BackingKind;
use crate::host::{Host, HostError, PageRun};
use crate::proc_fields::bytes_of;
use crate::region::RamRange;
use crate::sensors::host_backing::WindowCursor;
use wideleaf_policies::{Bytes, PageSize};

/// khugepaged's limit where the kernel does not tell it: an eighth of a window (mm/khugepaged.c).
const MAX_PTES_SWAP: u16 = BASE_PAGES_PER_WINDOW / 8;

/// Largest number of swapped pages in a window that may be promoted: khugepaged's `max_ptes_swap`
/// (transhuge.rst).
pub fn max_swapped(host: &dyn Host) -> u16 {
    let setting = host.read_text("/sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_swap").ok();
    let limit = setting.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_PTES_SWAP);
    limit.min(BASE_PAGES_PER_WINDOW)
}

/// Swapped pages of a VM's RAM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Swapped {
    /// None of it is swapped out.
    #[default]
    Nothing,
    /// Number of swapped pages, by window in the order of the ranges.
    Pages(Vec<u16>),
    /// The kernel does not tell.
    Unknown,
}

impl Swapped {
    /// Number of swapped pages of the window in this row; zero where unknown.
    pub fn of_row(&self, row: usize) -> u16 {
        match self {
            Swapped::Pages(pages) => pages.get(row).copied().unwrap_or(0),
            Swapped::Nothing | Swapped::Unknown => 0,
        }
    }

    /// All of them in bytes; `None` where unknown.
    pub fn bytes(&self) -> Option<Bytes> {
        match self {
            Swapped::Nothing => Some(Bytes::ZERO),
            Swapped::Pages(pages) => {
                Some(PageSize::Base4K.bytes() * pages.iter().map(|pages| u64::from(*pages)).sum::<u64>())
            }
            Swapped::Unknown => None,
        }
    }
}

/// Looks for swapped pages in RAM of this kind. `resident`: pages that were just seen in each window.
///
/// # Errors
/// [`HostError`] if the process has ended or the scan fails.
pub fn swapped(
    host: &dyn Host,
    kind: BackingKind,
    ranges: &[RamRange],
    resident: &[u16],
) -> Result<Swapped, HostError> {
    match kind {
        BackingKind::Hugetlb => Ok(Swapped::Nothing),
        BackingKind::Memfd if is_swap_empty(host) => Ok(Swapped::Nothing),
        BackingKind::Memfd => Ok(Swapped::Unknown),
        BackingKind::Anon => match host.read_text("/proc/self/status").map(|text| bytes_of(&text, "VmSwap")) {
            Err(error) if error.source.kind() != ErrorKind::NotFound => Err(error),
            Err(_) | Ok(None) => Ok(Swapped::Unknown),
            Ok(Some(Bytes::ZERO)) => Ok(Swapped::Nothing),
            Ok(Some(_)) => scan(host, ranges, resident),
        },
    }
}

fn is_swap_empty(host: &dyn Host) -> bool {
    let memory = host.read_text("/proc/meminfo").unwrap_or_default();
    let [total, free] = ["SwapTotal", "SwapFree"].map(|name| bytes_of(&memory, name));
    total.is_some() && total == free
}

fn scan(host: &dyn Host, ranges: &[RamRange], resident: &[u16]) -> Result<Swapped, HostError> {
    let (mut pages, mut runs): (Vec<u16>, Vec<PageRun>) = (Vec::with_capacity(resident.len()), Vec::new());
    for range in ranges {
        runs.clear();
        host.scan_occupied(range.hva, range.gpa.bytes(), &mut runs)?;
        let mut cursor = WindowCursor::new(&runs);
        for window in range.gpa.windows() {
            let start = range.hva + (window.start() - range.gpa.start());
            let (occupied, _) = cursor.count(start.get(), PageSize::Huge2M.bytes().get());
            let occupied = (occupied / PageSize::Base4K.bytes().get()) as u16;
            pages.push(occupied.saturating_sub(resident.get(pages.len()).copied().unwrap_or(0)));
        }
    }
    Ok(if pages.iter().all(|pages| *pages == 0) { Swapped::Nothing } else { Swapped::Pages(pages) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange, Hva};

    fn range() -> RamRange {
        RamRange { gpa: GpaRange::new(Gpa::new(0), mib(6)).expect("fits"), hva: Hva::new(1 << 40) }
    }

    /// Three windows: one full, one with 9 pages of which the rest is swapped out in part, one swapped out whole.
    fn host(vm_swap_kib: u64) -> FakeHost {
        let host = FakeHost::default();
        host.make_present(range().hva, mib(2) + kib(36), false);
        host.swap_out(range().hva + mib(2) + kib(36), kib(40));
        host.swap_out(range().hva + mib(4), mib(2));
        host.set_text("/proc/self/status", &format!("VmSwap:\t{vm_swap_kib} kB\n"));
        host
    }

    fn look(host: &FakeHost, kind: BackingKind) -> Swapped {
        swapped(host, kind, &[range()], &[512, 9, 0]).expect("the fake answers")
    }

    #[test]
    fn swapped_pages_are_counted_by_window() {
        let seen = look(&host(2088), BackingKind::Anon);
        assert_eq!(seen, Swapped::Pages(vec![0, 10, 512]));
        assert_eq!((seen.of_row(1), seen.of_row(9), seen.bytes()), (10, 0, Some(kib(4) * 522)));
    }

    #[test]
    fn a_process_without_swapped_pages_is_not_scanned() {
        let host = host(0);
        let before = host.calls();
        assert_eq!(look(&host, BackingKind::Anon), Swapped::Nothing);
        assert_eq!(host.calls() - before, 1, "a look at its status");
        host.set_text("/proc/self/status", "Name: qemu\n");
        assert_eq!(look(&host, BackingKind::Anon).bytes(), None, "a kernel that does not tell");
    }

    #[test]
    fn swapped_pages_of_shared_memory_are_unknown_unless_the_hosts_swap_is_empty() {
        let host = host(4);
        for (meminfo, expected) in [
            ("SwapTotal:  8 kB\nSwapFree:  8 kB\n", Swapped::Nothing),
            ("SwapTotal:  8 kB\nSwapFree:  4 kB\n", Swapped::Unknown),
            ("", Swapped::Unknown),
        ] {
            host.set_text("/proc/meminfo", meminfo);
            assert_eq!(look(&host, BackingKind::Memfd), expected, "{meminfo}");
        }
        assert_eq!(look(&host, BackingKind::Hugetlb), Swapped::Nothing, "it is never swapped out");
    }

    #[test]
    fn the_limit_is_khugepageds() {
        let host = FakeHost::default();
        assert_eq!(max_swapped(&host), 64);
        let path = "/sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_swap";
        for (text, limit) in [("0\n", 0), ("511\n", 511), ("9999\n", 512), ("many\n", 64)] {
            host.set_text(path, text);
            assert_eq!(max_swapped(&host), limit, "{text}");
        }
    }
}
