//! The tables of `restore`: the targets, the figures of each case, the snapshots, and what is left out.

use super::comparison::{bars, to_moved};
use super::full_speed::{is_restored, speeds, t99_by_round, t99s, told_if_restored};
use super::{ARMS, IN_QEMU, LEFT_OUT, MOVED, NEVER_SAVED};
use crate::definition::{Arm, Case};
use crate::metric::{Better, Metric};
use crate::report::common_sections::interval;
use crate::report::{BarGroup, Bars, Column, Grid, Plot, Section};
use crate::restoring::speeds::T99;
use crate::restoring::{
    CACHED_PERCENT, DISK_MIB, FILLED_S, FIRST_PROGRESS_S, HOT_MIB, HUGE_AT_FIRST_PERCENT, PAUSE_MS, READ_BYTES_PER_S,
    SAVE_ROUNDS, SAVE_S, STORED_MIB, WAIT_MAX_US, WAIT_P50_US, WAIT_P99_US,
};
use crate::results::{Results, Run};
use crate::time_to_coverage::{LEGEND, NOT_REACHED, in_words};
use wideleaf_measure::event_times::EventTimes;
use wideleaf_measure::statistics::{Comparison, Verdict, median_interval};

/// All own sections.
pub(super) fn sections(results: &Results) -> Vec<Section> {
    let cases = &results.experiment.cases;
    let what = format!(
        "Times count from the start of the process. T99 is the begin of the first progress interval of 99 % of the \
         steady speed that begins five intervals with a median of 99 %, after which no five fall lower than 99 %, or \
         than the lowest five of the steady halves of all rounds (`kept`). The steady speed is the median of the \
         intervals in the last half of the time; `>` is a lower bound, where a guest never came to it, or where its \
         steady speed is below half of that of the guest that was never saved: then it still waits for its pages, and \
         has no other number about T99 either. A ratio to a bound of `{MOVED}` is an upper bound. `first at 99 %` does \
         not look at what comes after: where it is far below T99, other programs of the machine slowed the guest down \
         in between, or the restore did; {LEGEND} Time lost is T99 without the time that the work done until then \
         takes at the steady speed. The guest's waits are those for the \
         restore's threads; a mapped file has none that it tells, and QEMU's guest does not run before all of it is \
         read. The hot set is looked at from outside every 50 ms. {}",
        Verdict::LEGEND
    );
    let figures = Section {
        title: "Each case".into(),
        paragraphs: vec![what],
        tables: cases.iter().map(|case| of_case(results, case)).collect(),
        plots: vec![Plot::Bars(pictured(results))],
    };
    let snapshots = "One snapshot serves all ways of a workload in a round, warm and cold. The files were read right \
                     before each run, from the page cache or from the disk, by one thread in pieces of 2 MiB: that \
                     bandwidth is part of the first target. The guests write as fast as they can, and may be paused \
                     for 10 s.";
    let rows = LEFT_OUT.iter().map(|(what, why)| vec![(*what).to_owned(), (*why).to_owned()]).collect();
    let left_out = Grid { caption: "Left out".into(), columns: vec![Column::text("what"), Column::text("why")], rows };
    let section = |title: &str, tables| Section { title: title.into(), tables, ..Section::default() };
    vec![
        section("Targets", vec![targets(results)]),
        figures,
        Section { paragraphs: vec![snapshots.into()], ..section("Snapshots", vec![saved(results)]) },
        section("Left out", vec![left_out]),
    ]
}

fn targets(results: &Results) -> Grid {
    let columns =
        vec![Column::text("target"), Column::number("value"), Column::text("limit"), Column::text("met or missed")];
    let row = |bar: wideleaf_measure::figures::Bar| {
        let met = if bar.is_met { "met" } else { "MISSED" };
        vec![bar.what.clone(), bar.value.to_string(), bar.limit.to_string(), met.to_owned()]
    };
    let cases = results.experiment.cases.iter();
    Grid {
        caption: "Targets of `moved`".into(),
        columns,
        rows: cases.flat_map(|case| bars(results, &case.name)).map(row).collect(),
    }
}

