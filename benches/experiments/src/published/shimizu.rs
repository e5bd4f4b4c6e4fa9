//! Superpages in another kernel: average times with and without them, and the improvement in percent, on three kinds
//! of CPU and five kinds of page table.

use serde::Deserialize;

use super::rows;

/// Published times of a benchmark.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// Name of the benchmark: `NAS BT Class A`, `HPCC GUPS 2^25`, `ASCI Sweep3D 150`.
    pub benchmark: String,
    /// Average time without superpages in seconds.
    #[serde(rename = "avg_time_superpages_disabled_s")]
    pub disabled_s: f64,
    /// Average time with superpages in seconds.
    #[serde(rename = "avg_time_superpages_enabled_s")]
    pub enabled_s: f64,
    /// Saved share of the time without superpages in percent, as printed.
    pub percent_improvement: f64,
}

/// A kind of CPU and page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// x86-64 with four levels, the nearest to our machines.
    X86_64,
    /// i386 with 4 MiB pages.
    I386,
    /// i386 PAE with 2 MiB pages.
    I386Pae,
    /// ia64 with three levels.
    Ia64Three,
    /// ia64 with four levels.
    Ia64Four,
}

impl Table {
    /// All tables, in the order of our columns.
    pub const ALL: [Table; 5] = [Table::X86_64, Table::I386, Table::I386Pae, Table::Ia64Three, Table::Ia64Four];

    /// Title of the table's column.
    pub const fn title(self) -> &'static str {
        match self {
            Table::X86_64 => "x86-64",
            Table::I386 => "i386",
            Table::I386Pae => "i386 PAE",
            Table::Ia64Three => "ia64, 3 levels",
            Table::Ia64Four => "ia64, 4 levels",
        }
    }

    /// Rows of the table.
    pub fn rows(self) -> Vec<Row> {
        rows(match self {
            Table::X86_64 => include_str!("../../../data/published/shimizu_x86_64_4level.csv"),
            Table::I386 => include_str!("../../../data/published/shimizu_i386_2level.csv"),
            Table::I386Pae => include_str!("../../../data/published/shimizu_i386_3level_pae.csv"),
            Table::Ia64Three => include_str!("../../../data/published/shimizu_ia64_3level.csv"),
            Table::Ia64Four => include_str!("../../../data/published/shimizu_ia64_4level.csv"),
        })
    }

    /// Row for a case of our experiments.
    pub fn row(self, case: &str) -> Option<Row> {
        self.rows().into_iter().find(|row| row.case() == case)
    }
}

impl Row {
    /// Name of the case as in our experiments: `BT A`, `GUPS 2^25`, `Sweep3D 150`. (One table has `Sweep3D 15` with
    /// the time of 150.)
    pub fn case(&self) -> String {
        let short = ["NAS ", "HPCC ", "ASCI ", "Class "]
            .iter()
            .fold(self.benchmark.clone(), |name, part| name.replace(part, ""));
        if short == "Sweep3D 15" { "Sweep3D 150".into() } else { short }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_by_the_name_of_our_case_in_each_table() {
        for table in Table::ALL {
            for case in ["BT A", "IS B", "GUPS 2^26", "Sweep3D 150"] {
                assert!(table.row(case).is_some(), "{}: {case}", table.title());
            }
        }
        let cg = Table::X86_64.row("CG B").expect("the row exists");
        assert_eq!((cg.disabled_s, cg.enabled_s, cg.percent_improvement), (310.33, 168.02, 45.86));
    }
}
