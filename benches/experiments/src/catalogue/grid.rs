//! `grid`: guest page by host page, simulated: five programs, three footprints, four machines. Nothing is timed, and
//! the host does not matter.
//!
//! ```text
//!   program × footprint × machine:            host 4k   host 2m   host 1g      native
//!                                  guest 4k      ~         ~         ~           ~
//!                                  guest 2m      ~         ~         ~           ~       ~: simulated
//!                                  guest 1g      ~         ~         ~           ~
//! ```
//!
//! `benches/grid` makes the experiment and writes its figures to `benches/data/grid.csv`. The pages of experiments on
//! guests embed that file, as they embed the labs' mappings, so that no run repeats the simulations.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::catalogue::Catalogued;
use crate::catalogue::versus_published::value;
use crate::definition::{Accesses, Arm, COUNTED_MISSES, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::Metric;
use crate::published::rows;
use crate::report::Section;
use crate::results::Results;

mod page;

/// The `grid` experiment of the catalogue.
pub struct Grid;

/// Programs with their names in tables.
const PROGRAMS: [(&str, &str); 5] =
    [("gups", "GUPS"), ("cg", "CG"), ("mg", "MG"), ("stream", "STREAM"), ("sweep3d", "Sweep3D")];
/// Two machines of each vendor, an old and a new one, with their names in tables.
const MACHINES: [(&str, &str); 4] = [
    ("haswell-ep", "Xeon E5 v3 (2014)"),
    ("sapphire-rapids", "Xeon 4th generation (2023)"),
    ("zen2", "EPYC 7002 (2019)"),
    ("zen4", "EPYC 9004 (2022)"),
];
const FOOTPRINTS_GIB: [u64; 3] = [1, 8, 64];
const PAGES: [&str; 3] = ["4k", "2m", "1g"];
/// Host's page of a process in the file: it has no second dimension.
const NO_HOST: &str = "none";
/// Memory of the host that is warmed before a case, in MiB: simulations need none, and warming at least one window.
const SIMULATED_MIB: u64 = 2;
/// Duration of one simulation on one thread of an EPYC, in seconds: all 720 took 95 s.
const SECONDS: f64 = 0.13;
/// Figures of all cells, made by `benches/grid`.
const FIGURES: &str = include_str!("../../../data/grid.csv");

impl Catalogued for Grid {
    fn name(&self) -> &'static str {
        "grid"
    }

    fn summary(&self) -> &'static str {
        "guest page by host page, simulated: five programs, 1 to 64 GiB, four machines; nothing is timed"
    }

    fn define(&self, _host: &HostFacts) -> Experiment {
        let arm = |(guest, host): (&str, Option<&str>)| Arm {
            name: arm_name(guest, host),
            summary: match host {
                None => format!("simulated: a process on pages of {guest}"),
                Some(host) => format!("simulated: a guest with pages of {guest}, its RAM on pages of {host}"),
            },
        };
        Experiment {
            name: self.name().into(),
            title: "Guest page by host page, simulated".into(),
            question: "What does address translation cost in a guest by the pages of both sides, and which part of \
                       the cost of the second dimension do large pages take away?"
                .into(),
            source: None,
            rounds: 1,
            arms: arms().map(arm).collect(),
            cases: places().map(case).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        page::sections(&Figures::of(results))
    }

    fn has_all_figures(&self) -> bool {
        true
    }
}

/// The sections with the figures that the repository has.
pub(super) fn embedded() -> Vec<Section> {
    page::sections(&Figures::read(FIGURES))
}

/// A program over a footprint on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    program: usize,
    footprint_gib: u64,
    machine: usize,
}

impl Place {
    fn name(self) -> String {
        format!("{} {} GiB, {}", PROGRAMS[self.program].1, self.footprint_gib, MACHINES[self.machine].0)
    }
}

