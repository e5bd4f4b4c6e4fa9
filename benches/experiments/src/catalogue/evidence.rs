//! `evidence`: the headline claims in a quarter of an hour, on a machine with VT-x or SVM, for
//! sending back the results.
//!
//! | claim | case |
//! |---|---|
//! | a miss walks two tables in a guest and one in a process; larger pages shorten both walks | TLB miss |
//! | the gain of a larger page on one side depends on the page of the other side | GUPS, guest page by host page |
//! | a guest that starts on base pages reaches that gain while it runs | arm promoted |
//! | the CPU itself counts the walks | GUPS in each arm, and predicted, if there is a PMU |
//! | memory of another NUMA node is slower, on any page | arms local and remote, on a host with several nodes |

use std::time::Duration;

use crate::catalogue::two_dimensional::absence;
use crate::catalogue::{Catalogued, grid, page_tables, walks};
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job, NodeFacts};
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
/// Arms of a host with several NUMA nodes, in addition.
const NODE_ARMS: [(&str, &str); 2] = [
    ("local", "a guest with its vCPU and its memory on one NUMA node"),
    ("remote", "a guest with its vCPU on the same NUMA node and its memory on another"),
];
const GUEST_PAGES: [&str; 3] = ["4k", "2m", "1g"];
/// Budget: one minute of a quarter of an hour remains for the last round, which may take longer
/// than the rounds before.
const BUDGET: Duration = Duration::from_secs(14 * 60);
/// More rounds than most machines complete in the budget.
const ROUNDS: u32 = 20;
const GUPS: [&str; 4] = ["gups", "--cmdline", "log2_words=25 seconds=1", walks::COUNT];
/// RAM for a 1 GiB page. A pointer chase uses all of it, GUPS a quarter.
const RAM: [&str; 2] = ["--memory", "1G"];
const RAM_MIB: u64 = 1024;
const GUPS_MIB: u64 = 256 + 64;
/// Pages of GUPS by node, of the host and of the guest.
const NODE_PAGES: [(&str, &str); 2] = [("4k", "4k"), ("2m", "2m")];
/// A pointer chase with a load in each base page, beyond all caches.
const LATENCY: [&str; 3] = ["latency", "--cmdline", "bytes=256M rounds=2"];
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
        let both = || misses.iter().chain(&gups).cloned().map(with_node_arms);
        let (arms, cases) = match host.near_and_far(RAM_MIB) {
            None => (Arm::all(&ARMS), misses.iter().chain(&gups).cloned().collect()),
            Some(nodes) => {
                let arms = [Arm::all(&ARMS), Arm::all(&NODE_ARMS)].concat();
                (arms, both().chain(node_cases(host, nodes)).collect())
            }
        };
        Experiment {
            name: self.name().into(),
            title: "Evidence from one machine".into(),
            question: "What does a TLB miss cost here in a process and in a guest, what is the gain of a large page \
             on either side, and does a guest reach that gain while it runs?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms,
            cases,
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let arms = ARMS[..6].iter().map(|(arm, _)| *arm).collect::<Vec<_>>();
        let tables = page_tables::section(results, &["GUPS 2^25"], &arms);
        let measured = [Some(claims(results)), Some(misses(results)), counted(results), tables, Some(by_node(results))];
        let measured = measured.into_iter().flatten().chain([to_repeat()]).collect();
        [measured, grid::embedded()].concat()
    }
}

/// A case of all other arms on a host with several nodes.
fn with_node_arms(case: Case) -> Case {
    let absent = NODE_ARMS.map(|_| Cell::Absent("placed on nodes in cases of its own".into()));
    Case { cells: case.cells.into_iter().chain(absent).collect(), ..case }
}

/// Name of the case of GUPS by node with these pages of the host.
fn gups_by_node(page: &str) -> String {
    format!("GUPS 2^25 by node, host {page}")
}

const CHASE_BY_NODE: &str = "pointer chase by node";

