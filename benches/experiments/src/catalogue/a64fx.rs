//! `a64fx`: an equation of state and a sweep over blocks of cells with adjacent variables, on base pages, the hugetlb
//! pool and THP, in the form of the published measurements of FLASH on an A64FX: seven runs without the fastest and
//! the slowest, and ratios of counters. This is the negative control: large pages reduced the misses in the published
//! runs, but hardly the time.

use crate::catalogue::Catalogued;
use crate::catalogue::in_guests::{self, Published};
use crate::catalogue::programs::{InGuest, Pages, program};
use crate::catalogue::versus_published::{self, cell, mean, millions, saved, sentence, times, value, values};
use crate::definition::{Arm, Case, Cell, DATA_CYCLES, Experiment, HostFacts, Job, TRANSLATION_CYCLES};
use crate::metric::Metric;
use crate::published::a64fx;
use crate::report::{Column, Grid, Section};
use crate::results::Results;
use wideleaf_measure::statistics::{Equivalence, Interval, Verdict};

/// The `a64fx` experiment of the catalogue.
pub struct A64fx;

/// Published problem that a program stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Problem {
    /// The equation of state, for which the lookups in a table stand.
    Eos,
    /// Hydrodynamics in three dimensions, for which the sweep over blocks stands.
    Hydro,
}

impl Problem {
    /// The two of four published values that belong to the problem: built by gcc and by Fujitsu's compiler.
    const fn of(self, [eos_gcc, eos_fujitsu, hydro_gcc, hydro_fujitsu]: [f64; 4]) -> [f64; 2] {
        match self {
            Problem::Eos => [eos_gcc, eos_fujitsu],
            Problem::Hydro => [hydro_gcc, hydro_fujitsu],
        }
    }
}

/// A size of a program, with the duration of simulating one pass in seconds; `None` for sizes without simulation.
struct Row {
    name: &'static str,
    problem: Problem,
    simulated_s: Option<f64>,
}

const fn row(name: &'static str, problem: Problem, simulated_s: Option<f64>) -> Row {
    Row { name, problem, simulated_s }
}

const ROWS: [Row; 6] = [
    row("eos 110 MiB", Problem::Eos, Some(10.0)),
    row("eos 1 GiB", Problem::Eos, Some(60.0)),
    row("amr 108 MiB", Problem::Hydro, Some(4.0)),
    row("amr 1 GiB", Problem::Hydro, Some(25.0)),
    row("amr 4 GiB", Problem::Hydro, None),
    row("amr 9 GiB", Problem::Hydro, None),
];

const ARMS: [(&str, &str); 6] = [
    ("none", "4 KiB pages"),
    ("hugetlb", "2 MiB pages of the hugetlb pool"),
    ("THP", "transparent huge pages of 2 MiB from the start"),
    ("4K on A64FX", "simulated, A64FX: one pass on 4 KiB pages"),
    ("64K on A64FX", "simulated, A64FX: one pass on 64 KiB pages, the base pages of the published runs"),
    ("2M on A64FX", "simulated, A64FX: one pass on 2 MiB pages"),
];

/// Number of runs, as in the published measurements.
const ROUNDS: u32 = 7;

impl Catalogued for A64fx {
    fn name(&self) -> &'static str {
        "a64fx"
    }

    fn summary(&self) -> &'static str {
        "the negative control: a mesh and an equation of state, none/hugetlb/THP, seven runs without extremes, ratios"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "The negative control: fewer misses, the same time".into(),
            question: "If a program spends almost no time on TLB misses, do large pages leave its time \
             unchanged?"
                .into(),
            source: Some(
                "the measurements of FLASH on an A64FX (seven runs without the fastest and the slowest)".into(),
            ),
            rounds: ROUNDS,
            arms: [Arm::all(&ARMS), in_guests::arms(MECHANISM)].concat(),
            cases: ROWS.iter().map(|row| case(row.name, row.simulated_s, host)).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        vec![beside(results), time(results), in_guests(results), ratios(results), cycles(results)]
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        let of_ratios =
            in_sentence("Otherwise than the published ratios", &judged(results), |near| near == Closeness::Not);
        let otherwise = [changed(results).otherwise(), of_ratios, more_misses(results)];
        versus_published::lead(results, otherwise.into_iter().flatten().collect())
    }
}

