//! `lwn`: the cost of a miss, the predicted gain of large pages, and their actual gain, in the form of "Huge pages
//! part 5: a deeper look at TLBs and costs".
//!
//! ```text
//!   cost (a chase) ──▶ prediction (a kernel's accesses, replayed) ──▶ check (the kernel on both page sizes, in pairs)
//!        └── x misses (simulated) / time: the article's formula ─────────▲
//! ```

use crate::catalogue::in_guests::{self, Published};
use crate::catalogue::programs::{InGuest, Pages, program};
use crate::catalogue::versus_published::{
    self, Pair, PublishedSaving, cell, mean, millions, otherwise, saved, sentence, times, value,
};
use crate::catalogue::{Catalogued, walks};
use crate::definition::{Accesses, Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::metric::Metric;
use crate::published::lwn;
use crate::report::common_sections::{decimals, number};
use crate::report::{Column, Grid, Section};
use crate::results::Results;

/// The `lwn` experiment of the catalogue.
pub struct Lwn;

const ARMS: [(&str, &str); 5] = [
    ("base", "4 KiB pages"),
    ("huge", "2 MiB pages: of the hugetlb pool for programs, transparent ones for the chase"),
    ("predicted", "prediction from the accesses alone; then the kernel on both page sizes in six pairs"),
    ("4K on Skylake-SP", "simulated, Skylake-SP: misses of the timed part on 4 KiB pages"),
    ("2M on Skylake-SP", "simulated, Skylake-SP: the same, 2 MiB pages"),
];

const COST: &str = "TLB miss";

/// Programs: name, arguments of `wideleaf-lab`, duration in seconds, memory in MiB.
const PROGRAMS: [(&str, &[&str], f64, u64); 2] = [
    ("STREAM 1 GiB", &["predict", "stream", "--cmdline", "words=44739240"], 150.0, 2048),
    ("GUPS 2^26", &["predict", "gups", "--log2-words", "26"], 200.0, 1024),
];

/// Generated accesses of the two programs, and the factor from their number to that of a timed part: 40 repetitions
/// over arrays of 44,739,240 words, and 2^28 updates.
const STREAMS: [(&str, f64); 2] = [
    ("stream:log2_words=22,passes=1", 40.0 * 44_739_240.0 / 4_194_304.0),
    ("gups:log2_words=26,updates=16777216", 16.0),
];
/// Machine of the simulations, whichever the host is, and the duration of one in seconds.
const SIMULATED: (&str, f64) = ("skylake-sp", 6.0);

impl Catalogued for Lwn {
    fn name(&self) -> &'static str {
        "lwn"
    }

    fn summary(&self) -> &'static str {
        "the cost of a TLB miss, the predicted gain of 2 MiB pages for STREAM and GUPS, and the actual gain"
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        Experiment {
            name: self.name().into(),
            title: "The cost of a miss, a prediction, and a check".into(),
            question:
                "What does a TLB miss cost, how much time should large pages save according to that, and how much do \
                 they save?"
                    .into(),
            source: Some("\"Huge pages part 5: a deeper look at TLBs and costs\" (LWN, 2010)".into()),
            rounds: 6,
            arms: [Arm::all(&ARMS), in_guests::arms(MECHANISM)].concat(),
            cases: [cost(host)].into_iter().chain([0, 1].map(|program| case(program, host))).collect(),
        }
    }

    fn sections(&self, results: &Results) -> Vec<Section> {
        vec![check(results), formula(results), in_guests(results), costs(results), stream(results)]
    }

    fn lead(&self, results: &Results) -> Vec<String> {
        let of_times = otherwise(&[stream_pair(results)]);
        let all = [Checked::of(results).exceeded(), no_gain(results)].into_iter().flatten().chain(of_times);
        versus_published::lead(results, all.collect())
    }
}

/// The article's programs have their memory in the hugetlb pool.
const MECHANISM: &[InGuest] = &[InGuest::Hugetlb];

