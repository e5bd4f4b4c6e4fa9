//! What is said about a VM. The same whoever looks: the daemon that manages it, or a command that looks at the process once.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Memory in bytes, as a number in JSON.
pub type ByteCount = u64;

/// The daemon and its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DaemonView {
    /// Of the program.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// VMs that are managed.
    pub vms: usize,
    /// Guest memory that may be copied per second, over all VMs.
    pub copy_per_second: ByteCount,
    /// Share of a core that actions may take, over all VMs, in ten thousandths.
    pub cpu_share: u32,
    /// CPU time it has used, seconds.
    pub cpu_s: f64,
    /// Free memory of the host.
    pub host_free: ByteCount,
    /// Whether free memory is below the watermark, so that nothing is promoted that takes more memory.
    pub is_host_short: bool,
}

/// Who runs a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vmm {
    /// A process of QEMU's.
    Qemu,
    /// `wideleaf run`.
    Wideleaf,
    /// Something else with guests of KVM's.
    Other,
}

/// Who looks after its pages, and whether at the moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Care {
    /// Nobody of ours: it is only looked at.
    Unmanaged,
    /// A manager acts on it.
    Managed,
    /// Its policy is `off`.
    Off,
    /// A manager has it and does nothing for now.
    LeftAlone {
        /// Why: one line.
        reason: String,
    },
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Of the libvirt domain, or what QEMU was given as `-name`, or the process id.
    pub name: String,
    /// Of the libvirt domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its process.
    pub pid: u32,
    /// When that process started, in clock ticks since boot (proc_pid_stat(5)): with the id it names one process for ever.
    pub started_at: u64,
    /// Who runs it.
    pub vmm: Vmm,
    /// Who looks after its pages.
    #[serde(flatten)]
    pub care: Care,
    /// As given on the command line; `None` where nobody manages it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What it is to reach.
    #[serde(default)]
    pub guarantee: Guarantee,
    /// Its RAM, piece by piece.
    pub ram: Vec<RamView>,
    /// All of its RAM by what backs it on the host; `None` where that can not be seen.
    #[serde(default)]
    pub backing: Option<BackingView>,
    /// By what KVM maps it with; `None` where that can not be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapping: Option<MappingView>,
    /// By what the guest's own page tables map it with; `None` where nobody looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_pages: Option<GuestPagesView>,
    /// What the manager has done; `None` where nobody manages it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<WorkView>,
    /// Figures that are missing or guessed, each with the reason and the privilege or option that would bring it.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl VmView {
    /// All that is present; `None` where that can not be seen.
    pub fn resident(&self) -> Option<ByteCount> {
        Some(self.backing?.resident())
    }

    /// The share of present memory in pages of 2 MiB or more, in ten thousandths; `None` where nothing is present, or it can not be seen.
    pub fn coverage(&self) -> Option<u32> {
        self.backing?.coverage()
    }

    /// Whether it reaches what it is to reach; `None` for best effort, and where nothing is present.
    pub fn is_guarantee_met(&self) -> Option<bool> {
        match self.guarantee {
            Guarantee::BestEffort => None,
            Guarantee::Coverage(share) => self.coverage().map(|coverage| coverage >= share),
        }
    }
}

/// What a VM is to reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guarantee {
    /// As much as the budget and the host allow.
    #[default]
    BestEffort,
    /// That share of its present memory in large pages, in ten thousandths; a VM that stays under it is reported.
    Coverage(u32),
}

/// A guarantee that can not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no guarantee: write best-effort, or a share of memory in large pages like 95% or 99.5%")]
pub struct GuaranteeError {
    /// What was written.
    pub text: String,
}

/// `best-effort`, or a share above zero and up to 100 % with up to two decimals: what a user writes, and what is shown.
impl FromStr for Guarantee {
    type Err = GuaranteeError;

    fn from_str(text: &str) -> Result<Guarantee, GuaranteeError> {
        if text == "best-effort" {
            return Ok(Guarantee::BestEffort);
        }
        share_of(text).map(Guarantee::Coverage).ok_or_else(|| GuaranteeError { text: text.to_owned() })
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
        match self {
            Guarantee::BestEffort => f.write_str("best-effort"),
            Guarantee::Coverage(share) if share % 100 == 0 => write!(f, "{}%", share / 100),
            Guarantee::Coverage(share) => write!(f, "{}.{:02}%", share / 100, share % 100),
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
    /// Length.
    pub bytes: ByteCount,
    /// First address in its process.
    pub hva: u64,
    /// `anonymous`, `shmem`, `hugetlb` or `file`.
    pub kind: String,
    /// Whether guest-physical addresses are known, or guessed from the process's mappings.
    pub is_guess: bool,
    /// Why no window of it can ever be huge, and what to start the guest with instead; `None` where they can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub never_huge: Option<String>,
}

/// Guest RAM by what backs it on the host, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingView {
    /// Nothing is present.
    pub unbacked: ByteCount,
    /// In pages of 4 KiB.
    pub base_4k: ByteCount,
    /// In pages of 2 MiB.
    pub huge_2m: ByteCount,
    /// In pages of 1 GiB.
    pub giant_1g: ByteCount,
    /// Whatever it is backed with, where the mapping's address or file offset is such that no page of it can be huge.
    pub misaligned: ByteCount,
}

impl BackingView {
    /// All that is present.
    pub fn resident(&self) -> ByteCount {
        self.base_4k + self.huge_2m + self.giant_1g
    }

