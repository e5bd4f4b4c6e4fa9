//! A report as one self-contained HTML file: pictures inline, no scripts, no fonts, dark text on
//! white, suitable for printing.

use std::fmt::Write as _;

use crate::report::svg::svg;
use crate::report::{Grid, Plot, Report, Section, is_simulated};

const STYLE: &str = "\
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #999; }
p.lead { font-size: 1.1rem; }
nav ol { columns: 2; }
a { color: #004b78; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top;
  overflow-wrap: break-word; }
thead th { border-bottom: 2px solid #333; vertical-align: bottom; }
th.n, td.n { text-align: right; } td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.sim { font-style: italic; border-left: 3px double #555; text-decoration: underline dotted; }
figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; }
code { font-size: 0.95em; }
@media screen and (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 0.6rem; } nav ol { columns: 1; }
  .wide { border-right: 2px solid #999; }
  table { font-size: 0.7rem; } th, td { padding: 0.15rem 0.3rem; } td.n { white-space: normal; }
}
@media print {
  body { font-size: 10pt; margin: 0; max-width: none; } nav { display: none; }
  @page { margin: 14mm; }
  .wide { overflow: visible; } table { font-size: 7.5pt; } th, td { padding: 0.15rem 0.35rem; }
  thead { display: table-header-group; }
  tr, figure { break-inside: avoid; } h2, caption { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}";

/// The report as HTML.
pub fn html(report: &Report) -> String {
    let title = escaped(&report.title);
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    for paragraph in &report.lead {
        let _ = writeln!(out, "<p class=\"lead\">{}</p>", marked_up(paragraph));
    }
    contents(&mut out, &report.sections);
    for (index, part) in report.sections.iter().enumerate() {
        section(&mut out, index, part);
    }
    out.push_str("</body>\n</html>\n");
    out
}

fn contents(out: &mut String, sections: &[Section]) {
    out.push_str("<nav aria-label=\"Contents\">\n<ol>\n");
    for (index, section) in sections.iter().enumerate() {
        let _ = writeln!(out, "<li><a href=\"#s{index}\">{}</a></li>", escaped(&section.title));
    }
    out.push_str("</ol>\n</nav>\n");
}

fn section(out: &mut String, index: usize, section: &Section) {
    let _ = writeln!(out, "<section id=\"s{index}\">\n<h2>{}</h2>", escaped(&section.title));
    for paragraph in &section.paragraphs {
        let _ = writeln!(out, "<p>{}</p>", marked_up(paragraph));
    }
    section.tables.iter().for_each(|grid| table(out, grid));
    section.plots.iter().for_each(|plot| figure(out, plot));
    out.push_str("</section>\n");
}

fn table(out: &mut String, grid: &Grid) {
    let _ = writeln!(
        out,
        "<div class=\"wide\" role=\"region\" tabindex=\"0\" aria-label=\"{0}\"><table>\n<caption>{0}</caption>",
        escaped(&grid.caption)
    );
    let class = |is_number: bool| if is_number { " class=\"n\"" } else { "" };
    out.push_str("<thead><tr>");
    for column in &grid.columns {
        let _ = write!(out, "<th scope=\"col\"{}>{}</th>", class(column.is_number), escaped(&column.title));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in &grid.rows {
        out.push_str("<tr>");
        for (cell, column) in row.iter().zip(&grid.columns) {
            let _ = write!(out, "<td{}>{}</td>", class_of_cell(cell, column.is_number), marked_up(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
}

/// Class of a cell: a simulated number is in italics, underlined and behind a double line, besides its mark.
fn class_of_cell(cell: &str, is_number: bool) -> &'static str {
    match (is_number, is_simulated(cell)) {
        (true, true) => " class=\"n sim\"",
        (true, false) => " class=\"n\"",
        (false, true) => " class=\"sim\"",
        (false, false) => "",
    }
}

/// The picture itself shows the caption. The label has it too, for screen readers.
fn figure(out: &mut String, plot: &Plot) {
    let _ = writeln!(out, "<figure role=\"img\" aria-label=\"{}\">\n{}</figure>", escaped(plot.caption()), svg(plot));
}

/// A text with the parts between backticks as code.
fn marked_up(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    // A single backtick is an ordinary character.
    if parts.len().is_multiple_of(2) {
        return escaped(text);
    }
    let part = |(index, part): (usize, &&str)| match index % 2 {
        0 => escaped(part),
        _ => format!("<code>{}</code>", escaped(part)),
    };
    parts.iter().enumerate().map(part).collect()
}

/// A text with the special characters of HTML escaped, also for attributes (HTML Standard, 13.3 "Escaping a string").
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Bars, Column};

    fn report() -> Report {
        let grid = Grid {
            caption: "C & D".into(),
            columns: vec![Column::text("case"), Column::number("n")],
            rows: vec![vec!["<script>alert(\"x\")</script>".into(), "1".into()]],
        };
        let bars = Bars { name: "b".into(), caption: "a < b".into(), ..Bars::default() };
        let part =
            Section { title: "S & T".into(), tables: vec![grid], plots: vec![Plot::Bars(bars)], ..Section::default() };
        Report { title: "<T>".into(), lead: vec!["first\u{1b}".into()], sections: vec![part] }
    }

    #[test]
    fn text_is_escaped_and_numbers_are_aligned_to_the_right() {
        let html = html(&report());
        let row = "<tr><td>&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;</td><td class=\"n\">1</td></tr>";
        assert!(html.contains(row) && !html.contains("<script"), "{html}");
        assert!(html.contains("<a href=\"#s0\">S &amp; T</a>") && html.contains("<section id=\"s0\">"), "{html}");
        assert!(!html.contains('\u{1b}'));
    }

    #[test]
    fn text_between_backticks_is_code_and_a_single_backtick_stays() {
        assert_eq!(marked_up("by `auto <1>`, then"), "by <code>auto &lt;1&gt;</code>, then");
        assert_eq!(marked_up("a ` b"), "a ` b");
    }

    #[test]
    fn a_simulated_number_differs_from_a_measured_one_in_more_than_colour() {
        let mut report = report();
        report.sections[0].tables[0].rows[0][1] = crate::report::simulated("1");
        let html = html(&report);
        assert!(
            html.contains("<td class=\"n sim\">~1</td>") && html.contains("td.sim { font-style: italic;"),
            "{html}"
        );
    }

    #[test]
    fn a_table_that_is_too_wide_scrolls_on_its_own() {
        let html = html(&report());
        assert!(html.contains(".wide { overflow-x: auto;"), "{html}");
        assert!(
            html.contains("<div class=\"wide\" role=\"region\" tabindex=\"0\" aria-label=\"C &amp; D\"><table>"),
            "{html}"
        );
    }

    #[test]
    fn the_file_is_self_contained() {
        let html = html(&report());
        for word in ["src=", "<link", "<script", "@import", "url(", "href=\"http"] {
            assert!(!html.contains(word), "{word} in {html}");
        }
        assert_eq!(html.matches("<svg ").count(), 1);
    }

    #[test]
    fn the_lead_comes_before_contents_and_sections() {
        let html = html(&report());
        let at = |word: &str| html.find(word).expect("the word is in the file");
        assert!(at("class=\"lead\"") < at("<nav") && at("<nav") < at("<section"));
    }
}