/// Published saving of STREAM in percent, by its elapsed times.
fn theirs_saved() -> Option<f64> {
    let elapsed = |pages: &str| lwn::worked("validation", &format!("elapsed {pages} pages"));
    Some((1.0 - elapsed("huge")? / elapsed("base")?) * 100.0)
}

fn stream_pair(results: &Results) -> Pair {
    let case = PROGRAMS[0].0;
    let theirs = theirs_saved().map_or(PublishedSaving::NONE, PublishedSaving::percent);
    Pair { case: case.into(), theirs, ours: times(results, case, ARMS[1].0, ARMS[0].0) }
}

/// The article has the saving of STREAM.
fn in_guests(results: &Results) -> Section {
    let theirs = |name: &str| theirs_saved().filter(|_| name == PROGRAMS[0].0);
    let rows = PROGRAMS.map(|(name, ..)| Published { case: name.into(), saved_percent: theirs(name) });
    in_guests::section(results, MECHANISM, [ARMS[0].0, ARMS[1].0], &rows)
}

fn cost(host: &HostFacts) -> Case {
    let chase = |page, bytes: &[&str]| {
        let options = [&["tlbcost", "--native", "--host-page", page], bytes].concat();
        Cell::of(Job::tlbcost(&options, 60.0))
    };
    let on_2m = walks::chase_2m(host).map_or_else(Cell::Absent, |bytes| chase("2m", bytes));
    let not_predicted = || Cell::Absent("the cost is measured by a chase, neither predicted nor simulated".into());
    let cells = [chase("4k", &[]), on_2m, not_predicted(), not_predicted(), not_predicted()];
    let no_guest = Cell::Absent("the cost of a miss in guests is in the experiment `two-dimensional`".into());
    let cells = cells.into_iter().chain(in_guests::absent(MECHANISM, &no_guest)).collect();
    Case { name: COST.into(), unit: "cycles".into(), working_set_mib: 256, cells }
}

fn case(index: usize, host: &HostFacts) -> Case {
    let ((name, arguments, seconds, needed), (stream, scale)) = (PROGRAMS[index], STREAMS[index]);
    let available = host.memory_available_mib;
    let predicted = match needed > available {
        true => Cell::Absent(format!("needs {needed} MiB: this host has {available} MiB available")),
        false => Cell::of(Job::tlbcost(arguments, seconds)),
    };
    let run = [Pages::Base, Pages::Hugetlb].map(|pages| program(name).native(pages, host));
    let simulated = ["4k", "2m"].map(|page| {
        let accesses = Accesses::Generated { stream: stream.into(), scale };
        Cell::of(Job::simulation(accesses, SIMULATED.0, page, SIMULATED.1))
    });
    let guests = in_guests::cells(program(name), MECHANISM, 1, host);
    program(name).case(run.into_iter().chain([predicted]).chain(simulated).chain(guests).collect())
}

/// A prediction, and the higher of both ends of the intervals of two sets of pairs; all in percent of the time.
struct BoundCheck {
    predicted: f64,
    least: f64,
    most: f64,
}

impl BoundCheck {
    fn is_exceeded(&self) -> bool {
        self.least > self.predicted
    }

    /// Whether the prediction is a bound, in words. `is_bounded`: whether a mix of replays is as fast as the kernel.
    fn is_bound(&self, is_bounded: Option<bool>) -> String {
        if self.is_exceeded() {
            return format!("no: exceeded by at least {} % of the time", decimals(self.least - self.predicted, 1));
        }
        match (is_bounded, self.most <= self.predicted) {
            (Some(false), _) => "no: the kernel is faster than all of its replays".into(),
            (Some(true), true) => "yes: not exceeded".into(),
            (Some(true), false) => "not decided".into(),
            (None, _) => "-".into(),
        }
    }
}

