//! The report of a run as a table for people, and its headline.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::Cell;
use wideleaf_policies::units::PerTenThousand;
use wideleaf_policies::{Bytes, Gpa};
use wideleaf_run::devices::DeviceReport;
use wideleaf_run::report::{
    Counters, FaultPriceSummary, Figure, FirstTouchNow, FirstTouchRegion, Gaps, GuaranteeReport, Hello, KvmPages,
    ManagerSummary, Measurement, OF_POLICIES, Phase, PolicyChange, Problem, RamAtEnd, RecordingSummary, Region,
    RunReport, SensorSummary, Setup, Verification, VmmCost,
};
use wideleaf_run::sandboxed::Sandboxed;

use crate::table::{number, table};

pub mod headline;
pub mod moved;

/// Units per second, with a prefix.
pub fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 1e9 => format!("{:.3} G/s", r / 1e9),
        r if r >= 1e6 => format!("{:.2} M/s", r / 1e6),
        r if r >= 1e3 => format!("{:.1} k/s", r / 1e3),
        r => format!("{r:.1} /s"),
    }
}

/// A number of any size from a kernel: six decimals if they show some of its digits.
fn decimal(value: f64) -> String {
    match value.abs() {
        0.0 | 1e-3..1e15 => format!("{value:.6}"),
        _ => format!("{value:.6e}"),
    }
}

/// Bytes for people, rounded up to whole mebibytes.
fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// The results of the kernel, a line each.
pub fn write_results(out: &mut String, results: &BTreeMap<String, Measurement>) {
    for (name, Measurement { value, unit }) in results {
        let _ = writeln!(out, "  {name}: {} {unit}", decimal(*value));
    }
}

/// The pauses of the guest, a line for each percentile.
pub fn write_gaps(out: &mut String, gaps: &[Gaps]) {
    for gap in gaps {
        let us = |ns: u64| ns as f64 / 1e3;
        let _ = writeln!(
            out,
            "  gaps of vCPU {}: p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, max {:.1} us",
            gap.vcpu,
            us(gap.p50_ns),
            us(gap.p99_ns),
            us(gap.p999_ns),
            us(gap.max_ns)
        );
    }
}

/// Main result of a run, for people.
pub struct FigureBlock<'a> {
    /// Kernel that ran.
    pub hello: &'a Hello,
    /// Problem that was solved, if the guest reported it.
    pub problem: Option<&'a Problem>,
    /// Main figure of the run.
    pub figure: &'a Figure,
    /// All results; the time among them is shown too.
    pub results: &'a BTreeMap<String, Measurement>,
    /// Verification that decides whether the figure counts.
    pub verification: Option<&'a Verification>,
}

impl FigureBlock<'_> {
    /// Writes a line for each known fact, with the words of the NPB's result blocks if they have one for it.
    pub fn write(&self, out: &mut String) {
        let FigureBlock { hello, problem, figure: Figure { name, value, unit }, .. } = self;
        let _ = writeln!(out, "  {}", hello.kernel);
        let mut line = |what: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(out, "    {what:<14} {value}");
        };
        if let Some(Problem { class, size, iterations }) = problem {
            line("class", class);
            line("size", size);
            line("iterations", iterations);
        }
        if let Some(Measurement { value, unit }) = self.results.get("seconds") {
            line("time", &format_args!("{value:.3} {unit}"));
        }
        line(&format!("{}s", hello.worker()), &hello.vcpus);
        line(name, &format_args!("{value:.3} {unit}"));
        if hello.vcpus > 1 {
            line(&format!("per {}", hello.worker()), &format_args!("{:.3} {unit}", value / f64::from(hello.vcpus)));
        }
        if let Some(Verification { passed, .. }) = self.verification.filter(|found| found.says_something()) {
            line("verification", if *passed { &"SUCCESSFUL" } else { &"UNSUCCESSFUL" });
        }
    }
}

