//! Published measurements by other authors: their tables as printed (`benches/data/published/`; its README names the
//! known errors), with one row type per table.
//!
//! ```text
//!   benches/data/published/*.csv ── include_str! ──▶ rows ──▶ beside our figures, in the experiment of the same form
//! ```

use serde::de::DeserializeOwned;

pub mod a64fx;
pub mod freebsd;
pub mod lwn;
pub mod openmp;
pub mod shimizu;

/// Rows of a table of the program; an empty cell is `None`.
pub(crate) fn rows<T: DeserializeOwned>(table: &str) -> Vec<T> {
    let rows = csv::Reader::from_reader(table.as_bytes()).into_deserialize();
    rows.collect::<Result<_, _>>()
        .expect("the tables are part of the program, and a test reads them to their last rows")
}

/// A number with commas between thousands, or `None` for other text.
fn number(text: &str) -> Option<f64> {
    text.replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::definition::HostFacts;

    #[test]
    fn every_table_is_read_to_its_last_row() {
        assert_eq!([freebsd::npb().len(), freebsd::gups().len(), freebsd::sweep3d().len()], [39, 8, 4]);
        assert_eq!(shimizu::Table::ALL.map(|table| table.rows().len()), [14, 14, 14, 16, 16]);
        assert_eq!(openmp::claims().len(), 11);
        assert_eq!([a64fx::ratios().len(), a64fx::eos().len(), a64fx::hydro3d().len()], [14, 29, 29]);
        assert_eq!([lwn::stream().len(), lwn::worked_numbers().len(), lwn::miss_costs().len()], [8, 35, 5]);
    }

    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

    fn read(file: &str) -> String {
        std::fs::read_to_string(format!("{FOLDER}/{file}")).expect("the folder has it")
    }

    /// Rows of a file as the README names them: by these columns.
    fn named(file: &str, columns: &[usize]) -> Vec<String> {
        let table = read(file);
        let records = csv::Reader::from_reader(table.as_bytes()).into_records();
        let name = |record: csv::StringRecord| columns.iter().map(|n| &record[*n]).collect::<Vec<_>>().join(", ");
        records.map(|record| name(record.expect("a row"))).collect()
    }

    #[test]
    fn every_row_of_every_file_is_a_case_or_has_its_place_or_reason_in_the_readme() {
        let readme = read("README.md");
        let part = readme.split_once("\n## Every row").expect("a section").1;
        let lines: Vec<&str> = part.lines().take_while(|line| !line.starts_with("## ")).collect();
        let places = |file: &str| -> Vec<&str> {
            let of = lines.iter().filter(|line| line.split(" | ").next().is_some_and(|head| head.contains(file)));
            of.copied().collect()
        };
        let cases = |experiment: &str| -> Vec<String> {
            let known = by_name(experiment).expect("it is in the catalogue");
            known.define(&HostFacts::of_a_test()).cases.into_iter().map(|case| case.name).collect()
        };
        let of_cases = [
            ("freebsd", freebsd::runs().into_iter().map(|run| run.case).collect::<Vec<_>>()),
            ("shimizu", shimizu::Table::ALL.iter().flat_map(|of| of.rows()).map(|row| row.case()).collect()),
        ];
        for (experiment, rows) in of_cases {
            let cases = cases(experiment);
            assert!(rows.iter().all(|row| cases.contains(row)), "{experiment}: {rows:?}");
        }
        let mut files: Vec<String> = std::fs::read_dir(FOLDER)
            .expect("the folder is there")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("ASCII"))
            .filter(|name| name.ends_with(".csv"))
            .collect();
        files.sort_unstable();
        assert_eq!(files.len(), 17);
        for file in &files {
            assert!(!places(file).is_empty(), "{file} has no line");
            let columns: &[usize] = match file.split('_').next() {
                Some("freebsd" | "shimizu") => continue,
                Some("openmp") if file.contains("claims") => &[0, 1, 5],
                Some("lwn") => &[0, 1],
                Some("vmitosis") => &[0, 1, 2, 3],
                _ => &[0],
            };
            for row in named(file, columns) {
                let is_there = places(file).iter().any(|line| line.contains(&format!("`{row}`")));
                assert!(is_there, "{file}: {row:?} is in no line of the README");
            }
        }
    }

    #[test]
    fn a_number_may_have_commas_and_words_are_not_a_number() {
        assert_eq!(number("9,651,000"), Some(9_651_000.0));
        assert_eq!(number("0.45"), Some(0.45));
        assert_eq!(number("no significant"), None);
    }
}
