//! `two-dimensional`: guest page × host page. A TLB entry covers the smaller of both, and a miss walks both tables.
//! The gain of a large page on one side therefore depends on the other side.
//!
//! ```text
//!                 host 4k   host 2m   host 1g
//!   guest 4k         1         .         .        the figure relative to 4k over 4k, and KVM's mappings
//!   guest 2m         .         .         .        cells that this host's KVM cannot show stay empty, with the reason
//!   guest 1g         .         .         .
//! ```
//!
//! With shadow tables, there is one table to walk, and its entries have the size min(guest, host). Most cells would
//! repeat another cell's figure. The mappings of KVM in each cell with tables of two levels were counted in the labs
//! (`benches/data/lab_mappings.csv`), which says nothing about speed. All cells are also simulated (`grid`).

use crate::catalogue::{Catalogued, grid, page_tables, walks};
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::{Better, Metric};
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use wideleaf_measure::statistics::Comparison;

/// The `two-dimensional` experiment of the catalogue.
pub struct TwoDimensional;

const PAGES: [&str; 3] = ["4k", "2m", "1g"];
const ROUNDS: u32 = 12;
/// Arm that begins on base pages and is moved to a giant page.
const MOVED: &str = "moved to 1g";
const MOVED_SUMMARY: &str = "guest RAM on 4 KiB pages at the start, moved to a 1 GiB page by `giant` while it runs";
/// RAM of every guest, enough for one giant page.
const RAM_MIB: u64 = 1024;
/// Hosts with less memory than this, such as the labs, get small guests.
const SMALL_HOST_MIB: u64 = 3 * 1024;
/// Counts from the labs, made by `benches/lab-mappings`.
const LAB_MAPPINGS: &str = include_str!("../../../data/lab_mappings.csv");

/// A kernel: name in tables, unit, arguments.
type Kernel = (&'static str, &'static str, &'static [&'static str]);

const KERNELS: [Kernel; 3] = [
    ("GUPS 2^26", "GUP/s", &["gups", "--cmdline", "log2_words=26 seconds=1"]),
    ("STREAM", "MB/s", &["stream", "--cmdline", "times=6"]),
    ("CG A", "Mop/s", &["npb.cg", "--class", "A"]),
];
/// Kernels for an emulated machine, where times have no meaning.
const SMALL_KERNELS: [Kernel; 1] = [("GUPS 2^22", "GUP/s", &["gups", "--cmdline", "log2_words=22 rounds=1"])];

impl Catalogued for TwoDimensional {
    fn name(&self) -> &'static str {
        "two-dimensional"
    }

    fn summary(&self) -> &'static str {
        "guest page by host page: speed, KVM's mappings, and its mappings in the labs"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let kernels: &[Kernel] = if host.memory_available_mib < SMALL_HOST_MIB { &SMALL_KERNELS } else { &KERNELS };
        let cell = |arguments: &[&str], guest: &str, page: &str| match absence(host, guest, page) {
            Some(why) => Cell::Absent(why),
            None => Cell::of(job(host, arguments, guest, (page, "never"))),
        };
        let case = |(name, unit, arguments): &Kernel, guest: &str| Case {
            name: format!("{name}, guest {guest}"),
            unit: (*unit).into(),
            working_set_mib: RAM_MIB.min(host.memory_available_mib / 2),
            cells: PAGES
                .iter()
                .map(|page| cell(arguments, guest, page))
                .chain([moved(host, arguments, guest)])
                .collect(),
        };
        let arm = |page: &&str| {
            let summary = match *page {
                "4k" => "guest RAM on 4 KiB pages",
                "2m" => "guest RAM on 2 MiB transparent huge pages",
                _ => "guest RAM on a 1 GiB page of the hugetlb pool",
            };
            Arm { name: format!("host {page}"), summary: summary.into() }
        };
        Experiment {
            name: self.name().into(),
            title: "Two dimensions: guest page by host page".into(),
            question: "What is the gain of a large page in the guest's tables, in the host's, and in both?".into(),
            source: None,
            rounds: if host.memory_available_mib < SMALL_HOST_MIB { 1 } else { ROUNDS },
            arms: PAGES.iter().map(arm).chain([Arm { name: MOVED.into(), summary: MOVED_SUMMARY.into() }]).collect(),
            cases: kernels.iter().flat_map(|kernel| PAGES.iter().map(|guest| case(kernel, guest))).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let kernels: Vec<&str> =
            results.experiment.cases.iter().filter_map(|case| case.name.strip_suffix(", guest 4k")).collect();
        let paging = match results.environment.paging.as_str() {
            "ept" | "npt" => "Both tables are walked by hardware on a miss.".to_owned(),
            "shadow" => "KVM uses shadow tables here: one table is walked, and it maps the smaller of both pages. \
             Cells that would repeat another cell are empty."
                .to_owned(),
            other => format!("Paging of guests: {other}."),
        };
        let tables = kernels.iter().map(|kernel| figures(results, kernel)).chain([labs()]).collect();
        let measured =
            Section { title: "Guest page by host page".into(), paragraphs: vec![paging], tables, plots: vec![] };
        let arms = arms();
        let arms: Vec<&str> = arms.iter().map(String::as_str).collect();
        let more = [counted(results, &kernels), page_tables::section(results, &kernels, &arms)];
        [vec![measured], more.into_iter().flatten().collect(), grid::embedded()].concat()
    }
}

