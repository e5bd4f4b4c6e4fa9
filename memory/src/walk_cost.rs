//! Chooses the table of TLB miss costs for this machine: the measured one, else the one for its kind of CPU, else the
//! prior. Reading never fails: a file that cannot be used leads to a note and the next best table.
//!
//! ```text
//!   /var/lib/wideleaf/tlbcost.json ── of this CPU, under the paging that KVM uses here? ── yes ─▶ measured
//!                 (`wideleaf tlbcost --save`)  └ no, note ─▶ /proc/cpuinfo in policies' FAMILIES? ─▶ that or the prior
//! ```
//!
//! Every table knows whether KVM shadows the guests' tables: then no host page saves cost under base pages
//! of the guest.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use wideleaf_policies::walk::cost::{Cells, Cpu, CpuFamily, WalkCost};

use crate::input_file::InputFile;
use crate::second_level::{Paging, detect_paging};

/// Path of the saved measurement, below the root.
pub const SAVED_AT: &str = "var/lib/wideleaf/tlbcost.json";

/// Maximum length of the file, in bytes: ten times that of any measurement.
const FILE_MAX: u64 = 64 << 10;

/// Version of the file's form.
const VERSION: u32 = 1;

/// The CPU of a machine, from `/proc/cpuinfo` (proc(5)): CPUID's vendor, family and model, and the brand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuModel {
    /// Vendor string: `GenuineIntel`, `AuthenticAMD`, ….
    pub vendor: String,
    /// Display family of CPUID.
    pub family: u32,
    /// Display model of CPUID.
    pub model: u32,
    /// The brand string. A hypervisor may change it; the CPU then counts as another one.
    pub name: String,
}

impl CpuModel {
    /// The first CPU of the machine with its `/proc` below `root`. Unreadable fields stay empty, which
    /// matches no table.
    pub fn read(root: &Path) -> CpuModel {
        let text = std::fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
        let field = |name: &str| {
            let value = |line: &str| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim().to_owned());
            text.lines().find_map(value).unwrap_or_default()
        };
        let number = |name: &str| field(name).parse().unwrap_or_default();
        CpuModel {
            vendor: field("vendor_id"),
            family: number("cpu family"),
            model: number("model"),
            name: field("model name"),
        }
    }

    /// Kind of the CPU, if a table has it.
    pub fn kind(&self) -> Option<&'static CpuFamily> {
        CpuFamily::of(Cpu { vendor: &self.vendor, family: self.family, model: self.model })
    }
}

/// A measurement, in its saved form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedWalkCost {
    /// Version of the file's form.
    pub version: u32,
    /// CPU of the measurement.
    pub cpu: CpuModel,
    /// Method: `calibrated` by a pointer chase, or `pmu`.
    pub method: String,
    /// Paging of the host: `ept`, `npt` or `shadow`.
    pub paging: String,
    /// Time of the measurement, in seconds since 1970.
    pub measured_at_unix_s: u64,
    /// Number of TSC ticks in a microsecond; the unit of the cycles below.
    pub cycles_per_microsecond: u32,
    /// Cycles of a miss in all levels of the TLB, by guest page (4k, 2m, 1g) and host page; `null`: not measured.
    pub cycles: Cells,
}

impl SavedWalkCost {
    /// Makes a measurement of this machine.
    pub fn new(
        cpu: CpuModel,
        paging: &str,
        measured_at_unix_s: u64,
        cycles_per_microsecond: u32,
        cycles: Cells,
    ) -> SavedWalkCost {
        let (method, paging) = ("calibrated".to_owned(), paging.to_owned());
        SavedWalkCost { version: VERSION, cpu, method, paging, measured_at_unix_s, cycles_per_microsecond, cycles }
    }

