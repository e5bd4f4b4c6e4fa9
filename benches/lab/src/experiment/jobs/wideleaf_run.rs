//! Runs `wideleaf run` in a process of its own, and turns its report into metrics. A guest that found wrong words, or
//! checked none, is a failure and no measurement.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::experiment::memory_map::{self, View};
use wideleaf::child;
use wideleaf_experiments::catalogue::page_tables::{PROCESS_TABLES, SECOND_LEVEL_TABLES};
use wideleaf_experiments::catalogue::walks::{COUNTED_CYCLES, COUNTED_SECOND_LEVEL_CYCLES};
use wideleaf_experiments::definition::{COUNTED_WALK_CYCLES, COUNTED_WALKS, Job};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::{Actions, Measured, Sample};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::{Counters, OF_POLICIES, Phase, Region, RunReport, Walks};
use wideleaf_run::undo::TemporaryFolder;

pub(super) const MIB: f64 = (1 << 20) as f64;
/// Most progress marks that a picture can distinguish.
const MARKS_MAX: usize = 100;
/// Coverage that counts as reached, in percent.
pub(super) const COVERED_PERCENT: f64 = 95.0;

/// Runs it. Wrong words that the guest found are a failure.
pub(super) fn run(
    job: &Job,
    arguments: &[String],
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<Measured, Failure> {
    let folder = TemporaryFolder::new()
        .map_err(|error| Failure::Host(format!("cannot make a temporary folder for a recording: {error}")))?;
    let recording = folder.path().join("recording");
    let mut arguments = [&["run".to_owned()], arguments].concat();
    if job.wants_map {
        arguments.extend(["--record".into(), recording.display().to_string()]);
    }
    let report = match &job.program {
        None => child::run(&arguments, timeout, interrupts),
        Some(program) => child::run_program(Path::new(program), &arguments, timeout, interrupts),
    }?;
    let mut measured = verified(&report)?;
    if job.wants_map {
        add_recorded(&mut measured, &recording, &report)?;
    }
    Ok(measured)
}

/// Metrics of a run after a successful verification.
pub(super) fn verified(report: &RunReport) -> Result<Measured, Failure> {
    match &report.verification {
        Some(verification) if verification.passed => Ok(measured(report)),
        Some(verification) => {
            Err(Failure::GuestFailed(format!("the guest found {} wrong words or results", verification.errors)))
        }
        None => Err(Failure::GuestFailed("the guest did not verify its result".into())),
    }
}

/// Adds the data that only the recording has.
fn add_recorded(measured: &mut Measured, recording: &Path, report: &RunReport) -> Result<(), Failure> {
    let view = View {
        began_at_s: timed_part(report).map_or(0.0, |phase| phase.began_at_s),
        paging: report.setup.paging.clone(),
        guest_page: report.setup.guest_page.clone().unwrap_or_default(),
    };
    let recorded = memory_map::read(recording, &view)?;
    measured.map = recorded.map;
    for (name, Actions { cpu_ms, unavailable_max_us, .. }) in recorded.actions {
        let of = measured.actions.entry(name).or_default();
        *of = Actions { cpu_ms, unavailable_max_us, ..*of };
    }
    measured.notes.push("round 1 was recorded for its map, which costs the manager some time".into());
    Ok(())
}

/// Metrics from the report.
fn measured(report: &RunReport) -> Measured {
    let timed = timed_part(report);
    let mut measured =
        Measured { series: timed.map(|phase| series(report, phase)).unwrap_or_default(), ..Measured::default() };
    measured.told = report.results.iter().map(|(name, result)| (name.clone(), result.value)).collect();
    measured.told.extend(timed.and_then(|phase| phase.walks).into_iter().flat_map(counted));
    measured.told.extend(timed.into_iter().flat_map(|phase| tables(&phase.at_end)));
    measured.actions = actions(&report.manager.outcomes);
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

/// Counts of page walks, by the names under which a run tells them.
fn counted(walks: Walks) -> impl Iterator<Item = (String, f64)> {
    let counts = [
        (COUNTED_CYCLES, Some(walks.cycles)),
        (COUNTED_WALKS, Some(walks.walks)),
        (COUNTED_WALK_CYCLES, walks.walk_cycles),
        (COUNTED_SECOND_LEVEL_CYCLES, walks.second_level_walk_cycles),
    ];
    counts.into_iter().filter_map(|(name, count)| Some((name.to_owned(), count? as f64)))
}

/// Bytes of page tables, by the names under which a run tells them; those of KVM only beside a guest.
fn tables(counters: &Counters) -> impl Iterator<Item = (String, f64)> {
    let of_kvm = counters.kvm.and(counters.second_level_tables_of_host_bytes);
    let bytes = [(PROCESS_TABLES, counters.process_tables_bytes), (SECOND_LEVEL_TABLES, of_kvm)];
    bytes.into_iter().filter_map(|(name, bytes)| Some((name.to_owned(), bytes? as f64)))
}

/// The longest phase that is neither the set-up nor the check.
pub(super) fn timed_part(report: &RunReport) -> Option<&Phase> {
    let timed = report.phases.iter().filter(|phase| is_timed(&phase.name));
    timed.max_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Whether a phase of that name is timed work: neither set-up nor a check.
pub(super) fn is_timed(phase: &str) -> bool {
    !["init", "fill", "cold", "verify", "check"].contains(&phase)
}

/// Time from the begin of the timed part until large pages back 95 % of the kernel's data.
///
/// Samples count all of RAM, and only the look at the end tells data and the rest apart. So the large pages that the
/// rest (image, tables) has then are taken off each sample. That is exact once the rest has them, and until then the
/// data have more than is counted: the time may be late, and is early only if the rest loses large pages later.
fn time_to_coverage(report: &RunReport, phase: &Phase) -> Option<f64> {
    let bytes = |windows: fn(&Region) -> u64| report.regions.iter().map(|region| windows(region) << 21).sum::<u64>();
    let (wanted, at_end) = (bytes(|region| region.windows), bytes(|region| region.windows_host_large));
    // The regions are those of the last look, which is that at the end of the last part.
    let rest = large_bytes(&report.phases.last()?.at_end).saturating_sub(at_end);
    let is_covered = |large: u64| wanted > 0 && large as f64 * 100.0 >= wanted as f64 * COVERED_PERCENT;
    let mut samples = report.manager.samples.iter();
    let reached = samples.find(|sample| is_covered(large_bytes(&sample.counters).saturating_sub(rest)))?;
    Some((reached.at_s - phase.began_at_s).max(0.0))
}

/// Guest RAM on pages of 2 MiB or larger, in bytes.
fn large_bytes(counters: &Counters) -> u64 {
    counters.host_2m_bytes + counters.host_1g_bytes
}

/// Actions requested of mechanisms; policies' counters of their own decisions are left out.
fn actions(outcomes: &BTreeMap<String, u64>) -> BTreeMap<String, Actions> {
    let of_mechanisms = outcomes.iter().filter(|(name, _)| !name.starts_with(OF_POLICIES));
    of_mechanisms.map(|(name, count)| (name.clone(), Actions { count: *count, ..Actions::default() })).collect()
}

/// The manager's samples. Between them, which are rare when nothing happens, the guest's progress marks with memory
/// as last sampled.
fn series(report: &RunReport, phase: &Phase) -> Vec<Sample> {
    let sample = |at_s: f64, counters: &Counters| Sample {
        at_s,
        base_mib: counters.host_4k_bytes as f64 / MIB,
        huge_mib: counters.host_2m_bytes as f64 / MIB,
        giant_mib: counters.host_1g_bytes as f64 / MIB,
        rate_per_s: rate_at(&phase.progress, at_s),
    };
    let seen: Vec<(f64, Counters)> =
        report.manager.samples.iter().map(|seen| (seen.at_s - phase.began_at_s, seen.counters)).collect();
    let mark = |at_s: f64| {
        let (_, counters) = seen.iter().rfind(|(seen_at_s, _)| *seen_at_s <= at_s)?;
        Some(sample(at_s, counters))
    };
    let step = phase.progress.len().div_ceil(MARKS_MAX).max(1);
    let marks = phase.progress.iter().step_by(step).filter_map(|(at_s, _)| mark(*at_s));
    let mut series: Vec<Sample> = seen.iter().map(|(at_s, counters)| sample(*at_s, counters)).chain(marks).collect();
    series.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    series
}

/// Speed between the two progress marks around an instant; `None` before the begin and after the last mark.
fn rate_at(progress: &[(f64, u64)], at_s: f64) -> Option<f64> {
    let before = std::iter::once(&(0.0, 0)).chain(progress);
    let (from, to) = before.zip(progress).find(|(from, to)| from.0 < at_s && at_s <= to.0)?;
    Some(to.1.saturating_sub(from.1) as f64 / (to.0 - from.0))
}

#[cfg(test)]
mod tests {
    use wideleaf_run::report::{KvmPages, ManagerSummary, SampleAt};

    use super::*;

    fn large(windows: u64) -> Counters {
        Counters { host_2m_bytes: windows << 21, ..Counters::default() }
    }

    /// A run with eight windows of data: samples of time and large windows of all RAM, and large windows at the end, of
    /// the data and of all RAM.
    fn report(samples: &[(f64, u64)], [of_data, of_all]: [u64; 2]) -> RunReport {
        let phase = |name: &str, began_at_s, windows| Phase {
            name: name.into(),
            began_at_s,
            seconds: 5.0,
            at_end: large(windows),
            ..Phase::default()
        };
        let region = |windows, windows_host_large| Region {
            name: "table".into(),
            address: 0,
            bytes: windows << 21,
            windows,
            windows_host_large,
        };
        let sample = |(at_s, windows): &(f64, u64)| SampleAt { at_s: *at_s, counters: large(*windows) };
        RunReport {
            phases: vec![phase("init", 0.0, 1), phase("update", 1.0, of_all)],
            regions: vec![region(6, of_data.min(6)), region(2, of_data.saturating_sub(6))],
            manager: ManagerSummary { samples: samples.iter().map(sample).collect(), ..ManagerSummary::default() },
            ..RunReport::default()
        }
    }

    fn reached_at_s(report: &RunReport) -> Option<f64> {
        time_to_coverage(report, timed_part(report)?)
    }

    #[test]
    fn large_pages_outside_of_the_data_cover_none_of_it() {
        // Three windows of the image and the tables, then five of the data: as many as the data have.
        let never = report(&[(0.5, 0), (1.5, 3), (2.0, 8), (3.0, 8)], [5, 8]);
        assert_eq!(reached_at_s(&never), None);
        let later = report(&[(0.5, 0), (1.5, 3), (2.0, 8), (3.0, 11)], [8, 11]);
        assert_eq!(reached_at_s(&later), Some(2.0));
        let before_the_begin = report(&[(0.5, 11), (1.5, 11)], [8, 11]);
        assert_eq!(reached_at_s(&before_the_begin), Some(0.0));
    }

    #[test]
    fn a_run_without_data_or_without_parts_has_no_time_to_coverage() {
        let run = report(&[(0.5, 11)], [8, 11]);
        assert_eq!(reached_at_s(&RunReport { regions: vec![], ..run.clone() }), None);
        assert_eq!(reached_at_s(&RunReport { phases: vec![], ..run }), None);
    }

    #[test]
    fn a_run_tells_what_the_cpu_counted_of_walks_in_its_timed_part_and_nothing_that_it_did_not_count() {
        let of_run = |walks: Option<Walks>| {
            let mut run = report(&[], [0, 0]);
            run.phases[1].walks = walks;
            measured(&run).told
        };
        let walks = Walks { cycles: 900, walks: 7, walk_cycles: Some(400), second_level_walk_cycles: Some(100) };
        let told = of_run(Some(walks));
        assert_eq!([told[COUNTED_CYCLES], told[COUNTED_WALKS], told[COUNTED_WALK_CYCLES]], [900.0, 7.0, 400.0]);
        assert_eq!(told[COUNTED_SECOND_LEVEL_CYCLES], 100.0);
        let amd = of_run(Some(Walks { walk_cycles: None, second_level_walk_cycles: None, ..walks }));
        assert_eq!(amd.len(), 2, "{amd:?}");
        assert!(of_run(None).is_empty());
    }

    #[test]
    fn a_guest_tells_its_page_tables_at_the_end_of_its_timed_part_and_a_process_only_its_own() {
        let of_run = |kvm: Option<KvmPages>| {
            let mut run = report(&[], [0, 0]);
            let (process_tables_bytes, second_level_tables_of_host_bytes) = (Some(864 << 10), Some(16 << 10));
            let tables = Counters { kvm, process_tables_bytes, second_level_tables_of_host_bytes, ..large(0) };
            run.phases[1].at_end = tables;
            measured(&run).told
        };
        let told = of_run(Some(KvmPages::default()));
        assert_eq!((told[PROCESS_TABLES], told[SECOND_LEVEL_TABLES]), (864.0 * 1024.0, 16.0 * 1024.0));
        // The host's other guests have tables too.
        assert_eq!(of_run(None).into_keys().collect::<Vec<_>>(), [PROCESS_TABLES]);
    }

    #[test]
    fn a_policys_own_counters_are_not_actions() {
        let outcomes = [("collapse.done", 3), ("policy.paid_back", 9)].map(|(name, n)| (name.to_owned(), n));
        let actions = actions(&BTreeMap::from(outcomes));
        assert_eq!(actions, BTreeMap::from([("collapse.done".into(), Actions { count: 3, ..Actions::default() })]));
    }

    #[test]
    fn the_speed_at_an_instant_is_that_between_the_marks_around_it() {
        let progress = [(1.0, 100), (3.0, 500)];
        let rates = [-1.0, 0.5, 1.0, 2.0, 3.0, 3.1].map(|at_s| rate_at(&progress, at_s));
        assert_eq!(rates, [None, Some(100.0), Some(100.0), Some(200.0), Some(200.0), None]);
        assert_eq!(rate_at(&[], 0.5), None);
        assert_eq!(rate_at(&[(0.0, 0), (1.0, 10)], 0.5), Some(10.0), "a mark at the begin has no length");
    }
}
