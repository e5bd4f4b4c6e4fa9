//! `evidence`: the headline claims in a quarter of an hour, on a machine with VT-x or SVM, for
//! sending back the results.
//!
//! | claim | case |
//! |---|---|
//! | a miss walks two tables in a guest and one in a process; larger pages shorten both walks | TLB miss |
//! | the gain of a larger page on one side depends on the page of the other side | GUPS, guest page by host page |
//! | a guest that starts on base pages reaches that gain while it runs | arm promoted |
//! | the CPU itself counts the walks | predicted, if there is a PMU |

use std::time::Duration;

use crate::catalogue::two_dimensional::absence;
use crate::catalogue::{Catalogued, grid};
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::{Better, Metric};
use crate::report::{Column, Grid, Section, common_sections};
use crate::results::{Environment, Results};
use wideleaf_measure::statistics::Comparison;

/// The `evidence` experiment of the catalogue.
pub struct Evidence;

const ARMS: [(&str, &str); 7] = [
    ("native", "a process on pages of that size: one dimension, unless the machine is itself a virtual machine"),
    ("host 4k", "a guest, its RAM on 4 KiB pages"),
    ("host 2m", "a guest, its RAM on 2 MiB transparent huge pages"),
    ("host 1g", "a guest, its RAM on a 1 GiB page of the hugetlb pool"),
    ("promoted", "a guest that starts on 4 KiB pages and is promoted by `auto` while it runs"),
    (
        "promoted 1g",
        "a guest that starts on 4 KiB pages and is moved to a 1 GiB page of the hugetlb pool by `giant` while it runs",
    ),
    (
        "predicted",
        "predicted saving of 2 MiB pages for a process, from its accesses and the CPU's counters, and the actual \
         saving",
    ),
];
const GUEST_PAGES: [&str; 3] = ["4k", "2m", "1g"];
/// Budget: one minute of a quarter of an hour remains for the last round, which may take longer
/// than the rounds before.
const BUDGET: Duration = Duration::from_secs(14 * 60);
/// More rounds than most machines complete in the budget.
const ROUNDS: u32 = 20;
const GUPS: [&str; 3] = ["gups", "--cmdline", "log2_words=25 seconds=1"];
/// RAM for a 1 GiB page. A pointer chase uses all of it, GUPS a quarter.
const RAM: [&str; 2] = ["--memory", "1G"];
const RAM_MIB: u64 = 1024;
const GUPS_MIB: u64 = 256 + 64;
/// Duration of a pointer chase until three runs agree: 6 to 36 s under shadow paging on a quiet machine, twice that
/// on a busy one.
const CHASE_S: f64 = 25.0;
/// Duration of a run: 5 to 8 s under shadow paging, where the first touch of memory is expensive.
const RUN_S: f64 = 4.0;
const PREDICTION_S: f64 = 140.0;

impl Catalogued for Evidence {
    fn name(&self) -> &'static str {
        "evidence"
    }

    fn summary(&self) -> &'static str {
        "the headline claims on hardware with EPT or NPT, for sending back: `wideleaf-lab experiment evidence`"
    }

    fn budget(&self) -> Option<Duration> {
        Some(BUDGET)
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let misses = GUEST_PAGES.map(|guest| Case {
            name: format!("TLB miss, guest {guest}"),
            unit: "cycles".into(),
            working_set_mib: RAM_MIB,
            cells: miss_cells(host, guest),
        });
        let gups = GUEST_PAGES.map(|guest| Case {
            name: format!("GUPS 2^25, guest {guest}"),
            unit: "GUP/s".into(),
            working_set_mib: GUPS_MIB,
            cells: gups_cells(host, guest),
        });
        Experiment {
            name: self.name().into(),
            title: "Evidence from one machine".into(),
            question: "What does a TLB miss cost here in a process and in a guest, what is the gain of a large page \
             on either side, and does a guest reach that gain while it runs?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms: Arm::all(&ARMS),
            cases: misses.into_iter().chain(gups).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        [vec![claims(results), misses(results), to_repeat()], grid::embedded()].concat()
    }
}

/// Cells of the miss cost: a pointer chase natively and in guests.
fn miss_cells(host: &HostFacts, guest: &str) -> Vec<Cell> {
    let chase = |options: &[&str]| Cell::of(Job::tlbcost(&[&["tlbcost"], options].concat(), CHASE_S));
    let of_guest = |page: &str| match absence(host, guest, page) {
        Some(why) => Cell::Absent(why),
        None if page == "1g" && host.free_pages_1g == 0 => {
            Cell::Absent("tlbcost needs a free page of 1 GiB; run `wideleaf pool reserve --size 1g --pages 1`".into())
        }
        None => chase(&["--guest", "--guest-page", guest, "--host-page", page]),
    };
    let native = match guest {
        "1g" => Cell::Absent("a process has 4k and 2m pages here".into()),
        page => chase(&["--native", "--host-page", page]),
    };
    let none = || Cell::Absent("the cost of a miss depends only on the pages".into());
    vec![native, of_guest("4k"), of_guest("2m"), of_guest("1g"), none(), none(), none()]
}

