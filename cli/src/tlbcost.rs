//! `wideleaf tlbcost`: the cost of a TLB miss on this machine, and the gain of 2 MiB pages from it.
//!
//! ```text
//!   tlbcost            cells (native, guest page × host page) ─▶ measure ─▶ agreement ─▶ table | JSON ─▶ --save
//!   tlbcost --vm       the manager's estimate of a VM's share
//! ```

pub mod agreement;
pub mod counters;
pub mod measure;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;
use wideleaf_memory::input_file::InputFile;
use wideleaf_memory::walk_cost::{ChosenWalkCost, CpuModel, SAVED_AT, SavedWalkCost};
use wideleaf_policies::units::kib;
use wideleaf_policies::walk::cost::{Cells, WalkCost};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::environment::Environment;
use wideleaf_run::failure::Failure;
use wideleaf_run::guest;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::output_file::OutputFile;

use crate::options::FormatArg;
use crate::output::{Output, end_of_both};
use crate::progress::visible_bar;
use crate::vm_source::SourceArg;
use counters::{LinuxPmu, WalkEvents, describe, select};
use measure::{Cell, CellReport, RUNS_EXPECTED, measure};

/// Most bytes of a saved measurement: ten times any.
const SAVED_MAX: Bytes = kib(64);

const EXAMPLES: &str = "\
A miss is measured by chains of loads over growing footprints. Each footprint is repeated, in separate processes, until
three runs in a row agree, at most ten times. Cycles are ticks of the TSC, with the printed frequency; a core may run
faster or slower.

Examples:
  Everything: in a process and in guests, with 4 KiB, 2 MiB and, if available, 1 GiB pages on both sides:
    wideleaf tlbcost

  Only in a process, 2 MiB pages over a footprint that shows both levels of the TLB:
    wideleaf tlbcost --native --host-page 2m --bytes 8G

  Save the result for `--policy auto` (as root), which otherwise uses a figure for the kind of CPU, or an assumption:
    sudo wideleaf tlbcost --save

The predicted and the measured gain of 2 MiB pages for a kernel: wideleaf-lab predict KERNEL";

/// Arguments of `wideleaf tlbcost`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct TlbCostArgs {
    /// Measure only in a process, without a guest
    #[arg(long, conflicts_with = "guest")]
    native: bool,

    /// Measure only in guests (needs KVM) [default: both; without KVM only in a process]
    #[arg(long)]
    guest: bool,

    /// Measure only this page size of the guest's own tables [default: all]
    #[arg(long, value_name = "4k|2m|1g", value_parser = PageSize::parse, conflicts_with = "native")]
    guest_page: Option<PageSize>,

    /// Measure only this page size of the host [default: all]
    #[arg(long, value_name = "4k|2m|1g", value_parser = PageSize::parse)]
    host_page: Option<PageSize>,

    /// Largest footprint of a chase: a number with K, M, G or T (powers of 1024) [default: 64M of 4k pages, 256M of
    /// 2m pages]
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    bytes: Option<Bytes>,

    /// Save the guests' costs for `--policy auto`; saved costs that are not measured now stay [default file:
    /// /var/lib/wideleaf/tlbcost.json]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, conflicts_with_all = ["native", "vm"])]
    save: Option<Option<PathBuf>>,

    /// Show the estimated share of its time that a running VM spends in page walks: its name, process id or libvirt
    /// UUID
    #[arg(long, value_name = "VM", conflicts_with_all = ["native", "guest"])]
    vm: Option<String>,

    #[command(flatten)]
    source: SourceArg,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,

    /// Write the result to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// All results of the measurement.
#[derive(Debug, Serialize)]
pub struct TlbCostReport {
    /// Method: `calibrated`, by a pointer chase.
    pub method: String,
    /// The CPU's own counters: the matching table, or the reason why there are none.
    pub pmu: String,
    /// Model of the CPU.
    pub cpu: CpuModel,
    /// Ticks of the TSC per microsecond: the unit of a cycle here.
    pub tsc_mhz: Option<f64>,
    /// Reason why no guest was measured, if one may have been expected.
    pub why_native: Option<String>,
    /// Result for each place and pair of page sizes.
    pub cells: Vec<CellReport>,
    /// File of the saved costs, with `--save`.
    pub saved: Option<PathBuf>,
    /// Cost that `auto` uses from now on.
    pub walk_cost: String,
    /// Reason why an existing measurement is not used, if so.
    pub walk_cost_note: Option<String>,
    /// Machine that was measured.
    pub environment: Environment,
}

