//! OpenMP programs on large pages, on an Opteron 270 and a Xeon: the numbers in the text, because
//! the figures have none.

use serde::Deserialize;

use super::{number, rows};

/// A number from a sentence of the text.
#[derive(Clone, Debug, Deserialize)]
pub struct Claim {
    /// Platform: `Opteron 270`, `Intel Xeon`, `both`, `assumed`.
    pub platform: String,
    /// Programs, separated by spaces; a remark may follow in brackets.
    pub app: String,
    /// Number of threads, if the text gives it.
    pub threads: Option<u32>,
    /// Quantity: `performance improvement %`, `DTLB misses reduced by factor`, and others.
    pub metric: String,
    /// Value in words or digits: a number, `10 or more`, `2-3`, `no significant`.
    pub value: String,
}

/// All claims of the text.
pub fn claims() -> Vec<Claim> {
    rows(include_str!("../../../data/published/openmp_claims.csv"))
}

/// Improvement of a program by large pages on the Opteron in percent, or in words if the text gives no number.
pub fn improvement(program: &str) -> Option<Claim> {
    let is_it = |claim: &Claim| {
        claim.metric.starts_with("performance improvement") && claim.platform != "Intel Xeon" && claim.app == program
    };
    claims().into_iter().find(is_it)
}

/// Factor by which large pages reduced the program's misses on the Opteron.
pub fn fall_of_misses(program: &str) -> Option<String> {
    let is_it = |claim: &Claim| {
        claim.metric == "DTLB misses reduced by factor" && claim.app.split(' ').any(|one| one == program)
    };
    claims().into_iter().find(is_it).map(|claim| claim.value)
}

/// Memory of a program.
#[derive(Clone, Debug, Deserialize)]
struct Footprint {
    app: String,
    data: String,
}

/// Data of a program of class B, in MiB.
pub fn data_mib(program: &str) -> Option<f64> {
    let row = footprints().into_iter().find(|row| row.app == program)?;
    let (digits, unit) = row.data.split_at(row.data.len().checked_sub(1)?);
    let mib = match unit {
        "M" => 1.0,
        "G" => 1024.0,
        _ => return None,
    };
    Some(number(digits)? * mib)
}

fn footprints() -> Vec<Footprint> {
    rows(include_str!("../../../data/published/openmp_footprint_table2.csv"))
}

impl Claim {
    /// Number of the claim, or `None` if it is in words.
    pub fn number(&self) -> Option<f64> {
        number(&self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_found_by_program() {
        assert_eq!(improvement("SP").and_then(|claim| claim.number()), Some(20.0), "the Opteron's, not the Xeon's 13");
        let bt = improvement("BT").expect("the claim exists");
        assert_eq!((bt.number(), bt.value.as_str()), (None, "no significant"));
        assert_eq!(fall_of_misses("CG").as_deref(), Some("10 or more"));
        assert_eq!(fall_of_misses("FT").as_deref(), Some("2-3"));
        assert_eq!(fall_of_misses("EP"), None);
    }

    #[test]
    fn every_footprint_is_a_number_of_mebibytes() {
        assert_eq!((data_mib("CG"), data_mib("FT"), data_mib("EP")), (Some(725.0), Some(2457.6), None));
        assert_eq!(footprints().iter().filter_map(|row| data_mib(&row.app)).count(), 5);
    }
}
