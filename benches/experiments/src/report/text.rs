//! A report for a terminal.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::report::{Column, Grid, Report};

/// The report as text, without pictures.
pub fn text(report: &Report) -> String {
    let mut out = format!("{}\n", report.title);
    for paragraph in &report.lead {
        let _ = writeln!(out, "{paragraph}");
    }
    for section in &report.sections {
        let _ = writeln!(out, "\n{}", section.title);
        for paragraph in &section.paragraphs {
            let _ = writeln!(out, "{paragraph}");
        }
        for grid in &section.tables {
            let _ = writeln!(out, "{}\n{}", grid.caption, table(grid));
        }
    }
    out
}

fn table(grid: &Grid) -> Table {
    let cells = |texts: &mut dyn Iterator<Item = &String>| -> Vec<Cell> {
        let cell = |(text, column): (&String, &Column)| {
            let alignment = if column.is_number { CellAlignment::Right } else { CellAlignment::Left };
            Cell::new(text).set_alignment(alignment)
        };
        texts.zip(&grid.columns).map(cell).collect()
    };
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(cells(&mut grid.columns.iter().map(|column| &column.title)));
    for row in &grid.rows {
        table.add_row(cells(&mut row.iter()));
    }
    table
}
