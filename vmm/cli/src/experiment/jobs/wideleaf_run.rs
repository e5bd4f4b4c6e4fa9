//! A `wideleaf run`, from its report to metrics.

use std::time::Duration;

use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::{Measured, Sample};

use crate::child;
use crate::failure::Failure;
use crate::interrupts::Interrupts;
use crate::report::{Phase, RunReport};

pub(super) const MIB: f64 = (1 << 20) as f64;
/// Coverage that counts as reached.
pub(super) const COVERED_PERCENT: f64 = 95.0;

/// Runs it; words that the guest found wrong are a failure.
pub(super) fn run(arguments: &[String], timeout: Duration, interrupts: &Interrupts) -> Result<Measured, Failure> {
    let arguments = [&["run".to_owned()], arguments].concat();
    verified(&child::run(&arguments, timeout, interrupts)?)
}

/// What a run tells whose guest found its memory right.
pub(super) fn verified(report: &RunReport) -> Result<Measured, Failure> {
    match &report.verification {
        Some(verification) if verification.passed => Ok(measured(report)),
        Some(verification) => {
            Err(Failure::GuestFailed(format!("the guest found {} wrong words or results", verification.errors)))
        }
        None => Err(Failure::GuestFailed("the guest did not verify its result".into())),
    }
}

/// What the report tells.
fn measured(report: &RunReport) -> Measured {
    let timed = timed_part(report);
    let mut measured =
        Measured { series: timed.map(|phase| series(report, phase)).unwrap_or_default(), ..Measured::default() };
    measured.told = report.results.iter().map(|(name, result)| (name.clone(), result.value)).collect();
    let mut put = |metric, value: Option<f64>| {
        if let Some(value) = value {
            measured.metrics.insert(metric, value);
        }
    };
    put(Metric::Figure, report.figure.as_ref().map(|figure| figure.value));
    put(
        Metric::Seconds,
        report.results.get("seconds").map(|seconds| seconds.value).or(timed.map(|phase| phase.seconds)),
    );
    put(Metric::FirstByteMs, report.vmm.first_byte_ms);
    if let Some(end) = timed.map(|phase| phase.at_end) {
        let ram = end.host_4k_bytes + end.host_2m_bytes + end.host_1g_bytes;
        put(Metric::ResidentMib, report.vmm.resident_beyond_guest_ram_bytes.map(|beyond| (ram + beyond) as f64 / MIB));
        put(Metric::Pages4k, end.kvm.map(|kvm| kvm.pages_4k as f64));
        put(Metric::Pages2m, end.kvm.map(|kvm| kvm.pages_2m as f64));
        put(Metric::Pages1g, end.kvm.map(|kvm| kvm.pages_1g as f64));
    }
    let windows: u64 = report.regions.iter().map(|region| region.windows).sum();
    let large: u64 = report.regions.iter().map(|region| region.windows_host_large).sum();
    put(Metric::CoveragePercent, (windows > 0).then(|| large as f64 * 100.0 / windows as f64));
    put(Metric::TimeToCoverageS, timed.and_then(|phase| time_to_coverage(report, phase)));
    put(Metric::BloatMib, Some(report.manager.bloat_bytes as f64 / MIB));
    put(Metric::CopiedMib, Some(report.manager.copied_bytes as f64 / MIB));
    put(Metric::ManagerCpuS, Some(report.manager.cpu_s));
    let is_refusal = |name: &str| name.contains(".refused_");
    let refused: u64 =
        report.manager.outcomes.iter().filter(|(name, _)| is_refusal(name)).map(|(_, count)| count).sum();
    put(Metric::Refusals, Some(refused as f64));
    put(Metric::GapP99Us, report.gaps.iter().map(|gap| gap.p99_ns as f64 / 1e3).reduce(f64::max));
    put(Metric::GapMaxUs, report.gaps.iter().map(|gap| gap.max_ns as f64 / 1e3).reduce(f64::max));
    measured
}

/// The longest phase that is neither the set-up nor the check.
fn timed_part(report: &RunReport) -> Option<&Phase> {
    let timed = report.phases.iter().filter(|phase| is_timed(&phase.name));
    timed.max_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Whether a phase of that name is work that is timed.
pub(super) fn is_timed(phase: &str) -> bool {
    !["init", "verify", "check"].contains(&phase)
}

/// From the begin of the timed part until large pages back as much as 95 % of the kernel's data.
fn time_to_coverage(report: &RunReport, phase: &Phase) -> Option<f64> {
    let wanted: u64 = report.regions.iter().map(|region| region.windows << 21).sum();
    let is_covered = |large: u64| wanted > 0 && large as f64 * 100.0 >= wanted as f64 * COVERED_PERCENT;
    let reached = report
        .manager
        .samples
        .iter()
        .find(|sample| is_covered(sample.counters.host_2m_bytes + sample.counters.host_1g_bytes))?;
    Some((reached.at_s - phase.began_at_s).max(0.0))
}

fn series(report: &RunReport, phase: &Phase) -> Vec<Sample> {
    let sample = |at_s: f64, counters: &crate::report::Counters| Sample {
        at_s: at_s - phase.began_at_s,
        base_mib: counters.host_4k_bytes as f64 / MIB,
        huge_mib: counters.host_2m_bytes as f64 / MIB,
        giant_mib: counters.host_1g_bytes as f64 / MIB,
        rate_per_s: None,
    };
    report.manager.samples.iter().map(|seen| sample(seen.at_s, &seen.counters)).collect()
}
