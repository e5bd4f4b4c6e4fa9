//! One cell of the measurement: `latency` in a process or in a guest, on pages of chosen sizes, until three runs agree.
//!
//! ```text
//!   cell: native or guest page, host page ─▶ `wideleaf run latency …` ─▶ entriesN, miss_ticksN ─▶ agreed? ─┐
//!                                                ▲                                                         │
//!                                                └──────────────────────────────── no, at most ten times ──┘
//! ```

use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;
use serde::Serialize;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::failure::Failure;
use wideleaf_run::guest;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::RunReport;

use super::agreement::{Level, MATCHES, RUNS_MAX, Spread, TLB_LEVELS, agreed, levels, shows_no_level};
use crate::child;

/// Time limit of a run of the chase, which takes seconds.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// RAM of a guest in addition to its footprint: image, tables, stacks.
const BESIDE_FOOTPRINT: Bytes = mib(64);

/// Most levels that the kernel reports.
const LEVELS_MAX: usize = 4;

/// Place of a chase, and its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Page of the guest's tables; `None`: in a process, without a guest.
    pub guest: Option<PageSize>,
    /// Page of the host.
    pub host: PageSize,
}

impl Cell {
    /// Size that a TLB entry covers: the smaller of the two.
    pub fn entry(self) -> PageSize {
        self.guest.map_or(self.host, |guest| guest.min(self.host))
    }

    /// Default footprint. For base pages it is five times the reach of the largest known TLB (3072 entries, Zen 4);
    /// for others it shows the first level and takes at most 256 MiB.
    pub fn footprint(self) -> Result<Bytes, String> {
        match self.entry() {
            PageSize::Base4K => Ok(mib(64)),
            PageSize::Huge2M => Ok(mib(256)),
            PageSize::Giant1G => Err("a chase needs at least 8 pages of 1 GiB: use --bytes 8G".into()),
        }
    }

    /// Name of the place: `native` or `guest`.
    pub fn place(self) -> &'static str {
        if self.guest.is_some() { "guest" } else { "native" }
    }

    /// The command line of a run, or the reason why it cannot run here.
    fn arguments(self, bytes: Option<Bytes>) -> Result<Vec<String>, String> {
        let footprint = bytes.map_or_else(|| self.footprint(), Ok)?;
        let page = self.entry();
        let least = Bytes::new(8 * page.bytes().get());
        if footprint < least {
            return Err(format!(
                "cannot use --bytes {footprint}: it is less than the 8 pages of {} that a chase needs",
                page.name()
            ));
        }
        let largest = self.guest.map_or(self.host, |guest| guest.max(self.host));
        let ram = if self.guest.is_some() { footprint + BESIDE_FOOTPRINT } else { footprint };
        // A guest of 1 GiB pages keeps the first one for itself.
        let ram = if self.guest == Some(PageSize::Giant1G) { ram + gib(1) } else { ram };
        // RAM must end at a window's border.
        let ram = ram.get().next_multiple_of(largest.max(PageSize::Huge2M).bytes().get());
        let mut arguments: Vec<String> =
            ["run", "latency", "--policy", "never", "--prefault"].map(str::to_owned).into();
        let chase = format!("bytes={} page={}", footprint.get(), page.bytes().get());
        arguments.extend(["--cmdline".into(), chase, "--memory".into(), ram.to_string()]);
        arguments.extend(["--host-page".into(), self.host.name().into()]);
        if self.host == PageSize::Giant1G {
            arguments.extend(["--backing".into(), "hugetlb".into()]);
        }
        match self.guest {
            None => arguments.push("--native".into()),
            Some(page) => arguments.extend(["--no-daemon".into(), "--guest-page".into(), page.name().into()]),
        }
        Ok(arguments)
    }
}

/// Result of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct CellReport {
    /// Place of the chase: `native` or `guest`.
    pub place: String,
    /// Paging: `ept`, `npt`, `shadow`; `none` for a native run.
    pub paging: Option<String>,
    /// Page size of the guest's tables.
    pub guest_page: Option<String>,
    /// Page size of the host.
    pub host_page: String,
    /// Size that a TLB entry then covers.
    pub entry_page: String,
    /// Number of runs that were made.
    pub runs: usize,
    /// Whether the last three agreed. Only then there are levels, unless they agreed that the footprint shows none.
    pub agreed: bool,
    /// Levels of the TLB.
    pub levels: Vec<LevelReport>,
    /// Extra ticks of a load that misses in all levels; `None` if the footprint showed only the first.
    pub walk_ticks: Option<Spread>,
    /// Extra time of such a load, in nanoseconds.
    pub walk_ns: Option<Spread>,
    /// Reason why there is no result, if so.
    pub skipped: Option<String>,
    /// Cell of the result.
    #[serde(skip)]
    pub cell: Cell,
    /// Ticks of the TSC per microsecond.
    #[serde(skip)]
    pub tsc_mhz: Option<f64>,
}