/// Whether the guest verified its memory; nothing if it checked none.
pub fn write_verification(out: &mut String, verification: Option<&Verification>) {
    let verification = verification.filter(|found| found.says_something());
    let Some(Verification { passed, errors, checked, first_mismatch }) = verification else { return };
    let word = if *passed { "passed" } else { "FAILED" };
    let _ = writeln!(out, "  verification {word}: {errors} of {checked} words or results are wrong");
    if let Some(mismatch) = first_mismatch {
        let _ = writeln!(out, "  first wrong word: {mismatch}");
    }
}

/// Counters of each device that are not zero.
fn write_devices(out: &mut String, devices: &[DeviceReport]) {
    for DeviceReport { device, has_driver, counters } in devices {
        let counted = counters.iter().filter(|(_, count)| **count > 0);
        let counted: Vec<_> = counted.map(|(name, count)| format!("{name} {count}")).collect();
        let text = if *has_driver { counted.join(", ") } else { "no driver took it".to_owned() };
        let _ = writeln!(out, "  {device}: {text}");
    }
}

/// The report as a table for people; with `is_verbose`, also policies' counters of their own decisions.
pub fn to_table(report: &RunReport, is_verbose: bool) -> String {
    let mut out = format!("{}\n", report.headline);
    write_setup(&mut out, &report.setup, &report.manager.policy_changes, is_verbose);
    write_phases(&mut out, &report.phases);
    write_regions(&mut out, &report.regions);
    write_ram_at_end(&mut out, report);
    if let Some(numa) = &report.numa {
        let _ = writeln!(out, "  NUMA at the end: {}", crate::guests::nodes::line(numa));
    }
    let moved = report.migrated.iter().map(moved::migrated).chain(report.arrived.iter().map(moved::arrived));
    for line in moved {
        let _ = writeln!(out, "  {line}");
    }
    write_guarantee(&mut out, report.guarantee.as_ref());
    write_results(&mut out, &report.results);
    write_gaps(&mut out, &report.gaps);
    write_manager(&mut out, &report.manager, is_verbose);
    write_devices(&mut out, &report.devices);
    write_not_kept(&mut out, &report.cut);
    write_vmm_cost(&mut out, &report.vmm);
    if let (Some(hello), Some(figure)) = (&report.hello, &report.figure) {
        let (problem, verification) = (report.problem.as_ref(), report.verification.as_ref());
        FigureBlock { hello, problem, figure, results: &report.results, verification }.write(&mut out);
    }
    write_verification(&mut out, report.verification.as_ref());
    if report.resets > 0 {
        let _ = writeln!(out, "  booted again {} times; its output is of the last boot", report.resets);
    }
    let _ = writeln!(out, "  outcome: {}", report.outcome);
    out
}

/// The run as it was asked for: workload, RAM, policies in their order, sandbox.
fn write_setup(out: &mut String, setup: &Setup, policy_changes: &[PolicyChange], is_verbose: bool) {
    let Setup { workload, cmdline, mode, paging, evidence, .. } = setup;
    let _ = writeln!(out, "{workload} {cmdline}\n  {mode}, paging: {paging} ({evidence})");
    let _ = writeln!(
        out,
        "  {} RAM{}, {} vCPU, {} backing, {} host pages at the start, guest pages {}, policy {}",
        Bytes::new(setup.memory_bytes),
        setup.memory_needed_bytes.map_or(String::new(), |needed| format!(" (needs {})", mebibytes(needed))),
        setup.vcpus,
        setup.backing,
        setup.host_page,
        setup.guest_page.as_deref().unwrap_or("unknown"),
        setup.policy
    );
    if let Some(part) = &setup.out_of_reach {
        let _ = writeln!(out, "  memory is out of the guest's reach for at most {part} of any 100 ms");
    }
    if is_verbose && setup.policy.starts_with("auto") {
        let _ = writeln!(out, "  auto uses {}", setup.walk_cost);
    }
    for PolicyChange { at_s, policy } in policy_changes {
        let _ = writeln!(out, "  policy {policy} from {at_s:.1} s on");
    }
    if let Some(why) = &setup.fallback {
        let _ = writeln!(out, "  fallback: {why}");
    }
    if let Some(Sandboxed { layers, capabilities_kept, missing }) = &setup.sandbox {
        let _ = writeln!(out, "  sandbox: {}", layers.join(", "));
        capabilities_kept.iter().chain(missing).for_each(|line| {
            let _ = writeln!(out, "    {line}");
        });
    }
}

