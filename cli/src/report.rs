//! What a run was: one struct, read by programs as JSON and by people as a table. Units are in the names.

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

/// One run of one guest or native kernel, however it ended.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RunReport {
    /// One line for people: the outcome, what large pages the guest got and when, what that cost, what it verified.
    #[serde(default)]
    pub headline: String,
    /// What ran, and how.
    pub setup: Setup,
    /// What said hello in it; nothing for a guest that is none of ours.
    pub hello: Option<Hello>,
    /// What it solved, where a kernel comes in classes.
    pub problem: Option<Problem>,
    /// How it ended: `success`, `stopped`, `timed out`, `interrupted`, `crashed: WHY`, or what the guest said.
    pub outcome: String,
    /// All that is known of a crash, the registers too, over several lines; `None` without one.
    #[serde(default)]
    pub crash: Option<String>,
    /// How often it reset its machine and booted again. What it said and what it measured is of the last boot.
    #[serde(default)]
    pub resets: u64,
    /// The number that stands for the run, where a kernel of ours ran whose clock is known. It is among `results` too.
    pub figure: Option<Figure>,
    /// The guest's own verification, if it has one.
    pub verification: Option<Verification>,
    /// The guest's own measurements, by name.
    pub results: BTreeMap<String, Measurement>,
    /// The timed parts, in order.
    pub phases: Vec<Phase>,
    /// How long each vCPU was kept from its work.
    pub gaps: Vec<Gaps>,
    /// The guest's data and what backs them, at the end of the last timed part; at the run's end where that cut a part
    /// off.
    pub regions: Vec<Region>,
    /// Guest RAM when the run ended, whatever ran in it; `None` where it could not be looked at.
    #[serde(default)]
    pub ram_at_end: Option<RamAtEnd>,
    /// What the manager did.
    pub manager: ManagerSummary,
    /// What its devices did, in the order in which the guest finds them.
    #[serde(default)]
    pub devices: Vec<DeviceReport>,
    /// What the guest said or printed and was not kept or written, by what it was: lines that standard error did not
    /// take (`stderr_lines`), bytes of a console (`console_bytes`), and kinds of lines of which there is a bound.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cut: BTreeMap<String, u64>,
    /// What the VMM itself took.
    pub vmm: VmmCost,
    /// Where it ran.
    pub environment: Environment,
}

/// What ran, and how.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Setup {
    /// Kernel or image.
    pub workload: String,
    /// Its parameters.
    pub cmdline: String,
    /// Size of the problem, for a built-in kernel that has classes.
    pub class: Option<String>,
    /// `guest` or `native`.
    pub mode: String,
    /// `ept`, `npt`, `shadow`, or `none` for a native run.
    pub paging: String,
    /// What the speeds are evidence of.
    pub evidence: String,
    /// Guest RAM.
    pub memory_bytes: u64,
    /// What a built-in kernel needs of it, where it does not take all of it.
    pub memory_needed_bytes: Option<u64>,
    /// vCPUs or threads.
    pub vcpus: u32,
    /// `anon`, `memfd` or `hugetlb`.
    pub backing: String,
    /// Page size at the start.
    pub host_page: String,
    /// Page size of the guest's tables; `none` for a native run. `None`: not known, for an image of another's has
    /// tables of its own.
    pub guest_page: Option<String>,
    /// Policy at the start.
    pub policy: String,
    /// Why the backing is not what was asked for, if so.
    pub fallback: Option<String>,
    /// What a TLB miss counts as, for policies that reckon with it, and where that is from.
    #[serde(default)]
    pub walk_cost: String,
    /// What the process was restricted to; nothing for a native run, or without a sandbox.
    #[serde(default)]
    pub sandbox: Option<Sandboxed>,
}

/// What a kernel says of itself before it runs.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Hello {
    /// Its name; `program` for a program in a Linux guest.
    pub kernel: String,
    /// vCPUs or threads that took part: fewer, in a Linux guest, than the guest may have.
    pub vcpus: u32,
    /// Page size of its memory, as far as it was asked for.
    pub guest_page: String,
    /// How it was started: `pvh`, `direct`, `native` or `linux`.
    pub entry: String,
}

impl Hello {
    /// What the `hello` line says.
    pub fn new(kernel: Name<'_>, vcpus: u32, guest_page: GuestPage, entry: Entry) -> Hello {
        Hello { kernel: kernel.to_string(), vcpus, guest_page: guest_page.to_string(), entry: entry.to_string() }
    }