/// The cases of the arms local and remote: the vCPU runs on the first of these nodes, the memory is there or on the
/// other one. KVM's tables lie where the vCPU runs, and the guest's own tables with its memory.
fn node_cases(host: &HostFacts, [near, far]: [&NodeFacts; 2]) -> Vec<Case> {
    let cells = |kernel: &[&str], (page, guest): (&str, &str), seconds: f64| {
        let elsewhere = ARMS.map(|_| Cell::Absent("on whichever node the kernel chooses: not compared here".into()));
        let on_node = [near, far].map(|memory| match absence(host, guest, page) {
            Some(why) => Cell::Absent(why),
            None => {
                let numa = format!("id=0,host-nodes=[{}],host-cpus=[{}]", memory.id, near.cpus);
                let pages = ["--guest-page", guest, "--backing", "anon", "--host-page", page, "--policy", "never"];
                Cell::of(Job::run(&[kernel, &RAM, &pages, &["--no-daemon", "--numa", &numa]].concat(), seconds))
            }
        });
        elsewhere.into_iter().chain(on_node).collect()
    };
    let gups = NODE_PAGES.map(|(page, guest)| Case {
        name: gups_by_node(page),
        unit: "GUP/s".into(),
        working_set_mib: GUPS_MIB,
        cells: cells(&GUPS, (page, guest), RUN_S),
    });
    let chase = Case {
        name: CHASE_BY_NODE.into(),
        unit: "ns".into(),
        working_set_mib: RAM_MIB,
        cells: cells(&LATENCY, ("2m", "2m"), 2.0 * RUN_S),
    };
    gups.into_iter().chain([chase]).collect()
}

/// Local and remote memory, or why none was compared.
fn by_node(results: &Results) -> Section {
    let title = "Memory near and far".into();
    if !results.experiment.arms.iter().any(|arm| arm.name == NODE_ARMS[1].0) {
        let why = match results.environment.numa_nodes {
            0 | 1 => "This host has memory on one NUMA node: none of it is remote.".to_owned(),
            nodes => format!(
                "This host has {nodes} NUMA nodes, and no two of them have {RAM_MIB} MiB available, one of them with \
                 CPUs: local and remote memory were not compared."
            ),
        };
        return Section { title, paragraphs: vec![why], ..Section::default() };
    }
    let columns = ["the guest's work", "remote against local"].map(Column::text).into_iter();
    let row = |case: &str, better: Better| {
        let comparison = Comparison::of(&results.ratios(case, "remote", "local", Metric::Figure), better);
        let said =
            comparison.map_or("cannot be shown on this machine".to_owned(), |of| of.verdict.in_words().to_owned());
        vec![case.to_owned(), said, comparison.map_or("-".into(), |comparison| comparison.to_string())]
    };
    let gups = NODE_PAGES.map(|(page, _)| row(&gups_by_node(page), Better::Higher)).into_iter();
    let rows = gups.chain([row(CHASE_BY_NODE, Better::Lower)]).collect();
    let columns = columns.chain([Column::number("ratio, 95 %")]).collect();
    let tables = vec![Grid { caption: "Speed on remote memory".into(), columns, rows }];
    let how = "The vCPU runs on one node in both arms, and so KVM's tables are there; the guest's own tables lie with \
               its memory.";
    Section { title, paragraphs: vec![how.into()], tables, plots: vec![] }
}

