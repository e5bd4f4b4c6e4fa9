//! Counters of a restore, and the windows that were touched first.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use wideleaf_policies::{Bytes, Moment, WindowIndex};

use crate::faults::answer_times;

/// A window that cannot be filled. Threads that touch it wait until the VM ends: they never see other bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot restore {window}: {why}")]
pub struct FillFailure {
    /// Window without its contents.
    pub window: WindowIndex,
    /// Reason and remedy; names the file if the file is at fault.
    pub why: String,
}

/// Progress of a restore, cheap to read at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of windows with stored pages.
    pub stored_windows: u64,
    /// Number of these that have their contents.
    pub filled_windows: u64,
    /// Number of these that cannot be filled.
    pub failed_windows: u64,
    /// Size of the stored pages, in bytes.
    pub stored_bytes: Bytes,
    /// Size of the stored pages of filled windows, in bytes.
    pub filled_bytes: Bytes,
}

/// Counters of a restore.
#[derive(Clone)]
pub struct RestoreReport {
    /// Windows and bytes, stored and filled.
    pub progress: Progress,
    /// Time that [`super::Restorer::start`] took: the guest may run from then on.
    pub start: Duration,
    /// Number of stretches of RAM that were registered at the start.
    pub stretches: u64,
    /// Number of registered windows of which nothing is stored.
    pub zero_windows: u64,
    /// Number of windows filled because a thread waited for them.
    pub by_fault: u64,
    /// Number of windows filled by the background.
    pub by_background: u64,
    /// Number of filled windows that were put on one huge page.
    pub huge: u64,
    /// Number of filled windows that were put on base pages, as intended.
    pub base: u64,
    /// Number of filled windows that were to be huge and got base pages: no huge page was to be had, or its page table
    /// stayed.
    pub not_huge: u64,
    /// Number of these for which the host had no huge page.
    pub no_huge_page: u64,
    /// Number of windows that were not huge at first and that a collapse made huge afterwards.
    pub collapsed: u64,
    /// Number of filled windows that stayed registered until the end, because mappings run short.
    pub kept: u64,
    /// Number of pages that were copied alone, because a thread waited for them.
    pub pages_alone: u64,
    /// Number of pages answered one by one with zeroes.
    pub zero_pages: u64,
    /// Number of touches of a window that another thread was filling.
    pub waited: u64,
    /// Number of touches that were read after their window was let go.
    pub touched_again: u64,
    /// Number of calls of the kernel for a window that were refused and replaced by another way or repeated.
    pub refused: u64,
    /// Time from reading the message of a touch to waking its thread, in nanoseconds, also where another thread was
    /// filling the window. The time before the message is read is not known.
    pub fault_ns: Histogram<u64>,
    /// Time from the start until every stored window was filled or had failed.
    pub all_filled: Option<Duration>,
    /// Windows that cannot be filled, in the order in which that was found.
    pub failures: Vec<FillFailure>,
    /// Serving threads that panicked or did not come back from a read, with what they were doing.
    pub lost_threads: Vec<String>,
}

impl Default for RestoreReport {
    fn default() -> RestoreReport {
        RestoreReport {
            progress: Progress::default(),
            start: Duration::ZERO,
            stretches: 0,
            zero_windows: 0,
            by_fault: 0,
            by_background: 0,
            huge: 0,
            base: 0,
            not_huge: 0,
            no_huge_page: 0,
            collapsed: 0,
            kept: 0,
            pages_alone: 0,
            zero_pages: 0,
            waited: 0,
            touched_again: 0,
            refused: 0,
            fault_ns: answer_times(),
            all_filled: None,
            failures: Vec::new(),
            lost_threads: Vec::new(),
        }
    }
}

impl RestoreReport {
    /// Number of windows on one huge page, as they were filled or by a collapse afterwards.
    pub fn huge_now(&self) -> u64 {
        self.huge + self.collapsed
    }

    /// Number of windows that were to be huge and are not.
    pub fn not_huge_now(&self) -> u64 {
        self.not_huge.saturating_sub(self.collapsed)
    }

    /// Every non-zero counter, by its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = [
            ("stored_windows", self.progress.stored_windows),
            ("filled_windows", self.progress.filled_windows),
            ("failed_windows", self.progress.failed_windows),
            ("stored_bytes", self.progress.stored_bytes.get()),
            ("filled_bytes", self.progress.filled_bytes.get()),
            ("stretches", self.stretches),
            ("zero_windows", self.zero_windows),
            ("by_fault", self.by_fault),
            ("by_background", self.by_background),
            ("huge", self.huge),
            ("base", self.base),
            ("not_huge", self.not_huge),
            ("no_huge_page", self.no_huge_page),
            ("collapsed", self.collapsed),
            ("kept", self.kept),
            ("pages_alone", self.pages_alone),
            ("zero_pages", self.zero_pages),
            ("waited", self.waited),
            ("touched_again", self.touched_again),
            ("refused", self.refused),
            ("lost_threads", self.lost_threads.len() as u64),
        ];
        counters.into_iter().filter(|(_, number)| *number > 0)
    }
}

impl fmt::Debug for RestoreReport {
    /// Shows the counters by name; the histogram alone would be pages of zeroes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_name()).finish()?;
        write!(f, " {:?} {:?}", self.failures, self.lost_threads)
    }
}

/// Windows in the order of their first touches, as far as a thread had to wait for them.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstTouches {
    seen: BTreeSet<WindowIndex>,
    /// Windows, the one touched first in front.
    pub order: Vec<WindowIndex>,
    /// Moment of the latest first touch.
    pub latest: Moment,
}

impl FirstTouches {
    /// Records a touch.
    pub(super) fn touched(&mut self, window: WindowIndex, at: Moment) {
        if self.seen.insert(window) {
            self.order.push(window);
            self.latest = at;
        }
    }
}
