//! First paragraphs of the report on `scarce`, from its results alone: what the arm `auto, one host` loses (to `never`
//! guest by guest, to each other arm in the total speed of all guests), by how many huge pages the arms differ, then
//! the targets. Nothing is claimed of an arm without runs in the same rounds.

use wideleaf_measure::figures::{Bar, Limit};
use wideleaf_measure::statistics::{Comparison, Equivalence, median};
use wideleaf_measure::table::Cell;

use super::{AUTO, BEST, COLD, GREEDY, HOST_THP, HOT, NEVER, ONE_HOST, PLENTY};
use crate::each_guest::{OfGuest, Place, left_out_in_words, names, slower, slower_in_words, total};
use crate::report::common_sections::bar_in_words;
use crate::results::Results;

/// Lowest total speed as a ratio to the best placement.
const OF_BEST_MIN: f64 = 0.95;
/// Lowest total speed as a ratio to greedy and to khugepaged.
const OF_FIRST_COME_MIN: f64 = 1.15;
/// Lowest total speed as a ratio to any other arm that a host could have.
const TO_OTHER_ARMS_MIN: f64 = 1.1;
/// Lowest speed of a guest as a ratio to that under never.
const OF_NEVER_MIN: f64 = 1.0 - Equivalence::MARGIN;

/// Size of a huge page in MiB.
const HUGE_PAGE_MIB: f64 = 2.0;

/// Paragraphs before all others: guests and rows that are lost, the huge pages of the arms, then the targets.
pub(super) fn lead(results: &Results) -> Vec<String> {
    let cases: Vec<&str> = results.experiment.cases.iter().map(|case| case.name.as_str()).collect();
    if cases.iter().all(|case| total(results, case, [ONE_HOST, NEVER]).is_none()) {
        return vec![format!("Nothing is compared yet: no round has a run of both {NEVER} and {ONE_HOST}.")];
    }
    let guests = slower_in_words(&slower(results, &[ONE_HOST]));
    let rows = lost_totals(results, &cases);
    let lost = match (guests.is_empty(), rows.is_empty()) {
        (true, true) => vec![format!("{ONE_HOST} loses no row: no guest and no total is below 0.98.")],
        (_, true) => guests,
        _ => [guests, vec![format!("{ONE_HOST} loses in total speed: {}.", rows.join("; "))]].concat(),
    };
    let compared = cases.iter().filter_map(|case| total(results, case, [ONE_HOST, NEVER]));
    let is_short = compared.map(|to| to.pairs).min().is_some_and(|pairs| pairs < Comparison::PAIRS_MIN);
    let short =
        is_short.then(|| "Fewer than six rounds: no ratio has an interval, and no target is certain.".to_owned());
    let left_out = left_out_in_words(results);
    let notes = left_out.into_iter().chain(short).chain(unequal(results, &cases)).collect();
    [lost, notes, bars(results, &cases).iter().map(bar_in_words).collect()].concat()
}

/// By how many huge pages the arms of each scarce case differ at the end, in a sentence; `None` if no run tells, or if
/// they have equally many.
fn unequal(results: &Results, cases: &[&str]) -> Option<String> {
    let of_case = |case: &str| {
        let arms = results.experiment.arms.iter().map(|arm| arm.name.as_str()).filter(|arm| *arm != NEVER);
        let used = arms.filter_map(|arm| Some((arm, huge_pages_at_end(results, case, arm)?)));
        let mut used: Vec<(&str, f64)> = used.collect();
        used.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let ((_, least), (_, most)) = (used.first()?, used.last()?);
        let each: Vec<String> = used.iter().map(|(arm, blocks)| format!("{arm} {blocks:.0}")).collect();
        let differ = format!("by up to {:.0} in {case} ({})", most - least, each.join("; "));
        (most > least).then_some(differ)
    };
    let scarce = cases.iter().filter(|case| **case != PLENTY);
    let told: Vec<String> = scarce.filter_map(|case| of_case(case)).collect();
    (!told.is_empty()).then(|| {
        format!(
            "The compared arms do not have equally many huge pages at the end, since some make new ones by compaction: \
             in blocks of 2 MiB they differ {}.",
            told.join(", and ")
        )
    })
}