/// Cells of the miss cost: a pointer chase natively and in guests. On 4 KiB entries the default footprint shows it.
fn miss_cells(host: &HostFacts, guest: &str) -> Vec<Cell> {
    let chase = |options: &[&str]| Cell::of(Job::tlbcost(&[&["tlbcost"], options].concat(), CHASE_S));
    let chase_2m = |options: &[&str]| match walks::chase_2m(host) {
        Ok(bytes) => chase(&[options, bytes].concat()),
        Err(why) => Cell::Absent(why),
    };
    let of_guest = |page: &str| {
        let options = ["--guest", "--guest-page", guest, "--host-page", page];
        match (absence(host, guest, page), (guest, page)) {
            (Some(why), _) => Cell::Absent(why),
            (None, ("2m" | "1g", "1g")) => Cell::Absent(format!(
                "a chase over such entries needs ten pages of 1 GiB: `wideleaf tlbcost {} --bytes 8G`",
                options.join(" ")
            )),
            (None, (_, "1g")) if host.free_pages_1g == 0 => Cell::Absent(
                "tlbcost needs a free page of 1 GiB; run `wideleaf pool reserve --size 1g --pages 1`".into(),
            ),
            (None, ("2m" | "1g", "2m")) => chase_2m(&options),
            (None, _) => chase(&options),
        }
    };
    let native = match guest {
        "1g" => Cell::Absent(
            "a chase over pages of 1 GiB needs eight of them: `wideleaf tlbcost --native --host-page 1g --bytes 8G`"
                .into(),
        ),
        "2m" => chase_2m(&["--native", "--host-page", "2m"]),
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
        "1g" if host.free_pages_1g == 0 => Cell::Absent(
            "a process needs a free page of 1 GiB, and has none made; run `wideleaf pool reserve --size 1g --pages 1`"
                .into(),
        ),
        page => {
            let backing = if page == "1g" { "hugetlb" } else { "anon" };
            run(&["--native", "--backing", backing, "--host-page", page, "--policy", "never"])
        }
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
    let [on_4k, on_2m, on_1g] = ["GUPS 2^25, guest 4k", "GUPS 2^25, guest 2m", "GUPS 2^25, guest 1g"];
    let rows = [
        ("2 MiB host pages under 2 MiB guest pages", on_2m, "host 2m", "host 4k"),
        ("2 MiB host pages under 4 KiB guest pages", on_4k, "host 2m", "host 4k"),
        ("a 1 GiB host page against 2 MiB ones", on_2m, "host 1g", "host 2m"),
        ("promoted while it runs against never", on_2m, "promoted", "host 4k"),
        ("promoted while it runs against never, under 4 KiB guest pages", on_4k, "promoted", "host 4k"),
        ("promoted while it runs against huge from the start", on_2m, "promoted", "host 2m"),
        ("moved to a 1 GiB page while it runs against one from the start", on_2m, "promoted 1g", "host 1g"),
        ("a guest on 2 MiB pages against a process on them", on_2m, "host 2m", "native"),
        ("a guest on a 1 GiB page against a process on one", on_1g, "host 1g", "native"),
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
     10 GiB of free memory (with 4 GiB, the cost of a miss on 2 MiB pages is left out), and root. Run `cargo build \
     --release -p wideleaf -p wideleaf-lab`, then the commands below in target/x86_64-unknown-linux-gnu/release. Both \
     programs there are static and need nothing else.",
    "2. For the cost of a miss and a process on 1 GiB pages run `sudo ./wideleaf pool reserve --size 1g --pages 1` \
     first; it says why if there is no such page. The other arms have one made, as root.",
    "3. For the CPU's own counters run as root, or `sysctl kernel.perf_event_paranoid=1` first. Without them the page \
     has the reason, and all else.",
    "4. Run `sudo ./wideleaf-lab experiment evidence --folder .`; it takes at most a quarter of an hour. After an \
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

/// Page walks of GUPS in each arm, as the CPU counted them; `None` if it counted none.
fn counted(results: &Results) -> Option<Section> {
    /// Name under which GUPS tells its updates.
    const UPDATES: &str = "updates";
    let arms = &ARMS[..6];
    let row = |guest: &str| -> Vec<Option<String>> {
        let case = format!("GUPS 2^25, guest {guest}");
        arms.iter().map(|(arm, _)| walks::cell(results, &case, arm, UPDATES, 1.0)).collect()
    };
    let rows = GUEST_PAGES.map(|guest| (guest, row(guest)));
    if rows.iter().all(|(_, cells)| cells.iter().all(Option::is_none)) {
        return None;
    }
    let head = std::iter::once(Column::text("page of the guest or process"));
    let row = |(guest, cells): (&str, Vec<Option<String>>)| {
        let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".into()));
        std::iter::once(guest.to_owned()).chain(cells).collect()
    };
    let grid = Grid {
        caption: "GUPS: walks for data | cycles of walks, an update | the part of these cycles in the host's tables, \
                  by the CPU's counters (medians)"
            .into(),
        columns: head.chain(arms.iter().map(|(arm, _)| Column::number(*arm))).collect(),
        rows: rows.map(row).into(),
    };
    let how = "An update is a load and a store. Counters run from the begin to the end of the updates: in the guest \
               alone, or in the process. A promoted guest has both kinds of pages in that time.";
    Some(Section {
        title: "Walks that the CPU counted".into(),
        paragraphs: vec![format!("{how} {}", walks::MEANING)],
        tables: vec![grid],
        plots: vec![],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};
    use crate::catalogue::walks::COUNTED_SECOND_LEVEL_CYCLES;
    use crate::definition::{COUNTED_WALK_CYCLES, COUNTED_WALKS};
    use crate::results::RunOutcome;
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
        assert_eq!(absent, [3, 4, 5, 1, 0, 1], "only cells that make no sense on any host");
        let native = experiment.job(5, 0).expect("a process on a page of 1 GiB").command();
        assert!(native.contains("--native --backing hugetlb --host-page 1g"), "{native}");
        let without = Evidence.define(&host());
        assert!(without.job(5, 0).is_none(), "a process has no page made");
    }

    #[test]
    fn walks_that_the_cpu_counted_are_shown_by_update_and_a_page_without_them_has_no_such_section() {
        let mut results = results_of(Evidence.define(&host()), |_, _, _| Some((Metric::Figure, 1.0)));
        assert!(counted(&results).is_none());
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let (walks, cycles, of_host) = if run.arm == "host 4k" { (2.0, 450.0, 231.3) } else { (1.0, 72.0, 0.0) };
            let told = [("updates", 1.0), (COUNTED_WALKS, walks), (COUNTED_WALK_CYCLES, cycles)];
            let told = told.into_iter().chain([(COUNTED_SECOND_LEVEL_CYCLES, of_host)]);
            measured.told.extend(told.map(|(name, value)| (name.to_owned(), value * 1e6)));
            let uncounted = match run.arm.as_str() {
                "host 2m" => COUNTED_WALK_CYCLES,
                "promoted" => COUNTED_SECOND_LEVEL_CYCLES,
                _ => continue,
            };
            measured.told.remove(uncounted);
        }
        let section = counted(&results).expect("they were counted");
        let [on_4k, ..] = &section.tables[0].rows[..] else { panic!("a row of each page") };
        let native_and_host_4k = ["4k", "1.000 | 72.00 | 0.0 %", "2.000 | 450.0 | 51.4 %"];
        assert_eq!(on_4k[..3], native_and_host_4k);
        assert_eq!(on_4k[3..6], ["1.000 | - | -", "-", "1.000 | 72.00 | -"], "what the CPU does not count");
        assert!(GUPS.contains(&"--count-walks"));
    }

    #[test]
    fn a_miss_on_2_mib_pages_is_measured_beyond_what_a_tlb_holds_or_left_out() {
        let options = |host: &HostFacts, guest| {
            let text = |cell: &Cell| match cell {
                Cell::Job(job) => job.command(),
                Cell::Absent(why) => why.clone(),
            };
            miss_cells(host, guest)[..4].iter().map(text).collect::<Vec<String>>()
        };
        let large = HostFacts { free_pages_1g: 1, ..host() };
        let [native, on_4k, on_2m, on_1g] = &options(&large, "2m")[..] else { panic!("four cells") };
        assert!(native.ends_with("--native --host-page 2m --bytes 8G"), "{native}");
        assert!(!on_4k.contains("--bytes"), "its entries are of 4 KiB: {on_4k}");
        assert!(on_2m.ends_with("--guest-page 2m --host-page 2m --bytes 8G"), "{on_2m}");
        assert!(on_1g.contains("needs ten pages of 1 GiB: `wideleaf tlbcost --guest --guest-page 2m"), "{on_1g}");
        let small = HostFacts { memory_available_mib: 4 << 10, ..large };
        let shadow = HostFacts { paging: "shadow".into(), ..small.clone() };
        assert!(options(&shadow, "2m")[0].ends_with("--native --host-page 2m"), "a process on a host of one table");
        let few = options(&small, "2m");
        assert!([0, 2].iter().all(|cell| few[*cell].contains("this host has 4096 MiB available")), "{few:?}");
        assert!(options(&small, "4k").iter().all(|command| !command.contains("--bytes")), "4 KiB pages need little");
    }

    #[test]
    fn the_steps_build_each_program_that_they_name() {
        let after = |step: &'static str, sign: &'static str| {
            step.split(sign).skip(1).filter_map(|rest| rest.split([' ', '`']).next()).collect::<Vec<&str>>()
        };
        let named: Vec<&str> = STEPS.iter().flat_map(|step| after(step, "./")).collect();
        assert_eq!(after(STEPS[0], "-p "), ["wideleaf", "wideleaf-lab"]);
        assert_eq!(named, ["wideleaf", "wideleaf-lab"]);
        assert!(!STEPS.concat().contains("`wideleaf"), "neither is in the path");
    }

    #[test]
    fn a_host_with_nodes_compares_local_and_remote_memory_in_some_minutes_more() {
        let host = HostFacts { free_pages_1g: 1, ..host() }.with_two_nodes();
        let mut experiment = Evidence.define(&host);
        experiment.rounds = 6;
        let expected = expected_of_all(&experiment, &[], &turns(&experiment));
        // The README says so: the default time begins fewer rounds.
        assert!(expected > BUDGET && expected <= Duration::from_secs(18 * 60), "{expected:?}");
        assert!(experiment.cases.iter().all(|case| case.cells.len() == experiment.arms.len()));
        let case = experiment.cases.iter().find(|case| case.name == gups_by_node("2m")).expect("it is there");
        let command = |cell: &Cell| match cell {
            Cell::Job(job) => job.command(),
            Cell::Absent(why) => why.clone(),
        };
        let [.., local, remote] = &case.cells[..] else { panic!("two arms by node") };
        assert!(command(local).contains("host-nodes=[0],host-cpus=[0]"), "{}", command(local));
        assert!(command(remote).contains("host-nodes=[1],host-cpus=[0]"), "{}", command(remote));
        let speed = |case: &str, arm: &str, round: u32| {
            let is_slower = arm == "remote";
            let factor = if case == CHASE_BY_NODE { 2.0 } else { 0.5 };
            Some((Metric::Figure, if is_slower { factor } else { 1.0 } + f64::from(round) / 1000.0))
        };
        let told = by_node(&results_of(experiment, speed));
        assert_eq!(told.tables[0].rows.len(), 3);
        assert!(told.tables[0].rows.iter().all(|row| row[1] == "worse"), "{told:?}");
    }

    #[test]
    fn a_host_with_one_node_says_why_nothing_was_compared() {
        let mut results = results_of(Evidence.define(&host()), |_, _, _| None);
        results.environment.numa_nodes = 1;
        assert_eq!(by_node(&results).paragraphs, ["This host has memory on one NUMA node: none of it is remote."]);
        results.environment.numa_nodes = 2;
        assert!(by_node(&results).paragraphs[0].contains("no two of them have 1024 MiB available"));
    }

    #[test]
    fn a_machine_without_two_tables_is_named_as_such_first() {
        let experiment = Evidence.define(&host());
        let speed = |case: &str, arm: &str, round: u32| {
            let promoted = if case.ends_with("guest 4k") { 0.9 } else { 1.2 };
            Some((Metric::Figure, if arm == "promoted" { promoted } else { 1.0 } + f64::from(round) / 1000.0))
        };
        let mut results = results_of(experiment, speed);
        results.environment = Environment { paging: "shadow".into(), ..Environment::default() };
        let claims = claims(&results);
        assert!(claims.paragraphs[0].contains("not yet run on hardware"), "{claims:?}");
        assert!(claims.paragraphs[1].contains("no PMU"), "{claims:?}");
        let promoted = &claims.tables[0].rows[3..5];
        assert_eq!([&promoted[0][1], &promoted[1][1]], ["better", "worse"], "{promoted:?}");
        results.environment = Environment { paging: "ept".into(), has_pmu: true, ..Environment::default() };
        assert_eq!(super::claims(&results).paragraphs, Vec::<String>::new());
        results.environment.walk_events = "the PMU is not usable: refused".into();
        assert!(super::claims(&results).paragraphs[0].contains("the PMU is not usable: refused"));
    }

    #[test]
    fn a_host_on_which_nothing_runs_and_guests_that_die_still_leave_a_page_with_the_reasons() {
        let host = HostFacts { why_no_kvm: Some("there is no /dev/kvm".into()), ..host() };
        let nothing = results_of(Evidence.define(&host), |_, _, _| None);
        let died = results_of(Evidence.define(&crate::catalogue::fixture::host()), |_, _, _| None);
        for (results, reason) in [(nothing, "there is no /dev/kvm"), (died, "no made-up value")] {
            let page = crate::report::html::html(&crate::report::Report::of(&results));
            assert!(page.contains(reason) && page.contains("cannot be shown on this machine"), "{page}");
            assert!(STEPS.iter().all(|step| page.contains(&step[..6])), "the steps are on it");
        }
    }
}
