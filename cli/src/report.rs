//! The report of a run: one struct, read by programs as JSON and by people as a table. Its field names contain the
//! units.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde::{Deserialize, Serialize};
use wideleaf_kernels::registry;
use wideleaf_policies::units::PerTenThousand;
use wideleaf_policies::{Bytes, MappingStats};
use wideleaf_protocol::{Entry, GuestPage, Name};

use crate::environment::Environment;
use crate::run::devices::DeviceReport;
use crate::run::sandboxed::Sandboxed;

mod headline;

/// One run of one guest or native kernel, with any outcome.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RunReport {
    /// One line for people: the outcome, the guest's large pages and their time, the cost, and the verification.
    #[serde(default)]
    pub headline: String,
    /// Workload and its settings.
    pub setup: Setup,
    /// Message of the kernel that said hello; `None` for a guest without the protocol.
    pub hello: Option<Hello>,
    /// Problem that it solved, for a kernel with classes.
    pub problem: Option<Problem>,
    /// How the run ended: `success`, `stopped`, `timed out`, `interrupted`, `crashed: WHY`, or the guest's reason.
    pub outcome: String,
    /// All that is known about a crash, with the registers, over several lines; `None` without a crash.
    #[serde(default)]
    pub crash: Option<String>,
    /// Number of times that it reset its machine and booted again. Its output and measurements are of the last boot.
    #[serde(default)]
    pub resets: u64,
    /// Main figure of the run, for a built-in kernel with a known clock. It is among `results` too.
    pub figure: Option<Figure>,
    /// The guest's own verification, if it has one.
    pub verification: Option<Verification>,
    /// The guest's own measurements, by name.
    pub results: BTreeMap<String, Measurement>,
    /// Timed parts, in order.
    pub phases: Vec<Phase>,
    /// Times for which each vCPU was kept from its work.
    pub gaps: Vec<Gaps>,
    /// The guest's data and their backing, at the end of the last timed part; at the end of the run if that cut a
    /// part off.
    pub regions: Vec<Region>,
    /// Guest RAM at the end of the run, whatever ran in it; `None` if it could not be read.
    #[serde(default)]
    pub ram_at_end: Option<RamAtEnd>,
    /// Work of the manager.
    pub manager: ManagerSummary,
    /// Work of the devices, in the order in which the guest finds them.
    #[serde(default)]
    pub devices: Vec<DeviceReport>,
    /// Output of the guest that was not kept or written, by kind: lines that standard error did not take
    /// (`stderr_lines`), bytes of a console (`console_bytes`), and kinds of lines that have a limit.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cut: BTreeMap<String, u64>,
    /// Memory and time that the VMM itself used.
    pub vmm: VmmCost,
    /// Machine of the run.
    pub environment: Environment,
}

/// Workload and its settings.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Setup {
    /// Name of the kernel or image.
    pub workload: String,
    /// Parameters of the workload.
    pub cmdline: String,
    /// Size of the problem, for a built-in kernel that has classes.
    pub class: Option<String>,
    /// Mode of the run: `guest` or `native`.
    pub mode: String,
    /// Paging of the guest: `ept`, `npt`, `shadow`, or `none` for a native run.
    pub paging: String,
    /// What the speeds are evidence of.
    pub evidence: String,
    /// Size of guest RAM, in bytes.
    pub memory_bytes: u64,
    /// RAM that a built-in kernel needs, in bytes, if it does not take all of it.
    pub memory_needed_bytes: Option<u64>,
    /// Number of vCPUs or threads.
    pub vcpus: u32,
    /// Kind of backing: `anon`, `memfd` or `hugetlb`.
    pub backing: String,
    /// Host page size at the start.
    pub host_page: String,
    /// Page size of the guest's tables; `none` for a native run. `None` if it is unknown, because a foreign image
    /// has its own tables.
    pub guest_page: Option<String>,
    /// Policy at the start.
    pub policy: String,
    /// Reason why the backing differs from the requested one, if it does.
    pub fallback: Option<String>,
    /// Assumed cost of a TLB miss, for policies that use it, and its source.
    #[serde(default)]
    pub walk_cost: String,
    /// Restrictions of the process; `None` for a native run, or without a sandbox.
    #[serde(default)]
    pub sandbox: Option<Sandboxed>,
}

