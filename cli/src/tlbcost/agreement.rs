//! Agreement of TLB miss measurements: three runs in a row, each in its own process, must give the same result. The
//! rule is that of Calibrator under libhugetlbfs' `tlbmiss_cost.sh`, which repeats until a figure has matched three
//! times ("Huge pages part 5: a deeper look at TLBs and costs", LWN 2010); here entries must match as well.
//!
//! ```text
//!   runs     72│31   72│29   64│31   72│31   72│30   72│31          entries│ticks of a miss
//!                                    └───────┴──────┴── three that agree: their medians, lowest and highest
//!   ten runs and no such three: "did not agree", and no figure
//! ```

use serde::Serialize;

/// A level of the TLB, as one run found it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Most pages that it holds.
    pub entries: u64,
    /// Extra time of a load that misses there, in TSC ticks.
    pub miss_ticks: f64,
}

/// Number of TLB levels of CPUs. Further levels are caches that the page tables have outgrown, which vary with the
/// machine's load.
pub const TLB_LEVELS: usize = 2;

/// Number of runs in a row that must agree.
pub const MATCHES: usize = 3;

/// Number of runs after which a measurement gives up: three times the need of a quiet machine.
pub const RUNS_MAX: usize = 10;

/// Largest ratio of entries: an eighth separates two footprints of the chase, which limits the resolution.
const ENTRIES_APART: u64 = 8;

/// Difference that two runs may have, in ticks and as a part of the cost. Two ticks are twice the chase's
/// resolution; beyond that, shared caches change a walk by a tenth.
const TICKS_APART: f64 = 2.0;
const PART_APART: f64 = 0.1;

/// Whether two runs agree on the TLB itself.
pub fn agree(one: &[Level], other: &[Level]) -> bool {
    let (one, other) = (tlb(one), tlb(other));
    let is_near = |(one, other): (&Level, &Level)| {
        let (less, more) = (one.entries.min(other.entries), one.entries.max(other.entries));
        let apart = (one.miss_ticks - other.miss_ticks).abs();
        (more - less) * ENTRIES_APART <= more
            && apart <= TICKS_APART.max(PART_APART * one.miss_ticks.max(other.miss_ticks))
    };
    one.len() == other.len() && one.iter().zip(other).all(is_near)
}

fn tlb(levels: &[Level]) -> &[Level] {
    &levels[..levels.len().min(TLB_LEVELS)]
}

/// The last runs, if all of them agree with each other and found a level.
pub fn agreed(runs: &[Vec<Level>]) -> Option<&[Vec<Level>]> {
    let last = &runs[runs.len().checked_sub(MATCHES)?..];
    let all_agree = last.iter().all(|one| !one.is_empty() && last.iter().all(|other| agree(one, other)));
    all_agree.then_some(last)
}

/// Whether the last runs agree that the footprint shows no level: the TLB reaches further, or a miss costs too
/// little to be visible.
pub fn shows_no_level(runs: &[Vec<Level>]) -> bool {
    runs.len() >= MATCHES && runs[runs.len() - MATCHES..].iter().all(Vec::is_empty)
}

/// A figure of runs that agree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Median of the runs.
    pub median: f64,
    /// Lowest value of the runs.
    pub lowest: f64,
    /// Highest value of the runs.
    pub highest: f64,
}

impl Spread {
    /// Spread of some values.
    ///
    /// # Panics
    /// If there are no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Spread { median: values[values.len() / 2], lowest: values[0], highest: values[values.len() - 1] }
    }

    /// The same spread in another unit.
    pub fn times(self, factor: f64) -> Spread {
        Spread { median: self.median * factor, lowest: self.lowest * factor, highest: self.highest * factor }
    }
}

/// Entries (the median's) and ticks of each level of the TLB, of runs that agree.
pub fn levels(runs: &[Vec<Level>]) -> Vec<(u64, Spread)> {
    let count = runs.first().map_or(0, |run| tlb(run).len());
    let level = |index: usize| {
        let entries = Spread::of(runs.iter().map(|run| run[index].entries as f64)).median;
        (entries as u64, Spread::of(runs.iter().map(|run| run[index].miss_ticks)))
    };
    (0..count).map(level).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(levels: &[(u64, f64)]) -> Vec<Level> {
        levels.iter().map(|(entries, miss_ticks)| Level { entries: *entries, miss_ticks: *miss_ticks }).collect()
    }

    #[test]
    fn runs_agree_within_a_footprint_and_two_ticks_or_a_tenth() {
        let base = run(&[(72, 5.0), (3072, 26.0)]);
        assert!(agree(&base, &run(&[(64, 6.9), (3328, 28.5)])));
        assert!(!agree(&base, &run(&[(56, 5.0), (3072, 26.0)])), "two footprints apart");
        assert!(!agree(&base, &run(&[(72, 7.1), (3072, 26.0)])), "more than two ticks");
        assert!(!agree(&base, &run(&[(72, 5.0), (3072, 29.0)])), "more than a tenth");
        assert!(!agree(&base, &run(&[(72, 5.0)])), "a level is missing");
    }

    #[test]
    fn caches_of_page_tables_are_not_levels_of_the_tlb() {
        let tables_in_cache = run(&[(72, 5.0), (3072, 26.0)]);
        assert!(agree(&tables_in_cache, &run(&[(72, 5.0), (3072, 26.0), (8192, 16.0)])));
    }

    #[test]
    fn three_in_a_row_have_to_agree_with_each_other() {
        let ticks = |ticks: &[f64]| ticks.iter().map(|ticks| run(&[(72, *ticks)])).collect::<Vec<_>>();
        assert_eq!(agreed(&ticks(&[5.0, 5.0])), None);
        assert!(agreed(&ticks(&[5.0, 5.0, 5.0])).is_some());
        assert_eq!(agreed(&ticks(&[5.0, 5.0, 9.0])), None);
        assert!(agreed(&ticks(&[5.0, 9.0, 5.0, 5.5, 6.0])).is_some());
        // Each agrees with the next, but the first and the last do not: a drift is not an agreement.
        assert_eq!(agreed(&ticks(&[5.0, 6.5, 8.0])), None);
    }

    #[test]
    fn three_that_find_no_level_agree_on_that_and_on_no_figure() {
        let (none, some) = (Vec::new, || run(&[(72, 5.0)]));
        assert_eq!(agreed(&[none(), none(), none()]), None);
        assert!(shows_no_level(&[some(), none(), none(), none()]));
        assert!(!shows_no_level(&[none(), none()]));
        assert!(!shows_no_level(&[none(), none(), some()]));
    }

    #[test]
    fn the_samples_of_the_article_agree_as_it_says() {
        // lwn_calibrator.csv, Athlon 64 3000+: 16 19 19 19 34 34 37 37 36 37 cycles, and 37 is its result.
        let samples: Vec<_> = [16.0, 34.0, 37.0, 37.0, 36.0].iter().map(|ticks| run(&[(512, *ticks)])).collect();
        assert_eq!(agreed(&samples[..3]), None);
        let found = levels(agreed(&samples).expect("37, 37 and 36 are within a tenth"));
        assert_eq!(found, [(512, Spread { median: 37.0, lowest: 36.0, highest: 37.0 })]);
    }
}
