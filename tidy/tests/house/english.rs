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
    /// "Of others": external guests, other programs, another party's text.
    of_others: usize,
    /// "Is none", which asks for the noun again: "there is no page", "the file is missing".
    is_none: usize,
    /// American spelling. What is left are titles and names of other projects.
    american: usize,
    /// Doc comments of one or two words.
    short_docs: usize,
    /// Lines of more than 120 columns.
    long_lines: usize,
}

/// Extensions of the files that are read; an empty one: a script without.
const EXTENSIONS: [&str; 16] =
    ["rs", "md", "toml", "sh", "s", "S", "", "yaml", "yml", "tpl", "j2", "go", "c", "ld", "service", "jq"];

const HEADLESS: &str = "who|whoever|whom|whose|nobody|somebody|anybody|everybody";

const IDIOMS: &str = "so many|so much|in vain|told apart|by the dice|can not|that (?:is|are) none|guests of others";

/// Words of American spelling, without those that are names in libraries that we call (color, center, serialize) or in
/// Kubernetes (authorization).
const AMERICAN: &str = "behaviors?|behavioral|neighbor(?:s|ing|hood)?|favor(?:s|ed|ing|ite|able)?|honor(?:s|ed|ing)?\
    |colored|coloring|gray|catalogs?|defense|fulfills?|skeptical|gotten|(?:analy|paraly)z(?:e|es|ed|er|ers|ing)\
    |(?:label|model|travel|signal|level|tunnel)(?:ed|ing)|canceling\
    |(?:un|re|de)?(?:capital|categor|character|custom|emphas|equal|general|initial|item|local|maxim|memor|minim|normal\
    |optim|organ|parallel|penal|priorit|random|real|recogn|special|stabil|standard|summar|synchron|visual)\
    iz(?:e|es|ed|er|ers|ing|ation|ations)";

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

/// Finds these words, also where they stand between underscores in a name of Rust.
fn word(words: &str) -> Finder {
    matches(&format!("(?i)(?:\\b|_)(?:{})(?:\\b|_)", words.replace(' ', "[ _]")))
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
    let texts = texts(&EXTENSIONS);
    // `is_none` alone is a method of `Option`.
    let is_none = matches(r"\bis none\b|_is_none\b");
    let finders: [(&str, usize, Finder); 7] = [
        ("headless", limits.headless, word(HEADLESS)),
        ("idioms", limits.idioms, word(IDIOMS)),
        ("of_others", limits.of_others, word("of others")),
        ("is_none", limits.is_none, is_none),
        ("american", limits.american, word(AMERICAN)),
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

#[test]
fn words_are_found_in_sentences_and_in_names() {
    let found = |finder: Finder, text: &str| finder(&Text { path: "a.rs".to_owned(), text: text.to_owned() }).len();
    assert_eq!(found(word(IDIOMS), "mod guests_of_others; // told apart, perhaps_in_vain\nfn cannot() {}"), 3);
    assert_eq!(found(word(HEADLESS), "fn a_page_that_nobody_has() {}\n// whole\n"), 1);
    assert_eq!(found(word(AMERICAN), "fn colored_text() {} // uninitialized Neighbors, optimization"), 4);
    assert_eq!(found(word(AMERICAN), "color, HPos::Center, serialize, utilization, unmodelled favours, realised"), 0);
}