/// Runs the subcommand `tlbcost`.
///
/// # Errors
/// [`Failure`]; no process and no file is left.
pub fn main(args: &TlbCostArgs) -> Result<(), Failure> {
    if let Some(name) = &args.vm {
        let output = Output::open(args.format, args.output.as_deref())?;
        let vm = args.source.source()?.vm(name)?;
        return output.write(&tables::VmShare::of(&vm), tables::VmShare::to_table);
    }
    let why_no_kvm = guest::why_no_kvm();
    if let (true, Some(why)) = (args.guest || args.guest_page.is_some() || args.save.is_some(), &why_no_kvm) {
        return Err(Failure::Host(format!("cannot run a guest here: {why}; use --native to measure in a process")));
    }
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?;
    let output = Output::open(args.format, args.output.as_deref())?;
    let place = args.save.as_ref().map(|file| open_place(file.as_deref())).transpose()?;
    let mut report = args.survey(why_no_kvm, &interrupts)?;
    let saved = place.map_or(Ok(()), |(place, path)| report.save(place, path));
    // Also if nothing was saved: the table says which cells did not agree.
    end_of_both("wideleaf", saved, output.write(&report, TlbCostReport::to_table))
}

/// Opens the place for the saved measurement.
fn open_place(file: Option<&Path>) -> Result<(OutputFile, PathBuf), Failure> {
    let path = file.map_or_else(|| Path::new("/").join(SAVED_AT), Path::to_owned);
    if let (None, Some(folder)) = (file, path.parent()) {
        let cannot =
            |error| Failure::Output(format!("cannot make {}: {error} (needs root, or --save=FILE)", folder.display()));
        fs::create_dir_all(folder).map_err(cannot)?;
    }
    Ok((OutputFile::open("--save", &path)?, path))
}

impl TlbCostArgs {
    /// All requested places and pairs of page sizes.
    fn cells(&self, has_kvm: bool) -> Vec<Cell> {
        let of = |page: Option<PageSize>| page.map_or(PageSize::ALL.to_vec(), |page| vec![page]);
        let hosts = of(self.host_page);
        let native = hosts.iter().map(|host| Cell { guest: None, host: *host });
        let guests = of(self.guest_page).into_iter();
        let guests = guests.flat_map(|guest| hosts.iter().map(move |host| Cell { guest: Some(guest), host: *host }));
        let has_native = !self.guest && self.guest_page.is_none();
        let has_guest = !self.native && has_kvm;
        native.filter(|_| has_native).chain(guests.filter(|_| has_guest)).collect()
    }

    fn survey(&self, why_no_kvm: Option<String>, interrupts: &Interrupts) -> Result<TlbCostReport, Failure> {
        let cells = self.cells(why_no_kvm.is_none());
        let mut report = TlbCostReport::new(&select(&LinuxPmu, &CpuModel::read(Path::new("/"))));
        report.why_native = why_no_kvm.filter(|_| !self.native);
        let bar = progress(cells.len() as u64 * RUNS_EXPECTED);
        for cell in cells {
            report.add(measure(cell, self.bytes, interrupts, &bar)?);
        }
        bar.finish_and_clear();
        Ok(report)
    }
}

