//! Figures of each of several guests that run at the same time.
//!
//! ```text
//!   wideleaf run ─ report ─┐
//!   wideleaf run ─ report ─┴─▶ one run's numbers: `hot a: figure`, `hot a: cold on huge pages, MiB`, … ──▶ a page
//! ```

use crate::definition::{Case, Cell, GuestAmongOthers, Work};
use crate::metric::{Better, Metric};
use crate::results::{Results, Run};
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict, median};

/// Policy without promotions, and name of the arm that others are compared with.
const NEVER: &str = "never";

/// Name of a number that a run of several guests tells: the time in which the timed parts of all of them were under
/// way, in percent of the shortest of them. The guests' figures are those of that time. Results of older versions have
/// figures of whole timed parts, also of times in which a guest had the CPUs with fewer others.
pub const AT_THE_SAME_TIME: &str = "timed parts at the same time, %";

/// Least such time from which a figure is taken, in percent. A round with less has none.
pub const AT_THE_SAME_TIME_MIN_PERCENT: f64 = 20.0;

/// A number of one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfGuest<'a> {
    /// Main result of the guest's kernel in the time in which all guests are at work, in the unit of the case.
    Figure,
    /// The same, of the second half of that time alone.
    FigureOfSecondHalf,
    /// The same, of all of the guest's timed part.
    FigureOfWhole,
    /// CPU time of the guest's manager in seconds.
    ManagerCpuS,
    /// Part of that for a sensor that does not look at each tick, by its name.
    SensorCpuS(&'a str),
    /// Number of windows that the manager vacated.
    Vacated,
    /// Size of a set of the guest's data, by its name, in MiB.
    SetMib(&'a str),
    /// Part of that set on huge pages at the end of the timed part, in MiB.
    HugeMib(&'a str),
}

impl OfGuest<'_> {
    /// Name of the number among those that a run tells.
    pub fn name(self, guest: &str) -> String {
        match self {
            OfGuest::Figure => format!("{guest}: figure"),
            OfGuest::FigureOfSecondHalf => format!("{guest}: figure of the second half"),
            OfGuest::FigureOfWhole => format!("{guest}: figure of the whole timed part"),
            OfGuest::ManagerCpuS => format!("{guest}: manager's CPU, s"),
            OfGuest::SensorCpuS(sensor) => format!("{guest}: CPU of the sensor {sensor}, s"),
            OfGuest::Vacated => format!("{guest}: vacated windows"),
            OfGuest::SetMib(set) => format!("{guest}: {set}, MiB"),
            OfGuest::HugeMib(set) => format!("{guest}: {set} on huge pages, MiB"),
        }
    }
}

/// A case in an arm.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Results of the experiment.
    pub results: &'a Results,
    /// Name of the case.
    pub case: &'a str,
    /// Name of the arm.
    pub arm: &'a str,
}

impl Place<'_> {
    /// Values of a number of a guest, by round.
    pub fn values(self, guest: &str, what: OfGuest<'_>) -> Vec<(u32, f64)> {
        let told = self.results.told(self.case, self.arm, &what.name(guest));
        match (what, told.is_empty()) {
            (OfGuest::Figure, true) => self.figures_in_notes(guest),
            _ => told,
        }
    }

    /// Sums of a number over guests, by round. A round in which a guest lacks it is left out.
    pub fn sums(self, guests: &[String], what: OfGuest<'_>) -> Vec<(u32, f64)> {
        let each: Vec<_> = guests.iter().map(|guest| self.values(guest, what)).collect();
        let rounds = each.first().into_iter().flatten().map(|(round, _)| *round);
        let sum = |round: u32| each.iter().map(|values| of_round(values, round)).sum::<Option<f64>>();
        rounds.filter_map(|round| Some((round, sum(round)?))).collect()
    }

    /// Figure of a guest as a ratio to that under `never`, by rounds.
    pub fn to_never(self, guest: &str) -> Option<Comparison> {
        let never = Place { arm: NEVER, ..self }.values(guest, OfGuest::Figure);
        Comparison::of(&ratios(&self.values(guest, OfGuest::Figure), &never), Better::Higher)
    }

    /// Figures in the notes of runs: `sparse: figure 95152084, coverage 0 %, ...`. Results that were made before runs
    /// told them as numbers have only these.
    fn figures_in_notes(self, guest: &str) -> Vec<(u32, f64)> {
        let begin = format!("{guest}: figure ");
        let figure = |note: &String| note.strip_prefix(&begin)?.split(',').next()?.parse().ok();
        let of_run = |run: &Run| Some((run.round, run.measured()?.notes.iter().find_map(figure)?));
        self.results.runs_of(self.case, self.arm).filter_map(of_run).collect()
    }
}

/// Value of a round.
fn of_round(values: &[(u32, f64)], round: u32) -> Option<f64> {
    values.iter().find(|(of, _)| *of == round).map(|(_, value)| *value)
}