/// The two kinds of large pages of the published runs.
const MECHANISM: &[InGuest] = &[InGuest::Hugetlb, InGuest::Thp];

/// The publication has times, and no saving: it found none.
fn in_guests(results: &Results) -> Section {
    let rows = ROWS.map(|row| Published { case: row.name.into(), saved_percent: None });
    in_guests::section(results, MECHANISM, [ARMS[0].0, ARMS[1].0], &rows)
}

fn case(name: &str, seconds: Option<f64>, host: &HostFacts) -> Case {
    let program = program(name);
    let too_large =
        Cell::Absent("only with --long: otherwise runs use at most 4 GiB, to leave memory for other work".into());
    let is_left_out = name == "amr 9 GiB" && !host.wants_long_runs;
    let run = [Pages::Base, Pages::Hugetlb, Pages::Thp]
        .map(|pages| if is_left_out { too_large.clone() } else { program.native(pages, host) });
    let guests = match is_left_out {
        true => in_guests::absent(MECHANISM, &too_large),
        false => in_guests::cells(program, MECHANISM, 1, host),
    };
    let simulated = ["4k", "64k", "2m"].map(|page| match seconds {
        Some(seconds) => Cell::of(Job::simulation(program.recorded("", Some(1)), "a64fx", page, seconds)),
        None => Cell::Absent("left out for time: the pass over 1 GiB represents it".into()),
    });
    program.case(run.into_iter().chain(simulated).chain(guests).collect())
}

/// Factor between a simulated ratio and the nearer of two published ones from which the row is named as different.
const NEAR_FACTOR: f64 = 2.0;

/// Relation of a ratio of ours to the published ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closeness {
    /// A simulated count within a factor of [`NEAR_FACTOR`], cycles or times within 2 %.
    Yes,
    /// All of the interval is farther away.
    Not,
    /// The interval allows both, or there are too few rounds.
    NotDecided,
}

impl Closeness {
    /// Relation to the lower and the higher of both published ratios.
    fn of(here: Interval, [least, most]: [f64; 2], is_cycles: bool) -> Closeness {
        let [from, to] = match is_cycles {
            true => [least - Equivalence::MARGIN, most + Equivalence::MARGIN],
            false => [least / NEAR_FACTOR, most * NEAR_FACTOR],
        };
        match here {
            Interval { low, high, .. } if low >= from && high <= to => Closeness::Yes,
            Interval { low, high, .. } if high < from || low > to => Closeness::Not,
            _ => Closeness::NotDecided,
        }
    }
}

/// A ratio of ours beside the published ones.
struct Judged {
    near: Closeness,
    /// Size, quantity, both published ratios, and ours.
    row: [String; 5],
}

/// All ratios of ours with a published one of the same problem.
fn judged(results: &Results) -> Vec<Judged> {
    let mut all = vec![];
    for Row { name, problem, .. } in &ROWS {
        let exact = |ratio: f64| (Interval { median: ratio, low: ratio, high: ratio }, true);
        let simulated = |counter: &str| {
            let of = |arm: usize| value(results, name, ARMS[arm].0, metric_of(counter)?);
            of(5).zip(of(4)).map(|(huge, base)| exact(huge / base))
        };
        let time = |arm: usize| {
            let times = times(results, name, ARMS[arm].0, ARMS[0].0)?;
            Some((times.interval, times.verdict != Verdict::Unknown))
        };
        for (quantity, counter, here) in [
            ("misses of the first level, simulated", "L1D_TLB_REFILL", simulated("L1D_TLB_REFILL")),
            ("misses of both levels, simulated", "L2D_TLB_REFILL", simulated("L2D_TLB_REFILL")),
            ("cycles; here of memory, simulated", "CPU_CYCLES", cycles_of_memory(results, name).map(exact)),
            ("cycles; here time, hugetlb", "CPU_CYCLES", time(1)),
            ("cycles; here time, THP", "CPU_CYCLES", time(2)),
        ] {
            let (Some((here, is_known)), Some(ratios)) = (here, a64fx::ratios_of(counter)) else { continue };
            let [gcc, fujitsu] = problem.of(ratios);
            let near = Closeness::of(here, [gcc.min(fujitsu), gcc.max(fujitsu)], counter == "CPU_CYCLES");
            let text = match here {
                Interval { median, low, high } if low < high => {
                    format!("{} ({} - {})", ratio_cell(median), ratio_cell(low), ratio_cell(high))
                }
                Interval { median, .. } => ratio_cell(median),
            };
            let [gcc, fujitsu] = [gcc, fujitsu].map(ratio_cell);
            all.push(Judged {
                near: if is_known { near } else { Closeness::NotDecided },
                row: [(*name).into(), quantity.into(), gcc, fujitsu, text],
            });
        }
    }
    all
}