fn of_case(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number("T99, s"),
        Column::number("first at 99 %, s"),
        Column::number(format!("T99 : `{MOVED}`")),
        Column::number("lost, s"),
        Column::number("first progress, ms"),
        Column::number(format!("steady, {}", case.unit)),
        Column::number(format!("steady : {NEVER_SAVED}")),
        Column::number("kept, %"),
        Column::number("hot set huge when first at 99 %, %"),
        Column::number("the same at the end, %"),
        Column::number("wait p50, us"),
        Column::number("p99, us"),
        Column::number("longest, us"),
        Column::number("filled, s"),
    ];
    let row = |arm: &Arm| {
        let of = |name| values(&results.told(&case.name, &arm.name, name));
        let told = |name| interval(&of(name));
        let if_restored = |name| values(&told_if_restored(results, &case.name, &arm.name, name));
        let t99s: Vec<T99> =
            t99_by_round(results, &case.name, &arm.name).into_iter().filter_map(|(_, t99)| t99).collect();
        let of_t99 = |number: fn(&T99) -> f64| t99s.iter().map(number).collect::<Vec<_>>();
        let times = |factor: f64, of: Vec<f64>| interval(&of.iter().map(|value| value * factor).collect::<Vec<_>>());
        let speeds = values(&results.values(&case.name, &arm.name, Metric::Figure));
        if speeds.is_empty() {
            return None;
        }
        let compared = |ratios: &[f64], better| Comparison::of(ratios, better).map_or("-".into(), |to| to.to_string());
        let is_reference = |name: &str| arm.name == name;
        let ratio = to_moved(results, &case.name, &arm.name);
        let steady = results.ratios(&case.name, &arm.name, NEVER_SAVED, Metric::Figure);
        Some(vec![
            arm.name.clone(),
            t99_in_words(results, &case.name, &arm.name),
            firsts_in_words(&firsts(results, &case.name, &arm.name)),
            if is_reference(MOVED) { "1".into() } else { compared(&ratio, Better::Lower) },
            interval(&of_t99(|t99| t99.lost_s)),
            times(1e3, of(FIRST_PROGRESS_S)),
            interval(&speeds),
            if is_reference(NEVER_SAVED) { "1".into() } else { compared(&steady, Better::Higher) },
            times(100.0, of_t99(|t99| t99.kept)),
            interval(&if_restored(HUGE_AT_FIRST_PERCENT)),
            interval(&values(&results.values(&case.name, &arm.name, Metric::CoveragePercent))),
            told(WAIT_P50_US),
            told(WAIT_P99_US),
            told(WAIT_MAX_US),
            told(FILLED_S),
        ])
    };
    Grid { caption: case.name.clone(), columns, rows: results.experiment.arms.iter().filter_map(row).collect() }
}

fn values(by_round: &[(u32, f64)]) -> Vec<f64> {
    by_round.iter().map(|(_, value)| *value).collect()
}

/// T99 of an arm with its interval. `>` before a median of times of which one never came.
fn t99_in_words(results: &Results, case: &str, arm: &str) -> String {
    let times = t99s(results, case, arm);
    let bound = if times.iter().all(|(_, _, has_come)| *has_come) { "" } else { "> " };
    format!("{bound}{}", interval(&times.iter().map(|(_, time, _)| *time).collect::<Vec<_>>()))
}

/// Times at which an arm was first at its steady speed, if that is the speed of a restored guest.
fn firsts(results: &Results, case: &str, arm: &str) -> EventTimes {
    let first = |run: &Run| Some(speeds(run)?.first_s().filter(|_| is_restored(results, case, arm, run.round)));
    results.runs_of(case, arm).filter_map(first).collect()
}

/// With its interval if all rounds came to it.
fn firsts_in_words(times: &EventTimes) -> String {
    if times.is_complete() { interval(times.reached()) } else { in_words(times, NOT_REACHED) }
}

