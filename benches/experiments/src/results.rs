//! The stored form of an experiment's results: all that a report, a comparison and a resumed experiment need.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::definition::Experiment;
use crate::metric::Metric;

/// Version of the file format. Files with another version are refused.
pub const FORMAT: u32 = 1;

/// A file of results.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Results {
    /// Format version, [`FORMAT`].
    pub wideleaf_experiment: u32,
    /// Complete definition of the experiment, so that a resumed experiment runs the same.
    pub experiment: Experiment,
    /// Description of the machine.
    pub environment: Environment,
    /// Start time (RFC 3339, UTC).
    pub started: String,
    /// End time of the last run (RFC 3339, UTC).
    pub ended: String,
    /// Total running time of all parts, in seconds.
    pub elapsed_s: f64,
    /// Whether the results are complete: all rounds, or all rounds that fit the experiment's built-in time limit.
    pub is_complete: bool,
    /// Runs in the order in which they were made.
    pub runs: Vec<Run>,
}

/// One run of one cell.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Run {
    /// Name of its case.
    pub case: String,
    /// Name of its arm.
    pub arm: String,
    /// Number of the round, from one.
    pub round: u32,
    /// Start of the run in seconds of the experiment's running time.
    pub at_s: f64,
    /// Duration in seconds, including warming and start.
    pub took_s: f64,
    /// Load average of the last minute at the start of the run. It includes the experiment itself.
    pub load_1m: f64,
    /// Outcome of the run.
    pub outcome: RunOutcome,
}

/// Outcome of a run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// The run succeeded and verified its result.
    Measured(Measured),
    /// The run failed, with the reason in one line. It is not repeated, and the report names it.
    Failed(String),
}

/// Measurements of one run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Measured {
    /// How the numbers were obtained.
    pub evidence: Evidence,
    /// Metrics and their values.
    pub metrics: BTreeMap<Metric, f64>,
    /// Memory and speed over time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Sample>,
    /// Backing of each window of guest RAM over time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<MemoryMap>,
    /// Further remarks, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Actions of the manager, by `mechanism.result`: `collapse.done`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub actions: BTreeMap<String, Actions>,
    /// Further numbers under the run's own names: results of the kernel, inputs of a prediction.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub told: BTreeMap<String, f64>,
}

/// Actions of one kind with one result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Actions {
    /// Number of such actions.
    pub count: u64,
    /// Total CPU time in milliseconds, if the run was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<f64>,
    /// Longest time that a window was unavailable to the guest, in microseconds, if the run was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable_max_us: Option<f64>,
}

/// How a number was obtained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// By a clock or a counter of this machine.
    #[default]
    Measured,
    /// By a simulation of a machine.
    Simulated,
    /// By counting mappings in an emulated machine; says nothing about speed.
    Lab,
}

/// Memory and speed at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Sample {
    /// Time since the start of the timed part in seconds; negative before it.
    pub at_s: f64,
    /// Guest RAM on base pages, in MiB.
    pub base_mib: f64,
    /// Guest RAM on 2 MiB pages, in MiB.
    pub huge_mib: f64,
    /// Guest RAM on 1 GiB pages, in MiB.
    pub giant_mib: f64,
    /// Units of work per second since the previous sample, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_per_s: Option<f64>,
}

/// Guest RAM by window and time.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct MemoryMap {
    /// Guest-physical address of the first window, in units of 2 MiB.
    pub first_window: u64,
    /// Observations in the order of time.
    pub columns: Vec<MapColumn>,
}

/// All windows at one instant.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct MapColumn {
    /// Time since the start of the timed part, in seconds.
    pub at_s: f64,
    /// One letter per window: `.` unbacked, `4` base pages, `2` a huge page, `1` part of a giant page; a space
    /// outside guest RAM.
    pub backing: String,
    /// One digit per window for the share of samples in which the guest had touched it: 0 never, 9 always; a space
    /// if unknown.
    pub heat: String,
    /// One letter per window for the inferred mapping in the second level, as in `backing`; `?` if
    /// it cannot be inferred.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub second_level: String,
    /// KVM's leaf mappings of 4 KiB, 2 MiB and 1 GiB, over all windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvm_pages: Option<[u64; 3]>,
}

