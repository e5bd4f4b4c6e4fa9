//! Runs `wideleaf-lab tlbcost` or `wideleaf-lab predict` in a process of its own: the cost of a miss, or the predicted
//! and the measured gain of large pages for a kernel. A result without a measurement is a failure.

use std::time::Duration;

use serde::Deserialize;
use wideleaf::child;
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::Measured;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

/// The part of its report that is used.
#[derive(Debug, Deserialize)]
struct TlbCostResult {
    #[serde(default)]
    cells: Vec<Cost>,
    #[serde(default)]
    prediction: Option<Prediction>,
}

/// A measuring place and a pair of page sizes.
#[derive(Debug, Deserialize)]
struct Cost {
    agreed: bool,
    levels: Vec<Level>,
    walk_ticks: Option<MedianOnly>,
    walk_ns: Option<MedianOnly>,
    skipped: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Level {
    level: u32,
    entries: u64,
    miss_ticks: MedianOnly,
    miss_ns: MedianOnly,
}

#[derive(Debug, Deserialize)]
struct MedianOnly {
    median: f64,
}

#[derive(Debug, Deserialize)]
struct Prediction {
    share_bound: f64,
    is_bound: bool,
    pace_ns: f64,
    saved: Saved,
}

#[derive(Debug, Deserialize)]
struct Saved {
    median: f64,
    low: f64,
    high: f64,
}

/// Runs it. A result without a measurement is a failure.
pub(super) fn run(arguments: &[String], timeout: Duration, interrupts: &Interrupts) -> Result<Measured, Failure> {
    measured(&child::json(arguments, timeout, interrupts)?)
}

fn measured(result: &TlbCostResult) -> Result<Measured, Failure> {
    match (&result.prediction, result.cells.as_slice()) {
        (Some(prediction), _) => Ok(of_prediction(prediction)),
        (None, [cost]) => of_cost(cost),
        (None, cells) => Err(Failure::Input(format!(
            "cannot use a report of tlbcost with {} pairs of page sizes: it must have one; add --native --host-page",
            cells.len()
        ))),
    }
}

fn of_cost(cost: &Cost) -> Result<Measured, Failure> {
    if let Some(why) = &cost.skipped {
        return Err(Failure::Host(why.clone()));
    }
    // The default footprint of the chase shows one level if that level is large.
    let deepest = cost.levels.last();
    let (ticks, ns) = (
        cost.walk_ticks.as_ref().or(deepest.map(|level| &level.miss_ticks)),
        cost.walk_ns.as_ref().or(deepest.map(|level| &level.miss_ns)),
    );
    if !cost.agreed {
        let why = "no three runs in a row agreed on the cost of a miss: repeat it on a quiet machine";
        return Err(Failure::Host(why.into()));
    }
    let Some(ticks) = ticks else {
        let note = "no load of the chase was slowed by its pages: the TLB reach exceeds the footprint";
        return Ok(Measured { notes: vec![note.into()], ..Measured::default() });
    };
    let mut measured = Measured { metrics: [(Metric::WalkCycles, ticks.median)].into(), ..Measured::default() };
    measured.told.extend(ns.map(|ns| ("walk_ns".to_owned(), ns.median)));
    for Level { level, entries, .. } in &cost.levels {
        measured.told.insert(format!("entries_{level}"), *entries as f64);
    }
    if let (None, Some(deepest)) = (&cost.walk_ticks, deepest) {
        measured.notes.push(format!("the footprint showed only level {} of the TLB: its misses", deepest.level));
    }
    Ok(measured)
}

fn of_prediction(prediction: &Prediction) -> Measured {
    let Prediction { share_bound, is_bound, pace_ns, saved } = prediction;
    let told = [
        ("saved_low_percent", saved.low * 100.0),
        ("saved_high_percent", saved.high * 100.0),
        ("is_bound", f64::from(u8::from(*is_bound))),
        ("pace_ns", *pace_ns),
    ];
    let metrics = [(Metric::PredictedPercent, share_bound * 100.0), (Metric::SavedPercent, saved.median * 100.0)];
    Measured {
        metrics: metrics.into(),
        told: told.map(|(name, value)| (name.to_owned(), value)).into(),
        ..Measured::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<Measured, String> {
        let told = serde_json::from_str(json).map_err(|error| error.to_string())?;
        measured(&told).map_err(|failure| failure.to_string())
    }

    const SPREAD: &str = r#"{"median": 31.0, "lowest": 30.0, "highest": 33.0}"#;

    #[test]
    fn the_cost_is_that_of_a_miss_in_all_levels() {
        let level = format!(r#"{{"level": 1, "entries": 64, "miss_ticks": {SPREAD}, "miss_ns": {SPREAD}}}"#);
        let of_walk = |walk: &str| {
            of(&format!(
                r#"{{"cells": [{{"agreed": true, "levels": [{level}], "walk_ticks": {walk}, "walk_ns": {walk},
                     "skipped": null}}], "prediction": null}}"#
            ))
        };
        let all = of_walk(r#"{"median": 50.0}"#).expect("a cost");
        assert_eq!((all.metrics[&Metric::WalkCycles], all.told["entries_1"], all.notes.len()), (50.0, 64.0, 0));
        let first = of_walk("null").expect("a cost of the one level");
        assert_eq!((first.metrics[&Metric::WalkCycles], first.notes.len()), (31.0, 1));
    }

    #[test]
    fn shares_become_percent() {
        let json = r#"{"cells": [], "prediction": {"share_bound": 0.25, "is_bound": false, "pace_ns": 3.5,
            "saved": {"median": 0.125, "low": -0.125, "high": 0.25, "confidence": 0.96}}}"#;
        let measured = of(json).expect("a prediction");
        assert_eq!(measured.metrics[&Metric::PredictedPercent], 25.0);
        assert_eq!(measured.metrics[&Metric::SavedPercent], 12.5);
        assert_eq!([measured.told["saved_low_percent"], measured.told["is_bound"]], [-12.5, 0.0]);
    }

    #[test]
    fn a_report_without_a_measurement_is_a_failure_with_the_reason() {
        let cost = |agreed: bool, skipped: &str| {
            of(&format!(
                r#"{{"cells": [{{"agreed": {agreed}, "levels": [], "walk_ticks": null, "walk_ns": null,
                     "skipped": {skipped}}}], "prediction": null}}"#
            ))
        };
        assert_eq!(cost(false, r#""no free giant page""#), Err("no free giant page".into()));
        assert!(cost(false, "null").is_err_and(|why| why.starts_with("no three runs in a row agreed")));
        let none = cost(true, "null").expect("a result without a visible miss is an answer");
        assert_eq!((none.metrics.len(), none.notes.len()), (0, 1));
        assert!(
            of(r#"{"cells": [], "prediction": null}"#).is_err_and(|why| why.contains("with 0 pairs of page sizes"))
        );
        assert!(of(r#"{"cells": 3}"#).is_err());
        assert!(of("").is_err());
    }
}
