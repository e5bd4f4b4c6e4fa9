//! Quantities that a run can report about itself: name in result files, unit, and which direction is better. Nothing is
//! measured here.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use wideleaf_measure::statistics::Better;

/// One quantity of a run. Its name in result files never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Main result of the kernel, in the unit of the case; more is better.
    Figure,
    /// Duration of the kernel's timed part by the guest's clock.
    Seconds,
    /// Time from the start of the process to the guest's first byte on its serial port.
    FirstByteMs,
    /// Resident memory of the whole process at the end of the timed part, including guest RAM.
    ResidentMib,
    /// Share of the kernel's data that the host backs with 2 MiB pages or larger, at the end.
    CoveragePercent,
    /// Time from the start of the timed part until the host backs 95 % of the kernel's data with 2
    /// MiB pages or larger. Absent if it never does: a median over the rounds counts these too.
    TimeToCoverageS,
    /// Memory that is resident only because pages are large.
    BloatMib,
    /// Memory that promotions copied.
    CopiedMib,
    /// CPU time of the manager's loop and sensors.
    ManagerCpuS,
    /// 99th percentile (p99) of the duration of the smallest batch of work that the guest measures.
    GapP99Us,
    /// Longest duration of such a batch.
    GapMaxUs,
    /// KVM's leaf mappings of 4 KiB at the end.
    #[serde(rename = "pages_4k")]
    Pages4k,
    /// KVM's leaf mappings of 2 MiB at the end.
    #[serde(rename = "pages_2m")]
    Pages2m,
    /// KVM's leaf mappings of 1 GiB at the end.
    #[serde(rename = "pages_1g")]
    Pages1g,
    /// Loads and stores that missed all levels of the data TLB.
    DtlbMisses,
    /// References of page-table walks that missed the second-level cache.
    WalkL2Misses,
    /// Accesses that missed the second-level cache.
    DataL2Misses,
    /// Fetches that missed all levels of the instruction TLB.
    ItlbMisses,
    /// Cycles per page-table walk.
    WalkCycles,
    /// Predicted upper bound of the time that 2 MiB pages save this kernel.
    PredictedPercent,
    /// Share of the time that 2 MiB pages did save.
    SavedPercent,
    /// Time that the hypervisor took from all CPUs during the run.
    StolenMs,
    /// Loads and stores that missed the first level of the data TLB, whether or not the second
    /// level had the translation.
    DtlbL1Misses,
    /// Lowest figure divided by the highest, among guests with the same work.
    Fairness,
    /// Actions that the kernel refused because no huge page was free or the memory was busy.
    Refusals,
    /// Loads and stores that missed all levels of the data TLB, of 1000.
    MissesPerThousand,
    /// Table entries that a page-table walk reads.
    ReferencesPerWalk,
    /// Cycles of the second level of the TLB and of walks, per load or store.
    TranslationCyclesPerAccess,
}

impl Metric {
    /// All metrics, in the order of tables.
    pub const ALL: [Metric; 28] = [
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
        Metric::MissesPerThousand,
        Metric::ReferencesPerWalk,
        Metric::TranslationCyclesPerAccess,
    ];

    /// Column title of the metric, without the unit.
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
            Metric::GapP99Us => "gap p99",
            Metric::GapMaxUs => "longest gap",
            Metric::Pages4k => "KVM 4k",
            Metric::Pages2m => "KVM 2m",
            Metric::Pages1g => "KVM 1g",
            Metric::DtlbMisses => "DTLB misses",
            Metric::WalkL2Misses => "L2 misses of walks",
            Metric::DataL2Misses => "L2 misses of data",
            Metric::ItlbMisses => "ITLB misses",
            Metric::WalkCycles => "cycles per walk",
            Metric::PredictedPercent => "predicted upper bound",
            Metric::SavedPercent => "saved",
            Metric::StolenMs => "stolen",
            Metric::DtlbL1Misses => "DTLB L1 misses",
            Metric::Fairness => "lowest : highest",
            Metric::Refusals => "refused",
            Metric::MissesPerThousand => "TLB misses per 1000 accesses",
            Metric::ReferencesPerWalk => "references per walk",
            Metric::TranslationCyclesPerAccess => "translation cycles per access",
        }
    }

    /// Unit of the metric. Empty for counts, and for [`Metric::Figure`], which has the unit of its case.
    pub const fn unit(self) -> &'static str {
        match self {
            Metric::Seconds | Metric::TimeToCoverageS | Metric::ManagerCpuS => "s",
            Metric::FirstByteMs | Metric::StolenMs => "ms",
            Metric::ResidentMib | Metric::BloatMib | Metric::CopiedMib => "MiB",
            Metric::CoveragePercent | Metric::PredictedPercent | Metric::SavedPercent => "%",
            Metric::GapP99Us | Metric::GapMaxUs => "us",
            Metric::WalkCycles | Metric::TranslationCyclesPerAccess => "cycles",
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
            | Metric::Refusals
            | Metric::MissesPerThousand
            | Metric::ReferencesPerWalk => "",
        }
    }

    /// Direction in which the metric is better.
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
    fn the_list_has_every_metric_once_with_a_unique_name_in_files() {
        let names: std::collections::BTreeSet<String> =
            Metric::ALL.iter().map(|metric| serde_json::to_string(metric).expect("a name")).collect();
        assert_eq!(names.len(), Metric::ALL.len());
        let sorted = Metric::ALL.is_sorted();
        assert!(sorted, "the list has the order of the enum, so no variant is missing at its end: {:?}", Metric::ALL);
        assert_eq!(Metric::TranslationCyclesPerAccess as usize + 1, Metric::ALL.len());
    }
}
