//! The tables of `scarce`: all arms by case, `auto, one host` against each of them, each guest, and what did not run.

use super::{BEST, COLD, GUESTS, GUESTS_ON_FEW_CPUS, HOT, NEVER, ONE_HOST, comparison};
use crate::catalogue::by_policy::{bloat_mib, middle};
use crate::definition::{Arm, Case, Cell, FREE_BLOCKS_AT_BEGIN};
use crate::each_guest::{OfGuest, Place, at_the_same_time, names, ratios, total};
use crate::metric::{Better, Metric};
use crate::report::common_sections::{interval, number};
use crate::report::{BarGroup, Bars, Column, Grid, Plot, Section};
use crate::results::Results;
use wideleaf_measure::statistics::{Comparison, Equivalence, median};

/// All own sections.
pub(super) fn sections(results: &Results) -> Vec<Section> {
    let cases = &results.experiment.cases;
    let totals = Section {
        title: "All guests together".into(),
        paragraphs: vec![guests_in_words(results), what_is_measured()],
        tables: cases.iter().map(|case| of_case(results, case)).collect(),
        plots: vec![Plot::Bars(speeds(results))],
    };
    let one = |title: &str, tables| Section { title: title.into(), tables, ..Section::default() };
    let each = cases.iter().map(|case| each_guest(results, case)).collect();
    let sections = [
        Some(one("auto, one host against the other arms", vec![against_each(results)])),
        Some(totals),
        Some(one("Each guest", each)),
        not_run(results).map(|grid| one("Not run", vec![grid])),
    ];
    sections.into_iter().flatten().collect()
}

fn guests_in_words(results: &Results) -> String {
    let several = results.experiment.cases.iter().map(|case| names(case).len() as u64).max().unwrap_or(0);
    match several {
        0 | 1 => "One guest.".into(),
        GUESTS_ON_FEW_CPUS => format!(
            "{several} guests at once, because the host has fewer than {GUESTS} CPUs: {GUESTS} vCPUs and their \
             managers would take turns, and a figure would be that of the scheduler."
        ),
        _ => format!("{several} guests at once, each with a CPU for its vCPU."),
    }
}

fn what_is_measured() -> String {
    "Each guest fills a cold set and reads it for a while as if it were hot, then fills a hot set of the same size and \
     updates it at random: the speed is that of these updates, all guests together, in the time in which all of them \
     are at it; at the same time is the length of that time in percent of the shortest part with updates. The host had \
     free blocks of 2 MiB for half of the sum of the hot sets when the guests started, except in `plenty`. Ratios are \
     within a round. The second half is that of the time together, when a manager has had time. Huge pages are those \
     at the end of the updates; used are those on the hot and cold sets of all guests, in blocks of 2 MiB. The arms do \
     not have equally many of these: compaction makes blocks that were not free at the begin. CPU of managers is that \
     of the whole run and includes wideleafd's or khugepaged's. Bloat is the resident memory beyond that under never. \
     ? means fewer than six rounds, too few for a 95 % interval."
        .into()
}

fn against_each(results: &Results) -> Grid {
    let columns = vec![
        Column::text("case"),
        Column::text("other arm"),
        Column::number("total speed, auto, one host : other"),
        Column::text("auto, one host is"),
    ];
    let mut rows = vec![];
    for case in &results.experiment.cases {
        let arms = results.experiment.arms.iter().map(|arm| arm.name.as_str()).filter(|arm| *arm != ONE_HOST);
        let compared = arms.filter_map(|arm| Some((arm, total(results, &case.name, [ONE_HOST, arm])?)));
        let mut compared: Vec<(&str, Comparison)> = compared.collect();
        compared.sort_by(|(_, a), (_, b)| a.interval.median.total_cmp(&b.interval.median));
        rows.extend(compared.into_iter().map(|(arm, to)| {
            let is = Equivalence::of(&to).in_words().to_owned();
            vec![case.name.clone(), arm.to_owned(), ratio_in_words(Some(&to)), is]
        }));
    }
    Grid { caption: "Total speed, lowest ratio of each case first; equivalence within 2 %".into(), columns, rows }
}

