//! A table of results: one type and one text form for the reports of experiments and the figures of scenarios.
//!
//! ```text
//!   Table<String>   cells are text already: the reports of experiments
//!   Table<Cell>     cells keep value and unit, so that a program can read them: the figures of scenarios
//! ```

use std::fmt;

use comfy_table::{Cell as Drawn, CellAlignment, presets};
use serde::{Deserialize, Serialize};

use crate::statistics::Interval;

/// A table with a caption.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Table<C = Cell> {
    /// Caption of the table; it may be empty.
    pub caption: String,
    /// Columns with their headings and units.
    pub columns: Vec<Column>,
    /// Cells by row, in the order of the columns.
    pub rows: Vec<Vec<C>>,
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Column {
    /// Heading of the column.
    pub title: String,
    /// Whether the cells are numbers, which are aligned to the right.
    pub is_number: bool,
}

impl Column {
    /// A column of text.
    pub fn text(title: impl Into<String>) -> Column {
        Column { title: title.into(), is_number: false }
    }

    /// A column of numbers.
    pub fn number(title: impl Into<String>) -> Column {
        Column { title: title.into(), is_number: true }
    }
}

impl<C: fmt::Display> Table<C> {
    /// The table for a terminal, without its caption.
    pub fn text(&self) -> String {
        let cells = |texts: Vec<String>| -> Vec<Drawn> {
            let cell = |(text, column): (String, &Column)| {
                let alignment = if column.is_number { CellAlignment::Right } else { CellAlignment::Left };
                Drawn::new(text).set_alignment(alignment)
            };
            texts.into_iter().zip(&self.columns).map(cell).collect()
        };
        let mut table = comfy_table::Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(cells(self.columns.iter().map(|column| column.title.clone()).collect()));
        for row in &self.rows {
            table.add_row(cells(row.iter().map(C::to_string).collect()));
        }
        table.to_string()
    }
}

impl Table {
    /// A table without caption and rows: columns of text, then columns of numbers.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>, numbers: impl IntoIterator<Item = &'a str>) -> Table {
        let columns = texts.into_iter().map(Column::text).chain(numbers.into_iter().map(Column::number));
        Table { caption: String::new(), columns: columns.collect(), rows: Vec::new() }
    }

    /// The same table with a caption.
    #[must_use]
    pub fn captioned(self, caption: impl Into<String>) -> Table {
        Table { caption: caption.into(), ..self }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If the row does not have one cell for each column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.columns.len(), "one cell for each column: {cells:?}");
        self.rows.push(cells);
    }

    /// Reasons of the missing cells, each once.
    pub fn reasons(&self) -> Vec<&str> {
        let mut reasons: Vec<&str> = Vec::new();
        for cell in self.rows.iter().flatten() {
            if let Cell::Missing { reason } = cell
                && !reasons.contains(&reason.as_str())
            {
                reasons.push(reason);
            }
        }
        reasons
    }
}

/// A cell with its value. `decimals` is what people see of it; a program reads the whole value.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Cell {
    /// A word or a sentence.
    Text {
        /// Content of the cell.
        text: String,
    },
    /// A finite number.
    Number {
        /// Value in the unit of the cell.
        value: f64,
        /// Unit of the value; empty for a pure number.
        unit: String,
        /// Number of decimals that people see.
        decimals: usize,
    },
    /// A median with its 95 % interval.
    Interval {
        /// Median in the unit of the cell.
        median: f64,
        /// Lower end of the interval.
        low: f64,
        /// Upper end of the interval.
        high: f64,
        /// Unit of the three values; empty for a ratio.
        unit: String,
        /// Number of decimals that people see.
        decimals: usize,
    },
    /// Lowest and highest value of a sample.
    Range {
        /// Lowest value in the unit of the cell.
        lowest: f64,
        /// Highest value in the unit of the cell.
        highest: f64,
        /// Unit of both values; empty for a ratio.
        unit: String,
        /// Number of decimals that people see.
        decimals: usize,
    },
    /// A value that this run could not give.
    Missing {
        /// Why the value is missing.
        reason: String,
    },
}

impl Cell {
    /// A number; missing if it is not finite, because JSON has no such numbers.
    pub fn number(value: f64, decimals: usize, unit: &str) -> Cell {
        if value.is_finite() {
            Cell::Number { value, unit: unit.to_owned(), decimals }
        } else {
            Cell::missing("the value is not a finite number")
        }
    }

    /// A number of things.
    pub fn count(count: u64) -> Cell {
        Cell::number(count as f64, 0, "")
    }

    /// A median with its 95 % interval; missing if it is not finite.
    pub fn interval(Interval { median, low, high }: Interval, decimals: usize, unit: &str) -> Cell {
        if [median, low, high].iter().all(|value| value.is_finite()) {
            Cell::Interval { median, low, high, unit: unit.to_owned(), decimals }
        } else {
            Cell::missing("the interval is not finite")
        }
    }

    /// Lowest and highest value of a sample; missing if one is not finite.
    pub fn range(lowest: f64, highest: f64, decimals: usize, unit: &str) -> Cell {
        if lowest.is_finite() && highest.is_finite() {
            Cell::Range { lowest, highest, unit: unit.to_owned(), decimals }
        } else {
            Cell::missing("the range is not finite")
        }
    }

    /// A value that this run could not give, and why.
    pub fn missing(reason: impl Into<String>) -> Cell {
        Cell::Missing { reason: reason.into() }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text { text: text.to_owned() }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text { text }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self {
            Cell::Text { text } => return f.write_str(text),
            Cell::Missing { .. } => return f.write_str("-"),
            Cell::Number { value, unit, decimals } => {
                write!(f, "{value:.decimals$}")?;
                unit
            }
            Cell::Interval { median, low, high, unit, decimals } => {
                let interval = Interval { median: *median, low: *low, high: *high };
                write!(f, "{interval:.decimals$}")?;
                unit
            }
            Cell::Range { lowest, highest, unit, decimals } => {
                write!(f, "{lowest:.decimals$} - {highest:.decimals$}")?;
                unit
            }
        };
        if unit.is_empty() { Ok(()) } else { write!(f, " {unit}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_on_the_right_and_text_is_on_the_left() {
        let mut table = Table::new(["arm"], ["rate"]);
        table.row(["a".into(), Cell::number(12.345, 1, "M/s")]);
        table.row(["long".into(), Cell::missing("not run")]);
        let expected = "\
┌──────┬──────────┐
│ arm  ┆     rate │
╞══════╪══════════╡
│ a    ┆ 12.3 M/s │
│ long ┆        - │
└──────┴──────────┘";
        assert_eq!(table.text(), expected);
        assert_eq!(table.reasons(), ["not run"]);
    }

    #[test]
    fn cells_show_their_decimals_and_unit() {
        let interval = Interval { median: 1.5, low: 1.0, high: 2.25 };
        let shown = [
            Cell::count(1000),
            Cell::number(0.5, 2, ""),
            Cell::interval(interval, 2, "GiB/s"),
            Cell::range(1.0, 2.0, 1, "s"),
            Cell::number(f64::NAN, 2, "ms"),
            Cell::range(f64::INFINITY, 0.0, 2, "ms"),
        ];
        let expected = ["1000", "0.50", "1.50 (1.00 - 2.25) GiB/s", "1.0 - 2.0 s", "-", "-"];
        assert_eq!(shown.map(|cell| cell.to_string()), expected);
    }

    #[test]
    #[should_panic(expected = "one cell for each column")]
    fn a_row_with_too_few_cells_is_refused() {
        Table::new(["arm"], ["rate"]).row(["a".into()]);
    }
}