/// Huge pages on the hot and the cold sets of all guests at the end, in blocks of 2 MiB: the median of the rounds.
pub(super) fn huge_pages_at_end(results: &Results, case: &str, arm: &str) -> Option<f64> {
    let guests = names(results.experiment.cases.iter().find(|of| of.name == case)?);
    let [hot, cold] = [HOT, COLD].map(|set| Place { results, case, arm }.sums(&guests, OfGuest::HugeMib(set)));
    let cold_of = |round: u32| cold.iter().find(|(of, _)| *of == round).map(|(_, mib)| *mib);
    let blocks = hot.iter().filter_map(|(round, hot)| Some((hot + cold_of(*round)?) / HUGE_PAGE_MIB));
    let blocks: Vec<f64> = blocks.collect();
    (!blocks.is_empty()).then(|| median(blocks))
}

/// Arms that a host could have in place of the judged one.
fn others(results: &Results) -> impl Iterator<Item = &str> {
    let arms = results.experiment.arms.iter().map(|arm| arm.name.as_str());
    arms.filter(|arm| ![ONE_HOST, BEST].contains(arm))
}

/// Arms that are more than 2 % faster in total, by the median.
fn lost_totals(results: &Results, cases: &[&str]) -> Vec<String> {
    let row = |case: &str, arm: &str| {
        let to = total(results, case, [ONE_HOST, arm]).filter(|to| to.interval.median < OF_NEVER_MIN)?;
        Some(format!("{case}, to {arm} {} ({})", to.interval, Equivalence::of(&to).in_words()))
    };
    cases.iter().flat_map(|case| others(results).filter_map(move |arm| row(case, arm))).collect()
}

/// The targets: ratios are judged by their medians, equivalence by the interval.
fn bars(results: &Results, cases: &[&str]) -> Vec<Bar> {
    let scarce = cases.iter().filter(|case| **case != PLENTY);
    let of_scarce = scarce.flat_map(|case| {
        let to = |arm: &str, least| {
            let median = total(results, case, [ONE_HOST, arm]).map(|to| to.interval.median);
            Bar::new(format!("{case}, total speed, {ONE_HOST} : {arm}"), ratio(median), Limit::AtLeast(least))
        };
        let others = others(results).filter_map(|arm| total(results, case, [ONE_HOST, arm]));
        let lowest = others.map(|to| to.interval.median).reduce(f64::min);
        let to_all = format!("{case}, lowest total speed, {ONE_HOST} : any other arm but {BEST}");
        [
            to(BEST, OF_BEST_MIN),
            to(GREEDY, OF_FIRST_COME_MIN),
            to(HOST_THP, OF_FIRST_COME_MIN),
            Bar::new(to_all, ratio(lowest), Limit::AtLeast(TO_OTHER_ARMS_MIN)),
        ]
    });
    let of_plenty = cases.iter().filter(|case| **case == PLENTY).flat_map(|case| {
        [AUTO, NEVER].map(|arm| {
            let lowest = total(results, case, [ONE_HOST, arm]).and_then(|to| low_end(&to));
            let what = format!("{case}, total speed, {ONE_HOST} : {arm}, lower end of the 95 % interval");
            Bar::new(what, ratio(lowest), Limit::AtLeast(OF_NEVER_MIN))
        })
    });
    let of_guests = Bar::new(
        format!("lowest median speed of a guest, {ONE_HOST} : {NEVER}"),
        ratio(lowest_guest(results, cases, ONE_HOST)),
        Limit::AtLeast(OF_NEVER_MIN),
    );
    std::iter::once(of_guests).chain(of_scarce).chain(of_plenty).collect()
}

fn ratio(value: Option<f64>) -> Cell {
    value.map_or_else(|| Cell::missing("not measured"), |value| Cell::number(value, 3, ""))
}

/// Lower end of the interval; `None` with too few rounds for one.
fn low_end(to: &Comparison) -> Option<f64> {
    (to.pairs >= Comparison::PAIRS_MIN).then_some(to.interval.low)
}