/// Ratios of values to others, each within a round. Zeroes have no ratio.
pub fn ratios(values: &[(u32, f64)], to: &[(u32, f64)]) -> Vec<f64> {
    let ratio = |(round, value): &(u32, f64)| Some(value / of_round(to, *round).filter(|other| *other > 0.0)?);
    values.iter().filter_map(ratio).collect()
}

/// Names of the guests of a case, in their order.
pub fn names(case: &Case) -> Vec<String> {
    let guests = case.cells.iter().find_map(|cell| match cell {
        Cell::Job(job) => guests_of(&job.work),
        Cell::Absent(_) => None,
    });
    guests.unwrap_or_default().iter().map(|guest| guest.name.clone()).collect()
}

fn guests_of(work: &Work) -> Option<&[GuestAmongOthers]> {
    match work {
        Work::Together { guests, .. } => Some(guests),
        _ => None,
    }
}

/// Time in which all guests of a case were at work in an arm: the median of its rounds, in percent of the shortest
/// timed part.
pub fn at_the_same_time(results: &Results, case: &str, arm: &str) -> Option<f64> {
    let values: Vec<f64> = results.told(case, arm, AT_THE_SAME_TIME).into_iter().map(|(_, percent)| percent).collect();
    (!values.is_empty()).then(|| median(values))
}

/// Rounds without figures, because the guests were at work together for too little of them; `None` without such rounds.
pub fn left_out_in_words(results: &Results) -> Option<String> {
    let mut places = vec![];
    for case in &results.experiment.cases {
        for arm in &results.experiment.arms {
            let shared = results.told(&case.name, &arm.name, AT_THE_SAME_TIME);
            let out = shared.iter().filter(|(_, percent)| *percent < AT_THE_SAME_TIME_MIN_PERCENT).count();
            let place = format!("{out} of {} under {} in {}", shared.len(), arm.name, case.name);
            places.extend((out > 0).then_some(place));
        }
    }
    (!places.is_empty()).then(|| {
        format!(
            "Rounds left out, because all guests were at work for less than {AT_THE_SAME_TIME_MIN_PERCENT} % of the \
             shortest timed part: {}.",
            places.join("; ")
        )
    })
}

/// Total figure of an arm as a ratio to that of another arm, by rounds.
pub fn total(results: &Results, case: &str, [arm, to]: [&str; 2]) -> Option<Comparison> {
    Comparison::of(&results.ratios(case, arm, to, Metric::Figure), Better::Higher)
}

/// A guest that is slower in an arm than under `never`.
#[derive(Clone, Debug, PartialEq)]
pub struct Slower {
    /// Name of the guest.
    pub guest: String,
    /// Name of the arm.
    pub arm: String,
    /// Name of the case.
    pub case: String,
    /// Ratio of its figure to that under `never`.
    pub to_never: Comparison,
}

impl Slower {
    /// Whether all of the interval is below 1.
    fn is_certain(&self) -> bool {
        self.to_never.verdict == Verdict::Worse
    }

    fn in_words(&self) -> String {
        let Slower { guest, arm, case, to_never } = self;
        let rounds = if to_never.pairs < Comparison::PAIRS_MIN { ", fewer than six rounds" } else { "" };
        format!("{guest} under {arm} in {case} ({}{rounds})", to_never.interval)
    }
}

/// Every guest with a median of more than 2 % below that under `never`, in these arms, lowest first.
pub fn slower(results: &Results, arms: &[&str]) -> Vec<Slower> {
    let mut slower = vec![];
    for case in &results.experiment.cases {
        for (arm, guest) in arms.iter().flat_map(|arm| names(case).into_iter().map(move |guest| (*arm, guest))) {
            let to_never = Place { results, case: &case.name, arm }.to_never(&guest);
            let is_slow = |to: &Comparison| to.interval.median < 1.0 - Equivalence::MARGIN;
            slower.extend(to_never.filter(is_slow).map(|to_never| Slower {
                guest,
                arm: arm.to_owned(),
                case: case.name.clone(),
                to_never,
            }));
        }
    }
    slower.sort_by(|a, b| a.to_never.interval.median.total_cmp(&b.to_never.interval.median));
    slower
}

/// Whether a guest of any case can be compared with `never` in one of these arms.
pub fn are_compared(results: &Results, arms: &[&str]) -> bool {
    results.experiment.cases.iter().any(|case| {
        let places = arms.iter().map(|arm| Place { results, case: &case.name, arm });
        places
            .flat_map(|place| names(case).into_iter().map(move |guest| (place, guest)))
            .any(|(place, guest)| place.arm != NEVER && place.to_never(&guest).is_some())
    })
}