fn progress(runs: u64) -> ProgressBar {
    let bar = visible_bar(runs, "{bar:30} {pos} of about {len} steps, {msg} [{elapsed}]");
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

impl TlbCostReport {
    fn new(pmu: &Result<&'static WalkEvents, String>) -> TlbCostReport {
        let mut report = TlbCostReport {
            method: "calibrated".into(),
            pmu: describe(pmu),
            cpu: CpuModel::read(Path::new("/")),
            tsc_mhz: None,
            why_native: None,
            cells: Vec::new(),
            saved: None,
            walk_cost: String::new(),
            walk_cost_note: None,
            environment: Environment::capture(),
        };
        report.choose_walk_cost();
        report
    }

    fn choose_walk_cost(&mut self) {
        let chosen = ChosenWalkCost::read(Path::new("/"));
        (self.walk_cost, self.walk_cost_note) = (chosen.to_string(), chosen.note);
    }

    fn save(&mut self, place: OutputFile, path: PathBuf) -> Result<(), Failure> {
        place.put((self.to_save(saved_in(&path).as_ref())? + "\n").as_bytes())?;
        self.saved = Some(path);
        self.choose_walk_cost();
        Ok(())
    }

    fn add(&mut self, cell: CellReport) {
        self.tsc_mhz = self.tsc_mhz.or(cell.tsc_mhz);
        self.cells.push(cell);
    }

    /// The guests' costs, in the form for saving, with those of an earlier measurement that were not measured now.
    fn to_save(&self, earlier: Option<&SavedWalkCost>) -> Result<String, Failure> {
        let cells = guest_costs(&self.cells);
        let mhz = self.tsc_mhz.map_or(0, |mhz| mhz.round() as u32);
        if cells.iter().flatten().flatten().count() == 0 || mhz == 0 {
            let why = "no guest showed the cost of a miss in all levels of the TLB in three runs that agree";
            return Err(Failure::Host(format!(
                "cannot save a cost, nothing was saved: {why}; repeat it on a quiet machine, or with a larger --bytes"
            )));
        }
        if WalkCost::measured(&cells, mhz).is_none() {
            return Err(Failure::Host(format!(
                "cannot save a cost, nothing was saved: one of the figures, {cells:?} ticks at {mhz} MHz, is not a \
                 valid cost of a walk; repeat it on a quiet machine"
            )));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let paging = self.cells.iter().find(|cell| cell.cell.guest.is_some()).and_then(|cell| cell.paging.as_deref());
        let mut saved = SavedWalkCost::new(self.cpu.clone(), paging.unwrap_or_default(), now, mhz, cells);
        if let Some(earlier) = earlier.filter(|earlier| is_of_same_machine(earlier, &saved)) {
            for (cell, earlier) in saved.cycles.iter_mut().flatten().zip(earlier.cycles.iter().flatten()) {
                *cell = cell.or(*earlier);
            }
        }
        serde_json::to_string_pretty(&saved).map_err(|error| Failure::Output(format!("cannot write JSON: {error}")))
    }
}

/// The measurement in that file, of any machine; `None` without a file or a measurement in it.
fn saved_in(path: &Path) -> Option<SavedWalkCost> {
    let text = InputFile::open(path).ok()?.read_text(SAVED_MAX).ok()?;
    serde_json::from_str(&text).ok()
}

/// Whether a valid earlier measurement has the same unit and conditions as this one.
fn is_of_same_machine(earlier: &SavedWalkCost, now: &SavedWalkCost) -> bool {
    // The TSC's frequency is measured too, to about one part in a thousand.
    let mhz = now.cycles_per_microsecond;
    (earlier.version, &earlier.cpu, &earlier.paging) == (now.version, &now.cpu, &now.paging)
        && earlier.cycles_per_microsecond.abs_diff(mhz) <= mhz / 100
        && WalkCost::measured(&earlier.cycles, mhz).is_some()
}

/// By guest page and host page, as in `auto`'s table.
fn guest_costs(reports: &[CellReport]) -> Cells {
    let index = |page: PageSize| PageSize::ALL.iter().position(|other| *other == page).expect("all are in the list");
    let mut cells: Cells = [[None; 3]; 3];
    for report in reports {
        if let (Some(guest), Some(walk)) = (report.cell.guest, report.walk_ticks) {
            cells[index(guest)][index(report.cell.host)] = Some((walk.median.round() as u32).max(1));
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn args(text: &str) -> Result<TlbCostArgs, String> {
        let words = ["wideleaf", "tlbcost"].into_iter().chain(text.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::TlbCost(args) => Ok(args),
            _ => Err("another command".into()),
        }
    }

    fn cells(text: &str, has_kvm: bool) -> usize {
        args(text).expect("it is right").cells(has_kvm).len()
    }

    #[test]
    fn the_measured_cells_follow_from_the_arguments() {
        assert_eq!(cells("", true), 3 + 9);
        assert_eq!(cells("", false), 3);
        assert_eq!(cells("--native", true), 3);
        assert_eq!(cells("--guest", true), 9);
        assert_eq!(cells("--guest --guest-page 2m --host-page 4k", true), 1);
        assert_eq!(cells("--native --host-page 2m", true), 1);
        assert_eq!(cells("--guest-page 2m", true), 3, "a guest page selects guests");
    }

    #[test]
    fn a_part_that_is_measured_again_leaves_the_other_saved_costs_of_this_machine() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cost.json");
        let cpu = CpuModel::read(Path::new("/"));
        let saved_over = |cpu: CpuModel, paging: &str, mhz| {
            let cells = [[Some(50), Some(30), None], [None; 3], [None, None, Some(9)]];
            let earlier = serde_json::to_string(&SavedWalkCost::new(cpu, paging, 1, mhz, cells)).expect("JSON");
            fs::write(&path, earlier).expect("written");
            let mut report = TlbCostReport::new(&Err("none".into()));
            report.tsc_mhz = Some(2_596.2);
            report.cells = vec![CellReport {
                paging: Some("npt".into()),
                walk_ticks: Some(agreement::Spread::of([55.0])),
                ..CellReport::new(Cell { guest: Some(PageSize::Base4K), host: PageSize::Base4K })
            }];
            report.save(OutputFile::open("--save", &path).expect("a place"), path.clone()).expect("saved");
            saved_in(&path).expect("a measurement").cycles
        };
        let merged = [[Some(55), Some(30), None], [None; 3], [None, None, Some(9)]];
        assert_eq!(saved_over(cpu.clone(), "npt", 2_597), merged);
        let alone = [[Some(55), None, None], [None; 3], [None; 3]];
        assert_eq!(saved_over(CpuModel { model: cpu.model + 1, ..cpu.clone() }, "npt", 2_597), alone);
        assert_eq!(saved_over(cpu.clone(), "shadow", 2_597), alone);
        assert_eq!(saved_over(cpu, "npt", 1_000), alone, "ticks of another length");
    }

    #[test]
    fn arguments_that_contradict_each_other_are_refused() {
        for wrong in ["--native --guest", "--native --save", "--save --vm web", "--native --guest-page 2m"] {
            assert!(args(wrong).is_err(), "{wrong}");
        }
        assert!(matches!(args("--save").map(|args| args.save), Ok(Some(None))));
        assert!(matches!(args("--save=/tmp/x").map(|args| args.save), Ok(Some(Some(_)))));
    }
}
