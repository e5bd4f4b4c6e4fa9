//! A histogram of the duration of small batches of work, which shows how long a vCPU was kept waiting.
//!
//! Log-linear: sixteen buckets of equal width in every power of two, so a bucket is never wider than 1/16 of its
//! values.

use wideleaf_protocol::Message;

use crate::platform::ticks_to_ns;

/// Buckets per power of two. Sixteen bound the error of a percentile to 6.25 % and the histogram to 7.7 KiB, which fits
/// on a vCPU's 64 KiB stack.
const STEPS: usize = 16;
/// log2 of [`STEPS`].
const STEPS_LOG2: u32 = STEPS.ilog2();
/// Number of buckets: one for each value below [`STEPS`], and [`STEPS`] for every higher power of two up to 2^63.
const BUCKETS: usize = STEPS + (64 - STEPS_LOG2 as usize) * STEPS;
const _: () = assert!(STEPS.is_power_of_two(), "the bucket is found by shifting");

/// Counts of spans, in ticks. One per vCPU: recording is a plain addition.
#[derive(Clone)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    count: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// Creates an empty histogram.
    pub const fn new() -> Self {
        Self { counts: [0; BUCKETS], count: 0, max: 0 }
    }

    /// Counts one span.
    #[inline]
    pub fn record(&mut self, ticks: u64) {
        self.counts[bucket_of(ticks)] += 1;
        self.count += 1;
        self.max = self.max.max(ticks);
    }

    /// Number of spans counted.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The longest span, exact.
    pub const fn max(&self) -> u64 {
        self.max
    }

    /// Upper border of the first bucket at or below which at least `per_mille` thousandths of all spans lie, at
    /// most the longest span. 0 if nothing was counted.
    pub fn percentile(&self, per_mille: u64) -> u64 {
        let rank = (u128::from(self.count) * u128::from(per_mille)).div_ceil(1000) as u64;
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if *count > 0 && below >= rank {
                return highest_of(bucket).min(self.max);
            }
        }
        self.max
    }

    /// The reported percentiles, in ticks.
    pub fn summary(&self) -> Summary {
        Summary {
            count: self.count,
            p50: self.percentile(500),
            p99: self.percentile(990),
            p999: self.percentile(999),
            max: self.max,
        }
    }
}

/// Reported percentiles of a histogram; all but `count` in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of spans counted.
    pub count: u64,
    /// Median span, p50.
    pub p50: u64,
    /// 99th percentile, p99.
    pub p99: u64,
    /// 99.9th percentile, p99.9.
    pub p999: u64,
    /// The longest span.
    pub max: u64,
}

impl Summary {
    /// The line that reports it; `None` if the frequency of the counter is unknown, since ticks then have no length
    /// in nanoseconds.
    pub fn message(&self, vcpu: usize, tsc_hz: u64) -> Option<Message<'static>> {
        (tsc_hz != 0).then(|| Message::Gaps {
            vcpu: vcpu as u32,
            count: self.count,
            p50_ns: ticks_to_ns(self.p50, tsc_hz),
            p99_ns: ticks_to_ns(self.p99, tsc_hz),
            p999_ns: ticks_to_ns(self.p999, tsc_hz),
            max_ns: ticks_to_ns(self.max, tsc_hz),
        })
    }
}

fn bucket_of(ticks: u64) -> usize {
    if ticks < STEPS as u64 {
        return ticks as usize;
    }
    let shift = ticks.ilog2() - STEPS_LOG2;
    // The top bits of the value, STEPS to 2·STEPS − 1: one power of two higher is STEPS buckets further.
    (ticks >> shift) as usize + shift as usize * STEPS
}

/// Highest value of a bucket.
fn highest_of(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let shift = bucket / STEPS - 1;
    let top = (bucket % STEPS + STEPS) as u64;
    (top << shift) + ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket_and_no_bucket_is_wider_than_a_sixteenth() {
        let powers = (0..64).map(|shift| 1u64 << shift);
        for value in powers.flat_map(|power| [power - 1, power, power + power / 3]).chain([u64::MAX]) {
            let bucket = bucket_of(value);
            let highest = highest_of(bucket);
            let lowest = if bucket == 0 { 0 } else { highest_of(bucket - 1) + 1 };
            assert!((lowest..=highest).contains(&value), "{value} is not in {lowest}..={highest}");
            assert!(highest - lowest <= value / 16, "bucket {lowest}..={highest} is too wide");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_of_a_thousand_spans_with_one_long_gap() {
        let mut histogram = Histogram::new();
        (0..999).for_each(|_| histogram.record(10));
        histogram.record(123_456);
        assert_eq!((histogram.percentile(500), histogram.percentile(999)), (10, 10));
        assert_eq!((histogram.percentile(1000), histogram.max(), histogram.count()), (123_456, 123_456, 1000));
    }

    #[test]
    fn an_empty_histogram_has_only_zeros() {
        let histogram = Histogram::new();
        assert_eq!((histogram.percentile(500), histogram.max(), histogram.count()), (0, 0, 0));
    }
}
