//! Split: the huge page of a window becomes base pages, in place and without a copy. `MADV_COLD` on one base page of
//! a THP makes the kernel split it (mm/madvise.c), which needs no privilege. It takes 0.2 ms, and a vCPU that touches
//! the window waits at most that long. Collapse is the way back.
//!
//! Base pages that hold only zeroes are gone afterwards: since Linux 6.12 the kernel maps the shared zero page in
//! their place when it splits (mm/huge_memory.c, `RMP_USE_SHARED_ZEROPAGE`), and the next write gets a fresh page. So
//! a split is a release too, and reports the freed bytes. A huge page with a reference beside its mappings, such as a
//! pin, is not split (`can_split_folio`) and keeps its zero pages.

use std::time::Duration;

use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, Skip, WindowIndex};

use super::reshape::{Holes, Reshape, Reshaped};
use crate::backing::BackingKind;
use crate::host::{Advice, Host};
use crate::region::RamRange;

/// A split that was tried, or found unnecessary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Result of the split.
    pub result: OutcomeResult,
    /// CPU time of all steps; a split copies nothing.
    pub cost: Cost,
    /// Time of the splitting call: no thread waited longer for the window.
    pub unavailable: Duration,
    /// Bytes of zero pages that the kernel gave back during the split.
    pub freed: Bytes,
}

/// Splits the huge page of one window of RAM of this kind.
///
/// Only for anonymous RAM: a hugetlb page cannot be split. The kernel drops a memfd's page tables instead of
/// splitting them, so that no result can be seen until the guest touches the memory again.
///
/// Marks the window `MADV_NOHUGEPAGE` first, or khugepaged might undo the split. The mark stays if the kernel then
/// refuses: the page stays huge until a later split, and collapse lifts the mark.
pub fn split_window(host: &dyn Host, kind: BackingKind, range: RamRange, window: WindowIndex) -> Split {
    const SPLIT: Reshape = Reshape {
        to_huge: false,
        mark: Advice::NoHugePage,
        ask: Advice::Cold,
        over: PageSize::Base4K.bytes(),
        holes: Holes::Filled, // a huge page has none
    };
    if kind != BackingKind::Anon {
        let result = OutcomeResult::Skipped(Skip::NoMechanism);
        return Split { result, cost: Cost::default(), unavailable: Duration::ZERO, freed: Bytes::ZERO };
    }
    let began_cpu = host.thread_cpu_time();
    let Reshaped { result, unavailable, resident: [before, after] } = SPLIT.run(host, range, window);
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    let freed = PageSize::Base4K.bytes() * u64::from(before.saturating_sub(after));
    Split { result, cost: Cost { cpu, ..Cost::default() }, unavailable, freed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, Hva, Refusal};

    const WINDOW: WindowIndex = WindowIndex::new(1);

    fn range() -> RamRange {
        RamRange { gpa: GpaRange::new(Gpa::new(0), mib(4)).expect("fits"), hva: Hva::new(1 << 40) }
    }

    fn host_with_a_huge_page() -> FakeHost {
        let host = FakeHost::default();
        host.make_present(range().hva, mib(4), true);
        host
    }

    fn split(host: &FakeHost) -> OutcomeResult {
        split_window(host, BackingKind::Anon, range(), WINDOW).result
    }

    #[test]
    fn a_huge_page_is_split_and_its_neighbour_stays_whole() {
        let host = host_with_a_huge_page();
        assert_eq!(split(&host), OutcomeResult::Done);
        assert_eq!(host.huge_windows(), 1);
        assert_eq!(split(&host), OutcomeResult::Skipped(Skip::AlreadyDone));
    }

    #[test]
    fn a_hole_and_ram_that_has_no_such_mechanism_are_left_alone() {
        let host = FakeHost::default();
        assert_eq!(split(&host), OutcomeResult::Skipped(Skip::NotResident));
        let calls = host.calls();
        for kind in [BackingKind::Hugetlb, BackingKind::Memfd] {
            let result = split_window(&host, kind, range(), WINDOW).result;
            assert_eq!(result, OutcomeResult::Skipped(Skip::NoMechanism));
        }
        assert_eq!(host.calls(), calls, "the kernel is not asked");
    }

    #[test]
    fn a_split_that_the_kernel_only_claims_is_detected() {
        let host = host_with_a_huge_page();
        host.cold_does_nothing(true);
        assert_eq!(split(&host), OutcomeResult::Refused(Refusal::NotObserved));
    }

    #[test]
    fn each_call_that_fails_is_a_refusal() {
        // look, mark, split, look again
        for call in 0..4 {
            let host = host_with_a_huge_page();
            host.fail_call(call, libc::EBUSY);
            assert_eq!(split(&host), OutcomeResult::Refused(Refusal::Busy), "call {call}");
        }
    }
}