/// A run that begins on 4 KiB pages and is moved to a giant page, which must be there.
fn moved(host: &HostFacts, arguments: &[&str], guest: &str) -> Cell {
    if host.memory_available_mib < SMALL_HOST_MIB {
        return Cell::Absent(
            "left out on a host with little memory, such as an emulated one: no speed is shown".into(),
        );
    }
    match absence(host, guest, "1g") {
        Some(why) => Cell::Absent(why),
        None => Cell::of(job(host, arguments, guest, ("4k", "giant"))),
    }
}

/// A run with this guest page, over this host page and under this policy.
fn job(host: &HostFacts, arguments: &[&str], guest: &str, (page, policy): (&str, &str)) -> Job {
    let ram = format!("{RAM_MIB}M");
    let backing = if page == "1g" { "hugetlb" } else { "anon" };
    let options = [
        "--memory",
        &ram,
        "--guest-page",
        guest,
        "--backing",
        backing,
        "--host-page",
        page,
        "--policy",
        policy,
        "--no-daemon",
        walks::COUNT,
    ];
    Job::run(&[arguments, &options[..], host.giant_options(page, policy)].concat(), 2.5)
}

/// Reason why a cell cannot be shown on this host, if so.
pub(super) fn absence(host: &HostFacts, guest: &str, page: &str) -> Option<String> {
    if let Some(why) = &host.why_no_kvm {
        return Some(format!("guests cannot be run here: {why}"));
    }
    if host.paging == "shadow" {
        if guest == "1g" {
            return Some("with shadow tables, this KVM offers its guests no 1 GiB pages".into());
        }
        if page == "1g" || (guest == "4k" && page == "2m") {
            return Some(format!("shadow tables map {guest} here, the same as over host {guest}"));
        }
    }
    if page == "1g" { host.why_no_giant() } else { None }
}

/// Names of all arms.
fn arms() -> Vec<String> {
    PAGES.iter().map(|page| format!("host {page}")).chain([MOVED.to_owned()]).collect()
}

