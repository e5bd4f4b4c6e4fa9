//! The report of a run: one struct of data, read by programs as JSON. Its field names contain the units.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wideleaf_control::view::NumaView;
use wideleaf_control::vm::MigratedView;
use wideleaf_kernels::registry;
use wideleaf_memory::sensors::page_tables::TableMemory;
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::{Bytes, MappingStats, PerTenThousand};
use wideleaf_protocol::{Entry, GuestPage, Name};

use crate::devices::DeviceReport;
use crate::environment::Environment;
use crate::sandboxed::Sandboxed;

mod continued;

pub use crate::walks::Walks;
pub use continued::{ArrivedReport, Left, RestoredReport};

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
    /// How the run ended: `success`, `stopped`, `migrated`, `timed out`, `interrupted`, `crashed: WHY`, or the guest's
    /// reason.
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
    /// Its memory and vCPUs by NUMA node at the end of the run; `None` on a host with one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaView>,
    /// How its RAM was filled, of a guest that continued from a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<RestoredReport>,
    /// Where it has gone, of a guest that continues in another run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrated: Option<MigratedView>,
    /// Where it came from, of a guest that another run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrived: Option<ArrivedReport>,
    /// The run's guarantee; `None` for best effort without a share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<GuaranteeReport>,
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

/// Whether and when a run met its guarantee. Times are since the guest's start, exact to a quarter of a second.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct GuaranteeReport {
    /// The guarantee: `95%` (guaranteed) or `bestEffort:95%`.
    pub wanted: String,
    /// Reason why the host could not meet it at the start; `None` if it could.
    pub short_at_start: Option<String>,
    /// Time at which it was met for the first time, in seconds; `None` if it never was.
    pub first_met_at_s: Option<f64>,
    /// Begin of the last stretch in which it was met, in seconds; `None` if it was not met at the last look.
    pub met_since_s: Option<f64>,
    /// Time below it in all, in seconds.
    pub below_s: f64,
    /// Time for which it was pursued, in seconds.
    pub pursued_s: f64,
    /// Share of present memory in large pages at the end, from 0 to 1; `None` without present memory.
    pub coverage_at_end: Option<f64>,
    /// Whether it was met at the end; `None` without present memory.
    pub is_met_at_end: Option<bool>,
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
    /// Largest part of any 100 ms for which memory may be out of the guest's reach, like `10%`; `None`: the user named
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_reach: Option<String>,
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

impl Verification {
    /// Whether it says anything: a guest that checked nothing is neither correct nor wrong.
    pub const fn says_something(&self) -> bool {
        self.checked > 0 || !self.passed
    }
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
    /// Page tables of the process, in bytes; `None` in samples over time, and where the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_tables_bytes: Option<u64>,
    /// Second-level page tables of the whole host, of all its guests, in bytes: the kernel has no number for one
    /// guest. `None` as above, and before Linux 6.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_level_tables_of_host_bytes: Option<u64>,
}

impl Counters {
    /// Counters of one observation; `kvm` is `None` without a second level.
    pub fn new(host: HostBacking, kvm: Option<MappingStats>) -> Counters {
        Counters {
            host_4k_bytes: host.base_4k.get(),
            host_2m_bytes: host.huge_2m.get(),
            host_1g_bytes: host.giant_1g.get(),
            kvm: kvm.map(Into::into),
            process_tables_bytes: None,
            second_level_tables_of_host_bytes: None,
        }
    }

    /// These counters with the memory of the page tables.
    #[must_use]
    pub fn with_tables(self, tables: TableMemory) -> Counters {
        Counters {
            process_tables_bytes: tables.process.map(Bytes::get),
            second_level_tables_of_host_bytes: tables.second_level_of_host.map(Bytes::get),
            ..self
        }
    }
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

    /// Share of present memory in pages of 2 MiB or more; `None` without present memory.
    pub fn coverage(&self) -> Option<PerTenThousand> {
        let Counters { host_4k_bytes, host_2m_bytes, host_1g_bytes, .. } = self.counters;
        let large = host_2m_bytes + host_1g_bytes;
        let present = host_4k_bytes + large;
        (present > 0).then(|| PerTenThousand::of(large, present))
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
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
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
    /// Units of work per second over the whole part; 0 if the part is too short for a rate, or the clock unknown.
    pub rate_per_s: f64,
    /// Rate until the first promotion was done, from progress marks.
    pub rate_before_promotion_per_s: Option<f64>,
    /// Rate since the last promotion was done, from progress marks.
    pub rate_after_promotion_per_s: Option<f64>,
    /// Progress marks: seconds since the begin by the guest's clock, and units of work done.
    pub progress: Vec<(f64, u64)>,
    /// Page walks in this part; `None` if they were not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub walks: Option<Walks>,
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
    /// Guest-physical address of its first byte; of a native kernel, its place in RAM.
    #[serde(default)]
    pub address: u64,
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
    /// Number of those at which the guest was paused, so that samples rested.
    #[serde(default)]
    pub ticks_paused: u64,
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
    /// Price of a second-level fault; `None` if no sensor caused such faults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_price: Option<FaultPriceSummary>,
    /// First touches that a policy decided about, by range of RAM; empty for policies that decide about none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_touch_regions: Vec<FirstTouchRegion>,
    /// Questions of the policy that this host cannot answer, each with the reason.
    pub unanswered: Vec<String>,
    /// Panics during actions, and the ranges that are left alone since.
    pub panics: Vec<String>,
    /// Bytes that the host got back.
    pub released_bytes: u64,
    /// State of the recording, if there is one.
    pub recording: Option<RecordingSummary>,
}

/// First touches of one range of RAM, and what became of their pages.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct FirstTouchRegion {
    /// First guest-physical address of the range.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Number of faults that the service received.
    pub faults: u64,
    /// Windows of 2 MiB that were left to base pages at their first touch.
    pub windows_4k_at_first: u64,
    /// Huge pages at the first touch.
    pub pages_2m_at_first: u64,
    /// Giant pages at the first touch.
    pub pages_1g_at_first: u64,
    /// What was there at the end; `None` if it could not be read.
    pub now: Option<FirstTouchNow>,
    /// Windows and giants that got smaller pages than the policy wanted, by the obstacle.
    pub refused: BTreeMap<String, u64>,
}

/// Pages of a range at the end of a run.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct FirstTouchNow {
    /// Number of base pages.
    pub pages_4k: u64,
    /// Number of huge pages.
    pub pages_2m: u64,
    /// Number of giant pages.
    pub pages_1g: u64,
    /// Huge pages of a first touch that are base pages now.
    pub demoted_2m: u64,
    /// Giant pages of a first touch that are smaller pages now.
    pub demoted_1g: u64,
    /// Windows with a large page at their first touch and no page now, neither present nor, as far as the kernel tells,
    /// swapped out: the guest gave them back.
    pub windows_given_back: u64,
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
    /// Number of windows without a touch that do not count as idle, because the guest hardly ran meanwhile.
    #[serde(default)]
    pub not_run: u64,
    /// Number of times that the guest had to wait for it.
    pub waits: u64,
    /// CPU time in the manager's thread, in seconds.
    pub cpu_s: f64,
}

/// Price of a second-level fault, which the manager's sensors pay for the guest.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct FaultPriceSummary {
    /// Time of one fault, in microseconds.
    pub us: f64,
    /// Source of the price: `assumed`, `measured at first touches`, `measured at refaults`.
    pub source: String,
    /// Number of faults that it was measured from; 0 if it is assumed.
    pub faults: u64,
    /// Number of faults by which 512 mappings come back after a sample; 512 until it is known.
    pub faults_per_512_mappings: u16,
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
