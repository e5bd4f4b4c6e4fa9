//! Work of the managers of a guest. A change of policy ends one manager and begins another, and
//! the counters continue.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use wideleaf_control::view::{ActionView, PAUSE_BOUNDS_S, Quantiles, RecoveriesView, WorkView};
use wideleaf_memory::manager::{Live, RecoveryCounts};
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::walk::share::{AssumedMisses, walk_share};
use wideleaf_policies::{Bytes, PerTenThousand};

use crate::host_clock::HostClock;

/// Counters of all managers so far.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    outcomes: BTreeMap<String, BTreeMap<String, u64>>,
    copied: Bytes,
    bloat: Bytes,
    action_cpu: Duration,
    total_cpu: Duration,
    budget_refusals: u64,
    unavailable_ns: Histogram<u64>,
    sensor_failures: BTreeMap<String, u64>,
    by_kernel: BTreeMap<String, u64>,
    recoveries: BTreeMap<String, RecoveriesView>,
}

impl Work {
    /// Counters at zero.
    pub fn none() -> Work {
        Work {
            outcomes: BTreeMap::new(),
            copied: Bytes::ZERO,
            bloat: Bytes::ZERO,
            action_cpu: Duration::ZERO,
            total_cpu: Duration::ZERO,
            budget_refusals: 0,
            unavailable_ns: Histogram::new(2).expect("two digits are in its range"),
            sensor_failures: BTreeMap::new(),
            by_kernel: BTreeMap::new(),
            recoveries: BTreeMap::new(),
        }
    }

    /// The sum with the work of another manager.
    pub fn with(&self, live: &Live) -> Work {
        let mut sum = self.clone();
        for ((mechanism, outcome), times) in &live.outcomes {
            *sum.outcomes.entry((*mechanism).into()).or_default().entry((*outcome).into()).or_default() += times;
        }
        for (sensor, times) in &live.sensor_failures {
            *sum.sensor_failures.entry((*sensor).into()).or_default() += times;
        }
        for (change, windows) in live.vms.iter().flat_map(|vm| vm.kernel_work.named()) {
            *sum.by_kernel.entry(change.into()).or_default() += windows;
        }
        for (cause, counts) in &live.recoveries {
            add(sum.recoveries.entry((*cause).into()).or_default(), counts);
        }
        sum.copied += live.copied;
        sum.bloat += live.bloat;
        sum.action_cpu += live.action_cpu;
        sum.total_cpu += live.total_cpu;
        sum.budget_refusals += live.budget_refusals;
        // Both have two digits, and this one grows.
        sum.unavailable_ns.add(&*live.unavailable_ns).expect("a histogram that grows takes any value");
        sum
    }

    /// The counters as views show them. `live` has the latest actions; `clock` is its host's. `walk` has the cost of a
    /// TLB miss.
    pub fn view(&self, live: &Live, clock: HostClock, walk: &WalkCost) -> WorkView {
        let latest = live.latest.iter().map(|action| ActionView {
            at_s: clock.wall_s(action.at).unwrap_or(0.0),
            gpa: action.window.start().get(),
            mechanism: action.mechanism.to_owned(),
            outcome: action.result.name().to_owned(),
        });
        WorkView {
            outcomes: self.outcomes.clone(),
            copied: self.copied.get(),
            bloat: self.bloat.get(),
            action_cpu_s: self.action_cpu.as_secs_f64(),
            total_cpu_s: self.total_cpu.as_secs_f64(),
            budget_refusals: self.budget_refusals,
            unavailable: quantiles(&self.unavailable_ns),
            walk_share: walk_share(&live.snapshot.vms, AssumedMisses::default(), walk).map(PerTenThousand::get),
            latest: latest.collect(),
            sensor_failures: self.sensor_failures.clone(),
            by_kernel: self.by_kernel.clone(),
            is_recovering: live.vms.iter().any(|vm| vm.recovering.is_some()),
            recoveries: self.recoveries.clone(),
            saves: None,
        }
    }
}

fn add(sum: &mut RecoveriesView, counts: &RecoveryCounts) {
    let RecoveryCounts { done, cut_off, last, sum: sum_of, longest } = *counts;
    sum.done += done;
    sum.cut_off += cut_off;
    sum.last_s = last.map(|last| last.as_secs_f64()).or(sum.last_s);
    sum.sum_s += sum_of.as_secs_f64();
    sum.max_s = sum.max_s.max(longest.as_secs_f64());
}

const NS_PER_S: f64 = 1e9;

fn quantiles(ns: &Histogram<u64>) -> Quantiles {
    let seconds = |ns: u64| ns as f64 / NS_PER_S;
    let at_most = |bound: &f64| ns.count_between(0, (bound * NS_PER_S) as u64);
    Quantiles {
        count: ns.len(),
        sum_s: ns.mean() * ns.len() as f64 / NS_PER_S,
        median_s: seconds(ns.value_at_quantile(0.5)),
        p99_s: seconds(ns.value_at_quantile(0.99)),
        max_s: seconds(ns.max()),
        at_most: PAUSE_BOUNDS_S.iter().map(at_most).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_becomes_a_few_numbers() {
        let mut ns = Histogram::new(2).expect("two digits");
        for pause in [150_000, 150_000, 700_000, 30_000_000] {
            ns.record(pause).expect("it grows");
        }
        let told = quantiles(&ns);
        assert_eq!((told.count, &*told.at_most), (4, &[0, 2, 2, 3, 3, 3, 3, 3, 4, 4][..]));
        assert!((0.000_14..0.000_16).contains(&told.median_s) && (0.029..0.031).contains(&told.max_s), "{told:?}");
        assert!((0.030..0.032).contains(&told.sum_s), "{}", told.sum_s);
        assert_eq!(quantiles(&Histogram::new(2).expect("two digits")).count, 0);
    }
}
