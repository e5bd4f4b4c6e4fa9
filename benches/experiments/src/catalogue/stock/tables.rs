//! The tables of `stock`: all figures of each case, and the situations that are left out.

use super::comparison::{reached, speed, time, times_sooner};
use super::{LEFT_OUT, THP};
use crate::definition::{Arm, Case};
use crate::disturbance::{DAEMON_CPU_S, FREE_HUGE_PAGES, KHUGEPAGED_CPU_S};
use crate::metric::{Better, Metric};
use crate::report::common_sections::{interval, number};
use crate::report::{BarGroup, Bars, Column, Grid, Plot, Section};
use crate::results::Results;
use crate::time_to_coverage::{LEGEND, in_words};
use wideleaf_measure::statistics::{Comparison, Equivalence, Verdict};

/// All own sections.
pub(super) fn sections(results: &Results) -> Vec<Section> {
    let cases = &results.experiment.cases;
    let what = format!(
        "Speed is the guests' own updates a second from the event to the end, compared with THP in the same round; of \
         ten guests, all together in the time in which all of them are at work. Coverage is that of the hot set (the \
         table of GUPS) by the host's page tables, looked at every 0.1 s. Times to 99 % count from the event; `>` is \
         a lower bound, where the guest ended before. {LEGEND} RAM is the guests' alone. Gaps are times that 128 \
         updates took, of the whole timed part, and include the event. Free huge pages are those of the host, for the \
         next guest. CPU is that of the whole run. {}",
        Verdict::LEGEND
    );
    let figures = Section {
        title: "Each situation".into(),
        paragraphs: vec![what],
        tables: cases.iter().map(|case| of_case(results, case)).collect(),
        plots: vec![Plot::Bars(speeds(results))],
    };
    let standing =
        Section { title: "wideleafd against THP".into(), tables: vec![standings(results)], ..Section::default() };
    let rows = LEFT_OUT.iter().map(|(what, why)| vec![(*what).to_owned(), (*why).to_owned()]).collect();
    let columns = vec![Column::text("what"), Column::text("why")];
    let left_out = Grid { caption: "Left out".into(), columns, rows };
    vec![standing, figures, Section { title: "Left out".into(), tables: vec![left_out], ..Section::default() }]
}

fn standings(results: &Results) -> Grid {
    let columns = vec![
        Column::text("case"),
        Column::number("speed, wideleafd : THP"),
        Column::text("wideleafd is"),
        Column::number("coverage sooner, times"),
    ];
    let row = |case: &Case| {
        let to = speed(results, &case.name)?;
        let bound = if reached(results, &case.name, THP).is_complete() { "" } else { "> " };
        let sooner = times_sooner(results, &case.name);
        let sooner = sooner.map_or_else(|| "-".to_owned(), |times| format!("{bound}{}", number(times)));
        Some(vec![case.name.clone(), to.to_string(), Equivalence::of(&to).in_words().into(), sooner])
    };
    let rows = results.experiment.cases.iter().filter_map(row).collect();
    Grid { caption: "Speed and coverage".into(), columns, rows }
}

fn of_case(results: &Results, case: &Case) -> Grid {
    let columns = vec![
        Column::text("arm"),
        Column::number(format!("speed, {}", case.unit)),
        Column::number("speed : THP's"),
        Column::number("to 99 %, s"),
        Column::number("coverage, %"),
        Column::number("RAM, MiB"),
        Column::number("gap p99, us"),
        Column::number("longest gap, ms"),
        Column::number("CPU of wideleafd, s"),
        Column::number("CPU of khugepaged, s"),
        Column::number("free huge pages"),
    ];
    let row = |arm: &Arm| {
        let of = |metric| values(results.values(&case.name, &arm.name, metric));
        let told = |name| interval(&values(results.told(&case.name, &arm.name, name)));
        let speeds = of(Metric::Figure);
        if speeds.is_empty() {
            return None;
        }
        let ratios = results.ratios(&case.name, &arm.name, THP, Metric::Figure);
        let ratio = Comparison::of(&ratios, Better::Higher).map_or("-".into(), |ratio| ratio.to_string());
        let longest: Vec<f64> = of(Metric::GapMaxUs).into_iter().map(|us| us / 1e3).collect();
        Some(vec![
            arm.name.clone(),
            interval(&speeds),
            if arm.name == THP { "1".into() } else { ratio },
            time_in_words(results, &case.name, &arm.name),
            interval(&of(Metric::CoveragePercent)),
            interval(&of(Metric::ResidentMib)),
            interval(&of(Metric::GapP99Us)),
            interval(&longest),
            told(DAEMON_CPU_S),
            told(KHUGEPAGED_CPU_S),
            told(FREE_HUGE_PAGES),
        ])
    };
    Grid { caption: case.name.clone(), columns, rows: results.experiment.arms.iter().filter_map(row).collect() }
}

