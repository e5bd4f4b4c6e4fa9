//! `consolidation`: four guests on one host. Two would gain by large pages, one holds memory without using it, and
//! one uses sparse parts of its memory. Compared are one common budget and four separate ones, by promotion of the
//! guests and memory of the host.

use super::by_policy::{bloat_mib, middle, middle_in_words};
use crate::catalogue::Catalogued;
use crate::definition::{
    Arm, BudgetOf, Case, Cell, Experiment, GuestAmongOthers, HostFacts, HostState, Job, KhugepagedSettings, Work,
};
use crate::disturbance::DAEMON_CPU_S;
use crate::each_guest::{
    OfGuest, Place, are_compared, at_the_same_time, left_out_in_words, names, slower, slower_in_words,
};
use crate::metric::{Better, Metric};
use crate::peers::Guest;
use crate::report::common_sections::{bar_in_words, interval, number};
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use crate::time_to_coverage::LEGEND;
use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict, median};
use wideleaf_measure::table;

/// The `consolidation` experiment of the catalogue.
pub struct Consolidation;

const ROUNDS: u32 = 6;
/// Minimum duration of the hot guests' updates in seconds, in whole rounds.
const HOT_S: u64 = 7;
/// Duration of the other guests' work in milliseconds. They begin earlier, since a hot guest fills its table first.
const BESIDE_MS: u64 = 10_000;
/// Guessed duration of a run in seconds: the hot guests share two CPUs with two others, and check their
/// tables at the end.
const SECONDS_GUESS: f64 = 16.0;

/// Tables of the hot guests: name of the case, log2 of the number of words, RAM of each guest in MiB.
const CASES: [(&str, u32, u64); 2] = [("hot 2 x 128 MiB", 24, 192), ("hot 2 x 256 MiB", 25, 320)];

/// Arms: name, description, options of each guest, owner of the budget. [`BEST`] has options for each guest.
const ARMS: [(&str, &str, &[&str], BudgetOf); 6] = [
    ("never", "base pages only", &["--policy", "never"], BudgetOf::Each),
    ("greedy", "greedy in each guest, each with its own budget", &["--policy", "greedy"], BudgetOf::Each),
    (AUTO, "auto in each guest, each with its own budget", &["--policy", "auto"], BudgetOf::Each),
    (ONE_BUDGET, "auto in each guest, all registered with one wideleafd", &["--policy", "auto"], BudgetOf::All),
    (
        HOST_THP,
        "MADV_HUGEPAGE on all RAM, khugepaged without a pause",
        &["--host-page", "2m", "--policy", "never"],
        BudgetOf::Each,
    ),
    (
        BEST,
        "no manager's choice: the hot guests have huge pages from their first touch, at-fault, the others base pages",
        &[],
        BudgetOf::Each,
    ),
];
const AUTO: &str = "auto";
const ONE_BUDGET: &str = "auto, one budget";
const HOST_THP: &str = "host THP, tuned";
const BEST: &str = "best placement";

/// Sensors of `auto` that do not look at each tick: name in a run's report, heading.
const SENSORS: [(&str, &str); 3] =
    [("access", "samples of accesses"), ("guest_tables", "guest's page tables"), ("zero_pages", "search for zeroes")];

/// Largest CPU time of all managers together, in seconds of a run.
const MANAGERS_CPU_MAX_S: f64 = 0.4;

