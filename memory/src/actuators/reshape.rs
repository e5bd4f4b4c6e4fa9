//! The frame of what changes a window's page size in place by madvise(2): look, mark, ask, and look again. What the call
//! says is not believed: collapse also says yes to a range that it rounded away, and a split comes on the way of an advice.

use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, Bytes, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::host::{Advice, Host, HostError};
use crate::region::RamRange;
use crate::sensors::host_backing::window_backing;

/// Which way a window is changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reshape {
    /// Whether the window is to be huge afterwards; where it is so already nothing is done.
    pub to_huge: bool,
    /// Given to the whole window first, where the RAM is this process's: without it the kernel refuses, or khugepaged undoes what
    /// was done. Another process's is not marked by us, and has the marks its owner gave it.
    pub mark: Advice,
    /// What is asked for...
    pub ask: Advice,
    /// ...and for how much, from the begin of the window.
    pub over: Bytes,
    /// What becomes of pages that are absent.
    pub holes: Holes,
}

/// What becomes of pages that are absent from a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holes {
    /// They come into being, zero.
    Filled,
    /// They stay absent, and so the window as it is.
    Kept,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reshaped {
    pub result: OutcomeResult,
    /// Time of the call alone: nobody had to wait longer for the window.
    pub unavailable: Duration,
    /// Base pages present before, and, where it was done, afterwards.
    pub resident: [u16; 2],
}

impl Reshape {
    /// Changes one window of RAM that is not hugetlb.
    pub fn run(self, host: &dyn Host, range: RamRange, window: WindowIndex) -> Reshaped {
        let skipped = OutcomeResult::Skipped(Skip::AlreadyDone);
        let mut reshaped = Reshaped { result: skipped, unavailable: Duration::ZERO, resident: [0; 2] };
        reshaped.result = self.try_run(host, range, window, &mut reshaped).unwrap_or_else(|error| (&error).into());
        reshaped
    }

    fn try_run(
        self,
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
        if host.is_own() {
            host.advise(start, PageSize::Huge2M.bytes(), self.mark)?;
        }
        let began = host.now();
        let answer = host.advise(start, self.over, self.ask);
        reshaped.unavailable = host.now().since(began);
        answer?;
        let after = window_backing(host, range, None, window)?;
        if after.backing.is_large() != self.to_huge {
            return Ok(OutcomeResult::Refused(Refusal::NotObserved));
        }
        reshaped.resident = [before.resident, after.resident];
        Ok(OutcomeResult::Done)
    }
}