/// Self-description of a kernel before it runs.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Hello {
    /// Name of the kernel; `program` for a program in a Linux guest.
    pub kernel: String,
    /// Number of vCPUs or threads that took part; in a Linux guest, perhaps fewer than the guest has.
    pub vcpus: u32,
    /// Requested page size of its memory.
    pub guest_page: String,
    /// Entry point: `pvh`, `direct`, `native` or `linux`.
    pub entry: String,
}

impl Hello {
    /// Values of the `hello` line.
    pub fn new(kernel: Name<'_>, vcpus: u32, guest_page: GuestPage, entry: Entry) -> Hello {
        Hello { kernel: kernel.to_string(), vcpus, guest_page: guest_page.to_string(), entry: entry.to_string() }
    }

    /// Name of a worker, for people: a process has threads, the built-in guest image has the vCPUs themselves.
    pub fn worker(&self) -> &'static str {
        match Entry::from_word(&self.entry) {
            Some(Entry::Native | Entry::Linux) => "thread",
            Some(Entry::Pvh | Entry::Direct) | None => "vCPU",
        }
    }
}

/// Problem of a kernel with classes: Class, Size and Iterations of an NPB result block.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Letter of the class.
    pub class: String,
    /// Size: one number, or the edges of a grid such as `64x64x64`.
    pub size: String,
    /// Number of repetitions of the timed part; 0 for a kernel without iterations.
    pub iterations: u32,
}

impl Problem {
    /// Values of the `problem` line.
    pub fn new(class: Name<'_>, size: Name<'_>, iterations: u32) -> Problem {
        Problem { class: class.to_string(), size: size.to_string(), iterations }
    }
}

/// A number with its unit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Measurement {
    /// Value of the measurement.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
}

/// The main measurement of a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Figure {
    /// Name among the results.
    pub name: String,
    /// Value of the figure.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
}

impl Figure {
    /// Main figure of a kernel among its results; `None` for an unknown kernel, or if it did not print the figure.
    pub fn of(kernel: &str, results: &BTreeMap<String, Measurement>) -> Option<Figure> {
        let name = registry::by_name(kernel)?.figure.name.to_string();
        let Measurement { value, unit } = results.get(&name)?.clone();
        Some(Figure { name, value, unit })
    }
}

/// Result of the guest's verification.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Verification {
    /// Whether its rule is met.
    pub passed: bool,
    /// Number of wrong words.
    pub errors: u64,
    /// Number of words checked.
    pub checked: u64,
    /// First wrong word, if the guest named it.
    pub first_mismatch: Option<String>,
}

/// Host backing and second-level mappings at one instant.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Counters {
    /// Guest RAM in base pages, in bytes.
    pub host_4k_bytes: u64,
    /// Guest RAM in huge pages, in bytes.
    pub host_2m_bytes: u64,
    /// Guest RAM in giant pages, in bytes.
    pub host_1g_bytes: u64,
    /// KVM's leaf mappings, if there is a second level.
    pub kvm: Option<KvmPages>,
}

/// Backing of guest RAM at the end of a run, and KVM's mappings of it: no vCPU runs any more, and the VM still exists.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct RamAtEnd {
    /// Backing by page size, in bytes; KVM's leaf mappings by number.
    #[serde(flatten)]
    pub counters: Counters,
    /// Guest RAM without a host page behind it, in bytes.
    pub host_unbacked_bytes: u64,
}

impl RamAtEnd {
    /// Counters of guest RAM of `ram_bytes`.
    pub fn new(counters: Counters, ram_bytes: u64) -> RamAtEnd {
        let backed = counters.host_4k_bytes + counters.host_2m_bytes + counters.host_1g_bytes;
        RamAtEnd { counters, host_unbacked_bytes: ram_bytes.saturating_sub(backed) }
    }
}

/// KVM's counters of leaf mappings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct KvmPages {
    /// Number of 4 KiB leaves.
    pub pages_4k: u64,
    /// Number of 2 MiB leaves.
    pub pages_2m: u64,
    /// Number of 1 GiB leaves.
    pub pages_1g: u64,
}

impl From<MappingStats> for KvmPages {
    fn from(stats: MappingStats) -> KvmPages {
        KvmPages { pages_4k: stats.pages_4k, pages_2m: stats.pages_2m, pages_1g: stats.pages_1g }
    }
}