/// The programs with a prediction, by what their pairs show, and the table's rows.
#[derive(Default)]
struct Checked {
    exceeded: Vec<String>,
    held: Vec<String>,
    no_bound: Vec<String>,
    open: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Checked {
    fn of(results: &Results) -> Checked {
        let mut all = Checked::default();
        for (name, ..) in PROGRAMS {
            let of = |metric| value(results, name, ARMS[2].0, metric);
            let told = |what| results.told(name, ARMS[2].0, what).first().map(|(_, value)| *value);
            let (predicted, own) = (of(Metric::PredictedPercent), of(Metric::SavedPercent));
            let interval = told("saved_low_percent").zip(told("saved_high_percent"));
            let ours = times(results, name, ARMS[1].0, ARMS[0].0);
            let is_bounded = told("is_bound").map(|is_bound| is_bound > 0.0);
            // Either set of pairs can exceed the prediction. The complement of a ratio of times is the saving.
            let ends = interval.map(|(low, high)| {
                let of_ours = ours.as_ref().map(|times| (1.0 - times.interval.high, 1.0 - times.interval.low));
                of_ours.map_or((low, high), |(least, most)| (low.max(least * 100.0), high.max(most * 100.0)))
            });
            let check = predicted.zip(ends).map(|(predicted, (least, most))| BoundCheck { predicted, least, most });
            if let Some(check) = &check {
                let text = format!("{name} ({} % predicted, {} % saved)", cell(predicted), cell(own));
                let of = match is_bounded {
                    _ if check.is_exceeded() => &mut all.exceeded,
                    Some(false) => &mut all.no_bound,
                    _ if check.most <= check.predicted => &mut all.held,
                    _ => &mut all.open,
                };
                of.push(text);
            }
            let own = own.zip(interval).map_or_else(
                || "-".into(),
                |(own, (low, high))| {
                    let [own, low, high] = [own, low, high].map(|percent| decimals(percent, 1));
                    format!("{own} ({low} - {high})")
                },
            );
            let bound = check.map_or_else(|| "-".into(), |check| check.is_bound(is_bounded));
            let saves = ours.as_ref().map_or_else(|| "-".into(), saved);
            all.rows.push(vec![name.into(), cell(predicted), own, saves, bound]);
        }
        all
    }

    /// Predictions that were too low, in a sentence.
    fn exceeded(&self) -> Option<String> {
        sentence("Otherwise than published, the saving exceeds the predicted upper bound", &self.exceeded)
    }

    /// All others in sentences.
    fn told(&self) -> Vec<String> {
        let all = [
            sentence("The saving is below the predicted upper bound, as published", &self.held),
            sentence("The prediction is no bound, as the kernel is faster than all of its replays", &self.no_bound),
            sentence("Not decided, as an interval of the saving reaches above the predicted bound", &self.open),
        ];
        let is_none = self.exceeded.is_empty() && all.iter().all(Option::is_none);
        let none = is_none.then(|| "No prediction was made yet.".to_owned());
        none.into_iter().chain(all.into_iter().flatten()).collect()
    }
}

/// Prediction and measurement side by side.
fn check(results: &Results) -> Section {
    let numbers =
        ["predicted upper bound, %", "saved in its own pairs, % (95 %)", "saved in this experiment's pairs (95 %)"];
    let mut grid = Grid {
        caption: "Predicted and actual saving".into(),
        columns: [Column::text("program")]
            .into_iter()
            .chain(numbers.map(Column::number))
            .chain([Column::text("a bound?")])
            .collect(),
        rows: vec![],
    };
    let checked = Checked::of(results);
    grid.rows.extend(checked.rows.iter().cloned().chain(theirs()));
    let of_times = versus_published::other_sentences(&[stream_pair(results)]);
    Section {
        title: "Cost, prediction, check".into(),
        paragraphs: [checked.told(), of_times, vec![METHOD.into()]].concat(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// The parts of the article's formula for a program: misses, cost of one and time, and the saving in percent.
struct Formula {
    name: String,
    misses: Option<f64>,
    cost_ns: Option<f64>,
    seconds: Option<f64>,
    saved: Option<f64>,
}

impl Formula {
    /// Misses times cost, in percent of the time.
    fn percent(&self) -> Option<f64> {
        Some(self.misses? * self.cost_ns? / 1e9 / self.seconds? * 100.0)
    }

    /// Factor from the saving to the estimate; `None` if nothing was saved.
    fn factor(&self) -> Option<f64> {
        Some(self.percent()? / self.saved.filter(|saved| *saved > 0.0)?)
    }

    fn row(&self) -> Vec<String> {
        let [cost, seconds] = [self.cost_ns, self.seconds].map(cell);
        let [percent, saved] = [self.percent(), self.saved].map(cell);
        vec![self.name.clone(), millions(self.misses), cost, seconds, percent, saved, cell(self.factor())]
    }
}

/// The article's formula with simulated misses and the measured cost of one, beside the article's own numbers.
fn formula(results: &Results) -> Section {
    let cost_ns = results.told(COST, ARMS[0].0, "walk_ns").first().map(|(_, ns)| *ns);
    let ours = PROGRAMS.map(|(name, ..)| {
        let seconds = results.values(name, ARMS[0].0, Metric::Seconds).into_iter().map(|(_, seconds)| seconds);
        let saved = times(results, name, ARMS[1].0, ARMS[0].0).map(|times| (1.0 - times.interval.median) * 100.0);
        let misses = value(results, name, ARMS[3].0, Metric::DtlbMisses);
        Formula { name: name.into(), misses, cost_ns, seconds: mean(&seconds.collect::<Vec<_>>()), saved }
    });
    let theirs = theirs_by_formula();
    let columns = ["misses on 4 KiB pages, millions", "cost of one, ns", "time, s", "misses x cost, % of the time"];
    let columns = columns.into_iter().chain(["saved, %", "estimate : saving"]).map(Column::number);
    let grid = Grid {
        caption: "The article's formula: ours with simulated misses; theirs with counted ones, computed again".into(),
        columns: [Column::text("program")].into_iter().chain(columns).collect(),
        rows: ours.iter().chain(&theirs).map(Formula::row).collect(),
    };
    let text = |of: &Formula| {
        let (percent, saved) = (number(of.percent()?), number(of.saved?));
        let factor =
            of.factor().map_or_else(|| "nothing saved".into(), |factor| format!("{}-fold", decimals(factor, 2)));
        Some(format!("{} {factor} ({percent} % estimated, {saved} % saved)", of.name))
    };
    let texts: Vec<String> = ours.iter().chain(&theirs).filter_map(text).collect();
    let notes = "Their first estimate is printed as 17.57 %, and is 17.47 % when it is computed again. The simulated \
                 machine is a Skylake-SP, whichever the host is; the cost is that of a dependent load.";
    Section {
        title: "Misses times cost, the published formula".into(),
        paragraphs: sentence("Misses times cost, to the saving", &texts).into_iter().chain([notes.into()]).collect(),
        tables: vec![grid],
        plots: vec![],
    }
}

/// The article's two estimates. Its time is that of the sampled cycles.
fn theirs_by_formula() -> [Formula; 2] {
    let mhz = lwn::worked("setup", "CPU MHz");
    let cost_ns = lwn::worked("tlb_miss_cost", "TLBMissCost").zip(mhz).map(|(cycles, mhz)| cycles / mhz * 1e3);
    let of = |name: &str, calculation: &str, misses: &str, cycles: &str, saved: Option<f64>| {
        let misses = lwn::worked(calculation, misses).zip(lwn::worked("tlb_miss_cost", "SamplePeriod (dtlb miss)"));
        let samples = lwn::worked(calculation, cycles).zip(lwn::worked("percent_time_1", "SampleRateOfCycles"));
        let seconds = samples.zip(mhz).map(|((samples, period), mhz)| samples * period / mhz / 1e6);
        Formula { name: name.into(), misses: misses.map(|(samples, period)| samples * period), cost_ns, seconds, saved }
    };
    [
        of("published, first estimate", "percent_time_1", "TLBMissSamples", "CyclesSamples (in formula)", None),
        of(
            "published, STREAM",
            "percent_time_2",
            "stream dtlb samples (4K)",
            "stream cycle samples (4K)",
            theirs_saved(),
        ),
    ]
}

/// Published example: one prediction from a kernel's profile, without a check, and one from all of STREAM, checked
/// by STREAM's elapsed times.
fn theirs() -> Vec<Vec<String>> {
    let saved = theirs_saved();
    let rows = [
        ("published, first estimate", lwn::worked("percent_time_1", "PercentageTimeTLBMiss (printed)"), None),
        ("published, STREAM", lwn::worked("percent_time_2", "predicted percent (printed)"), saved),
    ];
    let row = |(name, predicted, saved): (&str, Option<f64>, Option<f64>)| {
        let how = match (predicted, saved) {
            (Some(predicted), Some(saved)) if saved < predicted => "misses times cost: more than the saving",
            (_, Some(_)) => "misses times cost",
            (_, None) => "misses times cost, for another run, without a check",
        };
        vec![name.to_owned(), cell(predicted), "-".into(), cell(saved), how.into()]
    };
    rows.map(row).to_vec()
}

const METHOD: &str = "The published method multiplies misses (sampled by a profiler) by the cost of a miss, which \
 counts overlapping misses as if \
they did not overlap. Our method is not a product: it replays the kernel's accesses on both page sizes without the \
arithmetic, and no mix of replays as fast as the kernel saves more.";

fn costs(results: &Results) -> Section {
    let mut grid = Grid {
        caption: "Cost of a miss of all TLB levels".into(),
        columns: vec![Column::text("machine"), Column::number("cycles"), Column::number("ns")],
        rows: vec![],
    };
    for (arm, summary) in &ARMS[..2] {
        let told = |what| results.told(COST, arm, what).first().map(|(_, value)| *value);
        let cycles = value(results, COST, arm, Metric::WalkCycles);
        let cpu = &results.environment.cpu;
        grid.rows.push(vec![format!("this machine ({cpu}), {summary}"), cell(cycles), cell(told("walk_ns"))]);
    }
    for cost in lwn::miss_costs() {
        grid.rows.push(vec![format!("published: {}", cost.machine), cell(Some(cost.cycles)), cell(cost.ns)]);
    }
    let worked = lwn::worked("tlb_miss_cost", "TLBMissCost");
    grid.rows.push(vec!["published: the machine of the example, by its counters".into(), cell(worked), "-".into()]);
    let notes = "Our cycles are ticks of the time stamp counter. In a virtual machine a miss walks two tables; the \
     page size of the lower one is not known here.";
    Section { title: "The cost of a miss".into(), paragraphs: vec![notes.into()], tables: vec![grid], plots: vec![] }
}

fn stream(results: &Results) -> Section {
    let numbers =
        ["base, MB/s", "huge, MB/s", "gain, %", "published, base", "published, huge (16 MiB)", "published, gain, %"];
    let mut grid = Grid {
        caption: "STREAM's four functions, 3 x 44,739,240 words; means of the rounds".into(),
        columns: [Column::text("function")].into_iter().chain(numbers.map(Column::number)).collect(),
        rows: vec![],
    };
    for function in FUNCTIONS {
        let ([base, huge], theirs) = (rates_of(results, function), lwn::stream_rates(function));
        let ours = base.zip(huge).map(|(base, huge)| gain([base, huge]));
        let rates = theirs.map_or([None; 2], |rates| rates.map(Some));
        grid.rows.push(vec![
            function.into(),
            cell(base),
            cell(huge),
            cell(ours),
            cell(rates[0]),
            cell(rates[1]),
            cell(theirs.map(gain)),
        ]);
    }
    Section { title: "STREAM".into(), paragraphs: vec![], tables: vec![grid], plots: vec![] }
}

const FUNCTIONS: [&str; 4] = ["Copy", "Scale", "Add", "Triad"];

/// Mean rates of a function on base and on large pages.
fn rates_of(results: &Results, function: &str) -> [Option<f64>; 2] {
    [ARMS[0].0, ARMS[1].0].map(|arm| {
        let told = results.told(PROGRAMS[0].0, arm, &function.to_lowercase());
        mean(&told.into_iter().map(|(_, value)| value).collect::<Vec<_>>())
    })
}

/// Gain of the rate on large pages, in percent.
fn gain([base, huge]: [f64; 2]) -> f64 {
    (huge / base - 1.0) * 100.0
}

/// Functions of STREAM without a gain, in a sentence. All four gain in the article.
fn no_gain(results: &Results) -> Option<String> {
    let less = |function: &&str| {
        let [base, huge] = rates_of(results, function);
        let gained = gain([base?, huge?]);
        (gained <= 0.0).then(|| format!("{function} ({gained:.1} %)"))
    };
    let what = "Otherwise than published, where all four functions of STREAM gain, no gain by the means here";
    sentence(what, &FUNCTIONS.iter().filter_map(less).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::fixture::{host, results_of};
    use crate::definition::Work;
    use crate::results::{Measured, RunOutcome};

    /// Results with a predicted bound of 20 % for GUPS, this saving, and an interval from `low`.
    fn predicted(saved: f64, low: f64) -> Results {
        let mut results = results_of(Lwn.define(&host()), |case, arm, _| match (case, arm) {
            ("GUPS 2^26", "predicted") => Some((Metric::PredictedPercent, 20.0)),
            _ => None,
        });
        for run in &mut results.runs {
            if let RunOutcome::Measured(measured) = &mut run.outcome {
                measured.metrics.insert(Metric::SavedPercent, saved);
                let told = [("saved_low_percent", low), ("saved_high_percent", saved + 1.0), ("is_bound", 1.0)];
                measured.told.extend(told.map(|(name, value)| (name.to_owned(), value)));
            }
        }
        results
    }

    #[test]
    fn a_prediction_that_was_too_low_is_named_first() {
        let first = |results: &Results| Lwn.sections(results)[0].paragraphs[0].clone();
        let broken = Lwn.lead(&predicted(26.0, 25.0))[0].clone();
        let begin = "Otherwise than published, the saving exceeds the predicted upper bound: GUPS 2^26 (20.00 % p";
        assert!(broken.starts_with(begin), "{broken}");
        let bound = |results: &Results| Lwn.sections(results)[0].tables[0].rows[1][4].clone();
        assert_eq!(bound(&predicted(26.0, 25.0)), "no: exceeded by at least 5.0 % of the time");
        assert_eq!(bound(&predicted(21.0, 19.0)), "not decided", "the interval reaches above the bound");
        assert_eq!(bound(&predicted(19.0, 18.0)), "yes: not exceeded", "up to 20 % saved");
        assert!(first(&predicted(15.0, 14.0)).starts_with("The saving is below the predicted upper bound, as pub"));
        assert!(first(&predicted(21.0, 19.0)).starts_with("Not decided, as an interval of the saving reaches above"));
        assert_eq!(first(&results_of(Lwn.define(&host()), |_, _, _| None)), "No prediction was made yet.");
    }

    #[test]
    fn pairs_of_the_experiment_can_leave_a_bound_undecided() {
        let mut results = predicted(15.0, 14.0);
        // 10 to 30 % saved here; 14 to 16 % in the prediction's own pairs; 20 % predicted.
        for run in results.runs.iter_mut().filter(|run| run.case == "GUPS 2^26") {
            let seconds = match &*run.arm {
                "base" => 1.0,
                "huge" => 0.66 + 0.04 * f64::from(run.round),
                _ => continue,
            };
            let metrics = [(Metric::Seconds, seconds)].into();
            run.outcome = RunOutcome::Measured(Measured { metrics, ..Measured::default() });
        }
        let row = Lwn.sections(&results)[0].tables[0].rows[1].clone();
        assert_eq!(row[4], "not decided", "{row:?}");
    }

    #[test]
    fn the_articles_formula_gives_its_own_numbers_and_stands_beside_ours() {
        let mut results = results_of(Lwn.define(&host()), |case, arm, _| match (case, arm) {
            ("GUPS 2^26", "base") => Some((Metric::Seconds, 10.0)),
            ("GUPS 2^26", "huge") => Some((Metric::Seconds, 7.5)),
            ("GUPS 2^26", "4K on Skylake-SP") => Some((Metric::DtlbMisses, 200e6)),
            ("TLB miss", "base") => Some((Metric::WalkCycles, 60.0)),
            _ => None,
        });
        for run in results.runs.iter_mut().filter(|run| run.case == COST) {
            if let RunOutcome::Measured(measured) = &mut run.outcome {
                measured.told.insert("walk_ns".into(), 25.0);
            }
        }
        let section = &Lwn.sections(&results)[1];
        let rows = &section.tables[0].rows;
        // 200 million times 25 ns are 5 of 10 s.
        assert_eq!(rows[1], ["GUPS 2^26", "200.0", "25.00", "10.00", "50.00", "25.00", "2.000"]);
        assert_eq!(rows[2][4..], ["17.47", "-", "-"], "printed as 17.57");
        assert_eq!(rows[3][4..], ["17.84", "12.71", "1.404"]);
        let told = &section.paragraphs[0];
        assert!(told.contains("GUPS 2^26 2.00-fold (50.00 % estimated, 25.00 % saved)"), "{told}");
        assert!(told.ends_with("published, STREAM 1.40-fold (17.84 % estimated, 12.71 % saved)."), "{told}");
        let simulated = Lwn.define(&host()).job(1, 3).expect("a simulation").command();
        assert!(simulated.contains("stream:log2_words=22,passes=1") && simulated.contains("skylake-sp"), "{simulated}");
    }

    #[test]
    fn the_published_numbers_stand_below_ours() {
        let rows = &Lwn.sections(&predicted(15.0, 14.0))[0].tables[0].rows;
        assert_eq!(rows[1][..3], ["GUPS 2^26", "20.00", "15.0 (14.0 - 16.0)"]);
        assert_eq!(rows[2][1..4], ["17.57", "-", "-"], "12.71 belongs to the estimate of 17.84");
        assert_eq!(
            rows[3][..4],
            ["published, STREAM", "17.84", "-", "12.71"],
            "12.7 of 17.8 %, as elsewhere in benches"
        );
    }

    #[test]
    fn a_host_with_little_memory_makes_no_prediction_and_every_host_has_a_cost() {
        let cells = Lwn.define(&HostFacts { memory_available_mib: 1500, ..host() }).cases;
        assert_eq!(cells[1].cells[2], Cell::Absent("needs 2048 MiB: this host has 1500 MiB available".into()));
        let Cell::Job(job) = &cells[0].cells[0] else { panic!("a job") };
        assert!(
            matches!(&job.work, Work::TlbCost { arguments } if arguments[..3] == ["tlbcost", "--native", "--host-page"])
        );
        let on_2m = |host: &HostFacts| Lwn.define(host).job(0, 1).map(Job::command);
        assert_eq!(on_2m(&HostFacts { memory_available_mib: 1500, ..host() }), None, "2 MiB pages need more");
        assert!(on_2m(&host()).expect("a chase").ends_with("--host-page 2m --bytes 8G"));
    }
}
