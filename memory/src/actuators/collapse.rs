//! Collapse: 512 base pages of a window become one huge page, in place, while the guest runs (`MADV_COLLAPSE`, Linux
//! 6.1). The kernel copies 2 MiB. A vCPU that touches the window during the copy waits; all others continue.
//! The kernel does not collapse a window if one of its pages has a reference beside its mappings, such as a
//! pin (`is_refcount_suitable`, mm/khugepaged.c).
//!
//! For shared memory see [`unmapped_collapse`](super::unmapped_collapse).

use std::time::Duration;

use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, WindowIndex};

use super::reshape::{AroundCall, Holes, Reshape, Reshaped};
use crate::host::{Advice, Host};
use crate::region::RamRange;

/// A collapse that was tried, or found unnecessary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collapse {
    /// Result of the collapse.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of all steps: scanning, advising, collapsing, scanning again.
    pub cost: Cost,
    /// Time of the collapsing call alone: no thread waited longer for the window.
    pub unavailable: Duration,
    /// Bytes that became resident only because the page is large.
    pub bloat: Bytes,
}

/// Collapses one window of RAM that is not hugetlb.
///
/// Scans first: `MADV_COLLAPSE` fills holes with zeroes and would undo a release, and a large window needs nothing.
/// Scans again afterwards: the call also succeeds for a range that it rounded away to nothing.
///
/// Lifts the window's mark `MADV_NOHUGEPAGE` first (set on RAM that starts with base pages): under it collapse
/// fails with `EINVAL`.
pub fn collapse_window(host: &dyn Host, range: RamRange, window: WindowIndex) -> Collapse {
    collapse(&|call| call(), host, range, window, Holes::Filled)
}

/// Like [`collapse_window`], but leaves a window with absent pages as it is. Pages that the guest gives back between
/// the scan and the collapse, within a tenth of a millisecond, come back.
pub fn collapse_full_window(host: &dyn Host, range: RamRange, window: WindowIndex) -> Collapse {
    collapse(&|call| call(), host, range, window, Holes::Kept)
}

/// Collapses one window; `within` makes the call to the kernel.
pub(super) fn collapse(
    within: AroundCall<'_>,
    host: &dyn Host,
    range: RamRange,
    window: WindowIndex,
    holes: Holes,
) -> Collapse {
    const OVER: Bytes = PageSize::Huge2M.bytes();
    let to_huge = Reshape { to_huge: true, mark: Advice::HugePage, ask: Advice::Collapse, over: OVER, holes };
    let began_cpu = host.thread_cpu_time();
    let Reshaped { result, unavailable, resident: [before, after] } = to_huge.run_within(within, host, range, window);
    let copied = if result == OutcomeResult::Done { PageSize::Huge2M.bytes() } else { Bytes::ZERO };
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    let bloat = PageSize::Base4K.bytes() * u64::from(after.saturating_sub(before));
    Collapse { result, cost: Cost { copied, cpu }, unavailable, bloat }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange, Hva, Refusal};

    fn window() -> RamRange {
        RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2)).expect("fits"), hva: Hva::new(1 << 40) }
    }

    #[test]
    fn only_the_collapse_itself_can_find_that_the_host_has_no_huge_page() {
        let found = [Advice::HugePage, Advice::Collapse].map(|advice| {
            let host = FakeHost::default();
            host.make_present(window().hva, mib(2), false);
            host.fail_advice(advice, libc::ENOMEM, 1);
            collapse_window(&host, window(), WindowIndex::new(0)).result
        });
        assert_eq!(found, [Refusal::Other(libc::ENOMEM), Refusal::NoHugePage].map(OutcomeResult::Refused));
    }

    #[test]
    fn pages_that_were_swapped_out_are_no_bloat() {
        let range = window();
        let host = FakeHost::default();
        host.make_present(range.hva, mib(1), false);
        host.swap_out(range.hva + mib(1), kib(768));
        let collapsed = collapse_window(&host, range, WindowIndex::new(0));
        assert_eq!((collapsed.result, collapsed.bloat), (OutcomeResult::Done, kib(256)));
    }
}