fn in_sentence(what: &str, all: &[Judged], is_it: impl Fn(Closeness) -> bool) -> Option<String> {
    let text = |Judged { row: [name, quantity, gcc, fujitsu, here], .. }: &Judged| {
        format!("{name}, {quantity} ({gcc} and {fujitsu} published, {here} here)")
    };
    let texts: Vec<String> = all.iter().filter(|judged| is_it(judged.near)).map(text).collect();
    (!texts.is_empty()).then(|| format!("{what}: {}.", texts.join("; ")))
}

/// Ratios of ours beside the published ones of the same problem. Those that differ come first in the report.
fn beside(results: &Results) -> Section {
    let columns = ["published, gcc", "published, Fujitsu", "here (95 %)"].map(Column::number);
    let all = judged(results);
    let grid = Grid {
        caption: "Large pages to base pages: 2 MiB to 64 KiB, but times of this host are to 4 KiB pages".into(),
        columns: [Column::text("size"), Column::text("quantity")].into_iter().chain(columns).collect(),
        rows: all.iter().map(|judged| judged.row.to_vec()).collect(),
    };
    let told = [
        in_sentence("As published, counts within a factor of two, cycles and times within 2 %", &all, |near| {
            near == Closeness::Yes
        }),
        in_sentence("Not decided, as the interval reaches beyond 2 %", &all, |near| near == Closeness::NotDecided),
        all.is_empty().then(|| "Nothing was measured or simulated yet.".to_owned()),
    ];
    Section {
        title: "Beside the published ratios".into(),
        paragraphs: told.into_iter().flatten().collect(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// Least ratio that a table has digits for.
const RATIO_MIN: f64 = 0.0001;

fn ratio_cell(ratio: f64) -> String {
    if ratio < RATIO_MIN { format!("below {RATIO_MIN}") } else { cell(Some(ratio)) }
}

/// Mean of the values without the lowest and the highest; `None` for fewer than three values.
fn mean_of_the_middle(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    mean(values.get(1..last)?)
}

fn time(results: &Results) -> Section {
    let numbers = ["runs", "time, s", "ratio to none", "saved, by pairs: median (95 %)"];
    let mut grid = Grid {
        caption: "Times: mean of the runs without the fastest and the slowest".into(),
        columns: ["size", "pages"].map(Column::text).into_iter().chain(numbers.map(Column::number)).collect(),
        rows: vec![],
    };
    for Row { name, .. } in ROWS {
        let seconds = |arm: &str| mean_of_the_middle(values(results, name, arm, Metric::Seconds));
        for (arm, _) in &ARMS[..3] {
            let (here, ours) = (seconds(arm), times(results, name, arm, ARMS[0].0).filter(|_| *arm != ARMS[0].0));
            let ratio = here.zip(seconds(ARMS[0].0)).map(|(here, none)| here / none);
            let runs = values(results, name, arm, Metric::Seconds).len().to_string();
            let saves = ours.as_ref().map_or_else(|| "-".into(), saved);
            grid.rows.push(vec![name.into(), (*arm).into(), runs, cell(here), cell(ratio), saves]);
        }
    }
    Section {
        title: "Did the time change?".into(),
        paragraphs: [changed(results).told(), vec![THEIRS.into()]].concat(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// Result of the negative control on this machine: sizes and pages by what their intervals show.
#[derive(Default)]
struct NegativeControl {
    changed: Vec<String>,
    same: Vec<String>,
    open: Vec<String>,
    unknown: Vec<String>,
}

fn changed(results: &Results) -> NegativeControl {
    let mut all = NegativeControl::default();
    for Row { name, .. } in &ROWS {
        for (arm, _) in &ARMS[1..3] {
            let Some(ours) = times(results, name, arm, ARMS[0].0) else { continue };
            let text = format!("{name} on {arm} ({})", saved(&ours));
            let of = match (Equivalence::of(&ours), ours.verdict) {
                (_, Verdict::Unknown) => &mut all.unknown,
                (Equivalence::Within, _) => &mut all.same,
                (_, Verdict::Better | Verdict::Worse) => &mut all.changed,
                (_, Verdict::Indistinguishable) => &mut all.open,
            };
            of.push(text);
        }
    }
    all
}

impl NegativeControl {
    /// Where the control fails, in a sentence.
    fn otherwise(&self) -> Option<String> {
        let what = "The negative control fails here: time changed (in the published runs by at most 10 %, up or down)";
        sentence(what, &self.changed)
    }

    /// All else in sentences.
    fn told(&self) -> Vec<String> {
        let all = [
            sentence("No difference within 2 % of the time", &self.same),
            sentence("Not decided, as the interval has 0 % in it and reaches beyond 2 %", &self.open),
            sentence("Too few rounds to tell", &self.unknown),
        ];
        let is_nothing = self.changed.is_empty() && all.iter().all(Option::is_none);
        let none = is_nothing.then(|| "No time was measured yet.".to_owned());
        all.into_iter().flatten().chain(none).collect()
    }
}

const THEIRS: &str = "The published cycles on 2 MiB pages are 0.96, 0.94, 1.10 and 1.00 of those on 64 KiB pages; \
 the run with 1.10 had \
1.22 times the instructions. eos and amr use memory like FLASH: lookups in a table of 21 arrays for every zone, and a \
sweep over blocks with a sum over each variable. Our base pages are of 4 KiB, the published ones of 64 KiB. The \
published sizes were about 1 and 9 GB.";

fn ratios(results: &Results) -> Section {
    let sizes: Vec<&str> = simulated().map(|row| row.name).collect();
    // The published ratios are against 64 KiB pages. Our ratios against 64 KiB pages stand beside them; those against
    // 4 KiB pages come last.
    let ours = |base: &str| sizes.iter().map(move |name| format!("{name}, 2M : {base}, simulated")).collect::<Vec<_>>();
    let theirs = a64fx::COLUMNS.map(|column| format!("published, 2M : 64K, {column}"));
    let titles = [ours("64K"), theirs.to_vec(), ours("4K")].concat();
    let mut grid = Grid {
        caption: "Ratios of counters, large pages to base pages. Ratios to 4 KiB pages have no published counterpart"
            .into(),
        columns: [Column::text("counter")].into_iter().chain(titles.into_iter().map(Column::number)).collect(),
        rows: vec![],
    };
    let counters = ["CPU_CYCLES".to_owned()].into_iter().chain(a64fx::ratios().into_iter().map(|row| row.counter));
    for counter in counters {
        let ours = |base: usize| {
            let ratio = |name: &&str| {
                let of = |arm: usize| value(results, name, ARMS[arm].0, metric_of(&counter)?);
                of(5).zip(of(base)).map(|(huge, base)| huge / base)
            };
            sizes.iter().map(ratio).collect::<Vec<_>>()
        };
        let theirs = a64fx::ratios_of(&counter).map_or([None; 4], |ratios| ratios.map(Some));
        let cells: Vec<String> = [ours(4), theirs.to_vec(), ours(3)].concat().into_iter().map(cell).collect();
        grid.rows.push([counter].into_iter().chain(cells).collect());
    }
    let notes = "Our counters come from a model of the A64FX; its parameters are from memory and not verified. - \
        marks a counter that a model of TLBs does not have. In the model, caches see the same lines on pages of any \
        size. The published CPU_CYCLES are from the raw counters; ours are not simulated (see the times).";
    Section {
        title: "Ratios of counters".into(),
        paragraphs: misses_of_sizes(results, |falls| falls).into_iter().chain([notes.into()]).collect(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// Cycles: published, predicted from the published misses, and simulated for our accesses to memory.
fn cycles(results: &Results) -> Section {
    let predicted = a64fx::predicted_cycles().map_or([None; 4], |ratios| ratios.map(Some));
    let row = |name: &str, of: [Option<f64>; 4]| [name.to_owned()].into_iter().chain(of.map(cell)).collect::<Vec<_>>();
    let published = |counter: &str| a64fx::ratios_of(counter).map_or([None; 4], |ratios| ratios.map(Some));
    let grid = Grid {
        caption: "2 MiB to 64 KiB pages".into(),
        columns: [Column::text("quantity")].into_iter().chain(a64fx::COLUMNS.map(Column::number)).collect(),
        rows: vec![
            row("cycles, published", published("CPU_CYCLES")),
            row("cycles, predicted from the published misses", predicted),
            row("instructions, published", published("EFFECTIVE_INST_SPEC")),
        ],
    };
    let ours = ROWS.iter().filter_map(|row| {
        let ratio = cycles_of_memory(results, row.name)?;
        Some(format!("{}: simulated cycles of memory are {} of those on 64 KiB pages.", row.name, cell(Some(ratio))))
    });
    let notes = "The prediction weighs the published misses with the simulator's latencies, 7 cycles for a hit in the \
        second level and 286 for a walk, which are not verified. Simulated cycles are those of accesses to memory, one \
        after the other.";
    Section {
        title: "Cycles".into(),
        paragraphs: ours.chain([notes.into()]).collect(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// Simulated cycles of accesses to memory on 2 MiB pages, relative to 64 KiB pages.
fn cycles_of_memory(results: &Results, name: &str) -> Option<f64> {
    let of = |arm: usize, what: &str| results.told(name, ARMS[arm].0, what).first().map(|(_, cycles)| *cycles);
    // On 64 KiB pages the model has no data lines; they are those of 2 MiB pages.
    let data = of(5, DATA_CYCLES)?;
    Some((data + of(5, TRANSLATION_CYCLES)?) / (data + of(4, TRANSLATION_CYCLES)?))
}

/// The sizes that are simulated.
fn simulated() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().filter(|row| row.simulated_s.is_some())
}

/// Our metric for a published counter.
fn metric_of(counter: &str) -> Option<Metric> {
    match counter {
        "DTLB-LOAD-MISSES" | "L1D_TLB_REFILL" => Some(Metric::DtlbL1Misses),
        "L2D_TLB_REFILL" => Some(Metric::DtlbMisses),
        _ => None,
    }
}

/// Sizes with fewer misses on large pages, or with as many or more, as in `is_wanted`; each in a sentence.
fn misses_of_sizes(results: &Results, is_wanted: impl Fn(bool) -> bool) -> Vec<String> {
    let of = |name: &str, arm: usize| value(results, name, ARMS[arm].0, Metric::DtlbMisses);
    let sentence = |row: &Row| {
        let name = row.name;
        let (base, huge) = (of(name, 4)?, of(name, 5)?);
        let falls = huge < base;
        let what = if falls { "fall as published" } else { "do not fall, unlike the published ones" };
        let part = cell(Some(huge / base));
        let [base, huge] = [base, huge].map(|misses| millions(Some(misses)));
        is_wanted(falls).then(|| {
            format!(
                "{name}: misses of both levels {what}, from {base} to {huge} million per pass: {part} of those on 64 \
                 KiB pages, the base pages of the published runs."
            )
        })
    };
    simulated().filter_map(sentence).collect()
}

/// Sizes with as many or more misses on large pages, in sentences.
fn more_misses(results: &Results) -> Option<String> {
    let all = misses_of_sizes(results, |falls| !falls);
    (!all.is_empty()).then(|| all.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};

    #[test]
    fn the_fastest_and_the_slowest_do_not_count() {
        assert_eq!(mean_of_the_middle(vec![9.0, 1.0, 2.0, 3.0, 4.0, 100.0, 2.0]), Some(4.0));
        assert_eq!(mean_of_the_middle(vec![1.0, 2.0]), None);
        assert_eq!(mean_of_the_middle(vec![]), None);
    }

    #[test]
    fn the_pool_gets_the_pages_of_the_run_or_the_cell_is_absent_with_the_reason() {
        let experiment = A64fx.define(&host());
        assert_eq!(experiment.rounds, 7);
        for case in [0, 2] {
            let Cell::Job(job) = &experiment.cases[case].cells[1] else { panic!("a job") };
            assert_eq!(job.host.pool_pages_2m, (1024 + 64) / 2, "RAM of at least 1 GiB");
        }
        let user = HostFacts { why_no_pool_2m: Some("only root may".into()), ..host() };
        assert_eq!(A64fx.define(&user).cases[0].cells[1], Cell::Absent("only root may".into()));
        let small = A64fx.define(&HostFacts { memory_available_mib: 1000, ..host() });
        assert_eq!(small.cases[3].cells[0], Cell::Absent("needs 1076 MiB: this host has 1000 MiB available".into()));
    }

    #[test]
    fn a_failed_negative_control_is_named_first() {
        let results = results_of(A64fx.define(&host()), |case, arm, round| match (case, arm) {
            ("amr 108 MiB", "none") => Some((Metric::Seconds, 4.0)),
            ("amr 108 MiB", "THP") => Some((Metric::Seconds, 3.0)),
            ("amr 108 MiB", "hugetlb") => Some((Metric::Seconds, 4.0 + if round % 2 == 0 { 0.1 } else { -0.1 })),
            ("amr 108 MiB", "64K on A64FX") => Some((Metric::DtlbMisses, 1e6)),
            ("amr 108 MiB", "2M on A64FX") => Some((Metric::DtlbMisses, 1e4)),
            _ => None,
        });
        let lead = A64fx.lead(&results);
        let [beside, time, _, ratios, cycles] = A64fx.sections(&results).try_into().expect("five");
        assert!(lead[0].contains("time changed") && lead[0].contains("amr 108 MiB on THP (25.0 %"), "{lead:?}");
        let begin = "Not decided, as the interval has 0 % in it and reaches beyond 2 %: amr 108 MiB on hugetlb";
        assert!(time.paragraphs[0].starts_with(begin), "{:?}", time.paragraphs);
        assert_eq!(time.tables[0].rows[8][..5], ["amr 108 MiB", "THP", "7", "3.000", "0.7500"]);
        assert!(
            ratios.paragraphs[0].contains("fall as published, from 1.000 to 0.0100 million"),
            "{}",
            ratios.paragraphs[0]
        );
        let row = ratios.tables[0].rows.iter().find(|row| row[0] == "L2D_TLB_REFILL").expect("a row");
        assert_eq!(row[1..5], ["-", "-", "0.0100", "-"]);
        assert!(cycles.tables[0].rows[1][0].contains("predicted") && cycles.paragraphs.len() == 1, "{cycles:?}");
        assert_eq!(row[5..9], ["0.0002", "0.0100", "0.0300", "0.0300"]);
        let otherwise = &lead[1];
        assert!(otherwise.ends_with("amr 108 MiB, cycles; here time, THP (1.097 and 0.9966 published, 0.7500 here)."));
        assert!(
            otherwise.contains("amr 108 MiB, misses of both levels, simulated (0.0300 and 0.0300 published, 0.0100")
        );
        assert_eq!(lead[2..], ["Measured in a process: 1 of 6 rows; in guests: 0."]);
        let [open] = &beside.paragraphs[..] else { panic!("{:?}", beside.paragraphs) };
        assert!(open.starts_with("Not decided") && open.contains("here time, hugetlb (1.097 and 0.9966 p"), "{open}");
        let titles: Vec<&str> = ratios.tables[0].columns.iter().map(|column| &*column.title).collect();
        assert!(titles[1..9].iter().all(|title| title.contains("2M : 64K")), "{titles:?}");
        assert!(titles[9..].iter().all(|title| title.contains("2M : 4K")), "{titles:?}");
    }

    #[test]
    fn the_equation_of_state_stands_beside_that_of_the_publication() {
        let results = results_of(A64fx.define(&host()), |case, arm, _| match (case, arm) {
            ("eos 110 MiB", "none") => Some((Metric::Seconds, 100.0)),
            ("eos 110 MiB", "hugetlb") => Some((Metric::Seconds, 95.0)),
            ("eos 110 MiB", "THP") => Some((Metric::Seconds, 90.0)),
            ("eos 110 MiB" | "eos 1 GiB", "64K on A64FX") => Some((Metric::DtlbL1Misses, 1e6)),
            ("eos 110 MiB", "2M on A64FX") => Some((Metric::DtlbL1Misses, 4e4)),
            ("eos 1 GiB", "2M on A64FX") => Some((Metric::DtlbL1Misses, 10.0)),
            _ => None,
        });
        let beside = &A64fx.sections(&results)[0];
        assert_eq!(
            beside.tables[0].rows,
            [
                ["eos 110 MiB", "misses of the first level, simulated", "0.0300", "0.0500", "0.0400"],
                ["eos 110 MiB", "cycles; here time, hugetlb", "0.9614", "0.9387", "0.9500"],
                ["eos 110 MiB", "cycles; here time, THP", "0.9614", "0.9387", "0.9000"],
                ["eos 1 GiB", "misses of the first level, simulated", "0.0300", "0.0500", "below 0.0001"],
            ]
        );
        let different = "Otherwise than the published ratios: eos 110 MiB, cycles; here time, THP";
        assert!(A64fx.lead(&results)[1].starts_with(different), "{:?}", A64fx.lead(&results));
    }

    #[test]
    fn a_time_with_an_interval_beyond_two_percent_is_neither_as_published_nor_unchanged() {
        let seconds = |spread: f64| {
            let results = results_of(A64fx.define(&host()), |case, arm, round| match (case, arm) {
                ("amr 4 GiB", "none") => Some((Metric::Seconds, 100.0)),
                ("amr 4 GiB", "THP") => Some((Metric::Seconds, 100.0 + spread * (f64::from(round) - 4.0))),
                _ => None,
            });
            let of = |section: usize| A64fx.sections(&results)[section].paragraphs[0].clone();
            assert_eq!(A64fx.lead(&results).len(), 1, "nothing came otherwise");
            [of(0), of(1)]
        };
        let [beside, time] = seconds(4.0);
        assert!(beside.starts_with("Not decided") && time.starts_with("Not decided"), "{beside} {time}");
        let [beside, time] = seconds(0.5);
        assert!(beside.starts_with("As published"), "{beside}");
        assert!(time.starts_with("No difference within 2 % of the time: amr 4 GiB on THP"), "{time}");
    }

    #[test]
    fn nine_gibibytes_run_with_long_and_guests_also_have_transparent_huge_pages() {
        let cells = |host: &HostFacts| A64fx.define(host).cases[5].cells.clone();
        let is_only_with_long = |cell: &Cell| matches!(cell, Cell::Absent(why) if why.starts_with("only with --long"));
        let short = cells(&host());
        assert!([0, 1, 2, 6, 9].iter().all(|cell| is_only_with_long(&short[*cell])), "{short:?}");
        let long = HostFacts { wants_long_runs: true, ..host() };
        assert!([0, 1, 2, 6, 9].iter().all(|cell| matches!(cells(&long)[*cell], Cell::Job(_))));
        let little = HostFacts { memory_available_mib: 8 << 10, ..long.clone() };
        assert_eq!(cells(&little)[0], Cell::Absent("needs 9129 MiB: this host has 8192 MiB available".into()));
        let arms = A64fx.define(&long).arms;
        let guests: Vec<&str> = arms[6..].iter().map(|arm| &*arm.name).collect();
        assert_eq!(guests, ["guest never", "guest hugetlb", "guest THP", "guest auto"]);
    }
}