/// Description of the machine, and of what is not controlled on it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Environment {
    /// Version of wideleaf, and the revision that it was built from if known.
    pub wideleaf: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Model of the CPU.
    pub cpu: String,
    /// Revision of the CPU's microcode.
    pub microcode: String,
    /// Number of processors online.
    pub cpus: u32,
    /// Number of NUMA nodes with memory.
    pub numa_nodes: u32,
    /// Physical memory in MiB.
    pub memory_total_mib: u64,
    /// Free and reclaimable memory at the start, in MiB.
    pub memory_available_mib: u64,
    /// Paging of guests in KVM: `ept`, `npt`, `shadow`, `none`.
    pub paging: String,
    /// Whether this machine is a virtual machine. If so, even a native process walks two tables in hardware.
    pub is_virtual: bool,
    /// Whether the CPU's event counters (PMU) can be read.
    pub has_pmu: bool,
    /// Page-walk events of this CPU that can be counted, or the reason why none can. Empty in older results.
    #[serde(default)]
    pub walk_events: String,
    /// `transparent_hugepage/enabled`, `/shmem_enabled`, `/defrag`.
    pub thp: [String; 3],
    /// Settings of khugepaged: milliseconds between scans, pages per scan.
    pub khugepaged: [u64; 2],
    /// CPU frequency governor; empty on a host without governor.
    pub governor: String,
    /// Load average of the last minute at the start.
    pub load_1m: f64,
    /// Influences that were not controlled, a few words each.
    pub not_controlled: Vec<String>,
}

impl Results {
    /// Runs of a case in an arm, in the order in which they were made.
    pub fn runs_of(&self, case: &str, arm: &str) -> impl Iterator<Item = &Run> {
        let of: Vec<&Run> = self.runs.iter().filter(|run| run.case == case && run.arm == arm).collect();
        of.into_iter()
    }

    /// Values of a metric for a case in an arm, by round. Rounds without the metric are left out.
    pub fn values(&self, case: &str, arm: &str, metric: Metric) -> Vec<(u32, f64)> {
        let value = |run: &Run| Some((run.round, *run.measured()?.metrics.get(&metric)?));
        let mut values: Vec<_> = self.runs_of(case, arm).filter_map(value).collect();
        values.sort_by_key(|(round, _)| *round);
        values
    }

    /// Values of an additional number by its name, for a case in an arm, by round.
    pub fn told(&self, case: &str, arm: &str, name: &str) -> Vec<(u32, f64)> {
        let value = |run: &Run| Some((run.round, *run.measured()?.told.get(name)?));
        let mut values: Vec<_> = self.runs_of(case, arm).filter_map(value).collect();
        values.sort_by_key(|(round, _)| *round);
        values
    }

    /// Ratios of a metric between two arms, each within one round, so that changes of the machine
    /// between rounds cancel out.
    pub fn ratios(&self, case: &str, arm: &str, to: &str, metric: Metric) -> Vec<f64> {
        let others = self.values(case, to, metric);
        let other = |round| others.iter().find(|(of, _)| *of == round).map(|(_, value)| *value);
        let ratio = |(round, value)| Some(value / other(round).filter(|other| *other > 0.0)?);
        self.values(case, arm, metric).into_iter().filter_map(ratio).collect()
    }
}

impl Run {
    /// Whether each run of its cell gives the same result.
    pub fn is_exact(&self, experiment: &Experiment) -> bool {
        let case = experiment.cases.iter().position(|case| case.name == self.case);
        let arm = experiment.arms.iter().position(|arm| arm.name == self.arm);
        let job = case.zip(arm).and_then(|(case, arm)| experiment.job(case, arm));
        job.is_some_and(|job| job.is_exact)
    }

    /// Measurements of the run, if it succeeded.
    pub fn measured(&self) -> Option<&Measured> {
        match &self.outcome {
            RunOutcome::Measured(measured) => Some(measured),
            RunOutcome::Failed(_) => None,
        }
    }
}