fn places() -> impl Iterator<Item = Place> {
    let programs = 0..PROGRAMS.len();
    programs.flat_map(|program| {
        FOOTPRINTS_GIB.into_iter().flat_map(move |footprint_gib| {
            (0..MACHINES.len()).map(move |machine| Place { program, footprint_gib, machine })
        })
    })
}

/// Pages of all arms: natively, then each guest page over each host page.
fn arms() -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    let native = PAGES.into_iter().map(|page| (page, None));
    native.chain(PAGES.into_iter().flat_map(|guest| PAGES.into_iter().map(move |host| (guest, Some(host)))))
}

fn arm_name(guest: &str, host: Option<&str>) -> String {
    host.map_or_else(|| format!("native {guest}"), |host| format!("guest {guest}, host {host}"))
}

fn case(place: Place) -> Case {
    let job = |(guest, host): (&str, Option<&str>)| {
        let Place { program, footprint_gib, machine } = place;
        let accesses = Accesses::Scaled { program: PROGRAMS[program].0.into(), footprint_gib };
        let job = Job::simulation(accesses, MACHINES[machine].0, guest, SECONDS);
        Cell::of(host.map_or(job.clone(), |host| job.under_host_page(host)))
    };
    Case { name: place.name(), unit: "cycles".into(), working_set_mib: SIMULATED_MIB, cells: arms().map(job).collect() }
}

/// Figures of one cell.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    misses_per_1000: f64,
    /// References and cycles of a walk; `None` without walks.
    references_per_walk: Option<f64>,
    cycles_per_walk: Option<f64>,
    /// Cycles of the second level of the TLB and of walks, per access.
    cycles_per_access: f64,
    /// Number of misses that were counted.
    counted_misses: f64,
}

/// Row of [`FIGURES`].
#[derive(Deserialize)]
struct Row {
    program: String,
    footprint_gib: u64,
    machine: String,
    guest: String,
    host: String,
    misses_per_1000: f64,
    references_per_walk: Option<f64>,
    cycles_per_walk: Option<f64>,
    cycles_per_access: f64,
    counted_misses: f64,
}

/// Figures by the name of the case and of the arm.
#[derive(Default)]
struct Figures(BTreeMap<(String, String), Figure>);

impl Figures {
    fn of(results: &Results) -> Figures {
        let figure = |case: &str, arm: &str| {
            let of = |metric| value(results, case, arm, metric);
            Some(Figure {
                misses_per_1000: of(Metric::MissesPerThousand)?,
                references_per_walk: of(Metric::ReferencesPerWalk),
                cycles_per_walk: of(Metric::WalkCycles),
                cycles_per_access: of(Metric::TranslationCyclesPerAccess)?,
                counted_misses: results.told(case, arm, COUNTED_MISSES).first()?.1,
            })
        };
        let cells = places().flat_map(|place| arms().map(move |(guest, host)| (place.name(), arm_name(guest, host))));
        Figures(cells.filter_map(|(case, arm)| figure(&case, &arm).map(|figure| ((case, arm), figure))).collect())
    }

    fn read(text: &'static str) -> Figures {
        let figure = |row: Row| {
            let program = PROGRAMS.iter().position(|(name, _)| *name == row.program)?;
            let machine = MACHINES.iter().position(|(name, _)| *name == row.machine)?;
            let place = Place { program, footprint_gib: row.footprint_gib, machine };
            let host = Some(row.host.as_str()).filter(|host| *host != NO_HOST);
            let figure = Figure {
                misses_per_1000: row.misses_per_1000,
                references_per_walk: row.references_per_walk,
                cycles_per_walk: row.cycles_per_walk,
                cycles_per_access: row.cycles_per_access,
                counted_misses: row.counted_misses,
            };
            Some(((place.name(), arm_name(&row.guest, host)), figure))
        };
        Figures(rows(text).into_iter().filter_map(figure).collect())
    }

    fn at(&self, place: Place, guest: &str, host: Option<&str>) -> Option<&Figure> {
        self.0.get(&(place.name(), arm_name(guest, host)))
    }

