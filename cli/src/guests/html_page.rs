//! `wideleaf info VM --html FILE`: one page about a VM, complete in itself. It has no script and loads nothing, and its
//! maps are text, in which a letter repeats the meaning of every colour.
//!
//! Names and texts come from guests and other programs: all of them pass through `escaped`, and the page's own policy
//! forbids a browser to run or load anything.

use std::fmt::Write as _;

use wideleaf_control::view::{Explanation, VmView, WindowMap};
use wideleaf_policies::PageSize;
use wideleaf_run::failure::Failure;
use wideleaf_run::text::clean;

use super::tables;
use crate::top::heat_map::{Column, Grid, Row, lay_out};

/// Cells in a row of a map, and rows of a map at most: a guest of 64 GiB has 4096 cells of 8 windows.
const COLUMNS: usize = 64;
const ROWS: usize = 64;

/// Letters beside the colours of a page, for light and dark screens.
const STYLE: &str = "
:root{color-scheme:light dark}
body{font:15px/1.5 sans-serif;margin:2em auto;max-width:62em;padding:0 1em}
pre{font:13px/1.35 monospace;overflow-x:auto}
table{border-collapse:collapse}
td,th{border:1px solid #8888;padding:.25em .6em;text-align:left;vertical-align:top}
td.number{text-align:right}
.map span,.legend b{color:#111;background:#ddd}
.legend b{font:13px monospace;padding:0 .3em;margin-right:.3em}
.legend span.plain{margin-right:1.2em;white-space:nowrap;background:none;color:inherit}
.map .address{color:inherit;background:none;opacity:.6}
.backing .k4,.second .k4,.guest .kb,.state .kr{background:#f2c14e}
.backing .k2,.second .k2,.guest .kh,.state .kl{background:#5aa0e6}
.backing .k1,.second .k1,.guest .kg,.state .km{background:#5fd0c5}
.backing .ks,.state .kk,.state .kw,.state .kh{background:#d58ad6}
.state .kn,.state .ka{background:#bbb}
.backing .kdot,.second .kdot,.state .ke,.guest .ku,.map .knone,.map .kq{background:none;color:inherit;opacity:.6}
.heat .k9,.heat .k8,.heat .k7{background:#e8604c}
.heat .k6,.heat .k5,.heat .k4{background:#f0995a}
.heat .k3,.heat .k2,.heat .k1{background:#f5d08a}
.node .ka,.node .kA{background:#5aa0e6}
.node .kb,.node .kB{background:#f2c14e}
.node .kc,.node .kC{background:#5fd0c5}
.node .kd,.node .kD{background:#d58ad6}
";

/// What a page shows. A part that could not be had is the reason instead.
pub struct Page<'a> {
    /// Description of the VM.
    pub vm: &'a VmView,
    /// Reasons why its windows are not large.
    pub explanation: &'a Result<Explanation, Failure>,
    /// The map of its windows.
    pub windows: &'a Result<WindowMap, Failure>,
}

impl Page<'_> {
    /// The page as HTML.
    pub fn html(&self) -> String {
        let name = escaped(&self.vm.name);
        let mut out = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n\
             <title>{name}: wideleaf info</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        );
        let _ = writeln!(
            out,
            "<h2>Facts</h2>\n<pre>{}</pre>",
            escaped_lines(&tables::vm(self.vm, self.explanation.as_ref().ok()))
        );
        match self.explanation {
            Ok(explanation) => write_explanation(&mut out, explanation),
            Err(why) => write_missing(&mut out, "Why windows are not large", why),
        }
        match self.windows {
            Ok(map) => write_windows(&mut out, map),
            Err(why) => write_missing(&mut out, "Windows", why),
        }
        out.push_str("</body>\n</html>\n");
        out
    }
}

fn write_missing(out: &mut String, title: &str, why: &Failure) {
    let _ = writeln!(out, "<h2>{title}</h2>\n<p>not known: {}</p>", escaped(&why.to_string()));
}

fn write_explanation(out: &mut String, explanation: &Explanation) {
    let line = escaped(&tables::huge_line(explanation));
    let _ = writeln!(out, "<h2>Why windows are not large</h2>\n<p>{line}</p>");
    if !explanation.reasons.is_empty() {
        out.push_str("<table>\n<tr><th>windows</th><th>reason</th><th>meaning and remedy</th></tr>\n");
        for reason in &explanation.reasons {
            let (name, text) = (escaped(&reason.name), escaped(&reason.text));
            let _ =
                writeln!(out, "<tr><td class=\"number\">{}</td><td>{name}</td><td>{text}</td></tr>", reason.windows);
        }
        out.push_str("</table>\n");
    }
    write_notes(out, &explanation.notes);
}

fn write_notes(out: &mut String, notes: &[String]) {
    if !notes.is_empty() {
        let items: String = notes.iter().map(|note| format!("<li>{}</li>\n", escaped(note))).collect();
        let _ = writeln!(out, "<ul>\n{items}</ul>");
    }
}

/// A map for each column of which something is known.
fn write_windows(out: &mut String, map: &WindowMap) {
    let grid = lay_out(map, None, COLUMNS, ROWS);
    let cell = PageSize::Huge2M.bytes().get() * grid.windows_per_cell as u64;
    let _ = writeln!(
        out,
        "<h2>Windows</h2>\n<p>{} windows of 2 MiB, in the order of guest-physical addresses; \
         a letter stands for {}; {}.</p>",
        map.windows(),
        tables::bytes(cell),
        tables::scanned(map.scan_age_s)
    );
    write_notes(out, &map.notes);
    for column in grid.known_columns() {
        write_column(out, &grid, column, map);
    }
    if grid.rows_left_out > 0 {
        let _ = writeln!(out, "<p>{} more stretches of addresses are left out.</p>", grid.rows_left_out);
    }
}

fn write_column(out: &mut String, grid: &Grid, column: Column, map: &WindowMap) {
    let class = class_of_column(column);
    let title = column.title();
    let _ = writeln!(out, "<h3>{}{}</h3>\n<p class=\"legend map {class}\">", title[..1].to_uppercase(), &title[1..]);
    for letter in grid.letters(column) {
        let meaning = escaped(&column.meaning(letter, map));
        let (class, letter) = (class_of_letter(letter), escaped(&letter.to_string()));
        let _ = writeln!(out, "<span class=\"plain\"><b class=\"{class}\">{letter}</b>{meaning}</span>");
    }
    let _ = writeln!(out, "</p>\n<pre class=\"map {class}\">");
    for row in &grid.rows {
        write_row(out, row, column, grid.windows_per_cell, map);
    }
    out.push_str("</pre>\n");
}

/// A row: its address, and a piece for each run of equal letters, with its addresses and meaning for a pointer.
fn write_row(out: &mut String, row: &Row, column: Column, windows_per_cell: usize, map: &WindowMap) {
    let _ = write!(out, "<span class=\"address\">{:#012x} </span>", row.gpa);
    let bytes_per_cell = PageSize::Huge2M.bytes().get() * windows_per_cell as u64;
    let letters: Vec<char> = row.cells.iter().map(|cell| cell.letter(column)).collect();
    let mut gpa = row.gpa;
    for run in letters.chunk_by(|a, b| a == b) {
        let end = gpa.saturating_add(bytes_per_cell * run.len() as u64);
        let meaning = escaped(&column.meaning(run[0], map));
        let text = escaped(&run.iter().collect::<String>());
        let class = class_of_letter(run[0]);
        let _ = write!(out, "<span class=\"{class}\" title=\"{gpa:#x} to {end:#x}: {meaning}\">{text}</span>");
        gpa = end;
    }
    out.push('\n');
}

const fn class_of_column(column: Column) -> &'static str {
    match column {
        Column::Backing => "backing",
        Column::State => "state",
        Column::Why => "why",
        Column::Until => "until",
        Column::SecondLevel => "second",
        Column::Guest => "guest",
        Column::Heat => "heat",
        Column::HeatAge => "age",
        Column::Node => "node",
    }
}

fn class_of_letter(letter: char) -> String {
    match letter {
        '.' => "kdot".to_owned(),
        '-' => "knone".to_owned(),
        letter if letter.is_ascii_alphanumeric() => format!("k{letter}"),
        '+' => "kmix".to_owned(),
        _ => "kq".to_owned(),
    }
}

/// Text of another program as HTML text or as the value of an attribute, on one line.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in clean(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// As [`escaped`], for text with lines of our own.
fn escaped_lines(text: &str) -> String {
    text.lines().map(|line| escaped(line) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_control::map::MapReason;
    use wideleaf_control::view::{Care, Guarantee, RamView, Reason, SavedView, Vmm, WindowRange};

    const HOSTILE: &str = "</title><script>alert('1')</script>\" onload=\"x\u{1b}[2J\n&amp;";

    fn vm(name: &str) -> VmView {
        let ram = RamView {
            name: name.into(),
            gpa: 0,
            bytes: 64 << 30,
            hva: 0,
            kind: name.into(),
            is_guess: false,
            never_huge: Some(name.into()),
        };
        VmView {
            name: name.into(),
            uuid: Some(name.into()),
            pid: 7,
            started_at: 1,
            vmm: Vmm::Wideleaf,
            cgroup: None,
            care: Care::LeftAlone { reason: name.into() },
            policy: Some(name.into()),
            guarantee: Guarantee::BestEffort,
            ram: vec![ram],
            backing: None,
            scan_age_s: None,
            mapping: None,
            page_tables: None,
            numa: None,
            saved: SavedView::default(),
            guest_pages: None,
            work: None,
            notes: vec![name.into()],
        }
    }

    fn explanation(name: &str) -> Explanation {
        let reasons = vec![Reason { name: name.into(), windows: 3, text: name.into() }];
        Explanation {
            name: name.into(),
            windows: Some(4),
            huge: Some(1),
            reasons,
            notes: vec![name.into()],
            ..Explanation::default()
        }
    }

    fn map(name: &str, windows: usize) -> WindowMap {
        let range = WindowRange {
            backing: "24".repeat(windows / 2),
            second_level: "24".repeat(windows / 2),
            heat: "9?".repeat(windows / 2),
            state: "lr".repeat(windows / 2),
            why: "-A".repeat(windows / 2),
            ..WindowRange::default()
        };
        WindowMap {
            name: name.into(),
            ranges: vec![range],
            reasons: vec![MapReason { name: name.into(), text: name.into() }],
            notes: vec![name.into()],
            nodes: vec![0, 1],
            at_s: None,
            scan_age_s: Some(72.4),
        }
    }

    /// Tags of a page, with their attributes.
    fn tags(html: &str) -> Vec<&str> {
        html.split('<').skip(1).map(|rest| rest.split_once('>').map_or(rest, |(tag, _)| tag)).collect()
    }

    #[test]
    fn no_text_of_a_guest_becomes_a_tag_an_attribute_or_a_control_character() {
        let (explanation, windows) = (Ok(explanation(HOSTILE)), Ok(map(HOSTILE, 8)));
        let page = Page { vm: &vm(HOSTILE), explanation: &explanation, windows: &windows }.html();
        let known = [
            "!DOCTYPE", "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "pre", "table", "tr",
            "th", "td", "ul", "li", "span", "b",
        ];
        for tag in tags(&page) {
            let word = tag.trim_start_matches('/').split(' ').next().unwrap_or_default();
            assert!(known.contains(&word), "<{tag}>");
            assert!(!tag.contains("onload=\""), "<{tag}>");
        }
        assert!(page.contains("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot; onload="));
        assert!(page.contains("&amp;amp;"), "what looks escaped is text as well");
        assert!(!page.contains('\u{1b}'), "no character that controls a terminal");
        assert!(page.contains("default-src 'none'"));
        assert!(!page.contains("http:") && !page.contains("https:") && !page.contains("url("), "it loads nothing");
    }

    #[test]
    fn a_guest_of_64_gib_is_a_page_of_a_few_hundred_kib_at_most() {
        let (explanation, windows) = (Ok(explanation("big")), Ok(map("big", 32_768)));
        let page = Page { vm: &vm("big"), explanation: &explanation, windows: &windows }.html();
        assert!(page.len() < 300 << 10, "{} bytes", page.len());
        assert!(page.contains("32768 windows of 2 MiB") && page.contains("a letter stands for 16 MiB"));
        assert!(page.contains(&format!(">{}<", "+".repeat(64))), "cells join windows of both kinds");
    }

    #[test]
    fn a_map_has_a_legend_in_letters_and_a_piece_for_each_run_of_letters() {
        let (explanation, windows) = (Ok(explanation("web")), Ok(map("web", 4)));
        let page = Page { vm: &vm("web"), explanation: &explanation, windows: &windows }.html();
        assert!(page.contains("<b class=\"kr\">r</b>ready</span>"), "{page}");
        assert!(page.contains("a letter stands for 2 MiB; scanned 72 s ago.</p>"), "{page}");
        assert!(page.contains("<b class=\"kA\">A</b>web</span>"));
        assert!(page.contains("<span class=\"kl\" title=\"0x0 to 0x200000: large\">l</span>"));
        assert!(!page.contains("<h3>Guest"), "a column without a known letter is left out");
    }

    #[test]
    fn a_part_that_could_not_be_had_is_its_reason() {
        let why = || Failure::Host("it <hangs>".into());
        let page = Page { vm: &vm("web"), explanation: &Err(why()), windows: &Err(why()) }.html();
        assert_eq!(page.matches("not known: it &lt;hangs&gt;").count(), 2);
    }
}
