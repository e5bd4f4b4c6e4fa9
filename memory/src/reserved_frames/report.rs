//! Counters of the service that maps reserved frames.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use wideleaf_policies::Bytes;
use wideleaf_policies::reservations::AGE_GROUPS;

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
    /// Number of large windows that got base pages again because their guest gave back a part of them. With
    /// `promoted`, all changes of size: the difference is large now.
    pub demoted: u64,
    /// Number of reservations that failed because the host had no huge page (in FreeBSD's counters: `p_failures`).
    pub p_failures: u64,
    /// Number of reservations that ended because the guest gave back all pages that it had used.
    pub ended: u64,
    /// Bytes given back because the guest gave back pages, by the file's own count.
    pub freed_for_guest: Bytes,
    /// Number of partly populated reservations now, by the time since their last change
    /// ([`wideleaf_policies::reservations::PARTIAL_AGES_S`]), as of the last check of the host.
    pub partial_by_age: [u64; AGE_GROUPS],
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
            demoted: 0,
            p_failures: 0,
            ended: 0,
            freed_for_guest: Bytes::ZERO,
            partial_by_age: [0; AGE_GROUPS],
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
    /// The counters that only rise and say what became of reservations, by their names.
    pub fn changes(&self) -> [(&'static str, u64); 6] {
        [
            ("reserved", self.reserved),
            ("promoted", self.promoted),
            ("demoted", self.demoted),
            ("p_failures", self.p_failures),
            ("ended", self.ended),
            ("broken", self.broken),
        ]
    }

    /// Every non-zero counter, by its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let [younger_1s, younger_10s, younger_60s, older] = self.partial_by_age;
        let counters = [
            ("populated", self.populated),
            ("by_collapse", self.by_collapse),
            ("freed_for_guest_bytes", self.freed_for_guest.get()),
            ("partial_below_1s", younger_1s),
            ("partial_below_10s", younger_10s),
            ("partial_below_60s", younger_60s),
            ("partial_from_60s", older),
            ("given_back_bytes", self.given_back.get()),
            ("unpopulated_bytes", self.unpopulated.get()),
            ("unpopulated_bytes_at_most", self.unpopulated_at_most.get()),
            ("backed_before", self.backed_before),
            ("touched_again", self.touched_again),
            ("kept_pages", self.kept_pages),
            ("gave_up", u64::from(self.gave_up.is_some())),
        ];
        self.changes()
            .into_iter()
            .chain(counters)
            .chain(self.refused.iter().map(|(name, n)| (*name, *n)))
            .filter(|(_, n)| *n > 0)
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