/// The timed parts, a row each, and KVM's mappings at their begin and end.
fn write_phases(out: &mut String, phases: &[Phase]) {
    if phases.is_empty() {
        return;
    }
    let mut rows = table(&["phase", "seconds", "rate", "before promotion", "after", "host 4k", "host 2m", "host 1g"]);
    for phase in phases {
        let optional = |r: Option<f64>| r.map_or("-".into(), rate);
        let whole = (phase.rate_per_s > 0.0).then_some(phase.rate_per_s);
        let cut_off = if phase.is_complete { "" } else { " (cut off)" };
        rows.add_row([
            Cell::new(format!("{}{cut_off}", phase.name)),
            number(format!("{:.3}", phase.seconds)),
            number(optional(whole)),
            number(optional(phase.rate_before_promotion_per_s)),
            number(optional(phase.rate_after_promotion_per_s)),
            number(Bytes::new(phase.at_end.host_4k_bytes)),
            number(Bytes::new(phase.at_end.host_2m_bytes)),
            number(Bytes::new(phase.at_end.host_1g_bytes)),
        ]);
    }
    let _ = writeln!(out, "{rows}");
    for phase in phases.iter().filter(|phase| phase.at_end.kvm.is_some()) {
        let (from, to) = (phase.at_begin.kvm.unwrap_or_default(), phase.at_end.kvm.unwrap_or_default());
        let _ = writeln!(
            out,
            "  {}: KVM maps pages_4k {} -> {}, pages_2m {} -> {}, pages_1g {} -> {}",
            phase.name, from.pages_4k, to.pages_4k, from.pages_2m, to.pages_2m, from.pages_1g, to.pages_1g
        );
    }
    for phase in phases {
        write_tables(out, phase);
    }
    for (name, walks) in phases.iter().filter_map(|phase| Some((&phase.name, phase.walks?))) {
        let _ = writeln!(out, "  {name}: counted by the CPU: {walks}");
    }
}

/// Memory of page tables at the begin and the end of a part.
fn write_tables(out: &mut String, phase: &Phase) {
    let (from, to) = (&phase.at_begin, &phase.at_end);
    let both = |of: fn(&Counters) -> Option<u64>| Some((Bytes::new(of(from)?), Bytes::new(of(to)?)));
    let of_process = both(|counters| counters.process_tables_bytes);
    // A native run has no second level, but the host may have guests.
    let of_host = both(|counters| counters.second_level_tables_of_host_bytes).filter(|_| to.kvm.is_some());
    let parts = [("of the process", of_process), ("of KVM, all guests of the host", of_host)];
    let parts = parts.iter().filter_map(|(what, both)| both.map(|(from, to)| format!("{what} {from} -> {to}")));
    let parts: Vec<String> = parts.collect();
    if !parts.is_empty() {
        let _ = writeln!(out, "  {}: page tables {}", phase.name, parts.join(", "));
    }
}

/// How much of each region of the guest's data is on large pages of the host.
fn write_regions(out: &mut String, regions: &[Region]) {
    for Region { name, windows, windows_host_large, bytes, .. } in regions {
        let (size, share) = (Bytes::new(*bytes), PerTenThousand::of(*windows_host_large, *windows));
        let _ =
            writeln!(out, "  {name}: {size}, {windows_host_large} of {windows} windows on large host pages ({share})");
    }
}

/// Messages of the guest that exceeded the bounds of the session, by kind.
fn write_not_kept(out: &mut String, cut: &BTreeMap<String, u64>) {
    for (what, count) in cut {
        let _ = writeln!(out, "  not kept of the guest's output: {} {count}", what.replace('_', " "));
    }
}

/// Memory and time of the VMM itself.
fn write_vmm_cost(out: &mut String, vmm: &VmmCost) {
    if let Some(bytes) = vmm.resident_beyond_guest_ram_bytes {
        let _ = writeln!(out, "  resident beyond guest RAM: {:.2} MiB", bytes as f64 / f64::from(1 << 20));
    }
    if let Some(ms) = vmm.first_byte_ms {
        let _ = writeln!(out, "  start to the guest's first byte: {ms:.2} ms");
    }
}

