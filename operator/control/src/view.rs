//! Description of a VM, as plain data. It has the same form from the daemon that manages the VM and from a command that
//! looks at the process once.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::vm::PastSavesView;

pub use crate::map::{MapReason, WindowMap, WindowRange, WindowState};
pub use crate::numa::{NodeView, NumaView};
pub use crate::units::ByteCount;

/// The daemon and its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DaemonView {
    /// Version of the program.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// Number of managed VMs.
    pub vms: usize,
    /// Guest memory that may be copied per second over all VMs, in bytes.
    pub copy_per_second: ByteCount,
    /// Share of a core that actions may take, over all VMs, in ten thousandths.
    pub cpu_share: u32,
    /// CPU time that the daemon has used, in seconds.
    pub cpu_s: f64,
    /// Free memory of the host, in bytes.
    pub host_free: ByteCount,
    /// Whether free memory is below the watermark, so that no promotion may take more memory.
    pub is_host_short: bool,
    /// Memory that can become large pages; `None` where the kernel does not tell, and from daemons of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promotable: Option<PromotableView>,
}

/// Free memory of the host that can become large pages, in bytes. The memory that the daemon keeps free on the host
/// is not in it. Only an attempt is certain: a page in use can be pinned or freed at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromotableView {
    /// Memory in free blocks of 2 MiB and more.
    pub now_2m: ByteCount,
    /// Memory in pages of the pool of 1 GiB that are neither in use nor reserved.
    pub now_1g: ByteCount,
    /// Memory that may be in free blocks of 2 MiB after compaction, with those that are free now.
    pub compacted_2m: ByteCount,
    /// Upper bound on memory in pages of 1 GiB after compaction, with those that are free now. The kernel does not tell
    /// which gibibytes can be emptied.
    pub compacted_1g: ByteCount,
}

/// Program that runs a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vmm {
    /// A QEMU process.
    Qemu,
    /// A `wideleaf run` process.
    Wideleaf,
    /// A Firecracker process.
    Firecracker,
    /// A Cloud Hypervisor process.
    CloudHypervisor,
    /// A crosvm process.
    Crosvm,
    /// Another program with KVM guests, or one that this version of the protocol does not name.
    #[serde(other)]
    Other,
}

/// State of the management of a VM's pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Care {
    /// No manager of ours: the VM is only observed.
    Unmanaged,
    /// A manager acts on it.
    Managed,
    /// The VM's policy is `off`.
    Off,
    /// A manager has the VM and does nothing for now.
    LeftAlone {
        /// Reason in one line.
        reason: String,
    },
}

/// Description of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Name of the libvirt domain, or the name that the guest's VMM was started with, or the process id.
    pub name: String,
    /// UUID of the libvirt domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Process that runs the VM.
    pub pid: u32,
    /// Start of that process, in clock ticks since boot (proc_pid_stat(5)). With the id it names one
    /// process for ever.
    pub started_at: u64,
    /// Program that runs the VM.
    pub vmm: Vmm,
    /// Path of its control group below the root (cgroups(7)); `None` where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Management of its pages.
    #[serde(flatten)]
    pub care: Care,
    /// Policy as on the command line; `None` for an unmanaged VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Coverage that it should reach.
    #[serde(default)]
    pub guarantee: Guarantee,
    /// RAM of the VM, piece by piece.
    pub ram: Vec<RamView>,
    /// All of its RAM by what backs it on the host; `None` where that cannot be seen.
    #[serde(default)]
    pub backing: Option<BackingView>,
    /// Time since the latest scan of all windows, in seconds: the largest age of `backing`. `None` before the first
    /// scan, and from earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_age_s: Option<f64>,
    /// Mappings that KVM uses for it; `None` where KVM cannot be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapping: Option<MappingView>,
    /// Memory of the page tables themselves; `None` where the process could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_tables: Option<PageTablesView>,
    /// Its memory and vCPUs by NUMA node; `None` on a host with one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaView>,
    /// Page sizes in the guest's own page tables; `None` where they were not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_pages: Option<GuestPagesView>,
    /// Memory that the host saves on it.
    #[serde(default, skip_serializing_if = "SavedView::is_unknown")]
    pub saved: SavedView,
    /// Work of its manager; `None` for an unmanaged VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<WorkView>,
    /// Missing or estimated figures, each with the reason and the privilege or option that would provide it.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl VmView {
    /// Resident memory in bytes; `None` where that cannot be seen.
    pub fn resident(&self) -> Option<ByteCount> {
        Some(self.backing?.resident())
    }

    /// Share of resident memory in pages of 2 MiB or more, in ten thousandths. `None` where nothing is
    /// resident or visible.
    pub fn coverage(&self) -> Option<u32> {
        self.backing?.coverage()
    }

    /// Whether the VM meets its guarantee; `None` for best effort, and where nothing is resident.
    pub fn is_guarantee_met(&self) -> Option<bool> {
        match self.guarantee.share() {
            None => None,
            Some(share) => self.coverage().map(|coverage| coverage >= share),
        }
    }
}

