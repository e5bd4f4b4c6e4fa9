//! Collapse: 512 base pages of a window become one huge page, in place, while the guest runs (`MADV_COLLAPSE`, Linux
//! 6.1). The kernel copies 2 MiB; a vCPU that touches the window meanwhile waits, all others run on. It collapses no
//! window of which a page has a reference beside its mappings, a pin or any other (`is_refcount_suitable`,
//! mm/khugepaged.c).

use std::time::Duration;

use wideleaf_policies::{Bytes, Cost, OutcomeResult, PageSize, WindowIndex};

use super::reshape::{Holes, Reshape, Reshaped};
use crate::host::{Advice, Host};
use crate::region::RamRange;

/// A collapse that was tried, or found needless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collapse {
    /// What came of it.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of everything: looking, advising, collapsing, looking again.
    pub cost: Cost,
    /// Time of the collapsing call alone: nobody had to wait longer for the window.
    pub unavailable: Duration,
    /// What became resident only because the page is large.
    pub bloat: Bytes,
}

/// Collapses one window of RAM that is not hugetlb.
///
/// Looks first: `MADV_COLLAPSE` fills holes with zeroes and would undo a release, and what is large already needs
/// nothing. Looks again afterwards: the call's "yes" also covers a range it rounded away to nothing.
///
/// The window's mark `MADV_NOHUGEPAGE` (set on RAM that starts with base pages) is lifted first, since collapse
/// answers `EINVAL` under it.
pub fn collapse_window(host: &dyn Host, range: RamRange, window: WindowIndex) -> Collapse {
    collapse(host, range, window, Holes::Filled)
}

/// As [`collapse_window`], and a window from which pages are absent stays as it is. The guest may give pages back between that look
/// and the collapse, a tenth of a millisecond: these come back.
pub fn collapse_full_window(host: &dyn Host, range: RamRange, window: WindowIndex) -> Collapse {
    collapse(host, range, window, Holes::Kept)
}

fn collapse(host: &dyn Host, range: RamRange, window: WindowIndex, holes: Holes) -> Collapse {
    const OVER: Bytes = PageSize::Huge2M.bytes();
    let to_huge = Reshape { to_huge: true, mark: Advice::HugePage, ask: Advice::Collapse, over: OVER, holes };
    let began_cpu = host.thread_cpu_time();
    let Reshaped { result, unavailable, resident: [before, after] } = to_huge.run(host, range, window);
    let copied = if result == OutcomeResult::Done { PageSize::Huge2M.bytes() } else { Bytes::ZERO };
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    let bloat = PageSize::Base4K.bytes() * u64::from(after.saturating_sub(before));
    Collapse { result, cost: Cost { copied, cpu }, unavailable, bloat }
}
