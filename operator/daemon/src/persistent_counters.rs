//! Counters that survive a restart of the daemon: earlier counts plus present ones.

use std::collections::BTreeMap;

use wideleaf_control::view::{Quantiles, RecoveriesView, WorkView};

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
        is_recovering: now.is_recovering,
        recoveries: recoveries(&before.recoveries, &now.recoveries),
        // Of registered runs, which count on by themselves.
        saves: now.saves.clone(),
    }
}

/// The part of `work` to remember: totals. A daemon that starts has no use for recent values.
pub fn totals(work: &WorkView) -> WorkView {
    WorkView { walk_share: None, latest: Vec::new(), is_recovering: false, ..work.clone() }
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

type Recoveries = BTreeMap<String, RecoveriesView>;

fn recoveries(before: &Recoveries, now: &Recoveries) -> Recoveries {
    let mut sum = before.clone();
    for (cause, now) in now {
        let total = sum.entry(cause.clone()).or_default();
        *total = RecoveriesView {
            done: total.done.saturating_add(now.done),
            cut_off: total.cut_off.saturating_add(now.cut_off),
            last_s: now.last_s.or(total.last_s),
            sum_s: total.sum_s + now.sum_s,
            max_s: total.max_s.max(now.max_s),
        };
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
    fn recoveries_add_up_by_event_and_the_latest_time_is_kept() {
        let once = |cause: &str, last_s: Option<f64>, seconds| {
            let of = RecoveriesView { done: 1, cut_off: 2, last_s, sum_s: seconds, max_s: seconds };
            WorkView { is_recovering: true, recoveries: BTreeMap::from([(cause.to_owned(), of)]), ..work(0, &[]) }
        };
        let sum = continued(&once("balloon", Some(2.0), 2.0), &once("balloon", None, 1.0));
        let expected = RecoveriesView { done: 2, cut_off: 4, last_s: Some(2.0), sum_s: 3.0, max_s: 2.0 };
        assert_eq!(sum.recoveries["balloon"], expected);
        assert_eq!(continued(&sum, &once("stop", None, 0.0)).recoveries.len(), 2);
        assert!(sum.is_recovering && !totals(&sum).is_recovering);
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