/// Figures of a kernel relative to 4k over 4k, and the mappings of KVM.
fn figures(results: &Results, kernel: &str) -> Grid {
    let name = |guest: &str| format!("{kernel}, guest {guest}");
    let base = results.values(&name("4k"), "host 4k", Metric::Figure);
    let cell = |guest: &str, arm: &str| {
        let values = results.values(&name(guest), arm, Metric::Figure);
        let of_round = |round: u32| base.iter().find(|(of, _)| *of == round).map(|(_, value)| *value);
        let ratios: Vec<f64> = values
            .iter()
            .filter_map(|(round, value)| Some(value / of_round(*round).filter(|base| *base > 0.0)?))
            .collect();
        let Some(comparison) = Comparison::of(&ratios, Better::Higher) else { return "-".to_owned() };
        let pages = |metric| {
            let pages: Vec<f64> =
                results.values(&name(guest), arm, metric).into_iter().map(|(_, value)| value).collect();
            if pages.is_empty() { "-".into() } else { format!("{:.0}", wideleaf_measure::statistics::median(pages)) }
        };
        format!("{comparison}; {} / {} / {}", pages(Metric::Pages4k), pages(Metric::Pages2m), pages(Metric::Pages1g))
    };
    Grid {
        caption: format!(
            "{kernel}: ratio to 4k over 4k in the same round, median and 95 % interval; KVM's leaves of 4k / 2m / 1g"
        ),
        columns: std::iter::once(Column::text("guest page")).chain(arms().into_iter().map(Column::number)).collect(),
        rows: PAGES
            .iter()
            .map(|guest| {
                std::iter::once((*guest).to_owned()).chain(arms().iter().map(|arm| cell(guest, arm))).collect()
            })
            .collect(),
    }
}

/// Page walks of each kernel, as the CPU counted them; `None` if it counted none.
fn counted(results: &Results, kernels: &[&str]) -> Option<Section> {
    let table = |kernel: &str| {
        let cell = |guest: &str, arm: &str| {
            let case = format!("{kernel}, guest {guest}");
            walks::cell(results, &case, arm, walks::COUNTED_CYCLES, 1000.0).unwrap_or_else(|| "-".into())
        };
        let row = |guest: &&str| {
            std::iter::once((*guest).to_owned()).chain(arms().iter().map(|arm| cell(guest, arm))).collect()
        };
        let rows: Vec<Vec<String>> = PAGES.iter().map(row).collect();
        let is_counted = rows.iter().any(|row| row[1..].iter().any(|cell| cell != "-"));
        is_counted.then(|| Grid {
            caption: format!(
                "{kernel}: walks for data | cycles of walks, in 1000 cycles | the part of them in the host's tables, \
                 by the CPU's counters (medians)"
            ),
            columns: std::iter::once(Column::text("guest page"))
                .chain(arms().into_iter().map(Column::number))
                .collect(),
            rows,
        })
    };
    let tables: Vec<Grid> = kernels.iter().filter_map(|kernel| table(kernel)).collect();
    let how = "Counters run in the guest alone, from the begin to the end of its timed part. With several page-miss \
               handlers, cycles of walks may exceed 1000.";
    (!tables.is_empty()).then(|| Section {
        title: "Walks that the CPU counted".into(),
        paragraphs: vec![format!("{how} {}", walks::MEANING)],
        tables,
        plots: vec![],
    })
}

