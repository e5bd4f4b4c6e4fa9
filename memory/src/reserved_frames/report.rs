//! Counters of the service that maps reserved frames.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use wideleaf_policies::Bytes;

use crate::faults::{ServiceReport, answer_times};

/// Counters of the service.
#[derive(Clone)]
pub struct ReservedFramesReport {
    /// Number of windows with frames reserved.
    pub reserved: u64,
    /// Number of pages mapped from reserved frames.
    pub populated: u64,
    /// Number of windows that became large, and were seen to be.
    pub promoted: u64,
    /// Number of those for which a collapse was needed after the next fault. It copies if the frames
    /// are not contiguous.
    pub by_collapse: u64,
    /// Number of reservations that were broken because the host was short.
    pub broken: u64,
    /// Bytes given back by that, by the file's own count.
    pub given_back: Bytes,
    /// Reserved bytes without data now: in use for the host, resident in no window. Bytes that could not be given
    /// back are counted as of that time, though the guest may use them by now.
    pub unpopulated: Bytes,
    /// Maximum of `unpopulated` at any time, in bytes.
    pub unpopulated_at_most: Bytes,
    /// Number of windows without a reservation, since they had pages before their first touch was seen.
    pub backed_before: u64,
    /// Number of attempts that failed, by the obstacle.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of touches of a page that was mapped, or of a window that was let go, before they were read.
    pub touched_again: u64,
    /// Number of pages allocated one by one because their window could not be let go.
    pub kept_pages: u64,
    /// Additional wait of a touch, from reading its message to the answer, in nanoseconds.
    pub answer_ns: Histogram<u64>,
    /// Reason for an early end of the service, if any.
    pub gave_up: Option<String>,
}

impl Default for ReservedFramesReport {
    fn default() -> ReservedFramesReport {
        ReservedFramesReport {
            reserved: 0,
            populated: 0,
            promoted: 0,
            by_collapse: 0,
            broken: 0,
            given_back: Bytes::ZERO,
            unpopulated: Bytes::ZERO,
            unpopulated_at_most: Bytes::ZERO,
            backed_before: 0,
            refused: BTreeMap::new(),
            touched_again: 0,
            kept_pages: 0,
            answer_ns: answer_times(),
            gave_up: None,
        }
    }
}

impl ReservedFramesReport {
    /// Every non-zero counter, by its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = [
            ("reserved", self.reserved),
            ("populated", self.populated),
            ("promoted", self.promoted),
            ("by_collapse", self.by_collapse),
            ("broken", self.broken),
            ("given_back_bytes", self.given_back.get()),
            ("unpopulated_bytes", self.unpopulated.get()),
            ("unpopulated_bytes_at_most", self.unpopulated_at_most.get()),
            ("backed_before", self.backed_before),
            ("touched_again", self.touched_again),
            ("kept_pages", self.kept_pages),
            ("gave_up", u64::from(self.gave_up.is_some())),
        ];
        counters.into_iter().chain(self.refused.iter().map(|(name, n)| (*name, *n))).filter(|(_, n)| *n > 0)
    }
}

impl fmt::Debug for ReservedFramesReport {
    /// Shows the counters by name; the histogram alone would be pages of zeroes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_name()).finish()
    }
}

impl ServiceReport for ReservedFramesReport {
    fn answer_ns(&mut self) -> &mut Histogram<u64> {
        &mut self.answer_ns
    }

    fn gave_up(&mut self) -> &mut Option<String> {
        &mut self.gave_up
    }
}
