//! What a run can tell of itself.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A quantity of one run. Its name in files is stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// The figure that stands for a run of the kernel, in the unit of the case; more is better.
    Figure,
    /// How long the kernel's timed part took, by the guest's clock.
    Seconds,
    /// From the start of the process to the guest's first byte on its serial port.
    FirstByteMs,
    /// Resident memory of the whole process at the end of the timed part, guest RAM included.
    ResidentMib,
    /// Share of the kernel's data that the host backs with 2 MiB pages or larger, at the end.
    CoveragePercent,
    /// From the begin of the timed part until 95 % of the kernel's data are backed so.
    TimeToCoverageS,
    /// Memory that became resident only because pages are large.
    BloatMib,
    /// Memory that promotions copied.
    CopiedMib,
    /// CPU time of the manager's loop and sensors.
    ManagerCpuS,
    /// The 99th percentile of the time that the guest's smallest measured batch of work took.
    GapP99Us,
    /// The longest of these times.
    GapMaxUs,
    /// KVM's leaf mappings of 4 KiB at the end.
    #[serde(rename = "pages_4k")]
    Pages4k,
    /// Of 2 MiB.
    #[serde(rename = "pages_2m")]
    Pages2m,
    /// Of 1 GiB.
    #[serde(rename = "pages_1g")]
    Pages1g,
    /// Loads and stores that missed all levels of the data TLB.
    DtlbMisses,
    /// References of their walks that missed the second-level cache.
    WalkL2Misses,
    /// Accesses that missed the second-level cache.
    DataL2Misses,
    /// Fetches that missed all levels of the instruction TLB.
    ItlbMisses,
    /// Cycles that walks took, each.
    WalkCycles,
    /// The largest part of its time that 2 MiB pages can save this kernel, as predicted.
    PredictedPercent,
    /// The part that they did save.
    SavedPercent,
    /// Time that the hypervisor took from all CPUs during the run.
    StolenMs,
    /// Loads and stores that missed the first level of the data TLB, whether or not the second had them.
    DtlbL1Misses,
    /// Of several guests with the same work, the lowest figure by the highest.
    Fairness,
    /// Actions that the kernel refused: there was no huge page, or the memory was busy.
    Refusals,
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// More is.
    Higher,
    /// Less is.
    Lower,
    /// It only says how things are.
    Neither,
}

impl Metric {
    /// All of them, in the order of tables.
    pub const ALL: [Metric; 25] = [
        Metric::Figure,
        Metric::Seconds,
        Metric::FirstByteMs,
        Metric::ResidentMib,
        Metric::CoveragePercent,
        Metric::TimeToCoverageS,
        Metric::BloatMib,
        Metric::CopiedMib,
        Metric::ManagerCpuS,
        Metric::GapP99Us,
        Metric::GapMaxUs,
        Metric::Pages4k,
        Metric::Pages2m,
        Metric::Pages1g,
        Metric::DtlbMisses,
        Metric::WalkL2Misses,
        Metric::DataL2Misses,
        Metric::ItlbMisses,
        Metric::WalkCycles,
        Metric::PredictedPercent,
        Metric::SavedPercent,
        Metric::StolenMs,
        Metric::DtlbL1Misses,
        Metric::Fairness,
        Metric::Refusals,
    ];

    /// What a column of it is called, without the unit.
    pub const fn title(self) -> &'static str {
        match self {
            Metric::Figure => "figure",
            Metric::Seconds => "time",
            Metric::FirstByteMs => "first byte",
            Metric::ResidentMib => "resident",
            Metric::CoveragePercent => "coverage",
            Metric::TimeToCoverageS => "to 95 % coverage",
            Metric::BloatMib => "bloat",
            Metric::CopiedMib => "copied",
            Metric::ManagerCpuS => "manager's CPU",
            Metric::GapP99Us => "gap 99 %",
            Metric::GapMaxUs => "longest gap",
            Metric::Pages4k => "KVM 4k",
            Metric::Pages2m => "KVM 2m",
            Metric::Pages1g => "KVM 1g",
            Metric::DtlbMisses => "DTLB misses",
            Metric::WalkL2Misses => "L2 misses of walks",
            Metric::DataL2Misses => "L2 misses of data",
            Metric::ItlbMisses => "ITLB misses",
            Metric::WalkCycles => "cycles a walk",
            Metric::PredictedPercent => "predicted at most",
            Metric::SavedPercent => "saved",
            Metric::StolenMs => "stolen",
            Metric::DtlbL1Misses => "DTLB L1 misses",
            Metric::Fairness => "lowest : highest",
            Metric::Refusals => "refused",
        }
    }

    /// Its unit; empty for counts, and for [`Metric::Figure`], whose unit is its case's.
    pub const fn unit(self) -> &'static str {
        match self {
            Metric::Seconds | Metric::TimeToCoverageS | Metric::ManagerCpuS => "s",
            Metric::FirstByteMs | Metric::StolenMs => "ms",
            Metric::ResidentMib | Metric::BloatMib | Metric::CopiedMib => "MiB",
            Metric::CoveragePercent | Metric::PredictedPercent | Metric::SavedPercent => "%",
            Metric::GapP99Us | Metric::GapMaxUs => "us",
            Metric::WalkCycles => "cycles",
            Metric::Figure
            | Metric::Pages4k
            | Metric::Pages2m
            | Metric::Pages1g
            | Metric::DtlbMisses
            | Metric::WalkL2Misses
            | Metric::DataL2Misses
            | Metric::ItlbMisses
            | Metric::DtlbL1Misses
            | Metric::Fairness
            | Metric::Refusals => "",
        }
    }

    /// Which way is better.
    pub const fn better(self) -> Better {
        match self {
            Metric::Figure | Metric::CoveragePercent | Metric::SavedPercent | Metric::Fairness => Better::Higher,
            Metric::Pages4k | Metric::Pages2m | Metric::Pages1g | Metric::PredictedPercent | Metric::StolenMs => {
                Better::Neither
            }
            _ => Better::Lower,
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_in_the_list_once_and_has_a_name_of_its_own_in_files() {
        let names: std::collections::BTreeSet<String> =
            Metric::ALL.iter().map(|metric| serde_json::to_string(metric).expect("a name")).collect();
        assert_eq!(names.len(), Metric::ALL.len());
        let sorted = Metric::ALL.is_sorted();
        assert!(sorted, "the list has the order of the enum, so none is left out at its end: {:?}", Metric::ALL);
        assert_eq!(Metric::Refusals as usize + 1, Metric::ALL.len());
    }
}
