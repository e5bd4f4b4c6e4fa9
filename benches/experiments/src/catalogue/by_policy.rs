//! Common parts of the experiments over policies: an arm per policy, and the comparison of `auto`
//! with the other policies.
//!
//! ```text
//!   figures of a case ──▶ the best policy ──▶ auto : best, each round for itself ──┐
//!   resident memory less that under `never` ──▶ is auto's bloat least or second-least ──┴▶ result ──▶ failed claims
//! ```

use wideleaf_policies::policy::POLICIES;

use crate::definition::{Arm, Case, Cell, HostFacts};
use crate::metric::{Better, Metric};
use crate::peers::{Guest, Peer};
use crate::report::common_sections::number;
use crate::report::{Column, Grid};
use crate::results::Results;
use crate::time_to_coverage::{NOT_REACHED, in_words, to_coverage};
use wideleaf_measure::statistics::{Comparison, Equivalence, median};

/// The default policy, which is compared with all others.
pub(super) const AUTO: &str = "auto";
/// The policy that does nothing. Memory that another policy takes beyond it is bloat.
const NEVER: &str = "never";
/// The policy that makes 1 GiB pages.
const GIANT: &str = "giant";
const GIANT_MIB: u64 = 1024;

/// Bloat that differs by less than two windows counts as equal: two runs of one policy differ by that.
const BLOAT_SAME_MIB: f64 = 4.0;

/// A kernel with its parameters for a run.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    /// Name in tables.
    pub name: &'static str,
    /// Unit of the figure.
    unit: &'static str,
    kernel: &'static str,
    cmdline: &'static str,
    memory_mib: u64,
    /// Guessed duration of a run with its start and its check, in seconds.
    pub seconds: f64,
}

/// A kernel from its name, parameters and unit.
pub(super) const fn kernel(
    name: &'static str,
    [kernel, cmdline, unit]: [&'static str; 3],
    memory_mib: u64,
    seconds: f64,
) -> Kernel {
    Kernel { name, unit, kernel, cmdline, memory_mib, seconds }
}

impl Kernel {
    /// Cells of this kernel in a guest under each policy, then in the same guest with each of the peers.
    pub(super) fn cells(&self, peers: &[Peer], seconds_guess: f64, host: &HostFacts) -> Vec<Cell> {
        let guest = Guest::new(self.kernel, self.cmdline, self.memory_mib);
        let policies = POLICIES.iter().map(|policy| cell(policy.name, &guest, seconds_guess, host));
        policies.chain(peers.iter().map(|peer| peer.cell(&guest, seconds_guess, host))).collect()
    }

    /// A case of this kernel with the name and cells.
    pub(super) fn case(&self, name: String, cells: Vec<Cell>) -> Case {
        Case { name, unit: self.unit.into(), working_set_mib: self.memory_mib, cells }
    }
}

/// Arms for all policies.
pub(super) fn arms() -> Vec<Arm> {
    let arm = |policy: &wideleaf_policies::policy::PolicyInfo| Arm {
        name: policy.name.into(),
        summary: policy.summary.into(),
    };
    POLICIES.iter().map(arm).collect()
}

fn cell(policy: &str, guest: &Guest, seconds_guess: f64, host: &HostFacts) -> Cell {
    if let Some(why) = &host.why_no_kvm {
        return Cell::Absent(why.clone());
    }
    if let Some(why) = host.why_no_giant().filter(|_| policy == GIANT) {
        return Cell::Absent(why);
    }
    // A giant page covers 1 GiB of RAM, so the guest needs that much.
    let memory_mib = if policy == GIANT { guest.memory_mib.max(GIANT_MIB) } else { guest.memory_mib };
    let options = [&["--policy", policy], host.giant_options("4k", policy)].concat();
    Cell::of(Guest { memory_mib, ..guest.clone() }.run(&options, seconds_guess))
}

/// Median of a metric; `None` if no round has it. A round that did not reach a time counts as later than all others.
pub(super) fn middle(results: &Results, case: &str, arm: &str, metric: Metric) -> Option<f64> {
    if metric == Metric::TimeToCoverageS {
        return to_coverage(results, case, arm).middle();
    }
    let values: Vec<f64> = results.values(case, arm, metric).into_iter().map(|(_, value)| value).collect();
    (!values.is_empty()).then(|| median(values))
}

/// Median of the resident memory beyond that under `never` in the same round, in MiB. Negative values count as zero.
pub(super) fn bloat_mib(results: &Results, case: &str, arm: &str) -> Option<f64> {
    let least = results.values(case, NEVER, Metric::ResidentMib);
    let of_round = |round: u32| least.iter().find(|(other, _)| *other == round).map(|(_, value)| *value);
    let more: Vec<f64> = results
        .values(case, arm, Metric::ResidentMib)
        .into_iter()
        .filter_map(|(round, value)| Some(value - of_round(round)?))
        .collect();
    (!more.is_empty()).then(|| median(more).max(0.0))
}

/// Median of a metric as a cell of a table; `None` if no round tells of it.
pub(super) fn middle_in_words(results: &Results, case: &str, arm: &str, metric: Metric) -> Option<String> {
    match metric {
        Metric::TimeToCoverageS => {
            let times = to_coverage(results, case, arm);
            (times.rounds() > 0).then(|| in_words(&times, NOT_REACHED))
        }
        _ => middle(results, case, arm, metric).map(number),
    }
}

/// A table with a row per arm that ran and a column per case.
pub(super) fn arms_by_case(results: &Results, caption: &str, cell: impl Fn(&str, &str) -> Option<String>) -> Grid {
    let cases = &results.experiment.cases;
    let columns = cases.iter().map(|case| Column::number(&*case.name));
    let columns = std::iter::once(Column::text("arm")).chain(columns).collect();
    let mut rows = Vec::new();
    for arm in &results.experiment.arms {
        let cells: Vec<Option<String>> = cases.iter().map(|case| cell(&case.name, &arm.name)).collect();
        if cells.iter().any(Option::is_some) {
            let cells = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
            rows.push(std::iter::once(arm.name.clone()).chain(cells).collect());
        }
    }
    Grid { caption: caption.into(), columns, rows }
}

/// Result of `auto` in a case, compared with the other policies.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AutoVersusOthers {
    /// Name of the case.
    pub case: String,
    /// Other policy with the highest median figure.
    pub best: String,
    /// Ratio of `auto` to that policy; `None` if no round has both.
    pub to_best: Option<Comparison>,
    /// Bloat of each policy in MiB, in ascending order.
    pub bloat: Vec<(String, f64)>,
}