    /// What takes part, for people: a process has threads, our guest image has the vCPUs themselves.
    pub fn worker(&self) -> &'static str {
        match Entry::from_word(&self.entry) {
            Some(Entry::Native | Entry::Linux) => "thread",
            Some(Entry::Pvh | Entry::Direct) | None => "vCPU",
        }
    }
}

/// What a kernel that comes in classes solved: what a result block of the NPB calls Class, Size and Iterations.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The letter of the class.
    pub class: String,
    /// One number, or the edges of a grid: `64x64x64`.
    pub size: String,
    /// How often the timed part repeated itself; 0 for a kernel that does not.
    pub iterations: u32,
}

impl Problem {
    /// What the `problem` line says.
    pub fn new(class: Name<'_>, size: Name<'_>, iterations: u32) -> Problem {
        Problem { class: class.to_string(), size: size.to_string(), iterations }
    }
}

/// A number with its unit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Measurement {
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: String,
}

/// The measurement that stands for a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Figure {
    /// Its name among the results.
    pub name: String,
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: String,
}

impl Figure {
    /// The one of the results that stands for a run of this kernel; nothing where it is none of ours, or did not print it.
    pub fn of(kernel: &str, results: &BTreeMap<String, Measurement>) -> Option<Figure> {
        let name = registry::by_name(kernel)?.figure.name.to_string();
        let Measurement { value, unit } = results.get(&name)?.clone();
        Some(Figure { name, value, unit })
    }
}

/// What the guest's verification found.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Verification {
    /// Whether its rule is met.
    pub passed: bool,
    /// Wrong words.
    pub errors: u64,
    /// Words looked at.
    pub checked: u64,
    /// The first wrong word, if the guest named it.
    pub first_mismatch: Option<String>,
}

/// Host backing and second-level mappings at one instant.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Counters {
    /// Guest RAM present in base pages.
    pub host_4k_bytes: u64,
    /// In huge pages.
    pub host_2m_bytes: u64,
    /// In giant pages.
    pub host_1g_bytes: u64,
    /// KVM's leaf mappings, where there is a second level.
    pub kvm: Option<KvmPages>,
}

/// What backs guest RAM at the end of a run, and how KVM maps it: no vCPU runs any more, and the VM is still there.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct RamAtEnd {
    /// By page size, in bytes; KVM's leaf mappings by number.
    #[serde(flatten)]
    pub counters: Counters,
    /// Guest RAM without a page of the host's behind it.
    pub host_unbacked_bytes: u64,
}

impl RamAtEnd {
    /// Of `ram_bytes` of guest RAM.
    pub fn new(counters: Counters, ram_bytes: u64) -> RamAtEnd {
        let backed = counters.host_4k_bytes + counters.host_2m_bytes + counters.host_1g_bytes;
        RamAtEnd { counters, host_unbacked_bytes: ram_bytes.saturating_sub(backed) }
    }
}

/// KVM's counters.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct KvmPages {
    /// Leaves of 4 KiB.
    pub pages_4k: u64,
    /// Leaves of 2 MiB.
    pub pages_2m: u64,
    /// Leaves of 1 GiB.
    pub pages_1g: u64,
}

impl From<MappingStats> for KvmPages {
    fn from(stats: MappingStats) -> KvmPages {
        KvmPages { pages_4k: stats.pages_4k, pages_2m: stats.pages_2m, pages_1g: stats.pages_1g }
    }
}

/// A timed part.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// Its length by the guest's clock.
    pub seconds: f64,
    /// When it began, after the manager's start.
    pub began_at_s: f64,
    /// Counters exactly at its begin.
    pub at_begin: Counters,
    /// Counters exactly at its end, or at the run's where that came first.
    pub at_end: Counters,
    /// Whether it came to its end; a run that was ended leaves one behind that did not.
    #[serde(default = "yes")]
    pub is_complete: bool,
    /// Work done.
    pub units: u64,
    /// Units of work per second over the whole part.
    pub rate_per_s: f64,
    /// Until the first promotion was done, from progress marks.
    pub rate_before_promotion_per_s: Option<f64>,
    /// Since the last promotion was done, from progress marks.
    pub rate_after_promotion_per_s: Option<f64>,
    /// How far the work was when: seconds since the begin by the guest's clock, units of work done.
    pub progress: Vec<(f64, u64)>,
}

