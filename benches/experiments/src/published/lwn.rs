//! "Huge pages part 5: a deeper look at TLBs and costs" (LWN, 2010): the cost of a miss, the resulting prediction for
//! STREAM, and the gain of large pages.

use serde::Deserialize;

use super::{number, rows};

/// A function of STREAM.
#[derive(Clone, Debug, Deserialize)]
pub struct Stream {
    /// Page size: `base pages` or `huge pages (16MB)`.
    pub pages: String,
    /// Name of the function: `Copy`.
    pub function: String,
    /// Rate in 10^6 bytes per second.
    #[serde(rename = "rate_MBps")]
    pub rate_mbps: f64,
}

/// A number of the worked example.
#[derive(Clone, Debug, Deserialize)]
pub struct WorkedNumber {
    /// Part of the example that has the number.
    pub calculation: String,
    /// Name of the quantity.
    pub quantity: String,
    /// Value as printed.
    pub value: String,
    /// Unit of the value.
    pub unit: String,
}

#[derive(Deserialize)]
struct Calibrator {
    machine: String,
    row: String,
    cycles: f64,
    ns: Option<f64>,
}

/// Cost of a TLB miss on a machine, as published.
#[derive(Clone, Debug, PartialEq)]
pub struct MissCost {
    /// Name of the machine.
    pub machine: String,
    /// Cost in cycles.
    pub cycles: f64,
    /// Cost in nanoseconds, if printed.
    pub ns: Option<f64>,
}

/// Published rates of STREAM on both page sizes.
pub fn stream() -> Vec<Stream> {
    rows(include_str!("../../../data/published/lwn_stream.csv"))
}

/// Rates of a function on base pages and on large pages.
pub fn stream_rates(function: &str) -> Option<[f64; 2]> {
    let rows = stream();
    let of = |is_base: bool| {
        let row = rows.iter().find(|row| row.function == function && (row.pages == "base pages") == is_base)?;
        Some(row.rate_mbps)
    };
    Some([of(true)?, of(false)?])
}

/// All numbers of the worked example.
pub fn worked_numbers() -> Vec<WorkedNumber> {
    rows(include_str!("../../../data/published/lwn_worked_numbers.csv"))
}

/// One number of the worked example.
pub fn worked(calculation: &str, quantity: &str) -> Option<f64> {
    let row = worked_numbers().into_iter().find(|row| row.calculation == calculation && row.quantity == quantity)?;
    number(&row.value)
}

/// Results of the calibrator, one per machine.
pub fn miss_costs() -> Vec<MissCost> {
    let samples: Vec<Calibrator> = rows(include_str!("../../../data/published/lwn_calibrator.csv"));
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
    fn the_costs_are_the_results_of_the_calibrator() {
        assert_eq!(miss_costs()[0], MissCost { machine: "Intel Core Duo T2600".into(), cycles: 19.0, ns: Some(8.80) });
        assert_eq!(miss_costs()[4].ns, None);
        assert_eq!(stream_rates("Triad"), Some([3077.4167, 3604.6241]));
    }
}