/// Mappings counted in the labs.
fn labs() -> Grid {
    let mut lines = LAB_MAPPINGS.lines().filter(|line| !line.starts_with('#'));
    let heading = lines.next().unwrap_or_default();
    Grid {
        caption: "Mappings counted in the labs (real tables of two levels in emulated machines, no evidence of \
         speed), GUPS over 32 MiB in 1 GiB of RAM"
            .into(),
        columns: heading.split(',').map(Column::text).collect(),
        rows: lines.map(|line| line.split(',').map(str::to_owned).collect()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::results_of;
    use crate::definition::{COUNTED_WALK_CYCLES, COUNTED_WALKS};
    use crate::results::RunOutcome;

    fn cells(host: &HostFacts) -> Vec<bool> {
        let cases = TwoDimensional.define(host).cases;
        cases[..3].iter().flat_map(|case| &case.cells[..3]).map(|cell| matches!(cell, Cell::Job(_))).collect()
    }

    /// For each guest page, whether a guest is moved to a giant page.
    fn moved_cells(host: &HostFacts) -> Vec<bool> {
        let cases = TwoDimensional.define(host).cases;
        cases[..3].iter().map(|case| matches!(case.cells[3], Cell::Job(_))).collect()
    }

    #[test]
    fn a_guest_is_moved_to_a_giant_page_wherever_one_could_begin_on_it() {
        let mut host = HostFacts { paging: "ept".into(), free_pages_1g: 1, ..HostFacts::of_a_test() };
        assert_eq!(moved_cells(&host), [true; 3]);
        let command = TwoDimensional.define(&host).job(1, 3).expect("it is a job").command();
        assert!(command.contains("--host-page 4k --policy giant"), "{command}");
        host.free_pages_1g = 0;
        assert_eq!(moved_cells(&host), [false; 3]);
        host.can_make_1g = true;
        assert_eq!(moved_cells(&host), [true; 3]);
        for arm in [2, 3] {
            let command = TwoDimensional.define(&host).job(1, arm).expect("it is a job").command();
            assert!(command.ends_with("--make-giant-pages 1"), "{command}");
        }
        host = HostFacts { free_pages_1g: 1, memory_available_mib: 2048, ..host };
        assert_eq!(moved_cells(&host), [false; 3], "the labs have their own table");
        host = HostFacts { paging: "shadow".into(), memory_available_mib: 8192, ..host };
        assert_eq!(moved_cells(&host), [false; 3], "a shadow table maps no more than the guest does");
    }

    #[test]
    fn shadow_tables_show_three_cells_and_two_levels_of_tables_show_all_nine() {
        let mut host = HostFacts { paging: "shadow".into(), free_pages_1g: 1, ..HostFacts::of_a_test() };
        #[rustfmt::skip]
        assert_eq!(cells(&host), [
            true,  false, false,
            true,  true,  false,
            false, false, false,
        ]);
        host.paging = "ept".into();
        assert_eq!(cells(&host), [true; 9]);
        host.free_pages_1g = 0;
        assert_eq!(cells(&host), [true, true, false, true, true, false, true, true, false]);
        host.why_no_kvm = Some("there is no /dev/kvm".into());
        assert_eq!(cells(&host), [false; 9]);
    }

    #[test]
    fn walks_that_the_cpu_counted_are_shown_for_each_kernel_and_without_any_there_is_no_such_section() {
        let host = HostFacts { paging: "ept".into(), ..HostFacts::of_a_test() };
        let experiment = TwoDimensional.define(&host);
        assert!(experiment.job(0, 0).expect("a guest").command().contains(" --count-walks"));
        let mut results = results_of(experiment, |_, _, _| Some((Metric::Figure, 1.0)));
        let titles = |results: &Results| -> Vec<String> {
            TwoDimensional.sections(results).into_iter().map(|section| section.title).collect()
        };
        let title = "Walks that the CPU counted".to_owned();
        assert!(!titles(&results).contains(&title));
        for run in results.runs.iter_mut().filter(|run| run.case == "CG A, guest 2m" && run.arm == "host 4k") {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let told = [(walks::COUNTED_CYCLES, 2e6), (COUNTED_WALKS, 1e4), (COUNTED_WALK_CYCLES, 4e5)];
            let told = told.into_iter().chain([(walks::COUNTED_SECOND_LEVEL_CYCLES, 3e5)]);
            measured.told.extend(told.map(|(name, value)| (name.to_owned(), value)));
        }
        assert_eq!(titles(&results)[1], title);
        let section = counted(&results, &["STREAM", "CG A"]).expect("CG A has counts");
        let [table] = &section.tables[..] else { panic!("{section:?}") };
        assert!(table.caption.starts_with("CG A: "), "{}", table.caption);
        assert_eq!(table.rows[1][..3], ["2m", "5.000 | 200.0 | 75.0 %", "-"]);
    }

    #[test]
    fn the_labs_table_has_every_cell_of_both_labs() {
        let labs = labs();
        assert_eq!(labs.columns.len(), 6);
        let cells: Vec<String> = labs.rows.iter().map(|row| row[..3].join(" ")).collect();
        let all =
            |lab| PAGES.iter().flat_map(move |guest| PAGES.iter().map(move |host| format!("{lab} {guest} {host}")));
        assert_eq!(cells, all("npt").chain(all("ept")).collect::<Vec<_>>());
        // With two levels, KVM's mapping depends only on the host's page.
        let largest = |row: &[String]| row[3..].iter().rposition(|leaves| leaves != "0");
        assert!(labs.rows.iter().all(|row| largest(row) == PAGES.iter().position(|page| *page == row[2])), "{labs:?}");
    }
}