impl AutoVersusOthers {
    /// Standings of all cases with results of `auto`, `never` and at least one more policy.
    pub(super) fn all(results: &Results) -> Vec<AutoVersusOthers> {
        results.experiment.cases.iter().filter_map(|case| AutoVersusOthers::of(results, &case.name)).collect()
    }

    fn of(results: &Results, case: &str) -> Option<AutoVersusOthers> {
        let names = || POLICIES.iter().map(|policy| policy.name);
        let figures: Vec<(&str, f64)> =
            names().filter_map(|name| Some((name, middle(results, case, name, Metric::Figure)?))).collect();
        if figures.len() < 3 || [NEVER, AUTO].iter().any(|wanted| figures.iter().all(|(name, _)| name != wanted)) {
            return None;
        }
        let others = figures.into_iter().filter(|(name, _)| *name != AUTO);
        let (best, _) = others.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let to_best = Comparison::of(&results.ratios(case, AUTO, best, Metric::Figure), Better::Higher);
        let mut bloat: Vec<(String, f64)> =
            names().filter_map(|name| Some((name.to_owned(), bloat_mib(results, case, name)?))).collect();
        bloat.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        Some(AutoVersusOthers { case: case.into(), best: best.into(), to_best, bloat })
    }

    /// Relation of `auto` to the fastest other policy, with a margin of 2 %.
    pub(super) fn speed(&self) -> Equivalence {
        self.to_best.as_ref().map_or(Equivalence::NotDecided, Equivalence::of)
    }

    /// Bloat of `auto` in MiB.
    pub(super) fn bloat_of_auto(&self) -> Option<f64> {
        self.bloat.iter().find(|(name, _)| name == AUTO).map(|(_, mib)| *mib)
    }

    /// Whether the bloat of `auto` is the least or the second-least; true if unknown.
    pub(super) fn is_lean(&self) -> bool {
        let Some(own) = self.bloat_of_auto() else { return true };
        let mut steps = 0;
        let mut of_step = self.bloat.first().map_or(own, |(_, least)| *least);
        for (_, mib) in self.bloat.iter().filter(|(_, mib)| *mib <= own) {
            if mib - of_step > BLOAT_SAME_MIB {
                (steps, of_step) = (steps + 1, *mib);
            }
        }
        steps <= 1
    }

