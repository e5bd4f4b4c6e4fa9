//! Output of `wideleaf tlbcost` for people; JSON has the same figures.

use std::fmt::Write as _;
use std::path::Path;

use comfy_table::Cell;
use serde::Serialize;
use wideleaf_control::view::VmView;
use wideleaf_memory::walk_cost::SAVED_AT;
use wideleaf_policies::Bytes;
use wideleaf_run::environment::Environment;
use wideleaf_run::setup::evidence;
use wideleaf_run::text::clean;

use super::agreement::{RUNS_MAX, Spread};
use super::measure::{CellReport, LevelReport};
use super::{TlbCostReport, agreement};
use crate::table::{number, table};

/// Estimated share of its time that a VM spends in page walks.
#[derive(Debug, Serialize)]
pub struct VmShare {
    /// Name of the VM.
    pub name: String,
    /// Share of its time, in ten-thousandths; `None` if it is unknown.
    pub walk_share: Option<u32>,
    /// Reason why it is unknown, if so.
    pub why_not: Option<String>,
}

impl VmShare {
    /// The estimate of `wideleaf info`.
    pub fn of(vm: &VmView) -> VmShare {
        let walk_share = vm.work.as_ref().and_then(|work| work.walk_share);
        let why_not = match (&vm.work, walk_share) {
            (_, Some(_)) => None,
            (None, None) => Some("it is not managed; run `wideleaf attach` to manage it and sample its accesses"),
            (Some(_), None) => {
                Some("its policy samples no accesses, or has none yet; `wideleaf set VM policy=auto` samples them")
            }
        };
        VmShare { name: vm.name.clone(), walk_share, why_not: why_not.map(str::to_owned) }
    }

    /// The share as a line for people.
    pub fn to_table(&self) -> String {
        let name = clean(&self.name);
        match (self.walk_share, &self.why_not) {
            (Some(share), _) => format!(
                "{name}: {:.2} % of its time in page walks, as predicted by its accesses\n",
                f64::from(share) / 1e2
            ),
            (None, why) => {
                format!("{name}: its time in page walks is unknown: {}\n", why.as_deref().unwrap_or_default())
            }
        }
    }
}

impl TlbCostReport {
    /// The report as a table for people.
    pub fn to_table(&self) -> String {
        let Environment { cpus, kernel, load_1m, is_virtual, .. } = &self.environment;
        let mut out = format!("method: {}, by a pointer chase; PMU: {}\n", self.method, self.pmu);
        let mhz = self.tsc_mhz.map_or("unknown".to_owned(), |mhz| format!("{mhz:.0} MHz"));
        let _ = writeln!(out, "cycles are ticks of the TSC ({mhz}); a core's own clock may be faster or slower");
        if let Some(why) = &self.why_native {
            let _ = writeln!(out, "measured only natively: {why}");
        }
        self.write_cells(&mut out);
        let mut pagings: Vec<&str> = self.cells.iter().filter_map(|cell| cell.paging.as_deref()).collect();
        pagings.dedup();
        for paging in pagings {
            let _ = writeln!(out, "paging {paging}: {}", evidence(paging, *is_virtual));
        }
        let _ = writeln!(out, "measured on {cpus} x {}, kernel {kernel}, load {load_1m} at the start", self.cpu.name);
        if let Some(saved) = &self.saved {
            let is_read = *saved == Path::new("/").join(SAVED_AT);
            let reader =
                if is_read { "`run` and wideleafd read it when they start" } else { "no program reads it there" };
            let _ = writeln!(out, "saved in {}: {reader}", saved.display());
        }
        let _ = writeln!(out, "auto uses {}", self.walk_cost);
        if let Some(note) = &self.walk_cost_note {
            let _ = writeln!(out, "  {note}");
        }
        out
    }

    fn write_cells(&self, out: &mut String) {
        if self.cells.is_empty() {
            return;
        }
        let mut rows = table(&[
            "where",
            "guest",
            "host",
            "entry",
            "level",
            "entries",
            "reach",
            "ns per miss",
            "cycles",
            "misses per 1 s lost",
            "runs",
        ]);
        for cell in self.cells.iter().filter(|cell| cell.skipped.is_none()) {
            let places = || {
                [Cell::new(&cell.place), Cell::new(page(cell)), Cell::new(&cell.host_page), Cell::new(&cell.entry_page)]
            };
            for level in &cell.levels {
                rows.add_row(places().into_iter().chain(level_cells(level)).chain([number(cell.runs)]));
            }
            if let (Some(ns), Some(ticks)) = (cell.walk_ns, cell.walk_ticks) {
                let all = [
                    Cell::new("all"),
                    number(""),
                    number(""),
                    spread(ns, 2),
                    spread(ticks, 1),
                    number((1e9 / ns.median) as u64),
                ];
                rows.add_row(places().into_iter().chain(all).chain([number(cell.runs)]));
            }
        }
        if rows.row_count() > 0 {
            let _ = writeln!(out, "{rows}");
        }
        for cell in &self.cells {
            if let Some(remark) = remark(cell) {
                let _ = writeln!(out, "{remark}");
            }
        }
    }
}

/// Why a cell has no level, or fewer than it could have.
fn remark(cell: &CellReport) -> Option<String> {
    let what = format!("{}, guest {}, host {}", cell.place, page(cell), cell.host_page);
    if let Some(why) = &cell.skipped {
        Some(format!("skipped: {what}: {why}"))
    } else if !cell.agreed {
        let matches = agreement::MATCHES;
        Some(format!("did not agree: {what}: no {matches} of {RUNS_MAX} runs in a row gave the same result"))
    } else if cell.levels.is_empty() {
        Some(format!("no level: {what}: the TLB reach exceeds this footprint; a larger --bytes may show it"))
    } else if cell.walk_ticks.is_none() {
        Some(format!("one level only: {what}: use a larger --bytes to see the cost of a miss in all levels"))
    } else {
        None
    }
}

fn page(cell: &CellReport) -> &str {
    cell.guest_page.as_deref().unwrap_or("-")
}

fn level_cells(level: &LevelReport) -> [Cell; 6] {
    [
        number(level.level),
        number(level.entries),
        number(Bytes::new(level.reach_bytes)),
        spread(level.miss_ns, 2),
        spread(level.miss_ticks, 1),
        number(level.misses_per_second_lost),
    ]
}

/// A spread as text, like `11.9 (11.8 - 12.1)`.
fn spread(spread: Spread, digits: usize) -> Cell {
    let Spread { median, lowest, highest } = spread;
    number(format!("{median:.digits$} ({lowest:.digits$} - {highest:.digits$})"))
}