impl Catalogued for Consolidation {
    fn name(&self) -> &'static str {
        "consolidation"
    }

    fn summary(&self) -> &'static str {
        "four guests at once, two hot, one idle, one sparse: with separate budgets, with a daemon's common budget, \
         and under host THP"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let case = |(name, log2_words, memory_mib): (&str, u32, u64)| {
            let guests = guests(log2_words, memory_mib);
            let working_set_mib = guests.iter().map(|(_, _, guest)| guest.memory_mib).sum();
            let cells = ARMS.map(|(arm, _, more, budget)| cell(arm, more, budget, &guests, host)).to_vec();
            Case { name: name.into(), unit: "GUP/s".into(), working_set_mib, cells }
        };
        Experiment {
            name: self.name().into(),
            title: "Four guests, one host".into(),
            question: "Do the guests that gain by large pages get them soon and in equal parts, and does the host \
             keep the memory that \
                the other guests do not need?"
                .into(),
            source: None,
            rounds: ROUNDS,
            arms: ARMS.map(|(name, summary, ..)| Arm { name: name.into(), summary: summary.into() }).to_vec(),
            cases: CASES.map(case).to_vec(),
        }
    }

    fn figure(&self) -> &'static str {
        "the combined speed of both hot guests"
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        let arms = ARMS.map(|(arm, ..)| arm);
        let slower = slower(results, &arms);
        let none = slower.is_empty() && are_compared(results, &arms);
        let none = none.then(|| "No guest is below 0.98 of its speed under never in the median.".to_owned());
        let bars = [AUTO, ONE_BUDGET].into_iter().filter_map(|arm| most_cpu(results, arm));
        none.into_iter().chain(slower_in_words(&slower)).chain(left_out_in_words(results)).chain(bars).collect()
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        let what = format!(
            "Speed is the sum of both hot guests' updates in the time in which all four guests are at work, compared \
             with never in the same round. At the same time is the length of that time in percent of the shortest \
             timed part. Lowest : highest compares the two hot guests; 1 is fair. Time to coverage is that of the \
             later one; {LEGEND} Large pages that are outside of a guest's data at the end are taken off, which can \
             make the time longer. Bloat is the resident memory of all four guests less that under never. One vCPU of \
             the idle guest and one of the sparse guest are always busy with 2 MiB of their own. {}",
            Verdict::LEGEND
        );
        let tables = results.experiment.cases.iter().map(|case| of_case(results, case)).collect();
        vec![
            Section { title: "All four".into(), paragraphs: vec![what], tables, plots: vec![] },
            Section {
                title: "Each guest".into(),
                tables: vec![speed_of_each(results), cpu_of_each(results), cpu_by_cause(results), each_guest(results)],
                ..Section::default()
            },
        ]
    }
}

/// Guests with figures that do not count.
const BESIDE: [&str; 2] = ["idle", "sparse"];

/// Guests: name, whether the figure counts, definition.
fn guests(log2_words: u32, memory_mib: u64) -> [(&'static str, bool, Guest); 4] {
    let hot = || Guest::new("gups", &format!("log2_words={log2_words} seconds={HOT_S}"), memory_mib);
    let beside = |sets: &str, memory_mib| {
        let line = format!("hot=2M range=2M constant=0 {sets} phases=1 phase_ms={BESIDE_MS}");
        Guest::new("phases", &line, memory_mib)
    };
    [
        ("hot a", true, hot()),
        ("hot b", true, hot()),
        (BESIDE[0], false, beside("sparse=0 cold=128M", 192)),
        (BESIDE[1], false, beside("sparse=256M cold=0", 320)),
    ]
}

fn cell(arm: &str, more: &[&str], budget: BudgetOf, guests: &[(&str, bool, Guest)], host: &HostFacts) -> Cell {
    if let Some(why) = &host.why_no_kvm {
        return Cell::Absent(why.clone());
    }
    if budget == BudgetOf::All && !host.has_daemon {
        return Cell::Absent("wideleafd is not in the directory of this program: build or install it".into());
    }
    if arm == HOST_THP && !host.is_root {
        return Cell::Absent("needs root, to change khugepaged's settings".into());
    }
    if arm == BEST && !host.wants_long_runs {
        return Cell::Absent("left out for time; `--long` runs it".into());
    }
    let among = |(name, is_judged, guest): &(&str, bool, Guest)| {
        let options = match (arm, *is_judged) {
            (BEST, true) => &["--policy", "at-fault"][..],
            (BEST, false) => &["--policy", "never"],
            _ => more,
        };
        let options = options.iter().map(|word| (*word).to_owned());
        GuestAmongOthers {
            name: (*name).into(),
            is_judged: *is_judged,
            arguments: guest.arguments().into_iter().chain(options).collect(),
        }
    };
    let khugepaged = (arm == HOST_THP).then_some(KhugepagedSettings::FASTEST);
    let work = Work::Together { guests: guests.iter().map(among).collect(), budget };
    let host = HostState { khugepaged, ..HostState::default() };
    Cell::of(Job { host, ..Job::of(work, SECONDS_GUESS) })
}

fn of_case(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number("speed, GUP/s"),
        Column::number("speed : never's"),
        Column::number("lowest : highest"),
        Column::number("to coverage, s"),
        Column::number("bloat, MiB"),
        Column::number("CPU of all managers, s"),
        Column::number("at the same time, %"),
    ];
    let row = |arm: &Arm| {
        let speeds: Vec<f64> =
            results.values(&case.name, &arm.name, Metric::Figure).into_iter().map(|(_, value)| value).collect();
        if speeds.is_empty() {
            return None;
        }
        let ratio = Comparison::of(&results.ratios(&case.name, &arm.name, "never", Metric::Figure), Better::Higher);
        let text = |value: Option<f64>| value.map_or("-".to_owned(), number);
        let of = |metric| middle_in_words(results, &case.name, &arm.name, metric).unwrap_or_else(|| "-".to_owned());
        Some(vec![
            arm.name.clone(),
            interval(&speeds),
            ratio.map_or("-".into(), |ratio| ratio.to_string()),
            of(Metric::Fairness),
            of(Metric::TimeToCoverageS),
            text(bloat_mib(results, &case.name, &arm.name)),
            of(Metric::ManagerCpuS),
            text(at_the_same_time(results, &case.name, &arm.name)),
        ])
    };
    Grid { caption: case.name.clone(), columns, rows: results.experiment.arms.iter().filter_map(row).collect() }
}

