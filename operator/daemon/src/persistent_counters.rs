//! Counters that survive a restart of the daemon: earlier counts plus present ones.

use std::collections::BTreeMap;

use wideleaf_control::view::{Quantiles, WorkView};

/// `now` as if it continued `before`.
pub fn continued(before: &WorkView, now: &WorkView) -> WorkView {
    WorkView {
        outcomes: outcomes(&before.outcomes, &now.outcomes),
        copied: before.copied.saturating_add(now.copied),
        bloat: before.bloat.saturating_add(now.bloat),
        action_cpu_s: before.action_cpu_s + now.action_cpu_s,
        total_cpu_s: before.total_cpu_s + now.total_cpu_s,
        budget_refusals: before.budget_refusals.saturating_add(now.budget_refusals),
        unavailable: quantiles(&before.unavailable, &now.unavailable),
        walk_share: now.walk_share,
        latest: now.latest.clone(),
        sensor_failures: counts(&before.sensor_failures, &now.sensor_failures),
        by_kernel: counts(&before.by_kernel, &now.by_kernel),
    }
}

/// The part of `work` to remember: totals. A daemon that starts has no use for recent values.
pub fn totals(work: &WorkView) -> WorkView {
    WorkView { walk_share: None, latest: Vec::new(), ..work.clone() }
}

/// Number of actions of any kind and outcome.
pub fn actions(work: &WorkView) -> u64 {
    work.outcomes.values().flat_map(BTreeMap::values).sum()
}

type Counts = BTreeMap<String, u64>;

fn counts(before: &Counts, now: &Counts) -> Counts {
    let mut sum = before.clone();
    for (name, count) in now {
        let total = sum.entry(name.clone()).or_default();
        *total = total.saturating_add(*count);
    }
    sum
}

fn outcomes(before: &BTreeMap<String, Counts>, now: &BTreeMap<String, Counts>) -> BTreeMap<String, Counts> {
    let mut sum = before.clone();
    for (mechanism, results) in now {
        let total = sum.entry(mechanism.clone()).or_default();
        *total = counts(total, results);
    }
    sum
}

/// Counts, sums and buckets add up. Quantiles do not: they are the present ones, or without any the earlier ones.
fn quantiles(before: &Quantiles, now: &Quantiles) -> Quantiles {
    let shown = if now.count == 0 { before } else { now };
    let at_most = (0..before.at_most.len().max(now.at_most.len()))
        .map(|bucket| {
            [before, now].iter().filter_map(|of| of.at_most.get(bucket)).fold(0, |sum: u64, n| sum.saturating_add(*n))
        })
        .collect();
    Quantiles {
        count: before.count.saturating_add(now.count),
        sum_s: before.sum_s + now.sum_s,
        median_s: shown.median_s,
        p99_s: shown.p99_s,
        max_s: before.max_s.max(now.max_s),
        at_most,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(done: u64, pauses: &[u64]) -> WorkView {
        let results = Counts::from([("done".to_owned(), done)]);
        WorkView {
            outcomes: BTreeMap::from([("collapse".to_owned(), results)]),
            copied: done << 21,
            unavailable: Quantiles {
                count: done,
                median_s: done as f64,
                at_most: pauses.to_vec(),
                ..Quantiles::default()
            },
            ..WorkView::default()
        }
    }

    #[test]
    fn counts_and_buckets_add_up_and_quantiles_are_the_latest() {
        let sum = continued(&work(2, &[1, 2]), &work(3, &[0, 3]));
        assert_eq!((actions(&sum), sum.copied, sum.unavailable.count), (5, 5 << 21, 5));
        assert_eq!((sum.unavailable.at_most, sum.unavailable.median_s), (vec![1, 5], 3.0));
        let idle = continued(&work(2, &[1, 2]), &WorkView::default());
        assert_eq!((idle.unavailable.at_most, idle.unavailable.median_s), (vec![1, 2], 2.0));
    }
}