fn of_case(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number("speed, M updates/s"),
        Column::number("speed : never's"),
        Column::number("speed : best placement's"),
        Column::number("second half : best placement's"),
        Column::number("lowest guest : never"),
        Column::number("hot on huge pages, %"),
        Column::number("cold on huge pages, MiB"),
        Column::number("huge pages used at the end"),
        Column::number("vacated windows"),
        Column::number("CPU of managers, s"),
        Column::number("bloat, MiB"),
        Column::number("free blocks at the begin"),
        Column::number("at the same time, %"),
    ];
    let row = |arm: &Arm| row_of_arm(results, case, &arm.name);
    Grid { caption: case.name.clone(), columns, rows: results.experiment.arms.iter().filter_map(row).collect() }
}

fn row_of_arm(results: &Results, case: &Case, arm: &str) -> Option<Vec<String>> {
    let place = Place { results, case: &case.name, arm };
    let guests = names(case);
    let speeds = values(results.values(&case.name, arm, Metric::Figure));
    if speeds.is_empty() {
        return None;
    }
    let to = |other: &str| match arm == other {
        true => "1".to_owned(),
        false => ratio_in_words(total(results, &case.name, [arm, other]).as_ref()),
    };
    let second_half = |arm: &str| Place { arm, ..place }.sums(&guests, OfGuest::FigureOfSecondHalf);
    let second_half = Comparison::of(&ratios(&second_half(arm), &second_half(BEST)), Better::Higher);
    let lowest = comparison::lowest_guest(results, &[case.name.as_str()], arm);
    let sum = |what| middle_of(values(place.sums(&guests, what)));
    Some(vec![
        arm.to_owned(),
        interval(&speeds.iter().map(|speed| speed / 1e6).collect::<Vec<_>>()),
        to(NEVER),
        to(BEST),
        if arm == BEST { "1".into() } else { ratio_in_words(second_half.as_ref()) },
        if arm == NEVER { "1".into() } else { lowest.map_or("-".into(), |lowest| format!("{lowest:.3}")) },
        middle_of(covered_percent(place, &guests, HOT)),
        sum(OfGuest::HugeMib(COLD)),
        comparison::huge_pages_at_end(results, &case.name, arm).map_or("-".into(), |blocks| format!("{blocks:.0}")),
        whole(&values(place.sums(&guests, OfGuest::Vacated))),
        middle(results, &case.name, arm, Metric::ManagerCpuS).map_or("-".into(), number),
        bloat_mib(results, &case.name, arm).map_or("-".into(), number),
        whole(&values(results.told(&case.name, arm, FREE_BLOCKS_AT_BEGIN))),
        at_the_same_time(results, &case.name, arm).map_or("-".into(), number),
    ])
}

fn each_guest(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::text("guest"),
        Column::number("speed, M updates/s"),
        Column::number("speed : never's"),
        Column::text("it is"),
        Column::number("hot on huge pages, %"),
        Column::number("cold on huge pages, MiB"),
        Column::number("vacated windows"),
        Column::number("CPU of its manager, s"),
    ];
    let arms = results.experiment.arms.iter().map(|arm| arm.name.as_str());
    let rows = arms.flat_map(|arm| names(case).into_iter().map(move |guest| (arm, guest)));
    let rows = rows.filter_map(|(arm, guest)| row_of_guest(Place { results, case: &case.name, arm }, &guest));
    Grid { caption: format!("{}, guest by guest", case.name), columns, rows: rows.collect() }
}