/// The target of all managers' CPU time in an arm: the most of all cases.
fn most_cpu(results: &Results, arm: &str) -> Option<String> {
    let cases = results.experiment.cases.iter();
    let most = cases.filter_map(|case| middle(results, &case.name, arm, Metric::ManagerCpuS)).reduce(f64::max)?;
    let what = format!("CPU of all managers of a run under {arm}, most of the cases' medians,");
    let bar = Bar::new(what, table::Cell::number(most, 2, "s"), Limit::AtMost(MANAGERS_CPU_MAX_S));
    Some(bar_in_words(&bar))
}

/// Rows of all cases in all arms that ran, with the cells that follow the names of case and arm.
fn rows(results: &Results, cells: impl Fn(Place<'_>, &[String]) -> Vec<String>) -> Vec<Vec<String>> {
    let mut rows = vec![];
    for case in &results.experiment.cases {
        let guests = names(case);
        for arm in results.experiment.arms.iter().map(|arm| arm.name.as_str()) {
            let has_run = results.runs_of(&case.name, arm).any(|run| run.measured().is_some());
            let cells = has_run.then(|| cells(Place { results, case: &case.name, arm }, &guests));
            rows.extend(cells.map(|cells| [vec![case.name.clone(), arm.to_owned()], cells].concat()));
        }
    }
    rows
}

fn columns(results: &Results, more: &[&str]) -> Vec<Column> {
    let guests = results.experiment.cases.first().map(names).unwrap_or_default();
    let numbers = guests.into_iter().chain(more.iter().map(|title| (*title).to_owned())).map(Column::number);
    [Column::text("case"), Column::text("arm")].into_iter().chain(numbers).collect()
}

fn speed_of_each(results: &Results) -> Grid {
    let to_never = |place: Place<'_>, guest: &String| match place.to_never(guest) {
        Some(to) => format!("{}; {}", to.interval, Equivalence::of(&to).in_words()),
        None => "-".to_owned(),
    };
    let cells = |place: Place<'_>, guests: &[String]| guests.iter().map(|guest| to_never(place, guest)).collect();
    let caption = "Speed of each guest : its speed under never, and equivalence within 2 %".into();
    let mut rows = rows(results, cells);
    rows.retain(|row| row[1] != "never");
    Grid { caption, columns: columns(results, &[]), rows }
}

