//! Frame for changing a window's page size in place by madvise(2): scan, mark, ask, and scan again. The call's
//! answer is not trusted: collapse also succeeds for a range that it rounded away, and a split is only a side effect
//! of an advice.

use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, Bytes, Hva, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::host::{Advice, Host, HostError, beside_huge_pages};
use crate::region::RamRange;
use crate::sensors::host_backing::window_backing;

/// Parameters of a change of page size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reshape {
    /// Whether the window must be huge afterwards; nothing is done if it already is.
    pub to_huge: bool,
    /// Advice given to the whole window first, if the RAM is this process's. Without it the kernel refuses, or
    /// khugepaged undoes the change. RAM of another process is not marked and keeps its owner's marks.
    pub mark: Advice,
    /// Advice that changes the page size.
    pub ask: Advice,
    /// Number of bytes that `ask` covers, from the start of the window.
    pub over: Bytes,
    /// Treatment of absent pages.
    pub holes: Holes,
}

/// Treatment of pages that are absent from a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holes {
    /// They become present, filled with zeroes.
    Filled,
    /// They stay absent, and so the window stays as it is.
    Kept,
}

/// Result of a change of page size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reshaped {
    pub result: OutcomeResult,
    /// Time of the call alone: no thread waited longer for the window.
    pub unavailable: Duration,
    /// Base pages present before and, where it was done, afterwards. Before a change to a huge page, those that are
    /// swapped out count as well: they have contents.
    pub resident: [u16; 2],
}

/// Makes the given call to the kernel, with what has to be done before and after it.
pub(super) type AroundCall<'a> = &'a dyn Fn(&dyn Fn() -> Result<(), HostError>) -> Result<(), HostError>;

impl Reshape {
    /// Changes one window of RAM that is not hugetlb.
    pub fn run(self, host: &dyn Host, range: RamRange, window: WindowIndex) -> Reshaped {
        self.run_within(&|call| call(), host, range, window)
    }

    /// The same; `within` makes the call.
    pub fn run_within(self, within: AroundCall<'_>, host: &dyn Host, range: RamRange, window: WindowIndex) -> Reshaped {
        let skipped = OutcomeResult::Skipped(Skip::AlreadyDone);
        let mut reshaped = Reshaped { result: skipped, unavailable: Duration::ZERO, resident: [0; 2] };
        let result = self.try_run(within, host, range, window, &mut reshaped);
        reshaped.result = result.unwrap_or_else(|error| (&error).into());
        reshaped
    }

    fn try_run(
        self,
        within: AroundCall<'_>,
        host: &dyn Host,
        range: RamRange,
        window: WindowIndex,
        reshaped: &mut Reshaped,
    ) -> Result<OutcomeResult, HostError> {
        let before = window_backing(host, range, None, window)?;
        if before.backing == Backing::Unbacked {
            return Ok(OutcomeResult::Skipped(Skip::NotResident));
        }
        if before.backing.is_large() == self.to_huge {
            return Ok(OutcomeResult::Skipped(Skip::AlreadyDone));
        }
        if self.holes == Holes::Kept && before.resident < BASE_PAGES_PER_WINDOW {
            return Ok(OutcomeResult::Skipped(Skip::Hole));
        }
        let start = range.hva + (window.start() - range.gpa.start());
        if host.is_own()
            && let Err(error) = host.advise(start, PageSize::Huge2M.bytes(), self.mark)
        {
            return Ok(beside_huge_pages((&error).into())); // it may cut a mapping, and asks for no page
        }
        let mut occupied = before.resident;
        if self.to_huge {
            occupied = occupied_pages(host, start, before.resident);
            host.make_huge_page_ready(start);
        }
        let began = host.now();
        let answer = within(&|| host.advise(start, self.over, self.ask));
        reshaped.unavailable = host.now().since(began);
        answer?;
        let after = window_backing(host, range, None, window)?;
        if after.backing.is_large() != self.to_huge {
            return Ok(OutcomeResult::Refused(Refusal::NotObserved));
        }
        reshaped.resident = [occupied, after.resident];
        Ok(OutcomeResult::Done)
    }
}

/// Base pages of a window with contents, of which `resident` are present. The number is only for the figures, so a
/// failure of the scan stops nothing.
fn occupied_pages(host: &dyn Host, start: Hva, resident: u16) -> u16 {
    let mut runs = Vec::new();
    if resident == BASE_PAGES_PER_WINDOW || host.scan_occupied(start, PageSize::Huge2M.bytes(), &mut runs).is_err() {
        return resident;
    }
    runs.iter().map(|run| run.bytes.pages(PageSize::Base4K) as u16).sum()
}
