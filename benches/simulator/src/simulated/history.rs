//! The course of coverage, bloat and misses, in bounded memory: when it gets long, every other sample is dropped.

use alloc::vec::Vec;

use wideleaf_policies::units::{Bytes, Moment, PerTenThousand};

/// The host at one moment; misses and accesses are totals since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistorySample {
    /// Time of the sample.
    pub at: Moment,
    /// Number of accesses so far.
    pub accesses: u64,
    /// Number of TLB misses so far.
    pub misses: u64,
    /// Guest memory that is present.
    pub resident: Bytes,
    /// Present memory in pages of 2 MiB or more.
    pub large: Bytes,
    /// Present memory that the guest has touched, counted by base pages.
    pub touched: Bytes,
    /// Reserved memory that is not populated.
    pub reserved: Bytes,
}

impl HistorySample {
    /// Share of present memory in large pages: `host_coverage_2m`.
    pub fn coverage(&self) -> PerTenThousand {
        PerTenThousand::of(self.large.get(), self.resident.get())
    }

    /// Usage bloat: memory that is resident only because pages are large.
    pub fn bloat(&self) -> Bytes {
        self.resident.saturating_sub(self.touched)
    }
}

/// Samples at even distances, except for the last.
#[derive(Clone, Debug)]
pub struct History {
    samples: Vec<HistorySample>,
    /// One sample in `stride` is kept.
    stride: u64,
    seen: u64,
}

/// Largest number of samples: more than a plot has columns.
const SAMPLES_MAX: usize = 2048;

impl Default for History {
    fn default() -> History {
        History { samples: Vec::new(), stride: 1, seen: 0 }
    }
}

impl History {
    /// Samples, oldest first.
    pub fn samples(&self) -> &[HistorySample] {
        &self.samples
    }

    pub(super) fn push(&mut self, sample: HistorySample) {
        if self.seen.is_multiple_of(self.stride) {
            if self.samples.len() == SAMPLES_MAX {
                self.thin_out();
            }
            // The sample's number is still even: the half that stays begins with the first.
            self.samples.push(sample);
        }
        self.seen += 1;
    }

    /// Adds the end of the run, whatever the stride.
    pub(super) fn push_last(&mut self, sample: HistorySample) {
        if self.samples.last() != Some(&sample) {
            self.samples.push(sample);
        }
    }

    fn thin_out(&mut self) {
        let mut number = 0;
        self.samples.retain(|_| {
            number += 1;
            number % 2 == 1
        });
        self.stride *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    fn sample(ms: u64) -> HistorySample {
        let at = Moment::after_start(Duration::from_millis(ms));
        let [resident, large, touched, reserved] = [Bytes::ZERO; 4];
        HistorySample { at, accesses: ms, misses: 0, resident, large, touched, reserved }
    }

    #[test]
    fn a_long_history_keeps_evenly_spaced_samples_and_the_end() {
        let mut history = History::default();
        (0..10_000).for_each(|ms| history.push(sample(ms)));
        history.push_last(sample(10_000));
        let at: alloc::vec::Vec<u64> = history.samples().iter().map(|sample| sample.accesses).collect();
        // 2048 of 2048, 1024 of them, 2048 of 4096, and so on: one of 8
        assert_eq!(at[..3], [0, 8, 16]);
        assert_eq!(at[at.len() - 2..], [9992, 10_000]);
        assert_eq!(at.len(), 1251);
    }
}