/// Reports from before a run could leave part of a phase behind.
const fn yes() -> bool {
    true
}

/// How long a vCPU's smallest measured batch of work took.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Gaps {
    /// vCPU.
    pub vcpu: u32,
    /// Batches measured.
    pub count: u64,
    /// Median.
    pub p50_ns: u64,
    /// 99 %.
    pub p99_ns: u64,
    /// 99.9 %.
    pub p999_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

/// Where the guest's data are and what backs them.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Region {
    /// What they are.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// Whole windows in it.
    pub windows: u64,
    /// Of these, backed by the host with 2 MiB or more.
    pub windows_host_large: u64,
}

/// What a policy counted of its own decisions is among the outcomes under names that begin with this.
pub const OF_POLICIES: &str = "policy.";

/// What the manager did.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ManagerSummary {
    /// Policies that took over from the one of the setup, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policy_changes: Vec<PolicyChange>,
    /// Rounds of the loop.
    pub ticks: u64,
    /// Actions by `mechanism.result`, and what policies counted as `policy.name`.
    pub outcomes: BTreeMap<String, u64>,
    /// Sensors that failed.
    pub sensor_failures: BTreeMap<String, u64>,
    /// Times the budget said no.
    pub budget_refusals: u64,
    /// Copied by promotions.
    pub copied_bytes: u64,
    /// Became resident only because the page is large.
    pub bloat_bytes: u64,
    /// CPU time of the loop, all included.
    pub cpu_s: f64,
    /// When the first action was done, after the manager's start.
    pub first_done_at_s: Option<f64>,
    /// When the last action was done.
    pub last_done_at_s: Option<f64>,
    /// Copying speed while copying.
    pub copy_gib_per_s: Option<f64>,
    /// How long each promoted window was unavailable at most.
    pub unavailable: Option<Histogram>,
    /// KVM's totals against the host's backing: the second check of every promotion.
    pub kvm_check: Option<KvmCheckSummary>,
    /// What was seen over time.
    pub samples: Vec<SampleAt>,
    /// What the sensors that are not asked at every tick did, by name.
    pub sensors: BTreeMap<String, SensorSummary>,
    /// Questions of the policy that nothing here can answer, each with the reason.
    pub unanswered: Vec<String>,
    /// What panicked while it acted, and what is left alone since.
    pub panics: Vec<String>,
    /// Memory the host got back.
    pub released_bytes: u64,
    /// What became of the recording, if there is one.
    pub recording: Option<RecordingSummary>,
}

/// A policy that took over while the guest ran.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PolicyChange {
    /// After the manager's start.
    pub at_s: f64,
    /// Its name.
    pub policy: String,
}

/// What a sensor did and what that cost.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct SensorSummary {
    /// Samples taken.
    pub samples: u64,
    /// Windows looked at, again and again.
    pub windows: u64,
    /// Windows of the latest sample.
    pub latest_windows: u64,
    /// Ticks without a sample, because its part of a core was used up.
    pub ticks_without: u64,
    /// Times it left something alone because a giant of it was being moved.
    pub claimed: u64,
    /// Times the guest had to wait for it.
    pub waits: u64,
    /// CPU time in the manager's thread.
    pub cpu_s: f64,
}

/// What became of a recording.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RecordingSummary {
    /// Snapshots, plans and outcomes in it.
    pub frames: u64,
    /// Those that could not be written.
    pub frames_lost: u64,
    /// Its length.
    pub bytes: u64,
    /// Why not, if so.
    pub error: Option<String>,
}

/// KVM's totals against the host's backing.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct KvmCheckSummary {
    /// Large mappings in windows at the manager's first look.
    pub large_windows_at_first: u64,
    /// The most at any later look.
    pub large_windows_at_most: u64,
    /// Looks at which KVM had more of them than the host has large windows.
    pub contradictions: u64,
}

/// A distribution of times.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Histogram {
    /// Values.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 90 %.
    pub p90_us: f64,
    /// 99 %.
    pub p99_us: f64,
    /// Longest.
    pub max_us: f64,
    /// Counts by upper border in microseconds, powers of two.
    pub buckets: Vec<(f64, u64)>,
}

/// Counters at one tick.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct SampleAt {
    /// After the manager's start.
    pub at_s: f64,
    /// What was seen.
    #[serde(flatten)]
    pub counters: Counters,
}