/// An age in seconds, that much later; unknown stays unknown.
pub fn aged(age_s: Option<f64>, later: Duration) -> Option<f64> {
    age_s.map(|age| age + later.as_secs_f64())
}

/// Name of a policy, without its parameters: `auto` of `auto:weight=2`.
pub fn policy_name(policy: &str) -> &str {
    policy.split_once(':').map_or(policy, |(name, _)| name)
}

/// Coverage that a VM should reach, in KubeVirt's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guarantee {
    /// `bestEffort`: as much as the budget and the host allow.
    #[default]
    BestEffort,
    /// `bestEffort:95%`: that share of its resident memory in large pages, in ten thousandths. It is pursued, and a VM
    /// that stays below it is reported. It never prevents a start.
    Sought(u32),
    /// `guaranteed:95%`: as [`Guarantee::Sought`]. A start that cannot meet it is refused.
    Coverage(u32),
}

impl Guarantee {
    /// Share of `guaranteed` without a number, in ten thousandths.
    const SHARE_DEFAULT: u32 = 9_500;

    /// Share of resident memory to reach, in ten thousandths; `None`: any is enough.
    pub const fn share(self) -> Option<u32> {
        match self {
            Guarantee::BestEffort => None,
            Guarantee::Sought(share) | Guarantee::Coverage(share) => Some(share),
        }
    }

    /// Whether a start that cannot meet it is refused.
    pub const fn prevents_start(self) -> bool {
        matches!(self, Guarantee::Coverage(_))
    }
}

/// Text that is not a guarantee.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a guarantee: write bestEffort, guaranteed:95%, bestEffort:95% (reported, no start is refused), \
     or a share of memory in large pages like 95% or 99.5%, which means guaranteed"
)]
pub struct GuaranteeError {
    /// Text as written.
    pub text: String,
}

/// `bestEffort` (also `best-effort`) or `guaranteed`, each with an optional `:SHARE`; or a share alone, which is
/// guaranteed. Shares are above zero and up to 100 % with up to two decimals. Output shows the shortest form.
impl FromStr for Guarantee {
    type Err = GuaranteeError;

    fn from_str(text: &str) -> Result<Guarantee, GuaranteeError> {
        let (word, share) = text.split_once(':').map_or((text, None), |(word, share)| (word, Some(share)));
        let read = match (word, share) {
            ("bestEffort" | "best-effort", None) => Some(Guarantee::BestEffort),
            ("bestEffort" | "best-effort", Some(share)) => share_of(share).map(Guarantee::Sought),
            ("guaranteed", None) => Some(Guarantee::Coverage(Guarantee::SHARE_DEFAULT)),
            ("guaranteed", Some(share)) => share_of(share).map(Guarantee::Coverage),
            (share, None) => share_of(share).map(Guarantee::Coverage),
            _ => None,
        };
        read.ok_or_else(|| GuaranteeError { text: text.to_owned() })
    }
}

/// `95%` or `99.5%` in ten thousandths.
fn share_of(text: &str) -> Option<u32> {
    let (whole, decimals) = text.strip_suffix('%')?.split_once('.').unwrap_or((text.strip_suffix('%')?, "0"));
    let is_number = |digits: &str, most: usize| {
        (1..=most).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit())
    };
    if !is_number(whole, 3) || !is_number(decimals, 2) {
        return None;
    }
    let share: u32 = format!("{whole}{decimals:0<2}").parse().ok()?;
    (1..=10_000).contains(&share).then_some(share)
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.prevents_start() { "" } else { "bestEffort" };
        let Some(share) = self.share() else { return f.write_str(word) };
        let colon = if word.is_empty() { "" } else { ":" };
        match (share / 100, share % 100) {
            (whole, 0) => write!(f, "{word}{colon}{whole}%"),
            (whole, hundredths) => write!(f, "{word}{colon}{whole}.{hundredths:02}%"),
        }
    }
}

/// One piece of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamView {
    /// Name of QEMU's memory backend or of the mapping.
    pub name: String,
    /// First guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub bytes: ByteCount,
    /// First address in the VM's process.
    pub hva: u64,
    /// `anonymous`, `shmem`, `hugetlb` or `file`.
    pub kind: String,
    /// Whether the guest-physical addresses are a guess from the process's mappings.
    pub is_guess: bool,
    /// Why no window of it can ever be huge, and options of the guest that would change that; `None` where they can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub never_huge: Option<String>,
}