/// A level of the TLB.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LevelReport {
    /// Number of the level: 1 is the smallest.
    pub level: usize,
    /// Number of pages that it holds.
    pub entries: u64,
    /// Reach of these pages, in bytes.
    pub reach_bytes: u64,
    /// Extra TSC ticks of a miss there over a hit there.
    pub miss_ticks: Spread,
    /// The same extra time, in nanoseconds.
    pub miss_ns: Spread,
    /// Number of such misses that cost one second.
    pub misses_per_second_lost: u64,
}

impl CellReport {
    pub(super) fn new(cell: Cell) -> CellReport {
        CellReport {
            place: cell.place().into(),
            paging: None,
            guest_page: cell.guest.map(|page| page.name().into()),
            host_page: cell.host.name().into(),
            entry_page: cell.entry().name().into(),
            runs: 0,
            agreed: false,
            levels: Vec::new(),
            walk_ticks: None,
            walk_ns: None,
            skipped: None,
            cell,
            tsc_mhz: None,
        }
    }

    /// Adds the result of runs that agree.
    fn with(mut self, runs: &[Vec<Level>], tsc_mhz: f64) -> CellReport {
        let found = levels(runs);
        let page = self.cell.entry().bytes().get();
        self.levels = found
            .iter()
            .enumerate()
            .map(|(index, (entries, ticks))| {
                let ns = ticks.times(1e3 / tsc_mhz);
                let misses = (1e9 / ns.median) as u64;
                LevelReport {
                    level: index + 1,
                    entries: *entries,
                    reach_bytes: entries * page,
                    miss_ticks: *ticks,
                    miss_ns: ns,
                    misses_per_second_lost: misses,
                }
            })
            .collect();
        if found.len() == TLB_LEVELS {
            let whole = |run: &Vec<Level>| run.iter().take(TLB_LEVELS).map(|level| level.miss_ticks).sum::<f64>();
            let walk = Spread::of(runs.iter().map(whole));
            (self.walk_ticks, self.walk_ns) = (Some(walk), Some(walk.times(1e3 / tsc_mhz)));
        }
        self
    }
}

/// Measures a cell. A cell that this host cannot measure is skipped, with the reason.
///
/// # Errors
/// [`Failure`] if a run that the host supports failed.
pub fn measure(
    cell: Cell,
    bytes: Option<Bytes>,
    interrupts: &Interrupts,
    bar: &ProgressBar,
) -> Result<CellReport, Failure> {
    let mut report = CellReport::new(cell);
    let missing = missing_giants(cell).or_else(|| missing_guest_page(cell));
    let arguments = match missing.map_or_else(|| cell.arguments(bytes), Err) {
        Ok(arguments) => arguments,
        Err(why) => return Ok(CellReport { skipped: Some(why), ..report }),
    };
    let mut runs: Vec<Vec<Level>> = Vec::new();
    while runs.len() < RUNS_MAX {
        bar.set_message(format!("{}, host {}: run {}", cell.place(), cell.host.name(), runs.len() + 1));
        let run = match child::run(&arguments, RUN_TIMEOUT, interrupts) {
            Ok(run) => run,
            // The host may not have enough memory for pages of 1 GiB.
            Err(why @ (Failure::Host(_) | Failure::Usage(_))) if is_giant(cell) => {
                return Ok(CellReport { skipped: Some(why.to_string()), ..report });
            }
            Err(why) => return Err(why),
        };
        if run.verification.as_ref().is_none_or(|verification| !verification.passed) {
            let why = "cannot use the measurement: its kernel, latency, read wrong words; repeat it on another machine";
            return Err(Failure::GuestFailed(why.into()));
        }
        bar.inc(1);
        report.paging = Some(run.setup.paging.clone());
        report.tsc_mhz = tsc_mhz(&run).or(report.tsc_mhz);
        runs.push(levels_of(&run));
        report.runs = runs.len();
        if let (Some(last), Some(mhz)) = (agreed(&runs), report.tsc_mhz) {
            report.agreed = true;
            return Ok(report.with(last, mhz));
        }
        if shows_no_level(&runs) {
            return Ok(CellReport { agreed: true, ..report });
        }
    }
    Ok(report)
}