fn row_of_guest(place: Place<'_>, guest: &str) -> Option<Vec<String>> {
    let speeds: Vec<f64> = values(place.values(guest, OfGuest::Figure)).iter().map(|speed| speed / 1e6).collect();
    if speeds.is_empty() {
        return None;
    }
    let to_never = place.to_never(guest).filter(|_| place.arm != NEVER);
    let of = |what| middle_of(values(place.values(guest, what)));
    Some(vec![
        place.arm.to_owned(),
        guest.to_owned(),
        interval(&speeds),
        ratio_in_words(to_never.as_ref()),
        to_never.map_or("-".into(), |to| Equivalence::of(&to).in_words().to_owned()),
        middle_of(covered_percent(place, &[guest.to_owned()], HOT)),
        of(OfGuest::HugeMib(COLD)),
        whole(&values(place.values(guest, OfGuest::Vacated))),
        of(OfGuest::ManagerCpuS),
    ])
}

/// Cells without a run, with the reasons.
fn not_run(results: &Results) -> Option<Grid> {
    let columns = vec![Column::text("case"), Column::text("arm"), Column::text("why")];
    let mut rows = vec![];
    for case in &results.experiment.cases {
        let cells = results.experiment.arms.iter().zip(&case.cells);
        rows.extend(cells.filter_map(|(arm, cell)| match cell {
            Cell::Absent(why) => Some(vec![case.name.clone(), arm.name.clone(), why.clone()]),
            Cell::Job(_) => None,
        }));
    }
    (!rows.is_empty()).then(|| Grid { caption: "Cells without a run".into(), columns, rows })
}

/// Total speed of each arm, as a ratio to never.
fn speeds(results: &Results) -> Bars {
    let arms: Vec<&str> = results.experiment.arms.iter().map(|arm| arm.name.as_str()).collect();
    let arms: Vec<&str> = arms.into_iter().filter(|arm| *arm != NEVER).collect();
    let bar = |case: &Case, arm: &str| {
        let to = total(results, &case.name, [arm, NEVER])?;
        Some((to.interval.median, to.interval.low, to.interval.high))
    };
    let group =
        |case: &Case| BarGroup { name: case.name.clone(), bars: arms.iter().map(|arm| bar(case, arm)).collect() };
    Bars {
        name: "speed".into(),
        caption: "Total speed of the guests, as a ratio to never; median and 95 % interval".into(),
        axis: "ratio to never".into(),
        reference: Some(1.0),
        series: arms.iter().map(|arm| (*arm).to_owned()).collect(),
        groups: results.experiment.cases.iter().map(group).collect(),
    }
}

/// Share of a set of these guests on huge pages, by rounds, in percent.
fn covered_percent(place: Place<'_>, guests: &[String], set: &str) -> Vec<f64> {
    let [huge, all] = [OfGuest::HugeMib(set), OfGuest::SetMib(set)].map(|what| place.sums(guests, what));
    ratios(&huge, &all).into_iter().map(|share| share * 100.0).collect()
}

fn values(by_round: Vec<(u32, f64)>) -> Vec<f64> {
    by_round.into_iter().map(|(_, value)| value).collect()
}

/// Median of some values, in words.
fn middle_of(values: Vec<f64>) -> String {
    if values.is_empty() { "-".into() } else { number(median(values)) }
}

/// Median of some counts, in words.
fn whole(counts: &[f64]) -> String {
    if counts.is_empty() { "-".into() } else { format!("{:.0}", median(counts.to_vec())) }
}

