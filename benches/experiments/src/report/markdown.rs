//! A report as Markdown for papers and issues, with tables in GitHub's form (GitHub
//! Flavored Markdown, "Tables (extension)").

use std::fmt::Write as _;

use crate::report::{Column, Grid, Report, is_simulated};

/// The report as Markdown. Its pictures are links into `pictures`, the folder of the picture files as seen from the
/// text. Without a folder, only the captions are included.
pub fn markdown(report: &Report, pictures: Option<&str>) -> String {
    let mut out = format!("# {}\n", escaped(&report.title));
    paragraphs(&mut out, &report.lead);
    let mut files = report.pictures().into_iter();
    for section in &report.sections {
        let _ = writeln!(out, "\n## {}", escaped(&section.title));
        paragraphs(&mut out, &section.paragraphs);
        section.tables.iter().for_each(|grid| table(&mut out, grid));
        for (file, plot) in files.by_ref().take(section.plots.len()) {
            let caption = escaped(plot.caption());
            let _ = match pictures {
                Some(folder) => writeln!(out, "\n![{caption}](<{folder}/{file}>)"),
                None => writeln!(out, "\nPicture (in the HTML report, or with --svg): {caption}"),
            };
        }
    }
    out
}

fn paragraphs(out: &mut String, paragraphs: &[String]) {
    for paragraph in paragraphs {
        let _ = writeln!(out, "\n{}", escaped(paragraph));
    }
}

fn table(out: &mut String, grid: &Grid) {
    let _ = writeln!(out, "\n{}\n", escaped(&grid.caption));
    row(out, grid.columns.iter().map(|column| &column.title));
    let rule = |column: &Column| if column.is_number { "---:" } else { "---" };
    let _ = writeln!(out, "|{}|", grid.columns.iter().map(rule).collect::<Vec<_>>().join("|"));
    grid.rows.iter().for_each(|cells| row(out, cells.iter()));
}

/// A simulated number is in italics, besides its mark.
fn row<'a>(out: &mut String, cells: impl Iterator<Item = &'a String>) {
    let text = |cell: &String| if is_simulated(cell) { format!("*{}*", escaped(cell)) } else { escaped(cell) };
    let _ = writeln!(out, "| {} |", cells.map(text).collect::<Vec<_>>().join(" | "));
}

/// A text on one line with Markdown's special characters escaped, except pairs of backticks, which
/// mean code here too.
fn escaped(text: &str) -> String {
    let has_code = text.matches('`').count().is_multiple_of(2);
    let mut is_code = false;
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '`' if has_code => {
                is_code = !is_code;
                out.push('`');
            }
            // A pipe ends a cell also within code (GitHub Flavored Markdown, "Tables (extension)").
            '|' => out.push_str("\\|"),
            '\n' | '\r' => out.push(' '),
            c if is_code => out.push(c),
            '\\' | '*' | '_' | '`' | '[' | ']' | '<' | '>' | '#' | '~' => out.extend(['\\', c]),
            '&' => out.push_str("&amp;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Bars, Plot, Section};

    fn report() -> Report {
        let grid = Grid {
            caption: "Ratios".into(),
            columns: vec![Column::text("case"), Column::number("a|b")],
            rows: vec![vec!["npb_cg <A>".into(), "1.50".into()], vec!["two\nlines".into(), "-".into()]],
        };
        let bars = Bars { name: "the ratios".into(), caption: "Bars".into(), ..Bars::default() };
        let section = Section {
            title: "One".into(),
            paragraphs: vec!["Two * three & four.".into()],
            tables: vec![grid],
            plots: vec![Plot::Bars(bars)],
        };
        Report { title: "T".into(), lead: vec!["L".into()], sections: vec![section] }
    }

    #[test]
    fn a_report_is_headings_paragraphs_tables_and_links() {
        let expected = "\
# T

L

## One

Two \\* three &amp; four.

Ratios

| case | a\\|b |
|---|---:|
| npb\\_cg \\<A\\> | 1.50 |
| two lines | - |

![Bars](<pictures/01-the-ratios.svg>)
";
        assert_eq!(markdown(&report(), Some("pictures")), expected);
    }

    #[test]
    fn text_between_backticks_is_code_and_a_single_backtick_stays() {
        assert_eq!(escaped("by `max_min|1`, _then_"), "by `max_min\\|1`, \\_then\\_");
        assert_eq!(escaped("a ` b"), "a \\` b");
    }

    #[test]
    fn a_simulated_number_is_in_italics_and_keeps_its_mark() {
        let mut out = String::new();
        row(&mut out, ["1.5".to_owned(), crate::report::simulated("1.5")].iter());
        assert_eq!(out, "| 1.5 | *\\~1.5* |\n");
    }

    #[test]
    fn without_picture_files_there_are_no_links() {
        let text = markdown(&report(), None);
        assert!(text.ends_with("--svg): Bars\n") && !text.contains(".svg)"), "{text}");
    }
}
