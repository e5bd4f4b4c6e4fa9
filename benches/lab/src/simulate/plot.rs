//! Plots of coverage, bloat and misses over time: `--plot FILE.svg`.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{HistoryPoint, TracedReport, TracedResult};

/// Size for three charts above each other.
const SIZE: (u32, u32) = (1000, 1050);

const MIB: f64 = (1 << 20) as f64;

/// Curve of one simulation: times and values.
type Curve = Vec<(f64, f64)>;

/// The picture, with one colour per simulation. Values that do not exist (coverage of fixed pages) are left out.
pub fn svg(report: &TracedReport) -> String {
    let mut picture = String::new();
    {
        let root = SVGBackend::with_string(&mut picture, SIZE).into_drawing_area();
        draw(&root, report).expect("a picture in memory can be drawn on");
    }
    picture
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawingError = Box<dyn std::error::Error>;

fn draw(root: &Area<'_>, report: &TracedReport) -> Result<(), DrawingError> {
    root.fill(&WHITE)?;
    let charts = root.split_evenly((3, 1));
    let curves = |of: &dyn Fn(&[HistoryPoint]) -> Curve| -> Vec<(&TracedResult, Curve)> {
        report.results.iter().map(|result| (result, of(&result.history))).collect()
    };
    chart(
        &charts[0],
        "host coverage 2m, %",
        &curves(&|points| values(points, |p| Some(p.host_coverage_2m_bp? as f64 / 100.0))),
    )?;
    chart(&charts[1], "bloat, MiB", &curves(&|points| values(points, |p| Some(p.bloat_bytes? as f64 / MIB))))?;
    chart(&charts[2], "TLB misses per 1000 accesses", &curves(&misses))?;
    root.present()?;
    Ok(())
}

fn values(points: &[HistoryPoint], value: impl Fn(&HistoryPoint) -> Option<f64>) -> Curve {
    points.iter().filter_map(|point| Some((point.at_s, value(point)?))).collect()
}

/// Misses between two points, drawn at the later one.
fn misses(points: &[HistoryPoint]) -> Curve {
    let start = HistoryPoint { at_s: 0.0, accesses: 0, misses: 0, host_coverage_2m_bp: None, bloat_bytes: None };
    let before = std::iter::once(&start).chain(points);
    let pairs = before.zip(points).filter(|(before, after)| after.accesses > before.accesses);
    let rate = |(before, after): (&HistoryPoint, &HistoryPoint)| {
        let misses = (after.misses - before.misses) as f64;
        (after.at_s, 1000.0 * misses / (after.accesses - before.accesses) as f64)
    };
    pairs.map(rate).collect()
}

fn chart(area: &Area<'_>, title: &str, curves: &[(&TracedResult, Curve)]) -> Result<(), DrawingError> {
    let points = || curves.iter().flat_map(|(_, curve)| curve);
    let most = |value: fn(&(f64, f64)) -> f64| points().map(value).fold(0.0, f64::max);
    let (time, value) = (most(|point| point.0), most(|point| point.1));
    // An axis needs a length, even if all values are zero.
    let end = |most: f64| if most > 0.0 { most * 1.05 } else { 1.0 };
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end(time), 0.0..end(value))?;
    chart.configure_mesh().x_desc("simulated time, s").light_line_style(WHITE).draw()?;
    for (number, (result, curve)) in curves.iter().enumerate().filter(|(_, (_, curve))| !curve.is_empty()) {
        let color = Palette99::pick(number).stroke_width(2);
        let drawn = chart.draw_series(LineSeries::new(curve.iter().copied(), color))?;
        drawn
            .label(format!("{}, {}", result.machine, result.pages))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
    }
    if points().next().is_some() {
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw()?;
    }
    Ok(())
}