/// A ratio with its interval. Whether it shows a difference is for [`Equivalence`] to say.
fn ratio_in_words(to: Option<&Comparison>) -> String {
    match to {
        None => "-".into(),
        Some(to) if to.pairs < Comparison::PAIRS_MIN => format!("{} ?", to.interval),
        Some(to) => to.interval.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::made_up;
    use super::super::{AUTO, GREEDY};
    use super::*;
    use crate::each_guest::AT_THE_SAME_TIME;
    use crate::results::RunOutcome;

    fn section<'s>(sections: &'s [Section], title: &str) -> &'s Section {
        sections.iter().find(|section| section.title == title).expect("a section")
    }

    #[test]
    fn the_rows_that_are_lost_come_first() {
        let results = made_up(|case, arm, _| match (case, arm) {
            ("one guest", AUTO) => 2.0,
            (_, GREEDY) => 0.5,
            _ => 1.0,
        });
        let sections = sections(&results);
        let rows = &section(&sections, "auto, one host against the other arms").tables[0].rows;
        let of = |case: &str| rows.iter().filter(|row| row[0] == case).collect::<Vec<_>>();
        let [first, last] = [of("one guest")[0], of("one guest")[4]];
        assert_eq!([&*first[1], &first[2], &first[3]], [AUTO, "0.500 (0.500 - 0.500)", "slower"]);
        assert_eq!([&*last[1], &last[3]], [GREEDY, "faster"]);
        assert_eq!(of("plenty").len(), 2, "auto and never");
    }

    #[test]
    fn a_case_shows_where_its_huge_pages_are_and_what_they_gave() {
        let mut results = made_up(|_, arm, _| if arm == BEST { 2e6 } else { 1e6 });
        for run in results.runs.iter_mut().filter(|run| run.case == "two guests") {
            let RunOutcome::Measured(measured) = &mut run.outcome else { panic!("measured") };
            for (guest, huge) in [("guest 1", 64.0), ("guest 2", 128.0)] {
                let told = [
                    (OfGuest::SetMib(HOT), 256.0),
                    (OfGuest::HugeMib(HOT), huge),
                    (OfGuest::HugeMib(COLD), 10.0),
                    (OfGuest::Vacated, 32.0),
                    (OfGuest::ManagerCpuS, 0.25),
                    (OfGuest::FigureOfSecondHalf, 1e6),
                ];
                measured.told.extend(told.map(|(what, value)| (what.name(guest), value)));
            }
            measured.told.insert(FREE_BLOCKS_AT_BEGIN.into(), 130.0);
            measured.told.insert(AT_THE_SAME_TIME.into(), 75.0);
        }
        let sections = sections(&results);
        let rows = &section(&sections, "All guests together").tables[0].rows;
        let row = rows.iter().find(|row| row[0] == ONE_HOST).expect("it ran");
        assert_eq!(row[1], "2.000 (2.000 - 2.000)", "two guests");
        assert_eq!(row[2..6], ["1.000 (1.000 - 1.000)", "0.500 (0.500 - 0.500)", "1.000 (1.000 - 1.000)", "1.000"]);
        // 192 of 512 MiB, and 212 MiB in all.
        assert_eq!(row[6..], ["37.50", "20.00", "106", "64", "-", "-", "130", "75.00"]);
        let rows = &section(&sections, "Each guest").tables[0].rows;
        let row = rows.iter().find(|row| row[0] == BEST && row[1] == "guest 2").expect("it ran");
        assert_eq!(row[3..], ["2.000 (2.000 - 2.000)", "faster", "50.00", "10.00", "32", "0.2500"]);
    }

    #[test]
    fn few_rounds_are_marked_and_every_missing_cell_has_its_reason() {
        let mut results = made_up(|_, _, _| 1.0);
        results.runs.retain(|run| run.round == 1);
        let sections = sections(&results);
        let rows = &section(&sections, "auto, one host against the other arms").tables[0].rows;
        assert!(rows.iter().all(|row| row[2].ends_with(" ?") && row[3] == "not decided"), "{rows:?}");
        let not_run = &section(&sections, "Not run").tables[0].rows;
        let of = |case: &str| not_run.iter().filter(|row| row[0] == case && !row[2].is_empty()).count();
        assert_eq!(["two guests", "one guest", "plenty"].map(of), [3, 3, 6], "{not_run:?}");
        let said = &section(&sections, "All guests together").paragraphs[0];
        assert!(said.starts_with("2 guests at once, because the host has fewer than 4 CPUs"), "{said}");
    }
}