/// The lowest median speed of a guest, as a ratio to that under never, of these cases.
pub(super) fn lowest_guest(results: &Results, cases: &[&str], arm: &str) -> Option<f64> {
    let of_case = |case: &str| {
        let of = results.experiment.cases.iter().find(|of| of.name == case)?;
        let to = names(of).into_iter().filter_map(|guest| Place { results, case, arm }.to_never(&guest));
        to.map(|to| to.interval.median).reduce(f64::min)
    };
    cases.iter().filter_map(|case| of_case(case)).reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use super::super::Scarce;
    use super::super::tests::made_up;
    use super::*;
    use crate::catalogue::Catalogued as _;
    use crate::results::RunOutcome;

    #[test]
    fn a_guest_that_lost_comes_first_then_lost_totals_then_the_targets() {
        let results = made_up(|case, arm, guest| match (case, arm, guest) {
            ("two guests", ONE_HOST, "guest 2") => 0.9,
            ("two guests", GREEDY, _) => 1.2,
            (_, BEST, _) => 1.3,
            _ => 1.0,
        });
        let lead = Scarce.lead(&results);
        let first = "Guests below 0.98 of their speed under never, with the whole interval below 1: guest 2 under \
                     auto, one host in two guests (0.900 (0.900 - 0.900)).";
        assert_eq!(lead[0], first);
        assert!(lead[1].starts_with("auto, one host loses in total speed: two guests, to never 0.950"), "{lead:?}");
        assert!(lead[1].contains("; two guests, to greedy 0.792 (0.792 - 0.792) (slower)"), "{lead:?}");
        let all_missed = lead[2..10].iter().all(|line| line.starts_with("MISSED: "));
        assert!(all_missed && lead[2].contains("guest, auto, one host : never 0.900, at least 0.98"), "{lead:#?}");
        assert!(lead[3].contains("two guests, total speed, auto, one host : best placement 0.731, at least 0.95"));
        // One guest: the best placement is 1.3, and the others are as fast.
        assert!(lead[7].contains("one guest, total speed, auto, one host : best placement 0.769"), "{lead:#?}");
        assert!(lead[11].starts_with("met: plenty, total speed, auto, one host : auto, lower end"), "{lead:#?}");
    }

    #[test]
    fn the_lead_says_by_how_many_huge_pages_the_compared_arms_differ() {
        let mut results = made_up(|_, _, _| 1.0);
        assert_eq!(unequal(&results, &["two guests"]), None, "no run tells");
        for run in &mut results.runs {
            let case = results.experiment.cases.iter().find(|case| case.name == run.case).expect("a case");
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            // MiB on the hot and on the cold set of each guest.
            let [hot, cold] = match run.arm.as_str() {
                NEVER => [0.0, 0.0],
                AUTO => [184.0, 0.0],
                BEST => [128.0, 4.0],
                _ => [100.0, 40.0],
            };
            for guest in names(case) {
                measured.told.insert(OfGuest::HugeMib(HOT).name(&guest), hot);
                measured.told.insert(OfGuest::HugeMib(COLD).name(&guest), cold);
            }
        }
        let lead = Scarce.lead(&results);
        let said = lead.iter().find(|said| said.contains("huge pages at the end")).expect("it is said");
        let expected = "in blocks of 2 MiB they differ by up to 52 in two guests (best placement 132; greedy 140; \
                        auto, one host 140; host THP, tuned 140; auto 184), and by up to 26 in one guest (best \
                        placement 66; greedy 70; auto, one host 70; host THP, tuned 70; auto 92).";
        assert!(said.ends_with(expected), "{said}");
        let of = |arm: &str| huge_pages_at_end(&results, "two guests", arm);
        assert_eq!([of(NEVER), of("no arm")], [Some(0.0), None]);
        results.runs.retain(|run| ["greedy", ONE_HOST, NEVER].contains(&run.arm.as_str()));
        assert_eq!(unequal(&results, &["two guests"]), None, "they have equally many");
    }

    #[test]
    fn every_target_can_be_met() {
        let results = made_up(|case, arm, _| match (case, arm) {
            ("plenty", _) => 1.3,
            (_, ONE_HOST | BEST) => 1.2,
            _ => 1.0,
        });
        let lead = Scarce.lead(&results);
        assert_eq!(lead[0], "auto, one host loses no row: no guest and no total is below 0.98.");
        assert_eq!(lead.len(), 1 + 1 + 2 * 4 + 2);
        assert!(lead[1..].iter().all(|line| line.starts_with("met: ")), "{lead:#?}");
    }

    #[test]
    fn five_rounds_do_not_show_that_auto_loses_nothing_where_huge_pages_suffice() {
        let mut results = made_up(|case, arm, _| if (case, arm) == ("plenty", ONE_HOST) { 0.99 } else { 1.0 });
        let is_met = |results: &Results| bars(results, &["plenty"])[1].is_met;
        assert!(is_met(&results));
        results.runs.retain(|run| run.round < 6);
        assert!(!is_met(&results), "five rounds have no interval");
        let lead = Scarce.lead(&results);
        assert!(lead[1].starts_with("Fewer than six rounds"), "{lead:?}");
    }

    #[test]
    fn without_both_arms_nothing_is_claimed() {
        let mut results = made_up(|_, _, _| 1.0);
        results.runs.retain(|run| run.arm != ONE_HOST);
        assert_eq!(
            Scarce.lead(&results),
            ["Nothing is compared yet: no round has a run of both never and auto, one host."]
        );
    }
}