    fn measured(&self) -> usize {
        self.cycles.iter().flatten().flatten().count()
    }
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// The file does not exist.
    #[error("it does not exist")]
    Absent,
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Io(#[from] std::io::Error),
    /// The file is too long for a measurement.
    #[error("it is longer than {FILE_MAX} bytes, so it is not a measurement")]
    TooLong,
    /// The file is not a measurement.
    #[error("it is not a measurement of `wideleaf tlbcost --save`: {0}")]
    Malformed(#[from] serde_json::Error),
    /// This program does not know the version.
    #[error("it has version {0}, but this program knows {VERSION}; measure again with `wideleaf tlbcost --save`")]
    Version(u32),
    /// It was measured on another CPU.
    #[error("it was measured on {measured}, but this is {here}; measure again with `wideleaf tlbcost --save`")]
    OtherCpu {
        /// CPU of the measurement.
        measured: String,
        /// CPU of this machine.
        here: String,
    },
    /// It was measured under other paging: a two-dimensional walk costs more than one of KVM's shadow tables.
    #[error(
        "it was measured under {measured:?} paging, but KVM uses {here} here; measure again with `wideleaf tlbcost \
         --save`"
    )]
    OtherPaging {
        /// Paging of the measurement.
        measured: String,
        /// Paging of this machine.
        here: &'static str,
    },
    /// The paging of KVM cannot be determined.
    #[error("it was measured under {measured} paging, but KVM's paging here is unknown: {why}")]
    UnknownPaging {
        /// Paging of the measurement.
        measured: String,
        /// Why it is unknown here.
        why: String,
    },
    /// It contains no valid cost.
    #[error("it contains no valid miss cost; measure again with `wideleaf tlbcost --save`")]
    NoCost,
}

/// Source of the table in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WalkCostSource {
    /// A measurement on this machine.
    Measured {
        /// Number of measured cells, of nine; the others are derived from their references.
        cells: usize,
        /// Path of the file.
        file: PathBuf,
    },
    /// The table for its kind of CPU, by name.
    Kind(&'static str),
    /// The prior, since the CPU is unknown.
    Prior,
}

/// Table in use, with its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenWalkCost {
    /// Costs of TLB misses.
    pub cost: WalkCost,
    /// Source of the costs.
    pub source: WalkCostSource,
    /// Why an existing measurement is not used.
    pub note: Option<String>,
}

impl ChosenWalkCost {
    /// Chooses for the machine with its files below `root`.
    pub fn read(root: &Path) -> ChosenWalkCost {
        let file = root.join(SAVED_AT);
        let cpu = CpuModel::read(root);
        let paging = detect_paging(&root.join("sys")).map_err(|error| error.to_string());
        let of_kind = || match cpu.kind() {
            Some(kind) => (kind.walk_cost(), WalkCostSource::Kind(kind.name)),
            None => (WalkCost::PRIOR, WalkCostSource::Prior),
        };
        let ((cost, source), note) = match read(&file, &cpu, paging.as_ref().map_err(String::as_str)) {
            Ok((saved, cost)) => ((cost, WalkCostSource::Measured { cells: saved.measured(), file }), None),
            Err(SavedError::Absent) => (of_kind(), None),
            Err(error) => (of_kind(), Some(format!("{} is not used: {error}", file.display()))),
        };
        let cost = if paging == Ok(Paging::Shadow) { cost.under_shadow_paging() } else { cost };
        ChosenWalkCost { cost, source, note }
    }
}

/// One line: the cost of a miss at base pages, its source, and whether host pages can save any of it.
impl std::fmt::Display for ChosenWalkCost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use wideleaf_policies::PageSize::Base4K;
        write!(f, "{} cycles a TLB miss at 4k over 4k, ", self.cost.per_miss(Base4K, Base4K))?;
        match &self.source {
            WalkCostSource::Measured { cells, file } => {
                write!(f, "measured here ({cells} of 9 cells, {})", file.display())?;
            }
            WalkCostSource::Kind(name) => write!(f, "a figure for {name}")?,
            WalkCostSource::Prior => {
                f.write_str("an assumption, since this CPU was not measured (run `wideleaf tlbcost --save`)")?;
            }
        }
        f.write_str(if self.cost.is_shadowed() {
            "; under shadow paging, host pages save none of it where the guest maps 4k"
        } else {
            ""
        })
    }
}

