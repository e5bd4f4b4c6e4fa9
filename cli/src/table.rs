//! The common style of tables.

use std::io::IsTerminal as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

/// A table in the common style, with numbers aligned right.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header.iter().copied());
    table
}

/// As [`table`], for columns of sentences. In a pipe or a file, which have no width, they are wrapped.
pub fn prose_table(header: &[&str]) -> Table {
    /// Width that a mail, a manual page and half of a wide terminal show.
    const COLUMNS: u16 = 100;
    let mut table = table(header);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(COLUMNS);
    }
    table
}

/// A cell that holds a number.
pub fn number(text: impl ToString) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}