    /// Cycles of an access beyond those of a process on the guest's pages: the cost of the second dimension.
    fn second_dimension(&self, place: Place, guest: &str, host: &str) -> Option<f64> {
        let cycles = |host| Some(self.at(place, guest, host)?.cycles_per_access);
        Some(cycles(Some(host))? - cycles(None)?)
    }

    /// Share of the cost of the second dimension with base pages on both sides that these pages take away.
    fn taken_away(&self, place: Place, guest: &str, host: &str) -> Option<f64> {
        let base = self.second_dimension(place, "4k", "4k").filter(|cycles| *cycles > 0.0)?;
        Some(1.0 - self.second_dimension(place, guest, host)? / base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};

    #[test]
    fn every_program_is_simulated_on_every_machine_and_page_whatever_the_host() {
        let host = HostFacts { why_no_kvm: Some("no /dev/kvm".into()), ..host() };
        let experiment = Grid.define(&host);
        assert_eq!((experiment.cases.len(), experiment.arms.len()), (5 * 3 * 4, 3 + 9));
        let is_exact = |cell: &Cell| matches!(cell, Cell::Job(job) if job.is_exact);
        assert!(experiment.cases.iter().all(|case| case.cells.len() == 12 && case.cells.iter().all(is_exact)));
        let job = experiment.job(0, 4).expect("a simulation");
        let command = "steady-state sample of gups over 1 GiB, on a simulated haswell-ep with pages of 4k in a guest \
            over pages of 2m; figures per access";
        assert_eq!((experiment.arms[4].name.as_str(), job.command().as_str()), ("guest 4k, host 2m", command));
    }

    #[test]
    fn the_repository_has_a_figure_for_every_cell() {
        let figures = Figures::read(FIGURES);
        for place in places() {
            for (guest, host) in arms() {
                let figure = figures.at(place, guest, host).unwrap_or_else(|| panic!("{place:?} {guest} {host:?}"));
                let Figure { misses_per_1000, cycles_per_access, references_per_walk, .. } = *figure;
                assert!((0.0..=1000.0).contains(&misses_per_1000) && cycles_per_access >= 0.0, "{figure:?}");
                // A cold walk of 4 + 4 levels has 24 references.
                assert!(references_per_walk.is_none_or(|references| (0.0..=24.0).contains(&references)), "{figure:?}");
            }
        }
        assert_eq!(figures.0.len(), places().count() * arms().count(), "and no other");
    }

    #[test]
    fn the_second_dimension_is_what_a_guest_costs_beyond_a_process_on_its_pages() {
        let results = results_of(Grid.define(&host()), |_, arm, _| {
            let cycles = match arm {
                "native 4k" => 40.0,
                "native 2m" => 10.0,
                "guest 4k, host 4k" => 140.0,
                "guest 4k, host 2m" => 90.0,
                "guest 2m, host 2m" => 15.0,
                _ => return None,
            };
            Some((Metric::TranslationCyclesPerAccess, cycles))
        });
        let mut figures = Figures::default();
        for (guest, host) in arms() {
            let (case, arm) = (places().next().expect("there are places").name(), arm_name(guest, host));
            if let Some(cycles_per_access) = value(&results, &case, &arm, Metric::TranslationCyclesPerAccess) {
                let (references_per_walk, cycles_per_walk) = (None, None);
                let figure = Figure {
                    misses_per_1000: 1.0,
                    references_per_walk,
                    cycles_per_walk,
                    cycles_per_access,
                    counted_misses: 9.0,
                };
                figures.0.insert((case, arm), figure);
            }
        }
        let place = places().next().expect("there are places");
        assert_eq!(figures.second_dimension(place, "4k", "4k"), Some(100.0));
        assert_eq!(figures.taken_away(place, "4k", "2m"), Some(0.5));
        assert_eq!(figures.taken_away(place, "2m", "2m"), Some(0.95));
        assert_eq!(figures.taken_away(place, "1g", "1g"), None);
    }
}