fn cpu_of_each(results: &Results) -> Grid {
    let middle_of = |values: Vec<(u32, f64)>| {
        let values: Vec<f64> = values.into_iter().map(|(_, value)| value).collect();
        (!values.is_empty()).then(|| median(values))
    };
    let text = |value: Option<f64>| value.map_or("-".to_owned(), number);
    let cells = |place: Place<'_>, guests: &[String]| {
        let Place { results, case, arm } = place;
        let of_guests = guests.iter().map(|guest| text(middle_of(place.values(guest, OfGuest::ManagerCpuS))));
        let all = middle(results, case, arm, Metric::ManagerCpuS);
        let is_met = all.map(|all| if all <= MANAGERS_CPU_MAX_S { "met" } else { "MISSED" });
        let daemon = text(middle_of(results.told(case, arm, DAEMON_CPU_S)));
        of_guests.chain([daemon, text(all), is_met.unwrap_or("-").to_owned()]).collect()
    };
    let last = format!("at most {MANAGERS_CPU_MAX_S} s");
    Grid {
        caption: "CPU of each guest's manager in seconds, medians; under host THP, all is khugepaged too".into(),
        columns: columns(results, &["wideleafd", "all", &last]),
        rows: rows(results, cells),
    }
}

/// CPU time of each guest's manager by cause, where it had sensors.
fn cpu_by_cause(results: &Results) -> Grid {
    let titles = ["case", "arm", "guest"].map(Column::text).into_iter();
    let numbers = ["its manager, s"].into_iter().chain(SENSORS.map(|(_, title)| title)).chain(["the rest"]);
    let mut rows = vec![];
    for case in &results.experiment.cases {
        let arms = results.experiment.arms.iter().map(|arm| arm.name.as_str());
        for (arm, guest) in arms.flat_map(|arm| names(case).into_iter().map(move |guest| (arm, guest))) {
            let cells = causes(Place { results, case: &case.name, arm }, &guest);
            rows.extend(cells.map(|cells| [vec![case.name.clone(), arm.to_owned(), guest], cells].concat()));
        }
    }
    Grid {
        caption: "CPU of each guest's manager by cause in seconds, medians; the rest are looks at page sizes, plans, \
                  actions"
            .into(),
        columns: titles.chain(numbers.map(Column::number)).collect(),
        rows,
    }
}

/// All, each sensor, the rest. `None` of a manager without sensors.
fn causes(place: Place<'_>, guest: &str) -> Option<Vec<String>> {
    let middle_of = |values: Vec<f64>| if values.is_empty() { "-".to_owned() } else { number(median(values)) };
    let seconds = |values: &[(u32, f64)]| values.iter().map(|(_, seconds)| *seconds).collect::<Vec<f64>>();
    let all = place.values(guest, OfGuest::ManagerCpuS);
    let sensors = SENSORS.map(|(sensor, _)| place.values(guest, OfGuest::SensorCpuS(sensor)));
    let of_round = |values: &Vec<(u32, f64)>, round: u32| {
        values.iter().find(|(of, _)| *of == round).map_or(0.0, |(_, seconds)| *seconds)
    };
    let rest = |(round, all): &(u32, f64)| all - sensors.iter().map(|of| of_round(of, *round)).sum::<f64>();
    let rest: Vec<f64> = all.iter().map(rest).collect();
    let has_sensors = sensors.iter().any(|of| !of.is_empty());
    let cells = [seconds(&all)].into_iter().chain(sensors.each_ref().map(|of| seconds(of))).chain([rest]);
    has_sensors.then(|| cells.map(middle_of).collect())
}

/// Notes of the first round about each guest.
fn each_guest(results: &Results) -> Grid {
    let columns = vec![Column::text("case"), Column::text("arm"), Column::text("guests, in the first round")];
    let row =
        |run: &crate::results::Run| Some(vec![run.case.clone(), run.arm.clone(), run.measured()?.notes.join(" ")]);
    let rows = results.runs.iter().filter(|run| run.round == 1).filter_map(row).collect();
    Grid { caption: "Each guest".into(), columns, rows }
}

#[cfg(test)]
mod tests {
    use super::super::by_policy::tests::{host, made_up};
    use super::*;
    use crate::each_guest::AT_THE_SAME_TIME;
    use crate::results::RunOutcome;