fn write_ram_at_end(out: &mut String, report: &RunReport) {
    let Some(RamAtEnd { counters, host_unbacked_bytes }) = report.ram_at_end else { return };
    let bytes = Bytes::new;
    let _ = writeln!(
        out,
        "  at the end: {} of RAM on 4k host pages, {} on 2m, {} on 1g, {} not backed",
        bytes(counters.host_4k_bytes),
        bytes(counters.host_2m_bytes),
        bytes(counters.host_1g_bytes),
        bytes(host_unbacked_bytes)
    );
    if let Some(KvmPages { pages_4k, pages_2m, pages_1g }) = counters.kvm {
        let _ = writeln!(out, "  at the end: KVM maps pages_4k {pages_4k}, pages_2m {pages_2m}, pages_1g {pages_1g}");
    }
}

/// Whether and when the run met its guarantee.
fn write_guarantee(out: &mut String, guarantee: Option<&GuaranteeReport>) {
    let Some(guarantee) = guarantee else { return };
    let GuaranteeReport { wanted, short_at_start, first_met_at_s, below_s, pursued_s, .. } = guarantee;
    let first = first_met_at_s.map_or("never met".to_owned(), |at| format!("met after {at:.1} s"));
    let share = guarantee.coverage_at_end.map_or("?".to_owned(), |share| format!("{:.1} %", share * 100.0));
    let at_end = match guarantee.is_met_at_end {
        Some(true) => "met",
        Some(false) => "MISSED",
        None => "unknown",
    };
    let _ = writeln!(
        out,
        "  guarantee of {wanted}: {first}; below it for {below_s:.1} s, pursued for {pursued_s:.1} s; at the end \
         {share}, {at_end}"
    );
    if let Some(why) = short_at_start {
        let _ = writeln!(out, "  guarantee: at the start {why}");
    }
}

/// Price of a second-level fault, with its source.
fn fault_price(price: &FaultPriceSummary) -> String {
    let FaultPriceSummary { us, source, faults, faults_per_512_mappings } = price;
    let of = if *faults > 0 { format!(" over {faults} faults") } else { String::new() };
    let by = match faults_per_512_mappings {
        512 => String::new(),
        fewer => format!("; 512 mappings come back by {fewer}"),
    };
    format!("a second-level fault takes {us:.2} us ({source}{of}){by}")
}

/// Pages at the first touch of each range of RAM, and now.
fn write_first_touches(out: &mut String, regions: &[FirstTouchRegion]) {
    if regions.is_empty() {
        return;
    }
    let mut rows = table(&[
        "RAM from",
        "size",
        "faults",
        "first 4k*",
        "first 2m",
        "first 1g",
        "now 4k",
        "now 2m",
        "now 1g",
        "demoted 2m",
        "demoted 1g",
    ]);
    for region in regions {
        let now = |of: fn(&FirstTouchNow) -> u64| region.now.as_ref().map_or("?".to_owned(), |now| of(now).to_string());
        let FirstTouchRegion { faults, windows_4k_at_first, pages_2m_at_first, pages_1g_at_first, .. } = region;
        rows.add_row([
            Cell::new(Gpa::new(region.start)),
            number(Bytes::new(region.bytes)),
            number(faults),
            number(windows_4k_at_first),
            number(pages_2m_at_first),
            number(pages_1g_at_first),
            number(now(|now| now.pages_4k)),
            number(now(|now| now.pages_2m)),
            number(now(|now| now.pages_1g)),
            number(now(|now| now.demoted_2m)),
            number(now(|now| now.demoted_1g)),
        ]);
    }
    let _ = writeln!(out, "  first touches: pages by size (* windows of 2 MiB left to base pages)\n{rows}");
    for region in regions.iter().filter(|region| !region.refused.is_empty()) {
        let refused: Vec<String> = region.refused.iter().map(|(why, n)| format!("{why} {n}")).collect();
        let _ = writeln!(out, "  first touches from {}: refused: {}", Gpa::new(region.start), refused.join(", "));
    }
}