fn gups_cells(host: &HostFacts, guest: &str) -> Vec<Cell> {
    let run = |options: &[&str]| Cell::of(Job::run(&[&GUPS[..], &RAM, options].concat(), RUN_S));
    let of_guest = |page: &str, policy: &str| match absence(host, guest, page) {
        Some(why) => Cell::Absent(why),
        None => {
            let backing = if page == "1g" { "hugetlb" } else { "anon" };
            let pages = ["--guest-page", guest, "--backing", backing, "--host-page", page];
            run(&[&pages[..], &["--policy", policy, "--no-daemon"], host.giant_options(page, policy)].concat())
        }
    };
    let native = match guest {
        "1g" => Cell::Absent("a process has 4k and 2m pages here".into()),
        page => run(&["--native", "--host-page", page, "--policy", "never"]),
    };
    let predicted = match guest {
        "2m" => Cell::of(Job::tlbcost(&["predict", "gups", "--log2-words", "25"], PREDICTION_S)),
        _ => Cell::Absent("one prediction is enough".into()),
    };
    vec![
        native,
        of_guest("4k", "never"),
        of_guest("2m", "never"),
        of_guest("1g", "never"),
        of_guest("4k", "auto"),
        // The page must be possible, as for the arm that begins on it.
        absence(host, guest, "1g").map_or_else(|| of_guest("4k", "giant"), Cell::Absent),
        predicted,
    ]
}

/// The claims, with the evidence that this machine can give.
fn claims(results: &Results) -> Section {
    let Environment { paging, is_virtual, has_pmu, walk_events, .. } = &results.environment;
    let two_tables = matches!(paging.as_str(), "ept" | "npt");
    let mut paragraphs = Vec::new();
    if !two_tables || *is_virtual {
        paragraphs.push(format!(
            "This machine gives no evidence about hardware: paging of guests is {paging}{}. The claims about two \
             tables are not yet run on hardware.",
            if *is_virtual { ", and the machine is itself a virtual machine" } else { "" }
        ));
    }
    if !*has_pmu {
        paragraphs.push(
            "There is no PMU here: cycles per walk come from a pointer chase, not from the CPU's counters.".into(),
        );
    }
    if !walk_events.is_empty() {
        paragraphs.push(format!("The CPU's own events of page walks: {walk_events}."));
    }
    let columns = vec![Column::text("claim"), Column::text("on this machine"), Column::number("ratio, 95 %")];
    let [on_4k, on_2m] = ["GUPS 2^25, guest 4k", "GUPS 2^25, guest 2m"];
    let rows = [
        ("2 MiB host pages under 2 MiB guest pages", on_2m, "host 2m", "host 4k"),
        ("2 MiB host pages under 4 KiB guest pages", on_4k, "host 2m", "host 4k"),
        ("a 1 GiB host page against 2 MiB ones", on_2m, "host 1g", "host 2m"),
        ("promoted while it runs against never", on_2m, "promoted", "host 4k"),
        ("promoted while it runs against huge from the start", on_2m, "promoted", "host 2m"),
        ("moved to a 1 GiB page while it runs against one from the start", on_2m, "promoted 1g", "host 1g"),
        ("a guest on 2 MiB pages against a process on them", on_2m, "host 2m", "native"),
    ];
    let row = |(claim, case, arm, to): (&str, &str, &str, &str)| {
        let comparison = Comparison::of(&results.ratios(case, arm, to, Metric::Figure), Better::Higher);
        let said =
            comparison.map_or("cannot be shown on this machine".to_owned(), |of| of.verdict.in_words().to_owned());
        vec![claim.to_owned(), said, comparison.map_or("-".into(), |comparison| comparison.to_string())]
    };
    let tables = vec![Grid { caption: "Speed of GUPS".into(), columns, rows: rows.map(row).into() }];
    Section { title: "The claims".into(), paragraphs, tables, plots: vec![] }
}

/// The steps for a reader with such a machine.
fn to_repeat() -> Section {
    Section {
        title: "To repeat this, and to send it".into(),
        paragraphs: STEPS.map(Into::into).into(),
        ..Section::default()
    }
}

