//! A report for a terminal. The caller writes it.

use std::fmt::Write as _;

use crate::report::Report;

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
            let _ = writeln!(out, "{}\n{}", grid.caption, grid.text());
        }
    }
    out
}
