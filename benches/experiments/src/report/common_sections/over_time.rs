//! Memory and speed over time: a picture per case, a line per arm. Each arm shows the round with its median figure.

use crate::definition::Arm;
use crate::metric::Metric;
use crate::report::agreement::agreement;
use crate::report::{Lines, MapPlot, Plot, Section};
use crate::results::{Measured, Results, Run, Sample};

/// The section; `None` if no run has data over time.
pub(super) fn section(results: &Results) -> Option<Section> {
    let mut section = Section { title: "Over time".into(), ..Section::default() };
    for case in results.experiment.cases.iter().map(|case| &case.name) {
        let coverage = lines(results, case, coverage);
        section.plots.extend(plot(coverage, "coverage", case, "guest RAM on large pages, %", Some(100.0)));
        let unit = "units of work per second";
        section.plots.extend(plot(lines(results, case, speed), "speed", case, unit, None));
    }
    if !section.plots.is_empty() {
        section.paragraphs.push(
            "Each line is one run: the round of its arm with the median figure. Time is counted from the start of \
             the timed part."
                .into(),
        );
    }
    maps(results, &mut section);
    (!section.plots.is_empty()).then_some(section)
}

/// Lines of the arms that have points.
fn lines(results: &Results, case: &str, points: fn(&[Sample]) -> Vec<(f64, f64)>) -> Vec<(String, Vec<(f64, f64)>)> {
    let line = |arm: &Arm| Some((arm.name.clone(), points(&middle(results, case, &arm.name)?.series)));
    results.experiment.arms.iter().filter_map(line).filter(|(_, points)| !points.is_empty()).collect()
}

fn plot(
    lines: Vec<(String, Vec<(f64, f64)>)>,
    name: &str,
    case: &str,
    y_axis: &str,
    y_max: Option<f64>,
) -> Option<Plot> {
    let title = if name == "coverage" { "Coverage" } else { "Speed" };
    (!lines.is_empty()).then(|| {
        Plot::Lines(Lines {
            name: format!("{name}-{case}"),
            caption: format!("{title} over time: {case}"),
            x_axis: "time since the start of the timed part, s".into(),
            y_axis: y_axis.into(),
            y_max,
            lines,
        })
    })
}

/// Run with the median figure, or the lower of the two middle ones. Without figures, the first run.
fn middle<'a>(results: &'a Results, case: &str, arm: &str) -> Option<&'a Measured> {
    let mut runs: Vec<&Measured> =
        results.runs_of(case, arm).filter_map(Run::measured).filter(|measured| !measured.series.is_empty()).collect();
    runs.sort_by(|a, b| figure(a).total_cmp(&figure(b)));
    runs.get(runs.len().saturating_sub(1) / 2).copied()
}

fn figure(measured: &Measured) -> f64 {
    measured.metrics.get(&Metric::Figure).copied().unwrap_or_default()
}

fn coverage(series: &[Sample]) -> Vec<(f64, f64)> {
    let share = |sample: &Sample| {
        let large = sample.huge_mib + sample.giant_mib;
        let all = sample.base_mib + large;
        (all > 0.0).then(|| (sample.at_s, 100.0 * large / all))
    };
    series.iter().filter_map(share).collect()
}

fn speed(series: &[Sample]) -> Vec<(f64, f64)> {
    series.iter().filter_map(|sample| Some((sample.at_s, sample.rate_per_s?))).collect()
}

/// A map of each cell that has one, and the difference between inferred mappings and KVM's counts.
fn maps(results: &Results, section: &mut Section) {
    let mut seen = Vec::new();
    for run in &results.runs {
        let Some(map) = run.measured().and_then(|measured| measured.map.as_ref()) else { continue };
        let (case, arm) = (&run.case, &run.arm);
        seen.extend(agreement(map).map(|agreement| (agreement.difference_max, format!("{case}, {arm}"))));
        section.plots.push(Plot::Map(MapPlot {
            name: format!("map-{case}-{arm}"),
            caption: format!("Guest RAM by window and time: {case}, {arm}, round {}", run.round),
            map: map.clone(),
        }));
    }
    if let Some((difference, cell)) = seen.iter().max_by_key(|(difference, _)| difference) {
        section.paragraphs.push(format!(
            "The page size of each window in the second level is inferred, since KVM counts only totals. Over all \
             maps and instants, the inferred number of 2 MiB windows and KVM's count of such mappings differ by at \
             most {difference} ({cell}). KVM maps a window when the guest touches it, so its count may be lower."
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn the_round_with_the_median_figure_is_shown() {
        let mut results = fixture::results();
        // Rounds of base: 10, 11, 12, … by the fixture; the fourth of seven is in the middle.
        let all: Vec<f64> = results.values("CG A", "base", Metric::Figure).iter().map(|(_, value)| *value).collect();
        let shown = figure(middle(&results, "CG A", "base").expect("the cell has runs"));
        assert_eq!(shown, wideleaf_measure::statistics::median(all));
        results.runs.retain(|run| run.round == 1);
        assert!(middle(&results, "CG A", "base").is_some());
        assert!(middle(&results, "CG A", "hugetlb-1g").is_none(), "absent");
    }

    #[test]
    fn memory_that_is_not_yet_backed_has_no_coverage() {
        let sample = |base_mib, huge_mib| Sample { base_mib, huge_mib, ..Sample::default() };
        assert_eq!(coverage(&[sample(0.0, 0.0), sample(3.0, 1.0)]), [(0.0, 25.0)]);
    }
}
