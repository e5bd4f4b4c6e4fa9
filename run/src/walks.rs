//! Page walks that the CPU counts while a guest or a native kernel runs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Page walks as the CPU counts them: in a guest, or in the threads of a native kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Walks {
    /// Cycles of the core.
    pub cycles: u64,
    /// Number of walks for data.
    pub walks: u64,
    /// Cycles of busy page-miss handlers, each on its own; `None` if the CPU does not count them.
    pub walk_cycles: Option<u64>,
    /// Those of them that the second level's tables took (EPT); `None` if the CPU does not count them apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_level_walk_cycles: Option<u64>,
}

impl Walks {
    /// Busy page-miss handlers on average: at most 1 for each that the core has.
    pub fn share(&self) -> Option<f64> {
        (self.cycles > 0).then_some(self.walk_cycles? as f64 / self.cycles as f64)
    }

    /// The second level's part of the cycles of walks; `None` also without such cycles.
    pub fn second_level_share(&self) -> Option<f64> {
        let all = self.walk_cycles.filter(|cycles| *cycles > 0)?;
        Some(self.second_level_walk_cycles? as f64 / all as f64)
    }
}

impl fmt::Display for Walks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} walks, ", self.walks)?;
        match self.share() {
            None => write!(f, "cycles are not counted on this CPU")?,
            Some(share) => write!(f, "{:.1} % of its cycles (up to 100 % for each page-miss handler)", 100.0 * share)?,
        }
        let of_second = self.second_level_share();
        of_second.map_or(Ok(()), |share| write!(f, "; of these {:.1} % in the second level's tables", 100.0 * share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_level_is_a_part_of_the_walks_and_is_told_only_where_it_is_counted() {
        let both = Walks { cycles: 1_000, walks: 7, walk_cycles: Some(400), second_level_walk_cycles: Some(100) };
        assert_eq!((both.share(), both.second_level_share()), (Some(0.4), Some(0.25)));
        let told = both.to_string();
        assert!(told.starts_with("7 walks, 40.0 % of its cycles"), "{told}");
        assert!(told.ends_with("of these 25.0 % in the second level's tables"), "{told}");
        let one = Walks { second_level_walk_cycles: None, ..both };
        assert!(one.second_level_share().is_none() && !one.to_string().contains("second level"), "{one}");
        let idle = Walks { walk_cycles: Some(0), second_level_walk_cycles: Some(0), ..both };
        assert_eq!(idle.second_level_share(), None, "nothing was walked");
        let amd = Walks { walk_cycles: None, second_level_walk_cycles: None, ..both };
        assert_eq!(amd.to_string(), "7 walks, cycles are not counted on this CPU");
    }

    #[test]
    fn older_reports_are_read_and_a_cpu_without_the_count_adds_no_field() {
        let older = r#"{"cycles":9,"walks":3,"walk_cycles":null}"#;
        let walks: Walks = serde_json::from_str(older).expect("an older report's");
        assert_eq!(walks, Walks { cycles: 9, walks: 3, ..Walks::default() });
        assert_eq!(serde_json::to_string(&walks).expect("JSON"), older);
    }
}