/// What the VMM itself took.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct VmmCost {
    /// Resident memory of the process beyond guest RAM, at the end of the last timed part.
    pub resident_beyond_guest_ram_bytes: Option<u64>,
    /// From the start of the process to the guest's first byte on its serial port.
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

/// A number of a kernel's, which may be of any size: six decimals where they show some of its digits.
fn decimal(value: f64) -> String {
    match value.abs() {
        0.0 | 1e-3..1e15 => format!("{value:.6}"),
        _ => format!("{value:.6e}"),
    }
}

/// Bytes that need not be a round number, for people: whole mebibytes that hold them.
fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// A table in the house's look, numbers to the right.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header.iter().copied());
    table
}

/// As [`table`], for columns of sentences: where no terminal says how wide it is, in a pipe or a file, they are
/// wrapped.
pub fn prose_table(header: &[&str]) -> Table {
    /// What a mail, a page of a manual and a terminal of a diff's two show.
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
            "  gaps of vCPU {}: median {:.1} us, 99 % {:.1} us, 99.9 % {:.1} us, longest {:.1} us",
            gap.vcpu,
            us(gap.p50_ns),
            us(gap.p99_ns),
            us(gap.p999_ns),
            us(gap.max_ns)
        );
    }
}

/// What stands for a run, for people.
pub struct FigureBlock<'a> {
    /// What ran.
    pub hello: &'a Hello,
    /// What was solved, if the guest said so.
    pub problem: Option<&'a Problem>,
    /// The figure.
    pub figure: &'a Figure,
    /// All results, of which the time is shown too.
    pub results: &'a BTreeMap<String, Measurement>,
    /// Whether the figure counts.
    pub verification: Option<&'a Verification>,
}

impl FigureBlock<'_> {
    /// A line for each of what is known, with the words that benchmarks of the NPB end with where they have one for it.
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

/// What each device did: only what it did at all.
fn write_devices(out: &mut String, devices: &[DeviceReport]) {
    for DeviceReport { device, has_driver, counters } in devices {
        let counted = counters.iter().filter(|(_, count)| **count > 0);
        let counted: Vec<_> = counted.map(|(name, count)| format!("{name} {count}")).collect();
        let text = if *has_driver { counted.join(", ") } else { "no driver took it".to_owned() };
        let _ = writeln!(out, "  {device}: {text}");
    }
}

impl RunReport {
    /// For people; `is_verbose` has what policies counted of their own decisions too.
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
            self.setup.guest_page.as_deref().unwrap_or("not known"),
            self.setup.policy
        );
        if is_verbose && self.setup.policy.starts_with("auto") {
            let _ = writeln!(out, "  auto counts {}", self.setup.walk_cost);
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
            let _ = writeln!(out, "  not kept of what the guest printed: {} {count}", what.replace('_', " "));
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
            let _ = writeln!(out, "  booted again {} times; what it said is of the last boot", self.resets);
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
                "  manager: sensor {name}: {samples} samples of {windows} windows ({latest_windows} at last, none at {ticks_without} \
                 ticks, {claimed} times claimed by others), the guest waited {waits} times, {cpu_ms:.1} ms of CPU"
            );
        }
        for question in &manager.unanswered {
            let _ = writeln!(out, "  manager: cannot tell {question}");
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
                "  manager: copied {} at {speed:.2} GiB/s; a window was unavailable for {:.0} us (median), {:.0} us (99 %), {:.0} us (longest)",
                Bytes::new(manager.copied_bytes),
                times.p50_us,
                times.p99_us,
                times.max_us
            );
        }
        if let Some(check) = &manager.kvm_check {
            let _ = writeln!(
                out,
                "  manager: KVM's large mappings rose from {} to {} windows, {} contradictions to the host's backing",
                check.large_windows_at_first, check.large_windows_at_most, check.contradictions
            );
        }
        if let Some(RecordingSummary { frames, bytes, .. }) = &manager.recording {
            let _ = writeln!(out, "  recording: {frames} frames, {}", Bytes::new(*bytes));
        }
        let _ = writeln!(
            out,
            "  manager: {} ticks, {:.1} ms of CPU, bloat {}, budget said no {} times",
            manager.ticks,
            manager.cpu_s * 1e3,
            Bytes::new(manager.bloat_bytes),
            manager.budget_refusals
        );
    }
}