fn is_giant(cell: Cell) -> bool {
    cell.host == PageSize::Giant1G || cell.guest == Some(PageSize::Giant1G)
}

/// Reason why a cell that needs 1 GiB pages has none.
fn missing_giants(cell: Cell) -> Option<String> {
    if cell.host != PageSize::Giant1G {
        return None;
    }
    match HugetlbPools::at(Path::new("/")).status(PageSize::Giant1G) {
        Ok(pool) if pool.available() > 0 => None,
        Ok(_) => Some("the 1 GiB pool has no free page: run `wideleaf pool reserve --size 1g --pages 1`".into()),
        Err(error) => Some(error.to_string()),
    }
}

/// Reason why a guest cannot have pages of that size.
fn missing_guest_page(cell: Cell) -> Option<String> {
    let page = cell.guest?;
    (!guest::guest_pages().is_ok_and(|pages| pages.contains(&page)))
        .then(|| format!("KVM gives its guests no {page} pages here"))
}

/// Levels that a run reports.
fn levels_of(run: &RunReport) -> Vec<Level> {
    let result = |name: &str, number: usize| run.results.get(&format!("{name}{number}")).map(|result| result.value);
    let level =
        |number| Some(Level { entries: result("entries", number)? as u64, miss_ticks: result("miss_ticks", number)? });
    (1..=LEVELS_MAX).map_while(level).collect()
}

/// Ticks per microsecond, from the run's first level in both units; `None` if its clock has no known frequency, or
/// it found no level.
fn tsc_mhz(run: &RunReport) -> Option<f64> {
    let (ticks, time) = (run.results.get("miss_ticks1")?, run.results.get("miss1")?);
    (time.unit == "ns" && time.value > 0.0).then(|| ticks.value / time.value * 1e3)
}

/// Number of runs that a cell takes on a quiet machine, for a progress bar.
pub const RUNS_EXPECTED: u64 = MATCHES as u64;

#[cfg(test)]
mod tests {
    use super::*;
    use PageSize::{Base4K, Giant1G, Huge2M};

    fn line(guest: Option<PageSize>, host: PageSize, bytes: Option<Bytes>) -> Result<String, String> {
        Cell { guest, host }.arguments(bytes).map(|arguments| arguments.join(" "))
    }

    #[test]
    fn a_cell_is_a_run_of_latency_on_its_pages() {
        let native = "run latency --policy never --prefault --cmdline bytes=67108864 page=4096 \
                      --memory 67108864 --host-page 4k --native";
        assert_eq!(line(None, Base4K, None).as_deref(), Ok(native));
        // 2 MiB pages of the guest over the host's 4 KiB: the entries are of 4 KiB.
        let splintered = line(Some(Huge2M), Base4K, None).expect("it can be run");
        assert!(
            splintered.contains("page=4096 --memory 134217728 --host-page 4k --no-daemon --guest-page 2m"),
            "{splintered}"
        );
        let large = line(Some(Huge2M), Huge2M, Some(mib(64))).expect("it can be run");
        assert!(large.contains("bytes=67108864 page=2097152 --memory 134217728"), "{large}");
    }

    #[test]
    fn a_footprint_that_shows_no_level_is_refused_with_the_reason() {
        assert!(line(None, Giant1G, None).expect_err("too large by itself").contains("--bytes 8G"));
        assert!(line(None, Huge2M, Some(mib(8))).expect_err("4 pages").contains("less than the 8 pages of 2m"));
        assert!(line(Some(Giant1G), Base4K, None).is_ok(), "its entries are of 4 KiB");
    }

    #[test]
    fn a_walk_is_a_miss_in_both_levels() {
        let run =
            |second: f64| vec![Level { entries: 72, miss_ticks: 5.0 }, Level { entries: 3072, miss_ticks: second }];
        let report =
            CellReport::new(Cell { guest: None, host: Base4K }).with(&[run(25.0), run(26.0), run(27.0)], 2_500.0);
        assert_eq!(report.walk_ticks, Some(Spread { median: 31.0, lowest: 30.0, highest: 32.0 }));
        let level = report.levels[1];
        assert_eq!((level.reach_bytes, level.miss_ns.median), (3072 * 4096, 10.4));
        assert_eq!(level.misses_per_second_lost, 96_153_846);
        let first_only = CellReport::new(Cell { guest: None, host: Huge2M }).with(&[vec![run(0.0)[0]]], 2_500.0);
        assert_eq!((first_only.levels.len(), first_only.walk_ticks), (1, None));
    }
}