    #[test]
    fn the_arm_with_one_budget_is_absent_without_a_daemon_and_the_other_arms_run() {
        let experiment = Consolidation.define(&HostFacts { has_daemon: false, ..host() });
        let absent = |cell: &Cell| matches!(cell, Cell::Absent(why) if why.contains("wideleafd"));
        for case in &experiment.cases {
            assert_eq!(case.cells.iter().map(absent).collect::<Vec<_>>(), [false, false, false, true, false, false]);
        }
    }

    #[test]
    fn the_guests_are_the_same_in_all_arms_except_for_their_policy() {
        let absent = |cell: &Cell| matches!(cell, Cell::Absent(why) if why.contains("--long"));
        let left_out = Consolidation.define(&host()).cases.into_iter().flat_map(|case| case.cells).filter(absent);
        assert_eq!(left_out.count(), 2, "the best placement of both cases");
        let experiment = Consolidation.define(&HostFacts { wants_long_runs: true, ..host() });
        for case in &experiment.cases {
            let mut programs: Vec<Vec<String>> = Vec::new();
            for cell in &case.cells {
                let Cell::Job(job) = cell else { panic!("this host can run all cells") };
                let Work::Together { guests, .. } = &job.work else { panic!("four guests") };
                let until_policy = |guest: &GuestAmongOthers| {
                    let at = guest.arguments.iter().position(|word| word == "--cmdline").expect("all have one");
                    guest.arguments[..at + 2].join(" ")
                };
                programs.push(guests.iter().map(until_policy).collect());
            }
            programs.dedup();
            assert_eq!(programs.len(), 1, "{programs:?}");
            assert_eq!(programs[0].len(), 4);
            let Some(Cell::Job(job)) = case.cells.last() else { panic!("the best placement") };
            let Work::Together { guests, .. } = &job.work else { panic!("four guests") };
            let policies: Vec<&str> = guests.iter().filter_map(|guest| guest.arguments.last()).map(|p| &**p).collect();
            assert_eq!(policies, ["at-fault", "at-fault", "never", "never"]);
        }
    }

