//! OpenMP programs on large pages, on an Opteron 270 and a Xeon: what the text says, since its figures have no numbers.

use serde::Deserialize;

use super::{number, rows};

/// A sentence's number.
#[derive(Clone, Debug, Deserialize)]
pub struct Claim {
    /// `Opteron 270`, `Intel Xeon`, `both`, `assumed`.
    pub platform: String,
    /// Programs, with a space between them; a remark may follow in brackets.
    pub app: String,
    /// Threads, if it says so.
    pub threads: Option<u32>,
    /// `performance improvement %`, `DTLB misses reduced by factor`, and others.
    pub metric: String,
    /// A number, `10 or more`, `2-3`, `no significant`.
    pub value: String,
}

/// All of them.
pub fn claims() -> Vec<Claim> {
    rows(include_str!("../../../data/seeds/openmp_claims.csv"))
}

/// By how many percent large pages made a program faster on the Opteron, in words where there is no number.
pub fn improvement(program: &str) -> Option<Claim> {
    let is_it = |claim: &Claim| {
        claim.metric.starts_with("performance improvement") && claim.platform != "Intel Xeon" && claim.app == program
    };
    claims().into_iter().find(is_it)
}

/// By which factor they let its misses fall there.
pub fn fall_of_misses(program: &str) -> Option<String> {
    let is_it = |claim: &Claim| {
        claim.metric == "DTLB misses reduced by factor" && claim.app.split(' ').any(|one| one == program)
    };
    claims().into_iter().find(is_it).map(|claim| claim.value)
}

impl Claim {
    /// Its number, if it is one.
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
        let bt = improvement("BT").expect("it is there");
        assert_eq!((bt.number(), bt.value.as_str()), (None, "no significant"));
        assert_eq!(fall_of_misses("CG").as_deref(), Some("10 or more"));
        assert_eq!(fall_of_misses("FT").as_deref(), Some("2-3"));
        assert_eq!(fall_of_misses("EP"), None);
    }
}