/// Five lines that a reader without knowledge of the project needs.
pub const STEPS: [&str; 5] = [
    "1. Take a quiet machine with VT-x or SVM that is not itself a virtual machine, with Linux 6.1 or newer, /dev/kvm, \
     4 GiB of free memory, and root. Build with `cargo build --release -p wideleaf-lab`; the program is static and \
     needs nothing else.",
    "2. For the cost of a miss on 1 GiB pages run `wideleaf pool reserve --size 1g --pages 1` first; it says why if \
     there is no such page. The other arms have one made, as root.",
    "3. For the CPU's own counters run as root, or `sysctl kernel.perf_event_paranoid=1` first. Without them the page \
     has the reason, and all else.",
    "4. Run `wideleaf-lab experiment evidence --folder .`; it takes at most a quarter of an hour. After an \
     interruption the same command goes on.",
    "5. Attach wideleaf-evidence.json and wideleaf-evidence.html to an issue. They contain the CPU, the kernel and its \
     settings, no name of the machine or of a user.",
];

/// Cycles per miss, by the pages of both sides.
fn misses(results: &Results) -> Section {
    let arms = &ARMS[..4];
    let cell = |guest: &str, arm: &str| {
        let values = results.values(&format!("TLB miss, guest {guest}"), arm, Metric::WalkCycles);
        values.first().map_or("-".to_owned(), |(_, cycles)| common_sections::number(*cycles))
    };
    let head = std::iter::once(Column::text("page of the guest or process"))
        .chain(arms.iter().map(|(arm, _)| Column::number(*arm)));
    let row = |guest: &&str| {
        std::iter::once((*guest).to_owned()).chain(arms.iter().map(|(arm, _)| cell(guest, arm))).collect()
    };
    let rows = GUEST_PAGES.iter().map(row).collect();
    let grid = Grid {
        caption: "Cycles (TSC) per miss of all TLB levels, from a pointer chase".into(),
        columns: head.collect(),
        rows,
    };
    Section { title: "Cost of a miss".into(), paragraphs: vec![], tables: vec![grid], plots: vec![] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::made_up::{host, results_of};
    use crate::schedule::{expected_of_all, turns};

    #[test]
    fn six_rounds_of_all_cells_fit_a_quarter_of_an_hour() {
        let mut experiment = Evidence.define(&HostFacts { free_pages_1g: 1, ..host() });
        // Fewer rounds have no 95 % interval.
        experiment.rounds = 6;
        let expected = expected_of_all(&experiment, &[], &turns(&experiment));
        assert!(expected <= BUDGET && BUDGET < Duration::from_secs(15 * 60), "{expected:?}");
        let absent = |case: &Case| case.cells.iter().filter(|cell| matches!(cell, Cell::Absent(_))).count();
        let absent: Vec<usize> = experiment.cases.iter().map(absent).collect();
        assert_eq!(absent, [3, 3, 4, 1, 0, 2], "only cells that make no sense on any host");
    }

    #[test]
    fn a_machine_without_two_tables_is_named_as_such_first() {
        let experiment = Evidence.define(&host());
        let speed = |_: &str, arm: &str, round: u32| {
            Some((Metric::Figure, if arm == "promoted" { 1.2 } else { 1.0 } + f64::from(round) / 1000.0))
        };
        let mut results = results_of(experiment, speed);
        results.environment = Environment { paging: "shadow".into(), ..Environment::default() };
        let claims = claims(&results);
        assert!(claims.paragraphs[0].contains("not yet run on hardware"), "{claims:?}");
        assert!(claims.paragraphs[1].contains("no PMU"), "{claims:?}");
        let promoted = &claims.tables[0].rows[3];
        assert_eq!(promoted[1], "better", "{promoted:?}");
        results.environment = Environment { paging: "ept".into(), has_pmu: true, ..Environment::default() };
        assert_eq!(super::claims(&results).paragraphs, Vec::<String>::new());
        results.environment.walk_events = "the PMU is not usable: refused".into();
        assert!(super::claims(&results).paragraphs[0].contains("the PMU is not usable: refused"));
    }

    #[test]
    fn a_host_on_which_nothing_runs_and_guests_that_die_still_leave_a_page_with_the_reasons() {
        let host = HostFacts { why_no_kvm: Some("there is no /dev/kvm".into()), ..host() };
        let nothing = results_of(Evidence.define(&host), |_, _, _| None);
        let died = results_of(Evidence.define(&crate::catalogue::made_up::host()), |_, _, _| None);
        for (results, reason) in [(nothing, "there is no /dev/kvm"), (died, "no made-up value")] {
            let page = crate::report::html::html(&crate::report::Report::of(&results));
            assert!(page.contains(reason) && page.contains("cannot be shown on this machine"), "{page}");
            assert!(STEPS.iter().all(|step| page.contains(&step[..6])), "the steps are on it");
        }
    }
}