    #[test]
    fn the_time_that_the_guests_share_is_shown_and_too_little_of_it_is_named() {
        let mut results = of_guests(|_, _| (100.0, 0.0));
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            let percent = if run.arm == HOST_THP && run.round == 1 { 10.0 } else { 40.0 };
            measured.told.insert(AT_THE_SAME_TIME.to_owned(), percent);
        }
        let lead = Consolidation.lead(&results);
        let said = lead.iter().find(|line| line.starts_with("Rounds left out")).expect("two are");
        assert!(said.contains(": 1 of 6 under host THP, tuned in hot 2 x 128 MiB; 1 of 6 under host THP"), "{said}");
        let table = &Consolidation.sections(&results)[0].tables[0];
        let last = table.rows.last().expect("arms ran");
        assert_eq!((last[0].as_str(), last[7].as_str()), (HOST_THP, "40.00"));
    }

    /// Results with numbers of each guest by arm and guest: its figure, and its manager's CPU time in seconds.
    fn of_guests(numbers: impl Fn(&str, &str) -> (f64, f64)) -> Results {
        let mut results = made_up(&Consolidation, |_| vec![(Metric::Figure, 1.0)]);
        let guests = names(&results.experiment.cases[0]);
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            for guest in &guests {
                let (figure, cpu_s) = numbers(&run.arm, guest);
                measured.told.insert(OfGuest::Figure.name(guest), figure);
                measured.told.insert(OfGuest::ManagerCpuS.name(guest), cpu_s);
                *measured.metrics.entry(Metric::ManagerCpuS).or_default() += cpu_s;
            }
        }
        results
    }

    #[test]
    fn every_guest_below_98_percent_is_named_first_also_a_hot_one() {
        let results = of_guests(|arm, guest| match (arm, guest) {
            (AUTO, "sparse") => (86.0, 0.0),
            (AUTO, "hot a") => (97.5, 0.0),
            ("greedy", "idle") => (98.5, 0.0),
            _ => (100.0, 0.0),
        });
        let lead = Consolidation.lead(&results);
        let names = "below 1: sparse under auto in hot 2 x 128 MiB (0.860 (0.860 - 0.860)); sparse under auto in";
        assert!(lead[0].contains(names), "{lead:?}");
        assert!(lead[0].contains("; hot a under auto in hot 2 x 256 MiB (0.975 (0.975 - 0.975))."), "{lead:?}");
        assert!(!lead[0].contains("greedy"), "{lead:?}");
        let speeds = &Consolidation.sections(&results)[1].tables[0].rows;
        let row = speeds.iter().find(|row| row[1] == AUTO).expect("it ran");
        assert_eq!(row[2], "0.975 (0.975 - 0.975); slower");
        assert_eq!(row[3], "1.000 (1.000 - 1.000); within 2 %");
    }

    #[test]
    fn the_cpu_of_all_managers_has_a_target_and_each_guest_is_shown() {
        let results = of_guests(|arm, guest| match (arm, guest) {
            (AUTO, "sparse") => (1.0, 0.3),
            (AUTO, _) => (1.0, 0.05),
            (ONE_BUDGET, _) => (1.0, 0.05),
            _ => (1.0, 0.0),
        });
        let lead = Consolidation.lead(&results);
        let what = "CPU of all managers of a run under";
        assert_eq!(lead[0], "No guest is below 0.98 of its speed under never in the median.");
        assert!(lead[1].starts_with(&format!("MISSED: {what} auto, ")) && lead[1].contains("0.45 s"), "{lead:?}");
        assert!(lead[2].starts_with(&format!("met: {what} auto, one budget, ")), "{lead:?}");
        let rows = &Consolidation.sections(&results)[1].tables[1].rows;
        let row = rows.iter().find(|row| row[1] == AUTO).expect("it ran");
        assert_eq!(row[2..], ["0.0500", "0.0500", "0.0500", "0.3000", "-", "0.4500", "MISSED"]);
    }

    #[test]
    fn the_cpu_of_a_manager_is_shown_by_cause_where_it_has_sensors() {
        let mut results = of_guests(|_, _| (1.0, 0.5));
        for run in results.runs.iter_mut().filter(|run| run.arm == AUTO) {
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            for (sensor, cpu_s) in [("access", 0.25), ("zero_pages", 0.125)] {
                measured.told.insert(OfGuest::SensorCpuS(sensor).name("idle"), cpu_s);
            }
        }
        let grid = &Consolidation.sections(&results)[1].tables[2];
        assert_eq!(grid.rows.len(), 2, "one guest in two cases: {:?}", grid.rows);
        assert_eq!(grid.rows[0][1..], [AUTO, "idle", "0.5000", "0.2500", "-", "0.1250", "0.1250"]);
        assert_eq!(grid.columns.len(), grid.rows[0].len());
    }

    #[test]
    fn coverage_that_one_round_of_six_reaches_is_not_the_times_median() {
        let mut results = made_up(&Consolidation, |_| vec![(Metric::Figure, 1.0), (Metric::CoveragePercent, 50.0)]);
        for run in results.runs.iter_mut().filter(|run| run.arm == "greedy" || run.arm == AUTO && run.round == 1) {
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            measured.metrics.insert(Metric::TimeToCoverageS, 0.1);
        }
        let section = &Consolidation.sections(&results)[0];
        let rows = &section.tables[0].rows;
        let cell = |arm: &str| rows.iter().find(|row| row[0] == arm).map_or("no row", |row| row[4].as_str());
        assert_eq!([AUTO, "greedy", "never"].map(cell), ["not reached (1 of 6)", "0.1000", "not reached"]);
        assert!(section.paragraphs[0].contains(LEGEND), "{:?}", section.paragraphs);
    }

    #[test]
    fn bloat_is_compared_with_never_in_the_same_round() {
        let results = made_up(&Consolidation, |arm| {
            let resident = if arm == "greedy" { 900.0 } else { 500.0 };
            vec![(Metric::Figure, 1.0), (Metric::ResidentMib, resident), (Metric::Fairness, 0.9)]
        });
        let rows = &Consolidation.sections(&results)[0].tables[0].rows;
        let bloat = |arm: &str| rows.iter().find(|row| row[0] == arm).map(|row| row[5].as_str());
        assert_eq!((bloat("greedy"), bloat("auto")), (Some("400.0"), Some("0")));
    }
}