/// A timed part of the run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Phase {
    /// Name of the part.
    pub name: String,
    /// Length by the guest's clock, in seconds.
    pub seconds: f64,
    /// Begin, in seconds after the manager's start.
    pub began_at_s: f64,
    /// Counters exactly at its begin.
    pub at_begin: Counters,
    /// Counters exactly at its end, or at the end of the run if that came first.
    pub at_end: Counters,
    /// Whether it was completed; a run that was stopped leaves an incomplete part behind.
    #[serde(default = "yes")]
    pub is_complete: bool,
    /// Units of work done.
    pub units: u64,
    /// Units of work per second over the whole part.
    pub rate_per_s: f64,
    /// Rate until the first promotion was done, from progress marks.
    pub rate_before_promotion_per_s: Option<f64>,
    /// Rate since the last promotion was done, from progress marks.
    pub rate_after_promotion_per_s: Option<f64>,
    /// Progress marks: seconds since the begin by the guest's clock, and units of work done.
    pub progress: Vec<(f64, u64)>,
}

/// Default for older reports, which have no incomplete phases.
const fn yes() -> bool {
    true
}

/// Durations of a vCPU's smallest measured batch of work.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Gaps {
    /// Number of the vCPU.
    pub vcpu: u32,
    /// Number of batches measured.
    pub count: u64,
    /// p50 (median), in nanoseconds.
    pub p50_ns: u64,
    /// p99, in nanoseconds.
    pub p99_ns: u64,
    /// p99.9, in nanoseconds.
    pub p999_ns: u64,
    /// Maximum, in nanoseconds.
    pub max_ns: u64,
}

/// Place of the guest's data, and their backing.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Region {
    /// Name of the data.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Number of whole windows in it.
    pub windows: u64,
    /// Number of these windows that the host backs with 2 MiB or more.
    pub windows_host_large: u64,
}

/// Prefix of the outcomes that policies count about their own decisions.
pub const OF_POLICIES: &str = "policy.";

/// Work of the manager.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ManagerSummary {
    /// Policies that replaced the policy of the setup, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policy_changes: Vec<PolicyChange>,
    /// Number of rounds of the loop.
    pub ticks: u64,
    /// Actions by `mechanism.result`, and policies' own counters as `policy.name`.
    pub outcomes: BTreeMap<String, u64>,
    /// Failures of sensors, by name.
    pub sensor_failures: BTreeMap<String, u64>,
    /// Number of times that the budget refused an action.
    pub budget_refusals: u64,
    /// Bytes copied by promotions.
    pub copied_bytes: u64,
    /// Bytes that became resident only because their page is large.
    pub bloat_bytes: u64,
    /// CPU time of the whole loop, in seconds.
    pub cpu_s: f64,
    /// Time of the first completed action, in seconds after the manager's start.
    pub first_done_at_s: Option<f64>,
    /// Time of the last completed action, in seconds after the manager's start.
    pub last_done_at_s: Option<f64>,
    /// Copying speed while copying, in GiB/s.
    pub copy_gib_per_s: Option<f64>,
    /// Upper bound of the time for which each promoted window was unavailable.
    pub unavailable: Option<Histogram>,
    /// KVM's totals compared with the host's backing: the second check of every promotion.
    pub kvm_check: Option<KvmCheckSummary>,
    /// Counters over time.
    pub samples: Vec<SampleAt>,
    /// Work of the sensors that do not run at every tick, by name.
    pub sensors: BTreeMap<String, SensorSummary>,
    /// Questions of the policy that this host cannot answer, each with the reason.
    pub unanswered: Vec<String>,
    /// Panics during actions, and the ranges that are left alone since.
    pub panics: Vec<String>,
    /// Bytes that the host got back.
    pub released_bytes: u64,
    /// State of the recording, if there is one.
    pub recording: Option<RecordingSummary>,
}

/// A policy that replaced another while the guest ran.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PolicyChange {
    /// Time of the change, in seconds after the manager's start.
    pub at_s: f64,
    /// Name of the new policy.
    pub policy: String,
}

