//! The tables at the head of `docs/decisions.md` have each note once, in one area.

use std::collections::BTreeMap;

use regex::Regex;

use super::root;

/// Row of a note in the table of its area, from the note's heading. The anchor is that of GitHub.
fn row(date: &str, title: &str) -> String {
    let heading = format!("{date} {title}").to_lowercase().replace(' ', "-");
    let anchor: String = heading.chars().filter(|c| c.is_alphanumeric() || ['-', '_'].contains(c)).collect();
    format!("| {date} | [{title}](#{anchor}) |")
}

/// Rows that are missing, and rows to remove: those of no note, and all but one of a note.
fn differences(document: &str) -> (Vec<String>, Vec<String>) {
    let heading = Regex::new(r"(?m)^## (\d{4}-\d\d-\d\d) (.+)$").unwrap();
    let notes = heading.captures_iter(document).map(|note| row(&note[1], &note[2]));
    let mut missing: BTreeMap<String, usize> = BTreeMap::new();
    notes.for_each(|row| *missing.entry(row).or_default() += 1);
    let is_row = Regex::new(r"^\| \d{4}-\d\d-\d\d \| \[").unwrap();
    let mut left_over = Vec::new();
    for row in document.lines().filter(|line| is_row.is_match(line)) {
        match missing.get_mut(row) {
            Some(notes) if *notes > 0 => *notes -= 1,
            _ => left_over.push(row.to_owned()),
        }
    }
    (missing.into_iter().filter(|(_, notes)| *notes > 0).map(|(row, _)| row).collect(), left_over)
}

#[test]
fn each_note_is_in_the_table_of_one_area() {
    let document = std::fs::read_to_string(root().join("docs/decisions.md")).unwrap();
    let (missing, left_over) = differences(&document);
    assert!(
        missing.is_empty() && left_over.is_empty(),
        "docs/decisions.md: add these rows to the tables of their areas:\n{}\nand remove these:\n{}",
        missing.join("\n"),
        left_over.join("\n")
    );
}

#[test]
fn a_note_without_a_row_and_a_row_without_a_note_are_found() {
    let row = "| 2026-11-21 | [`auto` is it, no?](#2026-11-21-auto-is-it-no) |";
    let note = "## 2026-11-21 `auto` is it, no?\n";
    let none: Vec<String> = Vec::new();
    assert_eq!(differences(&format!("{row}\n{note}")), (none.clone(), none.clone()));
    assert_eq!(differences(note), (vec![row.to_owned()], none.clone()));
    assert_eq!(differences(&format!("{row}\n{row}\n{note}")), (none, vec![row.to_owned()]));
}