/// Guest RAM by what backs it on the host, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingView {
    /// Memory without a page.
    pub unbacked: ByteCount,
    /// Memory in pages of 4 KiB.
    pub base_4k: ByteCount,
    /// Memory in pages of 2 MiB.
    pub huge_2m: ByteCount,
    /// Memory in pages of 1 GiB.
    pub giant_1g: ByteCount,
    /// Memory that no huge page can back because of the address or file offset of its mapping, with or without pages.
    pub misaligned: ByteCount,
}

impl BackingView {
    /// Resident memory in bytes.
    pub fn resident(&self) -> ByteCount {
        self.base_4k + self.huge_2m + self.giant_1g
    }

    /// Share of resident memory in pages of 2 MiB or more, in ten thousandths; `None` where nothing is resident.
    pub fn coverage(&self) -> Option<u32> {
        let large = u128::from(self.huge_2m + self.giant_1g);
        (large * 10_000).checked_div(u128::from(self.resident())).map(|share| share as u32)
    }
}

/// Number of KVM's leaf mappings by size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingView {
    /// Mappings of 4 KiB.
    pub pages_4k: u64,
    /// Mappings of 2 MiB.
    pub pages_2m: u64,
    /// Mappings of 1 GiB.
    pub pages_1g: u64,
}

/// Memory of page tables, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageTablesView {
    /// Page tables of the process that runs the VM; `None` where the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ByteCount>,
    /// Second-level page tables of the whole host, of all VMs together: the kernel has no number for one VM. `None`
    /// before Linux 6.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_level_of_host: Option<ByteCount>,
}

/// Memory that the host saves on a VM, in bytes. A note has the reason for an unknown figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedView {
    /// Memory that is swapped out; `None` where that is not known.
    #[serde(default)]
    pub swapped: Option<ByteCount>,
    /// Memory of its process that shares pages with equal memory (KSM); `None` where the kernel does not tell.
    #[serde(default)]
    pub merged: Option<ByteCount>,
}

impl SavedView {
    /// Whether neither figure is known.
    pub const fn is_unknown(&self) -> bool {
        self.swapped.is_none() && self.merged.is_none()
    }
}

/// Windows (2 MiB of guest-physical memory) by the page size that the guest's own tables map them with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPagesView {
    /// Windows on base pages.
    pub base_4k: u64,
    /// Windows on a huge page.
    pub huge_2m: u64,
    /// Windows in a giant page.
    pub giant_1g: u64,
    /// Windows with more than one size.
    pub mixed: u64,
    /// Windows that are not mapped.
    pub unmapped: u64,
    /// Windows in tables that were not read.
    pub unknown: u64,
}

/// Work of a manager for a VM since it took the VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkView {
    /// Actions by mechanism and outcome, as `collapse` → `done` → 12.
    pub outcomes: BTreeMap<String, BTreeMap<String, u64>>,
    /// Guest memory copied by promotions, in bytes.
    pub copied: ByteCount,
    /// Memory that became resident only because its page is large, in bytes.
    pub bloat: ByteCount,
    /// CPU time of actions, in seconds.
    pub action_cpu_s: f64,
    /// CPU time with sensing and deciding included, in seconds.
    pub total_cpu_s: f64,
    /// Number of actions that the budget refused.
    pub budget_refusals: u64,
    /// Durations for which windows were out of the guest's reach.
    pub unavailable: Quantiles,
    /// Estimated time that the guest spends on page walks, in ten thousandths of one CPU; `None`
    /// without a measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub walk_share: Option<u32>,
    /// The latest actions, oldest first.
    #[serde(default)]
    pub latest: Vec<ActionView>,
    /// Failures of sensors, by name.
    #[serde(default)]
    pub sensor_failures: BTreeMap<String, u64>,
    /// Number of windows that changed without the manager: `at_fault` (large at the first touch), `collapsed`
    /// (made large by khugepaged or by a call of the VMM) and `split`.
    #[serde(default)]
    pub by_kernel: BTreeMap<String, u64>,
    /// Whether windows are being brought back after an event.
    #[serde(default)]
    pub is_recovering: bool,
    /// Recoveries by event: `migration`, `arrival`, `dirty_log`, `snapshot`, `faults_served`, `stop`, `balloon`,
    /// `unseen`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub recoveries: BTreeMap<String, RecoveriesView>,
    /// Snapshots and migrations of a registered run that are over; left out before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saves: Option<PastSavesView>,
}