/// Work of a sensor, and its cost.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct SensorSummary {
    /// Number of samples taken.
    pub samples: u64,
    /// Number of windows sampled, with repetitions.
    pub windows: u64,
    /// Number of windows in the latest sample.
    pub latest_windows: u64,
    /// Number of ticks without a sample, because its share of a core was used up.
    pub ticks_without: u64,
    /// Number of times that it skipped a range because a giant of it was being moved.
    pub claimed: u64,
    /// Number of times that the guest had to wait for it.
    pub waits: u64,
    /// CPU time in the manager's thread, in seconds.
    pub cpu_s: f64,
}

/// State of a recording.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RecordingSummary {
    /// Number of snapshots, plans and outcomes in it.
    pub frames: u64,
    /// Number of those that could not be written.
    pub frames_lost: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Reason why it is incomplete, if it is.
    pub error: Option<String>,
}

/// KVM's totals compared with the host's backing.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct KvmCheckSummary {
    /// Large mappings in windows at the manager's first check.
    pub large_windows_at_first: u64,
    /// Maximum at any later check.
    pub large_windows_at_most: u64,
    /// Number of checks at which KVM had more large mappings than the host has large windows.
    pub contradictions: u64,
}

/// A distribution of times.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Histogram {
    /// Number of values.
    pub count: u64,
    /// p50 (median), in microseconds.
    pub p50_us: f64,
    /// p90, in microseconds.
    pub p90_us: f64,
    /// p99, in microseconds.
    pub p99_us: f64,
    /// Maximum, in microseconds.
    pub max_us: f64,
    /// Counts by upper border in microseconds, powers of two.
    pub buckets: Vec<(f64, u64)>,
}

/// Counters at one tick.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct SampleAt {
    /// Time of the tick, in seconds after the manager's start.
    pub at_s: f64,
    /// Counters at that time.
    #[serde(flatten)]
    pub counters: Counters,
}

/// Memory and time that the VMM itself used.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct VmmCost {
    /// Resident memory of the process beyond guest RAM, at the end of the last timed part.
    pub resident_beyond_guest_ram_bytes: Option<u64>,
    /// Time from the start of the process to the guest's first byte on its serial port.
    pub first_byte_ms: Option<f64>,
}

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

/// A table in the common style, with numbers aligned right.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header.iter().copied());
    table
}

/// As [`table`], for columns of sentences. In a pipe or a file, which have no width, they are wrapped.
pub fn prose_table(header: &[&str]) -> Table {
    /// Width that a mail, a manual page and half of a wide terminal show.
    const COLUMNS: u16 = 100;
    let mut table = table(header);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(COLUMNS);
    }
    table
}

/// A cell that holds a number.
pub fn number(text: impl ToString) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
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
        if let Some(Verification { passed, .. }) = self.verification {
            line("verification", if *passed { &"SUCCESSFUL" } else { &"UNSUCCESSFUL" });
        }
    }
}

