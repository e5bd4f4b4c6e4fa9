//! What is stored of an experiment: all that is needed to report it, to compare it with another and to go on with it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::definition::Experiment;
use crate::metric::Metric;

/// The version of the file's form. Another one is refused.
pub const FORMAT: u32 = 1;

/// A file of results.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Results {
    /// [`FORMAT`].
    pub wideleaf_experiment: u32,
    /// What was run, whole: a run that goes on later does the same.
    pub experiment: Experiment,
    /// The machine.
    pub environment: Environment,
    /// When it began (RFC 3339, UTC).
    pub started: String,
    /// When the last run ended.
    pub ended: String,
    /// Time in which it ran, all parts together.
    pub elapsed_s: f64,
    /// Whether all that was wanted is there: its rounds, or what fits the experiment's own time.
    pub is_complete: bool,
    /// What was run, in this order.
    pub runs: Vec<Run>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Run {
    /// Name of its case.
    pub case: String,
    /// Name of its arm.
    pub arm: String,
    /// Counted from one.
    pub round: u32,
    /// When it began, after the experiment did (in the time in which it ran).
    pub at_s: f64,
    /// How long it took, warming and start included.
    pub took_s: f64,
    /// Load average of the last minute when it began. (The experiment itself is in it.)
    pub load_1m: f64,
    /// What came of it.
    pub outcome: RunOutcome,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// It ended well and verified itself.
    Measured(Measured),
    /// It did not: in a line why. It is not made again; the report says so.
    Failed(String),
}

/// What one run tells.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Measured {
    /// How it is known.
    pub evidence: Evidence,
    /// Its numbers.
    pub metrics: BTreeMap<Metric, f64>,
    /// How memory and speed went over time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Sample>,
    /// What backed which part of guest RAM when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<MemoryMap>,
    /// What else is to be said, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What the manager did, by `mechanism.result`: `collapse.done`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub actions: BTreeMap<String, Actions>,
    /// What else it told, by its own names: results of the kernel, what a prediction rests on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub told: BTreeMap<String, f64>,
}

/// Actions of one kind with one result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Actions {
    /// How many.
    pub count: u64,
    /// CPU time of all, where the run was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<f64>,
    /// The longest that a window was out of the guest's reach, where the run was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable_max_us: Option<f64>,
}

/// How a number is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// By a clock or a counter of this machine.
    #[default]
    Measured,
    /// By a model of a machine.
    Simulated,
    /// By counting mappings in an emulated machine: no speed.
    Lab,
}

/// Memory and speed at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Sample {
    /// After the start of the timed part; what was before is negative.
    pub at_s: f64,
    /// Guest RAM on base pages.
    pub base_mib: f64,
    /// On pages of 2 MiB.
    pub huge_mib: f64,
    /// On pages of 1 GiB.
    pub giant_mib: f64,
    /// Units of work per second since the sample before, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_per_s: Option<f64>,
}

/// Guest RAM by window and time.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct MemoryMap {
    /// Guest-physical address of the first window, in windows of 2 MiB.
    pub first_window: u64,
    /// What was seen, one after the other in time.
    pub columns: Vec<MapColumn>,
}

/// All windows at one instant.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct MapColumn {
    /// After the start of the timed part.
    pub at_s: f64,
    /// A letter for each window: `.` nothing there, `4` base pages, `2` a huge page, `1` a part of a giant page, `a` aside; a space where
    /// the guest has no RAM.
    pub backing: String,
    /// A digit for each window, how hot: 0 to 9; a space where it is not known.
    pub heat: String,
    /// The same letters, for what the second level is inferred to map; `?` where it cannot be inferred.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub second_level: String,
    /// What it does map, all windows together: KVM's leaf mappings of 4 KiB, 2 MiB and 1 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvm_pages: Option<[u64; 3]>,
}

/// The machine, and what of it is not under control.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Environment {
    /// Version of wideleaf, and the revision it was built from where that is known.
    pub wideleaf: String,
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// Its microcode's revision.
    pub microcode: String,
    /// Processors online.
    pub cpus: u32,
    /// NUMA nodes with memory.
    pub numa_nodes: u32,
    /// Physical memory.
    pub memory_total_mib: u64,
    /// Free and reclaimable memory at the start.
    pub memory_available_mib: u64,
    /// How KVM pages guests: `ept`, `npt`, `shadow`, `none`.
    pub paging: String,
    /// Whether this machine is itself a virtual machine: then even a native process walks two tables in hardware.
    pub is_virtual: bool,
    /// Whether the CPU's event counters can be read.
    pub has_pmu: bool,
    /// `transparent_hugepage/enabled`, `/shmem_enabled`, `/defrag`.
    pub thp: [String; 3],
    /// khugepaged: milliseconds between scans, pages a scan.
    pub khugepaged: [u64; 2],
    /// CPU frequency governor; empty where there is none.
    pub governor: String,
    /// Load average of the last minute at the start.
    pub load_1m: f64,
    /// What was not controlled, a few words each.
    pub not_controlled: Vec<String>,
}

impl Results {
    /// The runs of a case in an arm, by round.
    pub fn runs_of(&self, case: &str, arm: &str) -> impl Iterator<Item = &Run> {
        let of: Vec<&Run> = self.runs.iter().filter(|run| run.case == case && run.arm == arm).collect();
        of.into_iter()
    }

    /// A metric of a case in an arm, by round; rounds without it are left out.
    pub fn values(&self, case: &str, arm: &str, metric: Metric) -> Vec<(u32, f64)> {
        let value = |run: &Run| Some((run.round, *run.measured()?.metrics.get(&metric)?));
        let mut values: Vec<_> = self.runs_of(case, arm).filter_map(value).collect();
        values.sort_by_key(|(round, _)| *round);
        values
    }

    /// What the runs of a case in an arm told by that name, by round.
    pub fn told(&self, case: &str, arm: &str, name: &str) -> Vec<(u32, f64)> {
        let value = |run: &Run| Some((run.round, *run.measured()?.told.get(name)?));
        let mut values: Vec<_> = self.runs_of(case, arm).filter_map(value).collect();
        values.sort_by_key(|(round, _)| *round);
        values
    }

    /// A metric of an arm by that of another, each within its round: what the machine did in a round it did to both.
    pub fn ratios(&self, case: &str, arm: &str, to: &str, metric: Metric) -> Vec<f64> {
        let others = self.values(case, to, metric);
        let other = |round| others.iter().find(|(of, _)| *of == round).map(|(_, value)| *value);
        let ratio = |(round, value)| Some(value / other(round).filter(|other| *other > 0.0)?);
        self.values(case, arm, metric).into_iter().filter_map(ratio).collect()
    }
}

impl Run {
    /// What it tells, if it ended well.
    pub fn measured(&self) -> Option<&Measured> {
        match &self.outcome {
            RunOutcome::Measured(measured) => Some(measured),
            RunOutcome::Failed(_) => None,
        }
    }
}
