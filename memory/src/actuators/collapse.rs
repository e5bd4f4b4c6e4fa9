//! Collapse: 512 base pages of a window become one huge page, in place, while the guest runs (`MADV_COLLAPSE`, Linux
//! 6.1). The kernel copies 2 MiB; a vCPU that touches the window meanwhile waits, all others run on.

use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, Bytes, Cost, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::host::{Advice, Host};
use crate::region::RamRange;
use crate::sensors::host_backing::window_backing;

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
    let began_cpu = host.thread_cpu_time();
    let mut unavailable = Duration::ZERO;
    let mut bloat = Bytes::ZERO;
    let result = try_collapse(host, range, window, &mut unavailable, &mut bloat);
    let copied = if result == OutcomeResult::Done { PageSize::Huge2M.bytes() } else { Bytes::ZERO };
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    Collapse { result, cost: Cost { copied, cpu }, unavailable, bloat }
}

fn try_collapse(
    host: &dyn Host,
    range: RamRange,
    window: WindowIndex,
    unavailable: &mut Duration,
    bloat: &mut Bytes,
) -> OutcomeResult {
    let before = match window_backing(host, range, None, window) {
        Ok(before) => before,
        Err(error) => return (&error).into(),
    };
    match before.backing {
        Backing::Unbacked => return OutcomeResult::Skipped(Skip::NotResident),
        Backing::Huge2M | Backing::Giant1G => return OutcomeResult::Skipped(Skip::AlreadyDone),
        Backing::Base4K => {}
    }
    let start = range.hva + (window.start() - range.gpa.start());
    let bytes = PageSize::Huge2M.bytes();
    if let Err(error) = host.advise(start, bytes, Advice::HugePage) {
        return (&error).into();
    }
    let began = host.now();
    let answer = host.advise(start, bytes, Advice::Collapse);
    *unavailable = host.now().since(began);
    if let Err(error) = answer {
        return (&error).into();
    }
    match window_backing(host, range, None, window) {
        Err(error) => (&error).into(),
        Ok(after) if after.backing != Backing::Huge2M => OutcomeResult::Refused(Refusal::NotObserved),
        Ok(_) => {
            *bloat = PageSize::Base4K.bytes() * u64::from(BASE_PAGES_PER_WINDOW - before.resident);
            OutcomeResult::Done
        }
    }
}