/// Whether the guest verified its memory.
pub fn write_verification(out: &mut String, verification: Option<&Verification>) {
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

impl RunReport {
    /// The report as a table for people; with `is_verbose`, also policies' counters of their own decisions.
    pub fn to_table(&self, is_verbose: bool) -> String {
        let mut out = format!("{}\n", self.headline);
        let Setup { workload, cmdline, mode, paging, evidence, .. } = &self.setup;
        let _ = writeln!(out, "{workload} {cmdline}\n  {mode}, paging: {paging} ({evidence})");
        let _ = writeln!(
            out,
            "  {} RAM{}, {} vCPU, {} backing, {} host pages at the start, guest pages {}, policy {}",
            Bytes::new(self.setup.memory_bytes),
            self.setup.memory_needed_bytes.map_or(String::new(), |needed| format!(" (needs {})", mebibytes(needed))),
            self.setup.vcpus,
            self.setup.backing,
            self.setup.host_page,
            self.setup.guest_page.as_deref().unwrap_or("unknown"),
            self.setup.policy
        );
        if is_verbose && self.setup.policy.starts_with("auto") {
            let _ = writeln!(out, "  auto uses {}", self.setup.walk_cost);
        }
        for PolicyChange { at_s, policy } in &self.manager.policy_changes {
            let _ = writeln!(out, "  policy {policy} from {at_s:.1} s on");
        }
        if let Some(why) = &self.setup.fallback {
            let _ = writeln!(out, "  fallback: {why}");
        }
        if let Some(Sandboxed { layers, capabilities_kept, missing }) = &self.setup.sandbox {
            let _ = writeln!(out, "  sandbox: {}", layers.join(", "));
            capabilities_kept.iter().chain(missing).for_each(|line| {
                let _ = writeln!(out, "    {line}");
            });
        }
        if !self.phases.is_empty() {
            let mut phases =
                table(&["phase", "seconds", "rate", "before promotion", "after", "host 4k", "host 2m", "host 1g"]);
            for phase in &self.phases {
                let optional = |r: Option<f64>| r.map_or("-".into(), rate);
                let whole = (phase.units > 0).then_some(phase.rate_per_s);
                let cut_off = if phase.is_complete { "" } else { " (cut off)" };
                phases.add_row([
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
            let _ = writeln!(out, "{phases}");
            for phase in self.phases.iter().filter(|phase| phase.at_end.kvm.is_some()) {
                let (from, to) = (phase.at_begin.kvm.unwrap_or_default(), phase.at_end.kvm.unwrap_or_default());
                let _ = writeln!(
                    out,
                    "  {}: KVM maps pages_4k {} -> {}, pages_2m {} -> {}, pages_1g {} -> {}",
                    phase.name, from.pages_4k, to.pages_4k, from.pages_2m, to.pages_2m, from.pages_1g, to.pages_1g
                );
            }
        }
        for region in &self.regions {
            let share = PerTenThousand::of(region.windows_host_large, region.windows);
            let Region { name, windows, windows_host_large, bytes } = region;
            let _ = writeln!(
                out,
                "  {name}: {}, {windows_host_large} of {windows} windows on large host pages ({share})",
                Bytes::new(*bytes)
            );
        }
        self.write_ram_at_end(&mut out);
        write_results(&mut out, &self.results);
        write_gaps(&mut out, &self.gaps);
        self.write_manager(&mut out, is_verbose);
        write_devices(&mut out, &self.devices);
        for (what, count) in &self.cut {
            let _ = writeln!(out, "  not kept of the guest's output: {} {count}", what.replace('_', " "));
        }
        if let Some(bytes) = self.vmm.resident_beyond_guest_ram_bytes {
            let _ = writeln!(out, "  resident beyond guest RAM: {:.2} MiB", bytes as f64 / f64::from(1 << 20));
        }
        if let Some(ms) = self.vmm.first_byte_ms {
            let _ = writeln!(out, "  start to the guest's first byte: {ms:.2} ms");
        }
        if let (Some(hello), Some(figure)) = (&self.hello, &self.figure) {
            let (problem, verification) = (self.problem.as_ref(), self.verification.as_ref());
            FigureBlock { hello, problem, figure, results: &self.results, verification }.write(&mut out);
        }
        write_verification(&mut out, self.verification.as_ref());
        if self.resets > 0 {
            let _ = writeln!(out, "  booted again {} times; its output is of the last boot", self.resets);
        }
        let _ = writeln!(out, "  outcome: {}", self.outcome);
        out
    }

    fn write_ram_at_end(&self, out: &mut String) {
        let Some(RamAtEnd { counters, host_unbacked_bytes }) = self.ram_at_end else { return };
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
            let _ =
                writeln!(out, "  at the end: KVM maps pages_4k {pages_4k}, pages_2m {pages_2m}, pages_1g {pages_1g}");
        }
    }

    fn write_manager(&self, out: &mut String, is_verbose: bool) {
        let manager = &self.manager;
        let is_shown = |name: &&String| is_verbose || !name.starts_with(OF_POLICIES);
        for (name, count) in manager.outcomes.iter().filter(|(name, _)| is_shown(name)) {
            let _ = writeln!(out, "  manager: {name}: {count}");
        }
        for (name, sensor) in &manager.sensors {
            let SensorSummary { samples, windows, latest_windows, ticks_without, claimed, waits, cpu_s } = sensor;
            let cpu_ms = cpu_s * 1e3;
            let _ = writeln!(
                out,
                "  manager: sensor {name}: {samples} samples, {windows} windows ({latest_windows} in the last); \
                skipped on \
                {ticks_without} ticks for lack of budget and {claimed} times during a 1 GiB move; {waits} guest \
                stalls, {cpu_ms:.1} ms of CPU"
            );
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
    }
}