    /// The share of present memory in pages of 2 MiB or more, in ten thousandths; `None` where nothing is present.
    pub fn coverage(&self) -> Option<u32> {
        let large = u128::from(self.huge_2m + self.giant_1g);
        (large * 10_000).checked_div(u128::from(self.resident())).map(|share| share as u32)
    }
}

/// KVM's leaf mappings by size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingView {
    /// Of 4 KiB.
    pub pages_4k: u64,
    /// Of 2 MiB.
    pub pages_2m: u64,
    /// Of 1 GiB.
    pub pages_1g: u64,
}

/// Windows (2 MiB of guest-physical memory) by the page size that the guest's own tables map them with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPagesView {
    /// With base pages.
    pub base_4k: u64,
    /// With a huge page.
    pub huge_2m: u64,
    /// As part of a giant page.
    pub giant_1g: u64,
    /// Here with this size and there with that.
    pub mixed: u64,
    /// Not at all.
    pub unmapped: u64,
    /// In tables that were not read.
    pub unknown: u64,
}

/// What a manager has done for a VM since it has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkView {
    /// Actions by mechanism and outcome, as `collapse` → `done` → 12.
    pub outcomes: BTreeMap<String, BTreeMap<String, u64>>,
    /// Guest memory copied by promotions.
    pub copied: ByteCount,
    /// Became resident only because the page is large.
    pub bloat: ByteCount,
    /// CPU time, seconds: of actions, and of everything.
    pub action_cpu_s: f64,
    /// The same, sensing and deciding included.
    pub total_cpu_s: f64,
    /// Times the budget said no.
    pub budget_refusals: u64,
    /// How long windows were out of the guest's reach.
    pub unavailable: Quantiles,
    /// Time the guest is thought to spend on page walks, in ten thousandths of one CPU's; `None` where nothing tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub walk_share: Option<u32>,
    /// The latest actions, oldest first.
    #[serde(default)]
    pub latest: Vec<ActionView>,
    /// Sensors that failed, by name.
    #[serde(default)]
    pub sensor_failures: BTreeMap<String, u64>,
}

/// A histogram in a few numbers, and in Prometheus' form.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// How many there were.
    pub count: u64,
    /// Their sum, seconds.
    pub sum_s: f64,
    /// Half were no longer, seconds.
    pub median_s: f64,
    /// 99 of 100 were no longer, seconds.
    pub p99_s: f64,
    /// The longest, seconds.
    pub max_s: f64,
    /// How many were no longer than each of [`PAUSE_BOUNDS_S`].
    #[serde(default)]
    pub at_most: Vec<u64>,
}

/// Upper bounds of the buckets in which pauses are counted, seconds: from a split to a stall of shared memory, and beyond.
pub const PAUSE_BOUNDS_S: [f64; 10] = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2];

/// One action that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActionView {
    /// Seconds since the epoch.
    pub at_s: f64,
    /// First guest-physical address of its window.
    pub gpa: u64,
    /// How it was done.
    pub mechanism: String,
    /// What came of it.
    pub outcome: String,
}

/// Why windows are not huge.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The VM.
    pub name: String,
    /// All of its windows (2 MiB of guest-physical memory); `None` where they can not be seen.
    pub windows: Option<u64>,
    /// Of these in large pages.
    pub huge: Option<u64>,
    /// The others by reason, most first.
    pub reasons: Vec<Reason>,
    /// By what the guest's own page tables map them with; `None` where nobody looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_pages: Option<Box<GuestPagesView>>,
    /// What is of the VM as a whole.
    pub notes: Vec<String>,
}

/// A reason and how many windows have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// For programs: `never_touched`, `holes`, `backing_off_no_huge_page`, …
    pub name: String,
    /// Windows.
    pub windows: u64,
    /// For people: what it means, and what would change it.
    pub text: String,
}

/// What is behind every window of a VM, in the order of guest-physical addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowMap {
    /// The VM.
    pub name: String,
    /// Its ranges.
    pub ranges: Vec<WindowRange>,
}

/// Windows one behind the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowRange {
    /// First guest-physical address.
    pub gpa: u64,
    /// A character a window: `.` nothing, `4` base pages, `2` a huge page, `1` part of a giant page.
    pub backing: String,
    /// The same way what KVM is thought to map: the smaller of the host's page and what a hold or the VM's totals allow; `?` unknown.
    pub second_level: String,
    /// `0` (cold) to `9` (hot), `?` where no sensor tells.
    pub heat: String,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_guarantee_is_shown_as_it_is_written() {
        for (text, guarantee) in [
            ("best-effort", Guarantee::BestEffort),
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
    fn what_is_no_share_is_refused_with_what_is() {
        for text in ["", "95", "%", "0%", "100.01%", "101%", "1e1%", "-5%", "+5%", "95.%", ".5%", "95.123%", "9 5%"] {
            let error = text.parse::<Guarantee>().unwrap_err();
            assert!(error.to_string().contains("best-effort, or a share"), "{text:?}");
        }
    }
}