    /// The case, with the ratio of `auto` to the fastest other policy.
    fn speed_in_words(&self) -> String {
        let AutoVersusOthers { case, best, to_best, .. } = self;
        to_best.map_or_else(|| case.clone(), |to| format!("{case} ({to} of {best}'s figure)"))
    }

    /// Policies with less bloat than `auto`, in words.
    fn too_fat(&self) -> Option<String> {
        let own = self.bloat_of_auto().filter(|_| !self.is_lean())?;
        let less = self.bloat.iter().filter(|(_, mib)| own - mib > BLOAT_SAME_MIB);
        let less: Vec<String> = less.map(|(name, mib)| format!("{name} {}", number(*mib))).collect();
        Some(format!("{}: {} MiB, but other policies have less ({} MiB)", self.case, number(own), less.join(", ")))
    }
}

/// Whether `auto` fulfils its claims, with failures first; empty if `auto` did not run.
pub(super) fn lead(results: &Results) -> Vec<String> {
    let all = AutoVersusOthers::all(results);
    if all.is_empty() {
        return vec![];
    }
    let cases = all.len();
    let that_are = |speeds: &[Equivalence]| -> Vec<&AutoVersusOthers> {
        all.iter().filter(|standing| speeds.contains(&standing.speed())).collect()
    };
    let names =
        |of: &[&AutoVersusOthers]| of.iter().map(|standing| standing.case.clone()).collect::<Vec<_>>().join(", ");
    let numbers =
        |of: &[&AutoVersusOthers]| of.iter().map(|standing| standing.speed_in_words()).collect::<Vec<_>>().join("; ");
    let (slower, open) = (that_are(&[Equivalence::Slower]), that_are(&[Equivalence::NotDecided]));
    let fast = that_are(&[Equivalence::Faster, Equivalence::Within, Equivalence::NotSlower]);
    let said = |of: &[&AutoVersusOthers], what: &str| {
        (!of.is_empty()).then(|| format!("auto is {what} in {} of {cases} cases: {}.", of.len(), numbers(of)))
    };
    let fat: Vec<String> = all.iter().filter_map(AutoVersusOthers::too_fat).collect();
    let bloat = match fat.len() {
        0 => "Its bloat is the least or the second-least everywhere.".to_owned(),
        some => format!(
            "Its bloat is neither the least nor the second-least in {some} of {cases} cases. {}.",
            fat.join("; ")
        ),
    };
    let unknown = results.experiment.cases.len() - cases;
    let paragraphs = [
        said(&slower, "slower than the fastest other policy"),
        said(&open, "not shown to be within 2 % of the fastest other policy, nor faster, nor slower"),
        (!fast.is_empty()).then(|| {
            let shown = "auto is shown to be within 2 % of the fastest other policy, or faster,";
            format!("{shown} in {} of {cases} cases: {}.", fast.len(), names(&fast))
        }),
        Some(bloat),
        (unknown > 0).then(|| format!("Cases in which auto cannot be compared: {unknown}.")),
    ];
    vec![paragraphs.into_iter().flatten().collect::<Vec<_>>().join(" ")]
}