/// Recoveries after events of one kind: the large windows of before became large again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecoveriesView {
    /// Number of recoveries after which 99 % were large again.
    pub done: u64,
    /// Number of recoveries that were cut off before: by their longest time, or by another event.
    pub cut_off: u64,
    /// Time from the end of the event until 99 % were large again, at the latest recovery, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_s: Option<f64>,
    /// Sum of these times, in seconds.
    pub sum_s: f64,
    /// Longest of these times, in seconds.
    pub max_s: f64,
}

/// A histogram in a few numbers, and in Prometheus' form.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// Number of values.
    pub count: u64,
    /// Sum of the values, in seconds.
    pub sum_s: f64,
    /// Median (p50), in seconds.
    pub median_s: f64,
    /// 99th percentile (p99), in seconds.
    pub p99_s: f64,
    /// Maximum, in seconds.
    pub max_s: f64,
    /// Number of values at or below each of [`PAUSE_BOUNDS_S`].
    #[serde(default)]
    pub at_most: Vec<u64>,
}

/// Upper bounds of the buckets for pauses, in seconds: from a split to a stall of shared memory, and beyond.
pub const PAUSE_BOUNDS_S: [f64; 10] = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2];

/// One finished action.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActionView {
    /// Time in seconds since the epoch.
    pub at_s: f64,
    /// First guest-physical address of its window.
    pub gpa: u64,
    /// Mechanism that carried it out.
    pub mechanism: String,
    /// Outcome of the action.
    pub outcome: String,
}

/// Reasons for windows that are not huge.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Name of the VM.
    pub name: String,
    /// Number of its windows (2 MiB of guest-physical memory); `None` where they cannot be seen.
    pub windows: Option<u64>,
    /// Number of windows in large pages.
    pub huge: Option<u64>,
    /// Other windows by reason, the most frequent first.
    pub reasons: Vec<Reason>,
    /// Time since the latest scan of all windows, in seconds, as in [`VmView::scan_age_s`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_age_s: Option<f64>,
    /// Page sizes in the guest's own page tables; `None` where they were not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_pages: Option<Box<GuestPagesView>>,
    /// Notes about the VM as a whole.
    pub notes: Vec<String>,
}

/// A reason and its number of windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// For programs: `never_touched`, `holes`, `backing_off_no_huge_page`, …
    pub name: String,
    /// Number of windows.
    pub windows: u64,
    /// For people: its meaning, and what would change it.
    pub text: String,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_vmm_that_a_newer_daemon_names_is_another_program() {
        let read = |name: &str| serde_json::from_str::<Vmm>(name).unwrap();
        assert_eq!(["\"cloud_hypervisor\"", "\"of_tomorrow\""].map(read), [Vmm::CloudHypervisor, Vmm::Other]);
    }

    #[test]
    fn a_guarantee_is_shown_as_it_is_written() {
        for (text, guarantee) in [
            ("bestEffort", Guarantee::BestEffort),
            ("bestEffort:95%", Guarantee::Sought(9_500)),
            ("95%", Guarantee::Coverage(9_500)),
            ("99.50%", Guarantee::Coverage(9_950)),
            ("0.01%", Guarantee::Coverage(1)),
            ("100%", Guarantee::Coverage(10_000)),
        ] {
            assert_eq!(text.parse(), Ok(guarantee));
            assert_eq!(guarantee.to_string(), text);
        }
        assert_eq!("99.5%".parse(), Ok(Guarantee::Coverage(9_950)));
    }

    #[test]
    fn kubevirts_words_and_the_old_spellings_mean_the_same() {
        for (text, guarantee) in [
            ("best-effort", Guarantee::BestEffort),
            ("best-effort:90%", Guarantee::Sought(9_000)),
            ("guaranteed", Guarantee::Coverage(9_500)),
            ("guaranteed:99.5%", Guarantee::Coverage(9_950)),
        ] {
            assert_eq!(text.parse(), Ok(guarantee), "{text}");
        }
        let starts =
            [Guarantee::BestEffort, Guarantee::Sought(1), Guarantee::Coverage(1)].map(Guarantee::prevents_start);
        assert_eq!(starts, [false, false, true]);
    }

    #[test]
    fn the_error_for_a_malformed_share_shows_the_right_form() {
        for text in ["", "95", "%", "0%", "100.01%", "101%", "1e1%", "-5%", "+5%", "95.%", ".5%", "95.123%", "9 5%"]
            .into_iter()
            .chain(["guaranteed:", "bestEffort:95", "besteffort", "Guaranteed", "guaranteed:95%:1", ":95%"])
        {
            let error = text.parse::<Guarantee>().unwrap_err();
            assert!(error.to_string().contains("or a share of memory"), "{text:?}");
        }
    }
}
