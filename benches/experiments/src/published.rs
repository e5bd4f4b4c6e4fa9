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

    #[test]
    fn every_table_is_read_to_its_last_row() {
        assert_eq!([freebsd::npb().len(), freebsd::gups().len(), freebsd::sweep3d().len()], [39, 8, 4]);
        assert_eq!(shimizu::Table::ALL.map(|table| table.rows().len()), [14, 14, 14, 16, 16]);
        assert_eq!(openmp::claims().len(), 11);
        assert_eq!([a64fx::ratios().len(), a64fx::eos().len(), a64fx::hydro3d().len()], [14, 29, 29]);
        assert_eq!([lwn::stream().len(), lwn::worked_numbers().len(), lwn::miss_costs().len()], [8, 35, 5]);
    }

    #[test]
    fn a_number_may_have_commas_and_words_are_not_a_number() {
        assert_eq!(number("9,651,000"), Some(9_651_000.0));
        assert_eq!(number("0.45"), Some(0.45));
        assert_eq!(number("no significant"), None);
    }
}