/// These guests in sentences: first those with the whole interval below 1, then the others.
pub fn slower_in_words(slower: &[Slower]) -> Vec<String> {
    let of = |is_certain: bool, what: &str| {
        let those = slower.iter().filter(|guest| guest.is_certain() == is_certain);
        let those: Vec<String> = those.map(Slower::in_words).collect();
        (!those.is_empty()).then(|| format!("{what}: {}.", those.join("; ")))
    };
    let certain = of(true, "Guests below 0.98 of their speed under never, with the whole interval below 1");
    let open = of(false, "Guests below 0.98 of their speed under never in the median, while the interval allows 1");
    certain.into_iter().chain(open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::catalogue::fixture::results_of;
    use crate::definition::HostFacts;
    use crate::metric::Metric;
    use crate::results::RunOutcome;

    /// Results of `consolidation` with a figure of each guest by arm, guest and round.
    fn results(figure: impl Fn(&str, &str, u32) -> f64) -> Results {
        let experiment = by_name("consolidation").expect("it exists").define(&HostFacts::of_a_test());
        let mut results = results_of(experiment, |_, _, _| Some((Metric::Figure, 0.0)));
        for run in &mut results.runs {
            let case = results.experiment.cases.iter().find(|case| case.name == run.case).expect("a case");
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            let told = |guest: String| (OfGuest::Figure.name(&guest), figure(&run.arm, &guest, run.round));
            measured.told = names(case).into_iter().map(told).collect();
        }
        results
    }

    #[test]
    fn every_guest_below_98_percent_is_named_and_the_certain_ones_come_first() {
        let results = results(|arm, guest, round| match (arm, guest) {
            ("auto", "hot a") => 97.0,
            // 0.9 to 1.05: its median is 0.975.
            ("auto", "idle") => 87.0 + 3.0 * f64::from(round),
            ("greedy", "sparse") => 98.5,
            _ => 100.0,
        });
        let slower = slower(&results, &["greedy", "auto"]);
        let named: Vec<&str> = slower.iter().map(|guest| guest.guest.as_str()).collect();
        assert_eq!(named, ["hot a", "hot a", "idle", "idle"]);
        let words = slower_in_words(&slower);
        assert!(
            words[0].contains("below 1: hot a under auto in hot 2 x 128 MiB (0.970 (0.970 - 0.970));"),
            "{words:?}"
        );
        assert!(words[1].contains("allows 1: idle under auto in hot 2 x 128 MiB (0.975 (0.9"), "{words:?}");
    }

    #[test]
    fn rounds_with_too_little_time_together_are_named() {
        let mut results = results(|_, _, _| 100.0);
        assert_eq!(left_out_in_words(&results), None);
        for run in &mut results.runs {
            let is_apart = run.arm == "greedy" && run.case == "hot 2 x 256 MiB" && run.round <= 2;
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            measured.told.insert(AT_THE_SAME_TIME.to_owned(), if is_apart { 19.0 } else { 70.0 });
        }
        let said = left_out_in_words(&results).expect("two rounds are left out");
        assert!(said.ends_with("less than 20 % of the shortest timed part: 2 of 6 under greedy in hot 2 x 256 MiB."));
        assert_eq!(at_the_same_time(&results, "hot 2 x 256 MiB", "greedy"), Some(70.0));
    }

    #[test]
    fn too_few_rounds_are_said_and_are_not_certain() {
        let mut results = results(|arm, _, _| if arm == "auto" { 90.0 } else { 100.0 });
        results.runs.retain(|run| run.round == 1);
        let words = slower_in_words(&slower(&results, &["auto"]));
        assert_eq!(words.len(), 1);
        assert!(words[0].contains("allows 1: ") && words[0].contains("0.900), fewer than six rounds)"), "{words:?}");
    }

    #[test]
    fn figures_in_the_notes_of_older_results_count_as_well() {
        let mut results = results(|_, _, _| 0.0);
        for run in &mut results.runs {
            let figure = if run.arm == "auto" { 86.0 } else { 100.0 };
            if let RunOutcome::Measured(measured) = &mut run.outcome {
                measured.told.clear();
                measured.notes = vec![format!("sparse: figure {figure}, coverage 0 %, resident 13.39 MiB.")];
            }
        }
        let named: Vec<String> = slower(&results, &["greedy", "auto"]).into_iter().map(|of| of.guest).collect();
        assert_eq!(named, ["sparse", "sparse"]);
    }

    #[test]
    fn a_sum_leaves_out_rounds_in_which_a_guest_is_missing() {
        let mut results = results(|_, _, round| f64::from(round));
        let (case, guests) = (results.experiment.cases[0].name.clone(), names(&results.experiment.cases[0]));
        let RunOutcome::Measured(measured) = &mut results.runs[0].outcome else { panic!("measured") };
        let arm = "never";
        assert_eq!(results.experiment.arms[0].name, arm);
        measured.told.remove(&OfGuest::Figure.name("idle"));
        let sums = Place { results: &results, case: &case, arm }.sums(&guests, OfGuest::Figure);
        assert_eq!(sums, [(2, 8.0), (3, 12.0), (4, 16.0), (5, 20.0), (6, 24.0)]);
    }
}