fn write_manager(out: &mut String, manager: &ManagerSummary, is_verbose: bool) {
    let is_shown = |name: &&String| is_verbose || !name.starts_with(OF_POLICIES);
    for (name, count) in manager.outcomes.iter().filter(|(name, _)| is_shown(name)) {
        let _ = writeln!(out, "  manager: {name}: {count}");
    }
    write_first_touches(out, &manager.first_touch_regions);
    for (name, sensor) in &manager.sensors {
        write_sensor(out, name, sensor);
    }
    if let Some(price) = &manager.fault_price {
        let _ = writeln!(out, "  manager: {}", fault_price(price));
    }
    for question in &manager.unanswered {
        let _ = writeln!(out, "  manager: cannot answer {question}");
    }
    for panic in &manager.panics {
        let _ = writeln!(out, "  manager: {panic}");
    }
    if manager.released_bytes > 0 {
        let _ = writeln!(out, "  manager: released {}", Bytes::new(manager.released_bytes));
    }
    for (name, count) in &manager.sensor_failures {
        let _ = writeln!(out, "  manager: sensor {name} failed {count} times");
    }
    write_copies(out, manager);
    if let Some(check) = &manager.kvm_check {
        let _ = writeln!(
            out,
            "  manager: KVM's large mappings rose from {} to {} windows, {} contradictions with the host's backing",
            check.large_windows_at_first, check.large_windows_at_most, check.contradictions
        );
    }
    if let Some(RecordingSummary { frames, bytes, .. }) = &manager.recording {
        let _ = writeln!(out, "  recording: {frames} frames, {}", Bytes::new(*bytes));
    }
    let _ = writeln!(
        out,
        "  manager: {} ticks, {:.1} ms of CPU, bloat {}, budget refused {} times",
        manager.ticks,
        manager.cpu_s * 1e3,
        Bytes::new(manager.bloat_bytes),
        manager.budget_refusals
    );
    if manager.ticks_paused > 0 {
        let _ = writeln!(out, "  manager: the guest was paused at {} ticks: no samples", manager.ticks_paused);
    }
}

fn write_sensor(out: &mut String, name: &str, sensor: &SensorSummary) {
    let SensorSummary { samples, windows, latest_windows, ticks_without, claimed, not_run, waits, cpu_s } = sensor;
    let cpu_ms = cpu_s * 1e3;
    let _ = writeln!(
        out,
        "  manager: sensor {name}: {samples} samples, {windows} windows ({latest_windows} in the last); skipped on \
        {ticks_without} ticks for lack of budget and {claimed} times during a 1 GiB move; {not_run} windows dropped \
        because the guest hardly ran; {waits} guest stalls, {cpu_ms:.1} ms of CPU"
    );
}

fn write_copies(out: &mut String, manager: &ManagerSummary) {
    if let (Some(speed), Some(times)) = (manager.copy_gib_per_s, &manager.unavailable) {
        let _ = writeln!(
            out,
            "  manager: copied {} at {speed:.2} GiB/s; a window was unavailable for {:.0} us (p50), \
            {:.0} us (p99), {:.0} us (max)",
            Bytes::new(manager.copied_bytes),
            times.p50_us,
            times.p99_us,
            times.max_us
        );
    }
}

#[cfg(test)]
mod tests {
    use wideleaf_run::report::Walks;

    use super::*;

    #[test]
    fn a_part_too_short_for_a_rate_has_none_in_the_table() {
        let phase = Phase { name: "update".into(), units: 9, ..Phase::default() };
        let mut out = String::new();
        write_phases(&mut out, &[phase]);
        assert!(!out.contains("/s"), "{out}");
    }

    #[test]
    fn page_walks_that_the_cpu_counted_are_in_the_table_and_no_others() {
        let counted = Phase { name: "update".into(), walks: Some(Walks::default()), ..Phase::default() };
        let (mut with, mut without) = (String::new(), String::new());
        write_phases(&mut with, std::slice::from_ref(&counted));
        write_phases(&mut without, &[Phase { walks: None, ..counted }]);
        assert!(with.contains("update: counted by the CPU: 0 walks"), "{with}");
        assert!(!without.contains("walks"), "{without}");
    }
}
