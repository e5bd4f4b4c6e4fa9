//! Habits that slow a reader down, counted in code, comments, messages and documents. `limits.toml`
//! has the number of each that is left: it only goes down. CONTRIBUTING.md has the rules and what to write instead.

use std::fmt::Write as _;

use regex::Regex;
use serde::Deserialize;

use super::{Text, root, texts};

/// Columns of a line, in characters: the width that rustfmt keeps for code.
const COLUMNS_MAX: usize = 120;

/// What is left of each habit.
#[derive(Debug, Deserialize, PartialEq, Eq)]
struct Limits {
    /// A relative pronoun without a noun, or a person where a program is meant: who, whoever, nobody,
    /// somebody and their kin.
    headless: usize,
    /// Idioms with a plain word beside them: "so many", "in vain", "told apart".
    idioms: usize,
    /// Doc comments of one or two words.
    short_docs: usize,
    /// Lines of more than 120 columns.
    long_lines: usize,
}

/// A habit in a line.
type Finder = Box<dyn Fn(&Text) -> Vec<(usize, String)>>;

/// Files that quote the habits in order to name them.
fn is_about_habits(text: &Text) -> bool {
    text.path.starts_with("tidy/") || text.path == "CONTRIBUTING.md"
}

fn matches(pattern: &str) -> Finder {
    let pattern = Regex::new(pattern).unwrap();
    Box::new(move |text| {
        let lines = text.text.lines().enumerate();
        let found = |(at, line)| pattern.find_iter(line).map(move |found| (at + 1, found.as_str().to_owned()));
        if is_about_habits(text) { Vec::new() } else { lines.flat_map(found).collect() }
    })
}

/// Doc comments (`///`, `//!`) of one line with one or two words, other than headings and names of code.
fn short_docs(text: &Text) -> Vec<(usize, String)> {
    let is_doc = |line: &str| line.trim_start().starts_with("///") || line.trim_start().starts_with("//!");
    let lines: Vec<&str> = text.text.lines().collect();
    let is_alone = |at: usize| !(at > 0 && is_doc(lines[at - 1]) || lines.get(at + 1).is_some_and(|next| is_doc(next)));
    let is_short = |line: &str| {
        let words = line.trim_start().trim_start_matches(['/', '!']).trim();
        (1..=2).contains(&words.split_whitespace().count()) && !words.starts_with('#') && !words.contains('`')
    };
    let short = lines.iter().enumerate().filter(|(at, line)| is_doc(line) && is_alone(*at) && is_short(line));
    if text.path.ends_with(".rs") {
        short.map(|(at, line)| (at + 1, line.trim().to_owned())).collect()
    } else {
        Vec::new()
    }
}

/// Lines of more than 120 columns, but for rows of tables in Markdown and a link that fills a line by itself.
fn long_lines(text: &Text) -> Vec<(usize, String)> {
    let is_markdown = text.path.ends_with(".md");
    // A row of a table in a doc comment is Markdown as well.
    let is_row = |line: &str| line.starts_with("//! |") || line.trim_start().starts_with("/// |");
    let is_excused = |line: &str| is_row(line) || is_markdown && (line.starts_with('|') || !line.trim().contains(' '));
    let lines = text.text.lines().enumerate();
    let long = lines.filter(|(_, line)| line.chars().count() > COLUMNS_MAX && !is_excused(line));
    long.map(|(at, line)| (at + 1, line.chars().take(60).collect())).collect()
}

/// What is found in all files, and a line for each place.
fn count(find: &Finder, texts: &[Text]) -> (usize, String) {
    let mut places = String::new();
    let mut number = 0;
    for text in texts {
        for (line, what) in find(text) {
            number += 1;
            let _ = writeln!(places, "{}:{line}: {what}", text.path);
        }
    }
    (number, places)
}

#[test]
fn no_habit_grows_and_what_is_mended_stays_mended() {
    let path = root().join("tidy/limits.toml");
    let limits: Limits = toml::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let texts = texts(&["rs", "md", "toml", "sh", "s", "S", ""]);
    // In a name of Rust the words stand between underscores.
    let word = |words: &str| matches(&format!(r"(?i)(?:\b|_)(?:{words})(?:\b|_)"));
    let finders: [(&str, usize, Finder); 4] = [
        ("headless", limits.headless, word("who|whoever|whom|whose|nobody|somebody|anybody|everybody")),
        (
            "idioms",
            limits.idioms,
            word("so many|so much|in vain|told apart|by the dice|can not|that is none|that are none|guests of others"),
        ),
        ("short_docs", limits.short_docs, Box::new(short_docs)),
        ("long_lines", limits.long_lines, Box::new(long_lines)),
    ];
    let mut wrong = String::new();
    for (name, limit, find) in finders {
        let (number, places) = count(&find, &texts);
        if number > limit {
            let _ =
                writeln!(wrong, "{name}: {number}, and the limit is {limit}; mend the new ones among these:\n{places}");
        } else if number < limit {
            let _ = writeln!(
                wrong,
                "{name}: {number} are left, fewer than the limit: write {name} = {number} into {}",
                path.display()
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
