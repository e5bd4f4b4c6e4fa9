//! A prediction as text for people: each line with its unit, and what bounds the gain.

use std::fmt::Write as _;

use comfy_table::Cell;
use wideleaf::table::{number, table};
use wideleaf_measure::environment::Environment;

use super::PredictReport;
use super::laps::LapOrder;
use super::prediction::Prediction;
use super::replay::Pace;

impl PredictReport {
    /// The report as text.
    pub fn to_table(&self) -> String {
        let Environment { cpus, kernel, load_1m, .. } = &self.environment;
        let mut out = format!("PMU: {}\n", self.pmu);
        write_prediction(&mut out, &self.prediction);
        let _ = writeln!(out, "measured on {cpus} x {}, kernel {kernel}, load {load_1m} at the start", self.cpu.name);
        out
    }
}

fn write_prediction(out: &mut String, prediction: &Prediction) {
    let Prediction { kernel, cmdline, iterations: (made, all), visits, replayed, .. } = prediction;
    let of_run = if *all == 0 { String::new() } else { format!(", {made} of its {all} iterations per run") };
    let _ = writeln!(out, "{kernel} {cmdline}, natively{of_run}");
    write_paces(out, prediction);
    let percent = |part: f64| format!("{:.1} %", part * 1e2);
    let Prediction { share_bound, is_bound, saved, rounds, .. } = prediction;
    let mut rows = table(&["time that 2 MiB pages save", ""]);
    let kind = if *is_bound { "at most" } else { "an estimate" };
    rows.add_row([Cell::new(format!("predicted, {kind}")), number(percent(*share_bound))]);
    let interval = format!("{} ({} - {})", percent(saved.median), percent(saved.low), percent(saved.high));
    let how = format!("measured: median of {rounds} rounds, interval of {:.1} %", saved.confidence * 1e2);
    rows.add_row([Cell::new(how), number(interval)]);
    let _ = writeln!(out, "{rows}");
    let claim = if *is_bound {
        "at most: no mix of the paces above that is as fast as the kernel saves more; prefetching counts only if the \
        kernel is faster than all paces that prefetch less"
    } else {
        "an estimate by the fastest of the paces above: the kernel is faster than all of them, so it is not a bound"
    };
    let _ = writeln!(
        out,
        "  {claim}. Assumed: page sizes change the time of\n  \
         its loads and stores only, none is faster than in a replay, and the {replayed} replayed of {visits} visits \
         represent all"
    );
    if *is_bound && saved.low > *share_bound {
        let _ = writeln!(
            out,
            "  more was saved than predicted at most: one assumption does not hold here, or the machine was not quiet"
        );
    }
    if let Some(walks) = &prediction.counted {
        let _ = writeln!(out, "  counted by the PMU in its measured part on 4 KiB pages: {walks}");
    }
    let (large, windows) = prediction.large_windows;
    let _ = writeln!(out, "  {large} of {windows} windows of its memory were large on the 2 MiB side");
}

/// The kernel's accesses without the kernel.
fn write_paces(out: &mut String, prediction: &Prediction) {
    let mut rows = table(&["ns per visit of a line, replayed", "on 4 KiB pages", "on 2 MiB pages"]);
    for Pace { way, base_ns, huge_ns } in &prediction.paces {
        let how = match way {
            LapOrder::Chains(1) => "one after another".to_owned(),
            LapOrder::Chains(chains) => format!("{chains} chains"),
            LapOrder::Free => "all at once".to_owned(),
            LapOrder::Ahead(visits) => format!("prefetched {visits} visits ahead"),
            LapOrder::Asked => "only prefetched".to_owned(),
        };
        rows.add_row([Cell::new(how), number(format!("{base_ns:.3}")), number(format!("{huge_ns:.3}"))]);
    }
    rows.add_row([Cell::new("in the kernel"), number(format!("{:.3}", prediction.pace_ns)), number("")]);
    let _ = writeln!(out, "{rows}");
}