/// Table of the results of `auto`, case by case.
pub(super) fn standings(results: &Results) -> Grid {
    let units = |case: &str| results.experiment.cases.iter().find(|c| c.name == case).map_or("", |c| &c.unit);
    let row = |standing: &AutoVersusOthers| {
        let figure = middle(results, &standing.case, &standing.best, Metric::Figure).map_or("-".into(), number);
        let least = standing.bloat.first().map_or("-".into(), |(name, mib)| format!("{} ({name})", number(*mib)));
        vec![
            standing.case.clone(),
            standing.best.clone(),
            format!("{figure} {}", units(&standing.case)),
            standing.to_best.map_or("-".into(), |to| to.to_string()),
            standing.speed().in_words().into(),
            standing.bloat_of_auto().map_or("-".into(), number),
            least,
            if standing.is_lean() { "yes" } else { "no" }.into(),
        ]
    };
    let columns = vec![
        Column::text("case"),
        Column::text("fastest other policy"),
        Column::number("its figure"),
        Column::number("auto : fastest other"),
        Column::text("auto is"),
        Column::number("bloat of auto, MiB"),
        Column::number("least bloat, MiB"),
        Column::text("least or second-least bloat"),
    ];
    let rows = AutoVersusOthers::all(results).iter().map(row).collect();
    Grid { caption: "The fastest other policy of each case, compared with auto".into(), columns, rows }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::catalogue::Catalogued;
    use crate::results::{FORMAT, Measured, Run, RunOutcome};

    /// A host with everything except giant pages.
    pub(in crate::catalogue) fn host() -> HostFacts {
        HostFacts { memory_available_mib: 16 << 10, ..HostFacts::of_a_test() }
    }

    /// Results of an experiment with equal cases: six rounds with the given metrics of each arm.
    pub(in crate::catalogue) fn made_up(of: &dyn Catalogued, has: impl Fn(&str) -> Vec<(Metric, f64)>) -> Results {
        let experiment = of.define(&host());
        let run = |case: &str, arm: &str, round: u32| Run {
            case: case.into(),
            arm: arm.into(),
            round,
            at_s: 0.0,
            took_s: 1.0,
            load_1m: 0.0,
            outcome: RunOutcome::Measured(Measured { metrics: has(arm).into_iter().collect(), ..Measured::default() }),
        };
        let turns = crate::schedule::turns(&experiment);
        let runs = turns
            .iter()
            .map(|turn| run(&experiment.cases[turn.case].name, &experiment.arms[turn.arm].name, turn.round))
            .collect();
        Results {
            wideleaf_experiment: FORMAT,
            environment: Default::default(),
            started: String::new(),
            ended: String::new(),
            elapsed_s: 1.0,
            is_complete: true,
            runs,
            experiment,
        }
    }

    fn standing(to_best: Option<&[f64]>, bloat: &[(&str, f64)]) -> AutoVersusOthers {
        let to_best = to_best.and_then(|ratios| Comparison::of(ratios, Better::Higher));
        let bloat = bloat.iter().map(|(name, mib)| ((*name).to_owned(), *mib)).collect();
        AutoVersusOthers { case: "GUPS".into(), best: "greedy".into(), to_best, bloat }
    }

    #[test]
    fn an_open_comparison_is_not_decided_with_few_or_missing_rounds() {
        let speed = |ratios: &[f64]| standing(Some(ratios), &[]).speed();
        assert_eq!(speed(&[0.98; 6]), Equivalence::Within);
        assert_eq!(speed(&[0.97; 6]), Equivalence::Slower);
        assert_eq!(speed(&[0.9, 0.91, 0.96, 0.97, 1.05, 1.1]), Equivalence::NotDecided, "its interval has 1 in it");
        assert_eq!([speed(&[0.9; 3]), standing(None, &[]).speed()], [Equivalence::NotDecided; 2]);
    }

    #[test]
    fn the_second_least_bloat_is_allowed_and_the_third_least_is_not() {
        let is_lean = |bloat: &[(&str, f64)]| standing(None, bloat).is_lean();
        assert!(is_lean(&[("never", 0.0), ("thp", 1.0), ("coverage", 3.0), (AUTO, 3.5), ("greedy", 128.0)]));
        assert!(is_lean(&[("never", 0.0), (AUTO, 64.0), ("greedy", 128.0)]));
        assert!(!is_lean(&[("never", 0.0), ("thp", 32.0), (AUTO, 64.0), ("greedy", 128.0)]));
    }

    #[test]
    fn worse_results_are_given_with_their_numbers() {
        let both = standing(Some(&[0.5; 6]), &[("never", 0.0), ("thp", 32.0), (AUTO, 64.0)]);
        assert_eq!(both.speed_in_words(), "GUPS (0.500 (0.500 - 0.500) of greedy's figure)");
        let fat = both.too_fat().expect("other policies have less");
        assert_eq!(fat, "GUPS: 64.00 MiB, but other policies have less (never 0, thp 32.00 MiB)");
        assert_eq!(standing(None, &[(AUTO, 0.0)]).too_fat(), None);
    }

    #[test]
    fn the_giant_policy_needs_a_free_1_gib_page_and_a_guest_that_holds_it() {
        let guest = Guest::new("gups", "", 320);
        assert!(matches!(cell(GIANT, &guest, 1.0, &host()), Cell::Absent(_)));
        let Cell::Job(job) = cell(GIANT, &guest, 1.0, &HostFacts { free_pages_1g: 1, ..host() }) else {
            panic!("there is a page")
        };
        assert_eq!(job.command(), "wideleaf run gups --memory 1024M --policy giant --no-daemon");
    }
}
