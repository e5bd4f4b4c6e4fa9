//! No folder of the house holds more than a quarter of it.

use std::collections::BTreeMap;

use super::texts;

/// In hundredths of all lines of Rust.
const SHARE_MAX: usize = 25;

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