/// Reads a measurement of this CPU under the paging that KVM uses here. `paging` may hold the reason why
/// that is unknown.
fn read(file: &Path, cpu: &CpuModel, paging: Result<&Paging, &str>) -> Result<(SavedWalkCost, WalkCost), SavedError> {
    let opened = InputFile::open(file).map_err(|error| match io::Error::from(error) {
        error if error.kind() == io::ErrorKind::NotFound => SavedError::Absent,
        error => SavedError::Io(error),
    })?;
    let mut text = Vec::new();
    opened.into_file().take(FILE_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > FILE_MAX {
        return Err(SavedError::TooLong);
    }
    let saved: SavedWalkCost = serde_json::from_slice(&text)?;
    if saved.version != VERSION {
        return Err(SavedError::Version(saved.version));
    }
    if saved.cpu != *cpu {
        let name = |cpu: &CpuModel| format!("{:?} (family {:#x}, model {:#x})", cpu.name, cpu.family, cpu.model);
        return Err(SavedError::OtherCpu { measured: name(&saved.cpu), here: name(cpu) });
    }
    let measured = saved.paging.clone();
    match paging {
        Ok(here) if here.name() == measured => {}
        Ok(here) => return Err(SavedError::OtherPaging { measured, here: here.name() }),
        Err(why) => return Err(SavedError::UnknownPaging { measured, why: why.to_owned() }),
    }
    let cost = WalkCost::measured(&saved.cycles, saved.cycles_per_microsecond).ok_or(SavedError::NoCost)?;
    Ok((saved, cost))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;
    use wideleaf_policies::PageSize::{Base4K, Huge2M};

    const GENOA: &str =
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9554\n";
    const UNKNOWN: &str = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\n";

    const NPT: &str = "sys/module/kvm_amd/parameters/npt";

    /// A machine with this `/proc/cpuinfo`, NPT under KVM, and this measurement, if any.
    fn machine(cpuinfo: &str, saved: Option<&str>) -> TempDir {
        let root = tempfile::tempdir().expect("a folder can be made");
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder can be made");
            fs::write(path, text).expect("a file can be written");
        };
        put("proc/cpuinfo", cpuinfo);
        put(NPT, "Y\n");
        saved.into_iter().for_each(|text| put(SAVED_AT, text));
        root
    }

    /// A measurement on the CPU of `cpuinfo`.
    fn saved(cpuinfo: &str, cycles: u32) -> String {
        let cpu = CpuModel::read(machine(cpuinfo, None).path());
        let cells = [[Some(cycles), None, None], [None, Some(17), None], [None; 3]];
        serde_json::to_string(&SavedWalkCost::new(cpu, "npt", 1, 2_596, cells)).expect("it can be written")
    }

    #[test]
    fn without_a_measurement_the_kind_of_cpu_decides_and_then_the_prior() {
        let genoa = ChosenWalkCost::read(machine(GENOA, None).path());
        assert_eq!((&genoa.source, &genoa.note), (&WalkCostSource::Kind("Zen 4"), &None));
        assert_ne!(genoa.cost, WalkCost::PRIOR);
        let unknown = ChosenWalkCost::read(machine(UNKNOWN, None).path());
        assert_eq!((unknown.cost, &unknown.source), (WalkCost::PRIOR, &WalkCostSource::Prior));
        let nothing = tempfile::tempdir().expect("a folder can be made");
        assert_eq!(ChosenWalkCost::read(nothing.path()).source, WalkCostSource::Prior);
    }

    #[test]
    fn a_measurement_of_this_cpu_replaces_the_table() {
        let root = machine(UNKNOWN, Some(&saved(UNKNOWN, 55)));
        let chosen = ChosenWalkCost::read(root.path());
        assert_eq!((chosen.cost.per_miss(Base4K, Base4K), chosen.cost.per_miss(Huge2M, Huge2M)), (55, 17));
        assert_eq!(chosen.cost.per_microsecond(), 2_596);
        assert!(matches!(chosen.source, WalkCostSource::Measured { cells: 2, .. }), "{chosen:?}");
        assert!(
            chosen.to_string().starts_with("55 cycles a TLB miss at 4k over 4k, measured here (2 of 9 cells, "),
            "{chosen}"
        );
    }

    #[test]
    fn a_file_without_a_measurement_of_this_cpu_is_noted_and_not_used() {
        let renamed = GENOA.replace("9554", "9654");
        let cases = [
            (
                saved(&renamed, 55),
                "it was measured on \"AMD EPYC 9654\" (family 0x19, model 0x11), but this is \"AMD EPYC 9554\"",
            ),
            (saved(GENOA, 0), "it contains no valid miss cost"),
            (saved(GENOA, 55).replace("\"version\":1", "\"version\":2"), "it has version 2, but this program knows 1"),
            ("{}".to_owned(), "it is not a measurement of `wideleaf tlbcost --save`: missing field `version`"),
            (" ".repeat(FILE_MAX as usize + 1), "it is longer than 65536 bytes"),
        ];
        for (text, why) in cases {
            let chosen = ChosenWalkCost::read(machine(GENOA, Some(&text)).path());
            assert_eq!(chosen.source, WalkCostSource::Kind("Zen 4"));
            let note = chosen.note.unwrap_or_default();
            assert!(note.contains(&format!("{SAVED_AT} is not used: {why}")), "{note}");
        }
    }
    #[test]
    fn a_measurement_under_another_paging_is_noted_and_not_used() {
        // Shadow tables have one dimension, NPT and EPT have two: the same CPU, but another cost.
        for (measured, why) in [
            ("shadow", "it was measured under \"shadow\" paging, but KVM uses npt here"),
            ("ept", "it was measured under \"ept\" paging, but KVM uses npt here"),
            ("", "it was measured under \"\" paging, but KVM uses npt here"),
        ] {
            let text = saved(GENOA, 55).replace("\"npt\"", &format!("{measured:?}"));
            let chosen = ChosenWalkCost::read(machine(GENOA, Some(&text)).path());
            assert_eq!(chosen.source, WalkCostSource::Kind("Zen 4"), "{measured}");
            assert!(chosen.note.as_deref().unwrap_or_default().contains(why), "{:?}", chosen.note);
        }
        let switched_off = machine(GENOA, Some(&saved(GENOA, 55)));
        fs::write(switched_off.path().join(NPT), "N\n").expect("a file can be written");
        let chosen = ChosenWalkCost::read(switched_off.path());
        assert!(chosen.note.is_some_and(|note| note.contains("\"npt\" paging, but KVM uses shadow here")));
        assert_eq!(chosen.source, WalkCostSource::Kind("Zen 4"));
    }

    #[test]
    fn every_table_knows_that_kvm_shadows_the_guests_tables() {
        for saved in [None, Some(saved(GENOA, 55).replace("\"npt\"", "\"shadow\""))] {
            let root = machine(GENOA, saved.as_deref());
            assert!(!ChosenWalkCost::read(root.path()).cost.is_shadowed());
            fs::write(root.path().join(NPT), "N\n").expect("a file can be written");
            let chosen = ChosenWalkCost::read(root.path());
            assert!(chosen.cost.is_shadowed() && chosen.note.is_none(), "{chosen:?}");
            assert!(
                chosen
                    .to_string()
                    .ends_with("; under shadow paging, host pages save none of it where the guest maps 4k"),
                "{chosen}"
            );
        }
    }

    #[test]
    fn without_kvm_a_guests_cost_is_noted_and_not_used() {
        let root = machine(GENOA, Some(&saved(GENOA, 55)));
        fs::remove_file(root.path().join(NPT)).expect("it is there");
        fs::remove_dir_all(root.path().join("sys")).expect("it is there");
        let chosen = ChosenWalkCost::read(root.path());
        assert_eq!(chosen.source, WalkCostSource::Kind("Zen 4"));
        assert!(chosen.note.is_some_and(|note| note.contains("unknown: cannot detect paging: no KVM vendor module")));
    }
}
