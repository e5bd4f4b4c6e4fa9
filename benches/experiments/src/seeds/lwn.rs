//! "Huge pages part 5: a deeper look at TLBs and costs" (LWN, 2010): what a miss costs, what that says of STREAM, and what large pages gained.

use serde::Deserialize;

use super::{number, rows};

/// A function of STREAM.
#[derive(Clone, Debug, Deserialize)]
pub struct Stream {
    /// `base pages` or `huge pages (16MB)`.
    pub pages: String,
    /// `Copy`.
    pub function: String,
    /// 10^6 bytes a second.
    #[serde(rename = "rate_MBps")]
    pub rate_mbps: f64,
}

/// A number of the worked example.
#[derive(Clone, Debug, Deserialize)]
pub struct Worked {
    /// Part of the example.
    pub calculation: String,
    /// What it is.
    pub quantity: String,
    /// As printed.
    pub value: String,
    /// Its unit.
    pub unit: String,
}

#[derive(Deserialize)]
struct Calibrator {
    machine: String,
    row: String,
    cycles: f64,
    ns: Option<f64>,
}

/// What a miss was found to cost on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct MissCost {
    /// The machine.
    pub machine: String,
    /// In cycles.
    pub cycles: f64,
    /// In nanoseconds, where it was printed.
    pub ns: Option<f64>,
}

/// STREAM on both page sizes.
pub fn stream() -> Vec<Stream> {
    rows(include_str!("../../../data/seeds/lwn_stream.csv"))
}

/// The rate of a function on base and on large pages.
pub fn stream_rates(function: &str) -> Option<[f64; 2]> {
    let rows = stream();
    let of = |is_base: bool| {
        let row = rows.iter().find(|row| row.function == function && (row.pages == "base pages") == is_base)?;
        Some(row.rate_mbps)
    };
    Some([of(true)?, of(false)?])
}

/// All numbers of the example.
pub fn worked_numbers() -> Vec<Worked> {
    rows(include_str!("../../../data/seeds/lwn_worked_numbers.csv"))
}

/// One of them.
pub fn worked(calculation: &str, quantity: &str) -> Option<f64> {
    let row = worked_numbers().into_iter().find(|row| row.calculation == calculation && row.quantity == quantity)?;
    number(&row.value)
}

/// The results of the calibrator, machine by machine.
pub fn miss_costs() -> Vec<MissCost> {
    let samples: Vec<Calibrator> = rows(include_str!("../../../data/seeds/lwn_calibrator.csv"));
    let results = samples.into_iter().filter(|sample| sample.row == "result");
    results.map(|Calibrator { machine, cycles, ns, .. }| MissCost { machine, cycles, ns }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worked_example_is_consistent() {
        let cycles = worked("tlb_miss_cost", "PageTableCycles").expect("printed");
        let misses = worked("tlb_miss_cost", "TLBMisses").expect("printed");
        let cost = worked("tlb_miss_cost", "TLBMissCost").expect("printed");
        assert!((cycles / misses - cost).abs() < 1.0);
        assert_eq!(worked("oprofile_example", "estimated dtlb misses"), Some(9_651_000.0));
    }

    #[test]
    fn the_costs_are_those_that_the_calibrator_ended_with() {
        assert_eq!(miss_costs()[0], MissCost { machine: "Intel Core Duo T2600".into(), cycles: 19.0, ns: Some(8.80) });
        assert_eq!(miss_costs()[4].ns, None);
        assert_eq!(stream_rates("Triad"), Some([3077.4167, 3604.6241]));
    }
}