/// The snapshots of both programs, by case.
fn saved(results: &Results) -> Grid {
    let columns = vec![
        Column::text("case"),
        Column::text("by"),
        Column::number("hot set, MiB"),
        Column::number("not zero, MiB"),
        Column::number("files, MiB"),
        Column::number("pause, ms"),
        Column::number("rounds"),
        Column::number("save, s"),
        Column::number("in the page cache, %"),
        Column::number("read, GiB/s"),
    ];
    let row = |case: &Case, arm: &str| {
        let of = |name| values(&results.told(&case.name, arm, name));
        let read: Vec<f64> = of(READ_BYTES_PER_S).into_iter().map(|speed| speed / f64::from(1 << 30)).collect();
        let names = [HOT_MIB, STORED_MIB, DISK_MIB, PAUSE_MS, SAVE_ROUNDS, SAVE_S, CACHED_PERCENT];
        let cells = names.map(|name| interval(&of(name)));
        (!read.is_empty())
            .then(|| [vec![case.name.clone(), arm.to_owned()], cells.into(), vec![interval(&read)]].concat())
    };
    let cases = results.experiment.cases.iter();
    let rows = cases.flat_map(|case| [MOVED, IN_QEMU].into_iter().filter_map(move |arm| row(case, arm))).collect();
    Grid { caption: "Files".into(), columns, rows }
}

/// T99 of each arm that is restored.
fn pictured(results: &Results) -> Bars {
    let restored = ARMS.iter().map(|(_, arm, _)| *arm).filter(|arm| *arm != NEVER_SAVED);
    let restored: Vec<&str> = restored.collect();
    let bar = |case: &Case, arm: &str| {
        let times: Vec<f64> = t99s(results, &case.name, arm).into_iter().map(|(_, time, _)| time).collect();
        let interval = (!times.is_empty()).then(|| median_interval(&times))?;
        Some((interval.median, interval.low, interval.high))
    };
    let group =
        |case: &Case| BarGroup { name: case.name.clone(), bars: restored.iter().map(|arm| bar(case, arm)).collect() };
    Bars {
        name: "t99".into(),
        caption: "T99: time until a restored guest is at 99 % of its steady speed; median and 95 % interval".into(),
        axis: "seconds since the start of the process".into(),
        reference: None,
        series: restored.iter().map(|arm| (*arm).to_owned()).collect(),
        groups: results.experiment.cases.iter().map(group).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::come_to_full_speed;
    use super::super::{COPIES, Restore};
    use super::*;
    use crate::catalogue::Catalogued as _;
    use crate::catalogue::fixture::{host, results_of};
    use crate::results::RunOutcome;

    fn results(t99: impl Fn(&str) -> Option<f64>) -> Results {
        let mut results = results_of(Restore.define(&host()), |_, _, _| Some((Metric::Figure, 1.0)));
        for run in &mut results.runs {
            let time = t99(&run.arm);
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            measured.told.insert(READ_BYTES_PER_S.into(), f64::from(1_u32 << 31));
            come_to_full_speed(measured, 8.0, time);
        }
        results
    }

    #[test]
    fn a_time_that_never_came_is_shown_as_a_lower_bound() {
        let sections = sections(&results(|arm| (arm == MOVED).then_some(0.5)));
        let table = &sections[1].tables[0];
        let cell =
            |arm: &str, column: usize| table.rows.iter().find(|row| row[0] == arm).map(|row| row[column].clone());
        assert!(cell(COPIES, 1).is_some_and(|text| text.starts_with("> 8.000")), "{:?}", cell(COPIES, 1));
        assert!(cell(MOVED, 1).is_some_and(|text| text.starts_with("0.5000")), "{:?}", cell(MOVED, 1));
        assert!(cell(COPIES, 3).is_some_and(|text| text.starts_with("16.")), "{:?}", cell(COPIES, 3));
    }

    #[test]
    fn a_report_has_its_targets_its_files_a_picture_and_everything_that_is_left_out() {
        let sections = sections(&results(|_| Some(0.5)));
        let titles: Vec<&str> = sections.iter().map(|section| section.title.as_str()).collect();
        assert_eq!(titles, ["Targets", "Each case", "Snapshots", "Left out"]);
        assert!(sections[0].tables[0].rows.iter().any(|row| row[3] == "MISSED"), "as soon as `4k copies` misses 5");
        assert_eq!(sections[2].tables[0].rows.len(), 12, "both programs, six cases");
        assert!(sections[2].tables[0].rows[0][9].starts_with("2.000"));
        assert_eq!((sections[3].tables[0].rows.len(), sections[1].plots.len()), (LEFT_OUT.len(), 1));
        let Plot::Bars(bars) = &sections[1].plots[0] else { panic!("bars") };
        let missing = |group: usize| bars.groups[group].bars.iter().filter(|bar| bar.is_none()).count();
        assert_eq!((missing(0), missing(1), bars.series.len()), (1, 0, 6), "`moved, cached` has no warm case");
    }
}