fn values(by_round: Vec<(u32, f64)>) -> Vec<f64> {
    by_round.into_iter().map(|(_, value)| value).collect()
}

fn time_in_words(results: &Results, case: &str, arm: &str) -> String {
    let bound = time(results, case, arm).map_or_else(|| "-".into(), |time| format!("> {}", number(time)));
    in_words(&reached(results, case, arm), &bound)
}

/// Speed of each arm, as a ratio to THP.
fn speeds(results: &Results) -> Bars {
    let others: Vec<&Arm> = results.experiment.arms.iter().filter(|arm| arm.name != THP).collect();
    let compare = |case: &Case, arm: &Arm| {
        let to = Comparison::of(&results.ratios(&case.name, &arm.name, THP, Metric::Figure), Better::Higher)?;
        Some((to.interval.median, to.interval.low, to.interval.high))
    };
    let group =
        |case: &Case| BarGroup { name: case.name.clone(), bars: others.iter().map(|arm| compare(case, arm)).collect() };
    Bars {
        name: "speed".into(),
        caption: "Speed of the guests after the event, as a ratio to THP; median and 95 % interval".into(),
        axis: "ratio to THP".into(),
        reference: Some(1.0),
        series: others.iter().map(|arm| arm.name.clone()).collect(),
        groups: results.experiment.cases.iter().map(group).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{SITUATIONS, Stock, WIDELEAFD};
    use super::*;
    use crate::catalogue::Catalogued as _;
    use crate::catalogue::fixture::{host, results_of};
    use crate::disturbance::{TO_NEARLY_ALL_S, WATCHED_S};
    use crate::results::RunOutcome;

    /// Results of runs that were watched for that time; 99 % came after 0.25 s in those arms and rounds.
    fn results_with(watched_s: f64, came: impl Fn(&str, u32) -> bool) -> Results {
        let mut results = results_of(Stock.define(&host()), |_, _, _| Some((Metric::Figure, 1.0)));
        for run in &mut results.runs {
            let RunOutcome::Measured(measured) = &mut run.outcome else { continue };
            measured.told.insert(WATCHED_S.into(), watched_s);
            if came(&run.arm, run.round) {
                measured.told.insert(TO_NEARLY_ALL_S.into(), 0.25);
            }
        }
        results
    }

    #[test]
    fn a_time_that_never_came_is_shown_as_a_lower_bound() {
        let results = results_with(6.0, |arm, _| arm == WIDELEAFD);
        let sections = sections(&results);
        let postcopy = &sections[1].tables[2];
        assert_eq!(postcopy.caption, "postcopy");
        let cell = |arm: &str| postcopy.rows.iter().find(|row| row[0] == arm).map(|row| row[3].as_str());
        assert_eq!((cell(THP), cell(WIDELEAFD)), (Some("> 6.000"), Some("0.2500")));
        assert_eq!(sections[0].tables[0].rows[2][3], "> 24.00");
    }

    #[test]
    fn a_median_among_the_rounds_in_which_the_time_came_is_no_lower_bound() {
        // The rounds without it were watched for less time than others took to it.
        let results = results_with(0.2, |arm, round| round <= if arm == THP { 2 } else { 5 });
        let cell = |arm: &str| time_in_words(&results, "postcopy", arm);
        assert_eq!((cell(THP), cell(WIDELEAFD)), ("> 0.2000 (2 of 6)".into(), "0.2500 (5 of 6)".into()));
    }

    #[test]
    fn a_report_names_everything_that_is_left_out() {
        let results = results_of(Stock.define(&host()), |_, _, _| None);
        let sections = sections(&results);
        assert_eq!(sections[2].tables[0].rows.len(), LEFT_OUT.len());
        assert_eq!(sections[1].tables.len(), SITUATIONS.len());
    }
}
