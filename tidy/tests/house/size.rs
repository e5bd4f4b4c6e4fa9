//! No folder of the house holds more than a quarter of it, and the README stays short.

use std::collections::BTreeMap;

use super::{root, texts};

/// In hundredths of all lines of Rust.
const SHARE_MAX: usize = 25;

/// Words of the README: what a newcomer reads in six minutes.
const README_WORDS_MAX: usize = 1200;

#[test]
fn no_folder_has_more_than_a_quarter_of_the_lines() {
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for text in texts(&["rs"]) {
        let folder = text.path.split('/').next().unwrap().to_owned();
        *lines.entry(folder).or_default() += text.text.lines().count();
    }
    let all: usize = lines.values().sum();
    for (folder, lines) in &lines {
        let share = lines * 100 / all;
        assert!(share <= SHARE_MAX, "{folder} has {lines} of {all} lines, {share} %; split it");
    }
}

#[test]
fn the_readme_is_read_in_minutes() {
    let words = std::fs::read_to_string(root().join("README.md")).unwrap().split_whitespace().count();
    let over = words.saturating_sub(README_WORDS_MAX);
    assert_eq!(over, 0, "README.md has {words} words, {over} too many: move some to docs/");
}
