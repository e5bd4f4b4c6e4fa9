//! The manager's part of a report, from the manager's own report: names as text, sizes in bytes, times in seconds.

use std::collections::BTreeMap;

use wideleaf_memory::block_supply::SupplyReport;
use wideleaf_memory::first_touch::{PagesNow, RegionReport};
use wideleaf_memory::manager::{ManagerReport, SensorCost};
use wideleaf_memory::{FirstTouchReport, ReservedFramesReport};
use wideleaf_policies::Moment;

use crate::report::{
    Counters, FaultPriceSummary, FirstTouchNow, FirstTouchRegion, Histogram, KvmCheckSummary, ManagerSummary,
    OF_POLICIES, PolicyChange, RecordingSummary, SampleAt, SensorSummary,
};

/// The manager's part of a report.
pub fn summarise(report: &ManagerReport) -> ManagerSummary {
    ManagerSummary {
        policy_changes: policy_changes(report),
        ticks: report.ticks,
        ticks_paused: report.ticks_paused,
        outcomes: outcomes(report),
        sensor_failures: report.sensor_failures.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
        budget_refusals: report.budget_refusals,
        copied_bytes: report.copied.get(),
        bloat_bytes: report.bloat.get(),
        cpu_s: report.total_cpu.as_secs_f64(),
        first_done_at_s: report.first_done_at.map(|at| at.since_start().as_secs_f64()),
        last_done_at_s: report.last_done_at.map(|at| at.since_start().as_secs_f64()),
        copy_gib_per_s: report.copy_bytes_per_second().map(|rate| rate / f64::from(1 << 30)),
        unavailable: unavailable(report),
        kvm_check: report.kvm_checks.first().copied().flatten().map(|check| KvmCheckSummary {
            large_windows_at_first: check.large_at_first,
            large_windows_at_most: check.large_at_most,
            contradictions: check.contradictions,
        }),
        samples: samples(report),
        sensors: sensors(report),
        fault_price: report.fault_prices.values().next().map(|price| FaultPriceSummary {
            us: price.time.as_secs_f64() * 1e6,
            source: price.source.name().to_owned(),
            faults: price.faults,
            faults_per_512_mappings: price.faults_per_512,
        }),
        first_touch_regions: report.first_touch.iter().flat_map(|report| &report.regions).map(region).collect(),
        unanswered: report.unanswered.clone(),
        panics: report.panics.clone(),
        released_bytes: report.released.get(),
        recording: report.recording.as_ref().map(|recording| RecordingSummary {
            frames: recording.frames,
            frames_lost: recording.frames_lost,
            bytes: recording.bytes,
            error: recording.error.as_ref().map(ToString::to_string),
        }),
    }
}

fn policy_changes(report: &ManagerReport) -> Vec<PolicyChange> {
    let change = |(at, policy): &(Moment, &str)| PolicyChange {
        at_s: at.since_start().as_secs_f64(),
        policy: (*policy).to_owned(),
    };
    report.policy_changes.iter().map(change).collect()
}

/// Counts of outcomes by mechanism and result, and the counters of first touches, reserved frames and policies.
fn outcomes(report: &ManagerReport) -> BTreeMap<String, u64> {
    let foreign_logs = Some(report.foreign_logs.len() as u64).filter(|slots| *slots > 0).into_iter();
    let first_touch = report.first_touch.iter().flat_map(FirstTouchReport::by_name);
    let reserved_frames = report.reserved_frames.iter().flat_map(ReservedFramesReport::by_name);
    report
        .outcomes
        .iter()
        .map(|((m, result), n)| (format!("{m}.{result}"), *n))
        .chain(foreign_logs.map(|n| ("hold.left_to_others_slots".to_owned(), n)))
        .chain(first_touch.map(|(name, n)| (format!("first_touch.{name}"), n)))
        .chain(reserved_frames.map(|(name, n)| (format!("reserved_frames.{name}"), n)))
        .chain(report.supply.iter().flat_map(SupplyReport::by_name).map(|(name, n)| (format!("supply.{name}"), n)))
        .chain(report.policy_figures.iter().map(|(name, n)| (format!("{OF_POLICIES}{name}"), *n)))
        .collect()
}

/// First touches of one range of RAM.
fn region(region: &RegionReport) -> FirstTouchRegion {
    let now = |now: PagesNow| FirstTouchNow {
        pages_4k: now.pages_4k,
        pages_2m: now.pages_2m,
        pages_1g: now.pages_1g,
        demoted_2m: now.demoted_2m,
        demoted_1g: now.demoted_1g,
        windows_given_back: now.given_back,
    };
    FirstTouchRegion {
        start: region.gpa.start().get(),
        bytes: region.gpa.bytes().get(),
        faults: region.faults,
        windows_4k_at_first: region.at_first.windows_4k,
        pages_2m_at_first: region.at_first.windows_2m,
        pages_1g_at_first: region.at_first.giants,
        now: region.now.map(now),
        refused: region.refused.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
    }
}

/// Times for which windows were unavailable to the guest; `None` if none was.
fn unavailable(report: &ManagerReport) -> Option<Histogram> {
    /// Upper end of the first bucket, in nanoseconds; each further bucket is twice as wide.
    const FIRST_BUCKET_NS: u64 = 1_000;
    let us = |ns: u64| ns as f64 / 1e3;
    let times = &report.unavailable_ns;
    (!times.is_empty()).then(|| Histogram {
        count: times.len(),
        p50_us: us(times.value_at_quantile(0.5)),
        p90_us: us(times.value_at_quantile(0.9)),
        p99_us: us(times.value_at_quantile(0.99)),
        max_us: us(times.max()),
        buckets: times
            .iter_log(FIRST_BUCKET_NS, 2.0)
            .map(|bucket| (us(bucket.value_iterated_to()), bucket.count_since_last_iteration()))
            .filter(|(_, count)| *count > 0)
            .collect(),
    })
}

/// Samples of the first VM, which is the only one of a run.
fn samples(report: &ManagerReport) -> Vec<SampleAt> {
    let samples = report.samples.first().map_or(&[][..], |(_, samples)| samples);
    let samples = samples.iter().map(|sample| SampleAt {
        at_s: sample.at.since_start().as_secs_f64(),
        counters: Counters::new(sample.host, sample.mapping),
    });
    samples.collect()
}

fn sensors(report: &ManagerReport) -> BTreeMap<String, SensorSummary> {
    let sensors = report.sensor_costs.iter().map(|(name, cost)| {
        let SensorCost { samples, windows, latest_windows, ticks_without, claimed, not_run, waits, cpu } = *cost;
        let cpu_s = cpu.as_secs_f64();
        let summary = SensorSummary { samples, windows, latest_windows, ticks_without, claimed, not_run, waits, cpu_s };
        ((*name).to_owned(), summary)
    });
    sensors.collect()
}
